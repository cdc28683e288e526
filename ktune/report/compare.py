"""Compare strategies: time, rescales done of possible, and error, on several distributions.

Times come from a recording or from the GPU. Rescales and errors are computed: on the GPU at the
asked problem, else in Triton's interpreter at a smaller one, which the comparison names.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ktune.bench.check import Case as CheckCase
from ktune.bench.check import CaseCache, Verdict, check_module, compare
from ktune.bench.measurement import Measurement
from ktune.bench.tasks import COMPILER, INTERPRETER, leave_if_sticky
from ktune.bench.timer import Timer
from ktune.bench.worker import Pool, Task, WorkerError
from ktune.codegen import load_module, render
from ktune.codegen.compile import first_line
from ktune.device import Device, device_of
from ktune.errors import RecordingError, UsageError, VariantError
from ktune.operations import operation, parse_problem
from ktune.problem import Problem, Scalar, format_scalar
from ktune.report import Line, Observation, Rescales, Strategy
from ktune.space import Space
from ktune.space.walk import distance
from ktune.target.recording import Recording
from ktune.target.target import Target
from ktune.variant import Variant

OBSERVE = "ktune.report.compare:observe"
TIME = "ktune.report.compare:time_variants"

STRATEGY_AXES = ("rescale", "strategy")
"""Axes that stand for the space's named strategies."""

OBSERVE_LIMIT_S = 180.0
TIME_LIMIT_S = 300.0
ROUNDS = 25

_SMALL_SIZES = {"batch": 1, "heads": 2, "heads_kv": 2, "seqlen_q": 512, "seqlen_k": 512}
_QUIET_CORE = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore::RuntimeWarning",
}
"""Environment of interpreter workers, which share the cores and divide by zero as a GPU does."""
_SMALL_TILES: dict[str, Scalar] = {"block_m": 128, "block_n": 64}

Progress = Callable[[str], None]


def target_fields(source: Target | Recording, replayed_from: str | None) -> dict[str, Any]:
    """Return where times come from, as JSON values."""
    return {
        "device": source.device.to_dict(),
        "protocol": source.protocol,
        "measured": source.measured,
        "versions": dict(source.versions),
        "replayed_from": replayed_from,
    }


def strategies_of(space: Space, axis: str, names: Sequence[str] = ()) -> list[Strategy]:
    """Return what an axis sets side by side, or those of it that are named.

    A name also stands for all that begin with it and an underscore: ``fa4`` for ``fa4_row`` and
    ``fa4_tile``.

    Raises:
        UsageError: the space has no such axis, or the axis no such value.
    """
    known = {strategy.name: strategy for strategy in _axis(space, axis)}
    if not names:
        return list(known.values())
    chosen: dict[str, Strategy] = {}
    for name in names:
        found = [name] if name in known else [k for k in known if k.startswith(f"{name}_")]
        if not found:
            raise UsageError(f"{axis} of {space.op} has no {name!r}; it has {', '.join(known)}")
        chosen |= {key: known[key] for key in found}
    return list(chosen.values())


def _axis(space: Space, axis: str) -> list[Strategy]:
    if axis in STRATEGY_AXES and space.strategies:
        return [Strategy(name, dict(settings)) for name, settings in space.strategies.items()]
    for parameter in space.parameters:
        if parameter.name == axis:
            return [Strategy(format_scalar(c), {axis: c}) for c in parameter.choices]
    known = ["strategy", *(parameter.name for parameter in space.parameters)]
    near = difflib.get_close_matches(axis, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UsageError(f"{space.op} has no axis {axis!r}{hint} It has: {', '.join(known)}")


def distributions_of(space: Space, names: Sequence[str] = ()) -> list[str]:
    """Return the operation's distributions of inputs, or those named.

    Raises:
        UsageError: the operation has no such distribution.
    """
    known = space.operation.distributions
    for name in names:
        if name not in known:
            raise UsageError(
                f"{space.op} has no input distribution {name!r}; it has {', '.join(known)}"
            )
    return list(names or known)


def usual_problem(
    space: Space, strategies: Sequence[Strategy], device: Device, recording: Recording | None
) -> Problem:
    """Return the first default problem for which most strategies have a variant."""
    problems = space.problem_set()
    if recording is not None:
        problems = [p for p in problems if p.text in recording.problems]
        problems = problems or [parse_problem(text) for text in recording.problems]
    if not problems:
        raise RecordingError(f"the recording holds no problem of {space.op}")

    def count(problem: Problem) -> int:
        legal = space.variants(problem, device)
        return sum(any(map(strategy.holds, legal)) for strategy in strategies)

    return max(problems, key=count)


def small_problem(problem: Problem) -> Problem:
    """Return a problem that the interpreter can run in a second, as like this one as can be.

    Triton's interpreter multiplies bfloat16 as the integers of its bits and rounds to it by
    cutting off, so float16 stands in for it.
    """
    if problem.word("dtype") == "bfloat16":
        problem = problem.replace(dtype="float16")
    if problem.op != "attention":
        return operation(problem.op).proving(problem)[0]
    sizes = {name: min(problem.size(name), most) for name, most in _SMALL_SIZES.items()}
    if problem.size("heads_kv") < problem.size("heads"):
        sizes["heads_kv"] = 1
    return problem.replace(**sizes)


def small_tiles(problem: Problem) -> dict[str, Scalar]:
    """Return the tiles that all strategies are counted with in the interpreter."""
    return dict(_SMALL_TILES) if problem.op == "attention" else {}


def replay_lines(
    recording: Recording, space: Space, problem: Problem, strategies: Iterable[Strategy]
) -> list[Line]:
    """Give each strategy the fastest recorded variant that has its settings."""
    outcomes = recording.problem(problem).outcomes
    seen = {Variant.parse(problem.op, text): outcome for text, outcome in outcomes.items()}
    lines = [_best_line(strategy, seen) for strategy in strategies]
    for line in lines:
        if line.variant is None:
            _complete(line, space, problem, recording.device)
    return lines


def search_lines(
    target: Target,
    space: Space,
    problem: Problem,
    strategies: Sequence[Strategy],
    budget: int,
    progress: Progress,
) -> list[Line]:
    """Measure equally many variants of each strategy, those nearest to the default first."""
    legal = space.variants(problem, target.device)
    usual = space.operation.default_variant(problem, target.device).values
    nearest = sorted(legal, key=lambda variant: distance(variant.values, usual))
    queues = [[v for v in nearest if s.holds(v)][:budget] for s in strategies]
    todo = list(dict.fromkeys(variant for queue in queues for variant in queue))
    seen = _measure(target, problem, todo, progress)
    lines = [
        _best_line(strategy, {variant: seen[variant] for variant in queue})
        for strategy, queue in zip(strategies, queues, strict=True)
    ]
    for line in lines:
        if line.variant is None:
            line.detail = line.detail or "the space has no such variant for this problem"
    return lines


def _measure(
    target: Target, problem: Problem, variants: list[Variant], progress: Progress
) -> dict[Variant, Measurement]:
    seen: dict[Variant, Measurement] = {}
    waiting = list(reversed(variants))
    while len(seen) < len(variants):
        while waiting and len(variants) - len(waiting) - len(seen) < target.capacity:
            target.submit(problem, waiting.pop())
        _, variant, measurement = target.next()
        seen[variant] = measurement.sane()
        progress(f"measured {len(seen)}/{len(variants)} variants")
    return seen


def _best_line(strategy: Strategy, seen: Mapping[Variant, Measurement]) -> Line:
    own = {variant: m for variant, m in seen.items() if strategy.holds(variant)}
    right = [(m.latency_ms, variant.text, variant) for variant, m in own.items() if m.latency_ms]
    if not right:
        reasons = sorted({f"{m.status}: {m.detail}" for m in own.values()})
        return Line(strategy, considered=len(own), detail="; ".join(reasons)[:300])
    latency, _, variant = min(right)
    return Line(strategy, variant, latency, own[variant].spread_ms, len(own))


def _complete(line: Line, space: Space, problem: Problem, device: Device) -> None:
    """Give a strategy without a time a variant to compute errors with, and say what is missing."""
    line.detail = line.detail or "no recorded variant has these settings"
    try:
        line.variant = space.complete(line.strategy.settings, problem, device)
    except VariantError as error:
        line.detail = str(error)


def observe_lines(
    lines: Sequence[Line],
    problem: Problem,
    distributions: Sequence[str],
    index: int | None,
    progress: Progress,
    workers: int | None = None,
) -> None:
    """Fill in rescales and errors, on a GPU or, without an index, in Triton's interpreter."""
    count = workers or (len(os.sched_getaffinity(0)) if index is None else 1)
    pool = Pool(count, INTERPRETER | _QUIET_CORE if index is None else COMPILER)
    try:
        for name in distributions:
            for place, line in enumerate(lines):
                if line.variant is not None:
                    values = line.variant.values | (small_tiles(problem) if index is None else {})
                    text = Variant.of(problem.op, values).text
                    task = Task(OBSERVE, (problem.text, text, name, index))
                    pool.submit((place, name), task, OBSERVE_LIMIT_S)
        total = len(pool)
        for done in range(total):
            (place, name), result = pool.next()
            lines[place].observations[name] = _observation(result)
            progress(f"observed {done + 1}/{total}")
    finally:
        pool.close()
    for line in lines:
        line.observations = {n: line.observations[n] for n in distributions if line.variant}


def _observation(result: dict[str, Any] | WorkerError) -> Observation:
    if isinstance(result, WorkerError):
        return Observation(detail=str(result))
    counts = result.pop("counts")
    return Observation(rescales=Rescales(*counts) if counts else None, **result)


def time_lines(
    lines: Sequence[Line],
    problem: Problem,
    distributions: Sequence[str],
    index: int,
    progress: Progress,
) -> None:
    """Time the best variants in turn on each distribution; the first one's times are the lines'."""
    texts = list(dict.fromkeys(line.variant.text for line in lines if line.variant))
    pool = Pool(1, COMPILER)
    try:
        for name in distributions:
            task = Task(TIME, (problem.text, texts, name, ROUNDS, index))
            pool.submit(name, task, TIME_LIMIT_S)
        for done in range(len(distributions)):
            name, result = pool.next()
            _keep_times(lines, name, result)
            progress(f"timed {done + 1}/{len(distributions)} distributions")
    finally:
        pool.close()
    for line in lines:
        first = line.observations.get(distributions[0])
        if first is not None and first.latency_ms is not None:
            line.latency_ms, line.spread_ms = first.latency_ms, first.spread_ms


def _keep_times(lines: Sequence[Line], name: str, result: dict[str, Any] | WorkerError) -> None:
    for line in lines:
        if line.variant is None:
            continue
        seen = line.observations.setdefault(name, Observation())
        if isinstance(result, WorkerError):
            seen.detail = "; ".join(filter(None, [seen.detail, f"not timed: {result}"]))
        else:
            seen.latency_ms, seen.spread_ms = result[line.variant.text]


def time_variants(
    problem: str, variants: list[str], distribution: str, rounds: int, index: int
) -> dict[str, tuple[float, float]]:
    """Time variants in turn on inputs of a distribution; return median and spread in ms."""
    torch.cuda.set_device(index)
    asked = parse_problem(problem)
    op = operation(asked.op)
    inputs = op.make_inputs(asked, distribution, 0, torch.device("cuda", index))
    launches = [_launch(asked, Variant.parse(asked.op, text), inputs) for text in variants]
    timings = Timer(device_of(index), index).interleave(launches, rounds)
    return {
        text: (round(timing.latency_ms, 6), round(timing.spread_ms, 6))
        for text, timing in zip(variants, timings, strict=True)
    }


def _launch(problem: Problem, variant: Variant, inputs: dict[str, Any]) -> Callable[[], object]:
    op = operation(problem.op)
    arguments = op.arguments(problem, inputs, op.make_outputs(problem, inputs))
    module, options = load_module(render(variant, problem)), variant.options
    return lambda: module.launch(*arguments, **options)


def observe(problem: str, variant: str, distribution: str, index: int | None) -> dict[str, Any]:
    """Return a variant's error and, where it has an accumulator, how often it rescaled.

    Args:
        problem: text of the problem.
        variant: text of the variant.
        distribution: of the inputs.
        index: which GPU; None in a worker whose Triton interprets.
    """
    asked = parse_problem(problem)
    chosen = Variant.parse(asked.op, variant)
    case = _cases(index).get(asked, distribution, large=True)
    counts: list[int] | None = None
    try:
        if "count_rescales" in operation(asked.op).structure(asked):
            verdict, counts = count_rescales(chosen, case)
        else:
            verdict = check_module(load_module(render(chosen, asked)), chosen.options, case)
    except Exception as error:
        if index is not None:
            leave_if_sticky(index)
        return {"detail": first_line(error), "counts": None}
    error_found = verdict.error if math.isfinite(verdict.error) else None
    return {
        "error": error_found, "limit": verdict.limit, "detail": verdict.detail, "counts": counts,
    }  # fmt: skip


def count_rescales(variant: Variant, case: CheckCase) -> tuple[Verdict, list[int]]:
    """Run a variant that counts its rescales; return its verdict and the four counts."""
    problem = case.problem
    op, module = operation(problem.op), load_module(render(variant, problem, count_rescales=True))
    outputs = op.make_outputs(problem, case.inputs)
    for value in outputs.values():
        value.fill_(math.nan)
    counts = torch.zeros(4, dtype=torch.int64, device=next(iter(outputs.values())).device)
    arguments = op.arguments(problem, case.inputs, outputs)
    module.launch(*arguments, counts, **variant.options)
    return compare(case, outputs), counts.tolist()


@cache
def _cases(index: int | None) -> CaseCache:
    if index is None:
        torch.set_num_threads(1)
        return CaseCache(torch.device("cpu"))
    torch.cuda.set_device(index)
    return CaseCache(torch.device("cuda", index))
