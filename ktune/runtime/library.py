"""The kernels as ``torch.library`` operators, so that ``torch.compile`` keeps them whole."""

from __future__ import annotations

from typing import Any

import torch

from ktune.runtime.attention import (
    Pair,
    attention_gradients,
    attention_kernel,
    empty_like_query,
    empty_lse,
)
from ktune.runtime.softmax import softmax_kernel
from ktune.runtime.where import index_of

Tensor = torch.Tensor


@torch.library.custom_op("ktune::softmax", mutates_args=(), schema="(Tensor x, int dim) -> Tensor")
def softmax_op(x: Tensor, dim: int) -> Tensor:
    """Compute ``softmax_kernel`` on the tensor's own device."""
    return softmax_kernel(x, dim, index_of(x))


@softmax_op.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dim, ctx.dtype = inputs[1], inputs[0].dtype
    ctx.save_for_backward(output)


def _softmax_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (out,) = ctx.saved_tensors
    return torch._softmax_backward_data(grad, out, ctx.dim, ctx.dtype), None


softmax_op.register_autograd(_softmax_backward, setup_context=_keep_softmax)


@torch.library.custom_op(
    "ktune::attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, float scale, str causal) -> (Tensor, Tensor)",
)
def attention_op(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: str) -> Pair:
    """Compute ``attention_kernel`` on the tensors' own device; always with the LSE."""
    return attention_kernel(q, k, v, scale, causal, True, index_of(q))


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: str) -> Pair:
    like = q if q.stride(3) == 1 else q.contiguous()
    return empty_like_query(like, q.shape[3]), empty_lse(q)


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    q, k, v, ctx.scale, ctx.causal = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v)


def _attention_backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    found = attention_gradients(
        (grad_out, grad_lse), ctx.saved_tensors, ctx.needs_input_grad[:3], ctx.scale, ctx.causal
    )
    return (*found, None, None)


attention_op.register_autograd(_attention_backward, setup_context=_keep_attention)
