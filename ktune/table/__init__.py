"""The dispatch table: winners by device and problem, on disk and in memory."""

from ktune.table.entry import Entry, Provenance
from ktune.table.match import Match, Matcher, Nearest, Stale, lookup
from ktune.table.store import DamagedTableError, check_writable, read_table, update_table
from ktune.table.table import Table, merge

__all__ = [
    "DamagedTableError",
    "Entry",
    "Match",
    "Matcher",
    "Nearest",
    "Provenance",
    "Stale",
    "Table",
    "check_writable",
    "lookup",
    "merge",
    "read_table",
    "update_table",
]
