"""Cases from public bug reports, and the rescale strategies, on a GPU.

Run with ``TRITON_INTERPRET=0 pytest -m gpu tests/test_gpu_cases.py``. Tests that take ``device``
run on the CPU too, by PyTorch and by kernels in Triton's interpreter, with smaller sizes.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from helpers import one_search

import ktune
from ktune.bench.check import Case, check_module, compare, make_case
from ktune.bench.timer import Timer, copy_bandwidth
from ktune.bench.worker import Worker, WorkerDied
from ktune.codegen import load_module, render
from ktune.device import COMPILE_TARGETS, device_of
from ktune.errors import CaptureError
from ktune.operations import operation, parse_problem
from ktune.runtime import dispatch, where
from ktune.runtime.arguments import ArgumentError, ArgumentTypeError
from ktune.runtime.dispatch import dispatcher
from ktune.space import load_space
from ktune.space.space import parse_space
from ktune.table import Entry, Provenance, update_table

INF, NAN = math.inf, math.nan
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OWN_DEVICE = COMPILE_TARGETS["sm_90"]
gpu = pytest.mark.gpu
pytestmark = [  # of NumPy, in the interpreter
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning"),
]


@contextmanager
def place(name):
    """Within, calls on tensors of the yielded device go to PyTorch, an interpreter or a GPU."""
    if name == "cuda" and INTERPRETED:
        pytest.skip("kernels on a GPU need TRITON_INTERPRET=0")
    if name == "interpreted" and not INTERPRETED:
        pytest.skip("the interpreter needs TRITON_INTERPRET=1")
    dispatcher.cache_clear()
    torch.manual_seed(0)
    try:
        if name == "interpreted":
            with where._force_kernels(OWN_DEVICE):
                yield torch.device("cpu")
        else:
            yield torch.device("cuda", 0) if name == "cuda" else torch.device("cpu")
            if name == "cuda":
                torch.cuda.synchronize()  # an error must not surface in the next test
    finally:
        dispatcher.cache_clear()


@pytest.fixture(params=["cpu", "interpreted", pytest.param("cuda", marks=gpu)])
def device(request):
    with place(request.param) as found:
        yield found


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=gpu)])
def kernels(request):
    """Where kernels compute, never PyTorch."""
    with place(request.param) as found:
        yield found


@pytest.fixture
def cuda():
    with place("cuda") as found:
        yield found
    torch.cuda.empty_cache()


# --- checks -----------------------------------------------------------------------------------


def big(device, there, here):
    """Return the size for a GPU, or the one for the CPU."""
    return there if device.type == "cuda" else here


def half(device):
    """Return the 16-bit dtype to test: the interpreter's bfloat16 is not the GPU's."""
    return big(device, torch.bfloat16, torch.float16)


def randn(*shape, dtype=torch.float32, device="cpu"):
    dtype = half(device) if dtype == "half" else dtype
    return torch.randn(*shape, dtype=dtype, device=device)


def rule2(got, truth, eager, factor=2.0):
    """Assert the rule of ``ktune.bench.check`` on an output, in units of each row's largest."""
    problem = parse_problem("softmax m=1 n=1")
    zero = Case(problem, "given", {}, {"out": truth.float()}, {"out": 1e-30})
    allowed = factor * _finite(compare(zero, {"out": eager}).error) + 1e-5
    case = Case(problem, "given", {}, {"out": truth.float()}, {"out": allowed})
    verdict = compare(case, {"out": got})
    assert verdict.passed, verdict.detail


def _finite(error):
    return error if math.isfinite(error) else 0.0


def rule2_softmax(got, x, dim=-1):
    assert got.shape == x.shape and got.dtype == x.dtype and got.device == x.device
    rows = (t.movedim(dim, -1) for t in (got, torch.softmax(x.double(), dim), x.softmax(dim)))
    rule2(*rows)


def plain_attention(q, k, v, dtype=torch.float64, causal="none", scale=None):
    """Return output and LSE of BHSD tensors by whole matrices of scores, in a dtype.

    As in fused kernels, 16-bit inputs have scores in float32, and P is rounded to ``dtype``.
    """
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * (scale or q.shape[3] ** -0.5)
    sq, sk = s.shape[2:]
    if causal != "none":
        diagonal = sk - sq if causal == "lower_right" else 0
        visible = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(diagonal)
        s = s.masked_fill(~visible, -INF)
    lse = s.logsumexp(-1)
    p = s.softmax(-1).masked_fill(lse[..., None] == -INF, 0)
    return (p.to(dtype).to(wide) @ v).to(dtype), lse


def rule2_attention(got, q, k, v, causal="none", factor=2.0):
    assert got.shape == (*q.shape[:3], v.shape[3])
    assert got.dtype == q.dtype and got.device == q.device
    truth, _ = plain_attention(q, k, v, causal=causal)
    eager, _ = plain_attention(q, k, v, q.dtype, causal)
    rule2(got, truth, eager, factor)


def raw(tensor):
    """Return the bytes of all the memory that a tensor is a view of."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


@contextmanager
def unchanged(*tensors):
    """Assert that the bytes of the tensors, and those around them, stay as they are."""
    before = [raw(t).clone() for t in tensors]
    yield
    for t, old in zip(tensors, before, strict=True):
        assert torch.equal(raw(t), old)


def same(call, *tensors, factor=2.0, causal="none"):
    """Assert SAME for an attention call: right on these views and on contiguous clones."""
    with unchanged(*tensors):
        out = call(*tensors)
    rule2_attention(out, *tensors, causal=causal, factor=factor)
    whole = call(*(t.contiguous().clone() for t in tensors))
    rule2_attention(whole, *tensors, causal=causal, factor=factor)
    return out


def framed(t, dims, fill=NAN, edge=3):
    """Return a copy of a tensor as a view inside a buffer that is wider in some dimensions."""
    wide = [edge if i in {d % t.dim() for d in dims} else 0 for i in range(t.dim())]
    shape = [s + 2 * w for s, w in zip(t.shape, wide, strict=True)]
    buffer = torch.full(shape, fill, dtype=t.dtype, device=t.device)
    cut = tuple(slice(w, w + s) for s, w in zip(t.shape, wide, strict=True))
    buffer[cut] = t
    return buffer[cut]


def qkv(b, h, sq, d, *, sk=None, kv=None, dtype="half", device="cpu"):
    kv, sk = kv or h, sk or sq
    return tuple(
        randn(b, n, s, d, dtype=dtype, device=device) for n, s in ((h, sq), (kv, sk), (kv, sk))
    )


def sdpa(q, k, v, **options):
    grouped = q.shape[1] != k.shape[1]
    return ktune.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **options)


def flash(q, k, v, **options):
    """Call ``flash_attention`` on BHSD tensors."""
    out = ktune.flash_attention(*(t.transpose(1, 2) for t in (q, k, v)), **options)
    if isinstance(out, tuple):
        return out[0].transpose(1, 2), out[1]
    return out.transpose(1, 2)


# --- softmax ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, "half"], ids=["float32", "half"])
def test_c001_softmax_of_causal_scores_is_finite(device, dtype):
    x = randn(*big(device, (8, 12), (1, 2)), 71, 71, dtype=dtype, device=device)
    x += torch.full((71, 71), -INF, dtype=x.dtype, device=device).triu(1)
    out = ktune.softmax(x, -1)
    assert torch.isfinite(out).all()
    ones = torch.ones_like(out[..., 0], dtype=torch.float32)
    torch.testing.assert_close(out.float().sum(-1), ones, atol=2e-2, rtol=0)
    rule2_softmax(out, x)


@pytest.mark.parametrize("n", [48, 2048, 20_000])
def test_c003_one_nan_among_minus_infinity(device, n):
    x = randn(9, n, device=device)
    for row, column in ((1, 0), (4, n // 3), (6, n - 1)):
        x[row], x[row, column] = -INF, NAN
    out = ktune.softmax(x, -1)
    assert torch.isnan(out).all(1).tolist() == [i in (1, 4, 6) for i in range(9)]
    rule2_softmax(out, x)


@pytest.mark.parametrize("causal", [False, True])
def test_c003_a_nan_query_is_nan_in_its_own_row_only(device, causal):
    q, k, v = qkv(1, 2, 40, 64, dtype=torch.float32, device=device)
    clean = sdpa(q, k, v, is_causal=causal)
    q[0, 1, 7, 3] = NAN
    out = sdpa(q, k, v, is_causal=causal)
    assert torch.isnan(out[0, 1, 7]).all()
    out[0, 1, 7] = clean[0, 1, 7]
    torch.testing.assert_close(out, clean)


def test_c006_rows_of_one_and_values_at_the_edge_of_exp(device):
    edge = torch.full((3, 1), 88.72284, device=device)
    assert torch.equal(ktune.softmax(edge, 1), torch.ones_like(edge))
    assert (ktune.softmax(edge.expand(3, 4), 1) == 0.25).all()
    assert ktune.softmax(edge[0, 0], 0).item() == 1.0


def test_c008_empty(device):
    for shape in ((0, 5), (5, 0), (0,), (2, 0, 3)):
        for dim in range(len(shape)):
            out = ktune.softmax(torch.empty(shape, device=device), dim)
            assert out.shape == shape and out.device == device
    assert ktune.softmax(torch.zeros(1, 2, device=device), 1).tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_c010_every_dimension_and_bit_identical_repeats(device, dim):
    x = randn(*big(device, (200, 40_999, 3), (5, 67, 3)), device=device)
    out = ktune.softmax(x, dim)
    assert float((out.double() - torch.softmax(x.double(), dim)).abs().max()) < 2e-6
    rule2_softmax(out, x, dim)
    for _ in range(8):
        assert torch.equal(ktune.softmax(x, dim), out)


@gpu
def test_c012_more_than_two_to_the_32_elements(cuda):
    x = randn(1 << 22, 1024, dtype=torch.float16, device=cuda)
    out = ktune.softmax(x, -1)
    for start in (0, (1 << 21) - 500, (1 << 22) - 1000):
        rows = slice(start, start + 1000)
        rule2_softmax(out[rows], x[rows])


@pytest.mark.parametrize("dtype", [torch.float32, "half"], ids=["float32", "half"])
def test_c015_rows_longer_than_65536(device, dtype):
    x = randn(big(device, 64, 2), 102_400, dtype=dtype, device=device)
    rule2_softmax(ktune.softmax(x, -1), x)


@pytest.mark.parametrize("order", ["view first", "clone first"])
def test_c017_unaligned_views_and_aligned_clones_by_turns(device, order):
    whole = randn(big(device, 513, 5), 1185, dtype=torch.float16, device=device)
    view, clone = whole[:, 1:782], whole[:, 1:782].clone()
    whole[:, 0], whole[:, 782:] = NAN, NAN
    pair = (view, clone) if order == "view first" else (clone, view)
    with unchanged(view):
        outs = [ktune.softmax(x, -1) for x in (*pair, *pair)]
    for out in outs:
        rule2_softmax(out, clone)
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])


@gpu
def test_c019_row_stride_that_overflows_32_bits(cuda):
    step, n = 67_108_864, 4096
    buffer = torch.full((63 * step + n,), NAN, dtype=torch.bfloat16, device=cuda)
    x = buffer.as_strided((64, n), (step, 1))
    x.copy_(randn(64, n, device=cuda))
    rule2_softmax(ktune.softmax(x, -1), x)
    columns = buffer.as_strided((n, 64), (1, step))
    rule2_softmax(ktune.softmax(columns, 0), columns, 0)


@pytest.mark.parametrize("n", [77, 20_000])
@pytest.mark.parametrize("layout", ["rows", "strided"])
def test_pad_softmax_kernel_stays_inside_its_views(kernels, layout, n):
    """PAD: read nothing of the NaN around the input, and write nothing around the output."""
    problem = parse_problem(f"softmax m=13 n={n} dtype=float32 layout={layout}")
    variant = operation("softmax").default_variant(problem, OWN_DEVICE)
    shape = (13, n) if layout == "rows" else (1, 1, 13, n)
    x, out = framed(randn(*shape, device=kernels), (-1, -2)), torch.zeros(shape, device=kernels)
    out = framed(out, (-1, -2), fill=7.0)
    with unchanged(x):
        load_module(render(variant, problem)).launch(x, out, **variant.options)
    rule2_softmax(out, x)
    whole = raw(out).view(torch.float32)
    assert int((whole == 7.0).sum()) == whole.numel() - out.numel()


# --- attention: masks and layouts -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, "half"], ids=["float32", "half"])
@pytest.mark.parametrize(("sq", "sk"), [(2, 5), (5, 2)])
def test_c050_causal_alignments(device, dtype, sq, sk):
    q, k, v = qkv(2, 3, sq, 64, sk=sk, dtype=dtype, device=device)
    upper, lower = sdpa(q, k, v, is_causal=True), flash(q, k, v, causal=True)
    rule2_attention(upper, q, k, v, "upper_left")
    rule2_attention(lower, q, k, v, "lower_right")
    assert not torch.allclose(upper, lower, atol=0.05)
    _, lse = flash(q, k, v, causal=True, return_lse=True)
    hidden = max(sq - sk, 0)
    assert (lower[:, :, :hidden] == 0).all() and (lse[..., :hidden] == -INF).all()
    assert torch.isfinite(lse[..., hidden:]).all()


def test_c052_prefill_in_chunks_is_one_prefill(device):
    chunks = big(device, (3, 128, 893), (3, 8, 53))
    q, k, v = qkv(1, 4, sum(chunks), 64, device=device)
    parts, end = [], 0
    for chunk in chunks:
        start, end = end, end + chunk
        parts.append(flash(q[:, :, start:end], k[:, :, :end], v[:, :, :end], causal=True))
    rule2_attention(torch.cat(parts, 2), q, k, v, "lower_right")
    rule2_attention(flash(q, k, v, causal=True), q, k, v, "lower_right")


def test_c060_sequences_shorter_than_every_tile(device):
    shapes = [(9, 20, 12), (1, 20, 9)] if device.type == "cuda" else [(2, 2, 12)]
    lengths = range(1, 18) if device.type == "cuda" else (1, 15, 16, 17)
    for b, h, s in [*shapes, *((1, 2, s) for s in lengths)]:
        q, k, v = (framed(t, [2]) for t in qkv(b, h, s, 128, device=device))
        rule2_attention(sdpa(q, k, v), q, k, v)


def test_c061_value_in_another_layout(device):
    h, s, d = big(device, (16, 62, 128), (2, 30, 128))
    q, k, _ = qkv(1, h, s, d, device=device)
    v = randn(1, s, h * d, dtype="half", device=device).view(1, s, h, d).transpose(1, 2)
    same(sdpa, q, k, v)


def test_c063_cut_from_one_packed_tensor(device):
    b, s, h, d = big(device, (2, 500, 4, 64), (2, 20, 2, 64))
    whole = randn(b, s, 3, h, d, dtype="half", device=device)
    out = same(sdpa, *(whole[:, :, i].transpose(1, 2) for i in range(3)))
    assert (out[:, 0] != out[:, 1]).any()


def test_c063_interleaved_grouped_heads(device):
    s, h = big(device, (2048, 16), (20, 4))
    whole = randn(2, s, h + 2, 64, dtype="half", device=device).transpose(1, 2)
    out = same(sdpa, whole[:, :h], whole[:, h : h + 1], whole[:, h + 1 :])
    assert (out[:, 0] != out[:, 1]).any()


@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
def test_c065_inner_stride_that_is_not_one(device, which):
    tensors = qkv(1, 2, big(device, 100, 20), 64, device=device)
    turned = [
        t.mT.contiguous().mT if which in (name, "all") else t
        for name, t in zip("qkv", tensors, strict=True)
    ]
    same(sdpa, *turned)


def test_c068_output_is_laid_out_like_the_query(device):
    b, s, h, d = 2, 33, 4, 64
    q, k, v = (t.transpose(1, 2) for t in qkv(b, s, h, d, device=device))
    out = sdpa(q, k, v)
    rule2_attention(out, q, k, v)
    merged = out.transpose(1, 2).reshape(b, s, h * d)
    assert merged.data_ptr() == out.data_ptr() and merged.is_contiguous()
    assert sdpa(*(t.contiguous() for t in (q, k, v))).is_contiguous()


def test_expanded_and_unaligned_views(device):
    """D11: stride 0, odd row strides and starts off 16 bytes are read in place and right."""
    q, k, v = qkv(2, 4, big(device, 70, 20), 64, device=device)
    same(sdpa, q, k[:, :1].expand(-1, 4, -1, -1), v[:, :1].expand(-1, 4, -1, -1))
    same(sdpa, *(framed(t, [-1]) for t in (q, k, v)))
    same(sdpa, q, k, v)  # after the unaligned views, and never by their kernel


# --- attention: head dims, grouped heads, magnitudes ------------------------------------------


@pytest.mark.parametrize("d", [80, 96])
def test_c070_head_dims_that_are_no_power_of_two(device, d):
    h, s = big(device, (32, 333), (2, 33))
    q, k, v = (framed(t, [2]) for t in qkv(1, h, s, d, device=device))
    rule2_attention(sdpa(q, k, v, is_causal=True), q, k, v, "upper_left")
    last = q[:, :, -1:]
    rule2_attention(sdpa(last, k, v), last, k, v)
    q, k, v = (framed(t, [3]) for t in (q, k, v))  # NaN right beside the last column
    rule2_attention(sdpa(q, k, v, is_causal=True), q, k, v, "upper_left")


def test_c072_all_128_channels_count(device):
    q, k, v = qkv(*big(device, (3, 2, 2048), (1, 2, 40)), 128, device=device)
    for t in (q, k, v):
        t[..., :64] = 0
    out = sdpa(q, k, v)
    rule2_attention(out, q, k, v)
    assert (out[..., :64] == 0).all() and (out[..., 64:] != 0).any()


def test_c074_head_dims_256_and_512_by_turns(device):
    s = big(device, 150, 20)
    wide, wider = (qkv(1, 2, s, d, device=device) for d in (256, 512))
    for _ in range(2):
        rule2_attention(sdpa(*wide), *wide)
        with pytest.raises(ArgumentError, match="query has head_dim 512; expected at most 256"):
            sdpa(*wider)
        with pytest.raises(ArgumentError, match="q has head_dim 512; expected at most 256"):
            flash(*wider)


@pytest.mark.parametrize(
    ("h", "kv", "sq", "sk", "d"),
    [(9, 3, 5, 5, 64), (12, 2, 1, 4096, 16), (28, 4, 19, 19, 64), (14, 2, 5, 5, 64)],
)
def test_c076_head_ratios_that_are_no_power_of_two(device, h, kv, sq, sk, d):
    q, k, v = qkv(2, h, sq, d, sk=big(device, sk, min(sk, 300)), kv=kv, device=device)
    rule2_attention(sdpa(q, k, v), q, k, v)
    rule2_attention(flash(q, k, v), q, k, v)


@pytest.mark.parametrize(("d", "dv"), [(192, 128), (64, 128)])
def test_c079_values_of_another_head_dim(device, d, dv):
    q, k, v = qkv(1, 2, 33, d, device=device)
    v = randn(1, 2, 33, dv, dtype="half", device=device)
    rule2_attention(sdpa(q, k, v, is_causal=True), q, k, v, "upper_left")


def test_c080_huge_magnitudes_are_exact(device):
    huge, dtype = big(device, 133_120.0, 60_000.0), half(device)
    for sk in (1, 70):
        q = torch.full((1, 1, 1, 64), huge, dtype=dtype, device=device)
        k = q.expand(1, 1, sk, 64).contiguous()
        out, lse = sdpa(q, k, k, return_lse=True)
        assert torch.equal(out, q) and torch.isfinite(lse).all()


@contextmanager
def float32_products(precision):
    """Within, PyTorch's own switch has this value."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


def test_c083_float32_products_are_ieee_unless_allowed(device):
    q, k, v = qkv(1, 1, 128, 32, dtype=torch.float32, device=device)
    truth, _ = plain_attention(q, k, v)

    def error():
        return float((sdpa(q, k, v) - truth).abs().max())

    assert error() < 1e-5
    with float32_products("ieee"):
        assert error() < 1e-5
    if device.type == "cuda":
        with float32_products("tf32"):
            assert 1e-5 < error() < 1e-2, "TF32 was allowed, and shows"
        assert [p["tf32"] for p, _ in dispatcher()._bound] == [False, True]
        assert error() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, "half"], ids=["float32", "half"])
def test_c089_lse_is_a_natural_logarithm_and_merges(device, dtype):
    s = big(device, 300, 40)
    q, k, v = qkv(2, 4, s, 64, kv=2, dtype=dtype, device=device)
    truth, right = plain_attention(q, k, v)
    whole, lse = sdpa(q, k, v, return_lse=True)
    assert lse.dtype == torch.float32 and lse.shape == q.shape[:3]
    torch.testing.assert_close(lse.double(), right.double(), atol=1e-5, rtol=1e-5)
    cut = s // 3
    halves = [sdpa(q, k[:, :, p], v[:, :, p], return_lse=True) for p in (_to(cut), _from(cut))]
    both = torch.stack([part for _, part in halves])
    torch.testing.assert_close(both.logsumexp(0), lse, atol=1e-5, rtol=1e-5)
    weights = both.softmax(0)[..., None]
    merged = sum(w * out.float() for w, (out, _) in zip(weights, halves, strict=True))
    eager, _ = plain_attention(q, k, v, q.dtype)
    rule2(merged, truth, eager, factor=3.0)  # each half was rounded once
    rule2(whole, truth, eager)


def _to(end):
    return slice(None, end)


def _from(start):
    return slice(start, None)


@pytest.mark.parametrize("call", [sdpa, flash], ids=["sdpa", "flash"])
def test_c092_empty_batches_queries_and_keys(device, call):
    causal = {sdpa: "is_causal", flash: "causal"}[call]
    for masked in (False, True):
        q = randn(2, 3, 5, 64, device=device)
        none = q[:, :, :0]
        out, lse = call(q, none, none, return_lse=True, **{causal: masked})
        assert out.shape == q.shape and (out == 0).all()
        assert lse.shape == q.shape[:3] and (lse == -INF).all()
        assert call(none, q, q, **{causal: masked}).shape == none.shape
        assert call(q[:0], q[:0], q[:0], **{causal: masked}).shape == q[:0].shape
    rule2_attention(call(q, q, q), q, q, q)


@gpu
@pytest.mark.parametrize(
    ("shape", "keys"),
    [((1, 65_536, 10, 16), 10), ((65_536, 1, 8, 16), 8), ((70_000, 1, 1, 16), 20)],
    ids=["heads", "batch", "decode"],
)
def test_c100_more_than_65535_heads_or_sequences(cuda, shape, keys):
    b, h, s, d = shape
    q, k, v = qkv(b, h, s, d, sk=keys, device=cuda)
    rule2_attention(sdpa(q, k, v), q, k, v)


@gpu
def test_c100_more_than_65535_rows_of_softmax(cuda):
    for shape, dim in (((70_000, 3, 5), 1), ((3, 70_000, 5), 0), ((200_000, 17), 1)):
        x = randn(*shape, device=cuda)
        rule2_softmax(ktune.softmax(x, dim), x, dim)


@gpu
def test_c103_offsets_beyond_two_to_the_31(cuda):
    q = randn(1, 1, 64, 128, dtype=torch.bfloat16, device=cuda)
    k, v = (randn(1, 262_145, 64, 128, dtype=torch.bfloat16, device=cuda) for _ in range(2))
    out = ktune.flash_attention(q, k, v)
    for head in (0, 31, 63):
        parts = [t[:, :, head : head + 1].transpose(1, 2) for t in (out, q, k, v)]
        rule2_attention(*parts)


# --- contract ---------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", ["none", "upper_left", "lower_right"])
def test_d15_repeat_calls_are_bit_identical(device, causal):
    q, k, v = qkv(2, 4, big(device, 777, 33), 64, kv=2, device=device)
    call = flash if causal == "lower_right" else sdpa
    options = {"lower_right": {"causal": True}, "upper_left": {"is_causal": True}}.get(causal, {})
    with unchanged(q, k, v):
        outs = [call(q, k, v, return_lse=True, **options) for _ in range(5)]
    for out, lse in outs:
        assert torch.equal(out, outs[0][0]) and torch.equal(lse, outs[0][1])


@pytest.mark.parametrize("causal", [False, True])
def test_c158_gradients(device, causal):
    tensors = qkv(1, 2, big(device, 130, 20), 64, dtype=torch.float32, device=device)
    weight = randn(*tensors[0].shape, device=device)
    alignment = "upper_left" if causal else "none"

    def gradients(function, *inputs):
        inputs = [t.detach().requires_grad_() for t in inputs]
        out = function(*inputs)
        assert out.grad_fn is not None
        return torch.autograd.grad((out * weight).sum(), inputs)

    found = gradients(lambda q, k, v: sdpa(q, k, v, is_causal=causal), *tensors)
    wide = [t.double() for t in tensors]
    truth = gradients(lambda q, k, v: plain_attention(q, k, v, causal=alignment)[0], *wide)
    for got, right in zip(found, truth, strict=True):
        torch.testing.assert_close(got, right.float(), atol=2e-3, rtol=2e-3)
    q, k, v = tensors
    q.requires_grad_()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert not sdpa(q, k, v, is_causal=causal).requires_grad


def test_c158_gradients_of_softmax(device):
    x = randn(3, 40, 5, device=device).requires_grad_()
    weight = randn(3, 40, 5, device=device)
    out = ktune.softmax(x, 1)
    assert out.grad_fn is not None
    (got,) = torch.autograd.grad((out * weight).sum(), x)
    (right,) = torch.autograd.grad((x.softmax(1) * weight).sum(), x)
    torch.testing.assert_close(got, right)


def test_c161_dtypes(device):
    q, k, v = qkv(1, 2, 9, 64, dtype=torch.float16, device=device)
    with pytest.raises(ArgumentTypeError, match="key has dtype bfloat16; expected float16"):
        sdpa(q, k.bfloat16(), v)
    for dtype in (torch.int64, torch.complex64, torch.float8_e4m3fn):
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(ArgumentTypeError, match=f"input has dtype {name}"):
            ktune.softmax(torch.zeros(2, 3, device=device).to(dtype), -1)
        with pytest.raises(ArgumentTypeError, match=f"query has dtype {name}"):
            sdpa(*(t.to(dtype) for t in (q, k, v)))
    x = randn(4, 9, dtype=torch.float64, device=device)
    torch.testing.assert_close(ktune.softmax(x, -1), x.softmax(-1))
    assert sdpa(*(t.double() for t in (q, k, v))).dtype == torch.float64
    rule2_attention(sdpa(q, k, v), q, k, v)


@gpu
def test_mixed_devices(cuda):
    q, k, v = qkv(1, 2, 9, 64, device=cuda)
    with pytest.raises(ArgumentError, match="key is on cpu; expected cuda:0, as query"):
        sdpa(q, k.cpu(), v)
    rule2_attention(sdpa(q, k, v), q, k, v)


# --- rescale strategies -----------------------------------------------------------------------

SOFTMAX_STRATEGIES = list(load_space("softmax").strategies)
ATTENTION_STRATEGIES = list(load_space("attention").strategies)


def check_strategy(strategy, problem, cuda):
    """Check one strategy on the small problems of a problem, with every distribution."""
    op, there = operation(problem.op), device_of(cuda.index)
    variant = load_space(op.name).complete(strategy, problem, there)
    for small in op.proving(problem):
        module = load_module(render(variant, small))
        for distribution in op.distributions:
            case = make_case(small, distribution, cuda)
            verdict = check_module(module, variant.options, case)
            assert verdict.passed, f"{variant.text}: {verdict.detail}"
    return variant


@gpu
@pytest.mark.parametrize("name", SOFTMAX_STRATEGIES)
@pytest.mark.parametrize("layout", ["rows", "strided"])
def test_softmax_strategies(cuda, name, layout):
    strategy = load_space("softmax").strategy(name)
    if layout == "strided" and "lanes" in strategy:
        pytest.skip("lanes are for rows")
    problem = parse_problem(f"softmax m=64 n=5000 dtype=float16 layout={layout}")
    check_strategy(strategy, problem, cuda)


@gpu
@pytest.mark.parametrize("name", ATTENTION_STRATEGIES)
@pytest.mark.parametrize("causal", ["none", "lower_right"])
def test_attention_strategies(cuda, name, causal):
    strategy = load_space("attention").strategy(name)
    text = f"attention heads=4 heads_kv=2 seqlen_q=512 head_dim=64 causal={causal} return_lse=true"
    problem = parse_problem(text)
    variant = check_strategy(strategy, problem, cuda)
    module = load_module(render(variant, problem))
    q = torch.full((1, 1, 1, 64), 133_120.0, dtype=torch.bfloat16, device=cuda)  # C080
    out, lse = torch.full_like(q, NAN), torch.empty(1, 1, 1, device=cuda)
    module.launch(q, q, q, out, lse, 0.125, **variant.options)
    assert torch.equal(out, q)


@gpu
@pytest.mark.parametrize("name", ["fa2", "fa4_row", "fa4_tile"])
def test_attention_strategies_with_descriptors(cuda, name):
    if device_of(cuda.index).capability < 90:
        pytest.skip("descriptors need the TMA unit of sm_90 and later")
    strategy = {**load_space("attention").strategy(name), "load": "descriptor"}
    problem = parse_problem("attention heads=2 seqlen_q=512 head_dim=128 dtype=float16")
    check_strategy(strategy, problem, cuda)


@pytest.mark.parametrize("layout", ["aligned", "strided"])
def test_pad_attention_kernel_stays_inside_its_views(kernels, layout):
    """PAD: read nothing of the NaN around the inputs, and write nothing around the output."""
    d = 80 if layout == "aligned" else 20
    dtype = str(half(kernels)).removeprefix("torch.")
    text = f"attention heads=2 seqlen_q=37 head_dim={d} layout={layout} dtype={dtype}"
    problem = parse_problem(text)
    variant = operation("attention").default_variant(problem, OWN_DEVICE)
    dims = [2] if layout == "aligned" else [2, 3]
    q, k, v = (framed(t, dims) for t in qkv(1, 2, 37, d, device=kernels))
    out = framed(torch.zeros_like(q), dims, fill=7.0)
    with unchanged(q, k, v):
        load_module(render(variant, problem)).launch(q, k, v, out, None, d**-0.5, **variant.options)
    rule2_attention(out, q, k, v)
    whole = raw(out).view(out.dtype)
    assert int((whole == 7.0).sum()) == whole.numel() - out.numel()


# --- dispatch and the process around it -------------------------------------------------------


@pytest.fixture
def no_shipped_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "data", lambda kind: tmp_path / "none" / kind)


def used():
    return list(dispatcher()._bound.values())[-1].match


def test_c138_few_rows_never_stand_for_many(kernels, no_shipped_tables, tmp_path, monkeypatch):
    there, path = dispatch.device_at(big(kernels, 0, where.STAND_IN)), tmp_path / "table.json"
    op = operation("softmax")
    numbers = Provenance(0.1, 0.0, 0.2, 0.5, False, 9, "test", "2026-01-31", 3)
    entries = []
    for m in (1, 2, 4, 8):
        problem = op.problem({"m": m, "n": 100, "dtype": "float32"})
        values = {**op.default_variant(problem, there).values, "block_m": 1, "num_warps": 2}
        variant = op.default_variant(problem, there).of("softmax", values)
        entries.append(Entry(there.key, problem, variant, render(variant, problem).id, numbers))
    update_table(path, entries)
    monkeypatch.setenv("KTUNE_TABLE_PATH", str(path))
    for m, kind in ((8, "exact"), (7, "bucket"), (big(kernels, 2048, 40), "default"), (8192, "")):
        if kind:
            x = randn(m, 100, device=kernels)
            rule2_softmax(ktune.softmax(x, -1), x)
            assert used().kind == kind
    problem = op.problem({"m": 8192, "n": 100, "dtype": "float32"})
    match = dispatcher().match(problem, there)
    assert match.kind == "default" and match.variant == op.default_variant(problem, there)


def test_c140_no_entry_is_one_warning_in_100_calls(kernels, no_shipped_tables, caplog):
    x = randn(3, 50, device=kernels)
    q, k, v = qkv(1, 2, 9, 64, device=kernels)
    for _ in range(big(kernels, 100, 5)):
        rule2_softmax(ktune.softmax(x, -1), x)
        rule2_attention(sdpa(q, k, v), q, k, v)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "no entry for softmax m=3 n=50 dtype=float32 layout=rows" in warnings[0]
    assert 'ktune search softmax --problem "m=3 n=50' in warnings[0]


@gpu
def test_c152_cold_call_in_a_capture_leaves_the_stream_usable(cuda):
    x = randn(32, 123, device=cuda)
    q, k, v = qkv(1, 2, 35, 64, device=cuda)
    for call in (lambda: ktune.softmax(x, -1), lambda: sdpa(q, k, v)):
        with pytest.raises(CaptureError, match="before the capture"):  # noqa: SIM117
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                _ = x * 2  # something is captured
                call()
        torch.cuda.synchronize()
    rule2_softmax(ktune.softmax(x, -1), x)
    rule2_attention(sdpa(q, k, v), q, k, v)


@gpu
def test_c152_replay_gives_the_result_of_the_new_inputs(cuda):
    x = randn(32, 123, dtype=torch.bfloat16, device=cuda)
    q, k, v = qkv(2, 4, 200, 64, kv=2, device=cuda)

    def calls():
        return ktune.softmax(x, -1), sdpa(q, k, v, is_causal=True), flash(q, k, v, return_lse=True)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, masked, (out, lse) = calls()
    for _ in range(3):
        for t in (x, q, k, v):
            t.copy_(torch.randn_like(t))
        graph.replay()
        torch.cuda.synchronize()
        rule2_softmax(rows, x)
        rule2_attention(masked, q, k, v, "upper_left")
        rule2_attention(out, q, k, v)
        right = plain_attention(q, k, v)[1]
        torch.testing.assert_close(lse.double(), right, atol=1e-5, rtol=1e-5)


IMPORT_AND_FORK = """
import os, torch, ktune
from ktune.runtime.dispatch import dispatcher

def works():
    x = torch.randn(5, 70, device="cuda")
    return torch.allclose(ktune.softmax(x, -1), x.softmax(-1), atol=1e-6)

dispatcher()._tables()
ktune.softmax(torch.zeros(2, 3), -1)
assert not torch.cuda.is_initialized(), "CUDA was initialised"
child = os.fork()
if child == 0:
    code = 1
    try:
        code = 0 if works() else 2
    finally:
        os._exit(code)
assert os.waitpid(child, 0)[1] == 0, "the forked child failed"
assert works()
"""


@gpu
def test_c155_import_does_not_start_cuda_and_fork_works(cuda):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", IMPORT_AND_FORK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@gpu
def test_streams(cuda):
    """A call on a stream of the user's is ordered after the work before it there."""
    x, side = torch.zeros(4096, 4096, device=cuda), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x.copy_(torch.randn_like(x))
        out = ktune.softmax(x, -1)
    side.synchronize()
    rule2_softmax(out, x)


# --- search and measurement -------------------------------------------------------------------

TIGHT_SPACE = """
schema: 1
operation: attention
summary: Most of it exceeds shared memory.
parameters:
  template: {choices: [forward]}
  load: {choices: [pointer]}
  normalization: {choices: [deferred]}
  rescale: {choices: [always]}
  tile_order: {choices: [sequential]}
  block_m: {choices: [64]}
  block_n: {choices: [128, 32]}
launch:
  num_warps: {choices: [4]}
  num_stages: {choices: [2, 4, 5, 6]}
constraints:
  - {require: (block_n == 32) == (num_stages == 2), because: the default and three that are large}
problems:
  default:
    - {heads: 2, seqlen_q: 333, head_dim: 256, return_lse: true}
budget: {trials: 4, timeout_s: 200}
"""

WILD = """
import torch, triton
import triton.language as tl
from types import SimpleNamespace
from ktune.bench import gate, tasks

REAL = gate.load_module

@triton.jit
def wild_read(x, out):
    tl.store(out, tl.load(x + (tl.cast(1, tl.int64) << 44)))

def launch(x, out, **options):
    wild_read[(1,)](x, out)

def measure(problem, variant, *rest):
    wild = "block_m=2 " in variant
    gate.load_module = (lambda source: SimpleNamespace(launch=launch)) if wild else REAL
    return tasks.measure_variant(problem, variant, *rest)
"""


@pytest.fixture
def live(cuda, tmp_path, monkeypatch):
    """A live target whose worker can be made to run a variant that reads out of bounds."""
    from ktune.target import live

    (tmp_path / "wild_variant.py").write_text(WILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.zeros(1, device=cuda)  # CUDA runs in this process before workers are started
    found = live.LiveTarget([f"cuda:{cuda.index}"], compilers=4)
    yield SimpleNamespace(target=found, module=live)
    found.close()


@gpu
def test_c110_search_ends_with_a_winner_where_most_exceed_shared_memory(live):
    from ktune.search.trials.storage import open_storage

    space = parse_space(TIGHT_SPACE, "tight.yaml")
    (problem,) = space.problem_set()
    default = space.operation.default_variant(problem, live.target.device)
    outcome = one_search(space, problem, live.target, open_storage("memory"), 4)
    statuses = sorted(m.status for m in outcome.measurements.values())
    assert statuses == ["ok", "over_limit", "over_limit", "over_limit"]
    assert outcome.best()[0][0] == default.text and outcome.best()[0][1].latency_ms > 0


@gpu
def test_c117_out_of_bounds_read_costs_one_trial(live, monkeypatch):
    monkeypatch.setattr(live.module, "MEASURE", "wild_variant:measure")
    problem = parse_problem("softmax m=1024 n=512")
    default = operation("softmax").default_variant(problem, live.target.device)
    texts = {m: default.of("softmax", {**default.values, "block_m": m}) for m in (1, 2, 4)}
    outcomes = {}
    for m, variant in texts.items():
        live.target.submit(problem, variant)
        outcomes[m] = live.target.next()[2]
    assert {m: o.status for m, o in outcomes.items()} == {1: "ok", 2: "crashed", 4: "ok"}
    assert torch.ones(3, device="cuda").sum().item() == 3.0, "this process was never touched"


@gpu
def test_c117_worker_with_a_sticky_error_is_replaced(cuda, tmp_path, monkeypatch):
    (tmp_path / "wild_variant.py").write_text(WILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = Worker({"TRITON_INTERPRET": "0"})
    problem, bad = "softmax m=64 n=64", "one_tile block_m=2 eviction=none num_warps=1"
    try:
        with pytest.raises(WorkerDied):
            worker.call("wild_variant:measure", problem, bad, "cuda:0", timeout_s=60)
        good = bad.replace("block_m=2", "block_m=4")
        found = worker.call("wild_variant:measure", problem, good, "cuda:0", timeout_s=60)
        assert found["status"] == "ok"
    finally:
        worker.kill()


@gpu
def test_timer_gives_a_plausible_bandwidth(cuda):
    properties = torch.cuda.get_device_properties(cuda)
    peak = 2e3 * properties.memory_clock_rate * properties.memory_bus_width / 8 / 1e9
    rate = copy_bandwidth(Timer(device_of(cuda.index), cuda.index), cuda.index)
    assert 0.4 * peak < rate < 1.05 * peak, (rate, peak)


@gpu
def test_timer_interleaves_and_pairs(cuda):
    timer = Timer(device_of(cuda.index), cuda.index)
    source = torch.ones(1 << 28, dtype=torch.uint8, device=cuda)
    target = torch.empty_like(source)
    quarter = source.numel() // 4
    calls = [lambda: target.copy_(source), lambda: target[:quarter].copy_(source[:quarter])]
    whole, part = timer.interleave(calls, 12)
    assert len(whole.samples) == len(part.samples) == 12
    assert all(a > b > 0 for a, b in zip(whole.samples, part.samples, strict=True))
    assert 2.5 < whole.latency_ms / part.latency_ms < 5.0
    alone = timer.time(calls[0])
    assert alone.latency_ms == pytest.approx(whole.latency_ms, rel=0.2)
