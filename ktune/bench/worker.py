"""Run functions in killable child processes: compiling, checking and timing never stop a search.

A worker is a fresh Python process that runs one function at a time. It dies with its parent, its
prints go to stderr, and a hang, a crash or a kill costs one task: the pool starts a new one.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from ktune.bench.reaper import reaper
from ktune.errors import KtuneError, UsageError
from ktune.operations import operation, references

START_S = 120.0
"""Seconds a new worker has to import what it needs."""
READY = "ktune.bench.tasks:ready"
NICENESS = 10
"""Of a pool's workers: they never take a core from a timing worker or from the search."""


class WorkerError(KtuneError):
    """A task failed in its worker; carries the first line of the failure."""


class WorkerDied(WorkerError):
    """The worker ended, or was ended, in the middle of a task."""


class WorkerTimeout(WorkerDied):
    """The task outlasted its time and its worker was killed."""


@dataclass(frozen=True, slots=True)
class Task:
    """A function, by dotted name ``package.module:function``, and its arguments."""

    function: str
    arguments: tuple[Any, ...]


class Worker:
    """One child process.

    Args:
        environment: variables to set in the child before it imports anything.
        niceness: added to the child's; the system lets less nice processes go first.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, niceness: int = 0) -> None:
        self._environment = dict(environment or {})
        self._niceness = niceness
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._deadline = float("inf")

    @property
    def pid(self) -> int | None:
        """Process id of the running child."""
        return self._process.pid if self._process else None

    @property
    def connection(self) -> Connection:
        """Becomes readable when the task ends or the child dies."""
        assert self._connection is not None, "no task was started"
        return self._connection

    @property
    def deadline(self) -> float:
        """Monotonic time at which the current task is out of time."""
        return self._deadline

    def prefetch(self, task: Task) -> None:
        """Give a busy child its next task: it starts on it at once when the current one ends."""
        with suppress(OSError):  # the child is dead: the result of the current task will say so
            self.connection.send((task.function, task.arguments, references()))

    def proceed(self, timeout_s: float) -> None:
        """Let the time of the prefetched task begin, now that the one before it has ended."""
        self._deadline = time.monotonic() + timeout_s

    def start(self, task: Task, timeout_s: float) -> None:
        """Give the child a task, starting or restarting the child if needed."""
        fresh = self._process is None or self._process.poll() is not None
        if fresh:
            self._spawn()
        self._deadline = time.monotonic() + timeout_s + (START_S if fresh else 0.0)
        try:
            self.connection.send((task.function, task.arguments, references()))
        except OSError as error:
            self.kill()
            raise WorkerDied(f"the worker did not start: {error}") from error

    def result(self) -> Any:
        """Wait for the task's result.

        Raises:
            WorkerError: the function raised.
            WorkerTimeout: it outlasted its time; the child is killed.
            WorkerDied: the child ended.
        """
        left = max(0.0, self._deadline - time.monotonic())
        if not self.connection.poll(left):
            self.kill()
            raise WorkerTimeout("out of time")
        try:
            ok, value = self.connection.recv()
        except (EOFError, OSError) as error:
            code = self._process.wait() if self._process else None
            self.kill()
            raise WorkerDied(f"the worker ended with {_exit_text(code)}") from error
        if not ok:
            raise WorkerError(value)
        return value

    def call(self, function: str, *arguments: Any, timeout_s: float) -> Any:
        """Run a function in the child and return its result."""
        self.start(Task(function, arguments), timeout_s)
        return self.result()

    def kill(self) -> None:
        """End the child and everything it started."""
        if self._process is not None and self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._process.kill()
            self._process.wait()
        if self._process is not None:
            with suppress(ProcessLookupError):  # what a worker that ended by itself has left
                os.killpg(self._process.pid, signal.SIGKILL)
            reaper.forget(self._process.pid)
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _spawn(self) -> None:
        self.kill()
        ours, theirs = Pipe()
        path = os.pathsep.join(part or str(Path.cwd()) for part in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ktune.bench.worker", str(theirs.fileno()), str(os.getpid())],
            env={**os.environ, **self._environment, "PYTHONPATH": path},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        reaper.watch(self._process.pid)
        if self._niceness:
            with suppress(OSError):  # a limit forbids it, or the child has ended
                niceness = os.getpriority(os.PRIO_PROCESS, 0) + self._niceness
                os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)
        theirs.close()
        self._connection = ours


class _Warm:
    """The key of a task that only starts a worker."""


class Pool:
    """Several workers; tasks go in by ``submit`` and come out, as they end, by ``next``.

    Whoever waits for other things too waits on ``connections`` until ``deadline``, and then takes
    what has ended by ``collect``.
    """

    def __init__(self, size: int, environment: Mapping[str, str] | None = None) -> None:
        self._idle = [Worker(environment, NICENESS) for _ in range(size)]
        self._busy: dict[Any, Worker] = {}
        self._waiting: deque[tuple[Any, Task, float]] = deque()
        self._ended: deque[tuple[Any, Any]] = deque()

    def __len__(self) -> int:
        busy = sum(not isinstance(key, _Warm) for key in self._busy)
        return busy + len(self._waiting) + len(self._ended)

    @property
    def ended(self) -> bool:
        """Whether a task has ended that ``collect`` has not yet returned."""
        return bool(self._ended)

    @property
    def connections(self) -> list[Connection]:
        """Become readable when a task ends or its worker dies."""
        return [worker.connection for worker in self._busy.values()]

    @property
    def deadline(self) -> float:
        """Monotonic time at which the first task is out of time; infinite if none runs."""
        return min((worker.deadline for worker in self._busy.values()), default=math.inf)

    def warm(self) -> None:
        """Start all workers now: their first task then need not wait for their imports."""
        idle, self._idle = self._idle, []
        for worker in idle:
            try:
                worker.start(Task(READY, ()), START_S)
                self._busy[_Warm()] = worker
            except WorkerDied:
                self._idle.append(worker)

    def submit(self, key: Any, task: Task, timeout_s: float) -> None:
        """Queue a task under a key of your choice."""
        self._waiting.append((key, task, timeout_s))
        self._feed()

    def collect(self) -> list[tuple[Any, Any]]:
        """Return the key and the result, or the WorkerError, of every task that has ended."""
        self._gather()
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def next(self) -> tuple[Any, Any]:
        """Wait for any task to end and return its key and its result or its WorkerError."""
        while not self._ended:
            limit = None if math.isinf(self.deadline) else self.deadline - time.monotonic()
            wait(self.connections, limit and max(0.0, limit))
            self._gather()
        return self._ended.popleft()

    def close(self) -> None:
        """Kill all workers."""
        for worker in [*self._idle, *self._busy.values()]:
            worker.kill()
        self._busy.clear()
        self._waiting.clear()
        self._ended.clear()

    def _gather(self) -> None:
        """Move what has ended out of the way, and give the workers more."""
        ready = set(wait(self.connections, 0))
        for key, worker in list(self._busy.items()):
            if worker.connection in ready or worker.deadline <= time.monotonic():
                del self._busy[key]
                outcome = _outcome(worker)
                if not isinstance(key, _Warm):
                    self._ended.append((key, outcome))
                self._idle.append(worker)
        self._feed()

    def _feed(self) -> None:
        while self._waiting and self._idle:
            key, task, timeout_s = self._waiting.popleft()
            worker = self._idle.pop()
            try:
                worker.start(task, timeout_s)
            except WorkerDied as error:
                self._ended.append((key, error))
                self._idle.append(worker)
                continue
            self._busy[key] = worker


def _outcome(worker: Worker) -> Any:
    try:
        return worker.result()
    except WorkerError as error:
        return error


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit status {code}"


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _serve(connection: Connection) -> None:
    while True:
        try:
            name, arguments, own_operations = connection.recv()
        except (EOFError, OSError):
            return
        try:
            for reference in own_operations:
                with suppress(UsageError):  # a task that needs it will say so
                    operation(reference)
            module, _, function = name.partition(":")
            result = (True, getattr(importlib.import_module(module), function)(*arguments))
        except Exception as error:
            text = str(error).strip().splitlines()
            result = (False, f"{type(error).__name__}: {text[0] if text else ''}"[:300])
            if os.environ.get("KTUNE_LOG") == "debug":
                traceback.print_exc()
        connection.send(result)


def main() -> None:
    """Serve tasks from the parent until it goes away."""
    _die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
    _serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
