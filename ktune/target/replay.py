"""A target that replays a recording, on a simulated clock."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from ktune.bench.measurement import Measurement
from ktune.operations import operation
from ktune.problem import Problem
from ktune.target.recording import Recording
from ktune.target.target import ROUNDS, Spent
from ktune.variant import Variant

UNRECORDED = "this variant is not in the recording"
COMPILE_S, CACHED_S, CHECK_S, TIME_S = 2.5, 0.05, 0.03, 0.05
"""Seconds of a phase where a recording does not say; CACHED_S is a compile cache's answer."""

Kernel = tuple[str, str]
"""What a compile cache goes by."""


def kernel_of(problem: Problem, variant: Variant) -> Kernel:
    """Return a name of a variant's kernel: problems of equal structure share it."""
    return variant.text, str(operation(problem.op).structure(problem))


@dataclass(order=True, slots=True)
class _Job:
    """A variant on its way; the first that is compiled is the first to be timed."""

    compiled_at: float
    number: int
    problem: Problem = field(compare=False)
    variant: Variant = field(compare=False)


class ReplayTarget:
    """Answers from a recording; times are those of another day and perhaps another machine.

    The clock is simulated: compile workers and one timing worker take the recorded seconds, so
    budgets in seconds mean what they would on the recorded machine, and nobody waits.

    Args:
        recording: what answers.
        compilers: compile workers to simulate. One means one variant at a time, so that a
            sampler sees every outcome before it chooses again.
    """

    def __init__(self, recording: Recording, compilers: int = 1) -> None:
        self._recording = recording
        self.device = recording.device
        self.protocol = recording.protocol
        self.measured = recording.measured
        self.versions = recording.versions
        self.roofs = recording.roofs
        self.replayed_from: str | None = recording.title
        self.capacity = 1 if compilers == 1 else compilers + 2
        self.spent = Spent(workers=compilers)
        self._free = [0.0] * compilers
        self._jobs: list[_Job] = []
        self._number = 0
        self._now = self._timer_free = 0.0
        self._compiled: set[Kernel] = set()

    def now(self) -> float:
        """Return the simulated seconds since the start."""
        return self._now

    def submit(self, problem: Problem, variant: Variant) -> None:
        """Take a variant for evaluation."""
        outcome = self._outcome(problem, variant)
        start = max(heapq.heappop(self._free), self._now)
        seconds = COMPILE_S if outcome.compile_s is None else outcome.compile_s
        kernel = kernel_of(problem, variant)
        if kernel in self._compiled:
            seconds = min(seconds, CACHED_S)
        self._compiled.add(kernel)
        self.spent.compile += seconds
        heapq.heappush(self._free, start + seconds)
        self._number += 1
        heapq.heappush(self._jobs, _Job(start + seconds, self._number, problem, variant))

    def next(self) -> tuple[Problem, Variant, Measurement]:
        """Return the recorded outcome; a variant that was not recorded counts as a crash."""
        job = heapq.heappop(self._jobs)
        outcome = self._outcome(job.problem, job.variant)
        start = max(job.compiled_at, self._timer_free)
        check_s = CHECK_S if outcome.check_s is None else outcome.check_s
        time_s = TIME_S if outcome.time_s is None else outcome.time_s
        if outcome.status in {"compile_error", "over_limit"}:
            check_s = time_s = 0.0
        self.spent.idle += start - self._timer_free
        self.spent.check += check_s
        self.spent.time += time_s
        self._timer_free = start + check_s + time_s
        self._now = max(self._now, self._timer_free)
        return job.problem, job.variant, outcome

    def finals(self, problem: Problem, variants: list[Variant]) -> dict[str, list[float]]:
        """Return recorded finals; a variant outside them has its recorded median."""
        seen = self._recording.problem(problem)
        found: dict[str, list[float]] = {}
        for text in (variant.text for variant in variants):
            latency = seen.outcomes[text].latency_ms if text in seen.outcomes else None
            if text in seen.finals:
                found[text] = seen.finals[text]
            elif latency is not None:
                found[text] = [latency]
        found |= {name: seen.finals[name] for name in seen.finals if name.startswith("baseline:")}
        seconds = ROUNDS * sum(samples[0] for samples in found.values()) / 1e3
        self.spent.finals += seconds
        self._timer_free = self._now = max(self._now, self._timer_free) + seconds
        return found

    def verify(self, problem: Problem, variant: Variant) -> str:
        """Return what is wrong with a winner on a problem: nothing can be run here."""
        return ""

    def close(self) -> None:
        """Nothing is held."""
        self.spent.wall = self._now

    def _outcome(self, problem: Problem, variant: Variant) -> Measurement:
        missing = Measurement("crashed", detail=UNRECORDED)
        return self._recording.problem(problem).outcomes.get(variant.text, missing)
