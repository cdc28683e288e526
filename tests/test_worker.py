"""Workers: a crash, a hang or a noisy function costs one task and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from ktune.bench.worker import Pool, Task, Worker, WorkerDied, WorkerError, WorkerTimeout

HERE = "tests_worker_tasks"
TASKS = """
import os, signal, sys, time
def add(a, b): return a + b
def env(name): return os.environ.get(name)
def fail(): raise ValueError("first line\\nsecond line")
def hang(): time.sleep(600)
def crash(): os.kill(os.getpid(), signal.SIGKILL)
def leave(): os._exit(7)
def shout(): print("noise" * 1000); sys.stdout.flush(); return 1
def pid(): return os.getpid()
"""


@pytest.fixture(autouse=True)
def tasks(tmp_path, monkeypatch):
    (tmp_path / f"{HERE}.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def worker():
    worker = Worker({"KTUNE_TEST": "yes"})
    yield worker
    worker.kill()


def call(worker, name, *arguments, timeout_s=60):
    return worker.call(f"{HERE}:{name}", *arguments, timeout_s=timeout_s)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_returns_results_and_keeps_its_process(worker):
    assert call(worker, "add", 2, 3) == 5
    assert call(worker, "env", "KTUNE_TEST") == "yes"
    assert call(worker, "pid") == call(worker, "pid") == worker.pid


def test_an_exception_is_one_line_and_the_worker_goes_on(worker):
    with pytest.raises(WorkerError, match=r"^ValueError: first line$"):
        call(worker, "fail")
    assert call(worker, "add", 1, 1) == 2


def test_prints_do_not_garble_results(worker):
    assert call(worker, "shout") == 1


@pytest.mark.parametrize(
    ("name", "message"), [("crash", "signal SIGKILL"), ("leave", "exit status 7")]
)
def test_a_death_is_one_error_and_a_new_process(worker, name, message):
    call(worker, "pid")
    with pytest.raises(WorkerDied, match=message):
        call(worker, name)
    assert call(worker, "add", 1, 1) == 2


def test_a_hang_is_killed(worker):
    pid = call(worker, "pid")
    started = time.monotonic()
    with pytest.raises(WorkerTimeout):
        call(worker, "hang", timeout_s=0.3)
    assert time.monotonic() - started < 10
    assert not alive(pid)
    assert call(worker, "add", 1, 1) == 2


def test_pool_returns_everything_and_outlives_deaths():
    pool = Pool(2)
    names = ["add", "crash", "fail", "add", "add"]
    try:
        for key, name in enumerate(names):
            arguments = (key, 1) if name == "add" else ()
            pool.submit(key, Task(f"{HERE}:{name}", arguments), 60)
        results = dict(pool.next() for _ in names)
    finally:
        pool.close()
    assert {k: v for k, v in results.items() if isinstance(v, int)} == {0: 1, 3: 4, 4: 5}
    assert isinstance(results[1], WorkerDied)
    assert isinstance(results[2], WorkerError)
    assert not len(pool)


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_workers_die_with_a_killed_parent(tmp_path):
    script = (
        f"from ktune.bench.worker import *\nw = Worker()\n"
        f"print(w.call('{HERE}:pid', timeout_s=60), flush=True)\n"
        f"w.call('{HERE}:hang', timeout_s=60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_a_warm_pool_has_started_and_says_nothing_of_it():
    pool = Pool(2)
    try:
        pool.warm()
        assert not len(pool)
        pool.submit("one", Task(f"{HERE}:add", (1, 1)), 60)
        assert pool.next() == ("one", 2)
        assert pool.collect() == []
    finally:
        pool.close()
