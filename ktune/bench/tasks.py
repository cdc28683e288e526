"""What workers do: compile a variant, check it in the interpreter, check and time it on a GPU.

Every function takes and returns plain values, since it is called by name in another process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ktune.bench.check import CaseCache, check_cases, check_module, make_case
from ktune.bench.measurement import Measurement
from ktune.bench.timer import Timer, copy_bandwidth, matmul_rate
from ktune.codegen import load_module, render
from ktune.codegen.compile import compile_kernel, first_line
from ktune.device import Device, device_of
from ktune.errors import KtuneError
from ktune.operations import operation, parse_problem
from ktune.problem import Problem
from ktune.variant import Variant

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
FINALS = "ktune.bench.tasks:time_finals"
ROOFS = "ktune.bench.tasks:measure_roofs"
DEVICE = "ktune.bench.tasks:describe_device"


def compile_variant(problem: str, variant: str, device: dict[str, Any]) -> dict[str, Any]:
    """Compile a variant for every problem it is checked and timed on; return its resources."""
    torch.set_num_threads(1)
    asked, target = parse_problem(problem), Device.from_dict(device)
    chosen = Variant.parse(asked.op, variant)
    resources: dict[str, Any] = {}
    for case in dict.fromkeys(case for case, _ in check_cases(asked)):
        source = render(chosen, case)
        resources = compile_kernel(source, case, chosen.options, target).to_dict()
    return resources


def interpret_variant(problem: str, variant: str) -> dict[str, Any]:
    """Check a variant in Triton's interpreter on the small problems; return error and limit."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "not an interpreter worker"
    asked = parse_problem(problem)
    chosen = Variant.parse(asked.op, variant)
    worst = {"error": 0.0, "limit": 1.0, "detail": ""}
    for small in map(interpretable, operation(asked.op).proving(asked)):
        module = load_module(render(chosen, small))
        for distribution in operation(asked.op).distributions[:2]:
            case = make_case(small, distribution, torch.device("cpu"))
            verdict = check_module(module, chosen.options, case)
            if not verdict.passed:
                return {"error": verdict.error, "limit": verdict.limit, "detail": verdict.detail}
            if verdict.error / verdict.limit >= worst["error"] / worst["limit"]:  # type: ignore[operator]
                worst = {"error": verdict.error, "limit": verdict.limit, "detail": ""}
    return worst


def interpretable(problem: Problem) -> Problem:
    """Return the problem in a dtype that Triton's interpreter computes rightly.

    It multiplies the bits of bfloat16 operands as integers, and truncates where a GPU rounds
    (seen in 3.6). The dtype is not in the rendered source, so float16 proves the same text.
    """
    return problem.replace(dtype="float16") if problem.word("dtype") == "bfloat16" else problem


def describe_device(index: int) -> dict[str, Any]:
    """Return the GPU's fields; initialises CUDA in this process only."""
    return device_of(index).to_dict()


def measure_roofs(index: int) -> dict[str, float]:
    """Return the copy rate (GB/s) and the bf16 matrix rate (TFLOP/s) of the GPU."""
    torch.cuda.set_device(index)
    timer = _timer(index)
    return {
        "copy_gb_per_s": round(copy_bandwidth(timer, index), 1),
        "matmul_tflop_per_s": round(matmul_rate(timer, index), 1),
    }


def measure_variant(problem: str, variant: str, index: int) -> dict[str, Any]:
    """Check a variant on the GPU and, if it is right, time it."""
    torch.cuda.set_device(index)
    asked = parse_problem(problem)
    chosen = Variant.parse(asked.op, variant)
    try:
        return _measure(asked, chosen, index).to_dict()
    except Exception as error:
        measurement = _failure(error)
        leave_if_sticky(index)
        return measurement.to_dict()


def _measure(problem: Problem, variant: Variant, index: int) -> Measurement:
    worst = (0.0, 1.0)
    for case_problem, distribution in check_cases(problem):
        case = _cases(index).get(case_problem, distribution, large=case_problem == problem)
        verdict = check_module(load_module(render(variant, case_problem)), variant.options, case)
        if not verdict.passed:
            return Measurement(
                "wrong", error=verdict.error, error_limit=verdict.limit, detail=verdict.detail
            )
        if verdict.error / verdict.limit >= worst[0] / worst[1]:
            worst = (verdict.error, verdict.limit)
    timing = _timer(index).time(_launch(problem, variant, index))
    return Measurement(
        "ok",
        latency_ms=timing.latency_ms,
        spread_ms=timing.spread_ms,
        samples=len(timing.samples),
        error=worst[0],
        error_limit=worst[1],
    ).sane()


def _launch(problem: Problem, variant: Variant, index: int) -> Callable[[], object]:
    """Return a call of the variant on the problem's friendly inputs, everything bound."""
    op = operation(problem.op)
    case = _cases(index).get(problem, op.distributions[0], large=True)
    arguments = op.arguments(problem, case.inputs, op.make_outputs(problem, case.inputs))
    module, options = load_module(render(variant, problem)), variant.options
    return lambda: module.launch(*arguments, **options)


def time_finals(
    problem: str, variants: list[str], baselines: list[str], rounds: int, index: int
) -> dict[str, list[float]]:
    """Time variants and baselines in turn; return the samples of each by name.

    A baseline that this machine cannot run is left out.
    """
    torch.cuda.set_device(index)
    asked = parse_problem(problem)
    launches = {text: _launch(asked, Variant.parse(asked.op, text), index) for text in variants}
    case = _cases(index).get(asked, operation(asked.op).distributions[0], large=True)
    offered = operation(asked.op).baselines(asked, case.inputs)
    for name in baselines:
        if name in offered and _runs(offered[name]):
            launches[f"baseline:{name}"] = offered[name]
    timings = _timer(index).interleave(list(launches.values()), rounds)
    return {
        name: [round(sample, 6) for sample in timing.samples]
        for name, timing in zip(launches, timings, strict=True)
    }


def _runs(launch: Callable[[], object]) -> bool:
    try:
        launch()
        torch.cuda.synchronize()
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


def leave_if_sticky(index: int) -> None:
    """End this process if CUDA no longer answers, so that the next task gets a fresh one."""
    try:
        torch.cuda.synchronize(index)
    except Exception:
        os._exit(70)


@cache
def _timer(index: int) -> Timer:
    return Timer(device_of(index), index)


@cache
def _cases(index: int) -> CaseCache:
    return CaseCache(torch.device("cuda", index))
