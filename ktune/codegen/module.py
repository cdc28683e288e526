"""Write a rendered module to the cache and import it, so that tracebacks show its lines."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from types import ModuleType

from ktune.codegen.render import Source
from ktune.errors import StorageError
from ktune.files import write_atomically
from ktune.settings import cache_dir

_LOCK = threading.RLock()
_MODULES: dict[str, ModuleType] = {}


def load_module(source: Source) -> ModuleType:
    """Return the imported module of a source; one import for each text in a process."""
    module = _MODULES.get(source.id)
    if module is not None:
        return module
    with _LOCK:
        if source.id not in _MODULES:
            _MODULES[source.id] = _import(source, write_module(source))
        return _MODULES[source.id]


def write_module(source: Source) -> Path:
    """Write the source to the cache folder, or to a temporary one if that cannot be written."""
    try:
        return _write(cache_dir() / "kernels", source)
    except OSError:
        return _write(_fallback(), source)


def _write(folder: Path, source: Source) -> Path:
    path = folder / source.id[:2] / f"{source.op}_{source.template}_{source.id}.py"
    if path.is_file() and path.read_text(encoding="utf-8") == source.text:
        return path
    write_atomically(path, source.text)
    return path


@cache
def _fallback() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="ktune-"))
    except OSError as error:
        raise StorageError(
            f"cannot write rendered kernels to {cache_dir()} nor to a temporary folder ({error}); "
            "set KTUNE_CACHE_DIR to a folder that can be written"
        ) from error


def _import(source: Source, path: Path) -> ModuleType:
    name = f"ktune_kernel_{source.op}_{source.id}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
