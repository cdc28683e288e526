"""Settings read from the environment; each is parsed here and nowhere else."""

from __future__ import annotations

import os
import re
from pathlib import Path

from platformdirs import user_cache_path, user_data_path

from ktune.errors import SettingsError

CACHE_DIR = "KTUNE_CACHE_DIR"
TABLE_PATH = "KTUNE_TABLE_PATH"
STORAGE = "KTUNE_STORAGE"
STRICT = "KTUNE_STRICT"
DISABLE = "KTUNE_DISABLE"
HEARTBEAT = "KTUNE_HEARTBEAT_S"
BATCH_INVARIANT = "KTUNE_BATCH_INVARIANT"


def cache_dir() -> Path:
    """Return the folder of rendered modules and studies; it may be deleted at any time."""
    value = os.environ.get(CACHE_DIR)
    return Path(value).expanduser() if value else user_cache_path("ktune")


def table_path() -> Path:
    """Return the file that ``ktune search`` writes: the first of ``KTUNE_TABLE_PATH``."""
    return user_table_paths()[0]


def user_table_paths() -> list[Path]:
    """Return the user's dispatch tables, the first one winning."""
    value = os.environ.get(TABLE_PATH, "")
    paths = [Path(part).expanduser() for part in value.split(os.pathsep) if part]
    return paths or [user_data_path("ktune") / "table.json"]


def storage_url() -> str:
    """Return the Optuna storage URL; by default an SQLite file in the cache folder."""
    value = os.environ.get(STORAGE)
    return value or f"sqlite:///{cache_dir() / 'studies.sqlite3'}"


def heartbeat_s() -> int:
    """Return the seconds between a trial's heartbeats; after three it is given to another."""
    value = os.environ.get(HEARTBEAT) or "20"
    if not value.isdecimal() or not int(value):
        raise SettingsError(f"{HEARTBEAT}={value!r} is not understood; set it to whole seconds")
    return int(value)


def masked(url: str) -> str:
    """Return a URL without its password, wherever it stands, and whatever it is made of."""
    url = re.sub(r"(://[^:/@]*):.*@", r"\1:***@", url)
    return re.sub(r"(password=)[^&\s]*", r"\1***", url)


def strict() -> bool:
    """Return whether a call without a tuned entry is an error."""
    return _flag(STRICT)


def disabled() -> bool:
    """Return whether the public functions hand every call to PyTorch."""
    return _flag(DISABLE)


def batch_invariant() -> bool:
    """Return whether the batch may not change which kernel computes a row."""
    return _flag(BATCH_INVARIANT)


def _flag(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in {"0", "1", ""}:
        raise SettingsError(f"{name}={value!r} is not understood; set it to 0 or 1")
    return value == "1"
