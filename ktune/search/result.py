"""The outcome of one problem, who hears of it, and how it is recorded."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ktune.bench.measurement import Measurement
from ktune.codegen import template_digest
from ktune.problem import Problem
from ktune.search.effort import Effort
from ktune.search.ground import Ground, Outcome
from ktune.search.winner import Winner
from ktune.table import Entry
from ktune.table.entry import Covers
from ktune.table.match import Match
from ktune.target.recording import RecordedProblem, Recording
from ktune.target.target import Target
from ktune.variant import Variant


class Listener(Protocol):
    """Hears of a campaign's progress; the command line draws bars from it."""

    def problem_started(self, problem: Problem) -> None:
        """A problem's search begins."""

    def trial_done(
        self, problem: Problem, variant: Variant, measurement: Measurement, done: int, goal: int
    ) -> None:
        """A variant was measured."""

    def problem_done(self, result: Result) -> None:
        """A problem has its winner (or none)."""

    def settled(self, op: str, results: Sequence[Result]) -> None:
        """The variants that stand for all problems of an operation are chosen."""


class Searched(Protocol):
    """A campaign after its searches: it measures on, and makes entries.

    Attributes:
        grounds: what is legal, by problem text.
        results: of all problems, in order.
    """

    target: Target
    effort: Effort
    grounds: dict[str, Ground]
    results: list[Result]

    def measure(self, wanted: Mapping[str, Sequence[Variant]]) -> None:
        """Measure variants of problems that were searched, by problem text, if time is left."""

    def entry(self, result: Result, variant: Variant, winner: Winner) -> Entry:
        """Return the table's entry of a problem."""


@dataclass(slots=True)
class Result:
    """The outcome of one problem.

    Attributes:
        problem: what was tuned.
        default: its default variant.
        outcome: everything that was measured.
        samples: of the finals, in ms.
        winner: of the finals.
        entry: what the table holds; None if nothing passed.
        table_error: why it holds nothing.
        covers: sizes that the entry stands for, beside the problem's own.
        loss: share by which the winner is slower than this problem's own best; of a problem that
            was held out, by which the table's pick is.
        held_out: it is to judge the table by, and gets no entry.
        pick: what the table says for a problem that was held out.
    """

    problem: Problem
    default: Variant
    outcome: Outcome
    samples: dict[str, list[float]] = field(default_factory=dict)
    winner: Winner | None = None
    entry: Entry | None = None
    table_error: str = ""
    covers: Covers = field(default_factory=dict)
    loss: float = 0.0
    held_out: bool = False
    pick: Match | None = None

    @property
    def baselines(self) -> dict[str, float]:
        """Medians of the baselines in ms."""
        return {
            name.removeprefix("baseline:"): statistics.median(values)
            for name, values in self.samples.items()
            if name.startswith("baseline:") and values
        }


def record(
    target: Target, results: Sequence[Result], op: str, known: Recording | None = None
) -> Recording:
    """Return the recording of an exhaustive search's results, added to an earlier one."""
    recording = known or Recording(
        op,
        target.device,
        target.protocol,
        target.measured,
        target.versions,
        target.roofs,
        template_digest(op),
        workers=target.spent.workers,
    )
    for result in results:
        recording.problems[result.problem.text] = RecordedProblem(
            dict(result.outcome.measurements), result.samples, result.outcome.rejected
        )
    return recording
