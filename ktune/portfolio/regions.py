"""Regions: for which sizes a variant of a cover stands, as ranges that a person can read.

In each group (one kernel per variant) a small decision tree over the sizes gives every leaf one
variant; a leaf is one region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

from ktune.operations import operation
from ktune.operations.base import next_power_of_two
from ktune.portfolio.cover import LOSS, Cover
from ktune.portfolio.losses import DRIFT, Grid, Times
from ktune.problem import Problem
from ktune.table.region import sizes_of


@dataclass(frozen=True, slots=True)
class Region:
    """A box of sizes in which one variant stands for all problems of one kernel.

    The table's entry of each of its problems carries ``covers``, if the finals leave it this
    variant; an entry that keeps another (the default, say) covers nothing but itself.

    Attributes:
        variant: text.
        covers: first and last size, inclusive, by field; sizes that the structure fixes for any
            problem of the group (attention's ``head_dim``) are not among them.
        problems: texts of the measured problems in it; their flags are the region's.
    """

    variant: str
    covers: Mapping[str, tuple[int, int]]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Cut:
    """One side of a split: the last size on this side, and the grid's size next to it."""

    end: int
    neighbour: int


@dataclass(frozen=True, slots=True)
class _Leaf:
    """What a leaf would be: its variant, and how well that does."""

    misses: int
    worst: float
    mean: float
    variant: str


Cuts = Mapping[tuple[str, bool], _Cut]
"""Cuts that bound a node, by field and whether they bound it from above."""


def regions(times: Times, cover: Cover, loss: float = LOSS) -> list[Region]:
    """Return the regions of a cover: in each group, boxes that share no problem.

    A split must gain more than the noise in the worst or the mean loss, or save a problem from
    losing more than ``loss`` (or than the cover's own choice does); without one, a leaf keeps one
    variant. It lies at the geometric mean of neighbouring sizes of the grid. Where no split
    bounds a leaf, it reaches to the end of the power-of-two bucket of its outermost problem, and
    no further than the structure stays the same. Sizes that go together in the grid (sequence
    lengths, heads and heads_kv) keep a range each.

    A batch-invariant cover is not split by batch.
    """
    grid = Grid({problem: times[problem] for problem in cover.chosen})
    return [
        region for group in grid.groups() for region in _Tree(grid, cover, loss, group).regions()
    ]


def by_problem(found: Sequence[Region]) -> dict[str, Region]:
    """Return the region that each measured problem lies in."""
    return {problem: region for region in found for problem in region.problems}


class _Tree:
    """The decision tree of one group."""

    def __init__(self, grid: Grid, cover: Cover, loss: float, group: Sequence[str]) -> None:
        self._grid, self._cover, self._loss = grid, cover, loss
        self._group = tuple(group)
        self._sizes = {text: sizes_of(grid.problems[text]) for text in group}
        op = operation(grid.problems[group[0]].op)
        fixed = op.structure(grid.problems[group[0]])
        self._fields = [name for name in self._sizes[group[0]] if name not in fixed]
        batch = op.batch_fields if cover.batch_invariant else ()
        self._axes = [name for name in self._fields if name not in batch]

    def regions(self) -> list[Region]:
        """Return the leaves; neighbours of one variant are joined where a box remains."""
        return self._grow(self._group, {})

    def _grow(self, problems: tuple[str, ...], cuts: Cuts) -> list[Region]:
        leaf = self._leaf(problems)
        split = self._best_split(problems)
        if split is None:
            return [self._region(problems, leaf, cuts)]
        field, low, high = split
        sides = self._sides(problems, field, low)
        leaves = [self._leaf(side) for side in sides]
        if not leaf.misses and not _gains(leaf, leaves, [len(side) for side in sides]):
            return [self._region(problems, leaf, cuts)]
        end = max(low, min(isqrt(max(low, 1) * high), high - 1))
        below = {**cuts, (field, True): _Cut(end, low)}
        above = {**cuts, (field, False): _Cut(end + 1, high)}
        found = [*self._grow(sides[0], below), *self._grow(sides[1], above)]
        if not leaf.misses and {region.variant for region in found} == {leaf.variant}:
            return [self._region(problems, leaf, cuts)]
        return found

    def _leaf(self, problems: tuple[str, ...]) -> _Leaf:
        """Return the best single variant: fewest misses, then the least loss."""
        misses = {
            v: sum(not self._serves(problem, v) for problem in problems)
            for v in self._cover.variants
        }
        fewest = min(misses.values())
        best = [v for v in self._cover.variants if misses[v] == fewest]
        variant = self._grid.pick(problems, best, self._loss) or best[0]
        return _Leaf(fewest, *self._grid.losses(problems, variant), variant)

    def _serves(self, problem: str, variant: str) -> bool:
        own = self._grid.loss(problem, self._cover.chosen[problem])
        return self._grid.loss(problem, variant) <= max(self._loss, own)

    def _best_split(self, problems: tuple[str, ...]) -> tuple[str, int, int] | None:
        """Return a field and the two neighbouring sizes to split between; None if all are equal."""
        found: list[tuple[tuple[float, ...], str, int, int]] = []
        for axis, field in enumerate(self._axes):
            values = sorted({self._sizes[problem][field] for problem in problems})
            for low, high in pairwise(values):
                sides = self._sides(problems, field, low)
                leaves = [self._leaf(side) for side in sides]
                counts = [len(side) for side in sides]
                rank = (
                    sum(leaf.misses for leaf in leaves),
                    max(leaf.worst for leaf in leaves),
                    _mean(leaves, counts),
                    abs(counts[0] - counts[1]),
                    axis,
                )
                found.append((rank, field, low, high))
        return min(found)[1:] if found else None

    def _sides(
        self, problems: tuple[str, ...], field: str, low: int
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        below = tuple(p for p in problems if self._sizes[p][field] <= low)
        return below, tuple(p for p in problems if p not in below)

    def _region(self, problems: tuple[str, ...], leaf: _Leaf, cuts: Cuts) -> Region:
        covers = {field: self._range(problems, field, cuts) for field in self._fields}
        return Region(leaf.variant, covers, problems)

    def _range(self, problems: tuple[str, ...], field: str, cuts: Cuts) -> tuple[int, int]:
        lowest = min(problems, key=lambda p: (self._sizes[p][field], p))
        highest = max(problems, key=lambda p: (self._sizes[p][field], p))
        low, high = self._sizes[lowest][field], self._sizes[highest][field]
        first = _reach(
            self._grid.problems[lowest], field, min(low, next_power_of_two(low) // 2 + 1)
        )
        last = _reach(self._grid.problems[highest], field, next_power_of_two(high))
        if cut := cuts.get((field, False)):
            first = cut.end if cut.neighbour == low else max(cut.end, first)
        if cut := cuts.get((field, True)):
            last = cut.end if cut.neighbour == high else min(cut.end, last)
        return first, last


def _gains(leaf: _Leaf, leaves: Sequence[_Leaf], counts: Sequence[int]) -> bool:
    """Return whether two leaves lose less than one, by more than measurements drift."""
    worst = leaf.worst - max(side.worst for side in leaves)
    return worst > DRIFT or leaf.mean - _mean(leaves, counts) > DRIFT


def _mean(leaves: Sequence[_Leaf], counts: Sequence[int]) -> float:
    total = sum(leaf.mean * count for leaf, count in zip(leaves, counts, strict=True))
    return total / sum(counts)


def _reach(problem: Problem, field: str, end: int) -> int:
    """Return the size nearest to ``end`` at which the problem's structure is still its own.

    Structures change at most once between a size and the end of its bucket.
    """
    op = operation(problem.op)
    own, near, far = op.structure(problem), problem.size(field), end

    def same(size: int) -> bool:
        return op.structure(problem.replace(**{field: size})) == own

    if same(far):
        return far
    while abs(far - near) > 1:
        middle = (near + far) // 2
        near, far = (middle, far) if same(middle) else (near, middle)
    return near
