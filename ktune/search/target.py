"""What a search runs against: a GPU of this machine, or the recording of another one."""

from __future__ import annotations

import importlib.metadata
import os
from collections import deque
from datetime import UTC, datetime
from typing import Any, Protocol

from ktune.bench.measurement import Measurement
from ktune.bench.tasks import COMPILE, COMPILER, DEVICE, FINALS, MEASURE, ROOFS
from ktune.bench.timer import PROTOCOL
from ktune.bench.worker import Pool, Task, Worker, WorkerDied, WorkerError, WorkerTimeout
from ktune.device import Device, cuda_available
from ktune.errors import NoDeviceError
from ktune.problem import Problem
from ktune.search.recording import Recording
from ktune.variant import Variant

COMPILE_LIMIT_S = 120.0
MEASURE_LIMIT_S = 60.0
FINALS_LIMIT_S = 300.0


class Target(Protocol):
    """Evaluates variants: they go in by ``submit`` and come out, measured, by ``next``."""

    device: Device
    protocol: str
    measured: str
    versions: dict[str, str]
    roofs: dict[str, float]
    replayed_from: str | None
    capacity: int
    """How many variants to keep submitted."""

    def submit(self, problem: Problem, variant: Variant) -> None:
        """Take a variant for evaluation."""

    def next(self) -> tuple[Variant, Measurement]:
        """Return the next outcome, in any order."""

    def finals(
        self, problem: Problem, variants: list[Variant], baselines: list[str]
    ) -> dict[str, list[float]]:
        """Time variants and baselines in turn; samples by variant text or ``baseline:<name>``.

        Paired by index where taken together; a single sample each where only medians are known.
        """

    def close(self) -> None:
        """Give back what the target holds."""


class ReplayTarget:
    """Answers from a recording; times are those of another day and perhaps another machine."""

    capacity = 1

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._queue: deque[tuple[Problem, Variant]] = deque()
        self.device = recording.device
        self.protocol = recording.protocol
        self.measured = recording.measured
        self.versions = recording.versions
        self.roofs = recording.roofs
        self.replayed_from: str | None = recording.title

    def submit(self, problem: Problem, variant: Variant) -> None:
        """Take a variant for evaluation."""
        self._queue.append((problem, variant))

    def next(self) -> tuple[Variant, Measurement]:
        """Return the recorded outcome; a variant that was not recorded counts as a crash."""
        problem, variant = self._queue.popleft()
        missing = Measurement("crashed", detail="this variant is not in the recording")
        return variant, self._recording.problem(problem).outcomes.get(variant.text, missing)

    def finals(
        self, problem: Problem, variants: list[Variant], baselines: list[str]
    ) -> dict[str, list[float]]:
        """Return recorded finals; a variant outside them has its recorded median."""
        seen = self._recording.problem(problem)
        found: dict[str, list[float]] = {}
        for text in (variant.text for variant in variants):
            latency = seen.outcomes[text].latency_ms if text in seen.outcomes else None
            if text in seen.finals:
                found[text] = seen.finals[text]
            elif latency is not None:
                found[text] = [latency]
        wanted = [f"baseline:{name}" for name in baselines]
        return found | {name: seen.finals[name] for name in wanted if name in seen.finals}

    def close(self) -> None:
        """Nothing is held."""


class LiveTarget:
    """Compiles on all cores ahead of one timing worker, which alone touches the GPU.

    Args:
        index: which GPU.
        compilers: compile workers; by default one a core.

    Raises:
        NoDeviceError: there is no such GPU.
    """

    def __init__(self, index: int = 0, compilers: int | None = None) -> None:
        if not cuda_available():
            raise NoDeviceError(
                "no GPU: PyTorch sees no CUDA or ROCm device here. Search a recorded device "
                "instead: ktune search softmax --target h200"
            )
        self._index = index
        self._gpu = Worker(COMPILER)
        fields = self._gpu.call(DEVICE, index, timeout_s=MEASURE_LIMIT_S)
        self.device = Device.from_dict(fields)
        self.protocol = PROTOCOL
        self.measured = datetime.now(UTC).date().isoformat()
        self.versions = versions()
        self.replayed_from: str | None = None
        cores = compilers or len(os.sched_getaffinity(0))
        self._pool = Pool(cores, COMPILER)
        self.capacity = cores + 2
        self._submitted: dict[str, tuple[Problem, Variant]] = {}
        self.roofs: dict[str, float] = self._gpu.call(ROOFS, index, timeout_s=MEASURE_LIMIT_S)

    def submit(self, problem: Problem, variant: Variant) -> None:
        """Send a variant to the compile workers."""
        self._submitted[variant.text] = (problem, variant)
        arguments = (problem.text, variant.text, self.device.to_dict())
        self._pool.submit(variant.text, Task(COMPILE, arguments), COMPILE_LIMIT_S)

    def next(self) -> tuple[Variant, Measurement]:
        """Wait for any compilation, then check and time that variant on the GPU."""
        text, resources = self._pool.next()
        problem, variant = self._submitted.pop(text)
        if isinstance(resources, WorkerError):
            return variant, _compile_failure(resources)
        outcome = self._measure(problem, variant)
        kept = {"registers", "spill_bytes", "shared_bytes"}
        return variant, Measurement.from_dict(
            {**outcome, **{key: value for key, value in resources.items() if key in kept}}
        )

    def _measure(self, problem: Problem, variant: Variant) -> dict[str, Any]:
        try:
            arguments = (problem.text, variant.text, self._index)
            result: dict[str, Any] = self._gpu.call(MEASURE, *arguments, timeout_s=MEASURE_LIMIT_S)
        except WorkerTimeout as error:
            return Measurement("timeout", detail=str(error)).to_dict()
        except WorkerError as error:
            return Measurement("crashed", detail=str(error)).to_dict()
        return result

    def finals(
        self, problem: Problem, variants: list[Variant], baselines: list[str]
    ) -> dict[str, list[float]]:
        """Time variants and baselines in turn; empty if the timing worker fails."""
        texts = [variant.text for variant in variants]
        try:
            found: dict[str, list[float]] = self._gpu.call(
                FINALS, problem.text, texts, baselines, 25, self._index, timeout_s=FINALS_LIMIT_S
            )
        except WorkerError:
            return {}
        return found

    def close(self) -> None:
        """Kill all workers."""
        self._pool.close()
        self._gpu.kill()


def _compile_failure(error: WorkerError) -> Measurement:
    if isinstance(error, WorkerTimeout):
        return Measurement("timeout", detail="compilation outlasted its time")
    if isinstance(error, WorkerDied):
        return Measurement("crashed", detail=f"compilation: {error}")
    if "OutOfResources" in str(error):
        return Measurement("over_limit", detail=str(error))
    return Measurement("compile_error", detail=str(error))


def versions() -> dict[str, str]:
    """Return the versions that a time depends on."""
    names = ("torch", "triton")
    return {name: importlib.metadata.version(name) for name in names}
