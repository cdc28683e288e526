"""Softmax over the last dimension: each row is held whole in one tile and read once.

Rendered by ktune from templates/softmax/one_tile.py.jinja. Do not edit.

Parameters:
    block_m=4
    eviction=evict_first
Structure:
    even_n=false
    layout=strided
    row_block=1024
"""

import torch
import triton
import triton.language as tl

# Configuration
BLOCK_M: tl.constexpr = tl.constexpr(4)  # rows per program
BLOCK_N: tl.constexpr = tl.constexpr(1024)  # columns of the tile, at least a whole row
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


@triton.jit
def online_update(m_i, l_i, s, scale_log2):
    """Take in a tile of scores; the reference of a row is its maximum so far."""
    m_new = tl.maximum(m_i, tl.max(s, axis=1))
    alpha = online_alpha(m_i, m_new, scale_log2)
    p = online_exp(s, m_new[:, None], scale_log2)
    l_new = l_i * alpha + tl.sum(p, axis=1)
    moved = m_new > m_i
    return p, m_new, l_new, alpha, moved


@triton.jit
def online_rescale(acc, alpha, moved):
    """Refer an accumulator to the new reference."""
    return acc * alpha[:, None]


@triton.jit(do_not_specialize=["b", "m"])
def softmax_one_tile(
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
    cols = tl.arange(0, BLOCK_N).to(tl.int64)
    x_tile = x_ptr + ia * stride_xa + ib * stride_xb
    x_tile = x_tile + rows[:, None] * stride_xm + cols[None, :] * stride_xn
    out_tile = out_ptr + ia * stride_oa + ib * stride_ob
    out_tile = out_tile + rows[:, None] * stride_om + cols[None, :] * stride_on
    mask = (rows[:, None] < m) & (cols[None, :] < n)
    s = tl.load(x_tile, mask=mask, other=float("-inf"), eviction_policy="evict_first")
    m_i, l_i = online_start(BLOCK_M)
    p, _m, l_i, _alpha, _moved = online_update(m_i, l_i, s.to(tl.float32), LOG2E)
    # A row that is all -inf gives 0 * inf, NaN, as in torch.
    p = p * (1.0 / l_i)[:, None]
    tl.store(out_tile, p.to(out_ptr.dtype.element_ty), mask=mask)


def launch(x: torch.Tensor, out: torch.Tensor, **options: int) -> None:
    """Write the softmax of ``x`` [a, b, m, n] to ``out``; both have any strides."""
    a, b, m, n = x.shape
    if x.numel() == 0:
        return
    grid = (a * b * triton.cdiv(m, BLOCK_M.value),)
    softmax_one_tile[grid](x, *x.stride(), out, *out.stride(), b, m, n, **options)
