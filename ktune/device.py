"""A device: the GPU that a kernel is tuned on, and the limits that change winners."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from ktune.errors import NoDeviceError, UsageError


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU model and its limits.

    Attributes:
        name: as the driver says it, for example ``NVIDIA H200``; a MIG slice has its own name.
        backend: ``cuda`` or ``hip``.
        arch: ``sm_90``, ``gfx942``.
        sm_count: multiprocessors.
        shared_memory: bytes of shared memory one program may use.
        l2_bytes: bytes of L2 cache.
        memory_gib: device memory, rounded to GiB.
    """

    name: str
    backend: str
    arch: str
    sm_count: int
    shared_memory: int
    l2_bytes: int
    memory_gib: int

    @property
    def key(self) -> str:
        """The text that a table files entries under."""
        return f"{self.name} / {self.arch} / {self.sm_count} SM / {self.memory_gib} GiB"

    @property
    def capability(self) -> int:
        """The number in the architecture: 90 for ``sm_90``; 0 where it is not a number."""
        digits = self.arch.removeprefix("sm_").removeprefix("gfx").rstrip("abcdef")
        return int(digits) if digits.isdigit() else 0

    @property
    def warp_size(self) -> int:
        """Threads in a warp."""
        return 64 if self.backend == "hip" else 32

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Device:
        """Build a device from ``to_dict``'s result."""
        return cls(**fields)


CPU = "cpu"
"""Triton's interpreter, where places are named as ``cuda:0``."""

COMPILE_TARGETS = {
    "sm_80": Device("any sm_80", "cuda", "sm_80", 108, 166_912, 40 << 20, 40),
    "sm_90": Device("any sm_90", "cuda", "sm_90", 132, 232_448, 50 << 20, 80),
    "sm_100": Device("any sm_100", "cuda", "sm_100", 148, 232_448, 126 << 20, 180),
    "gfx942": Device("any gfx942", "hip", "gfx942", 304, 65_536, 4 << 20, 192),
}
"""Architectures that kernels can be compiled for without a GPU, with typical limits."""


def compile_target(arch: str) -> Device:
    """Return the stand-in device of an architecture.

    Raises:
        UsageError: no such architecture is known.
    """
    if arch not in COMPILE_TARGETS:
        raise UsageError(f"unknown architecture {arch!r}; known: {', '.join(COMPILE_TARGETS)}")
    return COMPILE_TARGETS[arch]


def cuda_available() -> bool:
    """Return whether PyTorch sees a GPU; does not initialise CUDA."""
    import torch

    return torch.cuda.is_available()


@cache
def device_of(index: int) -> Device:
    """Return the GPU with this index.

    Raises:
        NoDeviceError: PyTorch sees no such GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise NoDeviceError(
            "no GPU: PyTorch sees no CUDA or ROCm device on this machine. "
            "Search a recorded device instead: ktune search --target h200"
        )
    if index >= torch.cuda.device_count():
        raise NoDeviceError(f"no GPU cuda:{index}: this machine has {torch.cuda.device_count()}")
    properties = torch.cuda.get_device_properties(index)
    hip = bool(torch.version.hip)
    arch = (
        properties.gcnArchName.split(":")[0] if hip else f"sm_{properties.major}{properties.minor}"
    )
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or 65_536
    return Device(
        name=properties.name,
        backend="hip" if hip else "cuda",
        arch=arch,
        sm_count=properties.multi_processor_count,
        shared_memory=shared,
        l2_bytes=properties.L2_cache_size,
        memory_gib=round(properties.total_memory / 2**30),
    )
