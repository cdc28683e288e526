"""What workers do: compile a variant, check it in the interpreter, check and time it on a GPU.

Every function takes and returns plain values, since it is called by name in another process.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from ktune.bench.check import check_cases
from ktune.bench.measurement import Measurement
from ktune.bench.place import Place, gate, interpretable, leave_if_sticky, place, timer_of
from ktune.bench.timer import Timer, copy_bandwidth, matmul_rate
from ktune.codegen import load_module, render
from ktune.codegen.compile import compile_kernel, first_line
from ktune.device import COMPILE_TARGETS, Device
from ktune.errors import KtuneError
from ktune.operations import operation, parse_problem
from ktune.problem import Problem
from ktune.variant import Variant

__all__ = ["interpretable", "leave_if_sticky"]

INTERPRETER = {
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore::RuntimeWarning",  # numpy on 0 / 0 in hidden rows
}
"""Environment of a worker that runs kernels in Triton's interpreter."""

COMPILER = {"TRITON_INTERPRET": "0"}
"""Environment of a worker that compiles or launches kernels."""


COMPILE = "ktune.bench.tasks:compile_variant"
INTERPRET = "ktune.bench.tasks:interpret_variant"
MEASURE = "ktune.bench.tasks:measure_variant"
VERIFY = "ktune.bench.tasks:verify_variant"
FINALS = "ktune.bench.tasks:time_finals"
ROOFS = "ktune.bench.tasks:measure_roofs"
DEVICE = "ktune.bench.tasks:describe_device"


def ready() -> None:
    """Compile something small: what a worker imports and builds once is then behind it.

    A worker's first compilation takes 2 s longer than its second.
    """
    from triton import knobs

    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    small = parse_problem("softmax m=1 n=128 dtype=bfloat16")
    torch.set_num_threads(1)
    target = COMPILE_TARGETS["sm_90"]
    chosen = operation(small.op).default_variant(small, target)
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        compile_kernel(render(chosen, small), small, chosen.options, target)


def compile_variant(problem: str, variant: str, device: dict[str, Any]) -> dict[str, Any]:
    """Compile a variant for every problem it is checked and timed on; return its resources.

    For the interpreter's stand-in device the modules are imported and no more.
    """
    torch.set_num_threads(1)
    asked, target = parse_problem(problem), Device.from_dict(device)
    chosen = Variant.parse(asked.op, variant)
    started = time.perf_counter()
    resources: dict[str, Any] = {}
    for case in dict.fromkeys(case for case, _ in check_cases(asked)):
        source = render(chosen, case)
        if target.backend == "cpu":
            load_module(source)
            continue
        kernel = compile_kernel(source, case, chosen.options, target)
        if case == asked:
            resources = kernel.resources().to_dict()
    return {**resources, "compile_s": _seconds(started)}


def interpret_variant(problem: str, variant: str) -> dict[str, Any]:
    """Check a variant in Triton's interpreter on the small problems; return error and limit."""
    here, asked = place("cpu"), parse_problem(problem)
    verdict = gate(here).prove(here.own(asked), Variant.parse(asked.op, variant))
    return {"error": verdict.error, "limit": verdict.limit, "detail": verdict.detail}


def describe_device(where: str) -> dict[str, Any]:
    """Return the device's fields; initialises CUDA in this process only."""
    return place(where).describe().to_dict()


def measure_roofs(where: str) -> dict[str, float]:
    """Return the copy rate (GB/s) and the bf16 matrix rate (TFLOP/s); nothing on the CPU."""
    here = place(where)
    timer = timer_of(here)
    if not isinstance(timer, Timer):
        return {}
    return {
        "copy_gb_per_s": round(copy_bandwidth(timer, here.index), 1),
        "matmul_tflop_per_s": round(matmul_rate(timer, here.index), 1),
    }


def measure_variant(
    problem: str, variant: str, where: str, best_ms: float | None = None
) -> dict[str, Any]:
    """Check a variant and, if it is right, time it.

    Args:
        problem: text of the problem.
        variant: text of the variant.
        where: ``cuda:0``, or ``cpu`` in a worker whose Triton interprets.
        best_ms: the best median known for the problem; what is clearly slower gets few samples.
    """
    here, asked = place(where), parse_problem(problem)
    chosen = Variant.parse(asked.op, variant)
    try:
        return _measure(here.own(asked), chosen, here, best_ms).to_dict()
    except Exception as error:
        measurement = _failure(error)
        leave_if_sticky(where)
        return measurement.to_dict()


def _measure(problem: Problem, variant: Variant, here: Place, best_ms: float | None) -> Measurement:
    started = time.perf_counter()
    verdict = gate(here).check(problem, variant)
    check_s = _seconds(started)
    if not verdict.passed:
        return Measurement(
            "wrong",
            error=verdict.error,
            error_limit=verdict.limit,
            check_s=check_s,
            detail=verdict.detail,
        )
    started = time.perf_counter()
    timing = timer_of(here).time(_launch(problem, variant, here), best_ms)
    return Measurement(
        "ok",
        latency_ms=timing.latency_ms,
        spread_ms=timing.spread_ms,
        samples=len(timing.samples),
        error=verdict.error,
        error_limit=verdict.limit,
        check_s=check_s,
        time_s=_seconds(started),
    ).sane()


def verify_variant(problem: str, variant: str, where: str) -> dict[str, Any]:
    """Check a winner once more on the whole problem, with every distribution.

    Returns:
        ``passed``, ``error`` (largest, against float64), ``limit`` and ``detail``, which says
        what is wrong; an error of infinity and a limit of 0 where the kernel did not run.
    """
    here, asked = place(where), parse_problem(problem)
    try:
        verdict = gate(here).verify(here.own(asked), Variant.parse(asked.op, variant))
    except Exception as error:
        leave_if_sticky(where)
        return {"passed": False, "error": math.inf, "limit": 0.0, "detail": first_line(error)}
    return {
        "passed": verdict.passed,
        "error": verdict.error,
        "limit": verdict.limit,
        "detail": verdict.detail,
    }


def _launch(problem: Problem, variant: Variant, here: Place) -> Callable[[], object]:
    """Return a call of the variant on the problem's friendly inputs, everything bound."""
    op = operation(problem.op)
    case = gate(here).cases.get(problem, op.distributions[0], large=True)
    arguments = op.arguments(problem, case.inputs, op.make_outputs(problem, case.inputs))
    module, options = load_module(render(variant, problem)), variant.options
    return lambda: module.launch(*arguments, **options)


def time_finals(
    problem: str, variants: list[str], baselines: list[str], rounds: int, where: str
) -> dict[str, list[float]]:
    """Time variants and baselines in turn; return the samples of each by name.

    A baseline that this machine cannot run is left out.
    """
    here = place(where)
    asked = here.own(parse_problem(problem))
    launches = {text: _launch(asked, Variant.parse(asked.op, text), here) for text in variants}
    case = gate(here).cases.get(asked, operation(asked.op).distributions[0], large=True)
    offered = operation(asked.op).baselines(asked, case.inputs)
    for name in baselines:
        if name in offered and _runs(offered[name], here):
            launches[f"baseline:{name}"] = offered[name]
    timings = timer_of(here).interleave(list(launches.values()), rounds)
    return {
        name: [round(sample, 6) for sample in timing.samples]
        for name, timing in zip(launches, timings, strict=True)
    }


def _runs(launch: Callable[[], object], here: Place) -> bool:
    try:
        launch()
        here.synchronize()
    except Exception:
        return False
    return True


def _failure(error: Exception) -> Measurement:
    """Return the recorded outcome of an exception."""
    text = first_line(error)
    name = type(error).__name__
    if name == "OutOfResources":
        return Measurement("over_limit", detail=text)
    if isinstance(error, KtuneError) or "CompilationError" in name:
        return Measurement("compile_error", detail=text)
    return Measurement("crashed", detail=text)


def _seconds(started: float) -> float:
    return round(time.perf_counter() - started, 4)
