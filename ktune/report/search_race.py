"""ktune's search beside ``triton.autotune`` over the same variants: time spent, and what it won.

Both start from cold caches on one machine, one after the other. What each picks is timed again,
in turn with the tuner's next best and the best of an exhaustive recording if one is given; the
fastest right one of these finalists is the best that is known, and a loss is the time beyond it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ktune.bench.autotune import Tuning
from ktune.bench.timer import Timing
from ktune.device import Device
from ktune.operations import parse_problem
from ktune.report.bench import short_fields

SCHEMA = 1
KIND = "ktune-search-race"
KTUNE, TRITON = "ktune", "triton"
SIDES = (KTUNE, TRITON)
SCOPE = {
    KTUNE: "checks every variant against float64 before timing it, and times baselines",
    TRITON: "times every variant, checks none",
}
NONE = "\N{EN DASH}"


@dataclass(frozen=True, slots=True)
class RaceRow:
    """One problem.

    Attributes:
        picks: variant text by side; a side that found none is absent.
        finals: interleaved samples in ms, by variant text.
        tuning: what ``triton.autotune`` saw.
        unfit: why a finalist was not timed again, by variant text: it is wrong, or fails.
        reason: why there are no finals; empty if there are.
    """

    picks: dict[str, str]
    finals: dict[str, list[float]]
    tuning: Tuning
    unfit: dict[str, str] = field(default_factory=dict)
    reason: str = ""

    @property
    def problem(self) -> str:
        """Text of the problem."""
        return self.tuning.problem

    @property
    def best(self) -> str | None:
        """The finalist with the least median."""
        return min(self.finals, key=self._median, default=None)

    def latency(self, side: str) -> float | None:
        """Return the median in ms of a side's pick in the finals."""
        pick = self.picks.get(side)
        return self._median(pick) if pick in self.finals else None

    def loss(self, side: str) -> float | None:
        """Return by what share a side's pick is slower than the best finalist."""
        own = self.latency(side)
        return None if own is None or self.best is None else own / self._median(self.best) - 1

    def _median(self, text: str | None) -> float:
        assert text is not None
        return statistics.median(self.finals[text])

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        finals = {text: Timing(tuple(samples)) for text, samples in self.finals.items()}
        return {
            "problem": self.problem,
            "picks": {side: self.picks.get(side) for side in SIDES},
            "loss": {side: self.loss(side) for side in SIDES},
            "best": self.best,
            "finals": {
                text: {
                    "latency_ms": timing.latency_ms,
                    "spread_ms": timing.spread_ms,
                    "samples": list(timing.samples),
                }
                for text, timing in finals.items()
            },
            "unfit": self.unfit,
            "reason": self.reason,
            "triton": self.tuning.to_dict(),
        }


@dataclass(slots=True)
class Race:
    """All problems of one operation on one device, with provenance.

    Attributes:
        options: of ``ktune search``, beyond the problems.
        limit_s: what ``triton.autotune`` was given for all problems; None for no limit.
        seconds: wall time of each side, the start of its processes included.
        breakdown: seconds by phase of each side, as far as it says.
    """

    op: str
    device: Device
    protocol: str
    measured: str
    versions: dict[str, str]
    rounds: int
    options: list[str]
    limit_s: float | None
    seconds: dict[str, float]
    breakdown: dict[str, dict[str, float]]
    rows: list[RaceRow] = field(default_factory=list)

    @property
    def unreached(self) -> int:
        """Variants that ``triton.autotune`` did not come to."""
        return sum(len(row.tuning.unreached) for row in self.rows)

    @property
    def complete(self) -> bool:
        """Whether both sides have a pick, and finals, of every problem."""
        return all(row.loss(side) is not None for row in self.rows for side in SIDES)

    @property
    def provenance(self) -> str:
        """One line that says how the numbers were taken."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.device.name}, {self.measured}; {versions}; cold caches, one run; finals: "
            f"protocol {self.protocol}, median of {self.rounds} interleaved rounds"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the document."""
        return {
            "schema": SCHEMA,
            "kind": KIND,
            "op": self.op,
            "device": self.device.to_dict(),
            "protocol": self.protocol,
            "measured": self.measured,
            "versions": self.versions,
            "rounds": self.rounds,
            "options": self.options,
            "limit_s": self.limit_s,
            "seconds": self.seconds,
            "breakdown": self.breakdown,
            "scope": SCOPE,
            "unreached": self.unreached,
            "problems": [row.to_dict() for row in self.rows],
        }


def finalists(picks: dict[str, str], tuning: Tuning, others: Sequence[str], top: int) -> list[str]:
    """Return what to time again: each side's pick, the tuner's best, and others, each once."""
    return list(dict.fromkeys([*picks.values(), *tuning.ranked[:top], *others]))


def problems_table(race: Race) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the table of problems."""
    columns = ["problem", "variants", "kernels", "triton s", "timed", "failed", "not reached"]
    columns += ["best ms", "ktune loses", "triton loses", "picks"]
    return columns, [_cells(row) for row in race.rows]


def _cells(row: RaceRow) -> list[str]:
    seen = row.tuning
    counts = [len(seen.timings), len(seen.failed), len(seen.unreached)]
    best = row.finals.get(row.best or "")
    return [
        short_fields(parse_problem(row.problem)),
        str(seen.variants),
        str(seen.sources),
        f"{seen.total_s:.1f}",
        *map(str, counts),
        f"{statistics.median(best):.4g}" if best else NONE,
        *(_share(row.loss(side)) for side in SIDES),
        _agreement(row),
    ]


def _agreement(row: RaceRow) -> str:
    if len(row.picks) < len(SIDES):
        missing = [side for side in SIDES if side not in row.picks]
        return f"none by {' and '.join(missing)}"
    return "the same" if row.picks[KTUNE] == row.picks[TRITON] else "differ"


def sides_table(race: Race) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the table of sides."""
    columns = ["", "wall s", "picks", "mean loss", "worst loss", "seconds by phase"]
    rows = []
    for side in SIDES:
        losses = [loss for row in race.rows if (loss := row.loss(side)) is not None]
        phases = race.breakdown.get(side, {})
        rows.append(
            [
                side,
                f"{race.seconds[side]:.1f}",
                f"{sum(side in row.picks for row in race.rows)} of {len(race.rows)}",
                _share(statistics.mean(losses) if losses else None),
                _share(max(losses, default=None)),
                ", ".join(f"{name} {value:.1f}" for name, value in phases.items()) or NONE,
            ]
        )
    return columns, rows


def notes(race: Race) -> list[str]:
    """Return what must be said beside the tables."""
    lines = [f"{side}: {what}." for side, what in SCOPE.items()]
    if race.unreached:
        total = sum(row.tuning.variants for row in race.rows)
        limit = "none" if race.limit_s is None else f"{race.limit_s:.0f} s"
        lines.append(
            f"triton.autotune did NOT finish: {race.unreached} of {total} variants were not "
            f"reached (its limit: {limit}); its wall time is that of the others, and its pick the "
            "best of them."
        )
    else:
        ratio = race.seconds[TRITON] / max(race.seconds[KTUNE], 1e-3)
        lines.append(f"triton.autotune took {ratio:.2f} times the wall time of ktune's search.")
    for row in race.rows:
        where = short_fields(parse_problem(row.problem))
        if row.tuning.stopped:
            lines.append(f"{where}: triton.autotune stopped: {row.tuning.stopped}")
        if row.tuning.fatal:
            first = row.tuning.fatal[0]
            lines.append(
                f"{where}: a plain triton.autotune would have ended on "
                f"{len(row.tuning.fatal)} variants, as {first}: {row.tuning.failed[first]}"
            )
        for text, why in row.unfit.items():
            of = [f"{side}'s pick" for side in SIDES if row.picks.get(side) == text]
            lines.append(f"{where}: {' and '.join(of) or 'a finalist'} is UNFIT ({why}): {text}")
        if row.reason:
            lines.append(f"{where}: no finals: {row.reason}")
    return lines


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"
