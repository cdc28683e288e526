"""Find the files that ship with ktune: templates, search spaces, recordings, tables."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def shipped(folder: str) -> Path:
    """Return the shipped ``templates`` or ``search_spaces`` folder.

    A wheel holds both inside the package. A checkout keeps them beside the package, and an
    editable install imports ktune from that checkout.

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    package = Path(str(files("ktune")))
    installed = package / folder
    if installed.is_dir():
        return installed
    checkout = package.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / folder).is_dir():
        return checkout / folder
    raise FileNotFoundError(
        f"ktune has no {folder!r} folder: looked in {installed} and {checkout / folder}. "
        "Reinstall ktune."
    )


def data(kind: str) -> Path:
    """Return a folder of data inside the package: ``recordings`` or ``tables``."""
    return Path(str(files("ktune"))) / "data" / kind
