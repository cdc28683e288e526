"""Softmax by kernel: read any strides in place, and keep the gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ktune.operations import operation
from ktune.problem import Problem
from ktune.runtime.arguments import dtype_name
from ktune.runtime.dispatch import dispatcher

Sizes = tuple[int, ...]
Dim = tuple[int, int, int]
"""Size, input stride and output stride of a dimension."""


@dataclass(frozen=True, slots=True)
class Views:
    """How a kernel sees input and output: rows last.

    Attributes:
        layout: ``rows`` ([m, n], unit stride) or ``strided`` ([a, b, rows, n]).
        shape: of both views.
        x_strides: of the input's view.
        out_strides: of the output's view.
    """

    layout: str
    shape: Sizes
    x_strides: Sizes
    out_strides: Sizes


def softmax_kernel(x: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """Compute softmax over ``dim`` with the kernel of a GPU.

    Args:
        x: at least one dimension, no dimension of size 0; float32, float16 or bfloat16. Read in
            place unless more than three batch dimensions remain after joining: copied then.
        dim: not negative.
        index: of the GPU.

    Returns:
        A contiguous tensor like x.
    """
    views = plan_views(x.shape, x.stride(), dim)
    if views is None:
        x = x.contiguous()
        views = plan_views(x.shape, x.stride(), dim)
        assert views is not None, "a contiguous tensor has at most two batch dimensions"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    seen = x.as_strided(views.shape, views.x_strides)
    written = out.as_strided(views.shape, views.out_strides)
    key = ("softmax", views.shape, views.x_strides, views.out_strides, x.dtype, _unaligned(x))
    dispatcher().call(key, lambda: _problem(views, x.dtype), index, (seen, written))
    return out


class Softmax(torch.autograd.Function):
    """Softmax with PyTorch's own gradient formula; double backward works."""

    @staticmethod
    def forward(x: torch.Tensor, dim: int, index: int) -> torch.Tensor:
        """Return ``softmax_kernel``'s result."""
        return softmax_kernel(x, dim, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep the output, which is all that the gradient needs."""
        ctx.dim, ctx.dtype = inputs[1], inputs[0].dtype
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return ``out * (grad - sum(grad * out))``."""
        (out,) = ctx.saved_tensors
        return torch._softmax_backward_data(grads[0], out, ctx.dim, ctx.dtype), None, None


@lru_cache(maxsize=4096)
def plan_views(shape: Sizes, strides: Sizes, dim: int) -> Views | None:
    """Return the views for an input of these strides and a contiguous output.

    Neighbouring batch dimensions are joined where input and output both allow it.

    Returns:
        None if more than three batch dimensions remain.
    """
    out_strides = contiguous_strides(shape)
    n, unit = shape[dim], strides[dim] == out_strides[dim] == 1 or shape[dim] == 1
    batch = _join([d for i, d in enumerate(zip(shape, strides, out_strides)) if i != dim])  # noqa: B905
    if unit and len(batch) <= 1:
        m, sx, so = batch[0] if batch else (1, _row_stride(shape, strides, dim), n)
        return Views("rows", (m, n), (sx, 1), (so, 1))
    if len(batch) > 3:
        return None
    inner = (n, strides[dim], out_strides[dim])
    sizes, seen, written = zip(*_rows_last(batch), inner, strict=True)
    return Views("strided", sizes, seen, written)


def _row_stride(shape: Sizes, strides: Sizes, dim: int) -> int:
    """Return the stride of a single row: its tensor's own, where more rows could lie.

    It reaches no memory, but Triton compiles for its divisibility, and a row that was cut from
    a padded tensor must not get another kernel than two rows do.
    """
    outer = [stride for i, stride in enumerate(strides) if i != dim]
    return max(outer[-1], shape[dim]) if outer else shape[dim]


def contiguous_strides(shape: Sizes) -> Sizes:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _join(dims: list[Dim]) -> list[Dim]:
    """Join neighbours that one stride can walk, and drop dimensions of size 1."""
    joined: list[Dim] = []
    for size, sx, so in dims:
        if size == 1:
            continue
        if joined and joined[-1][1:] == (sx * size, so * size):
            joined[-1] = (joined[-1][0] * size, sx, so)
        else:
            joined.append((size, sx, so))
    return joined


def _rows_last(batch: list[Dim]) -> list[Dim]:
    """Return three dimensions, the one that lies closest in the input last, so loads coalesce."""
    dims = [(1, 0, 0)] * (3 - len(batch)) + batch
    rows = min(dims, key=lambda d: (d[0] == 1, d[1] == 0, d[1]))
    dims.remove(rows)
    return [*dims, rows]


def _problem(views: Views, dtype: torch.dtype) -> Problem:
    *batch, n = views.shape
    return operation("softmax").problem(
        {"m": math.prod(batch), "n": n, "dtype": dtype_name(dtype), "layout": views.layout}
    )


def _unaligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % 16 != 0
