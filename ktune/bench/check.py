"""Is a kernel right on one set of inputs: close to float64, repeatable, and within its memory.

The rule of errors is FlashAttention's: the largest may be at most twice that of eager PyTorch in
the same dtype, plus 1e-5; or, where eager PyTorch happens to be exact, what rounding P and the
output makes inevitable (``ROUNDINGS``). Outputs that an operation calls relative count in units of
the largest magnitude of their row, so that an all-zero result cannot hide behind the 1e-5 where
every right value is that small.

A launch writes into NaN-poisoned outputs that lie in guarded memory, and all it did is judged on
the device, so that a check waits for the GPU once.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from ktune.bench.guard import Guarded, guarded, restore, same_bits, snapshot, unchanged
from ktune.operations import operation
from ktune.operations.base import Operation, Tensors
from ktune.problem import Problem

SEED = 0
ROUNDINGS = {torch.float32: 4 * 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Share of the largest value that an error may always have, by the dtype of the output.

Where one key outweighs all others, eager PyTorch returns its value as it is. A fused kernel may
have a P near 1 there, which it rounds to 16 bits for the product but not for the sum: half a unit
in the last place, and the output's own rounding is another half.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs of one problem and distribution, with the truth and the error it allows.

    Attributes:
        expected: the float64 outputs, kept in float32.
        limits: largest error allowed, for each output.
        kept: what tells whether an input was changed, by name; empty: that is not checked.
    """

    problem: Problem
    distribution: str
    inputs: Tensors
    expected: Tensors
    limits: dict[str, float]
    kept: Tensors = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check.

    Attributes:
        passed: every output was written and is within its limit, and nothing else is wrong.
        error: the largest error found; infinite where NaN or infinity stand wrongly.
        limit: the error allowed for that output.
        detail: what is wrong, in one line; empty if passed.
    """

    passed: bool
    error: float
    limit: float
    detail: str = ""

    def worse(self, other: Verdict) -> Verdict:
        """Return the one whose error is the larger share of its limit."""
        return self if self.error / self.limit >= other.error / other.limit else other


NOTHING_WRONG = Verdict(True, 0.0, 1.0)


def make_case(problem: Problem, distribution: str, device: torch.device) -> Case:
    """Draw inputs and compute the truth and the error limits."""
    op = operation(problem.op)
    factor, floor = op.tolerance
    inputs = op.make_inputs(problem, distribution, SEED, device)
    truth = op.reference(problem, inputs)
    eager = op.eager(problem, inputs)
    expected = {name: value.float() for name, value in truth.items()}
    limits = {}
    for name, value in expected.items():
        error = float(_largest_error(op, name, eager[name].float(), value))
        least = ROUNDINGS.get(eager[name].dtype, 0.0) * _largest_value(op, name, value)
        limits[name] = max(factor * (error if math.isfinite(error) else 0.0) + floor, least)
    kept = {name: snapshot(value) for name, value in _tensors(inputs).items()}
    return Case(problem, distribution, inputs, expected, limits, kept)


def check_cases(problem: Problem) -> list[tuple[Problem, str]]:
    """Return what a variant is checked on: small ragged problems, then the problem itself."""
    op = operation(problem.op)
    pairs = [(small, kind) for small in op.proving(problem) for kind in op.distributions]
    return [*pairs, (problem, op.distributions[0])]


def check_module(
    module: ModuleType, options: dict[str, int], case: Case, repeat: bool = False
) -> Verdict:
    """Launch a rendered module on a case and judge all that it did.

    Args:
        module: has ``launch``.
        options: launch options.
        case: inputs and truth; inputs that the launch changed are made anew.
        repeat: launch twice; the second must give the same bits, or, where the operation is not
            deterministic, be right too.
    """
    op = operation(case.problem.op)
    made = op.make_outputs(case.problem, case.inputs)
    guards = {name: guarded(value) for name, value in _tensors(made).items()}
    outputs = {**made, **{name: guard.view for name, guard in guards.items()}}
    del made
    arguments = op.arguments(case.problem, case.inputs, outputs)
    module.launch(*arguments, **options)
    first = outputs
    if repeat:
        first = {**outputs, **{name: guard.view.clone() for name, guard in guards.items()}}
        for guard in guards.values():
            guard.poison()
        module.launch(*arguments, **options)
    inputs = [_input_probe(case, name) for name in case.kept]
    verdict = _judge(
        case,
        [
            *_error_probes(op, case, first),
            *(_guard_probe(name, guard) for name, guard in guards.items()),
            *inputs,
            *(_repeat_probes(op, case, first, outputs, list(guards)) if repeat else []),
        ],
    )
    if not verdict.passed and any(bool(probe.value) for probe in inputs):
        _renew(case)
    return verdict


def compare(case: Case, outputs: Tensors) -> Verdict:
    """Compare outputs with a case's truth under the rule."""
    return _judge(case, _error_probes(operation(case.problem.op), case, outputs))


@dataclass(frozen=True, slots=True)
class _Probe:
    """Something that may be wrong: a number on the device, and what to say if it is over a limit.

    An error counts in the verdict's; other numbers are 0 or 1.
    """

    value: torch.Tensor
    limit: float
    explain: Callable[[float], str]
    is_error: bool = False


def _judge(case: Case, probes: list[_Probe]) -> Verdict:
    """Wait for all probes at once; return the first fault, or else the worst error."""
    worst = NOTHING_WRONG
    if not probes:
        return worst
    values = torch.stack([probe.value.double() for probe in probes]).tolist()
    for probe, value in zip(probes, values, strict=True):
        if value > probe.limit:
            where = f"on {case.distribution} inputs of {case.problem.fields_text}"
            error, limit = (value, probe.limit) if probe.is_error else (worst.error, worst.limit)
            return Verdict(False, error, limit, f"{probe.explain(value)}, {where}")
        if probe.is_error:
            worst = Verdict(True, value, probe.limit).worse(worst)
    return worst


def _error_probes(op: Operation, case: Case, outputs: Tensors, prefix: str = "") -> list[_Probe]:
    def probe(name: str, expected: torch.Tensor) -> _Probe:
        got, limit = outputs[name].float(), case.limits[name]

        def explain(error: float) -> str:
            text = f"{prefix}{name}: error {error:.3g} over {limit:.3g}"
            return f"{text} at {_first_fault(op, name, outputs[name].float(), expected, limit)}"

        return _Probe(_largest_error(op, name, got, expected), limit, explain, is_error=True)

    return [probe(name, expected) for name, expected in case.expected.items()]


def _guard_probe(name: str, guard: Guarded) -> _Probe:
    return _Probe(
        ~guard.intact(), 0.5, lambda _: f"writes outside of its output {name}: {guard.damage()}"
    )


def _input_probe(case: Case, name: str) -> _Probe:
    changed = ~unchanged(case.inputs[name], case.kept[name])
    return _Probe(changed, 0.5, lambda _: f"changes its input {name}")


def _repeat_probes(
    op: Operation, case: Case, first: Tensors, last: Tensors, names: list[str]
) -> list[_Probe]:
    """Return what asks for equal bits of two launches, or only for a right second one."""
    if not op.deterministic:
        return _error_probes(op, case, last, "a second launch gives ")

    def probe(name: str) -> _Probe:
        differs = ~same_bits(first[name], last[name])

        def explain(_: float) -> str:
            place, count = _place(differs)
            once, then = (float(result[name][place]) for result in (first, last))
            text = f"a second launch gives other bits in {name}: {once:.9g}, then {then:.9g}"
            return f"{text} at {list(place)}, {count} of {differs.numel()} places so"

        return _Probe(differs.any(), 0.5, explain)

    return [probe(name) for name in names]


def _first_fault(
    op: Operation, name: str, got: torch.Tensor, expected: torch.Tensor, limit: float
) -> str:
    """Say where an output is wrong first, what stands there, and at how many places it is so."""
    same, difference = _differences(op, name, got, expected)
    wrong = ~same | (difference > limit)
    place, count = _place(wrong)
    value, right = float(got[place]), float(expected[place])
    text = f"{list(place)}: {value:.6g} where {right:.6g} is right, {count} of {wrong.numel()} so"
    return f"{text} (NaN is what unwritten outputs hold)" if math.isnan(value) else text


def _place(wrong: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Return the first True place and their number."""
    places = wrong.nonzero()
    return tuple(int(i) for i in places[0]), len(places)


def _largest_error(
    op: Operation, name: str, got: torch.Tensor, expected: torch.Tensor
) -> torch.Tensor:
    """Return the largest error as a tensor of one number.

    It is infinite where one side is not finite and the other differs.
    """
    if not expected.numel():
        return torch.zeros((), device=expected.device)
    same, difference = _differences(op, name, got, expected)
    return torch.where(same.all(), difference.max(), math.inf)


def _differences(
    op: Operation, name: str, got: torch.Tensor, expected: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, elementwise, whether both are finite or the same, and the error where both are."""
    finite = expected.isfinite()
    same = torch.where(finite, got.isfinite(), (got == expected) | (got.isnan() & expected.isnan()))
    zero = torch.zeros((), device=expected.device)
    difference = torch.where(finite, got - expected, zero).abs()
    if name in op.relative_outputs:
        size = torch.where(finite, expected, zero).abs().amax(-1, keepdim=True)
        difference = difference / torch.where(size > 0, size, torch.ones_like(size))
    return same, difference


def _largest_value(op: Operation, name: str, expected: torch.Tensor) -> float:
    """Return the largest finite magnitude, in the units of the output's errors."""
    if name in op.relative_outputs or not expected.numel():
        return 1.0
    return float(torch.where(expected.isfinite(), expected, 0.0).abs().max())


def _renew(case: Case) -> None:
    """Make a case's inputs what they were."""
    fresh = operation(case.problem.op).make_inputs(
        case.problem, case.distribution, SEED, next(iter(case.expected.values())).device
    )
    for name in case.kept:
        restore(case.inputs[name], fresh[name])


def _tensors(values: Tensors) -> Tensors:
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


class CaseCache:
    """Keeps the last few cases, since many variants are checked on the same ones."""

    def __init__(self, device: torch.device, large: int = 2, small: int = 64) -> None:
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
