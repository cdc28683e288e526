"""The command line: one lazily imported module per command."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Any

import click

from ktune import __version__
from ktune.cli.options import debugging, verbose_option
from ktune.errors import KtuneError

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM."""

COMMANDS = {
    "search": "Find the fastest right variant of each problem; fills the table.",
    "worker": "Help searches of other machines, through a shared storage.",
    "replay": "Compare samplers on a recording; needs no GPU.",
    "compare": "Compare rescale strategies: time, rescales, error.",
    "render": "Print the Python module of a variant.",
    "check": "Validate search spaces and templates.",
    "table": "Look after dispatch tables: show, list, merge, diff.",
    "recording": "Look after recordings: show, export to T4, import from it.",
    "explain": "Say which variant a problem gets, and why.",
    "bench": "Time winners against what users have today.",
    "doctor": "Say what this machine is and what ktune will use.",
}


_told_to_stop = False


def check_interrupt() -> None:
    """Raise KeyboardInterrupt if it was raised before and got lost in a garbage collection."""
    if _told_to_stop:
        raise KeyboardInterrupt


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, and whose errors are short."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of a user's way through them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command: the function of the same name in the module of the same name."""
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"ktune.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command, or say which one was probably meant."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            raise click.exceptions.NoSuchCommand(name, possibilities=COMMANDS, ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an error made on purpose becomes one line and its exit code."""
        try:
            return super().invoke(ctx)
        except KtuneError as error:
            if debugging():
                traceback.print_exc()
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ktune")
@verbose_option
def cli() -> None:
    """Tune online-softmax GPU kernels: render, prove, search, and use the winners.

    Start with `ktune doctor` and `ktune search softmax`. Results go to standard output,
    everything else to standard error; --json prints one document instead of tables.
    """


def main() -> None:
    """Run the command line; the entry point of the ``ktune`` script."""
    _open_standard_streams()
    # The sampler's matrices are small, and threads for them wait for cores that compile.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        cli(prog_name="ktune")
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ask the command to stop; leave at once if asked again."""
    global _told_to_stop
    _told_to_stop = True
    for again in (signal.SIGINT, signal.SIGTERM):
        signal.signal(again, _leave)
    raise KeyboardInterrupt


def _leave(number: int, frame: FrameType | None) -> None:
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")  # a progress bar had hidden the cursor
    os._exit(INTERRUPTED)


def _open_standard_streams() -> None:
    """Open /dev/null in place of closed standard streams, lest a file takes their number."""
    for number, mode in ((0, "r"), (1, "w"), (2, "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            stream = os.fdopen(number, mode, closefd=False)
            setattr(sys, ("stdin", "stdout", "stderr")[number], stream)
