"""What ``import ktune`` costs and starts: next to nothing."""

import subprocess
import sys

import pytest

import ktune

COST = """
import sys, time
import torch
start = time.perf_counter()
import ktune
print(time.perf_counter() - start)
assert not torch.cuda.is_initialized(), "CUDA was initialised"
heavy = {"optuna", "yaml", "pydantic", "rich", "click", "jinja2", "triton"} & set(sys.modules)
assert not heavy, heavy
"""

USE = """
import os, sys
import torch, ktune
from ktune.runtime.dispatch import dispatcher
ktune.softmax(torch.zeros(2, 3), -1)
ktune.flash_attention(*[torch.zeros(1, 2, 3, 4)] * 3)
dispatcher()._tables()
assert not torch.cuda.is_initialized(), "CUDA was initialised"
assert not {"optuna", "yaml", "pydantic", "rich", "click", "jinja2"} & set(sys.modules)
child = os.fork()
if child == 0:
    os._exit(int(ktune.softmax(torch.zeros(4), 0)[0].item() != 0.25))
assert os.waitpid(child, 0)[1] == 0, "the forked child failed"
"""


def run(code):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_import_is_quick_and_starts_nothing():
    assert any(float(run(COST)) < 0.3 for _ in range(3))


def test_import_alone_does_not_import_torch():
    run("import sys, ktune; assert 'torch' not in sys.modules")


def test_use_without_a_gpu_starts_nothing_and_forks():
    run(USE)


def test_public_names():
    for name in ktune.__all__:
        assert getattr(ktune, name) is not None
    assert set(ktune.__all__) <= set(dir(ktune))
    assert ktune.__version__ == "0.1.0"
    with pytest.raises(AttributeError, match="no attribute 'softmaxx'"):
        _ = ktune.softmaxx
