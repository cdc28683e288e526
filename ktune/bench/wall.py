"""How long does a launch take in Triton's interpreter: wall-clock time, to compare and no more."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ktune.bench.timer import Counts, Timing, interleaved, race

PROTOCOL = "interpreter-wall-clock-v1"
"""Names how times are taken; times of different protocols are never compared."""

COUNTS = Counts(estimate=1, least=3, most=15, budget_ms=100.0)
"""Few samples: an interpreted launch may take seconds."""


class WallTimer:
    """Times launches that are over when they return; has ``Timer``'s interface."""

    def time(self, launch: Callable[[], object], best_ms: float | None = None) -> Timing:
        """Warm up, then take samples by the rule of ``race``."""
        launch()
        return race(lambda count: [_sample(launch) for _ in range(count)], best_ms, COUNTS)

    def interleave(self, launches: Sequence[Callable[[], object]], rounds: int) -> list[Timing]:
        """Time several launches in turn, in a new order each round; samples can be paired."""
        for launch in launches:
            launch()
        return interleaved(
            lambda order: [_sample(launches[i]) for i in order], len(launches), rounds
        )


def _sample(launch: Callable[[], object]) -> float:
    started = time.perf_counter()
    launch()
    return 1e3 * (time.perf_counter() - started)
