"""``ktune doctor``: say what this machine is, and what ktune will use."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import click

from ktune.cli.console import aligned, emit, show
from ktune.cli.options import common, short_error, table_files
from ktune.errors import KtuneError
from ktune.settings import masked

PACKAGES = ("torch", "triton", "optuna", "jinja2", "pydantic")
VARIABLES = ("TRITON_CACHE_DIR", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "NO_COLOR")
MOST_FILES = 20_000
"""Files of the cache that are counted."""


@click.command()
@common
def doctor(as_json: bool) -> None:
    """Say what this machine is, what is installed, and what ktune will use; needs no GPU."""
    document = {
        "versions": _versions(),
        "devices": _devices(),
        "compiler": _compiler(),
        "cache": _cache(),
        "tables": [_table(path) for path in _table_paths()],
        "storage": _storage(),
        "recordings": _recordings(),
        "environment": _environment(),
    }
    document["use"] = _use(document)
    if as_json:
        emit("doctor", document)
    else:
        show(*_lines(document))


def _versions() -> dict[str, str]:
    from ktune import __version__

    found = {"ktune": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _devices() -> list[dict[str, Any]]:
    """Return this machine's GPUs; a broken driver counts as none."""
    import torch

    from ktune.device import device_of

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        try:
            device = device_of(index)
            found.append({"index": index, "key": device.key, **device.to_dict()})
        except (KtuneError, RuntimeError) as error:
            found.append({"index": index, "error": short_error(error)})
    return found


def _compiler() -> dict[str, Any]:
    """Return ptxas, with which Triton compiles for NVIDIA GPUs, also where there is none."""
    try:
        from triton import knobs

        path = str(knobs.nvidia.ptxas.path)
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    except Exception as error:
        return {"ptxas": None, "version": None, "error": short_error(error)}
    version = re.search(r"V(\d+[\d.]*)", done.stdout)
    return {"ptxas": path, "version": version[1] if version else "unknown"}


def _cache() -> dict[str, Any]:
    from ktune.settings import cache_dir

    folder = cache_dir()
    size = count = 0
    for root, _, names in os.walk(folder):
        for name in names:
            count += 1
            path = Path(root) / name
            size += path.lstat().st_size if path.exists() else 0
        if count >= MOST_FILES:
            break
    return {"path": str(folder), "files": count, "bytes": size, "writable": _writable(folder)}


def _writable(path: Path) -> bool:
    """Return whether a file could be made at or below a path that may not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)


def _table_paths() -> list[Path]:
    from ktune.settings import user_table_paths

    return list(dict.fromkeys([*user_table_paths(), *table_files()]))


def _table(path: Path) -> dict[str, Any]:
    from ktune.errors import TableError
    from ktune.table import read_table

    found: dict[str, Any] = {"path": str(path), "exists": os.path.lexists(path)}
    found["writable"] = _writable(path.parent)
    if found["exists"]:
        try:
            found["entries"] = dict(Counter(entry.device_key for entry in read_table(path)))
        except TableError as error:
            found["error"] = str(error)
    return found


def _storage() -> str:
    from ktune.settings import storage_url

    return masked(storage_url())


def _recordings() -> list[dict[str, Any]]:
    from ktune.target.recording import read_recording, shipped_recordings

    found: list[dict[str, Any]] = []
    for name, paths in shipped_recordings().items():
        for path in paths:
            row: dict[str, Any] = {"target": name, "operation": path.stem}
            try:
                recording = read_recording(path)
                row |= {"device": recording.device.key, "measured": recording.measured}
                row["problems"] = len(recording.problems)
            except KtuneError as error:
                row["error"] = str(error)
            found.append(row)
    return found


def _environment() -> dict[str, str]:
    names = sorted(n for n in os.environ if n.startswith("KTUNE_") or n in VARIABLES)
    return {name: masked(os.environ[name]) for name in names}


def _use(document: dict[str, Any]) -> dict[str, str]:
    """Return what a search and a call would use on this machine."""
    from ktune.settings import disabled, strict

    devices = [device for device in document["devices"] if "key" in device]
    names = sorted({row["target"] for row in document["recordings"] if "device" in row})
    search = f"the GPU {devices[0]['key']}" if devices else "a replay of h200"
    if not devices and "h200" not in names:
        search = "nothing: no GPU, and no recording comes with ktune; --target FILE names one"
    call = "tuned kernels on the GPU" if devices else "PyTorch on the CPU"
    if disabled():
        call = "PyTorch, since KTUNE_DISABLE=1"
    elif strict():
        call += "; a problem without an entry is an error, since KTUNE_STRICT=1"
    return {"search": search, "call": call}


def _lines(document: dict[str, Any]) -> list[str]:
    rows: list[tuple[str, str]] = [(name, value) for name, value in document["versions"].items()]
    rows += [(f"cuda:{d['index']}", d.get("key") or d["error"]) for d in document["devices"]]
    if not document["devices"]:
        rows.append(("GPU", "none that PyTorch sees; everything but live timing works"))
    compiler, cache = document["compiler"], document["cache"]
    rows.append(("ptxas", compiler.get("error") or f"{compiler['version']}  {compiler['ptxas']}"))
    access = "writable" if cache["writable"] else "NOT writable; set KTUNE_CACHE_DIR"
    size = f"{cache['files']} files, {cache['bytes'] / 2**20:.1f} MiB"
    rows.append(("cache", f"{cache['path']} ({size}, {access})"))
    rows += [("table", _table_line(row)) for row in document["tables"]]
    rows.append(("storage", document["storage"]))
    rows += [("recording", _recording_line(row)) for row in document["recordings"]]
    rows += [(name, value) for name, value in document["environment"].items()]
    rows += [(f"{name} uses", value) for name, value in document["use"].items()]
    return aligned(rows)


def _table_line(row: dict[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    if not row["exists"]:
        access = "can be written" if row["writable"] else "NOT writable; set KTUNE_TABLE_PATH"
        return f"{row['path']} (none yet; {access})"
    counts = ", ".join(f"{count} for {key}" for key, count in row["entries"].items())
    return f"{row['path']} ({counts or 'empty'})"


def _recording_line(row: dict[str, Any]) -> str:
    what = f"{row['target']} {row['operation']}"
    if "error" in row:
        return f"{what}: {row['error']}"
    return f"{what}: {row['problems']} problems on {row['device']}, {row['measured']}"
