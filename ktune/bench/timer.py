"""How fast is a launch: CUDA events, cold L2, warmed up, median and spread."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import torch

from ktune.device import Device

PROTOCOL = "cuda-events-cold-l2-v1"
"""Names how times are taken; times of different protocols are never compared."""

WARMUP = 3
CLEARLY_BEATEN = 2.0
"""Times the best at which five samples are enough."""
DRIFT = 0.02
"""Share of the best by which a time may change between two moments of a search."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How many samples are taken.

    Attributes:
        estimate: for a first look.
        least: enough to see the noise.
        most: where samples are cheap.
        budget_ms: about the time that all samples may take.
    """

    estimate: int = 5
    least: int = 15
    most: int = 50
    budget_ms: float = 20.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Samples of one launch, in milliseconds."""

    samples: tuple[float, ...]

    @property
    def latency_ms(self) -> float:
        """The median."""
        return statistics.median(self.samples)

    @property
    def spread_ms(self) -> float:
        """The interquartile range."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4)
        return high - low


def race(
    sample: Callable[[int], list[float]], best_ms: float | None = None, counts: Counts | None = None
) -> Timing:
    """Take samples of one launch, and stop early once it has clearly lost.

    First an estimate. If its median is over twice ``best_ms``, those samples are the timing.
    Then ``least`` samples. If their median is over ``best_ms`` by more than the noise, they are:
    the noise is their interquartile range, or 2 % of ``best_ms`` where that is more, since the
    best was timed at another moment. Otherwise the order is in doubt, and as many are added as
    fit ``budget_ms``. Without a ``best_ms`` nothing stops early.

    Args:
        sample: takes so many samples, in ms.
        best_ms: the best median known.
        counts: how many; ``Counts()`` if left out.
    """
    counts = counts or Counts()
    first = sample(counts.estimate)
    estimate = statistics.median(first)
    if best_ms is not None and estimate > CLEARLY_BEATEN * best_ms:
        return Timing(tuple(first))
    seen = sample(counts.least)
    timing = Timing(tuple(seen))
    if best_ms is not None:
        noise = max(timing.spread_ms, DRIFT * best_ms)
        if timing.latency_ms - best_ms > noise:
            return timing
    total = min(counts.most, int(counts.budget_ms / max(estimate, 1e-3)))
    return Timing((*seen, *sample(total - counts.least))) if total > counts.least else timing


def interleaved(
    sample: Callable[[list[int]], list[float]], count: int, rounds: int
) -> list[Timing]:
    """Time several launches in turn, in a new order each round.

    Args:
        sample: takes one sample, in ms, of each launch in the order given.
        count: how many launches.
        rounds: samples of each.
    """
    samples: list[list[float]] = [[] for _ in range(count)]
    shuffle = random.Random(0)
    for _ in range(rounds):
        order = list(range(count))
        shuffle.shuffle(order)
        for i, value in zip(order, sample(order), strict=True):
            samples[i].append(value)
    return [Timing(tuple(values)) for values in samples]


class Timer:
    """Times launches on one GPU.

    Before each sample the L2 cache is filled with other data (a buffer of at least four times its
    size is written), as often as it takes to keep the GPU busy while the host prepares the launch:
    host time does not count.
    """

    def __init__(self, device: Device, index: int = 0) -> None:
        self._index = index
        words = max(4 * device.l2_bytes, 256 << 20) // 4
        self._flush = torch.empty(words, dtype=torch.int32, device=f"cuda:{index}")
        self._flush_ms = min(self._sample([(self._flush.zero_, 1)] * 5))

    def time(self, launch: Callable[[], object], best_ms: float | None = None) -> Timing:
        """Warm up, then take samples by the rule of ``race``: about 20 ms of GPU time at most.

        Args:
            launch: what to time.
            best_ms: the best median known; what is clearly slower gets few samples.
        """
        timed = (launch, self._prepare(launch))
        return race(lambda count: self._sample([timed] * count), best_ms)

    def interleave(self, launches: Sequence[Callable[[], object]], rounds: int) -> list[Timing]:
        """Time several launches in turn, in a new order each round.

        Sample ``i`` of every launch is of round ``i``, so samples can be paired.
        """
        timed = [(launch, self._prepare(launch)) for launch in launches]
        return interleaved(
            lambda order: self._sample([timed[i] for i in order]), len(launches), rounds
        )

    def _prepare(self, launch: Callable[[], object]) -> int:
        """Warm a launch up; return how many flushes hide the host time of preparing it."""
        for _ in range(WARMUP):
            launch()
        slowest = 0.0
        for _ in range(3):
            torch.cuda.synchronize(self._index)
            started = time.perf_counter()
            launch()
            slowest = max(slowest, time.perf_counter() - started)
        return 1 + ceil(2e3 * slowest / self._flush_ms)

    def _sample(self, launches: Sequence[tuple[Callable[[], object], int]]) -> list[float]:
        events = []
        for launch, flushes in launches:
            start, end = _event(), _event()
            for _ in range(flushes):
                self._flush.zero_()
            start.record()
            launch()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize(self._index)
        return [float(start.elapsed_time(end)) for start, end in events]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def copy_bandwidth(timer: Timer, index: int = 0, size_bytes: int = 1 << 30) -> float:
    """Return the device-to-device copy rate in GB/s, bytes read plus bytes written."""
    source = torch.empty(size_bytes, dtype=torch.uint8, device=f"cuda:{index}").random_()
    target = torch.empty_like(source)
    timing = timer.time(lambda: target.copy_(source))
    return 2 * size_bytes / timing.latency_ms / 1e6


def matmul_rate(timer: Timer, index: int = 0, size: int = 8192) -> float:
    """Return the rate of a bf16 matrix product of random data in TFLOP/s."""
    a, b = (torch.randn(size, size, device=f"cuda:{index}", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    timing = timer.time(lambda: torch.mm(a, b, out=out))
    return 2 * size**3 / timing.latency_ms / 1e9
