"""The attention core under both public functions: BHSD tensors, by kernel or by PyTorch."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (PyTorch's own habit)

from ktune.operations import operation
from ktune.operations.attention import compose
from ktune.problem import Problem
from ktune.runtime.arguments import dtype_name
from ktune.runtime.dispatch import dispatcher

Pair = tuple[torch.Tensor, torch.Tensor | None]
"""Output and LSE; the LSE is None where it was not asked for."""
Sizes = tuple[int, ...]
ALIGNMENT = 16
"""Bytes to which TMA needs base addresses and strides."""


def attention_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: str,
    return_lse: bool,
    index: int,
) -> Pair:
    """Compute attention with the kernel of a GPU.

    Args:
        q: [B, H, Sq, D], float32, float16 or bfloat16, nothing of size 0. Read in place, like k
            and v, if the head dimension has unit stride; copied once if not.
        k: [B, Hkv, Sk, D].
        v: [B, Hkv, Sk, D].
        scale: finite. Kernels need it positive: a negative one moves into a copy of q, and for
            0 a copy of q is zeroed.
        causal: ``none``, ``upper_left`` or ``lower_right``.
        return_lse: also return the log-sum-exp.
        index: of the GPU.

    Returns:
        The output, laid out in memory like q, and the LSE [B, H, Sq] in float32.
    """
    if scale <= 0:
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    q, k, v = (_unit_inner(t) for t in (q, k, v))
    out = empty_like_query(q, q.shape[3])
    lse = empty_lse(q) if return_lse else None
    tensors = [_tidy(t) for t in (q, k, v, out)]
    tf32 = q.dtype == torch.float32 and tf32_allowed()
    flags = (causal, return_lse, tf32)
    key = ("attention", *((t.shape, t.stride(), _unaligned(t)) for t in tensors), q.dtype, flags)
    make = lambda: _problem(tensors, *flags)  # noqa: E731
    dispatcher().call(key, make, index, (*tensors, lse, scale))
    return out, lse


class Attention(torch.autograd.Function):
    """The kernel forward; backward recomputes with PyTorch and differentiates that."""

    @staticmethod
    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        causal: str,
        return_lse: bool,
        index: int,
        deterministic: bool,
    ) -> Pair:
        """Return ``attention_kernel``'s result."""
        return attention_kernel(q, k, v, scale, causal, return_lse, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
        """Keep the inputs; no matrix of scores is kept."""
        q, k, v, ctx.scale, ctx.causal, _, _, ctx.deterministic = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of q, k and v; differentiable again if a graph is asked for."""
        found = attention_gradients(
            grads,
            ctx.saved_tensors,
            ctx.needs_input_grad[:3],
            ctx.scale,
            ctx.causal,
            ctx.deterministic,
        )
        return (*found, *([None] * 5))


def attention_gradients(
    grads: tuple[torch.Tensor | None, ...],
    inputs: tuple[torch.Tensor, ...],
    needed: tuple[bool, ...],
    scale: float,
    causal: str,
    deterministic: bool = False,
) -> list[torch.Tensor | None]:
    """Recompute the attention with PyTorch and differentiate it.

    Args:
        grads: of the output, and of the LSE where there is one; None where none has come.
        inputs: q, k and v.
        needed: which of them need a gradient.
        scale: as in the forward pass.
        causal: as in the forward pass.
        deterministic: the same bits from run to run.
    """
    again = torch.is_grad_enabled()
    if not again:
        detached = zip(inputs, needed, strict=True)
        inputs = tuple(t.detach().requires_grad_(need) for t, need in detached)
    exact = again or deterministic or (len(grads) > 1 and grads[1] is not None)
    q, k, v = inputs
    with torch.enable_grad():
        outputs = _recompute(q, k, v, scale, causal, exact)
    return _differentiate(outputs, grads, inputs, needed, again)


def composed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: str,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention with plain PyTorch operations, differentiably, in the inputs' dtype.

    A row that the mask hides entirely gives output 0, LSE -inf and gradient 0 (contract D3).

    Args:
        q: [B, H, Sq, D], any sizes.
        k: [B, Hkv, Sk, D].
        v: [B, Hkv, Sk, Dv].
        scale: multiplies the scores.
        causal: ``none``, ``upper_left`` or ``lower_right``.
        mask: bool (True: visible) or additive, broadcast to [B, H, Sq, Sk].

    Returns:
        The output [B, H, Sq, Dv], laid out like q, and the LSE [B, H, Sq].
    """
    if q.shape[1] == 0:
        return empty_like_query(q, v.shape[3]), empty_lse(q)
    dead = None
    if mask is not None:
        mask, dead = _wake_hidden_rows(mask[(None,) * (4 - mask.dim())])
    with torch.autocast(q.device.type, enabled=False):
        out, lse = compose(q, k, v, scale, causal, q.dtype, mask)
    if dead is not None:
        out, lse = out.masked_fill(dead, 0), lse.masked_fill(dead[..., 0], -math.inf)
    return _like_query(out, q), lse


def empty_like_query(q: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return an uninitialised output [B, H, Sq, head_dim], laid out in memory like q."""
    if head_dim == q.shape[3]:
        out = torch.empty_like(q)
        if out.stride(3) == 1:
            return out
    b, h, s = q.shape[:3]
    if _is_bshd(q):
        return q.new_empty(b, s, h, head_dim).transpose(1, 2)
    return q.new_empty(b, h, s, head_dim)


def tf32_allowed() -> bool:
    """Return whether the user lets float32 matrix products use TF32."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # PyTorch >= 2.9; older raise
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


def _recompute(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: str, exact: bool
) -> tuple[torch.Tensor, ...]:
    """Return the output (and the LSE, if exact) with a graph behind it.

    PyTorch's fused attention saves memory, but has no second derivative, no LSE, no other
    alignment than upper-left, and gradients whose last bits change from run to run.
    """
    square = causal != "lower_right" or q.shape[2] == k.shape[2]
    if exact or not square:
        return composed(q, k, v, scale, causal)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=causal != "none", scale=scale, enable_gqa=grouped
    )
    return (out,)


def _differentiate(
    outputs: tuple[torch.Tensor, ...],
    grads: tuple[torch.Tensor | None, ...],
    inputs: tuple[torch.Tensor, ...],
    needed: tuple[bool, ...],
    again: bool,
) -> list[torch.Tensor | None]:
    """Differentiate the outputs that a gradient has come for, by the inputs that need one."""
    pairs = [(o, g.to(o.dtype)) for o, g in zip(outputs, grads, strict=False) if g is not None]
    if not pairs:
        return [None] * 3
    wanted = [t for t, n in zip(inputs, needed, strict=True) if n]
    found = iter(
        torch.autograd.grad(
            [o for o, _ in pairs],
            wanted,
            [g for _, g in pairs],
            create_graph=again,
            allow_unused=True,
        )
    )
    return [next(found) if n else None for n in needed]


def _wake_hidden_rows(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask with hidden rows made visible, and where they were [..., 1].

    The softmax of a hidden row is NaN, and so would be its gradient.
    """
    if mask.dtype == torch.bool:
        dead = ~mask.any(-1, keepdim=True)
        return mask | dead, dead
    dead = (mask == -math.inf).all(-1, keepdim=True)
    return mask.masked_fill(dead, 0), dead


def _is_bshd(q: torch.Tensor) -> bool:
    return q.shape[1] > 1 and q.shape[2] > 1 and q.stride(1) < q.stride(2)


def _like_query(out: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2).contiguous().transpose(1, 2) if _is_bshd(q) else out


def empty_lse(q: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised LSE [B, H, Sq] in float32."""
    return torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _unit_inner(t: torch.Tensor) -> torch.Tensor:
    return t if t.stride(3) == 1 or t.shape[3] == 1 else t.contiguous()


def _unaligned(t: torch.Tensor) -> bool:
    return t.data_ptr() % ALIGNMENT != 0


def _tidy(t: torch.Tensor) -> torch.Tensor:
    """Return a view whose dimensions of size 1 have the strides of an aligned dense tensor.

    Such a stride reaches no memory, but a tensor descriptor is refused for it.
    """
    return (
        t.as_strided(t.shape, _tidy_strides(t.shape, t.stride(), t.itemsize)) if 1 in t.shape else t
    )


@lru_cache(maxsize=4096)
def _tidy_strides(shape: Sizes, strides: Sizes, itemsize: int) -> Sizes:
    tidy, dense = [1] * 4, ALIGNMENT // itemsize
    rounded = -(-shape[3] // dense) * dense
    for i in range(3):
        full = rounded * math.prod(shape[i + 1 : 3])
        tidy[i] = full if shape[i] == 1 else strides[i]
    return tuple(tidy)


def _problem(tensors: list[torch.Tensor], causal: str, return_lse: bool, tf32: bool) -> Problem:
    q, k = tensors[:2]
    aligned = all(_is_aligned(t.shape, t.stride(), t.itemsize) for t in tensors)
    return operation("attention").problem(
        {
            "batch": q.shape[0],
            "heads": q.shape[1],
            "heads_kv": k.shape[1],
            "seqlen_q": q.shape[2],
            "seqlen_k": k.shape[2],
            "head_dim": q.shape[3],
            "causal": causal,
            "dtype": dtype_name(q.dtype),
            "layout": "strided" if not aligned or any(map(_unaligned, tensors)) else "aligned",
            "tf32": tf32,
            "return_lse": return_lse,
        }
    )


def _is_aligned(shape: Sizes, strides: Sizes, itemsize: int) -> bool:
    """Return whether TMA can walk these strides."""
    outer = [st for size, st in zip(shape[:3], strides[:3], strict=True) if size > 1]
    unit = strides[3] == 1 or shape[3] == 1
    return unit and all(st > 0 and st * itemsize % ALIGNMENT == 0 for st in outer)
