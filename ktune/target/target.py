"""What a search runs against: GPUs of this machine, or the recording of another one."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Protocol

from ktune.bench.measurement import Measurement
from ktune.device import Device
from ktune.problem import Problem
from ktune.variant import Variant

ROUNDS = 25
"""Samples of each finalist."""


@dataclass(slots=True)
class Spent:
    """Where the seconds of a search went.

    ``compile`` runs on ``workers`` cores beside all else; ``check``, ``time``, ``finals``, ``lost``
    and ``idle`` add up to the wall time of the timing workers.

    Attributes:
        render: turning templates into source.
        compile: core-seconds of compiling.
        check: comparing variants with float64.
        time: timing them.
        finals: timing finalists and baselines in turn, and re-checking winners.
        lost: variants that hung, crashed or failed, and starting workers anew.
        idle: timing workers waiting for a compiled kernel.
        wall: seconds from start to end.
        workers: compile workers.
        timers: timing workers.
    """

    render: float = 0.0
    compile: float = 0.0
    check: float = 0.0
    time: float = 0.0
    finals: float = 0.0
    lost: float = 0.0
    idle: float = 0.0
    wall: float = 0.0
    workers: int = 1
    timers: int = 1

    def to_dict(self) -> dict[str, float]:
        """Return the seconds by phase, as JSON values."""
        names = ("render", "compile", "check", "time", "finals", "lost", "idle", "wall")
        seconds = {f"{name}_s": round(getattr(self, name), 3) for name in names}
        return {**seconds, "workers": self.workers, "timers": self.timers}


class Target(Protocol):
    """Evaluates variants: they go in by ``submit`` and come out, measured, by ``next``."""

    device: Device
    protocol: str
    measured: str
    versions: dict[str, str]
    replayed_from: str | None
    capacity: int
    """How many variants to keep submitted; 1 means one after the other."""
    spent: Spent

    @property
    def roofs(self) -> dict[str, float]:
        """Return the device's measured rates by name; empty if unknown."""

    def now(self) -> float:
        """Return the seconds since the start, on the clock that budgets are counted by."""

    def submit(self, problem: Problem, variant: Variant) -> None:
        """Take a variant for evaluation."""

    def next(self) -> tuple[Problem, Variant, Measurement]:
        """Return the next outcome, in any order."""

    def finals(self, problem: Problem, variants: list[Variant]) -> dict[str, list[float]]:
        """Time variants and baselines in turn; samples by variant text or ``baseline:<name>``.

        Paired by index where taken together; a single sample each where only medians are known.
        """

    def verify(self, problem: Problem, variant: Variant) -> str:
        """Check a winner on a whole problem; return what is wrong, or nothing."""

    def close(self) -> None:
        """Give back what the target holds."""


def versions() -> dict[str, str]:
    """Return the versions that a time depends on."""
    names = ("torch", "triton")
    return {name: importlib.metadata.version(name) for name in names}
