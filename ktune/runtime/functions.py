"""The public functions: PyTorch's and FlashAttention's signatures over ktune's kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (PyTorch's own habit)

from ktune.runtime import arguments, library
from ktune.runtime.arguments import ArgumentError, refuse
from ktune.runtime.attention import Attention, attention_kernel, composed
from ktune.runtime.softmax import Softmax, softmax_kernel
from ktune.runtime.where import is_plain, kernel_device
from ktune.settings import disabled

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def softmax(
    input: torch.Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute softmax over one dimension, as ``torch.softmax``.

    A row of only -inf, or with a NaN or a +inf in it, is NaN throughout (contract D2). Any
    strides are read in place; an input whose other dimensions do not join to three or fewer is
    copied once. float32, float16 and bfloat16 on a GPU go to a tuned kernel, everything else to
    PyTorch. Gradients are PyTorch's, double backward included.

    Args:
        input: any shape, empty and 0-d included.
        dim: the dimension that sums to 1; PyTorch requires it, here it is the last by default.
        dtype: the input is cast to it first.

    Returns:
        A contiguous tensor of the input's shape.

    Raises:
        ArgumentTypeError: the dtype to compute in is not float32, float16, bfloat16 or float64.
        IndexError: there is no such dimension.

    Example:
        >>> import ktune, torch
        >>> ktune.softmax(torch.zeros(2, 4), dim=-1)[0, 0].item()
        0.25
    """
    x = input if dtype is None else input.to(dtype)
    arguments.check_float("softmax", "input" if dtype is None else "dtype", x)
    index = kernel_device(x)
    if index is None or x.numel() == 0 or not -max(x.dim(), 1) <= dim < max(x.dim(), 1):
        return torch.softmax(x, dim)
    if dtype is None and torch.is_autocast_enabled(x.device.type):
        x = x.float()  # as PyTorch's autocast does for softmax
    rows = x.resolve_neg() if x.dim() else x.resolve_neg().reshape(1)
    return _softmax(rows, dim % rows.dim(), index).reshape(x.shape)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: bool = False,
) -> Result:
    """Compute ``softmax(query key^T * scale) value``, as PyTorch's function of this name.

    ``is_causal`` aligns upper-left: query i sees keys j <= i, also where the lengths differ.
    A row without a visible key gives output 0, LSE -inf and gradient 0 (contract D3); a mask of
    ``finfo.min`` is an ordinary finite number (D5).

    Tuned kernels compute float32, float16 and bfloat16 on a GPU; they read batch, head and
    sequence strides in place, and copy a tensor once if its last stride is not 1. PyTorch
    computes masks, dropout, float64, the CPU, and values of another head dim than the queries'.
    float32 products are IEEE unless PyTorch's own switches allow TF32. Gradients are right:
    backward recomputes the attention with PyTorch.

    Args:
        query: [..., H, Sq, D], at least two dimensions, D up to 256.
        key: [..., Hkv, Sk, D]; leading dimensions as the query's.
        value: [..., Hkv, Sk, Dv].
        attn_mask: bool (True: visible) or float (added to the scores), broadcast to
            [..., H, Sq, Sk].
        dropout_p: share of attention weights dropped; applied whenever it is over 0.
        is_causal: hide later keys.
        scale: multiplies the scores; ``1 / sqrt(D)`` by default.
        enable_gqa: allow fewer key heads than query heads, dividing them.
        return_lse: also return the log-sum-exp of each row, [..., H, Sq], natural logarithm.

    Returns:
        The output [..., H, Sq, Dv], laid out in memory like query: where query is a [B, S, H, D]
        tensor viewed as [B, H, S, D], the output's transpose back is contiguous.

    Raises:
        ArgumentError: shapes, devices or arguments do not fit together.
        ArgumentTypeError: a dtype is not supported, or dtypes differ.
    """
    name = "scaled_dot_product_attention"
    tensors = {"query": query, "key": key, "value": value}
    q, k, v = _prepare(name, tensors)
    arguments.check_attention(name, dict(zip(tensors, (q, k, v), strict=True)), enable_gqa)
    if attn_mask is not None:
        arguments.check_mask(name, attn_mask, query, is_causal)
        attn_mask = _mask_4d(name, attn_mask, query, key)
    causal = "upper_left" if is_causal else "none"
    if dropout_p > 0:
        if return_lse:
            refuse(name, "return_lse", True, "it does not go with dropout_p")
        out = _torch_attention(q, k, v, attn_mask, dropout_p, causal, scale)
        return _restore(out, query)
    out, lse = _attention(q, k, v, scale, causal, return_lse, attn_mask)
    return (_restore(out, query), _restore(lse, query)) if return_lse else _restore(out, query)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
) -> Result:
    """Compute attention with the names, layout and causal alignment of ``flash_attn_func``.

    ``causal`` aligns lower-right: query i sees keys j <= i + Sk - Sq. Fewer key heads than query
    heads need no flag. All else is as in ``scaled_dot_product_attention``.

    Args:
        q: [B, Sq, H, D], D up to 256.
        k: [B, Sk, Hkv, D].
        v: [B, Sk, Hkv, Dv].
        dropout_p: must be 0.
        softmax_scale: multiplies the scores; ``1 / sqrt(D)`` by default.
        causal: hide later keys.
        window_size: must be (-1, -1).
        softcap: must be 0.
        alibi_slopes: must be None.
        deterministic: make the backward pass bit-identical from run to run; takes more memory.
        return_attn_probs: must be False.
        return_lse: also return the log-sum-exp of each row, [B, H, Sq], natural logarithm.

    Returns:
        The output [B, Sq, H, Dv], laid out in memory like q.

    Raises:
        ArgumentError: an argument is not supported, or shapes or devices do not fit together.
        ArgumentTypeError: a dtype is not supported, or dtypes differ.
    """
    _refuse_flash(dropout_p, window_size, softcap, alibi_slopes, return_attn_probs)
    name, tensors = "flash_attention", {"q": q, "k": k, "v": v}
    for argument, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.dim() != 4:
            raise ArgumentError(
                f"{name}: {argument} has {tensor.dim()} dimensions; expected 4: [B, S, H, D]"
            )
    bhsd = {n: t.transpose(1, 2) for n, t in zip(tensors, _prepare(name, tensors), strict=True)}
    arguments.check_attention(name, bhsd, grouped=True)
    alignment = "lower_right" if causal else "none"
    out, lse = _attention(
        bhsd["q"],
        bhsd["k"],
        bhsd["v"],
        softmax_scale,
        alignment,
        return_lse,
        deterministic=deterministic,
    )
    return (out.transpose(1, 2), lse) if return_lse else out.transpose(1, 2)


def _softmax(x: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    if torch.compiler.is_compiling():
        traced: torch.Tensor = library.softmax_op(x, dim)
        return traced
    if torch.is_grad_enabled() and x.requires_grad:
        out: torch.Tensor = Softmax.apply(x, dim, index)  # type: ignore[no-untyped-call]
        return out
    return softmax_kernel(x, dim, index)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    causal: str,
    return_lse: bool,
    mask: torch.Tensor | None = None,
    deterministic: bool = False,
) -> tuple[torch.Tensor, Any]:
    """Return output and LSE of checked BHSD tensors; the LSE is None unless asked for."""
    factor = 1.0 / math.sqrt(max(q.shape[3], 1)) if scale is None else float(scale)
    index = None if mask is not None else _attention_device(q, k, v, factor)
    if index is None:
        square = causal != "lower_right" or q.shape[2] == k.shape[2]
        if disabled() and square and not return_lse:
            return _torch_attention(q, k, v, mask, 0.0, causal, factor), None
        out, lse = composed(q, k, v, factor, causal, mask)
        return out, lse if return_lse else None
    if torch.compiler.is_compiling():
        out, lse = library.attention_op(q, k, v, factor, causal)
        return out, lse if return_lse else None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        found: tuple[torch.Tensor, Any] = Attention.apply(  # type: ignore[no-untyped-call]
            q, k, v, factor, causal, return_lse, index, deterministic
        )
        return found
    return attention_kernel(q, k, v, factor, causal, return_lse, index)


def _attention_device(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> int | None:
    """Return the GPU whose kernels compute this; None for PyTorch."""
    sizes = (q.numel(), k.numel(), v.numel())
    if 0 in sizes or v.shape[3] != q.shape[3] or not math.isfinite(scale):
        return None
    return kernel_device(q) if is_plain(k) and is_plain(v) else None


def _torch_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    causal: str,
    scale: float | None,
) -> torch.Tensor:
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p, causal != "none", scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _prepare(function: str, tensors: arguments.Named) -> list[torch.Tensor]:
    """Check dtypes, devices and ranks; return the tensors cast by autocast, and 4-D."""
    for name, tensor in tensors.items():
        arguments.check_float(function, name, tensor)
        if tensor.dim() < 2:
            raise ArgumentError(
                f"{function}: {name} has {tensor.dim()} dimensions; expected at least 2"
            )
    first = next(iter(tensors.values()))
    if torch.is_autocast_enabled(first.device.type):
        dtype = torch.get_autocast_dtype(first.device.type)
        wide = torch.float64
        tensors = {n: t if t.dtype == wide else t.to(dtype) for n, t in tensors.items()}
    arguments.check_same(function, tensors)
    lead = first.shape[:-3]
    for name, tensor in tensors.items():
        if tensor.dim() > 4 and tensor.shape[:-3] != lead:
            raise ArgumentError(
                f"{function}: {name} has leading dimensions {tuple(tensor.shape[:-3])}; "
                f"expected {tuple(lead)}"
            )
    return [_to_4d(t.resolve_neg()) for t in tensors.values()]


def _to_4d(t: torch.Tensor) -> torch.Tensor:
    """View [S, D] and [H, S, D] as [1, H, S, D]; join the leading dimensions of longer shapes."""
    return t[(None,) * (4 - t.dim())] if t.dim() <= 4 else t.flatten(0, t.dim() - 4)


def _mask_4d(
    function: str, mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """Return the mask with four dimensions, broadcast only where leading dimensions are joined."""
    full = (*query.shape[:-1], key.shape[-2])
    try:
        whole = mask.expand(full)
    except RuntimeError as error:
        raise ArgumentError(
            f"{function}: attn_mask has shape {tuple(mask.shape)}; "
            f"expected one that broadcasts to {tuple(full)}"
        ) from error
    return whole.flatten(0, -4) if query.dim() > 4 else mask[(None,) * (4 - mask.dim())]


def _restore(result: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Give an output [B, H, Sq, Dv] or LSE [B, H, Sq] the query's leading dimensions again."""
    keep = result.shape[2:]
    return result if query.dim() == 4 else result.reshape(*query.shape[:-2], *keep)


def _refuse_flash(
    dropout_p: float,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_attn_probs: bool,
) -> None:
    """Raise ArgumentError for arguments of ``flash_attn_func`` that ktune does not compute."""
    name = "flash_attention"
    if dropout_p:
        refuse(name, "dropout_p", dropout_p, "ktune.scaled_dot_product_attention has it")
    if tuple(window_size) != (-1, -1):
        refuse(name, "window_size", window_size, "pass (-1, -1), or an attn_mask to the other")
    if softcap:
        refuse(name, "softcap", softcap, "pass 0.0")
    if alibi_slopes is not None:
        refuse(name, "alibi_slopes", tuple(alibi_slopes.shape), "pass None")
    if return_attn_probs:
        refuse(name, "return_attn_probs", True, "return_lse=True returns the log-sum-exp")
