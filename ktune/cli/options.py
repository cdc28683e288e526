"""Options and arguments that several commands share, and how their values are read."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ktune.device import CPU
from ktune.errors import KtuneError, NoDeviceError, UsageError

if TYPE_CHECKING:
    from ktune.device import Device
    from ktune.problem import Problem, Scalar
    from ktune.space import Space

Command = TypeVar("Command", bound=Callable[..., Any])
LOG = "KTUNE_LOG"
DEFAULT_ARCH = "sm_90"

_log = logging.getLogger("ktune")


class _StderrHandler(logging.Handler):
    """Writes log lines to standard error as it is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"{record.levelname.lower()}: {record.getMessage()}", err=True)


def _verbose(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if not any(isinstance(handler, _StderrHandler) for handler in _log.handlers):
        _log.addHandler(_StderrHandler())
    asked = os.environ.get(LOG, "").upper()
    if value:
        _log.setLevel(logging.DEBUG)
    elif ctx.parent is None:
        _log.setLevel(asked if asked in {"INFO", "DEBUG"} else logging.WARNING)


def debugging() -> bool:
    """Return whether tracebacks and debug messages were asked for."""
    return _log.isEnabledFor(logging.DEBUG)


verbose_option = click.option(
    "-v",
    "--verbose",
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_verbose,
    help="Show debug messages, and tracebacks of errors.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of tables."
)
problem_option = click.option(
    "--problem",
    "--problems",
    "problem",
    metavar="TEXT",
    help='A problem, for example "m=4096 n=50257", or the first of a named set.',
)


def common(function: Command) -> Command:
    """Add the options of every command."""
    return json_option(verbose_option(function))


def meant(word: str, known: Sequence[str]) -> str:
    """Return ``; did you mean 'x'?``, or nothing if nothing is near."""
    near = get_close_matches(word, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def parse_device(text: str) -> int:
    """Return the index in ``cuda:0``, ``cuda`` or ``0``.

    Raises:
        UsageError: the text names no GPU.
    """
    digits = text.removeprefix("cuda").removeprefix(":") or "0"
    if not digits.isdecimal() or text.endswith(":"):
        raise UsageError(f"the device {text!r} is not understood; write cuda:0")
    return int(digits)


def parse_devices(text: str | None) -> tuple[str, ...]:
    """Return the devices in ``cuda:0,cuda:1``; every GPU for ``all``; ``cpu``; none for None.

    Raises:
        NoDeviceError: all were asked for and there is none.
        UsageError: the text names no device.
    """
    if text is None:
        return ()
    if text == "all":
        import torch

        count = torch.cuda.device_count()
        if not count:
            raise NoDeviceError("--devices all: PyTorch sees no GPU on this machine")
        return tuple(f"cuda:{index}" for index in range(count))
    if text == CPU:
        return (CPU,)
    if not text.strip():
        raise UsageError("--devices is empty; write cuda:0, cuda:0,cuda:1, all or cpu")
    return tuple(dict.fromkeys(f"cuda:{parse_device(part)}" for part in text.split(",")))


def parse_settings(words: Sequence[str]) -> dict[str, Scalar]:
    """Return the settings in words like ``rescale=always`` or ``"block_m=64 num_warps=4"``."""
    from ktune.problem import parse_fields

    return parse_fields([part for word in words for part in word.split()])


def find_space(name: str) -> Space:
    """Return a space by operation name or YAML path."""
    from ktune.space import load_space

    return load_space(name)


def shipped_spaces() -> list[str]:
    """Return the names of the spaces that come with ktune."""
    from ktune.resources import shipped

    return sorted(path.stem for path in shipped("search_spaces").glob("*.yaml"))


def one_problem(space: Space, text: str | None) -> Problem:
    """Return a problem by text, or the first of a named set (``default`` if none is named)."""
    return space.problem_set(text or "default")[0]


def render_device(arch: str | None) -> Device:
    """Return the stand-in of an architecture; by default this machine's GPU, else sm_90."""
    from ktune.device import compile_target, cuda_available, device_of

    if arch is None and cuda_available():
        return device_of(0)
    return compile_target(arch or DEFAULT_ARCH)


def table_files(paths: Sequence[str | Path] = ()) -> list[Path]:
    """Return table files: those given, else the user's and the shipped ones that exist."""
    from ktune.resources import data
    from ktune.settings import user_table_paths

    if paths:
        return [Path(path).expanduser() for path in paths]
    known = [*user_table_paths(), *sorted(data("tables").glob("*.json"))]
    return [path for path in known if os.path.lexists(path)]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def short_error(error: Exception) -> str:
    """Return an error as one line; its type too, if it was not made on purpose."""
    text = first_line(error)
    return text if isinstance(error, KtuneError) else f"{type(error).__name__}: {text}"
