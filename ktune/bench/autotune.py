"""What Triton's own tuner does with the same variants: ``triton.autotune``, exhaustively.

``triton.autotune`` knows one kernel and a list of launch options. A user whose kernel has
structural choices wraps each rendered kernel in it and keeps the best of all, and so does this:
the rendered module's kernel is replaced by a real ``Autotuner`` over that kernel, and the module's
``launch`` is called without options. Warm-up, repetitions and statistic are Triton's defaults. It
compiles one configuration after the other, and checks nothing.

Two things differ from a plain run, both in Triton's favour. A failure that Triton's tuner does
not expect ends it; here it is recorded (``fatal``), and the run goes on. A kernel with a single
configuration is not timed by Triton; here it is, by the same benchmark, to be compared with others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ktune.bench.worker import Worker, WorkerError
from ktune.codegen import load_module, render
from ktune.codegen.compile import first_line
from ktune.errors import KtuneError
from ktune.operations import operation, parse_problem
from ktune.problem import Problem
from ktune.variant import LAUNCH_OPTIONS, Variant

TUNE = "ktune.bench.autotune:autotune_problem"
ENVIRONMENT = {"TRITON_INTERPRET": "0", "TRITON_CACHE_AUTOTUNING": "0"}
"""Environment of the worker; the caller adds a cold ``TRITON_CACHE_DIR``."""

HANG_S, HANG_EACH_S = 120.0, 60.0
"""Seconds that a problem, and each of its variants, may take before the worker is killed."""

NO_TIME = [math.inf] * 3
QUANTILES = (0.5, 0.2, 0.8)
EXPECTED = ("OutOfResources", "CompileTimeAssertionFailure", "PTXASError")
"""Errors that Triton's tuner counts as an infinite time; it ends on any other."""

Benchmark = Callable[..., Any]


class StoppedError(Exception):
    """The GPU no longer answers; nothing more can be timed in this process."""


@dataclass(slots=True)
class Tuning:
    """What the tuner saw on one problem.

    Attributes:
        problem: text of the problem.
        variants: how many there are to time.
        sources: how many kernels these are of; each is tuned for itself.
        timings: medians in ms, by variant text.
        failed: first line of the error, by variant text.
        fatal: those of the failed on which a plain ``triton.autotune`` would have ended.
        unreached: variants that it did not come to, for want of time or after it stopped.
        seconds: by phase: ``compile`` is each first call (compile, load, launch).
        stopped: why the tuner ended before its time; empty if it did not.
    """

    problem: str
    variants: int
    sources: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    fatal: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    stopped: str = ""

    @property
    def ranked(self) -> list[str]:
        """Variant texts, the fastest first."""
        return sorted(self.timings, key=self.timings.__getitem__)

    @property
    def best(self) -> str | None:
        """The fastest variant's text; None if none was timed."""
        return next(iter(self.ranked), None)

    @property
    def total_s(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Tuning:
        """Build it from ``to_dict``'s result."""
        return cls(**values)


class Stopwatch:
    """Seconds by phase; what is not within a phase goes to ``other``."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._phases = dict.fromkeys(("render", "compile", "benchmark"), 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within, time counts for a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._phases[name] += time.perf_counter() - started

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase, rounded to ms."""
        other = self.elapsed_s - sum(self._phases.values())
        return {name: round(value, 3) for name, value in {**self._phases, "other": other}.items()}


class Meter:
    """Triton's benchmark, with a limit, a stopwatch, and a memory of what failed.

    The tuner calls it once for each configuration, in their order.

    Args:
        variants: in that order.
        tuning: where outcomes go.
        watch: counts the first call of each for ``compile``, the rest for ``benchmark``.
        benchmark: Triton's own.
        limit_s: on the watch, after which nothing is started.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        tuning: Tuning,
        watch: Stopwatch,
        benchmark: Benchmark,
        limit_s: float,
    ) -> None:
        self._todo = [variant.text for variant in variants]
        self._tuning, self._watch = tuning, watch
        self._benchmark, self._limit_s = benchmark, limit_s

    def __call__(self, call: Callable[[], object], quantiles: Any) -> Any:
        """Return Triton's quantiles of a call; infinite ones if it fails or time is up."""
        text = self._todo.pop(0)
        if self._watch.elapsed_s >= self._limit_s:
            return NO_TIME
        try:
            with self._watch.phase("compile"):
                call()
            with self._watch.phase("benchmark"):
                times = self._benchmark(call, quantiles=quantiles)
            self._tuning.timings[text] = float(times[0])
            return times
        except Exception as error:
            self._tuning.failed[text] = first_line(error)
            if type(error).__name__ not in EXPECTED:
                self._tuning.fatal.append(text)
                _raise_if_sticky(error)
            return NO_TIME


def autotune_problem(
    problem: str, variants: list[str], where: str, limit_s: float | None
) -> dict[str, Any]:
    """Tune one problem on a GPU as a user of ``triton.autotune`` would.

    Args:
        problem: text of the problem.
        variants: texts of all variants.
        where: the GPU, ``cuda:0``.
        limit_s: seconds after which nothing more is started; None for no limit.
    """
    from triton.runtime import driver

    device = torch.device(where)
    torch.cuda.set_device(device)
    asked = parse_problem(problem)
    chosen = [Variant.parse(asked.op, text) for text in variants]
    tuning = tune(asked, chosen, device, limit_s, driver.active.get_benchmarker())
    return tuning.to_dict()


def tune(
    problem: Problem,
    variants: Sequence[Variant],
    device: torch.device,
    limit_s: float | None,
    benchmark: Benchmark,
) -> Tuning:
    """Tune every kernel that the variants render to; all see the same inputs and outputs."""
    tuning, watch = Tuning(problem.text, len(variants)), Stopwatch()
    limit = math.inf if limit_s is None else limit_s
    op = operation(problem.op)
    inputs = op.make_inputs(problem, op.distributions[0], 0, device)
    arguments = op.arguments(problem, inputs, op.make_outputs(problem, inputs))
    kernels: dict[str, list[Variant]] = {}
    with watch.phase("render"):
        for variant in variants:
            try:
                kernels.setdefault(render(variant, problem).id, []).append(variant)
            except KtuneError as error:
                tuning.failed[variant.text] = first_line(error)
    tuning.sources = len(kernels)
    for group in kernels.values():
        if tuning.stopped or watch.elapsed_s >= limit:
            break
        try:
            with watch.phase("render"):
                module = load_module(render(group[0], problem))
            meter = Meter(group, tuning, watch, benchmark, limit)
            _tune_kernel(module, arguments, group, meter)
        except StoppedError as error:
            tuning.stopped = str(error)
        except Exception as error:
            for text in (v.text for v in group if v.text not in tuning.timings):
                if text not in tuning.failed:
                    tuning.failed[text] = first_line(error)
                    tuning.fatal.append(text)
    known = tuning.timings.keys() | tuning.failed.keys()
    tuning.unreached = [variant.text for variant in variants if variant.text not in known]
    tuning.seconds = watch.seconds()
    return tuning


def _tune_kernel(
    module: ModuleType, arguments: Sequence[Any], variants: Sequence[Variant], meter: Meter
) -> None:
    """Have one kernel's variants timed by the meter."""
    if len(variants) == 1:  # Triton would launch it untimed
        options = variants[0].options
        meter(lambda: module.launch(*arguments, **options), QUANTILES)
        return
    with autotuned(module, variants, meter) as tuner:
        try:
            module.launch(*arguments)
        except Exception:
            if not hasattr(tuner, "configs_timings"):
                raise
            # It has tuned, and then launched the best of configurations that all fail.


@contextmanager
def autotuned(module: ModuleType, variants: Sequence[Variant], meter: Benchmark) -> Iterator[Any]:
    """Within, the module's kernel is a fresh ``triton.autotune`` of itself over launch options.

    The tuner is new for each problem, so that its key needs no argument. Yields the tuner.
    """
    import triton

    name = kernel_name(module)
    kernel = getattr(module, name)
    configs = [_config(variant) for variant in variants]
    tuner = triton.autotune(configs=configs, key=[], do_bench=meter)(kernel)
    setattr(module, name, tuner)
    try:
        yield tuner
    finally:
        setattr(module, name, kernel)


def _config(variant: Variant) -> Any:
    """Return a variant's launch options; what it does not say is left to the compiler, as in ktune.

    ``triton.Config`` has numbers of its own for them, which are the compiler's too.
    """
    import triton

    return triton.Config({}, **{name: variant.options.get(name) for name in LAUNCH_OPTIONS})


def kernel_name(module: ModuleType) -> str:
    """Return the name of the one kernel that a rendered module's ``launch`` starts.

    Raises:
        ValueError: it starts none or several.
    """
    from triton.runtime.jit import KernelInterface

    used = dict.fromkeys(module.launch.__code__.co_names)
    found = [name for name in used if isinstance(getattr(module, name, None), KernelInterface)]
    if len(found) != 1:
        what = ", ".join(found) or "none"
        raise ValueError(f"triton.autotune wraps one kernel, and launch starts {what}")
    return str(found[0])


def _raise_if_sticky(error: Exception) -> None:
    """Raise StoppedError if CUDA no longer answers in this process."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    try:
        torch.cuda.synchronize()
    except Exception as now:
        raise StoppedError(first_line(now)) from error


def autotune_problems(
    variants: Mapping[str, Sequence[str]],
    where: str,
    cache: Path,
    limit_s: float | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Tuning], float]:
    """Tune problems one after the other in a process of its own, from a cold cache.

    Args:
        variants: texts of all variants, by problem text.
        where: the GPU, ``cuda:0``.
        cache: an empty folder for Triton and for rendered modules.
        limit_s: seconds for all problems; what it does not reach is listed as such.
        tell: called with a line before each problem.

    Returns:
        what was seen by problem text, and wall seconds in all, the process's start included.
    """
    folders = {"TRITON_CACHE_DIR": str(cache / "triton"), "KTUNE_CACHE_DIR": str(cache / "ktune")}
    worker = Worker({**ENVIRONMENT, **folders})
    found: dict[str, Tuning] = {}
    started = time.monotonic()
    try:
        for number, (problem, texts) in enumerate(variants.items(), 1):
            used = time.monotonic() - started
            left = None if limit_s is None else limit_s - used
            if left is not None and left <= 0:
                found[problem] = Tuning(problem, len(texts), unreached=list(texts))
                continue
            tell(f"triton.autotune {number}/{len(variants)} {problem}: {len(texts)} variants")
            found[problem] = _tuned(worker, problem, list(texts), where, left)
            if found[problem].stopped:
                worker.kill()  # the next problem gets a fresh process
        return found, time.monotonic() - started
    finally:
        worker.kill()


def _tuned(
    worker: Worker, problem: str, texts: list[str], where: str, left_s: float | None
) -> Tuning:
    patience_s = HANG_S + min(math.inf if left_s is None else left_s, HANG_EACH_S * len(texts))
    started = time.monotonic()
    try:
        seen = worker.call(TUNE, problem, texts, where, left_s, timeout_s=patience_s)
        return Tuning.from_dict(seen)
    except WorkerError as error:
        seconds = {"other": round(time.monotonic() - started, 3)}
        return Tuning(problem, len(texts), unreached=texts, seconds=seconds, stopped=str(error))
