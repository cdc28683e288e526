"""Load tuned kernels up front, so that no call has to look up, import or compile anything."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ktune.device import Device
from ktune.errors import NoDeviceError, StrictError
from ktune.operations import operation, parse_problem
from ktune.problem import Problem
from ktune.runtime.dispatch import Bound, dispatcher
from ktune.runtime.where import STAND_IN, current_index, device_at, on

KERNEL_MODULES = "ktune_kernel_"
"""How the names of rendered modules begin."""

_log = logging.getLogger("ktune.runtime")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What ``ktune.load`` has made ready.

    Attributes:
        device: on which.
        problems: whose kernels are loaded.
        variants: how many different kernels' sources stand for them.
        compiled: kernels that were compiled, or read from Triton's cache.
        seconds: it took.
        failed: why a problem's kernel does not compile, by problem text.
    """

    device: Device
    problems: tuple[str, ...]
    variants: int
    compiled: int
    seconds: float
    failed: dict[str, str]


def load(
    table: str | os.PathLike[str] | None = None,
    *,
    warm: bool | Sequence[str | Problem] = True,
    strict: bool = False,
    device: int | None = None,
) -> Loaded:
    """Read a dispatch table, and make its kernels ready before the first call.

    Without it, ktune reads the tables at the first call, and compiles a kernel at its first
    launch. Here everything is imported and compiled at once, by as many threads as there are
    cores (Triton's ``AsyncCompileMode``), with progress on a terminal's standard error. Later
    calls on the problems named compile nothing, if their tensors lie in memory as the problem's
    layout says, with addresses divisible by 16; and no call ever searches.

    Args:
        table: a table file, in place of the user's (``KTUNE_TABLE_PATH``); the tables that come
            with ktune are asked after it. None: the user's.
        warm: True for every problem the tables hold for this device; a list of problems, as
            ``"softmax m=4096 n=50257"``; or False to compile nothing yet.
        strict: from now on, in this process, a call that no tuned entry matches, or whose kernel
            is not compiled yet, raises StrictError.
        device: index of the GPU; the current one by default.

    Returns:
        What is ready. A kernel that does not compile is named in ``failed``, with one warning.

    Raises:
        TableError: the table cannot be read.
        ProblemError: a text is no problem.
        NoDeviceError: there is no GPU to load kernels on.
        StrictError: ``strict``, and a problem has no entry or its kernel does not compile.

    Example:
        >>> import ktune
        >>> ktune.load("table.json", warm=["softmax m=4096 n=4096"], strict=True)  # doctest: +SKIP
    """
    started = time.perf_counter()
    index = current_index() if device is None else device
    if index is None:
        raise NoDeviceError(
            "ktune.load: this machine has no GPU to load kernels on; ktune computes CPU tensors "
            "with PyTorch, which needs no loading"
        )
    there = device_at(index)
    chosen = None if table is None else Path(table)
    dispatcher().use(chosen, strict)
    problems = _problems(warm, there)
    with on(index):
        bounds = {problem: dispatcher().kernel(problem, index) for problem in problems}
        compiled, failed = _compile(bounds, index)
    if failed:
        _report(failed, strict)
    if strict:
        _refuse_compiling()
    return Loaded(
        device=there,
        problems=tuple(problem.text for problem in problems),
        variants=len({id(bound.launch) for bound in bounds.values()}),
        compiled=compiled,
        seconds=round(time.perf_counter() - started, 3),
        failed=failed,
    )


def _problems(warm: bool | Sequence[str | Problem], device: Device) -> list[Problem]:
    """Return the problems to make ready, each once."""
    if warm is True:
        own = [e.problem for e in dispatcher().entries() if e.device_key == device.key]
        return list(dict.fromkeys(operation(p.op).problem(dict(p.fields)) for p in own))
    texts = warm or ()
    return list(dict.fromkeys(parse_problem(p) if isinstance(p, str) else p for p in texts))


def _compile(bounds: dict[Problem, Bound], index: int) -> tuple[int, dict[str, str]]:
    """Compile every kernel: in parallel, then one by one what is left, to learn what fails."""
    if index == STAND_IN or not bounds:
        return 0, {}
    from triton import AsyncCompileMode

    from ktune.codegen.compile import compile_only, first_line

    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(workers) as threads, AsyncCompileMode(threads, ignore_errors=True):
        for bound in bounds.values():
            try:
                compile_only(bound.launch, bound.problem, bound.options)
            except Exception as error:  # the second pass will say so
                _log.debug("%s: %s", bound.problem.text, error)
    kernels, failed = set(), {}
    for done, (problem, bound) in enumerate(bounds.items(), 1):
        _show_progress(done, len(bounds))
        try:
            for kernel in compile_only(bound.launch, problem, bound.options):
                kernel.run  # noqa: B018 (loads the binary onto the GPU)
                kernels.add(id(kernel))
        except Exception as error:
            failed[problem.text] = first_line(error)
    return len(kernels), failed


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        sys.stderr.write(f"\rktune: {done} of {total} kernels loaded{end}")
        sys.stderr.flush()


def _report(failed: dict[str, str], strict: bool) -> None:
    text, reason = next(iter(failed.items()))
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    message = f"{text}{more}: the kernel does not compile: {reason}"
    if strict:
        raise StrictError(f"ktune.load: {message}")
    _log.warning("%s", message)


def _refuse_compiling() -> None:
    """Make Triton raise before it compiles one of ktune's kernels; other kernels are free to."""
    from triton import knobs

    before = knobs.runtime.jit_cache_hook
    if getattr(before, "of_ktune", False):
        return

    def refuse(**call: object) -> object:
        module = str(getattr(call.get("fn"), "module", ""))
        if module.startswith(KERNEL_MODULES) and dispatcher().strict:
            raise StrictError(
                f"{call.get('repr')} would have to be compiled, and ktune.load(strict=True) "
                "forbids it. Name the problem in ktune.load(warm=[...])"
            )
        return before(**call) if before is not None else None

    refuse.of_ktune = True  # type: ignore[attr-defined]
    knobs.runtime.jit_cache_hook = refuse
