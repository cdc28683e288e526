"""Loading up front: the tables, the kernels, and what is refused afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import ktune
from ktune.codegen import render
from ktune.device import COMPILE_TARGETS
from ktune.errors import NoDeviceError, ProblemError, StrictError, TableError
from ktune.operations import parse_problem
from ktune.runtime import where
from ktune.runtime.dispatch import dispatcher
from ktune.table import Entry, Provenance, update_table
from ktune.variant import Variant

H100 = COMPILE_TARGETS["sm_90"]
PROBLEM = "softmax m=4 n=100 dtype=float32"
WINNER = "one_tile block_m=4 eviction=none num_warps=2"


def entry_of(problem, variant=WINNER, device=H100):
    asked = parse_problem(problem)
    chosen = Variant.parse(asked.op, variant)
    numbers = Provenance(
        latency_ms=1.0,
        spread_ms=0.1,
        default_latency_ms=2.0,
        margin=0.5,
        is_default=False,
        samples=30,
        protocol="test",
        measured="2026-11-30",
        trials=3,
    )
    return Entry(device.key, asked, chosen, render(chosen, asked).id, numbers)


@pytest.fixture
def kernels():
    """CPU tensors go to the kernels, and nothing that was loaded stays."""
    dispatcher.cache_clear()
    with where._force_kernels(H100):
        yield
    dispatcher.cache_clear()


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.json"
    other = COMPILE_TARGETS["sm_100"]
    entries = [entry_of(PROBLEM), entry_of("softmax m=4 n=200 dtype=float32", device=other)]
    update_table(path, entries, [H100, other])
    return path


def test_the_table_named_is_used_and_its_entries_of_this_device_are_ready(kernels, mine):
    x = torch.randn(4, 100)
    assert ktune.explain(PROBLEM, H100).kind == "default"
    loaded = ktune.load(mine)
    assert loaded.problems == (parse_problem(PROBLEM).text,)
    assert loaded.device == H100 and loaded.failed == {} and loaded.variants == 1
    (bound,) = dispatcher()._bound.values()
    assert bound.match.kind == "exact" and bound.match.variant.text == WINNER
    torch.testing.assert_close(ktune.softmax(x), torch.softmax(x, -1))
    assert len(dispatcher()._bound) == 1, "the call has used what was loaded"


def test_without_a_table_the_users_own_is_read_again(kernels, mine, monkeypatch):
    ktune.load(mine, warm=False)
    assert ktune.explain(PROBLEM, H100).kind == "exact"
    ktune.load(warm=False)
    assert ktune.explain(PROBLEM, H100).kind == "default"
    monkeypatch.setenv("KTUNE_TABLE_PATH", str(mine))
    assert ktune.load(warm=True).problems == (parse_problem(PROBLEM).text,)


def test_problems_by_name(kernels, mine):
    named = [PROBLEM, "softmax m=7 n=300 dtype=float16", parse_problem(PROBLEM)]
    loaded = ktune.load(mine, warm=named)
    assert len(loaded.problems) == 2, "each once, tuned or not"
    assert ktune.load(mine, warm=False).problems == ()
    with pytest.raises(ProblemError, match="rows"):
        ktune.load(mine, warm=["softmax rows=4"])


def test_strict_refuses_what_is_not_tuned_until_loaded_otherwise(kernels, mine):
    ktune.load(mine, strict=True)
    x = torch.randn(4, 100)
    torch.testing.assert_close(ktune.softmax(x), torch.softmax(x, -1))
    with pytest.raises(StrictError, match=r"m=4 n=7000.*load\(strict=True\)"):
        ktune.softmax(torch.randn(4, 7000))
    with pytest.raises(StrictError, match="n=7000"):
        ktune.load(mine, warm=["softmax m=4 n=7000 dtype=float32"], strict=True)
    ktune.load(mine)
    assert ktune.softmax(torch.randn(4, 7000)).shape == (4, 7000)


@pytest.mark.parametrize("content", [None, "", "[]", "null", '{"schema": 1'])
def test_a_table_that_cannot_be_read_changes_nothing(kernels, mine, tmp_path, content):
    ktune.load(mine, strict=True)
    bad = tmp_path / "bad.json"
    if content is not None:
        bad.write_text(content)
    with pytest.raises(TableError, match="bad"):
        ktune.load(bad)
    assert ktune.explain(PROBLEM, H100).kind == "exact" and dispatcher().strict
    assert (bad.read_text() if bad.exists() else None) == content


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    with pytest.raises(NoDeviceError, match="PyTorch"):
        ktune.load()


COMPILES = """
import json, sys
from contextlib import nullcontext
from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
import ktune
from ktune.codegen.compile import _StubDriver, compile_only
from ktune.device import COMPILE_TARGETS
from ktune.errors import StrictError
from ktune.operations import parse_problem
from ktune.runtime import dispatch, load

device = COMPILE_TARGETS["sm_90"]
driver.set_active(_StubDriver(device))
CompiledKernel.run = None  # there is no GPU to load it onto
for module in (dispatch, load):
    module.device_at = lambda index: device
    module.on = lambda index: nullcontext()
dispatch.capturing = lambda index: False
load.current_index = lambda: 0
compiled = []
knobs.runtime.jit_post_compile_hook = lambda **call: compiled.append(call["repr"])

def launch(text):
    problem = parse_problem(text)
    bound = dispatch.dispatcher().kernel(problem, 0)
    compile_only(bound.launch, problem, bound.options)

lengths = [f"softmax m=64 n={n} dtype=bfloat16" for n in range(1000, 1150)]
lengths += [
    f"attention batch=1 heads=4 seqlen_q={n} head_dim=64 dtype=bfloat16" for n in range(200, 350)
]
named = [lengths[0], lengths[8], lengths[-1]]
loaded = ktune.load(warm=named)
first = len(compiled)
for text in named:
    launch(text)
again = len(compiled) - first
for text in lengths:
    launch(text)
whole = len(compiled)
ktune.load(warm=named, strict=False)
dispatch.dispatcher().strict = True
load._refuse_compiling()
load._refuse_compiling()
launch(named[0])
try:
    launch("softmax m=64 n=5000 dtype=float32")
    refused = ""
except StrictError as error:
    refused = str(error)
broken = ktune.load(warm=named[:1])
print(json.dumps([loaded.compiled, first, again, whole, refused, loaded.failed]))
"""


def test_what_was_loaded_is_not_compiled_again_and_lengths_share_kernels(tmp_path):
    """For an H200, without one: compilations as Triton's own hook counts them."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILES],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    loaded, first, again, whole, refused, failed = json.loads(done.stdout.splitlines()[-1])
    assert loaded == first == 3 and again == 0 and failed == {}
    assert 3 <= whole <= 12, "a dozen kernels for 300 lengths"
    assert "ktune.load" in refused
