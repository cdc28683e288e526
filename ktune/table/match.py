"""Find the variant to use for a problem on a device: exact entry, entry of its bucket, default."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ktune.device import Device
from ktune.errors import KtuneError
from ktune.operations import operation
from ktune.operations.base import Operation
from ktune.problem import Problem, Scalar
from ktune.table.entry import Entry
from ktune.table.table import Table
from ktune.variant import Variant

Kind = Literal["exact", "bucket", "default"]
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
        kind: ``exact``, ``bucket`` or ``default``.
        variant: the variant to use.
        entry: the entry it came from; None for a default.
        table: the place of that entry's table among those asked; None for a default.
        nearest: for a default, the closest entry there is.
        stale: entries passed over on the way.
    """

    kind: Kind
    variant: Variant
    entry: Entry | None = None
    table: int | None = None
    nearest: Nearest | None = None
    stale: tuple[Stale, ...] = ()

    def message(self, device: Device, problem: Problem) -> str:
        """Return what is missing, what is there, and the command that would tune it."""
        text = f"no entry for {problem.text} on {device.key}"
        if self.stale:
            text += f"; passed over {self.stale[0].entry.problem.text}: {self.stale[0].reason}"
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
    """Tables, indexed by device, operation and bucket for many look-ups.

    Args:
        tables: the first wins among entries of one kind; an exact entry in any table wins over
            a bucket's in all.
        source_id: if given, entries whose ``source_id`` is another today are stale: not used.
    """

    def __init__(self, tables: Sequence[Table], source_id: SourceId | None = None) -> None:
        self.tables = tuple(tables)
        self._source_id = source_id
        self._reasons: dict[tuple[int, tuple[str, str]], str | None] = {}
        self._buckets: dict[tuple[int, str, str], dict[Problem, list[Entry]]] = {}

    def match(self, device: Device, problem: Problem) -> Match:
        """Return an exact entry, else the nearest of the problem's bucket, else the default.

        An entry of another device is never used.
        """
        op = operation(problem.op)
        stale: list[Stale] = []
        for kind, place, entry in self._candidates(device, op, problem):
            reason = self._reason(place, entry)
            if reason is None:
                return Match(kind, entry.variant, entry, place, None, tuple(stale))
            stale.append(Stale(entry, reason))
        variant = op.default_variant(problem, device)
        nearest = self._nearest(device, problem)
        return Match("default", variant, None, None, nearest, tuple(stale))

    def _candidates(
        self, device: Device, op: Operation, problem: Problem
    ) -> Iterator[tuple[Kind, int, Entry]]:
        """Yield usable entries, best first."""
        for place, table in enumerate(self.tables):
            if entry := table.get(device, problem):
                yield "exact", place, entry
        bucket = op.bucket(problem)
        for place in range(len(self.tables)):
            found = self._index(place, device.key, op).get(bucket, [])
            for entry in sorted(found, key=lambda e: _distance(problem, e.problem)):
                if entry.problem != problem:
                    yield "bucket", place, entry

    def _index(self, place: int, device_key: str, op: Operation) -> dict[Problem, list[Entry]]:
        """Return one table's entries of a device and operation, by bucket."""
        key = (place, device_key, op.name)
        if key not in self._buckets:
            found: dict[Problem, list[Entry]] = {}
            for entry in self.tables[place]:
                if entry.device_key == device_key and entry.problem.op == op.name:
                    bucket = _bucket(op, entry.problem)
                    if bucket is not None:
                        found.setdefault(bucket, []).append(entry)
            self._buckets[key] = found
        return self._buckets[key]

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


def _bucket(op: Operation, problem: Problem) -> Problem | None:
    """Return the bucket of an entry's problem; None if the operation has changed its fields."""
    try:
        return op.bucket(op.problem(dict(problem.fields)))
    except KtuneError:
        return None


def _is_size(value: Scalar | None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _distance(asked: Problem, has: Problem) -> tuple[int, float, str]:
    """Return how far two problems are: flags that differ, sizes by logarithm, the text."""
    flags, sizes, other = 0, 0.0, dict(has.fields)
    for name, value in asked:
        against = other.get(name)
        if _is_size(value) and _is_size(against):
            sizes += abs(math.log2(max(int(value), 1)) - math.log2(max(int(against or 0), 1)))
        else:
            flags += value != against
    return flags, sizes, has.text


def _differs(device: Device, problem: Problem, entry: Entry) -> dict[str, tuple[Scalar, Scalar]]:
    has = dict(entry.problem.fields)
    found = {k: (v, has.get(k, "absent")) for k, v in problem if v != has.get(k)}
    if entry.device_key != device.key:
        found["device"] = (device.key, entry.device_key)
    return found
