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
ESTIMATE = 5
LEAST_SAMPLES = 15
MOST_SAMPLES = 50
SAMPLE_BUDGET_MS = 20.0


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

    def time(self, launch: Callable[[], object]) -> Timing:
        """Warm up, estimate, then take as many samples as fit about 20 ms of GPU time."""
        timed = (launch, self._prepare(launch))
        estimate = statistics.median(self._sample([timed] * ESTIMATE))
        count = int(SAMPLE_BUDGET_MS / max(estimate, 1e-3))
        count = max(LEAST_SAMPLES, min(MOST_SAMPLES, count))
        return Timing(tuple(self._sample([timed] * count)))

    def interleave(self, launches: Sequence[Callable[[], object]], rounds: int) -> list[Timing]:
        """Time several launches in turn, in a new order each round.

        Sample ``i`` of every launch is of round ``i``, so samples can be paired.
        """
        timed = [(launch, self._prepare(launch)) for launch in launches]
        samples: list[list[float]] = [[] for _ in launches]
        shuffle = random.Random(0)
        for _ in range(rounds):
            order = list(range(len(launches)))
            shuffle.shuffle(order)
            for i, value in zip(order, self._sample([timed[i] for i in order]), strict=True):
                samples[i].append(value)
        return [Timing(tuple(values)) for values in samples]

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
