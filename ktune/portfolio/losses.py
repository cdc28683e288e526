"""What a variant loses against a problem's best, and which differences of times are any."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import inf, sqrt

from ktune.bench.measurement import Measurement
from ktune.operations import operation, parse_problem
from ktune.problem import Problem
from ktune.table.region import flags_of

Times = Mapping[str, Mapping[str, Measurement]]
"""Measurements by problem text and variant text, of one operation on one device."""

DRIFT = 0.01
"""Least share by which two separate measurements must differ to differ at all.

On one H200, the ratio of two variants measured apart strayed from that of the same two in
interleaved rounds by 0.3 % (softmax) and 0.7 % (attention) in the median of 228 and 294 pairs, and
by 0.6 % and 1.6 % in the upper quartile: clocks and temperature move between measurements, which
no spread within one shows.
"""
ERRORS = 3.0
"""Standard errors that a difference must exceed. Three, because a group makes tens of comparisons:
with two, 20 problems of two equally fast variants would show a difference more often than not."""
MEDIAN_ERROR = 0.93
"""Standard error of the median of n samples, in units of their interquartile range / sqrt(n): for
normal samples the range is 1.349 sigma and the error 1.253 sigma / sqrt(n)."""

Loss = tuple[float, float]
"""Worst and mean loss over some problems; a difference within the noise counts as none."""


def noise_ms(a: Measurement, b: Measurement) -> float:
    """Return the least difference of two latencies, in ms, that is one.

    ``max(DRIFT * faster, ERRORS * MEDIAN_ERROR * sqrt(IQR_a**2 / n_a + IQR_b**2 / n_b))``: some
    standard errors of a difference of medians, and never less than separate measurements drift.
    """
    variance = sum((m.spread_ms or 0.0) ** 2 / max(m.samples, 1) for m in (a, b))
    return max(DRIFT * min(_ms(a), _ms(b)), ERRORS * MEDIAN_ERROR * sqrt(variance))


class Grid:
    """The measured problems, sorted, and what each variant costs on them.

    Args:
        times: only measurements that are ok count; a problem without one is left out.
    """

    def __init__(self, times: Times) -> None:
        self._times = {
            problem: {text: m for text, m in sorted(found.items()) if m.ok}
            for problem, found in sorted(times.items())
        }
        self._times = {problem: found for problem, found in self._times.items() if found}
        self.problems = {text: parse_problem(text) for text in self._times}
        self._best = {
            problem: min(found.values(), key=_ms) for problem, found in self._times.items()
        }

    def measured(self, problem: str) -> Iterable[str]:
        """Return the variants that have a time, sorted by text."""
        return self._times[problem]

    def ratio(self, problem: str, variant: str) -> float:
        """Return a variant's time over the problem's best, less 1; infinite without a time."""
        found = self._times[problem].get(variant)
        return inf if found is None else _ms(found) / _ms(self._best[problem]) - 1.0

    def loss(self, problem: str, variant: str) -> float:
        """Return ``ratio``, or 0 where it is within the noise."""
        found = self._times[problem].get(variant)
        if found is None:
            return inf
        best = self._best[problem]
        sure = _ms(found) - _ms(best) > noise_ms(found, best)
        return self.ratio(problem, variant) if sure else 0.0

    def losses(self, problems: Sequence[str], variant: str) -> Loss:
        """Return the worst and the mean loss of a variant over problems."""
        found = [self.loss(problem, variant) for problem in problems]
        return max(found), sum(found) / len(found)

    def common(self, problems: Sequence[str]) -> list[str]:
        """Return the variants that have a time on every one of some problems, sorted."""
        first, *others = problems
        return [v for v in self._times[first] if all(v in self._times[p] for p in others)]

    def tied(self, problem: str, a: str, b: str) -> bool:
        """Return whether two variants differ by no more than the noise."""
        x, y = self._times[problem][a], self._times[problem][b]
        return abs(_ms(x) - _ms(y)) <= noise_ms(x, y)

    def pick(
        self, problems: Sequence[str], variants: Sequence[str], loss: float = 0.0
    ) -> str | None:
        """Return the variant that loses least on problems; among tied ones the first given.

        Args:
            problems: which the variant must have a time on.
            variants: to choose from, in the order that resolves ties.
            loss: a tied variant may lose this much, or as much as the one that loses least.
        """
        known = [v for v in variants if all(v in self._times[p] for p in problems)]
        if not known:
            return None
        least = min(known, key=lambda v: self.losses(problems, v))
        most = max(loss, self.losses(problems, least)[0])
        for variant in known:
            tied = all(self.tied(problem, variant, least) for problem in problems)
            if tied and self.losses(problems, variant)[0] <= most:
                return variant
        return least

    def groups(self) -> list[list[str]]:
        """Return the problems of equal structure and equal fields but for sizes, together."""
        found: dict[Hashable, list[str]] = {}
        for text, problem in self.problems.items():
            found.setdefault(_group(problem), []).append(text)
        return list(found.values())


def _group(problem: Problem) -> Hashable:
    op = operation(problem.op)
    structure = tuple(sorted(op.structure(problem).items()))
    return tuple(flags_of(problem).items()), structure, op.access(problem)


def _ms(measurement: Measurement) -> float:
    assert measurement.latency_ms is not None, "an ok measurement has a time"
    return measurement.latency_ms
