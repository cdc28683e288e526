"""Softmax over the last dimension: rows of any length, read in tiles with an online state.

Rendered by ktune from templates/softmax/streaming.py.jinja. Do not edit.

Parameters:
    block_m=8
    block_n=4096
    eviction=none
    loop_stages=1
    rescale=conditional
    rescale_granularity=row
    rescale_threshold=8.0
    second_pass=forward
Structure:
    even_n=false
    layout=strided
    row_block=65536
"""

import torch
import triton
import triton.language as tl

# Configuration
BLOCK_M: tl.constexpr = tl.constexpr(8)  # rows per program
BLOCK_N: tl.constexpr = tl.constexpr(4096)  # columns per tile
LOOP_STAGES: tl.constexpr = tl.constexpr(1)  # tiles in flight
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)  # exp(x) is exp2(x * LOG2E)


@triton.jit
def online_start(rows: tl.constexpr):
    """Return the state of rows of which nothing was seen yet."""
    m_i = tl.full([rows], float("-inf"), tl.float32)
    l_i = tl.zeros([rows], tl.float32)
    return m_i, l_i


@triton.jit
def online_exp(x, m, scale_log2):
    """Return the exponential of ``x`` referred to the maximum ``m``.

    Subtracting before scaling keeps the largest exponent exactly 0, however large the scores. A
    reference of -inf stands for nothing seen yet and counts as 0, so that no NaN arises.
    """
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    return tl.exp2((x - m_safe) * scale_log2)


@triton.jit
def online_alpha(m_old, m_new, scale_log2):
    """Return what takes a state from one reference to another; exactly 1 where they are equal."""
    return online_exp(m_old, m_new, scale_log2)


RESCALE_THRESHOLD: tl.constexpr = tl.constexpr(8.0)  # log2 units


@triton.jit
def online_update(m_i, l_i, s, scale_log2):
    """Take in a tile of scores; a row's reference moves only if its maximum rose by enough.

    The rise above a reference of -inf is infinite, so the first visible score always moves it.
    """
    m_top = tl.maximum(m_i, tl.max(s, axis=1))
    moved = (m_top - m_i) * scale_log2 > RESCALE_THRESHOLD
    m_new = tl.where(moved, m_top, m_i)
    alpha = online_alpha(m_i, m_new, scale_log2)
    p = online_exp(s, m_new[:, None], scale_log2)
    l_new = l_i * alpha + tl.sum(p, axis=1)
    return p, m_new, l_new, alpha, moved


@triton.jit
def online_rescale(acc, alpha, moved):
    """Refer an accumulator to the new reference; ``alpha`` is 1 in a row that did not move."""
    return acc * alpha[:, None]


@triton.jit(do_not_specialize=["b", "m"])
def softmax_streaming(
    x_ptr, stride_xa, stride_xb, stride_xm, stride_xn,
    out_ptr, stride_oa, stride_ob, stride_om, stride_on,
    b, m, n,
):  # fmt: skip
    """Write the softmax of ``BLOCK_M`` rows."""
    pid = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(m, BLOCK_M)
    batch = pid // tiles
    ia = batch // b
    ib = batch % b
    rows = pid % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    x_tile = x_ptr + ia * stride_xa + ib * stride_xb + rows[:, None] * stride_xm
    out_tile = out_ptr + ia * stride_oa + ib * stride_ob + rows[:, None] * stride_om
    row_mask = rows[:, None] < m
    m_i, l_i = online_start(BLOCK_M)

    for start in tl.range(0, n, BLOCK_N, num_stages=LOOP_STAGES):
        mask = row_mask & (start + cols < n)
        x_cols = x_tile + (start + cols) * stride_xn
        s = tl.load(x_cols, mask=mask, other=float("-inf")).to(tl.float32)
        _p, m_i, l_i, _alpha, _moved = online_update(m_i, l_i, s, LOG2E)

    # A row that is all -inf gives 0 * inf, NaN, as in torch.
    m_row = m_i[:, None]
    inverse = (1.0 / l_i)[:, None]
    for start in tl.range(0, n, BLOCK_N, num_stages=LOOP_STAGES):
        mask = row_mask & (start + cols < n)
        x_cols = x_tile + (start + cols) * stride_xn
        out_cols = out_tile + (start + cols) * stride_on
        s = tl.load(x_cols, mask=mask, other=float("-inf"))
        p = online_exp(s.to(tl.float32), m_row, LOG2E) * inverse
        tl.store(out_cols, p.to(out_ptr.dtype.element_ty), mask=mask)


def launch(x: torch.Tensor, out: torch.Tensor, **options: int) -> None:
    """Write the softmax of ``x`` [a, b, m, n] to ``out``; both have any strides."""
    a, b, m, n = x.shape
    if x.numel() == 0:
        return
    grid = (a * b * triton.cdiv(m, BLOCK_M.value),)
    softmax_streaming[grid](x, *x.stride(), out, *out.stride(), b, m, n, **options)
