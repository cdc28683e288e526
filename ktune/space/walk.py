"""Walk the assignments of a space for one problem and device, cutting illegal branches early."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktune.problem import Scalar
from ktune.space.expressions import Expression

Values = dict[str, Scalar]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One thing that may vary.

    Attributes:
        name: as templates and files write it.
        choices: its values, the preferred ones first.
        when: the condition under which it applies; None means always.
        is_launch: whether Triton takes it at launch, and no template sees it.
    """

    name: str
    choices: tuple[Scalar, ...]
    when: Expression | None
    is_launch: bool


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a legal variant must satisfy, and why."""

    require: Expression
    because: str


class Walk:
    """The assignments of some parameters, in file order, over fixed names.

    A condition that names an absent parameter is false. A constraint that names an absent
    parameter does not apply.

    Args:
        parameters: in file order.
        constraints: all that may apply.
        fixed: the problem's names and ``device``.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        constraints: Sequence[Constraint],
        fixed: Mapping[str, Any],
    ) -> None:
        self._parameters = parameters
        self._names = dict(fixed)
        self._own = frozenset(p.name for p in parameters)
        self._levels = self._by_level(constraints)
        conditions = [p.when for p in parameters if p.when is not None]
        self._own_names = {
            expression: tuple(name for name in expression.names if name in self._own)
            for expression in (*conditions, *(c.require for c in constraints))
        }
        self._needs = [self._condition_names(level) for level in range(len(parameters) + 1)]
        self._sizes: dict[tuple[Any, ...], int] = {}
        self.rejected = {constraint.because: 0 for constraint in constraints}

    def _by_level(self, constraints: Sequence[Constraint]) -> list[list[Constraint]]:
        """Put each constraint where the last of its parameters gets its value."""
        place = {parameter.name: index for index, parameter in enumerate(self._parameters)}
        levels: list[list[Constraint]] = [[] for _ in self._parameters]
        for constraint in constraints:
            indices = [place[name] for name in constraint.require.names if name in place]
            levels[max(indices, default=0)].append(constraint)
        return levels

    def _condition_names(self, level: int) -> tuple[str, ...]:
        conditions = [p.when for p in self._parameters[level:] if p.when is not None]
        return tuple({n for when in conditions for n in when.names if n in self._own})

    def applies(self, parameter: Parameter, names: Mapping[str, Any]) -> bool:
        """Return whether a parameter exists, given the values of earlier ones."""
        when = parameter.when
        return when is None or (self._bound(when, names) and when.holds(names))

    def broken(self, constraint: Constraint, names: Mapping[str, Any]) -> bool:
        """Return whether a constraint applies and does not hold."""
        require = constraint.require
        return self._bound(require, names) and not require.holds(names)

    def _bound(self, expression: Expression, names: Mapping[str, Any]) -> bool:
        for name in self._own_names[expression]:  # noqa: SIM110 (hot: a generator costs twice)
            if name not in names:
                return False
        return True

    def legal(self) -> Iterator[Values]:
        """Yield every legal assignment, once; counts the others in ``rejected``."""
        yield from self._from(0, {})

    def _from(self, level: int, values: Values) -> Iterator[Values]:
        if level == len(self._parameters):
            yield dict(values)
            return
        parameter = self._parameters[level]
        names = self._names
        if not self.applies(parameter, names):
            if self._passes(level, level + 1):
                yield from self._from(level + 1, values)
            return
        for choice in parameter.choices:
            names[parameter.name] = values[parameter.name] = choice
            if self._passes(level, level + 1):
                yield from self._from(level + 1, values)
        del names[parameter.name], values[parameter.name]

    def _passes(self, level: int, rest: int) -> bool:
        for constraint in self._levels[level]:
            if self.broken(constraint, self._names):
                self.rejected[constraint.because] += self._size(rest)
                return False
        return True

    def _size(self, level: int) -> int:
        """Return how many assignments complete the present one, constraints aside."""
        if level == len(self._parameters):
            return 1
        key = (level, *(self._names.get(name) for name in self._needs[level]))
        if key not in self._sizes:
            self._sizes[key] = self._count(level)
        return self._sizes[key]

    def _count(self, level: int) -> int:
        parameter = self._parameters[level]
        names = self._names
        if not self.applies(parameter, names):
            return self._size(level + 1)
        total = 0
        for choice in parameter.choices:
            names[parameter.name] = choice
            total += self._size(level + 1)
        del names[parameter.name]
        return total


def distance(values: Mapping[str, Scalar], other: Mapping[str, Scalar]) -> float:
    """Return how far an assignment is from another: words weigh most, sizes by their ratio."""
    total = 0.0
    for name in values.keys() | other.keys():
        total += 100 if name == "template" and values[name] != other[name] else 0
        total += _apart(values.get(name), other.get(name))
    return total


def _apart(a: Scalar | None, b: Scalar | None) -> float:
    if a == b:
        return 0.0
    numbers = isinstance(a, int | float) and isinstance(b, int | float)
    if numbers and a and b and a > 0 and b > 0:  # type: ignore[operator]
        return min(abs(math.log2(a / b)), 3.0)  # type: ignore[operator]
    return 4.0
