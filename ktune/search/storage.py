"""Open Optuna's storage, the one record of a search."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage

from ktune.errors import StorageError

_CANNOT_OPEN = (
    OSError,
    ImportError,
    sqlalchemy.exc.SQLAlchemyError,
    optuna.exceptions.OptunaError,
)
MEMORY = "memory"
"""The storage name for a search that keeps nothing."""


def open_storage(url: str) -> BaseStorage:
    """Open an Optuna storage by URL, or ``memory``.

    SQLite runs in WAL mode: a killed process loses nothing that was told, and a write costs a
    few milliseconds less.

    Raises:
        StorageError: the storage cannot be opened; says why and what to do.
    """
    if url == MEMORY:
        return InMemoryStorage()
    try:
        if url.startswith("sqlite:///"):
            Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        storage = RDBStorage(url)
        if url.startswith("sqlite"):
            _quicken(storage.engine)
    except _CANNOT_OPEN as error:
        reason = str(error).splitlines()[0]
        raise StorageError(
            f"cannot open the study storage {url}: {reason}. "
            "Name another by --storage or KTUNE_STORAGE; --storage memory keeps nothing"
        ) from error
    return storage


def _quicken(engine: sqlalchemy.Engine) -> None:
    @sqlalchemy.event.listens_for(engine, "connect")
    def _pragmas(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    engine.dispose()


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Within, Optuna logs warnings only and does not announce experimental features."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
