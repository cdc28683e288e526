"""Decide whether a tensor goes to ktune's kernels or to PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.autograd import forward_ad

from ktune.device import COMPILE_TARGETS, Device, device_of
from ktune.operations.base import DTYPES
from ktune.settings import disabled

KERNEL_DTYPES = frozenset(DTYPES.values())
STAND_IN = -1
"""The index that stands for the CPU while kernels run in Triton's interpreter."""

_NOTHING = nullcontext()
_stand_in: Device | None = None


def kernel_device(tensor: torch.Tensor) -> int | None:
    """Return the index of the GPU whose kernels take this tensor; None for PyTorch.

    PyTorch computes tensors on the CPU, other dtypes than float32, float16 and bfloat16, tensor
    subclasses, tensors inside ``torch.func`` transforms and forward-mode AD, and everything if
    ``KTUNE_DISABLE=1``.
    """
    if tensor.dtype not in KERNEL_DTYPES or not is_plain(tensor) or disabled():
        return None
    if tensor.is_cuda or (_stand_in is not None and tensor.device.type == "cpu"):
        return index_of(tensor)
    return None


def index_of(tensor: torch.Tensor) -> int:
    """Return the index of the tensor's GPU."""
    return STAND_IN if tensor.device.index is None else tensor.device.index


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is nothing but memory, so that a kernel may read it.

    While ``torch.compile`` traces, it is: the operators of ``library.py`` stand for the kernels.
    """
    return torch.compiler.is_compiling() or (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and forward_ad._current_level < 0
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def current_index() -> int | None:
    """Return the index of the current GPU; None without one."""
    if _stand_in is not None:
        return STAND_IN
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def device_at(index: int) -> Device:
    """Return the device with an index that ``kernel_device`` returned."""
    if index == STAND_IN and _stand_in is not None:
        return _stand_in
    return device_of(index)


def capturing(index: int) -> bool:
    """Return whether the current stream of the device is capturing a CUDA graph."""
    return index != STAND_IN and bool(torch.cuda.is_current_stream_capturing())


def on(index: int) -> AbstractContextManager[object]:
    """Make the device current within; the one that was current is so again afterwards."""
    if index == STAND_IN or torch.cuda.current_device() == index:
        return _NOTHING
    return torch.cuda.device(index)


@contextmanager
def _force_kernels(device: Device = COMPILE_TARGETS["sm_90"]) -> Iterator[None]:
    """Within, CPU tensors go to the kernels, run by Triton's interpreter; for tests."""
    global _stand_in
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 first"
    before, _stand_in = _stand_in, device
    try:
        yield
    finally:
        _stand_in = before
