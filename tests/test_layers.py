"""The floors of ktune/: a module imports only floors below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ktune

PACKAGE = Path(ktune.__file__).parent
FLOORS = [
    {"errors", "settings", "resources", "files"},
    {"problem"},
    {"variant", "device"},
    {"operations"},
    {"space", "codegen", "table"},
    {"runtime", "bench"},
    {"target", "portfolio"},
    {"search"},
    {"report", "integrations"},
    {"cli"},
]
LEVEL = {name: level for level, floor in enumerate(FLOORS) for name in floor}
NEIGHBOURS_ALLOWED = {("variant", "problem"), ("resources", "errors"), ("settings", "errors")}
RUNTIME_HALF = {"operations", "codegen", "table", "runtime"}
SEARCH_LIBRARIES = {"optuna", "yaml", "pydantic", "rich", "click"}


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_floors_below(path):
    own = room(path)
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "ktune" or len(parts) < 2 or parts[1] not in LEVEL:
            continue
        other = parts[1]
        allowed = other == own or LEVEL[other] < LEVEL[own] or (own, other) in NEIGHBOURS_ALLOWED
        assert allowed, f"{own} (floor {LEVEL[own]}) imports {name} (floor {LEVEL[other]})"


@pytest.mark.parametrize(
    "path",
    [path for path in modules() if room(path) in RUNTIME_HALF],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_runtime_half_knows_no_search_library(path):
    roots = {name.split(".")[0] for name in imported(path)}
    assert not roots & SEARCH_LIBRARIES


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_are_short_and_say_what_they_are_for(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(text)), "a module opens with one sentence"


def test_every_room_has_a_floor():
    assert {room(path) for path in modules()} <= set(LEVEL)


def test_generated_kernels_need_nothing_of_ktune():
    templates = PACKAGE.parent / "templates"
    for path in templates.rglob("*.jinja"):
        assert "import ktune" not in path.read_text(encoding="utf-8")
