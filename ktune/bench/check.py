"""Is a kernel right: compare it with float64 on several inputs, into NaN-poisoned outputs.

The rule is FlashAttention's: the largest error may be at most twice that of eager PyTorch in the
same dtype, plus 1e-5. Outputs that an operation calls relative count in units of the largest
magnitude of their row, so that an all-zero result cannot hide behind the 1e-5 where every right
value is that small.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ktune.operations import operation
from ktune.operations.base import Operation, Tensors
from ktune.problem import Problem

SEED = 0


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs of one problem and distribution, with the truth and the error it allows.

    Attributes:
        expected: the float64 outputs, kept in float32.
        limits: largest error allowed, for each output.
    """

    problem: Problem
    distribution: str
    inputs: Tensors
    expected: Tensors
    limits: dict[str, float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check.

    Attributes:
        passed: every output was written, and is within its limit.
        error: the largest error found; infinite where NaN or infinity stand wrongly.
        limit: the error allowed for that output.
        detail: what is wrong; empty if passed.
    """

    passed: bool
    error: float
    limit: float
    detail: str = ""


def make_case(problem: Problem, distribution: str, device: torch.device) -> Case:
    """Draw inputs and compute the truth and the error limits."""
    op = operation(problem.op)
    factor, floor = op.tolerance
    inputs = op.make_inputs(problem, distribution, SEED, device)
    truth = op.reference(problem, inputs)
    eager = op.eager(problem, inputs)
    limits = {}
    for name, value in truth.items():
        error = _error(op, name, eager[name].float(), value.float())
        limits[name] = factor * (error if math.isfinite(error) else 0.0) + floor
    expected = {name: value.float() for name, value in truth.items()}
    return Case(problem, distribution, inputs, expected, limits)


def check_cases(problem: Problem) -> list[tuple[Problem, str]]:
    """Return what a variant is checked on: small ragged problems, then the problem itself."""
    friendly, adversarial, *_ = operation(problem.op).distributions
    small = operation(problem.op).proving(problem)
    pairs = [(case, kind) for case in small for kind in (friendly, adversarial)]
    return [*pairs, (problem, friendly)]


def check_module(module: ModuleType, options: dict[str, int], case: Case) -> Verdict:
    """Run a rendered module on a case and compare; the outputs hold NaN before the launch."""
    op = operation(case.problem.op)
    outputs = op.make_outputs(case.problem, case.inputs)
    for value in outputs.values():
        value.fill_(math.nan)
    module.launch(*op.arguments(case.problem, case.inputs, outputs), **options)
    return compare(case, outputs)


def compare(case: Case, outputs: Tensors) -> Verdict:
    """Compare outputs with a case's truth under the rule."""
    op = operation(case.problem.op)
    worst = Verdict(True, 0.0, 1.0)
    for name, expected in case.expected.items():
        error, limit = _error(op, name, outputs[name].float(), expected), case.limits[name]
        if error > limit:
            text = f"{name}: error {error:.3g} over {limit:.3g}"
            where = f"on {case.distribution} inputs of {case.problem.fields_text}"
            return Verdict(False, error, limit, f"{text} {where}")
        if error / limit >= worst.error / worst.limit:
            worst = Verdict(True, error, limit)
    return worst


def _error(op: Operation, name: str, got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error; infinite where one side is not finite and the other differs."""
    if not expected.numel():
        return 0.0
    finite = expected.isfinite()
    same = torch.where(finite, got.isfinite(), (got == expected) | (got.isnan() & expected.isnan()))
    if not bool(same.all()):
        return math.inf
    zero = torch.zeros((), device=expected.device)
    difference = torch.where(finite, got - expected, zero).abs()
    if name in op.relative_outputs:
        size = torch.where(finite, expected, zero).abs().amax(-1, keepdim=True)
        difference = difference / torch.where(size > 0, size, torch.ones_like(size))
    return float(difference.max())


class CaseCache:
    """Keeps the last few cases, since many variants are checked on the same ones."""

    def __init__(self, device: torch.device, large: int = 2, small: int = 32) -> None:
        self._device = device
        self._room = {"large": large, "small": small}
        self._cases: dict[str, OrderedDict[Any, Case]] = {
            "large": OrderedDict(),
            "small": OrderedDict(),
        }

    def get(self, problem: Problem, distribution: str, large: bool) -> Case:
        """Return a case, from memory if it is there."""
        kind = "large" if large else "small"
        cases, key = self._cases[kind], (problem.text, distribution)
        if key in cases:
            cases.move_to_end(key)
            return cases[key]
        while len(cases) >= self._room[kind]:
            cases.popitem(last=False)
        cases[key] = make_case(problem, distribution, self._device)
        return cases[key]
