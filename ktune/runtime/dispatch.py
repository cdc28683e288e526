"""From a problem to a loaded kernel: look up, render, load, and remember."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ktune import settings
from ktune.device import Device
from ktune.errors import CaptureError, CompileError, KtuneError, StrictError, TableError
from ktune.operations import operation
from ktune.problem import Problem, Scalar
from ktune.resources import data
from ktune.runtime.invariance import is_batch_invariant
from ktune.runtime.where import capturing, device_at, on
from ktune.table.entry import Entry
from ktune.table.match import Match, Matcher
from ktune.table.store import read_table
from ktune.table.table import Table
from ktune.variant import Variant

MAX_CALLS = 8192
"""Call signatures remembered; beyond, the oldest is looked up anew."""

_log = logging.getLogger("ktune.runtime")

Launch = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Bound:
    """A kernel that is loaded for a problem on a device.

    Attributes:
        problem: what it computes.
        device: where.
        match: the variant, and how it was found.
        launch: the rendered module's ``launch``.
        options: launch options, passed by keyword.
    """

    problem: Problem
    device: Device
    match: Match
    launch: Launch
    options: dict[str, int]

    def __call__(self, *arguments: Any) -> None:
        """Launch with the operation's ``arguments``; writes the outputs among them."""
        self.launch(*arguments, **self.options)


class Dispatcher:
    """The tables, and every kernel loaded so far; safe to share between threads.

    Tables are read at the first call: the user's (``KTUNE_TABLE_PATH``), then the shipped ones.
    A damaged table counts as empty, with one warning.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._matcher: Matcher | None = None
        self._paths: list[Path] = []
        self._calls: dict[Hashable, Bound] = {}
        self._bound: dict[tuple[Problem, tuple[int, bool]], Bound] = {}
        self._sources: dict[Hashable, Any] = {}
        self._warned = False
        self._chosen: Path | None = None
        self.strict = False

    def call(
        self, key: Hashable, problem: Callable[[], Problem], index: int, arguments: tuple[Any, ...]
    ) -> None:
        """Launch the kernel of a problem.

        Args:
            key: all that Triton specialises a kernel on: operation, shapes, strides, dtypes,
                pointer alignment, flags. Equal keys never compile twice.
            problem: makes the problem; called for a new key only.
            index: of the GPU.
            arguments: positional arguments of ``launch``.

        Raises:
            CaptureError: the key is new and a CUDA graph is being captured.
            CompileError: the kernel does not compile or start on this GPU.
            StrictError: no tuned entry matches and ``KTUNE_STRICT=1``.
        """
        remembered = (key, index, is_batch_invariant())
        bound = self._calls.get(remembered)
        with on(index):
            if bound is not None:
                bound(*arguments)
                return
            made = problem()
            _refuse_capture(made, index)
            bound = self.kernel(made, index)
            self._first_launch(bound, arguments)
        self._remember(self._calls, remembered, bound)

    def kernel(self, problem: Problem, index: int) -> Bound:
        """Return the loaded kernel of a problem on a GPU, looking it up the first time.

        Raises:
            CaptureError: it is not loaded and a CUDA graph is being captured.
            StrictError: no tuned entry matches and ``KTUNE_STRICT=1``.
            TemplateError: the variant does not render.
        """
        key = (problem, (index, is_batch_invariant()))
        found = self._bound.get(key)
        if found is None:
            _refuse_capture(problem, index)
            with self._lock:
                found = self._bound.get(key) or self._bind(problem, index)
                self._remember(self._bound, key, found)
        return found

    def match(self, problem: Problem, device: Device) -> Match:
        """Return the variant for a problem, and how it was found; loads nothing.

        Within ``ktune.batch_invariant()`` the problem's batch has no say.
        """
        with self._lock:
            return self._tables().match(device, problem, is_batch_invariant())

    def path(self, match: Match) -> Path | None:
        """Return the table file that a match came from; None for a default."""
        return None if match.table is None else self._paths[match.table]

    def use(self, table: Path | None, strict: bool) -> None:
        """Read the tables anew: this one, or the user's, before those that come with ktune.

        Args:
            table: a file that must be sound; None for the user's tables.
            strict: raise StrictError where no entry matches.

        Raises:
            TableError: the file cannot be read; nothing is changed then.
        """
        if table is not None:
            read_table(table)
        with self._lock:
            self._chosen, self.strict = table, strict
            self.reload()

    def entries(self) -> list[Entry]:
        """Return the entries of all tables, the first table's first."""
        with self._lock:
            return [entry for table in self._tables().tables for entry in table]

    def reload(self) -> None:
        """Forget tables and kernels; the next call reads the tables again."""
        with self._lock:
            self._matcher = None
            self._calls.clear()
            self._bound.clear()
            self._sources.clear()

    def _bind(self, problem: Problem, index: int) -> Bound:
        from ktune.codegen import load_module

        device = device_at(index)
        match = self.match(problem, device)
        if match.kind in {"nearest", "default"}:
            self._report_missing(match, device, problem)
        module = load_module(self._source(match.variant, problem))
        return Bound(problem, device, match, module.launch, match.variant.options)

    def _report_missing(self, match: Match, device: Device, problem: Problem) -> None:
        """Raise in strict mode; else warn, once in a process."""
        message = match.message(device, problem)
        if self.strict or settings.strict():
            how = "ktune.load(strict=True)" if self.strict else f"{settings.STRICT}=1"
            raise StrictError(f"{message} ({how} forbids all but tuned sizes)")
        level = logging.INFO if self._warned else logging.WARNING
        self._warned = True
        used = "the winner of the nearest" if match.kind == "nearest" else "its default variant"
        _log.log(level, "%s. Until then ktune uses %s", message, used)

    def _source(self, variant: Variant, problem: Problem) -> Any:
        """Return the rendered source; problems of equal structure share it."""
        from ktune.codegen import render

        key = (variant, tuple(sorted(_structure(problem).items())))
        if key not in self._sources:
            self._sources[key] = render(variant, problem)
        return self._sources[key]

    def _source_id(self, variant: Variant, problem: Problem) -> str:
        """Return the id of what a table's entry renders to today."""
        try:
            complete = operation(problem.op).problem(dict(problem.fields))
            return str(self._source(variant, complete).id)
        except (LookupError, TypeError, ValueError) as error:
            raise TableError(f"cannot render {variant.text}: {error}") from error

    def _tables(self) -> Matcher:
        if self._matcher is None:
            shipped = sorted(data("tables").glob("*.json"))
            own = settings.user_table_paths() if self._chosen is None else [self._chosen]
            found = [path for path in (*own, *shipped) if os.path.lexists(path)]
            self._paths = found
            self._matcher = Matcher([_read(path) for path in found], self._source_id)
        return self._matcher

    def _first_launch(self, bound: Bound, arguments: tuple[Any, ...]) -> None:
        """Launch a kernel that may have to be compiled first, and say so if that fails."""
        try:
            bound(*arguments)
        except (KtuneError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:
            raise CompileError(self._broken(bound, error)) from error

    def _broken(self, bound: Bound, error: Exception) -> str:
        lines = str(error).strip().splitlines() or [""]
        path, problem = self.path(bound.match), bound.problem
        origin = f"{bound.match.kind} entry of {path}" if path else "default variant"
        return (
            f"{problem.text} on {bound.device.key}: the kernel does not compile or start: "
            f"{type(error).__name__}: {lines[0][:200]}. Variant: {bound.match.variant.text} "
            f"({origin}). Find one that does: "
            f'ktune search {problem.op} --problem "{problem.fields_text}"; '
            f"or compute with PyTorch: {settings.DISABLE}=1"
        )

    def _remember(self, memory: dict[Any, Bound], key: Hashable, bound: Bound) -> None:
        with self._lock:
            while len(memory) >= MAX_CALLS:
                del memory[next(iter(memory))]
            memory[key] = bound


@cache
def dispatcher() -> Dispatcher:
    """Return the process's one dispatcher."""
    return Dispatcher()


def _structure(problem: Problem) -> dict[str, Scalar]:
    return operation(problem.op).structure(problem)


def _read(path: Path) -> Table:
    try:
        return read_table(path)
    except TableError as error:
        _log.warning("%s. This table is not used", error)
        return Table()


def _refuse_capture(problem: Problem, index: int) -> None:
    if capturing(index):
        raise CaptureError(
            f"{problem.text} is called for the first time while a CUDA graph is being captured, "
            "where nothing may be compiled. Call it once with these shapes and strides before "
            "the capture"
        )
