"""Public functions and dispatch: layouts, contract, errors, gradients; no GPU needed.

Most tests put a PyTorch stand-in in the place of rendered modules, which checks the views that
a kernel would get; the last ones run the rendered kernels in Triton's interpreter.
"""

import ast
import logging
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from click.testing import CliRunner

import ktune
from ktune import codegen
from ktune.cli import cli
from ktune.device import COMPILE_TARGETS, Device, device_of
from ktune.errors import (
    CaptureError,
    CompileError,
    NoDeviceError,
    SettingsError,
    StrictError,
    TableError,
)
from ktune.operations import operation, parse_problem
from ktune.operations.attention import compose
from ktune.runtime import attention as attention_module
from ktune.runtime import dispatch, where
from ktune.runtime.arguments import ArgumentError, ArgumentTypeError
from ktune.runtime.dispatch import Dispatcher, dispatcher
from ktune.runtime.invariance import is_batch_invariant
from ktune.runtime.softmax import plan_views
from ktune.table import Entry, Provenance, update_table
from ktune.variant import Variant

DEVICE = COMPILE_TARGETS["sm_90"]
INF = math.inf
interpreted = pytest.mark.filterwarnings(
    "ignore:Conversion of an array:DeprecationWarning", "ignore::RuntimeWarning"
)


@pytest.fixture(autouse=True)
def _fresh():
    dispatcher.cache_clear()
    yield
    dispatcher.cache_clear()


class StandIn:
    """Renders nothing; computes with PyTorch, and checks what the kernels are promised."""

    def __init__(self):
        self.launches = []
        self.renders = []
        self.error = None

    def render(self, variant, problem, **overrides):
        self.renders.append(problem)
        return SimpleNamespace(id="source", problem=problem, variant=variant)

    def load_module(self, source):
        if source.problem.op == "softmax":
            return SimpleNamespace(launch=self.softmax)
        causal = source.problem.word("causal")  # part of the structure, so of the source
        return SimpleNamespace(launch=partial(self.attention, causal))

    def softmax(self, x, out, **options):
        self.note(options, x=x, out=out)
        assert x.shape == out.shape and x.dim() in (2, 4)
        assert not (x.requires_grad and torch.is_grad_enabled())
        if x.dim() == 2:
            assert x.stride(1) == out.stride(1) == 1
        out.copy_(torch.softmax(x.float(), -1))

    def attention(self, causal, q, k, v, out, lse, scale, **options):
        self.note(options, q=q, k=k, v=v, out=out)
        assert scale > 0 and q.dim() == 4
        assert not (q.requires_grad and torch.is_grad_enabled())
        for t in (q, k, v, out):
            assert t.stride(3) == 1
            assert t.dtype == q.dtype
        result, log = compose(q, k, v, scale, causal, q.dtype)
        out.copy_(result)
        if lse is not None:
            lse.copy_(log)

    def note(self, options, **tensors):
        if self.error:
            raise self.error
        assert "num_warps" in options
        self.launches.append(tensors)

    @property
    def problem(self):
        return list(dispatcher()._bound)[-1][0]


@pytest.fixture
def stand_in(monkeypatch):
    fake = StandIn()
    monkeypatch.setattr(codegen, "render", fake.render)
    monkeypatch.setattr(codegen, "load_module", fake.load_module)
    with where._force_kernels():
        yield fake


def padded(shape, dtype=torch.float32, dim=0, fill=math.nan):
    """Return a random view inside a larger buffer of NaN, off by one in the last dimension."""
    buffer = torch.full([s + 3 for s in shape], fill, dtype=dtype)
    view = buffer[tuple(slice(1, s + 1) for s in shape)]
    view.copy_(torch.randn(shape))
    return view


# --- softmax: views ---------------------------------------------------------------------------

LAYOUTS = {
    "rows": (lambda: torch.randn(5, 7), -1, "rows"),
    "one row": (lambda: torch.randn(7), 0, "rows"),
    "columns": (lambda: torch.randn(5, 7), 0, "strided"),
    "3-D last": (lambda: torch.randn(2, 5, 7), 2, "rows"),
    "3-D first": (lambda: torch.randn(4, 5, 3), 0, "strided"),
    "3-D middle": (lambda: torch.randn(4, 5, 3), 1, "strided"),
    "sliced": (lambda: padded((6, 9)), -1, "rows"),
    "sliced 3-D": (lambda: padded((3, 6, 9)), -1, "strided"),
    "transposed": (lambda: torch.randn(7, 5).t(), -1, "strided"),
    "permuted heads": (lambda: torch.randn(2, 5, 3, 7).transpose(1, 2), -1, "strided"),
    "expanded rows": (lambda: torch.randn(1, 7).expand(5, 7), -1, "rows"),
    "expanded inner": (lambda: torch.randn(5, 1).expand(5, 7), -1, "strided"),
    "expanded scalar": (lambda: torch.randn(1, 1, 1).expand(2, 3, 7), 1, "strided"),
    "stepped": (lambda: torch.randn(10, 14)[::2, ::2], -1, "strided"),
    "size-1 dims": (lambda: torch.randn(1, 5, 1, 7, 1), 3, "rows"),
    "row of one": (lambda: torch.randn(5, 1), -1, "rows"),
    "row of one, permuted": (lambda: torch.randn(1, 5, 3).permute(2, 1, 0), -1, "strided"),
    "5-D joined": (lambda: torch.randn(2, 3, 2, 3, 5), 2, "strided"),
    "5-D copied": (lambda: torch.randn(2, 3, 4, 3, 5).permute(3, 1, 0, 2, 4), -1, "rows"),
}


@pytest.mark.parametrize(("make", "dim", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_softmax_layouts(stand_in, make, dim, layout):
    x = make()
    before = x.clone()
    out = ktune.softmax(x, dim)
    torch.testing.assert_close(out, torch.softmax(x, dim))
    torch.testing.assert_close(out, ktune.softmax(x.contiguous(), dim))
    assert out.is_contiguous() and torch.equal(x, before)
    assert next(iter(dispatcher()._bound))[0]["layout"] == layout
    copied = stand_in.launches[0]["x"].data_ptr() != x.data_ptr()
    assert copied == (make is LAYOUTS["5-D copied"][0]), "no hidden copies"


def test_aligned_and_unaligned_views_by_turns(stand_in):
    big = torch.randn(513, 1185).half()
    view, clone = big[:, 1:782], big[:, 1:782].clone()
    for x in (view, clone, view, clone):
        torch.testing.assert_close(ktune.softmax(x, -1), torch.softmax(x, -1))
    assert len(dispatcher()._calls) == 2, "a kernel for aligned pointers never meets the view"


def test_rows_dimension_is_the_closest_in_memory():
    views = plan_views((2, 3, 4, 5), (60, 1, 15, 3), 3)
    assert views.layout == "strided" and views.shape == (2, 4, 3, 5)
    assert views.x_strides == (60, 15, 1, 3) and views.out_strides == (60, 5, 20, 1)


def test_softmax_shapes_at_the_edge(stand_in):
    assert ktune.softmax(torch.tensor(3.0), 0).item() == 1.0
    assert ktune.softmax(torch.tensor(3.0), -1).shape == ()
    assert torch.equal(ktune.softmax(torch.randn(4, 1), 1), torch.ones(4, 1))
    for shape in ((0, 5), (5, 0), (0,), (2, 0, 3)):
        for dim in range(len(shape)):
            assert ktune.softmax(torch.empty(shape), dim).shape == shape
    for dim in (2, -3):
        with pytest.raises(IndexError, match="Dimension out of range"):
            ktune.softmax(torch.randn(2, 2), dim)
    x = torch.randn(2, 3, 5)
    torch.testing.assert_close(ktune.softmax(x, -2), torch.softmax(x, -2))


def test_softmax_dtypes(stand_in):
    x = torch.randn(3, 5)
    for dtype in (torch.float16, torch.bfloat16):
        assert ktune.softmax(x.to(dtype), -1).dtype == dtype
    out = ktune.softmax(x.half(), -1, dtype=torch.float32)
    torch.testing.assert_close(out, torch.softmax(x.half(), -1, dtype=torch.float32))
    assert len(stand_in.launches) == 3
    assert ktune.softmax(x.double(), -1).dtype == torch.float64
    assert ktune.softmax(torch.arange(4), 0, dtype=torch.float32).dtype == torch.float32
    for bad, name in ((torch.arange(4), "int64"), (torch.ones(2, dtype=torch.cfloat), "complex64")):
        with pytest.raises(ArgumentTypeError, match=f"input has dtype {name}; expected one of"):
            ktune.softmax(bad, 0)
    with pytest.raises(ArgumentTypeError, match="dtype has dtype int32"):
        ktune.softmax(x, 0, dtype=torch.int32)
    with pytest.raises(ArgumentTypeError, match="float8_e4m3fn"):
        ktune.softmax(x.to(torch.float8_e4m3fn), 0)


def test_softmax_reads_the_negative_bit(stand_in):
    x = torch.randn(3, 5, dtype=torch.cfloat).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(ktune.softmax(x, -1), torch.softmax(x, -1))


def test_softmax_gradients(stand_in):
    x = torch.randn(3, 4, 5).transpose(0, 2).requires_grad_()
    weight = torch.randn(5, 4, 3)

    def grads(function):
        out = function(x, 1)
        assert out.grad_fn is not None
        (first,) = torch.autograd.grad((out * weight).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first * weight).pow(2).sum(), x)
        return out, first, second

    torch.testing.assert_close(grads(ktune.softmax), grads(torch.softmax))
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert not ktune.softmax(x, 1).requires_grad
    assert ktune.softmax(x.detach(), 1).grad_fn is None
    half = x.detach().half().requires_grad_()
    ktune.softmax(half, 1, dtype=torch.float32).sum().backward()
    assert half.grad.dtype == torch.float16


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_transforms_go_to_pytorch(stand_in):
    x = torch.randn(3, 5)
    torch.testing.assert_close(torch.func.vmap(lambda r: ktune.softmax(r, 0))(x), x.softmax(1))
    _, tangent = torch.func.jvp(lambda t: ktune.softmax(t, 1), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, torch.zeros_like(x), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        torch.func.grad(lambda t: ktune.softmax(t, 1)[:, 0].sum())(x),
        torch.func.grad(lambda t: torch.softmax(t, 1)[:, 0].sum())(x),
    )
    assert not stand_in.launches


def test_softmax_special_values_on_the_cpu():
    x = torch.zeros(4, 3)
    x[1], x[2, 0], x[3, 1] = -INF, math.nan, INF
    out = ktune.softmax(x, -1)
    assert torch.isnan(out).all(-1).tolist() == [False, True, True, True]


# --- attention: layouts -----------------------------------------------------------------------


def qkv(b=2, h=4, sq=5, sk=7, d=16, kv=None, dtype=torch.float32):
    kv = kv or h
    return (
        torch.randn(b, h, sq, d).to(dtype),
        torch.randn(b, kv, sk, d).to(dtype),
        torch.randn(b, kv, sk, d).to(dtype),
    )


def one_off(t):
    """Return a copy that starts one element off 16 bytes."""
    return torch.empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


def packed(b, s, h, d, **kwargs):
    whole = torch.randn(b, s, 3, h, d, **kwargs)
    return tuple(whole[:, :, i].transpose(1, 2) for i in range(3))


def packed_gqa(b=2, s=9, h=4, d=16):
    whole = torch.randn(b, s, h + 2, d).transpose(1, 2)
    return whole[:, :h], whole[:, h : h + 1], whole[:, h + 1 :]


ATTENTION_LAYOUTS = {
    "contiguous": (qkv, "aligned"),
    "packed": (lambda: packed(2, 9, 3, 16), "aligned"),
    "packed gqa": (packed_gqa, "aligned"),
    "v from BSHD": (lambda: (*qkv()[:2], torch.randn(2, 7, 4, 16).transpose(1, 2)), "aligned"),
    "odd head dim": (lambda: qkv(d=18, dtype=torch.bfloat16), "strided"),
    "offset": (lambda: tuple(padded(t.shape) for t in qkv()), "strided"),
    "pointer off": (lambda: tuple(map(one_off, qkv())), "strided"),
    "expanded heads": (lambda: tuple(t[:, :1].expand(2, 4, -1, -1) for t in qkv()), "strided"),
    "inner stride": (lambda: tuple(t.mT.contiguous().mT for t in qkv()), "aligned"),
    "decode": (lambda: (packed(1, 9, 3, 16)[0][:, :, :1], *packed(1, 9, 3, 16)[1:]), "aligned"),
    "one of all": (lambda: qkv(1, 1, 1, 1, 20, dtype=torch.bfloat16), "aligned"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "layout"), ATTENTION_LAYOUTS.values(), ids=ATTENTION_LAYOUTS)
def test_attention_layouts(stand_in, make, layout):
    q, k, v = make()
    before = [t.clone() for t in (q, k, v)]
    grouped = q.shape[1] != k.shape[1]
    out = ktune.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
    assert stand_in.problem["layout"] == layout
    right = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), enable_gqa=grouped).to(
        q.dtype
    )
    close = {"atol": 2e-2, "rtol": 2e-2} if q.dtype == torch.bfloat16 else {}
    torch.testing.assert_close(out, right, **close)
    for t, old, name in zip((q, k, v), before, "qkv", strict=True):
        assert torch.equal(t, old)
        seen = stand_in.launches[0][name]
        assert (seen.data_ptr() == t.data_ptr()) == (t.stride(3) == 1), "no hidden copies"
        if layout == "aligned":
            assert all(s > 0 and s * t.itemsize % 16 == 0 for s in seen.stride()[:3])


def test_output_is_laid_out_like_the_query(stand_in):
    q, k, v = packed(2, 9, 3, 16)
    for device in ("kernel", "cpu"):
        where._stand_in = DEVICE if device == "kernel" else None
        out = ktune.scaled_dot_product_attention(q, k, v)
        merged = out.transpose(1, 2).reshape(2, 9, 48)
        assert merged.data_ptr() == out.data_ptr() and merged.is_contiguous()
        assert ktune.scaled_dot_product_attention(*qkv()).is_contiguous()
        out = ktune.flash_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        assert out.is_contiguous() and out.shape == (2, 9, 3, 16)


def test_heads_differ(stand_in):
    q, k, v = packed_gqa()
    out = ktune.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert (out[:, 0] != out[:, 1]).any()


def test_ranks(stand_in):
    q, k, v = qkv()
    whole, lse = ktune.scaled_dot_product_attention(q, k, v, return_lse=True)
    assert lse.shape == q.shape[:-1]
    for cut in (lambda t: t[0], lambda t: t[0, 0]):
        out, log = ktune.scaled_dot_product_attention(cut(q), cut(k), cut(v), return_lse=True)
        torch.testing.assert_close((out, log), (cut(whole), cut(lse)))
    five = [t.unflatten(0, (2, 1)) for t in (q, k, v)]
    mask = torch.rand(2, 1, 4, 5, 7) > 0.3
    for given in (None, mask):
        out = ktune.scaled_dot_product_attention(*five, attn_mask=given)
        torch.testing.assert_close(out, F.scaled_dot_product_attention(*five, attn_mask=given))
    assert len(stand_in.launches) == 4


@pytest.mark.parametrize("scale", [-0.7, 0.0, 0, 2, 1e-30])
def test_scales(stand_in, scale):
    q, k, v = qkv()
    out = ktune.scaled_dot_product_attention(q, k, v, scale=scale)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, scale=scale))
    assert len(stand_in.launches) == 1


def test_tf32_is_part_of_the_problem(stand_in, monkeypatch):
    q, k, v = qkv()
    ktune.scaled_dot_product_attention(q, k, v)
    assert stand_in.problem["tf32"] is False
    monkeypatch.setattr(attention_module, "tf32_allowed", lambda: True)
    ktune.scaled_dot_product_attention(q, k, v)
    assert stand_in.problem["tf32"] is True
    ktune.scaled_dot_product_attention(q.half(), k.half(), v.half())
    assert stand_in.problem["tf32"] is False


def test_tf32_switches():
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    try:
        for precision, allowed in (("tf32", True), ("ieee", False)):
            matmul.fp32_precision = precision
            assert attention_module.tf32_allowed() is allowed
    finally:
        matmul.fp32_precision = before


# --- attention: contract ----------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(("sq", "sk"), [(2, 5), (5, 2), (4, 4)])
def test_causal_alignments(stand_in, kernels, sq, sk):
    where._stand_in = DEVICE if kernels else None
    q, k, v = qkv(sq=sq, sk=sk)
    out = ktune.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    bshd = [t.transpose(1, 2) for t in (q, k, v)]
    low, lse = ktune.flash_attention(*bshd, causal=True, return_lse=True)
    mask = torch.ones(sq, sk, dtype=torch.bool).tril(sk - sq)
    right = F.scaled_dot_product_attention(q, k, v, mask).nan_to_num(0)
    torch.testing.assert_close(low.transpose(1, 2), right)
    hidden = max(sq - sk, 0)
    assert (low[:, :hidden] == 0).all() and (lse[..., :hidden] == -INF).all()
    assert torch.isfinite(lse[..., hidden:]).all()
    assert bool(stand_in.launches) is kernels


@pytest.mark.parametrize("additive", [False, True])
def test_hidden_rows_are_zero_with_zero_gradient(additive):
    q, k, v = (t.requires_grad_() for t in qkv(sq=8, sk=8))
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:4, :4] = True
    if additive:
        mask = torch.where(mask, 0.0, -INF)
    out, lse = ktune.scaled_dot_product_attention(q, k, v, mask, return_lse=True)
    assert (out[:, :, 4:] == 0).all() and (lse[:, :, 4:] == -INF).all()
    out.sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v))
    assert (q.grad[:, :, 4:] == 0).all() and (k.grad[:, :, 4:] == 0).all()
    assert (v.grad[:, :, :4] != 0).any()


def test_mask_shapes_and_dtypes(stand_in):
    q, k, v = qkv()
    whole = torch.rand(2, 4, 5, 7) > 0.3
    masks = [whole, whole[:, :1, :1], whole[:1, :1], whole[0, 0], whole[..., :1], whole[0]]
    masks += [whole[:1, :1].expand(2, 4, 5, 7), torch.randn(5, 7), torch.randn(4, 1, 7)]
    for mask in masks:
        out = ktune.scaled_dot_product_attention(q, k, v, mask)
        right = F.scaled_dot_product_attention(q, k, v, mask).nan_to_num(0)
        torch.testing.assert_close(out, right)
    lowest = torch.full((5, 7), torch.finfo(torch.float32).min)
    out = ktune.scaled_dot_product_attention(q, k, v, lowest)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))
    assert not stand_in.launches


@pytest.mark.parametrize("shape", [(2, 4, 5, 0), (2, 4, 0, 7), (0, 4, 5, 7), (2, 0, 5, 7)])
@pytest.mark.parametrize("disable", ["0", "1"])
def test_empty(stand_in, shape, disable, monkeypatch):
    monkeypatch.setenv("KTUNE_DISABLE", disable)
    b, h, sq, sk = shape
    q, k = torch.randn(b, h, sq, 16), torch.randn(b, h, sk, 16)
    out, lse = ktune.scaled_dot_product_attention(q, k, k, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    assert (out == 0).all() and (lse == -INF).all() if sk == 0 else True
    bshd = [t.transpose(1, 2) for t in (q, k, k)]
    assert ktune.flash_attention(*bshd, causal=True).shape == (b, sq, h, 16)


def test_dropout_goes_to_pytorch(stand_in):
    q, k, v = qkv()
    torch.manual_seed(0)
    out = ktune.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    with pytest.raises(ArgumentError, match="return_lse=True is not supported"):
        ktune.scaled_dot_product_attention(q, k, v, dropout_p=0.5, return_lse=True)


def test_values_of_another_head_dim_and_float64(stand_in):
    q, k, _ = qkv()
    v = torch.randn(2, 4, 7, 8)
    out = ktune.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))
    out = ktune.scaled_dot_product_attention(*(t.double() for t in qkv()))
    assert out.dtype == torch.float64 and not stand_in.launches


# --- attention: gradients ---------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("case", ["plain", "causal", "lower_right", "gqa", "lse"])
def test_attention_gradients(stand_in, kernels, case):
    where._stand_in = DEVICE if kernels else None
    q, k, v = (t.requires_grad_() for t in qkv(sq=5, sk=3, kv=2 if case == "gqa" else 4))
    causal = {"causal": "upper_left", "lower_right": "lower_right"}.get(case, "none")
    if case == "lower_right":
        out = ktune.flash_attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=True)
        out, lse = out.transpose(1, 2), None
    else:
        out, lse = ktune.scaled_dot_product_attention(
            q, k, v, is_causal=case == "causal", enable_gqa=case == "gqa", return_lse=True
        )
    right, right_lse = compose(q, k, v, 0.25, causal, torch.float32)
    weight = torch.randn(out.shape)
    loss, wanted = (out * weight).sum(), (right * weight).sum()
    if case == "lse":
        loss, wanted = loss + lse.pow(2).sum(), wanted + right_lse.pow(2).sum()
    assert out.grad_fn is not None
    torch.testing.assert_close(
        torch.autograd.grad(loss, (q, k, v)), torch.autograd.grad(wanted, (q, k, v))
    )
    assert bool(stand_in.launches) is kernels


def test_attention_double_backward_and_partial_gradients(stand_in):
    q, k, v = qkv()
    q.requires_grad_()

    def second(function):
        (first,) = torch.autograd.grad(function().pow(2).sum(), q, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), q)[0]

    torch.testing.assert_close(
        second(lambda: ktune.scaled_dot_product_attention(q, k, v)),
        second(lambda: compose(q, k, v, 0.25, "none", torch.float32)[0]),
    )
    with torch.no_grad():
        assert ktune.scaled_dot_product_attention(q, k, v).grad_fn is None
    lse = ktune.scaled_dot_product_attention(q, k, v, return_lse=True)[1]
    assert lse.requires_grad and torch.isfinite(torch.autograd.grad(lse.sum(), q)[0]).all()
    bshd = [t.transpose(1, 2) for t in (q, k, v)]
    ktune.flash_attention(*bshd, deterministic=True).sum().backward()
    assert q.grad is not None and k.grad is None


# --- attention: errors ------------------------------------------------------------------------


def bad(q=None, k=None, v=None, **changes):
    base = dict(zip(("query", "key", "value"), qkv(), strict=True))
    return {
        **base,
        **{n: t for n, t in zip(base, (q, k, v), strict=True) if t is not None},
    } | changes


def mixed():
    q, k, v = qkv()
    return q.half(), k.bfloat16(), v.half()


ERRORS = {
    "key has head_dim 8; expected 16": lambda: bad(k=torch.randn(2, 4, 7, 8)),
    "key has batch 3; expected 2": lambda: bad(k=torch.randn(3, 4, 7, 16)),
    "value has batch 1; expected 2": lambda: bad(v=torch.randn(1, 4, 7, 16)),
    "value has sequence length 6; expected 7": lambda: bad(v=torch.randn(2, 4, 6, 16)),
    "value has heads 2; expected 4": lambda: bad(v=torch.randn(2, 2, 7, 16)),
    "key has 2 heads; expected 4, as query, or enable_gqa": lambda: bad(*qkv(kv=2)),
    "key has 3 heads; expected a number that divides": lambda: bad(*qkv(kv=3), enable_gqa=True),
    "key has 3 dimensions; expected 4": lambda: bad(k=torch.randn(4, 7, 16)),
    "query has 1 dimensions; expected at least 2": lambda: bad(q=torch.randn(4)),
    "query has head_dim 512; expected at most 256": lambda: bad(*qkv(d=512)),
    "key has dtype bfloat16; expected float16": lambda: bad(*mixed()),
    "query has dtype int64": lambda: bad(q=torch.zeros(2, 4, 5, 16, dtype=torch.int64)),
    "key has dtype complex64": lambda: bad(k=torch.zeros(2, 4, 7, 16, dtype=torch.cfloat)),
    "value is a list": lambda: bad(value=[1]),
    "value is on meta; expected cpu": lambda: bad(v=torch.zeros(2, 4, 7, 16, device="meta")),
    "attn_mask and is_causal": lambda: bad(attn_mask=torch.ones(5, 7), is_causal=True),
    "attn_mask has dtype int64": lambda: bad(attn_mask=torch.ones(5, 7, dtype=torch.int64)),
    r"attn_mask has shape \(5, 6\); expected one": lambda: bad(attn_mask=torch.ones(5, 6)),
}  # fmt: skip


@pytest.mark.parametrize(("message", "make"), ERRORS.items(), ids=ERRORS)
def test_attention_errors(stand_in, message, make):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        ktune.scaled_dot_product_attention(**make())
    assert not stand_in.launches
    ktune.scaled_dot_product_attention(*qkv())


@pytest.mark.parametrize(
    "argument",
    [
        {"dropout_p": 0.1},
        {"window_size": (3, 0)},
        {"softcap": 30.0},
        {"alibi_slopes": torch.ones(4)},
        {"return_attn_probs": True},
    ],
    ids=lambda a: next(iter(a)),
)
def test_flash_attention_refuses_by_name(argument):
    bshd = [t.transpose(1, 2) for t in qkv()]
    with pytest.raises(ArgumentError, match=f"{next(iter(argument))}=.* is not supported"):
        ktune.flash_attention(*bshd, **argument)
    with pytest.raises(ArgumentError, match="k has 3 dimensions; expected 4"):
        ktune.flash_attention(bshd[0], bshd[1][0], bshd[2])
    with pytest.raises(ArgumentError, match="k has 3 heads; expected a number that divides the 4"):
        ktune.flash_attention(*(t.transpose(1, 2) for t in qkv(kv=3)))


# --- dispatch ---------------------------------------------------------------------------------

PROBLEM = "softmax m=64 n=32 dtype=float32"


def entry(problem=PROBLEM, block_m=2, source_id="source"):
    parsed = parse_problem(problem)
    default = operation("softmax").default_variant(parsed, DEVICE)
    variant = default.of("softmax", {**default.values, "block_m": block_m})
    numbers = Provenance(0.1, 0.0, 0.2, 1.0, False, 9, "test", "2026-01-31", 3, {"torch": "0.1"})
    return Entry(DEVICE.key, parsed, variant, source_id, numbers)


@pytest.fixture
def table(tmp_path, monkeypatch):
    path = tmp_path / "mine.json"
    monkeypatch.setenv("KTUNE_TABLE_PATH", str(path))
    return path


def used():
    return list(dispatcher()._bound.values())[-1].match


def test_one_warning_in_a_process(stand_in, caplog):
    for n in range(1, 101):
        ktune.softmax(torch.randn(3, 1 + n % 10), -1)
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "no entry for softmax m=3 n=2 dtype=float32 layout=rows on any sm_90" in caplog.text
    assert 'ktune search softmax --problem "m=3 n=2 dtype=float32 layout=rows"' in caplog.text
    assert len(stand_in.launches) == 100
    dispatcher().reload()
    ktune.softmax(torch.randn(3, 5), -1)
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


def test_strict_mode_raises(stand_in, table, monkeypatch):
    monkeypatch.setenv("KTUNE_STRICT", "1")
    with pytest.raises(StrictError, match=r"no entry for softmax m=3 n=5 .*KTUNE_STRICT=1"):
        ktune.softmax(torch.randn(3, 5), -1)
    update_table(table, [entry()])
    dispatcher().reload()
    ktune.softmax(torch.randn(64, 32), -1)
    assert used().kind == "exact"


def test_entries_are_used_without_a_warning(stand_in, table, caplog):
    update_table(table, [entry()])
    ktune.softmax(torch.randn(64, 32), -1)
    assert used().kind == "exact" and used().variant == entry().variant
    ktune.softmax(torch.randn(61, 32), -1)
    assert used().kind == "bucket" and used().variant == entry().variant
    assert not caplog.records


def test_reload_reads_the_table_again(stand_in, table):
    x = torch.randn(64, 32)
    ktune.softmax(x, -1)
    assert used().kind == "default"
    update_table(table, [entry()])
    ktune.softmax(x, -1)
    assert used().kind == "default"
    dispatcher().reload()
    ktune.softmax(x, -1)
    assert used().kind == "exact"


def test_stale_entry_is_not_used(stand_in, table, caplog):
    update_table(table, [entry(source_id="older")])
    ktune.softmax(torch.randn(64, 32), -1)
    assert used().kind == "default"
    assert "passed over" in caplog.text and "older" in caplog.text


def test_nonsense_variant_in_a_table_is_stale(stand_in, table, monkeypatch):
    def render(variant, problem):
        if dict(variant.params)["block_m"] == 3:
            raise ValueError("not a power of two")
        return SimpleNamespace(id="source", problem=problem, variant=variant)

    monkeypatch.setattr(codegen, "render", render)
    update_table(table, [entry(block_m=3)])
    ktune.softmax(torch.randn(64, 32), -1)
    assert used().kind == "default" and "not a power of two" in used().stale[0].reason


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff\xfe", b'{"schema": 9}', b"{"])
def test_damaged_table_is_one_warning_and_calls_work(stand_in, table, content, caplog):
    table.write_bytes(content)
    for n in (3, 4, 5):
        ktune.softmax(torch.randn(2, n), -1)
    about = [r for r in caplog.records if str(table) in r.getMessage()]
    assert len(about) == 1 and about[0].levelno == logging.WARNING
    assert table.read_bytes() == content, "the runtime never writes"


def test_first_of_several_tables_wins(stand_in, table, tmp_path, monkeypatch):
    other = tmp_path / "other.json"
    update_table(other, [entry(block_m=4)])
    monkeypatch.setenv("KTUNE_TABLE_PATH", f"{tmp_path / 'absent.json'}:{other}:{table}")
    update_table(table, [entry(block_m=2)])
    ktune.softmax(torch.randn(64, 32), -1)
    assert dict(used().variant.params)["block_m"] == 4
    assert dispatcher().path(used()) == other


def test_shipped_tables_come_last(stand_in, table, tmp_path, monkeypatch):
    folder = tmp_path / "tables"
    update_table(folder / "a.json", [entry(block_m=4)])
    monkeypatch.setattr(dispatch, "data", lambda kind: tmp_path / kind)
    ktune.softmax(torch.randn(64, 32), -1)
    assert dict(used().variant.params)["block_m"] == 4
    update_table(table, [entry(block_m=2)])
    dispatcher().reload()
    ktune.softmax(torch.randn(64, 32), -1)
    assert dict(used().variant.params)["block_m"] == 2


def test_equal_structure_renders_once(stand_in):
    for sk in range(1, 40):
        q, k, v = qkv(sq=1, sk=sk)
        ktune.scaled_dot_product_attention(q, k, v)
    assert len(stand_in.renders) == 1 and len(dispatcher()._bound) == 39


def test_memory_of_calls_is_bounded(stand_in, monkeypatch):
    monkeypatch.setattr(dispatch, "MAX_CALLS", 3)
    for n in range(1, 20):
        ktune.softmax(torch.randn(2, n), -1)
    assert len(dispatcher()._calls) == len(dispatcher()._bound) == 3


def test_cold_call_in_a_capture_is_refused_and_warm_is_not(stand_in, monkeypatch):
    warm, cold = torch.randn(2, 8), torch.randn(2, 9)
    ktune.softmax(warm, -1)
    monkeypatch.setattr(dispatch, "capturing", lambda index: True)
    ktune.softmax(warm, -1)
    launched = len(stand_in.launches)
    with pytest.raises(CaptureError, match=r"softmax m=2 n=9 .*before the capture"):
        ktune.softmax(cold, -1)
    with pytest.raises(CaptureError):
        ktune.softmax(torch.randn(17)[1:].view(2, 8), -1)  # compiled for another alignment
    with pytest.raises(CaptureError):
        dispatcher().kernel(parse_problem("softmax m=2 n=10"), where.STAND_IN)
    assert len(stand_in.launches) == launched
    monkeypatch.setattr(dispatch, "capturing", lambda index: False)
    ktune.softmax(cold, -1)


def test_kernel_that_does_not_compile_says_what_to_do(stand_in, table):
    update_table(table, [entry()])
    stand_in.error = ValueError("out of resource: shared memory\nmore")
    x = torch.randn(64, 32)
    for _ in range(2):
        with pytest.raises(CompileError) as caught:
            ktune.softmax(x, -1)
    text = str(caught.value)
    assert "ValueError: out of resource: shared memory." in text
    assert entry().variant.text in text and f"exact entry of {table}" in text
    assert "ktune search softmax" in text and "KTUNE_DISABLE=1" in text
    stand_in.error = None
    ktune.softmax(x, -1)


def test_out_of_memory_is_not_disguised(stand_in):
    stand_in.error = torch.cuda.OutOfMemoryError("full")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        ktune.softmax(torch.randn(2, 3), -1)


def test_disable_computes_with_pytorch(stand_in, monkeypatch):
    monkeypatch.setenv("KTUNE_DISABLE", "1")
    x, (q, k, v) = torch.randn(2, 3), qkv()
    assert torch.equal(ktune.softmax(x, -1), torch.softmax(x, -1))
    out = ktune.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert not stand_in.launches


def test_threads_share_one_dispatcher(stand_in):
    def work(n):
        x = torch.randn(2, 1 + n % 7)
        return torch.allclose(ktune.softmax(x, -1), torch.softmax(x, -1))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(200)))
    assert len(dispatcher()._bound) == 7


def test_device_is_made_current_and_restored(monkeypatch):
    entered = []

    class Guard:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)

        def __exit__(self, *_):
            entered.append("left")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    with where.on(1):
        assert entered == [1]
    with where.on(0):
        pass
    assert entered == [1, "left"]


def test_explain(stand_in, table):
    update_table(table, [entry(), entry("softmax m=1 n=8 dtype=float32", source_id="older")])
    exact = ktune.explain(PROBLEM, DEVICE)
    assert (exact.kind, exact.table, exact.variant) == ("exact", table, entry().variant)
    assert exact.other_versions["torch"] == ("0.1", torch.__version__)
    assert str(table) in str(exact) and "100.0% better than the default" in str(exact)
    stale = ktune.explain("softmax m=1 n=8 dtype=float32", DEVICE)
    assert stale.kind == "default" and stale.table is None and "older" in stale.stale[0].reason
    other = ktune.explain(parse_problem(PROBLEM), Device("X", "cuda", "sm_90", 1, 1, 1, 1))
    assert other.kind == "default" and other.nearest.differs.keys() == {"device"}
    assert "Run: ktune search" in str(other) and "differs: device" in str(other)
    assert not stand_in.launches and not dispatcher()._bound


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_explain_without_a_gpu():
    with pytest.raises(NoDeviceError, match="no GPU"):
        ktune.explain(PROBLEM)


def test_one_dispatcher():
    assert dispatcher() is dispatcher() and isinstance(dispatcher(), Dispatcher)
    with pytest.raises(TableError):
        raise TableError("kept for callers")


# --- batch invariance -------------------------------------------------------------------------


def test_mode_nests_and_belongs_to_the_context(monkeypatch):
    assert not is_batch_invariant()
    with ktune.batch_invariant():
        assert is_batch_invariant()
        with ktune.batch_invariant(False):
            assert not is_batch_invariant()
            with ktune.batch_invariant():
                assert is_batch_invariant()
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(is_batch_invariant).result(), "another thread is another context"
            assert pool.submit(copy_context().run, is_batch_invariant).result()
    with suppress(KeyError), ktune.batch_invariant():
        raise KeyError
    assert not is_batch_invariant()
    monkeypatch.setenv("KTUNE_BATCH_INVARIANT", "1")
    assert is_batch_invariant()
    with ktune.batch_invariant(False):
        assert not is_batch_invariant()
    monkeypatch.setenv("KTUNE_BATCH_INVARIANT", "yes")
    with pytest.raises(SettingsError, match="KTUNE_BATCH_INVARIANT='yes' is not understood"):
        is_batch_invariant()


def test_the_same_call_in_and_out_of_the_mode(stand_in, table, monkeypatch):
    update_table(table, [entry(block_m=2), entry("softmax m=512 n=32 dtype=float32", block_m=8)])
    x = torch.randn(64, 32)

    def block(context):
        with context:
            ktune.softmax(x, -1)
            return dict(ktune.explain(PROBLEM, DEVICE).variant.params)["block_m"]

    for _ in range(2):
        assert block(nullcontext()) == 2
        assert block(ktune.batch_invariant()) == 8
    assert len(dispatcher()._bound) == len(dispatcher()._calls) == 2, "remembered apart"
    variants = [dict(b.match.variant.params)["block_m"] for b in dispatcher()._bound.values()]
    assert variants == [2, 8]
    monkeypatch.setenv("KTUNE_BATCH_INVARIANT", "1")
    assert block(nullcontext()) == 8


def test_explain_names_regions_and_ignored_batches(stand_in, table):
    wide = replace(entry(), covers={"m": (1, 4096), "n": (32, 32)})
    update_table(table, [wide])
    found = ktune.explain("softmax m=4000 n=32 dtype=float32", DEVICE)
    assert found.kind == "region" and found.ignored == ()
    assert "which covers m=1..4096 n=32 dtype=float32 layout=rows" in str(found)
    with ktune.batch_invariant():
        found = ktune.explain("softmax m=9000 n=32 dtype=float32", DEVICE)
        assert found.kind == "exact" and "batch-invariant: m ignored" in str(found)


def test_explain_prints_regions_and_ignored_batches(table, monkeypatch):
    (found,) = per_batch_entries(["softmax m=64 n=2504"], STREAMS, DEVICE)
    update_table(table, [replace(found, covers={"m": (1, 4096), "n": (2049, 4095)})], [DEVICE])
    words = ["explain", "softmax", "m=200", "n=3000", "--target", "sm_90"]
    shown = CliRunner().invoke(cli, words, catch_exceptions=False).stdout
    assert "region: an entry whose region of sizes holds the problem" in shown
    assert "m=1..4096 n=2049..4095 dtype=bfloat16" in shown and "ignored" not in shown
    monkeypatch.setenv("KTUNE_BATCH_INVARIANT", "1")
    assert "m (batch-invariant)" in CliRunner().invoke(cli, words, catch_exceptions=False).stdout


def test_a_row_cut_from_a_padded_tensor_keeps_its_stride():
    whole = torch.randn(6, 5, 48)
    for cut in (whole[0, :, :33], whole[0, 2:3, :33], whole[:, :, :33], whole[1:2, 3:4, :33]):
        views = plan_views(cut.shape, cut.stride(), cut.dim() - 1)
        assert views.x_strides == (48, 1) and views.out_strides == (33, 1)
    for n, shape in ((33, (33,)), (33, (1, 33)), (1, (5, 1))):
        row = torch.randn(*shape)[..., :n][:1] if len(shape) > 1 else torch.randn(*shape)
        views = plan_views(row.shape, row.stride(), row.dim() - 1)
        assert views.x_strides == (n, 1) and views.out_strides == (n, 1)


STRIDED = (
    "streaming block_m=8 block_n=512 loop_stages=1 rescale=always second_pass=forward "
    "eviction=none num_warps=8"
)


@pytest.mark.parametrize(
    ("problem", "variant", "counts"),
    [
        ("softmax m=64 n=1000", "one_tile block_m=2 eviction=none num_warps=4", {"m"}),
        (
            "softmax m=64 n=1000 layout=strided",
            "one_tile block_m=2 eviction=none num_warps=4",
            {"b", "m"},
        ),
        ("softmax m=64 n=4000 layout=strided", STRIDED, {"b", "m"}),
        (
            "softmax m=64 n=4000",
            "streaming block_n=512 eviction=none lanes=1 loop_stages=1 rescale=always "
            "second_pass=forward num_warps=2",
            set(),
        ),
        (
            "attention heads=8 seqlen_q=64 head_dim=64",
            "forward block_m=64 block_n=32 load=pointer normalization=deferred rescale=always "
            "tile_order=sequential num_warps=4 num_stages=1",
            {"num_heads", "group", "seqlen_q", "seqlen_k"},
        ),
    ],
)
def test_triton_compiles_for_no_count_of_rows(problem, variant, counts):
    """Else a batch of 1, or of 16, would get a kernel of its own, and with it other sums."""
    asked = parse_problem(problem)
    tree = ast.parse(codegen.render(Variant.parse(asked.op, variant), asked).text)
    functions = [f for f in tree.body if isinstance(f, ast.FunctionDef)]
    (kernel,) = (f for f in functions if f.name.startswith(f"{asked.op}_"))
    taken = {a.arg for a in kernel.args.args}
    named = [k for d in kernel.decorator_list for k in getattr(d, "keywords", ())]
    kept = {
        name for k in named if k.arg == "do_not_specialize" for name in ast.literal_eval(k.value)
    }
    assert kept == counts <= taken
    pointers = ("_ptr", "_desc")
    rest = {a for a in taken if not a.startswith("stride_") and not a.endswith(pointers)} - kept
    assert rest <= {"n", "scale_log2"}, "all else is the batch's or must not be specialised"


ONE_BINARY = """
import torch
from ktune.codegen import load_module, render
from ktune.codegen.compile import _captured_launches
from ktune.device import COMPILE_TARGETS
from ktune.operations import parse_problem
from ktune.runtime.attention import _tidy
from ktune.runtime.softmax import plan_views
from ktune.variant import Variant

def launch(problem, variant, *tensors):
    asked = parse_problem(problem)
    chosen = Variant.parse(asked.op, variant)
    load_module(render(chosen, asked)).launch(*tensors, **chosen.options)
    return kernels[-1].asm["cubin"]

def softmax(variant, m, n, padding):
    x = torch.empty(1000, n + padding, device="meta", dtype=torch.bfloat16)[:m, :n]
    out = torch.empty(m, n, device="meta", dtype=torch.bfloat16)
    views = plan_views(x.shape, x.stride(), 1)
    x = x.as_strided(views.shape, views.x_strides)
    out = out.as_strided(views.shape, views.out_strides)
    return launch(f"softmax m={m} n={n}", variant, x, out)

def attention(variant, b, length, head_dim):
    q, k = (torch.empty(1000, h, length, head_dim, device="meta", dtype=torch.bfloat16)[:b]
            for h in (4, 2))
    q, k = _tidy(q), _tidy(k)
    words = f"batch={b} heads=4 heads_kv=2 seqlen_q={length} head_dim={head_dim}"
    return launch(f"attention {words} causal=upper_left", variant, q, k, k, q, None, 0.1)

with _captured_launches(COMPILE_TARGETS["sm_90"]) as kernels:
    for n, padding in ((2500, 0), (2501, 0), (2501, 11)):
        for variant in SOFTMAX:
            found = {softmax(variant, m, n, padding) for m in BATCHES}
            assert len(found) == 1, (n, padding, variant)
    for length, head_dim in ((300, 64), (77, 72), (1, 64)):
        for load in ("pointer", "descriptor"):
            variant = ATTENTION.replace("pointer", load)
            found = {attention(variant, b, length, head_dim) for b in BATCHES}
            assert len(found) == 1, (length, head_dim, load)
"""


def test_one_binary_for_every_batch():
    """For an H200, without one: what Triton compiles is the same for every batch."""
    names = f"BATCHES = {BATCHES}\nSOFTMAX = {STREAMS[::2]!r}\nATTENTION = {FORWARDS[1]!r}\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", names + ONE_BINARY],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stderr


BATCHES = (1, 2, 3, 7, 16, 17, 64, 1000)


def per_batch_entries(problems, variants, device):
    """Return entries that give every batch size a variant of its own, by turns."""
    numbers = Provenance(0.1, 0.0, 0.2, 1.0, False, 9, "test", "2026-01-31", 3)
    found = []
    for i, text in enumerate(problems):
        problem = parse_problem(text)
        variant = Variant.parse(problem.op, variants[i % len(variants)])
        source = codegen.render(variant, problem).id
        found.append(Entry(device.key, problem, variant, source, numbers))
    return found


def softmax_bits(n, batches, device, dtype, padding=0):
    """Return the first row's softmax in every batch, all rows of one (padded) tensor."""
    torch.manual_seed(0)
    whole = torch.randn(max(batches), n + padding, device=device, dtype=torch.float32).mul(4)
    whole = whole.to(dtype)[:, :n]
    return [ktune.softmax(whole[:m], -1)[0] for m in batches]


def attention_bits(length, head_dim, batches, device, dtype, causal):
    """Return the first sequence's attention, with its LSE, in every batch."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(max(batches), h, length, head_dim, device=device).to(dtype) for h in (4, 2, 2)
    )
    found = []
    for b in batches:
        out, lse = ktune.scaled_dot_product_attention(
            q[:b], k[:b], v[:b], is_causal=causal, enable_gqa=True, return_lse=True
        )
        found.append(torch.cat([out[0].float().flatten(), lse[0].flatten()]))
    return found


def all_equal(bits):
    return all(torch.equal(bits[0], other) for other in bits[1:])


STREAMS = (
    "streaming block_n=512 eviction=none lanes=1 loop_stages=1 rescale=always "
    "second_pass=forward num_warps=2",
    "streaming block_n=1024 eviction=none lanes=128 loop_stages=1 rescale=always "
    "second_pass=reverse num_warps=4",
    "one_tile block_m=2 eviction=none num_warps=8",
)
FORWARDS = (
    "forward block_m=64 block_n=32 load=pointer normalization=deferred rescale=always "
    "tile_order=reversed num_warps=4 num_stages=1",
    "forward block_m=64 block_n=64 load=pointer normalization=deferred rescale=always "
    "tile_order=reversed num_warps=4 num_stages=1",
    "forward block_m=128 block_n=64 load=pointer normalization=per_tile rescale=always "
    "tile_order=reversed num_warps=4 num_stages=1",
)


@interpreted
@pytest.mark.parametrize("padding", [0, 11])
def test_softmax_bits_are_the_same_in_every_batch(kernels, table, padding):
    batches = BATCHES[:6]
    problems = [f"softmax m={m} n=2500 dtype=float32" for m in batches]
    update_table(table, per_batch_entries(problems, STREAMS, DEVICE))
    assert not all_equal(softmax_bits(2500, batches, "cpu", torch.float32, padding))
    with ktune.batch_invariant():
        assert all_equal(softmax_bits(2500, batches, "cpu", torch.float32, padding))
    assert {b.match.kind for b in dispatcher()._bound.values()} == {"exact"}


@interpreted
def test_attention_bits_are_the_same_in_every_batch(kernels, table):
    batches, text = BATCHES[:4], "heads=4 heads_kv=2 seqlen_q=70 head_dim=16 dtype=float32"
    problems = [f"attention batch={b} {text} causal=upper_left" for b in batches]
    update_table(table, per_batch_entries(problems, FORWARDS, DEVICE))
    given = 70, 16, batches, "cpu", torch.float32, True
    assert not all_equal(attention_bits(*given))
    with ktune.batch_invariant():
        assert all_equal(attention_bits(*given))


@pytest.fixture
def cuda(table):
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels on a GPU need TRITON_INTERPRET=0")
    dispatcher.cache_clear()
    yield device_of(0)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1000, 2500, 4096, 50257])
@pytest.mark.parametrize("padding", [0, 15])
def test_softmax_bits_on_a_gpu(cuda, table, n, dtype, padding):
    name = str(dtype).removeprefix("torch.")
    streams = STREAMS[-1:] if n == 1000 else STREAMS[:2] if n == 50257 else STREAMS
    streams = [*streams, "one_tile block_m=1 eviction=none num_warps=4"] if n < 4096 else streams
    problems = [f"softmax m={m} n={n} dtype={name}" for m in BATCHES]
    update_table(table, per_batch_entries(problems, streams, cuda))
    given = n, BATCHES, "cuda", dtype, padding
    with ktune.batch_invariant():
        assert all_equal(softmax_bits(*given))
    assert {b.match.kind for b in dispatcher()._bound.values()} == {"exact"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "head_dim"), [(64, 64), (300, 128), (77, 72), (1, 64)])
@pytest.mark.parametrize("tuned", [False, True])
def test_attention_bits_on_a_gpu(cuda, table, dtype, causal, length, head_dim, tuned):
    name = str(dtype).removeprefix("torch.")
    text = f"heads=4 heads_kv=2 seqlen_q={length} head_dim={head_dim} dtype={name}"
    mask = "upper_left" if causal else "none"
    if tuned:
        problems = [f"attention batch={b} {text} causal={mask}" for b in BATCHES]
        update_table(table, per_batch_entries(problems, FORWARDS[:2], cuda))
    with ktune.batch_invariant():
        assert all_equal(attention_bits(length, head_dim, BATCHES, "cuda", dtype, causal))


# --- torch.compile ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compile_keeps_kernels_whole(stand_in):
    def model(x, q, k, v):
        out, lse = ktune.scaled_dot_product_attention(q, k, v, is_causal=True, return_lse=True)
        flash = ktune.flash_attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=True)
        return ktune.softmax(2 * x, 1).sum(1), out + flash.transpose(1, 2), lse

    inputs = [torch.randn(3, 4, 5), *qkv()]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), model(*inputs))

    def gradients(function):
        given = [t.clone().requires_grad_() for t in inputs]
        rows, out, lse = function(*given)
        return torch.autograd.grad((rows.exp() * out.pow(2).sum()).sum() + lse.sum(), given)

    torch.testing.assert_close(gradients(compiled), gradients(model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kv", [2, 4])
def test_operators_are_registered_right(stand_in, kv):
    x, (q, k, v) = torch.randn(3, 4, 5, requires_grad=True), qkv(kv=kv)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.ktune.softmax.default, (x, 1), test_utils=checks)
    arguments = (*(t.requires_grad_() for t in (q, k, v)), 0.3, "none")
    torch.library.opcheck(torch.ops.ktune.attention.default, arguments, test_utils=checks)


# --- the rendered kernels, interpreted --------------------------------------------------------


@pytest.fixture
def kernels():
    with where._force_kernels():
        yield


@interpreted
@pytest.mark.parametrize("name", ["rows", "3-D middle", "sliced", "permuted heads", "5-D copied"])
def test_rendered_softmax(kernels, name):
    make, dim, _ = LAYOUTS[name]
    x = make()
    torch.testing.assert_close(ktune.softmax(x, dim), torch.softmax(x, dim))


@interpreted
def test_rendered_softmax_special_values(kernels):
    x = torch.randn(5, 48)
    x[1], x[2], x[2, 7], x[3, 0] = -INF, -INF, math.nan, INF
    torch.testing.assert_close(ktune.softmax(x, -1), torch.softmax(x, -1), equal_nan=True)
    assert ktune.softmax(torch.full((1, 1), 88.72284), -1).item() == 1.0


@interpreted
@pytest.mark.parametrize("name", ["packed", "packed gqa", "offset", "inner stride", "one of all"])
def test_rendered_attention(kernels, name):
    q, k, v = (t.float() for t in ATTENTION_LAYOUTS[name][0]())
    right, lse = compose(*(t.double() for t in (q, k, v)), 0.3, "upper_left", torch.float64)
    found = ktune.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=0.3, return_lse=True, enable_gqa=True
    )
    torch.testing.assert_close(found, (right.float(), lse.float()))


@interpreted
def test_rendered_attention_without_visible_keys(kernels):
    q, k, v = (t.transpose(1, 2) for t in qkv(sq=5, sk=2))
    out, lse = ktune.flash_attention(q, k, v, causal=True, return_lse=True)
    assert (out[:, :3] == 0).all() and (lse[..., :3] == -INF).all()
    assert torch.isfinite(out).all() and torch.isfinite(lse[..., 3:]).all()
