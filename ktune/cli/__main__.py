"""Run the command line as ``python -m ktune.cli``."""

from ktune.cli import main

main()
