"""Check what the public functions are given: every error names the argument and its value."""

from __future__ import annotations

from typing import NoReturn

import torch

from ktune.errors import UsageError

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_HEAD_DIM = 256


class ArgumentError(UsageError, ValueError):
    """An argument has a value that the function does not take."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument has a dtype or type that the function does not take."""


Named = dict[str, torch.Tensor]
"""Query, key and value, in this order, by the names the caller knows them by."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def check_float(function: str, name: str, tensor: torch.Tensor) -> None:
    """Raise ArgumentTypeError unless the dtype is float32, float16, bfloat16 or float64."""
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise ArgumentTypeError(f"{function}: {name} is a {kind}; expected a torch.Tensor")
    if tensor.dtype not in FLOATS:
        raise ArgumentTypeError(
            f"{function}: {name} has dtype {dtype_name(tensor.dtype)}; "
            f"expected one of {', '.join(map(dtype_name, FLOATS))}"
        )


def check_same(function: str, tensors: Named) -> None:
    """Raise unless all tensors have one device, one dtype and one rank."""
    (first, a), *others = tensors.items()
    for name, b in others:
        if b.device != a.device:
            _fail(function, name, f"is on {b.device}", f"{a.device}, as {first}")
        if b.dtype != a.dtype:
            found, wanted = dtype_name(b.dtype), dtype_name(a.dtype)
            raise ArgumentTypeError(
                f"{function}: {name} has dtype {found}; expected {wanted}, as {first}"
            )
        if b.dim() != a.dim():
            _fail(function, name, f"has {b.dim()} dimensions", f"{a.dim()}, as {first}")


def check_attention(function: str, tensors: Named, grouped: bool) -> None:
    """Raise unless [B, H, Sq, D], [B, Hkv, Sk, D] and [B, Hkv, Sk, Dv] fit together.

    Args:
        function: name for messages.
        tensors: 4-D, in this order.
        grouped: more query heads than key heads are allowed.
    """
    (first, q), (second, k), (third, v) = tensors.items()
    for name, t in ((second, k), (third, v)):
        if t.shape[0] != q.shape[0]:
            _fail(function, name, f"has batch {t.shape[0]}", f"{q.shape[0]}, as {first}")
    if k.shape[3] != q.shape[3]:
        _fail(function, second, f"has head_dim {k.shape[3]}", f"{q.shape[3]}, as {first}")
    for position, what in ((1, "heads"), (2, "sequence length")):
        if v.shape[position] != k.shape[position]:
            wanted = f"{k.shape[position]}, as {second}"
            _fail(function, third, f"has {what} {v.shape[position]}", wanted)
    for name, t in tensors.items():
        if t.shape[3] > MAX_HEAD_DIM:
            _fail(function, name, f"has head_dim {t.shape[3]}", f"at most {MAX_HEAD_DIM}")
    _check_heads(function, first, second, q.shape[1], k.shape[1], grouped)


def _check_heads(f: str, first: str, second: str, heads: int, kv: int, grouped: bool) -> None:
    if heads == kv:
        return
    if not grouped:
        _fail(f, second, f"has {kv} heads", f"{heads}, as {first}, or enable_gqa=True")
    if kv == 0 or heads % kv:
        _fail(f, second, f"has {kv} heads", f"a number that divides the {heads} of {first}")


def check_mask(function: str, mask: torch.Tensor, query: torch.Tensor, causal: bool) -> None:
    """Raise unless the mask is a bool or float tensor on the query's device, without is_causal."""
    if causal:
        raise ArgumentError(f"{function}: attn_mask and is_causal=True exclude each other")
    if mask.device != query.device:
        _fail(function, "attn_mask", f"is on {mask.device}", f"{query.device}, as query")
    if mask.dtype != torch.bool:
        check_float(function, "attn_mask", mask)


def refuse(function: str, name: str, value: object, instead: str) -> NoReturn:
    """Raise for an argument that the library of this signature has and ktune does not."""
    raise ArgumentError(f"{function}: {name}={value!r} is not supported; {instead}")


def _fail(function: str, name: str, found: str, expected: str) -> NoReturn:
    raise ArgumentError(f"{function}: {name} {found}; expected {expected}")
