"""A dispatch table in memory, and its JSON form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

from ktune.device import Device
from ktune.errors import TableError
from ktune.problem import Problem
from ktune.table.entry import Entry

SCHEMA = 1
_RANGE = re.compile(r"\[\n\s+(\d+),\n\s+(\d+)\n\s+\]")  # JSON strings hold no line breaks
Key = tuple[str, str]


class UnknownSchemaError(TableError):
    """The table was written by another ktune; it is sound, but not for this one."""


@dataclass(frozen=True, slots=True)
class Table:
    """Winners by (device key, problem text), and the devices they were measured on.

    Attributes:
        entries: read-only.
        devices: ``Device.to_dict()`` by device key; read-only.
    """

    entries: Mapping[Key, Entry] = field(default_factory=dict)
    devices: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", MappingProxyType(dict(self.entries)))
        object.__setattr__(self, "devices", MappingProxyType(dict(self.devices)))

    @classmethod
    def of(cls, entries: Iterable[Entry], devices: Iterable[Device] = ()) -> Table:
        """Build a table; among entries of one key the last one stays."""
        return cls({e.key: e for e in entries}, {d.key: d.to_dict() for d in devices})

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def get(self, device: Device, problem: Problem) -> Entry | None:
        """Return the entry of exactly this device and problem."""
        return self.entries.get((device.key, problem.text))

    def to_json(self) -> str:
        """Return the file's text: sorted keys, one entry a block, ranges on one line."""
        entries: dict[str, dict[str, Any]] = {}
        for entry in self:
            entries.setdefault(entry.device_key, {})[entry.problem.text] = entry.to_dict()
        whole = {"schema": SCHEMA, "devices": dict(self.devices), "entries": entries}
        text = json.dumps(whole, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return _RANGE.sub(r"[\1, \2]", text) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Table:
        """Read a file's text.

        Raises:
            UnknownSchemaError: the schema is not this ktune's.
            TableError: the text is not a table.
        """
        try:
            whole = json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
        except RecursionError as error:
            raise TableError("not a table: nested too deeply") from error
        except ValueError as error:
            raise TableError(f"not JSON: {error}") from error
        _check_whole(whole)
        entries: dict[Key, Entry] = {}
        for device_key, problems in whole["entries"].items():
            for problem, values in _mapping(problems, f"entries of {device_key!r}").items():
                entries[device_key, problem] = _entry(device_key, problem, values)
        return cls(entries, {key: _device(key, v) for key, v in whole["devices"].items()})


def merge(base: Table, newer: Table) -> Table:
    """Return both tables' entries and devices; where both have one, the newer table's."""
    return Table({**base.entries, **newer.entries}, {**base.devices, **newer.devices})


def _check_whole(whole: object) -> None:
    """Raise TableError unless the outermost object has the right keys and schema."""
    found = _mapping(whole, "the file")
    if "schema" not in found:
        raise TableError("not a table: it has no schema")
    if found["schema"] != SCHEMA or isinstance(found["schema"], bool):
        raise UnknownSchemaError(
            f"schema {found['schema']!r:.40} is not known to this ktune, which reads schema "
            f"{SCHEMA}. Use the ktune that wrote it, or another table (KTUNE_TABLE_PATH)"
        )
    names = {"schema", "devices", "entries"}
    if set(found) != names:
        odd = ", ".join(sorted(set(found) ^ names))
        raise TableError(f"unknown or missing keys: {odd:.120}")
    for name in ("devices", "entries"):
        _mapping(found[name], name)


def _entry(device_key: str, problem: str, values: object) -> Entry:
    try:
        return Entry.from_dict(device_key, problem, values)
    except TableError as error:
        raise TableError(f"entry {problem!r:.200}: {error}") from error


def _device(key: str, values: object) -> dict[str, Any]:
    """Return a device's fields, or raise TableError unless they make a device of this key."""
    found = _mapping(values, f"device {key!r:.80}")
    try:
        actual = Device.from_dict(found).key
    except TypeError as error:
        raise TableError(f"device {key!r:.80}: {error}") from error
    if actual != key:
        raise TableError(f"device {key!r:.80} has the fields of {actual!r:.80}")
    return found


def _mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TableError(f"{what} must be an object, not {type(value).__name__}")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r:.120} stands twice")
    return found
