"""``ktune table``: look after dispatch tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktune.cli.console import emit, note, number, short_names, show, warn
from ktune.cli.console import table as rich_table
from ktune.cli.options import common, table_files
from ktune.errors import TableError

if TYPE_CHECKING:
    from ktune.table import Entry, Table

FILE = click.Path(dir_okay=False, path_type=Path)
NOTHING = "no tables yet; ktune search softmax makes one"


@click.group()
def table() -> None:
    """Look after dispatch tables: winners by device and problem.

    Without a PATH, the user's tables (KTUNE_TABLE_PATH) and those that come with ktune.
    """


def read_tables(paths: Sequence[Path]) -> list[tuple[Path, Table]]:
    """Read tables; one that nobody named and that cannot be read is left out, with a warning."""
    from ktune.table import read_table

    found = []
    for path in table_files(paths):
        try:
            found.append((path, read_table(path)))
        except TableError as error:
            if paths:
                raise
            warn(str(error))
    return found


@table.command("show")
@click.argument("paths", nargs=-1, type=FILE, metavar="[PATH...]")
@click.option("--device", metavar="TEXT", help="Only devices with this in their key.")
@click.option("--op", metavar="OP", help="Only this operation.")
@click.option("--each", is_flag=True, help="A line for each entry, also where regions are shorter.")
@common
def show_entries(
    paths: tuple[Path, ...], device: str | None, op: str | None, each: bool, as_json: bool
) -> None:
    """Print the entries of tables, and how their times were taken.

    Where entries have regions and fewer lines do, a line for each region, by variant.
    """
    found = [
        (path, entry)
        for path, whole in read_tables(paths)
        for entry in whole
        if _wanted(entry, device, op)
    ]
    if as_json:
        emit("table show", {"entries": [_entry_dict(path, entry) for path, entry in found]})
        return
    for path in dict.fromkeys(path for path, _ in found):
        here = [entry for at, entry in found if at == path]
        for key, name in dict.fromkeys((e.device_key, e.problem.op) for e in here):
            entries = [e for e in here if (e.device_key, e.problem.op) == (key, name)]
            regions = _by_region(entries)
            shorter = not each and len(regions) < len(entries)
            title = f"{key}\n{path}"
            show(_region_table(title, regions) if shorter else _entry_table(title, entries))
    if not found:
        note("no entries match" if paths or device or op else NOTHING)


@table.command("list")
@click.argument("paths", nargs=-1, type=FILE, metavar="[PATH...]")
@common
def list_tables(paths: tuple[Path, ...], as_json: bool) -> None:
    """List table files, their devices and how many entries each has."""
    rows = [
        {"path": str(path), "device": device, "operation": op, "entries": count}
        for path, whole in read_tables(paths)
        for (device, op), count in Counter((e.device_key, e.problem.op) for e in whole).items()
    ]
    if as_json:
        emit("table list", {"tables": rows})
    elif rows:
        show(rich_table("Tables", list(rows[0]), [[str(v) for v in row.values()] for row in rows]))
    else:
        note(NOTHING)


@table.command()
@click.argument("paths", nargs=-1, required=True, type=FILE, metavar="PATH...")
@click.option("-o", "--output", type=FILE, help="Table to add to; by default the user's own.")
@common
def merge(paths: tuple[Path, ...], output: Path | None, as_json: bool) -> None:
    """Add the entries of tables to one table.

    Where two have an entry for the same device and problem, the later table's stays, and any of
    them replaces the output's own.
    """
    from ktune.device import Device
    from ktune.settings import table_path
    from ktune.table import update_table

    target = output or table_path()
    sources = [whole for _, whole in read_tables(paths)]
    entries = {entry.key: entry for whole in sources for entry in whole}
    devices = [Device.from_dict(fields) for whole in sources for fields in whole.devices.values()]
    written = update_table(target, entries.values(), devices)
    if as_json:
        emit("table merge", {"path": target, "added": len(entries), "entries": len(written)})
    else:
        show(f"{target}: {len(entries)} entries merged, {len(written)} in all")


@table.command()
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
@common
def diff(before: Path, after: Path, as_json: bool) -> None:
    """Print what changed between two tables: other winners, other times, + new, - gone."""
    (_, old), (_, new) = read_tables([before, after])
    changes = [
        _change(old.entries.get(key), new.entries.get(key))
        for key in sorted({*old.entries, *new.entries})
        if old.entries.get(key) != new.entries.get(key)
    ]
    if as_json:
        emit("table diff", {"before": before, "after": after, "changes": changes})
    elif changes:
        columns = ["", "device", "problem", "ms before", "ms after", "winner before", "after"]
        show(rich_table(f"{before} → {after}", columns, [_change_row(c) for c in changes]))
    else:
        note("no differences")


def _wanted(entry: Entry, device: str | None, op: str | None) -> bool:
    here = device is None or device.lower() in entry.device_key.lower()
    return here and (op is None or entry.problem.op == op)


def _entry_dict(path: Path, entry: Entry) -> dict[str, Any]:
    where = {"table": path, "device": entry.device_key, "problem": entry.problem.text}
    return where | entry.to_dict()


def _entry_table(title: str, entries: Sequence[Entry]) -> Any:
    same, names = short_names([entry.problem.text for entry in entries])
    columns = [same or "problem", "ms", "/default", "trials", "measured", "winner"]
    rows = [
        [
            name,
            number(entry.provenance.latency_ms),
            _gain(entry),
            str(entry.provenance.trials),
            how_measured(entry),
            entry.variant.text + (" (default)" if entry.provenance.is_default else ""),
        ]
        for name, entry in zip(names, entries, strict=True)
    ]
    return rich_table(title, columns, rows, numbers=False)


def _by_region(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Return entries of one variant and region together, by variant."""
    from ktune.table.region import describe

    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in sorted(entries, key=lambda e: (e.variant.text, e.problem.text)):
        where = describe(entry) if entry.covers else entry.problem.fields_text
        found.setdefault((entry.variant.text, where), []).append(entry)
    return list(found.values())


def _region_table(title: str, regions: Sequence[Sequence[Entry]]) -> Any:
    """Build a table with a line a region, the variant on the first line of its own."""
    from ktune.table.region import describe

    same, names = short_names([describe(entries[0]) for entries in regions])
    rows, before = [], ""
    for name, entries in zip(names, regions, strict=True):
        text = entries[0].variant.text
        rows.append(
            [
                "the same" if text == before else text,
                name,
                str(len(entries)),
                _span([_gain(entry) for entry in entries]),
                _span([how_measured(entry) for entry in entries]),
            ]
        )
        before = text
    columns = ["variant", f"region, {same}" if same else "region", "problems", "/default"]
    return rich_table(title, [*columns, "measured"], rows, numbers=False)


def _span(texts: Sequence[str]) -> str:
    """Return the least and the largest number or date, or the only one."""
    ordered = sorted(texts, key=lambda text: (len(text), text))
    first, last = ordered[0], ordered[-1]
    return first if first == last else f"{first} to {last}"


def how_measured(entry: Entry) -> str:
    """Return the date of an entry's times, and whether they were replayed."""
    numbers = entry.provenance
    return f"{numbers.measured} REPLAYED" if numbers.replayed_from else numbers.measured


def _gain(entry: Entry) -> str:
    numbers = entry.provenance
    if not numbers.default_latency_ms:
        return "-"
    return f"{numbers.default_latency_ms / numbers.latency_ms:.2f}x"


def _change(old: Entry | None, new: Entry | None) -> dict[str, Any]:
    entry = new or old
    assert entry is not None
    return {
        "change": "added" if old is None else "removed" if new is None else "changed",
        "device": entry.device_key,
        "problem": entry.problem.text,
        "before": old.to_dict() if old else None,
        "after": new.to_dict() if new else None,
    }


def _change_row(change: dict[str, Any]) -> list[str]:
    sides = (change["before"], change["after"])
    times = [number(side["provenance"]["latency_ms"]) if side else "-" for side in sides]
    winners = [side["variant"] if side else "-" for side in sides]
    if winners[0] == winners[1]:
        winners[1] = "the same"
    sign = {"added": "+", "removed": "-", "changed": "~"}[change["change"]]
    return [sign, change["device"], change["problem"], *times, *winners]
