"""A measurement: the outcome of one variant on one problem, good or bad."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

Status = Literal["ok", "wrong", "compile_error", "over_limit", "crashed", "timeout", "bad_timing"]
STATUSES: tuple[str, ...] = get_args(Status)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The outcome of checking and timing one variant on one problem.

    Attributes:
        status: ``ok``, or why the variant has no time.
        latency_ms: median of the samples; None unless ``ok``.
        spread_ms: interquartile range of the samples.
        samples: timed launches.
        registers: per thread.
        spill_bytes: per thread.
        shared_bytes: per program.
        error: largest error against float64, in units of the output (or of its row's largest).
        error_limit: largest error allowed.
        compile_s: seconds spent compiling.
        check_s: seconds spent checking.
        time_s: seconds spent timing.
        detail: the first line of an error message; empty if ``ok``.
    """

    status: Status
    latency_ms: float | None = None
    spread_ms: float | None = None
    samples: int = 0
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    error: float | None = None
    error_limit: float | None = None
    compile_s: float | None = None
    check_s: float | None = None
    time_s: float | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the variant is right and has a time."""
        return self.status == "ok"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are set, as JSON values."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "", 0)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Measurement:
        """Build a measurement from ``to_dict``'s result; a bad time makes it a bad timing."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known}).sane()

    def sane(self) -> Measurement:
        """Return self, or a ``bad_timing`` where an ``ok`` time is not a positive number."""
        if not self.ok or (
            self.latency_ms is not None and math.isfinite(self.latency_ms) and self.latency_ms > 0
        ):
            return self
        return replace(
            self, status="bad_timing", latency_ms=None, spread_ms=None,
            detail=f"the timer returned {self.latency_ms}",
        )  # fmt: skip
