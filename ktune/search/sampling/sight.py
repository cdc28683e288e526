"""What a sampler of ktune's own sees of a problem's search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ktune.bench.measurement import Measurement
from ktune.problem import Problem
from ktune.variant import Variant


@dataclass(frozen=True, slots=True)
class Hint:
    """What is known of a neighbouring problem."""

    problem: Problem
    measurements: Mapping[str, Measurement]


@dataclass(slots=True)
class Sight:
    """What a chooser sees of one problem's search.

    Attributes:
        problem: what is tuned.
        legal: every legal variant by text, in file order.
        seen: outcomes so far.
        pending: texts of variants being measured, here or elsewhere.
        hints: outcomes of neighbouring problems, the nearest first.
    """

    problem: Problem
    legal: Mapping[str, Variant]
    seen: Mapping[str, Measurement]
    pending: AbstractSet[str]
    hints: Sequence[Hint] = ()

    def is_new(self, text: str) -> bool:
        """Return whether a variant is neither measured nor being measured."""
        return text not in self.seen and text not in self.pending

    def unseen(self) -> Iterator[Variant]:
        """Yield the legal variants that are new, in file order."""
        return (variant for text, variant in self.legal.items() if self.is_new(text))


def log_time(measurement: Measurement) -> float:
    """Return the logarithm of a time; infinite for a variant that has none."""
    return math.log(measurement.latency_ms) if measurement.latency_ms else math.inf
