"""Find the variant to use for a problem: exact entry, region, bucket, nearest, default."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ktune.device import Device
from ktune.errors import KtuneError
from ktune.operations import operation
from ktune.operations.base import Operation
from ktune.problem import Problem, Scalar, octaves_apart, separation
from ktune.table.entry import Entry
from ktune.table.region import (
    couples_rows,
    covers_problem,
    flags_of,
    kernel_key,
    sizes_of,
    unbatched,
)
from ktune.table.table import Table
from ktune.variant import Variant

Kind = Literal["exact", "region", "bucket", "nearest", "default"]
REACH_OCTAVES = 2.0
"""How far, in each size, the nearest entry may be: four times as large or as small.

On the H200, with each problem left out of its grid in turn, such an entry lost 0 to 0.5 % (softmax)
and 0 to 55 % (attention) where the default lost 13 to 36 % and 64 to 109 %. Without a bound, the
winner for 16 queries would serve 4096.
"""
SourceId = Callable[[Variant, Problem], str]
"""Returns the id of the source that a variant renders to today; may raise KtuneError."""


@dataclass(frozen=True, slots=True)
class Stale:
    """An entry that would have matched but may not be used, and why."""

    entry: Entry
    reason: str


@dataclass(frozen=True, slots=True)
class Nearest:
    """The entry closest to what was asked, and where it differs.

    Attributes:
        entry: of the same operation, on any device.
        differs: ``(asked, has)`` by field name; ``device`` stands for the device key.
    """

    entry: Entry
    differs: dict[str, tuple[Scalar, Scalar]]


@dataclass(frozen=True, slots=True)
class Match:
    """The variant to use, and how it was found.

    Attributes:
        kind: ``exact``, ``region``, ``bucket``, ``nearest`` or ``default``.
        variant: the variant to use.
        entry: the entry it came from; None for a default.
        table: the place of that entry's table among those asked; None for a default.
        nearest: for a default, the closest entry there is.
        stale: entries passed over on the way.
        batch_invariant: batch fields were ignored, so ``exact`` means exact but for them.
    """

    kind: Kind
    variant: Variant
    entry: Entry | None = None
    table: int | None = None
    nearest: Nearest | None = None
    stale: tuple[Stale, ...] = ()
    batch_invariant: bool = False

    def message(self, device: Device, problem: Problem) -> str:
        """Return what is missing, what is there, and the command that would tune it."""
        text = f"no entry for {problem.text} on {device.key}"
        if self.stale:
            text += f"; passed over {self.stale[0].entry.problem.text}: {self.stale[0].reason}"
        elif self.kind == "nearest" and self.entry:
            text += f"; nearest is {self.entry.problem.text}"
        elif self.nearest:
            where = ", ".join(
                f"{name}: {has!r}" if name == "device" else name
                for name, (_, has) in self.nearest.differs.items()
            )
            text += f"; nearest is {self.nearest.entry.problem.text} (differs: {where})"
        return f'{text}. Run: ktune search {problem.op} --problem "{problem.fields_text}"'


def lookup(
    tables: Sequence[Table], device: Device, problem: Problem, source_id: SourceId | None = None
) -> Match:
    """Find the variant to use: see ``Matcher.match``."""
    return Matcher(tables, source_id).match(device, problem)


class Matcher:
    """Tables, indexed by device and operation for many look-ups.

    Args:
        tables: the first wins among entries of one kind; an exact entry in any table wins over a
            region's in all, and that over a bucket's.
        source_id: if given, entries whose ``source_id`` is another today are stale: not used.
    """

    def __init__(self, tables: Sequence[Table], source_id: SourceId | None = None) -> None:
        self.tables = tuple(tables)
        self._source_id = source_id
        self._reasons: dict[tuple[int, tuple[str, str]], str | None] = {}
        self._indices: dict[tuple[int, str, str, bool], _Index] = {}

    def match(self, device: Device, problem: Problem, batch_invariant: bool = False) -> Match:
        """Return the variant to use.

        Taken are, in this order, an exact entry, the nearest entry whose region holds the
        problem, the nearest of the problem's bucket, the nearest of the same kernel within
        ``REACH_OCTAVES`` in each size (or of another kernel of the same variant, if the operation
        says that it serves), the default. An entry of another device is never used.

        Args:
            device: where.
            problem: what.
            batch_invariant: ignore the operation's batch fields, in the problem and in entries.
                Among entries that differ in nothing else the largest batch goes first, for there
                the most time is spent. The answer is then the same for every batch.
        """
        op = operation(problem.op)
        stale: list[Stale] = []
        for kind, place, entry in self._candidates(device, op, problem, batch_invariant):
            reason = self._reason(place, entry)
            if reason is None and batch_invariant and couples_rows(entry.variant):
                reason = "rows of a program share a decision, so the batch would show in the bits"
            if reason is None:
                return Match(kind, entry.variant, entry, place, None, tuple(stale), batch_invariant)
            if all(entry is not passed.entry for passed in stale):
                stale.append(Stale(entry, reason))
        meant = unbatched(op, problem) if batch_invariant else problem
        variant = op.default_variant(meant, device)
        nearest = self._nearest(device, problem)
        return Match("default", variant, None, None, nearest, tuple(stale), batch_invariant)

    def _candidates(
        self, device: Device, op: Operation, problem: Problem, batch_invariant: bool
    ) -> Iterator[tuple[Kind, int, Entry]]:
        """Yield entries that may stand for the problem, best first."""
        found = [
            self._index(place, device.key, op, batch_invariant) for place in range(len(self.tables))
        ]
        for place, table in enumerate(self.tables):
            if batch_invariant:
                for entry in found[place].exact(problem):
                    yield "exact", place, entry
            elif entry_here := table.get(device, problem):
                yield "exact", place, entry_here
        for place, index in enumerate(found):
            for entry in index.regions(problem):
                yield "region", place, entry
        for place, index in enumerate(found):
            for entry in index.bucket(problem):
                yield "bucket", place, entry
        for place, index in enumerate(found):
            for entry in index.within_reach(problem):
                yield "nearest", place, entry

    def _index(self, place: int, device_key: str, op: Operation, batch_invariant: bool) -> _Index:
        """Return one table's entries of a device and operation."""
        key = (place, device_key, op.name, batch_invariant)
        if key not in self._indices:
            self._indices[key] = _Index(self.tables[place], device_key, op, batch_invariant)
        return self._indices[key]

    def _reason(self, place: int, entry: Entry) -> str | None:
        """Return why an entry may not be used; None if it may."""
        if self._source_id is None:
            return None
        key = (place, entry.key)
        if key not in self._reasons:
            try:
                now = self._source_id(entry.variant, entry.problem)
                changed = f"tuned as source {entry.source_id}, which today renders to {now}"
                self._reasons[key] = None if now == entry.source_id else changed
            except KtuneError as error:
                self._reasons[key] = f"its variant no longer renders: {error}"
        return self._reasons[key]

    def _nearest(self, device: Device, problem: Problem) -> Nearest | None:
        """Return the closest entry of the operation in all tables, on any device."""

        def distance(entry: Entry) -> tuple[bool, int, float, str, str, str]:
            return (entry.device_key != device.key, *_distance(problem, entry.problem), *entry.key)

        entries = [e for table in self.tables for e in table if e.problem.op == problem.op]
        if not entries:
            return None
        entry = min(entries, key=distance)
        return Nearest(entry, _differs(device, problem, entry))


class _Index:
    """A table's entries of one device and operation, by what a look-up asks for.

    Args:
        table: theirs.
        device_key: ``Device.key``.
        op: the operation; an entry that lacks a field it has today is left out.
        batch_invariant: batch fields are ignored on both sides.
    """

    def __init__(self, table: Table, device_key: str, op: Operation, batch_invariant: bool) -> None:
        self._op, self._batch_invariant = op, batch_invariant
        self._exact: dict[Problem, list[Entry]] = {}
        self._regions: dict[Hashable, list[Entry]] = {}
        self._alike: dict[Hashable, list[Entry]] = {}
        self._buckets: dict[Hashable, list[Entry]] = {}
        for entry in table:
            if entry.device_key == device_key and entry.problem.op == op.name:
                self._add(entry)

    def _add(self, entry: Entry) -> None:
        try:
            seen = self._seen(self._op.problem(dict(entry.problem.fields)))
        except KtuneError:
            return
        self._exact.setdefault(seen, []).append(entry)
        self._buckets.setdefault(self._bucket(seen), []).append(entry)
        self._alike.setdefault(_words(self._op, seen), []).append(entry)
        if entry.covers:
            self._regions.setdefault(kernel_key(self._op, seen), []).append(entry)

    def exact(self, problem: Problem) -> list[Entry]:
        """Return the entries of this very problem."""
        seen = self._seen(problem)
        return self._nearest_first(seen, self._exact.get(seen, []))

    def regions(self, problem: Problem) -> list[Entry]:
        """Return the entries whose region holds the problem."""
        seen = self._seen(problem)
        alike = self._regions.get(kernel_key(self._op, seen), [])
        inside = [entry for entry in alike if self._inside(entry, seen)]
        return self._nearest_first(seen, inside)

    def bucket(self, problem: Problem) -> list[Entry]:
        """Return the entries of the problem's bucket of sizes."""
        seen = self._seen(problem)
        return self._nearest_first(seen, self._buckets.get(self._bucket(seen), []))

    def within_reach(self, problem: Problem) -> list[Entry]:
        """Return the entries whose sizes are not far: of the same kernel, then those that serve."""
        seen = self._seen(problem)
        alike = self._alike.get(_words(self._op, seen), [])
        near = [e for e in alike if _farthest(seen, self._seen(e.problem)) <= REACH_OCTAVES]
        key = kernel_key(self._op, seen)
        same = [e for e in near if kernel_key(self._op, self._seen(e.problem)) == key]
        rest = [e for e in near if e not in same and self._op.serves(seen, e.variant, e.problem)]
        return self._nearest_first(seen, same) + self._nearest_first(seen, rest)

    def _bucket(self, seen: Problem) -> Hashable:
        return self._op.bucket(seen), self._op.access(seen)

    def _seen(self, problem: Problem) -> Problem:
        return unbatched(self._op, problem) if self._batch_invariant else problem

    def _inside(self, entry: Entry, seen: Problem) -> bool:
        if not self._batch_invariant:
            return covers_problem(entry, seen)
        own = {name: entry.problem[name] for name in self._op.batch_fields}
        return covers_problem(entry, seen.replace(**own))

    def _nearest_first(self, seen: Problem, entries: list[Entry]) -> list[Entry]:
        """Sort by distance; where the batch is ignored, then the largest batch first."""

        def order(entry: Entry) -> tuple[int, float, list[int], str]:
            flags, sizes, text = _distance(seen, self._seen(entry.problem))
            batch = self._op.batch_fields if self._batch_invariant else ()
            return flags, sizes, [-entry.problem.size(name) for name in batch], text

        return sorted(entries, key=lambda entry: (*order(entry), entry.problem.text))


def _distance(asked: Problem, has: Problem) -> tuple[int, float, str]:
    """Return how far two problems are apart, and the text of the second for ties."""
    return *separation(asked, has), has.text


def _words(op: Operation, problem: Problem) -> Hashable:
    """Return the fields that are no sizes, but for those that buckets ignore; and the access."""
    return tuple(flags_of(op.bucket(problem)).items()), op.access(problem)


def _farthest(asked: Problem, has: Problem) -> float:
    """Return the difference, in octaves, of the size that differs most."""
    other = sizes_of(has)
    return max((octaves_apart(v, other.get(n, 0)) for n, v in sizes_of(asked).items()), default=0.0)


def _differs(device: Device, problem: Problem, entry: Entry) -> dict[str, tuple[Scalar, Scalar]]:
    has = dict(entry.problem.fields)
    found = {k: (v, has.get(k, "absent")) for k, v in problem if v != has.get(k)}
    if entry.device_key != device.key:
        found["device"] = (device.key, entry.device_key)
    return found
