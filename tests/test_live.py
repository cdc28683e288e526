"""A live search end to end, on Triton's interpreter: what goes wrong costs one trial, and no
process outlives the search, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import Silent, one_search

from ktune.operations import parse_problem
from ktune.search.campaign import Campaign
from ktune.search.effort import Effort
from ktune.search.trials.storage import open_storage
from ktune.space import load_space
from ktune.space.space import parse_space
from ktune.target import live
from ktune.target.live import LiveTarget

PROBLEM = parse_problem("softmax m=13 n=100 dtype=float16")
SPACE = """
schema: 1
operation: softmax
summary: A few variants of one tile.
parameters:
  template: {choices: [one_tile]}
  block_m: {choices: [1, 2, 4, 8, 16]}
  eviction: {choices: [none]}
launch:
  num_warps: {choices: [1, 2]}
constraints: []
problems:
  default: [{m: 13, n: 100, dtype: float16}]
budget: {trials: 10, timeout_s: 60}
"""
TASKS = """
import os, signal, sys, time
from ktune.bench import tasks
def measure(problem, variant, *rest):
    if "block_m=2 " in variant: time.sleep(600)
    if "block_m=4 " in variant: os.kill(os.getpid(), signal.SIGKILL)
    if "block_m=8 " in variant and "warps=1" in variant: os._exit(3)
    if "block_m=8 " in variant: raise MemoryError("CUDA out of memory (made up)")
    print("garbage" * 5000, flush=True)
    os.write(1, b"\\x00garbage\\xff" * 100)
    return tasks.measure_variant(problem, variant, *rest)
def compile(problem, variant, device):
    if "block_m=2 " in variant: time.sleep(600)
    if "block_m=4 " in variant: os.abort()
    return tasks.compile_variant(problem, variant, device)
def slow(problem, variant, *rest):
    import subprocess
    subprocess.Popen(["sleep", os.environ["NAP"]])  # as Triton starts ptxas
    time.sleep(600)
"""


@pytest.fixture
def faults(tmp_path, monkeypatch):
    (tmp_path / "faulty_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("KTUNE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def target(faults):
    found = LiveTarget(["cpu"], compilers=2)
    yield found
    found.close()


@pytest.fixture
def space():
    return parse_space(SPACE, "tiny.yaml")


def statuses(outcome):
    found = {}
    for text, measurement in outcome.measurements.items():
        found.setdefault(measurement.status, []).append(text)
    return {status: len(texts) for status, texts in found.items()}


@pytest.mark.slow
def test_a_bad_variant_costs_one_trial(space, target, monkeypatch):
    monkeypatch.setattr(live, "MEASURE", "faulty_tasks:measure")
    monkeypatch.setattr(live, "MEASURE_LIMIT_S", 8.0)
    monkeypatch.setattr("ktune.bench.worker.START_S", 10.0)
    results = Campaign(
        target, open_storage("memory"), lambda *_: None, Effort("full"), Silent()
    ).run([(space, PROBLEM)])
    (result,) = results
    assert statuses(result.outcome) == {"ok": 4, "timeout": 2, "crashed": 4}
    details = [m.detail for m in result.outcome.measurements.values() if not m.ok]
    assert any("SIGKILL" in d for d in details) and any("exit status 3" in d for d in details)
    assert any("MemoryError: CUDA out of memory" in d for d in details)
    assert result.entry is not None
    assert result.entry.variant.values["block_m"] in (1, 16)


def test_a_bad_compilation_costs_one_trial_and_is_not_repeated(space, target, monkeypatch):
    monkeypatch.setattr(live, "COMPILE", "faulty_tasks:compile")
    monkeypatch.setattr(live, "COMPILE_LIMIT_S", (2.0, 2.0))
    monkeypatch.setattr("ktune.bench.worker.START_S", 6.0)
    outcome = one_search(space, PROBLEM, target, open_storage("memory"), 10)
    assert statuses(outcome) == {"ok": 6, "timeout": 2, "crashed": 2}


def test_the_compile_limit_follows_what_was_seen(target):
    assert target._compile_limit_s() == live.COMPILE_LIMIT_S[1]
    target._seen_s += [3.0] * 20
    assert target._compile_limit_s() == pytest.approx(live.LIMIT_FACTOR * 3.0)
    target._seen_s += [0.01] * 1000
    assert target._compile_limit_s() == live.COMPILE_LIMIT_S[0]


def test_where_the_time_went_adds_up(space, target):
    one_search(space, PROBLEM, target, open_storage("memory"), 10)
    target.finals(PROBLEM, list(space.variants(PROBLEM, target.device))[:2])
    target.close()
    spent = target.spent
    parts = spent.check + spent.time + spent.finals + spent.idle
    assert spent.wall == pytest.approx(parts, rel=0.2, abs=0.5)
    assert spent.check > 0 and spent.time > 0 and spent.finals > 0


def test_the_parent_needs_no_gpu_and_makes_no_cuda_context(space, target):
    import torch

    one_search(space, PROBLEM, target, open_storage("memory"), 2)
    assert not torch.cuda.is_initialized()


def test_many_devices_share_the_work(faults, space, monkeypatch):
    """Two timing workers of like devices measure every variant once between them."""
    two = LiveTarget(["cpu"], compilers=1)
    try:
        twin = live._Timing("cpu", live.Worker(live.INTERPRETER), free_since=time.monotonic())
        two._timers.append(twin)
        outcome = one_search(space, PROBLEM, two, open_storage("memory"), 10)
        assert statuses(outcome) == {"ok": 10}
        assert all(timer.worker.pid for timer in two._timers), "both were started"
    finally:
        two.close()


def test_a_failure_to_compile_is_remembered_by_source_and_versions(space, faults):
    from test_search import FakeTarget

    from ktune.bench.measurement import Measurement

    url = f"sqlite:///{faults / 's.sqlite3'}"

    def outcome(variant):
        bad = variant.values.get("block_m") == 2
        return Measurement("compile_error", detail="LLVM") if bad else Measurement("ok", 1.0, 0, 9)

    problems = [PROBLEM, parse_problem("softmax m=64 n=100 dtype=float16")]
    asked = []
    for problem in problems:
        fake = FakeTarget(outcome=outcome)
        found = one_search(space, problem, fake, open_storage(url), 10)
        asked.append([text for text in fake.asked if "block_m=2 " in text])
        assert statuses(found) == {"ok": 8, "compile_error": 2}
    assert [len(texts) for texts in asked] == [2, 0]
    newer = FakeTarget(outcome=outcome)
    newer.versions = {"triton": "99"}
    one_search(
        space, parse_problem("softmax m=65 n=100 dtype=float16"), newer, open_storage(url), 10
    )
    assert len([text for text in newer.asked if "block_m=2 " in text]) == 2


PARENT = """
import sys, signal
from ktune.bench.worker import *
from ktune.target import live
live.MEASURE = "faulty_tasks:slow"
from ktune.cli import main
if sys.argv[1] == "exception":
    import os, subprocess, time
    turn = live.LiveTarget._turn
    def fail(self, *given):
        if not any(timer.job and timer.job.key for timer in self._timers):
            return turn(self, *given)
        find = ["pgrep", "-f", "^sleep " + os.environ["NAP"]]
        while subprocess.run(find, capture_output=True).returncode:
            time.sleep(0.2)
        time.sleep(4)  # until the test has seen it
        raise RuntimeError("made up")
    live.LiveTarget._turn = fail
    del sys.argv[1]
main()
"""


def marked(mark):
    """Return the pids of processes whose environment holds a mark."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGKILL", "exception"])
def test_no_process_is_left_behind(faults, how):
    mark = f"KTUNE_TEST_MARK=left-behind-{os.getpid()}-{how}"
    name, _, value = mark.partition("=")
    environment = {
        **os.environ,
        name: value,
        "NAP": (nap := f"613.{os.getpid()}{len(how)}"),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "KTUNE_TABLE_PATH": str(faults / "table.json"),
    }
    words = ["search", "softmax", "--device", "cpu", "--problem", PROBLEM.fields_text, "-q"]
    first = ["exception"] if how == "exception" else []
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *first, *words],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not any(
        command_of(pid) == ["sleep", nap] for pid in marked(mark)
    ):
        time.sleep(0.2)
    assert len(marked(mark)) >= 3, "parent, timing worker, and what that has started"
    if how != "exception":
        parent.send_signal(getattr(signal, how))
    code = parent.wait(timeout=60)
    assert code == {"SIGINT": 130, "SIGTERM": 130, "SIGKILL": -9, "exception": 1}[how]
    deadline = time.monotonic() + 15
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert marked(mark) == []


@pytest.mark.slow
def test_a_search_of_the_shipped_space_on_the_interpreter(faults):
    """The path of a template's author without a GPU: prove, time, store."""
    target = LiveTarget(["cpu"], compilers=2)
    entries = []
    try:
        campaign = Campaign(
            target,
            open_storage("memory"),
            lambda found, device: entries.extend(found),
            Effort(trials=4),
            Silent(),
        )
        (result,) = campaign.run([(load_space("softmax"), PROBLEM)])
    finally:
        target.close()
    assert statuses(result.outcome)["ok"] >= 4
    assert result.entry in entries and result.entry.device_key.startswith("Triton interpreter")
    assert result.winner is not None and result.winner.samples > 1


def test_finals_go_before_variants_that_wait(space, target):
    """Twelve variants compiled and waiting do not hold up a call for the GPU."""
    variants = list(space.variants(PROBLEM, target.device))
    for variant in variants:
        target.submit(PROBLEM, variant)
    while len(target._jobs) < len(variants) - 1 and not target._done:
        target._turn()
    waiting = len(target._jobs)
    assert waiting > 4
    assert target.verify(PROBLEM, variants[0]) == ""
    assert len(target._jobs) >= waiting - 2
    found = {target.next()[1].text for _ in variants}
    assert found == {variant.text for variant in variants}
