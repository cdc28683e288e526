"""A portfolio: the few variants that stand for many problems, chosen from measurements.

Every function here is pure: times in, choices out, the same for any order of the input.
``regions.py`` turns a cover into ranges of sizes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from math import inf

from ktune.device import Device
from ktune.errors import UsageError
from ktune.operations import operation
from ktune.portfolio.losses import Grid, Times
from ktune.portfolio.selection import Demand, at_most, greedy
from ktune.problem import Problem
from ktune.table import Matcher, Table
from ktune.table.match import Kind
from ktune.table.region import couples_rows, unbatched
from ktune.variant import Variant

LOSS = 0.02
"""Share of a problem's own best time that a cover may give away. Promised is 3 %: the times that a
cover is chosen by are themselves off by up to 1 %."""
PER_PROBLEM = 3
"""Variants of each problem that a shortlist has measured on the others."""


@dataclass(frozen=True, slots=True)
class Cover:
    """A few variants, and which of them each problem takes.

    Attributes:
        variants: texts, the one that the most problems need first.
        chosen: variant text by problem text.
        losses: time over the problem's own best, less 1, by problem text; noise included.
        batch_invariant: problems that differ only in batch fields have one variant.
    """

    variants: tuple[str, ...]
    chosen: Mapping[str, str]
    losses: Mapping[str, float]
    batch_invariant: bool = False

    @property
    def worst(self) -> float:
        """The largest loss; 0.0 without problems."""
        return max(self.losses.values(), default=0.0)

    @property
    def mean(self) -> float:
        """The mean loss; 0.0 without problems."""
        return sum(self.losses.values()) / len(self.losses) if self.losses else 0.0


def shortlist(
    times: Times,
    legal: Callable[[Problem], Set[str]],
    per_problem: int = PER_PROBLEM,
    everywhere: bool = False,
) -> dict[Problem, list[Variant]]:
    """Return what is still to be measured before ``cover`` can judge.

    Each problem's best few variants must be known on every other problem of its group.

    Args:
        times: what is known; a variant that failed on a problem is known too.
        legal: returns the texts of the variants that a problem may have.
        per_problem: how many of each problem's variants the others try.
        everywhere: let all problems try them, whatever their structure; one variant can then
            stand for several structures though none of their searches met the others' best.

    Returns:
        Variants by problem, both sorted by text; problems that lack nothing are left out.
    """
    grid = Grid(times)
    groups = grid.groups()
    if everywhere:
        groups = [list(grid.problems)]
    missing: dict[Problem, list[Variant]] = {}
    for group in groups:
        best = {v for p in group for v in _fastest(grid, p)[:per_problem]}
        for text in group:
            problem = grid.problems[text]
            lacking = sorted((best & legal(problem)) - set(times[text]))
            if lacking:
                missing[problem] = [Variant.parse(problem.op, v) for v in lacking]
    return {problem: missing[problem] for problem in sorted(missing, key=lambda p: p.text)}


def cover(
    times: Times, loss: float = LOSS, limit: int | None = None, batch_invariant: bool = False
) -> Cover:
    """Choose few variants such that every problem has one within ``loss`` of its own best.

    A greedy set cover over all problems of the operation; each problem then takes the best of the
    chosen, and of those that are tied within the noise the one that serves more problems.

    Args:
        times: of the problems to cover.
        loss: share of a problem's best time that it may give away.
        limit: at most so many variants, should ``loss`` ask for more: then those that make the
            worst loss, and after it the mean, least.
        batch_invariant: problems that differ only in batch fields get one variant, the one whose
            worst loss among them is least counting as their best; variants whose rows depend on
            each other are left out.

    Raises:
        UsageError: no choice of ``limit`` variants is legal on all problems, or (if
            ``batch_invariant``) no variant has a time on all batches of a problem.
    """
    grid = Grid(times)
    demands = _demands(grid, batch_invariant)
    selected = greedy(demands, loss)
    if limit is not None and len(selected) > limit:
        selected = at_most(demands, limit)
    chosen: dict[str, str] = {}
    for demand in demands:
        found = grid.pick(demand.problems, selected, max(loss, demand.least))
        assert found is not None, "the selection serves every problem"
        chosen.update(dict.fromkeys(demand.problems, found))
    uses = list(chosen.values())
    order = sorted(set(uses), key=lambda v: (-uses.count(v), v))
    ratios = {problem: grid.ratio(problem, chosen[problem]) for problem in sorted(chosen)}
    return Cover(tuple(order), dict(sorted(chosen.items())), ratios, batch_invariant)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What a table costs on problems that it was not made from.

    Attributes:
        losses: time of the table's pick over the problem's own best, less 1, by problem text.
        kinds: how the pick was found.
        unknown: problems on which the pick has no time.
    """

    losses: Mapping[str, float]
    kinds: Mapping[str, Kind]
    unknown: tuple[str, ...]

    @property
    def median(self) -> float:
        """The median loss; 0.0 without problems."""
        return statistics.median(self.losses.values()) if self.losses else 0.0

    @property
    def worst(self) -> float:
        """The largest loss; 0.0 without problems."""
        return max(self.losses.values(), default=0.0)

    def of(self, *kinds: Kind) -> HeldOut:
        """Return the same for the problems whose pick was found in one of these ways."""
        kept = {p: loss for p, loss in self.losses.items() if self.kinds[p] in kinds}
        ways = {p: kind for p, kind in self.kinds.items() if kind in kinds}
        return HeldOut(kept, ways, tuple(p for p in self.unknown if p in ways))


def held_out_loss(
    times: Times, table: Table, device: Device, batch_invariant: bool = False
) -> HeldOut:
    """Return what a table's picks lose on measured problems, as a call would look them up.

    Args:
        times: of problems that the table was not made from.
        table: made from others.
        device: whose entries to ask.
        batch_invariant: look up as within ``ktune.batch_invariant()``.
    """
    grid, matcher = Grid(times), Matcher([table])
    losses: dict[str, float] = {}
    kinds: dict[str, Kind] = {}
    for text, problem in grid.problems.items():
        match = matcher.match(device, problem, batch_invariant)
        kinds[text] = match.kind
        ratio = grid.ratio(text, match.variant.text)
        if ratio < inf:
            losses[text] = ratio
    return HeldOut(losses, kinds, tuple(p for p in kinds if p not in losses))


def _demands(grid: Grid, batch_invariant: bool) -> list[Demand]:
    together: dict[str, list[str]] = {}
    for text, problem in grid.problems.items():
        op = operation(problem.op)
        key = unbatched(op, problem).text if batch_invariant else text
        together.setdefault(key, []).append(text)
    demands = []
    for problems in together.values():
        op_name = grid.problems[problems[0]].op
        texts = grid.common(problems)
        if batch_invariant:
            texts = [v for v in texts if not couples_rows(Variant.parse(op_name, v))]
        if not texts:
            raise UsageError(
                f"no variant has a time on all of {'; '.join(problems)}. Measure the shortlist on "
                "every one of them first, or choose without batch invariance"
            )
        options = {v: grid.losses(problems, v) for v in texts}
        demands.append(Demand(tuple(problems), options))
    return demands


def _fastest(grid: Grid, problem: str) -> list[str]:
    return sorted(grid.measured(problem), key=lambda v: (grid.ratio(problem, v), v))
