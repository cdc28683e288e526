"""Choose what a table stores: the default variant, unless another beats it beyond the noise."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from math import floor, sqrt

from ktune.bench.measurement import Measurement

FINALISTS = 6
LEAST_PAIRS = 6
LEAST_MARGIN = 0.005
"""A gain under half a per cent is not one."""


@dataclass(frozen=True, slots=True)
class Winner:
    """The result of the finals.

    Attributes:
        text: the stored variant.
        latency_ms: its median in the finals.
        spread_ms: its interquartile range there (or when it was first measured).
        default_latency_ms: the default variant's median in the finals; None if it has no time.
        margin: share of the default's time that the winner saves; 0 for the default itself, and
            negative for a variant that was to win whatever its time.
        interval: 95 % interval of that share, from paired samples; None without them.
        samples: samples a median rests on.
    """

    text: str
    latency_ms: float
    spread_ms: float
    default_latency_ms: float | None
    margin: float
    samples: int
    interval: tuple[float, float] | None = None


def choose(
    default: str, samples: Mapping[str, list[float]], measured: Mapping[str, Measurement]
) -> Winner | None:
    """Return the winner among the finalists, or None if nothing has a time.

    Args:
        default: text of the default variant.
        samples: finals' samples in ms by variant text; paired by index where there are many.
        measured: first measurements, for the spread where a finalist has a single sample.
    """
    medians = {text: statistics.median(values) for text, values in samples.items() if values}
    if not medians:
        return None
    best = min(medians, key=lambda text: (medians[text], text))
    if default in medians and not beats(best, default, samples, measured):
        best = default
    return as_winner(best, default, samples, measured)


def beats(
    text: str, other: str, samples: Mapping[str, list[float]], measured: Mapping[str, Measurement]
) -> bool:
    """Return whether a variant is faster than another beyond the noise."""
    share = _sure_share(samples[other], samples[text], measured.get(text))
    return text != other and share >= LEAST_MARGIN


def as_winner(
    text: str, default: str, samples: Mapping[str, list[float]], measured: Mapping[str, Measurement]
) -> Winner:
    """Return a finalist as the winner, whatever its time; arguments as of ``choose``."""
    latency = statistics.median(samples[text])
    base = statistics.median(samples[default]) if samples.get(default) else None
    paired = base is not None and text != default
    return Winner(
        text,
        latency,
        _spread(samples[text], measured.get(text)),
        base,
        0.0 if base is None else 1.0 - latency / base,
        len(samples[text]),
        saved_share(samples[default], samples[text]) if paired else None,
    )


def saved_share(slow: list[float], fast: list[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the share of ``slow``'s median that ``fast`` saves.

    By order statistics of the paired differences; None where samples are not paired.
    """
    if len(slow) != len(fast) or len(slow) < LEAST_PAIRS:
        return None
    differences = sorted(a - b for a, b in zip(slow, fast, strict=True))
    rank, base = _rank(len(differences)), statistics.median(slow)
    return differences[rank] / base, differences[-1 - rank] / base


def _rank(count: int) -> int:
    """Return which order statistic is the lower end of the median's 95 % interval."""
    return max(floor(count / 2 - 0.98 * sqrt(count)), 0)


def _sure_share(slow: list[float], fast: list[float], measured: Measurement | None) -> float:
    """Return a lower bound of the share of ``slow``'s time that ``fast`` saves.

    With paired samples: the lower end of the 95 % interval of the median difference, by order
    statistics. With single samples: the difference less the interquartile range.
    """
    interval = saved_share(slow, fast)
    if interval is not None:
        return interval[0]
    noise = (measured.spread_ms or 0.0) if measured else 0.0
    return 1.0 - (statistics.median(fast) + noise) / statistics.median(slow)


def _spread(values: list[float], measured: Measurement | None) -> float:
    if len(values) > 3:
        low, _, high = statistics.quantiles(values, n=4)
        return high - low
    return (measured.spread_ms or 0.0) if measured else 0.0
