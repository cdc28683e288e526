"""Kernels of the tests run in Triton's interpreter, unless a test starts a process of its own."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

import pytest

os.environ["COLUMNS"] = "200"  # tables are as wide in every terminal
import torch

if os.environ["TRITON_INTERPRET"] == "1":
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path_factory, monkeypatch):
    """Keep tests away from the user's cache and table."""
    home = tmp_path_factory.mktemp("ktune")
    monkeypatch.setenv("KTUNE_CACHE_DIR", str(home / "cache"))
    monkeypatch.setenv("KTUNE_TABLE_PATH", str(home / "table.json"))
    monkeypatch.delenv("KTUNE_STORAGE", raising=False)


@pytest.fixture(autouse=True, scope="module")
def _own_operations():
    """Let no test file's own operations be known to the next."""
    from ktune import operations

    known, named = dict(operations._REGISTRY), list(operations._REFERENCES)
    yield
    operations._REGISTRY.clear()
    operations._REGISTRY.update(known)
    operations._REFERENCES[:] = named


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="accept rendered sources")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
