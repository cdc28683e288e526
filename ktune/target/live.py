"""The GPUs of this machine as a target: compile ahead on all cores, check and time on each GPU."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import wait
from typing import Any

from ktune.bench.measurement import Measurement
from ktune.bench.place import protocol_of
from ktune.bench.tasks import COMPILE, COMPILER, DEVICE, FINALS, INTERPRETER, MEASURE, ROOFS, VERIFY
from ktune.bench.worker import Pool, Task, Worker, WorkerDied, WorkerError, WorkerTimeout
from ktune.device import CPU, Device, cuda_available
from ktune.errors import NoDeviceError, UsageError
from ktune.problem import Problem
from ktune.target.target import ROUNDS, Spent, versions
from ktune.variant import Variant

COMPILE_LIMIT_S = (15.0, 120.0)
"""Least and most seconds that a compilation may take; between them, ``LIMIT_FACTOR`` times the
ninth decile of what was seen."""
LIMIT_FACTOR = 8.0
LIMIT_AFTER = 10
MEASURE_LIMIT_S = 60.0
MEASURE_LEAST_S = 10.0
MEASURE_FACTOR = 20.0
"""A variant may take this many times what the slowest one measured took, within these bounds."""
FINALS_LIMIT_S = 300.0
BASELINES = ("torch", "flash", "cudnn")
"""What finals compare with. ``torch.compile`` takes seconds to compile: see ``ktune bench``."""

Key = tuple[str, str]
"""Problem text and variant text."""


@dataclass(eq=False, slots=True)
class _Timing:
    """A timing worker, and what it is at.

    Attributes:
        ahead: the variant it goes on with by itself, once the job has ended.
    """

    where: str
    worker: Worker
    job: _Job | None = None
    ahead: _Job | None = None
    free_since: float = 0.0
    busy_since: float = 0.0


@dataclass(eq=False, slots=True)
class _Job:
    """A call on a timing worker: a variant's measurement, or anything else that needs the GPU.

    Attributes:
        key: of the variant that it measures; None for any other call.
        at: the only worker that may do it; None for any.
    """

    function: str
    arguments: tuple[Any, ...]
    limit_s: float
    key: Key | None = None
    at: _Timing | None = None
    result: Any = None
    done: bool = False


class LiveTarget:
    """Compiles on all cores ahead of one timing worker a GPU, which alone touches it.

    Args:
        places: which GPUs, as ``cuda:0``; or ``cpu``, Triton's interpreter.
        compilers: compile workers; by default one a core.

    Raises:
        NoDeviceError: there is no such GPU.
        UsageError: the GPUs are not alike.
    """

    def __init__(self, places: Sequence[str] = ("cuda:0",), compilers: int | None = None) -> None:
        interpreted = list(places) == [CPU]
        if not interpreted and not cuda_available():
            raise NoDeviceError(
                "no GPU: PyTorch sees no CUDA or ROCm device here. Search a recorded device "
                "instead: ktune search softmax --target h200"
            )
        environment = INTERPRETER if interpreted else COMPILER
        self._timers = [_Timing(place, Worker(environment)) for place in places]
        self._jobs: deque[_Job] = deque()
        cores = compilers or len(os.sched_getaffinity(0))
        self._pool = Pool(cores, environment)
        self._submitted: dict[Key, tuple[Problem, Variant]] = {}
        self._resources: dict[Key, dict[str, Any]] = {}
        self._done: deque[tuple[Problem, Variant, Measurement]] = deque()
        self._best: dict[str, float] = {}
        self._seen_s: list[float] = []
        self._slowest_s = 0.0
        self._started = time.monotonic()
        self.capacity = cores + 2 * len(places)
        self.spent = Spent(workers=cores, timers=len(places))
        self.protocol = protocol_of(places[0])
        self.measured = datetime.now(UTC).date().isoformat()
        self.versions = versions()
        self.replayed_from: str | None = None
        try:
            self.device = self._only_device()
            self._roofs = self._queue(ROOFS, places[0])
        except BaseException:
            self.close()
            raise
        self.spent.lost = 0.0
        self._started = time.monotonic()
        for timer in self._timers:
            timer.free_since = self._started

    @property
    def roofs(self) -> dict[str, float]:
        """Copy and matrix rates, measured while the first variants are compiled."""
        try:
            found: dict[str, float] = self._result(self._roofs)
        except WorkerError:
            return {}
        return found

    def now(self) -> float:
        """Return the seconds since the target was ready."""
        return time.monotonic() - self._started

    def submit(self, problem: Problem, variant: Variant) -> None:
        """Send a variant to the compile workers."""
        key = (problem.text, variant.text)
        self._submitted[key] = (problem, variant)
        arguments = (*key, self.device.to_dict())
        self._pool.submit(key, Task(COMPILE, arguments), self._compile_limit_s())
        self._turn(0.0)  # choosing and keeping trials takes long enough for a GPU to run dry

    def next(self) -> tuple[Problem, Variant, Measurement]:
        """Wait until any variant is compiled, checked and timed, and return its outcome."""
        while not self._done:
            self._turn()
        return self._done.popleft()

    def finals(self, problem: Problem, variants: list[Variant]) -> dict[str, list[float]]:
        """Time variants and baselines in turn; empty if the timing worker fails."""
        texts = [variant.text for variant in variants]
        try:
            found: dict[str, list[float]] = self._final_call(
                FINALS, problem.text, texts, list(BASELINES), ROUNDS
            )
        except WorkerError:
            return {}
        return found

    def verify(self, problem: Problem, variant: Variant) -> str:
        """Check a winner on a whole problem; return what is wrong, or nothing."""
        try:
            verdict = self._final_call(VERIFY, problem.text, variant.text)
        except WorkerError as error:
            return str(error)
        return "" if verdict["passed"] else str(verdict["detail"])

    def close(self) -> None:
        """Kill all workers."""
        self.spent.wall = self.now()
        self._pool.close()
        for timer in self._timers:
            timer.worker.kill()
        for job in [*self._jobs, *(timer.job for timer in self._timers if timer.job)]:
            job.result, job.done = WorkerDied("the search has ended"), True

    def _only_device(self) -> Device:
        asked = [self._queue(DEVICE, timer.where, at=timer) for timer in self._timers]
        self._pool.warm()
        found = [Device.from_dict(self._result(job)) for job in asked]
        for timer, device in zip(self._timers, found, strict=True):
            if device.key != found[0].key:
                raise UsageError(
                    f"{timer.where} is {device.key} and {self._timers[0].where} is "
                    f"{found[0].key}: times of unlike GPUs are never mixed; search each by itself"
                )
        return found[0]

    def _compile_limit_s(self) -> float:
        least, most = COMPILE_LIMIT_S
        if len(self._seen_s) < LIMIT_AFTER:
            return most
        return min(max(LIMIT_FACTOR * statistics.quantiles(self._seen_s, n=10)[-1], least), most)

    def _measure_limit_s(self) -> float:
        """Return how long a variant may take: once one was measured, not much longer than that."""
        if not self._slowest_s:
            return MEASURE_LIMIT_S
        return min(max(MEASURE_FACTOR * self._slowest_s, MEASURE_LEAST_S), MEASURE_LIMIT_S)

    def _final_call(self, function: str, *arguments: Any) -> Any:
        """Run something on the first GPU, in front of all that waits, while compiling goes on."""
        return self._call(function, *arguments, self._timers[0].where, limit_s=FINALS_LIMIT_S)

    def _call(
        self,
        function: str,
        *arguments: Any,
        at: _Timing | None = None,
        limit_s: float = MEASURE_LIMIT_S,
    ) -> Any:
        return self._result(self._queue(function, *arguments, at=at, limit_s=limit_s))

    def _queue(
        self,
        function: str,
        *arguments: Any,
        at: _Timing | None = None,
        limit_s: float = MEASURE_LIMIT_S,
    ) -> _Job:
        """Put a call in front of all that waits."""
        job = _Job(function, arguments, limit_s, at=at or self._timers[0])
        self._jobs.appendleft(job)
        self._dispatch()
        return job

    def _result(self, job: _Job) -> Any:
        while not job.done:
            self._turn()
        if isinstance(job.result, WorkerError):
            raise job.result
        return job.result

    def _turn(self, most_s: float = math.inf) -> None:
        """Wait for anything to happen, no longer than ``most_s`` seconds, and deal with it."""
        busy = [timer for timer in self._timers if timer.job is not None]
        deadline = min([self._pool.deadline, *(timer.worker.deadline for timer in busy)])
        connections = [*self._pool.connections, *(timer.worker.connection for timer in busy)]
        if connections and not self._pool.ended:
            limit = min(most_s, max(0.0, deadline - time.monotonic()))
            wait(connections, None if math.isinf(limit) else limit)
        for timer in busy:
            if timer.worker.connection.poll(0) or timer.worker.deadline <= time.monotonic():
                self._finish(timer)
        for key, resources in self._pool.collect():
            self._take_compiled(key, resources)
        self._dispatch()

    def _take_compiled(self, key: Key, resources: dict[str, Any] | WorkerError) -> None:
        if isinstance(resources, WorkerError):
            problem, variant = self._submitted.pop(key)
            self._done.append((problem, variant, _compile_failure(resources)))
            return
        seconds = float(resources.get("compile_s") or 0.0)
        self.spent.compile += seconds
        self._seen_s.append(seconds)
        self._resources[key] = resources
        self._jobs.append(_Job(MEASURE, key, self._measure_limit_s(), key))

    def _dispatch(self) -> None:
        """Give every idle timing worker what is ready, calls before variants."""
        for timer in self._timers:
            while timer.job is None and (job := self._next_for(timer)):
                self._start(timer, job)
        for timer in self._timers:
            if timer.job is not None and timer.ahead is None and self._jobs:
                self._prefetch(timer)

    def _next_for(self, timer: _Timing) -> _Job | None:
        job = next((job for job in self._jobs if job.at in (None, timer)), None)
        if job is not None:
            self._jobs.remove(job)
        return job

    def _start(self, timer: _Timing, job: _Job) -> None:
        now = time.monotonic()
        self.spent.idle += now - timer.free_since if timer.free_since else 0.0
        timer.job, timer.busy_since = job, now
        try:
            timer.worker.start(self._task(timer, job), job.limit_s)
        except WorkerDied as error:
            self._end(timer, error)

    def _prefetch(self, timer: _Timing) -> None:
        """Send a variant behind the current job: the GPU need not wait for this process's look."""
        job = self._jobs[0]
        if job.key is not None:
            timer.ahead = self._jobs.popleft()
            timer.worker.prefetch(self._task(timer, job))

    def _task(self, timer: _Timing, job: _Job) -> Task:
        arguments = job.arguments
        if job.key is not None:
            arguments = (*arguments, timer.where, self._best.get(job.key[0]))
        return Task(job.function, arguments)

    def _finish(self, timer: _Timing) -> None:
        try:
            result = timer.worker.result()
        except WorkerError as error:
            result = error
        self._end(timer, result)

    def _end(self, timer: _Timing, result: Any) -> None:
        job, timer.job = timer.job, None
        assert job is not None
        timer.free_since = time.monotonic()
        job.result, job.done = result, True
        seconds = timer.free_since - timer.busy_since
        if job.key is not None:
            self._take_measured(job.key, result, seconds)
        elif isinstance(result, WorkerError):
            self.spent.lost += seconds
        elif job.function in (FINALS, VERIFY):
            self.spent.finals += seconds
        if timer.ahead is not None:
            self._go_on(timer, alive=not isinstance(result, WorkerDied))

    def _go_on(self, timer: _Timing, alive: bool) -> None:
        """Make the prefetched job the current one; a dead worker has not seen it."""
        job, timer.ahead = timer.ahead, None
        assert job is not None
        if alive:
            timer.job, timer.busy_since = job, timer.free_since
            timer.worker.proceed(job.limit_s)
        else:
            self._jobs.appendleft(job)

    def _take_measured(
        self, key: Key, result: dict[str, Any] | WorkerError, seconds: float
    ) -> None:
        problem, variant = self._submitted.pop(key)
        resources = self._resources.pop(key)
        if isinstance(result, WorkerError):
            self.spent.lost += seconds
            status: Any = "timeout" if isinstance(result, WorkerTimeout) else "crashed"
            self._done.append((problem, variant, Measurement(status, detail=str(result))))
            return
        kept = ("registers", "spill_bytes", "shared_bytes", "compile_s")
        known = {name: resources[name] for name in kept if name in resources}
        outcome = Measurement.from_dict({**result, **known})
        self.spent.check += outcome.check_s or 0.0
        self.spent.time += outcome.time_s or 0.0
        self.spent.lost += max(seconds - (outcome.check_s or 0.0) - (outcome.time_s or 0.0), 0.0)
        self._slowest_s = max(self._slowest_s, seconds)
        if outcome.ok and outcome.latency_ms is not None:
            best = self._best.get(problem.text, math.inf)
            self._best[problem.text] = min(best, outcome.latency_ms)
        self._done.append((problem, variant, outcome))


def _compile_failure(error: WorkerError) -> Measurement:
    if isinstance(error, WorkerTimeout):
        return Measurement("timeout", detail="compilation outlasted its time")
    if isinstance(error, WorkerDied):
        return Measurement("crashed", detail=f"compilation: {error}")
    if "OutOfResources" in str(error):
        return Measurement("over_limit", detail=str(error))
    return Measurement("compile_error", detail=str(error))
