"""Where kernels run: a GPU, or Triton's interpreter on CPU tensors.

A place is named as PyTorch names devices: ``cuda:0``, or ``cpu`` for the interpreter, which makes
a whole search possible without a GPU (slow, and its times mean nothing elsewhere).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch

from ktune.bench import timer, wall
from ktune.bench.gate import Gate
from ktune.device import CPU, Device, device_of
from ktune.problem import Problem

INTERPRETER_DEVICE = Device(
    name="Triton interpreter",
    backend=CPU,
    arch="interpreter",
    sm_count=1,
    shared_memory=232_448,
    l2_bytes=1 << 20,
    memory_gib=1,
)
"""Stands for the GPU where there is none."""


@dataclass(frozen=True, slots=True)
class Place:
    """A device that kernels run on, in this process."""

    device: torch.device

    @property
    def index(self) -> int:
        """Which GPU."""
        return self.device.index or 0

    @property
    def is_gpu(self) -> bool:
        """Whether this is a GPU and not the interpreter."""
        return self.device.type != CPU

    def describe(self) -> Device:
        """Return the device's limits."""
        return device_of(self.index) if self.is_gpu else INTERPRETER_DEVICE

    def own(self, problem: Problem) -> Problem:
        """Return the problem as it is computed here."""
        return problem if self.is_gpu else interpretable(problem)

    def synchronize(self) -> None:
        """Wait for all launches."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


@cache
def place(where: str) -> Place:
    """Return a place by name; a GPU becomes this process's current one."""
    found = Place(torch.device(where))
    if found.is_gpu:
        torch.cuda.set_device(found.device)
    else:
        torch.set_num_threads(1)
    return found


@cache
def gate(where: Place) -> Gate:
    """Return the place's gate, with all it remembers."""
    assert where.is_gpu or os.environ.get("TRITON_INTERPRET") == "1", "not an interpreter worker"
    return Gate(where.device)


@cache
def timer_of(where: Place) -> timer.Timer | wall.WallTimer:
    """Return the place's timer."""
    return timer.Timer(where.describe(), where.index) if where.is_gpu else wall.WallTimer()


def protocol_of(where: str) -> str:
    """Return the name of how times are taken there."""
    return wall.PROTOCOL if torch.device(where).type == CPU else timer.PROTOCOL


def interpretable(problem: Problem) -> Problem:
    """Return the problem in a dtype that Triton's interpreter computes rightly.

    It multiplies the bits of bfloat16 operands as integers, and truncates where a GPU rounds
    (seen in 3.6). The dtype is not in the rendered source, so float16 proves the same text.
    """
    changed = "dtype" in dict(problem.fields) and problem.word("dtype") == "bfloat16"
    return problem.replace(dtype="float16") if changed else problem


def leave_if_sticky(where: str | int) -> None:
    """End this process if CUDA no longer answers, so that the next task gets a fresh one."""
    if where == CPU:
        return
    try:
        torch.cuda.synchronize(where)
    except Exception:
        os._exit(70)
