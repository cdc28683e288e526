"""What an operation must say about itself; built-in and user operations use this interface."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ktune.device import Device
from ktune.errors import ProblemError
from ktune.problem import Problem, Scalar, format_scalar
from ktune.variant import Variant

Tensors = dict[str, Any]
"""Named inputs or outputs: tensors, and a few plain numbers such as ``scale``."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an operation's problems.

    Attributes:
        name: as written in problems, spaces and on the command line.
        default: used when a problem does not name the field; None means it must.
        choices: the legal words of a text field.
        minimum: the least legal value of a size.
        help: one line for the command line.
    """

    name: str
    default: Scalar | None = None
    choices: tuple[str, ...] = ()
    minimum: int = 1
    help: str = ""

    def check(self, op: str, value: Scalar) -> Scalar:
        """Return the value, or raise ProblemError saying what is legal."""
        where = f"{op}: {self.name}={format_scalar(value)}"
        if self.choices:
            if value not in self.choices:
                raise ProblemError(f"{where} is not one of {', '.join(self.choices)}")
        elif isinstance(self.default, bool):
            if not isinstance(value, bool):
                raise ProblemError(f"{where} must be true or false")
        elif isinstance(value, bool) or not isinstance(value, int) or value < self.minimum:
            raise ProblemError(f"{where} must be an integer of at least {self.minimum}")
        return value


class Operation(ABC):
    """A mathematical operation with one reference.

    Subclasses give the fields of a problem, how to make inputs, the float64 truth, and how a
    problem shapes the rendered kernel. Nothing here imports Triton.
    """

    name: str
    fields: tuple[Field, ...]
    distributions: tuple[str, ...]
    """Names that ``make_inputs`` takes; the first is the friendly one, the second adversarial.

    Cover what breaks kernels: peaks, a maximum that rises or falls all along, a first score that
    outweighs the rest, rows of -inf, finite scores as large as the dtype has.
    """
    roof: str
    """``memory`` or ``compute``: which of the device's ceilings the operation runs against."""
    batch_fields: tuple[str, ...] = ()
    """Sizes that only count independent rows: more of them changes no row's result."""
    relative_outputs: frozenset[str] = frozenset()
    """Outputs whose errors count relative to the largest magnitude of their row."""
    tolerance: tuple[float, float] = (2.0, 1e-5)
    """Factor and floor of the rule: error <= factor * eager PyTorch's error + floor."""
    deterministic: bool = True
    """Whether a repeated launch must give the same bits (contract D15)."""
    templates: str = ""
    """A folder of templates outside ktune, searched first; empty for the shipped ones."""

    def problem(self, fields: Mapping[str, Scalar]) -> Problem:
        """Return a complete, checked problem from some of its fields.

        Raises:
            ProblemError: a field is unknown, missing or has an illegal value.
        """
        known = [field.name for field in self.fields]
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ProblemError(
                    f"{self.name} has no field {name!r}{hint}. Its fields: {', '.join(known)}"
                )
        values: list[tuple[str, Scalar]] = []
        given = {**fields}
        self.fill(given)
        for field in self.fields:
            value = given.get(field.name, field.default)
            if value is None:
                raise ProblemError(
                    f"{self.name} needs {field.name}=...; given: "
                    f"{' '.join(fields) or 'nothing'} ({field.help})"
                )
            values.append((field.name, field.check(self.name, value)))
        problem = Problem(self.name, tuple(values))
        self.validate(problem)
        return problem

    def fill(self, fields: dict[str, Scalar]) -> None:  # noqa: B027 (an optional hook)
        """Add defaults that depend on other fields, in place."""

    def validate(self, problem: Problem) -> None:  # noqa: B027 (an optional hook)
        """Raise ProblemError where fields that are legal alone do not fit together."""

    @abstractmethod
    def structure(self, problem: Problem) -> dict[str, Scalar]:
        """Return what a template needs to know of the problem, beside the parameters.

        Two problems of equal structure render, per variant, to the same kernel.
        """

    @abstractmethod
    def default_variant(self, problem: Problem, device: Device) -> Variant:
        """Return the variant used when nothing is known: correct everywhere, reasonably fast."""

    @abstractmethod
    def bucket(self, problem: Problem) -> Problem:
        """Return the problem with its sizes rounded: problems of one bucket share an entry.

        A variant that is legal for one problem of a bucket must be legal for all.
        """

    def access(self, problem: Problem) -> Scalar:
        """Return what, beside the structure, decides how a kernel may read its inputs.

        Problems that differ in it share no entry unless it is exact: a winner for rows of whole
        16-byte words is none for odd ones. By default nothing does.
        """
        return ""

    def serves(self, problem: Problem, variant: Variant, tuned: Problem) -> bool:
        """Return whether a variant tuned for a problem of another structure may be used here.

        It must be legal, and likely better than the default variant. Asked only for problems
        whose sizes are near, where nothing nearer is known; by default nothing may.
        """
        return False

    @abstractmethod
    def proving(self, problem: Problem) -> list[Problem]:
        """Return small, ragged problems of the same structure, to check a variant on."""

    @abstractmethod
    def make_inputs(
        self, problem: Problem, distribution: str, seed: int, device: torch.device
    ) -> Tensors:
        """Return inputs drawn from a named distribution, the same for the same seed."""

    @abstractmethod
    def make_outputs(self, problem: Problem, inputs: Tensors) -> Tensors:
        """Return uninitialised outputs; a check lays copies of equal strides in guarded memory."""

    @abstractmethod
    def arguments(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Any, ...]:
        """Return the positional arguments of the rendered module's ``launch``."""

    @abstractmethod
    def reference(self, problem: Problem, inputs: Tensors) -> Tensors:
        """Return the outputs computed in float64 from the inputs as they are (rounded)."""

    @abstractmethod
    def eager(self, problem: Problem, inputs: Tensors) -> Tensors:
        """Return the outputs as eager PyTorch computes them in the inputs' own dtype."""

    @abstractmethod
    def least_bytes(self, problem: Problem) -> int:
        """Return the fewest bytes the operation must move: inputs once, outputs once."""

    @abstractmethod
    def flops(self, problem: Problem) -> int:
        """Return the floating-point operations of the matrix products; 0 if there are none."""

    def baselines(self, problem: Problem, inputs: Tensors) -> dict[str, Callable[[], object]]:
        """Return what users have today, by name: calls on these inputs, ready to be timed."""
        compiled = _lazily_compiled(lambda tensors: self.eager(problem, tensors))
        return {
            "torch": lambda: self.eager(problem, inputs),
            "compile": lambda: compiled(inputs),
        }

    def names(self, problem: Problem) -> dict[str, Scalar]:
        """Return the names that a search space's expressions may use: fields and structure."""
        return {**dict(problem.fields), **self.structure(problem), "itemsize": itemsize(problem)}

    def dtype(self, problem: Problem) -> torch.dtype:
        """Return the dtype of the inputs."""
        return DTYPES[problem.word("dtype")]


def _lazily_compiled(function: Callable[[Tensors], Tensors]) -> Callable[[Tensors], Tensors]:
    """Return the function under ``torch.compile`` with static shapes, compiled at first call."""
    compiled: list[Callable[[Tensors], Tensors]] = []

    def call(tensors: Tensors) -> Tensors:
        if not compiled:
            torch._dynamo.reset()
            compiled.append(torch.compile(function, dynamic=False))
        return compiled[0](tensors)

    return call


def itemsize(problem: Problem) -> int:
    """Return the bytes of one input element."""
    return DTYPES[problem.word("dtype")].itemsize


def next_power_of_two(value: int) -> int:
    """Return the least power of two that is at least ``value`` (and at least 1)."""
    return 1 << max(value - 1, 0).bit_length()


def generator(seed: int, device: torch.device) -> torch.Generator | None:
    """Return a seeded generator on the device; None for tensors without memory (``meta``)."""
    if device.type == "meta":
        return None
    return torch.Generator(device=device).manual_seed(seed)
