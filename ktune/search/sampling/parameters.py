"""Between a space's parameters and Optuna's: what is asked, and how an answer is read back.

Words are categorical. Sizes keep their order: choices that are all powers of two, each twice the
last, become ``log2(name)``; consecutive integers stay themselves; other ordered numbers become
``index(name)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import Trial

from ktune.device import Device
from ktune.problem import Problem, Scalar
from ktune.space import Parameter, Space, Walk
from ktune.variant import Variant


@dataclass(frozen=True, slots=True)
class Axis:
    """One parameter as Optuna sees it.

    Attributes:
        name: Optuna's name of it.
        values: what Optuna's answers mean: by position for integers counted from ``low``.
        low: the least integer; None for a categorical parameter.
    """

    name: str
    values: tuple[Scalar, ...]
    low: int | None

    @classmethod
    def of(cls, parameter: Parameter) -> Axis:
        """Choose how to show a parameter to Optuna."""
        choices, name = tuple(parameter.choices), parameter.name
        numbers = [v for v in choices if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(numbers) < len(choices) or list(numbers) != sorted(numbers):
            return cls(name, choices, None)
        if all(isinstance(v, int) for v in numbers):
            if all(b == a + 1 for a, b in pairwise(numbers)):
                return cls(name, choices, int(numbers[0]))
            first = int(numbers[0])
            if first & (first - 1) == 0 and all(b == 2 * a for a, b in pairwise(numbers)):
                return cls(f"log2({name})", choices, first.bit_length() - 1)
        return cls(f"index({name})", choices, 0)

    @property
    def distribution(self) -> BaseDistribution:
        """Optuna's distribution."""
        if self.low is None:
            return CategoricalDistribution(self.values)
        return IntDistribution(self.low, self.low + len(self.values) - 1)

    def encode(self, value: Scalar) -> Scalar:
        """Return Optuna's answer that means a value."""
        return value if self.low is None else self.low + self.values.index(value)

    def decode(self, answer: Scalar) -> Scalar:
        """Return the value that an answer means."""
        return answer if self.low is None else self.values[int(answer) - self.low]

    def suggest(self, trial: Trial) -> Scalar:
        """Ask the trial for a value."""
        if self.low is None:
            word: Scalar = trial.suggest_categorical(self.name, self.values)  # type: ignore[assignment]
            return word
        high = self.low + len(self.values) - 1
        return self.decode(trial.suggest_int(self.name, self.low, high))


class Axes:
    """All parameters of a space, for one problem and device.

    Args:
        space: whose parameters.
        problem: decides which apply.
        device: likewise.
        static: ask for every parameter in every trial, for samplers that know no conditions; what
            does not apply is dropped from the answer.
    """

    def __init__(
        self, space: Space, problem: Problem, device: Device, static: bool = False
    ) -> None:
        self.static = static
        self._parameters = space.parameters
        self._names = space.names(problem, device)
        self._walk = Walk(space.parameters, (), self._names)
        self._axes = {parameter.name: Axis.of(parameter) for parameter in space.parameters}

    def suggest(self, trial: Trial) -> dict[str, Scalar]:
        """Ask for every parameter that applies, in the file's order; may be illegal as a whole."""
        values: dict[str, Scalar] = {}
        for parameter in self._parameters:
            applies = self._walk.applies(parameter, {**self._names, **values})
            if applies or self.static:
                answer = self._axes[parameter.name].suggest(trial)
                if applies:
                    values[parameter.name] = answer
        return values

    def encode(self, variant: Variant) -> dict[str, Scalar]:
        """Return the Optuna parameters of a variant."""
        values = variant.values
        if self.static:
            values = {p.name: values.get(p.name, p.choices[0]) for p in self._parameters}
        return {
            self._axes[name].name: self._axes[name].encode(value) for name, value in values.items()
        }

    def distributions(self, variant: Variant) -> dict[str, BaseDistribution]:
        """Return the Optuna distributions of a variant's parameters."""
        names = [p.name for p in self._parameters if self.static or p.name in variant.values]
        return {self._axes[name].name: self._axes[name].distribution for name in names}
