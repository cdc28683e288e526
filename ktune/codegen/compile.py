"""Compile a rendered kernel for a target, with or without a GPU, and read what it uses.

A stand-in driver tells Triton's own JIT which GPU to compile for, so the compiled kernel lands
in Triton's cache under the very key that a launch on such a GPU looks up: compiling ahead in
processes without a CUDA context and launching elsewhere meet there.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ktune.codegen.module import load_module
from ktune.codegen.render import Source
from ktune.device import Device
from ktune.errors import CompileError
from ktune.operations import operation
from ktune.problem import Problem

_PATCHING = threading.RLock()
"""Held while Triton's ``JITFunction.run`` is another, so that it is put back in order."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel uses.

    Attributes:
        registers: per thread.
        spill_bytes: local memory per thread.
        shared_bytes: per program.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel that was compiled.

    Attributes:
        kernel: Triton's; None where the problem has nothing to launch.
        device: the target.
    """

    kernel: Any
    device: Device

    def resources(self) -> Resources:
        """Return what the kernel uses; asks the CUDA tools, which takes some 50 ms."""
        if self.kernel is None:
            return Resources(0, 0, 0)
        registers, spills = _usage(self.kernel, self.device)
        return Resources(registers, spills, int(self.kernel.metadata.shared))


def compile_kernel(
    source: Source, problem: Problem, options: dict[str, int], device: Device
) -> Compiled:
    """Compile a rendered module for a device, as a launch on this problem would.

    Args:
        source: the rendered module.
        problem: gives argument types, alignment and strides; no memory is allocated for it.
        options: launch options.
        device: the target; need not exist on this machine.

    Raises:
        CompileError: Triton, LLVM or ptxas refuse; the first line of their message.
    """
    launch = load_module(source).launch
    try:
        with _captured_launches(device) as kernels:
            launch(*_arguments(problem), **options)
    except Exception as error:
        raise CompileError(first_line(error)) from error
    return Compiled(kernels[-1] if kernels else None, device)


def compile_only(
    launch: Callable[..., object], problem: Problem, options: dict[str, int]
) -> list[Any]:
    """Compile what a launch on this problem would run, for the current GPU, and run nothing.

    Args:
        launch: of a rendered module.
        problem: gives argument types, alignment and strides.
        options: launch options.

    Returns:
        Triton's kernels; within its ``AsyncCompileMode``, what they will be.
    """
    with _compiling_only() as kernels:
        launch(*_arguments(problem), **options)
    return kernels


def _arguments(problem: Problem) -> tuple[Any, ...]:
    """Return arguments of ``launch`` that have no memory, at aligned addresses."""
    op = operation(problem.op)
    inputs = op.make_inputs(problem, "normal", 0, torch.device("meta"))
    return op.arguments(problem, inputs, op.make_outputs(problem, inputs))


def first_line(error: BaseException) -> str:
    """Return the most telling line of an error: its type and first non-empty line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


class _StubDriver:
    """Answers the three questions that Triton's JIT asks of a driver before it compiles."""

    def __init__(self, device: Device) -> None:
        from triton.backends.compiler import GPUTarget

        arch: int | str = device.capability if device.backend == "cuda" else device.arch
        self._target = GPUTarget(device.backend, arch, device.warp_size)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> str:
        return f"stub {self._target.backend} {self._target.arch}"

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def _captured_launches(device: Device) -> Iterator[list[Any]]:
    """Within, a launch compiles for the device and is not run; yields the compiled kernels."""
    from triton.runtime import driver

    active = driver._active
    with _compiling_only() as kernels:
        driver.set_active(_StubDriver(device))
        try:
            yield kernels
        finally:
            driver._active = active


@contextmanager
def _compiling_only() -> Iterator[list[Any]]:
    """Within, launches of this thread compile and are not run; yields the compiled kernels."""
    from triton.runtime.jit import JITFunction

    kernels: list[Any] = []
    own = threading.get_ident()
    with _PATCHING:
        run = JITFunction.run

        def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if threading.get_ident() != own:
                return run(self, *args, grid=grid, warmup=warmup, **kwargs)
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
            kernels.append(kernel)
            return kernel

        JITFunction.run = compile_instead
        try:
            yield kernels
        finally:
            JITFunction.run = run


def _usage(kernel: Any, device: Device) -> tuple[int, int]:
    """Return registers a thread and spilled bytes a thread."""
    if device.backend == "hip":
        text = kernel.asm["amdgcn"]
        return _number(r"\.vgpr_count:\s+(\d+)", text), 4 * _number(
            r"\.vgpr_spill_count:\s+(\d+)", text
        )
    text = _resource_usage(kernel.asm["cubin"])
    return _number(r"REG:(\d+)", text), _number(r"LOCAL:(\d+)", text) or _number(
        r"STACK:(\d+)", text
    )


def _resource_usage(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _number(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0
