"""Attention with an online softmax, forward.

Rendered by ktune from templates/attention/forward.py.jinja. Do not edit.

Parameters:
    block_m=64
    block_n=64
    load=descriptor
    normalization=deferred
    rescale=conditional
    rescale_granularity=tile
    rescale_threshold=8.0
    tile_order=sequential
Structure:
    block_d=64
    causal=none
    count_rescales=false
    head_dim=64
    input_precision=ieee
    return_lse=false
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# Configuration
BLOCK_M: tl.constexpr = tl.constexpr(64)  # query rows per program
BLOCK_N: tl.constexpr = tl.constexpr(64)  # keys per tile
BLOCK_D: tl.constexpr = tl.constexpr(64)  # columns of a tile
INPUT_PRECISION: tl.constexpr = tl.constexpr("ieee")  # of float32 products


@triton.jit
def online_start(rows: tl.constexpr):
    """Return the state of rows of which nothing was seen yet."""
    m_i = tl.full([rows], float("-inf"), tl.float32)
    l_i = tl.zeros([rows], tl.float32)
    return m_i, l_i


@triton.jit
def online_reference(m, scale_log2):
    """Return ``m`` scaled, and the scale: what every exponent of a row is referred to.

    A reference of -inf stands for nothing seen yet and counts as 0, so that no NaN arises. From
    2**27 on, the rounding of ``m * scale`` would show in the exponent, while scores that differ
    at all differ by more than an exponential can tell: there the scale is cut to a power of two,
    which makes the product exact and the largest exponent 0.
    """
    scale = tl.zeros_like(m) + scale_log2
    power = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(tl.abs(m * scale) < 134217728.0, scale, power)
    # The choice comes after the product, so that the product is rounded wherever it is used: a
    # multiply-add of it would refer alpha to another value than p (see online_alpha).
    return tl.where(m == float("-inf"), 0.0, m * scale), scale


@triton.jit
def online_exp(x, m, scale_log2):
    """Return the exponential of ``x`` referred to the maximum ``m``; one multiply-add a score."""
    reference, scale = online_reference(m, scale_log2)
    return tl.exp2(x * scale - reference)


@triton.jit
def online_alpha(m_old, m_new, scale_log2):
    """Return what takes a state from one reference to another; exactly 1 where they are equal.

    Both are rounded as ``online_exp`` rounds them. With the old one's product unrounded, alpha
    was off by the rounding at every tile: by 0.1 % for scores about 2**14, by half from 2**20 on.
    """
    reference, scale = online_reference(m_new, scale_log2)
    old = tl.where(m_old == float("-inf"), float("-inf"), m_old * scale)
    return tl.exp2(old - reference)


RESCALE_THRESHOLD: tl.constexpr = tl.constexpr(8.0)  # log2 units


@triton.jit
def online_update(m_i, l_i, s, scale_log2):
    """Take in a tile of scores; if one row's maximum rose by enough, all references move.

    The rise above a reference of -inf is infinite, so the first visible score always moves it.
    """
    m_top = tl.maximum(m_i, tl.max(s, axis=1))
    rose = (m_top - m_i) * scale_log2 > RESCALE_THRESHOLD
    moved = tl.max(rose.to(tl.int32), axis=0) > 0
    m_new = tl.where(moved, m_top, m_i)
    alpha = online_alpha(m_i, m_new, scale_log2)
    p = online_exp(s, m_new[:, None], scale_log2)
    l_new = l_i * alpha + tl.sum(p, axis=1)
    return p, m_new, l_new, alpha, moved


@triton.jit
def online_rescale(acc, alpha, moved):
    """Refer an accumulator to the new reference; skip the work if no row moved."""
    if moved:
        acc = acc * alpha[:, None]
    return acc


@triton.jit
def online_finish(acc, l_i, dtype: tl.constexpr):
    """Divide an accumulator by its row sums; a row that saw nothing gives 0.

    Only the sum tells an empty row: a NaN score leaves the sum NaN, and the row is NaN. An exact
    division is slow, and shows in float32 results alone.
    """
    out = acc * (1.0 / l_i)[:, None]
    if dtype == tl.float32:
        out = tl.div_rn(acc, l_i[:, None])
    return tl.where(l_i[:, None] == 0.0, 0.0, out).to(dtype)


@triton.jit(do_not_specialize=["num_heads", "group", "seqlen_q", "seqlen_k"])
def attention_forward(
    q_desc, k_desc, v_desc, out_desc,
    num_heads, group, seqlen_q, seqlen_k, scale_log2,
):  # fmt: skip
    """Write ``BLOCK_M`` rows of the output of one head; ``group`` heads share keys and values."""
    pid = tl.program_id(0)
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    batch_head = pid // num_tiles
    start_m = pid % num_tiles * BLOCK_M
    batch = batch_head // num_heads
    head = batch_head % num_heads
    kv_head = head // group

    q = q_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, BLOCK_D)

    full_end = seqlen_k // BLOCK_N * BLOCK_N
    end = seqlen_k

    m_i, l_i = online_start(BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Tiles that all rows see whole.
    for start_n in tl.range(0, full_end, BLOCK_N):
        k = k_desc.load([batch, kv_head, start_n, 0]).reshape(BLOCK_N, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)
        p, m_new, l_new, alpha, moved = online_update(m_i, l_i, s, scale_log2)
        acc = online_rescale(acc, alpha, moved)
        v = v_desc.load([batch, kv_head, start_n, 0]).reshape(BLOCK_N, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=INPUT_PRECISION)
        m_i = m_new
        l_i = l_new

    # The ragged end.
    for start_n in tl.range(full_end, end, BLOCK_N):
        k = k_desc.load([batch, kv_head, start_n, 0]).reshape(BLOCK_N, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)
        offs_n = start_n + tl.arange(0, BLOCK_N)
        s = tl.where(offs_n[None, :] < seqlen_k, s, float("-inf"))
        p, m_new, l_new, alpha, moved = online_update(m_i, l_i, s, scale_log2)
        acc = online_rescale(acc, alpha, moved)
        v = v_desc.load([batch, kv_head, start_n, 0]).reshape(BLOCK_N, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=INPUT_PRECISION)
        m_i = m_new
        l_i = l_new

    dtype: tl.constexpr = out_desc.dtype
    out = online_finish(acc, l_i, dtype)
    out_desc.store([batch, head, start_m, 0], out.reshape(1, 1, BLOCK_M, BLOCK_D))


def describe(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """Describe tiles of ``rows`` rows; what lies outside of a head reads as 0 and is not written.

    The stride of a dimension of size 1 never matters, but it must be a legal one.
    """
    shape = list(tensor.shape)
    strides = [BLOCK_D.value if shape[i] == 1 else tensor.stride(i) for i in range(3)]
    return TensorDescriptor(tensor, shape, [*strides, 1], [1, 1, rows, BLOCK_D.value])


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: None,
    scale: float,
    **options: int,
) -> None:
    """Write the attention of ``q`` [b, h, sq, d] over ``k`` and ``v`` [b, hkv, sk, d] to ``out``.

    All have an inner stride of 1; ``scale`` is positive. A row that sees no key gives 0.
    """
    batch, num_heads, seqlen_q, _ = q.shape
    seqlen_k = k.shape[2]
    if out.numel() == 0:
        return
    if seqlen_k == 0:
        out.zero_()
        return
    grid = (batch * num_heads * triton.cdiv(seqlen_q, BLOCK_M.value),)
    attention_forward[grid](
        describe(q, BLOCK_M.value),
        describe(k, BLOCK_N.value),
        describe(v, BLOCK_N.value),
        describe(out, BLOCK_M.value),
        num_heads, num_heads // k.shape[1], seqlen_q, seqlen_k, scale * 1.4426950408889634,
        **options,
    )  # fmt: skip
