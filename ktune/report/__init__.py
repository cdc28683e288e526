"""What was measured, set side by side: strategies against each other, winners against peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ktune.problem import Problem, Scalar
from ktune.variant import Variant


@dataclass(frozen=True, slots=True)
class Strategy:
    """A named setting of some parameters."""

    name: str
    settings: Mapping[str, Scalar]

    def holds(self, variant: Variant) -> bool:
        """Return whether a variant has all the settings."""
        return self.settings.items() <= variant.values.items()


@dataclass(frozen=True, slots=True)
class Rescales:
    """How often references moved.

    Attributes:
        rows: (row, key tile) pairs in which the row's reference moved.
        rows_possible: those in which it could: not the row's first tile.
        tiles: (query tile, key tile) pairs in which a row's reference moved.
        tiles_possible: those in which one could.
    """

    rows: int
    rows_possible: int
    tiles: int
    tiles_possible: int

    @property
    def row_share(self) -> float | None:
        """Rows that moved, of those that could; None if none could."""
        return self.rows / self.rows_possible if self.rows_possible else None

    @property
    def tile_share(self) -> float | None:
        """Tiles with a row that moved, of those with one that could; None if none had."""
        return self.tiles / self.tiles_possible if self.tiles_possible else None


@dataclass(slots=True)
class Observation:
    """What was seen of a strategy on one distribution.

    Attributes:
        rescales: counts; None where the operation has no accumulator to rescale.
        error: largest error against float64, as the check counts it; None if not finite.
        limit: the error allowed.
        detail: what went wrong; empty if nothing.
        latency_ms: median on these inputs; None where times do not depend on them.
        spread_ms: interquartile range.
    """

    rescales: Rescales | None = None
    error: float | None = None
    limit: float | None = None
    detail: str = ""
    latency_ms: float | None = None
    spread_ms: float | None = None


@dataclass(slots=True)
class Line:
    """One strategy of a comparison: its best variant, and what was seen of it.

    Attributes:
        strategy: what is compared.
        variant: the fastest with these settings; None if the space has none for the problem.
        latency_ms: its time; None if unknown.
        spread_ms: its interquartile range.
        considered: variants among which it is the fastest.
        detail: why there is no variant or no time.
        observations: by distribution.
    """

    strategy: Strategy
    variant: Variant | None = None
    latency_ms: float | None = None
    spread_ms: float | None = None
    considered: int = 0
    detail: str = ""
    observations: dict[str, Observation] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "name": self.strategy.name,
            "settings": dict(self.strategy.settings),
            "variant": self.variant.text if self.variant else None,
            "latency_ms": self.latency_ms,
            "spread_ms": self.spread_ms,
            "considered": self.considered,
            "detail": self.detail,
            "distributions": {name: asdict(seen) for name, seen in self.observations.items()},
        }


@dataclass(slots=True)
class Comparison:
    """Strategies side by side on one problem.

    Attributes:
        axis: what was compared.
        problem: what was timed.
        observed: what rescales and errors were computed on.
        interpreted: whether that was in Triton's interpreter.
        tiles: parameters that were the same for all there.
        target: device, protocol, date and versions of the times.
        lines: one a strategy.
    """

    axis: str
    problem: Problem
    observed: Problem
    interpreted: bool
    tiles: dict[str, Scalar]
    target: dict[str, Any]
    lines: list[Line]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "axis": self.axis,
            "problem": self.problem.text,
            "observed": {
                "problem": self.observed.text,
                "interpreted": self.interpreted,
                "tiles": self.tiles,
            },
            "target": self.target,
            "strategies": [line.to_dict() for line in self.lines],
        }
