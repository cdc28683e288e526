"""Write to standard output and standard error, for people and for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SCHEMA = 1
WIDE = 1000
"""Columns of output that is no terminal: lines are not broken there."""


def out(text: str) -> None:
    """Write a result to standard output; a reader that has gone away is no error."""
    try:
        click.echo(text, nl=False)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def emit(command: str, document: Mapping[str, Any]) -> None:
    """Write the one JSON document of a command."""
    whole = {"schema": SCHEMA, "command": command, **document}
    out(json.dumps(_plain(whole), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it: no tuples, and no numbers that are none."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in {float("inf"), float("-inf")}):
        return str(value)
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def note(text: str) -> None:
    """Tell the person something that is not the result."""
    click.echo(text, err=True)


def warn(text: str) -> None:
    """Tell the person of something that is not as it should be."""
    click.echo(f"warning: {text}", err=True)


def show(*parts: Any) -> None:
    """Write tables or lines to standard output, coloured only on a terminal."""
    from rich.console import Console

    probe = Console()
    width = None if probe.is_terminal or "COLUMNS" in os.environ else WIDE
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, markup=False, soft_wrap=isinstance(part, str))
    out(_trimmed(captured.get()))


def _trimmed(text: str) -> str:
    return "".join(line.rstrip(" ") + "\n" for line in text.splitlines())


def progress_console() -> Console:
    """Return the console of progress bars, on standard error."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = True
) -> Table:
    """Build a table; a column whose cells look like numbers is aligned right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    built = Table(title=Text(title, "bold"), title_justify="left", box=box.SIMPLE_HEAD)
    for index, name in enumerate(columns):
        right = numbers and bool(rows) and all(_is_number(row[index]) for row in rows)
        built.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        built.add_row(*(Text(cell) for cell in row))
    return built


def _is_number(cell: str) -> bool:
    return not cell or cell == "-" or cell[0].isdigit()


def number(value: float | None, digits: int = 4, unit: str = "") -> str:
    """Write a number for a table; ``-`` where there is none."""
    return "-" if value is None else f"{value:.{digits}g}{unit}"


def short_names(texts: Sequence[str]) -> tuple[str, list[str]]:
    """Return the words that all texts share, and each text without them."""
    words = [text.split() for text in texts]
    if len(words) < 2:
        return "", list(texts)
    same = [word for word in words[0] if all(word in others for others in words)]
    return " ".join(same), [" ".join(w for w in own if w not in same) for own in words]


def aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return one line a row, the second words below each other."""
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{width}}  {value}" for name, value in rows]
