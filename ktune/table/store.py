"""Read and write table files: never half a file, never another process's work lost."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import filelock

from ktune.device import Device
from ktune.errors import TableError
from ktune.table.entry import Entry
from ktune.table.table import Table, UnknownSchemaError, merge

MAX_BYTES = 64 << 20
"""Largest table file that is read; a real one has about 1 KB an entry."""
LOCK_TIMEOUT_S = 60.0

_log = logging.getLogger("ktune.table")


class DamagedTableError(TableError):
    """The file is there and can be opened, but it is not a table."""


def read_table(path: Path) -> Table:
    """Read a table file.

    Raises:
        DamagedTableError: the file is empty, cut off, over 64 MiB or not a table.
        TableError: the file cannot be opened, or is another ktune's.
    """
    text = _read_text(path)
    try:
        return Table.from_json(text)
    except UnknownSchemaError as error:
        raise TableError(f"{path}: {error}") from error
    except TableError as error:
        raise _damaged(path, str(error)) from error


def update_table(path: Path, entries: Iterable[Entry], devices: Iterable[Device] = ()) -> Table:
    """Add entries to a table file, replacing those of the same device and problem.

    Reading, merging and writing happen under a lock file beside the table, and the table is
    replaced in one step: a reader sees the old or the new one, also if this process is killed.
    A damaged table is moved aside, to ``<name>.damaged-<n>``, and a new one is begun.

    Args:
        path: the table file; made, with its folder, if absent. A symbolic link is followed.
        entries: the new winners.
        devices: the devices they were measured on.

    Returns:
        The table as written.

    Raises:
        TableError: the folder cannot be written, the lock is not to be had, or the table is
            another ktune's.
    """
    addition = Table.of(entries, devices)
    target = Path(os.path.realpath(path))
    with _locked(target):
        table = merge(_existing(target), addition)
        _replace(target, table.to_json())
    return table


def check_writable(path: Path) -> None:
    """Raise TableError unless ``update_table`` could write here; for use before a search.

    Takes the lock, writes a temporary file beside the table and removes it again.
    """
    target = Path(os.path.realpath(path))
    with _locked(target):
        if target.exists():
            _check_replaceable(target)
        with _writing(target) as temporary:
            temporary.write_bytes(b"\n")
            temporary.unlink()


def _check_replaceable(path: Path) -> None:
    """Raise TableError if the file is one that ``update_table`` would not replace."""
    try:
        read_table(path)
    except DamagedTableError as error:
        _log.warning("%s; it will be moved aside", error)


def _existing(path: Path) -> Table:
    """Return the table on disk; an empty one if there is none, or a damaged one."""
    if not path.exists():
        return Table()
    try:
        return read_table(path)
    except DamagedTableError as error:
        aside = _move_aside(path)
        _log.warning("%s; moved to %s, and a new table is begun", error, aside.name)
        return Table()


def _move_aside(path: Path) -> Path:
    for n in count(1):
        aside = path.with_name(f"{path.name}.damaged-{n}")
        if not aside.exists():
            break
    with _writing(path):
        path.rename(aside)
    return aside


def _replace(path: Path, text: str) -> None:
    """Write the text beside the file, flush it to disk, and put it in the file's place."""
    temporary = _temporary(path)
    with _writing(path):
        temporary.unlink(missing_ok=True)
        try:
            with temporary.open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _temporary(path: Path) -> Path:
    """Return the one temporary name; who holds the lock may remove what a killed writer left."""
    return path.with_name(f".{path.name}.tmp")


@contextmanager
def _writing(path: Path) -> Iterator[Path]:
    """Yield the temporary path, and turn any failure to write into a TableError."""
    try:
        yield _temporary(path)
    except OSError as error:
        raise _unwritable(path, error) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a table, making its folder if need be."""
    lock = filelock.FileLock(path.with_name(f"{path.name}.lock"), timeout=LOCK_TIMEOUT_S)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout as error:
        raise TableError(
            f"{path}: another process has held {lock.lock_file} for {LOCK_TIMEOUT_S:.0f} s; "
            "wait for it to end"
        ) from error
    except (OSError, NotImplementedError) as error:
        raise _unwritable(path, error) from error
    try:
        yield
    finally:
        lock.release()


def _read_text(path: Path) -> str:
    """Return the file's text, opening only regular files of a sane size."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise TableError(f"{path}: a table must be a file. Set KTUNE_TABLE_PATH to one")
        if status.st_size > MAX_BYTES:
            raise _damaged(path, f"{status.st_size} bytes, over the {MAX_BYTES} that are read")
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise TableError(f"{path}: there is no table here. Make one: ktune search") from error
    except OSError as error:
        raise TableError(f"{path}: cannot read the table: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _damaged(path, f"not UTF-8 at byte {error.start}") from error


def _damaged(path: Path, what: str) -> DamagedTableError:
    return DamagedTableError(
        f"{path}: the table is damaged: {what}. "
        "Restore or remove it; the next ktune search begins a new one"
    )


def _unwritable(path: Path, error: Exception) -> TableError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return TableError(
        f"{path}: cannot write the table: {why}. "
        "Set KTUNE_TABLE_PATH to a file in a folder that can be written"
    )
