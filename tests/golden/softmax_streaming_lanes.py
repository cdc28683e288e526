"""Softmax over the last dimension: rows of any length, read in tiles with an online state.

Rendered by ktune from templates/softmax/streaming.py.jinja. Do not edit.

Parameters:
    block_n=4096
    eviction=none
    lanes=512
    loop_stages=1
    rescale=always
    second_pass=reverse
Structure:
    even_n=false
    layout=rows
    row_block=65536
"""

import torch
import triton
import triton.language as tl

# Configuration
BLOCK_N: tl.constexpr = tl.constexpr(4096)  # columns per tile
LANES: tl.constexpr = tl.constexpr(512)  # states per row, merged after the last tile
LANE_WIDTH: tl.constexpr = BLOCK_N // LANES  # adjacent columns of a tile that share a state
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


@triton.jit
def online_merge(m_i, l_i, scale_log2):
    """Merge the states along the first axis, which saw disjoint parts of the same row."""
    m_row = tl.max(m_i, axis=0)
    l_row = tl.sum(l_i * online_alpha(m_i, m_row, scale_log2), axis=0)
    return m_row, l_row


@triton.jit
def softmax_streaming(x_ptr, out_ptr, stride_xm, stride_om, n):
    """Write the softmax of one row."""
    row = tl.program_id(0).to(tl.int64)
    x_tile = x_ptr + row * stride_xm
    out_tile = out_ptr + row * stride_om
    cols = tl.arange(0, LANES)[:, None] * LANE_WIDTH + tl.arange(0, LANE_WIDTH)[None, :]
    m_i, l_i = online_start(LANES)

    for start in tl.range(0, n, BLOCK_N, num_stages=LOOP_STAGES):
        mask = start + cols < n
        s = tl.load(x_tile + start + cols, mask=mask, other=float("-inf")).to(tl.float32)
        _p, m_i, l_i, _alpha, _moved = online_update(m_i, l_i, s, LOG2E)

    # A row that is all -inf gives 0 * inf, NaN, as in torch.
    m_row, l_row = online_merge(m_i, l_i, LOG2E)
    inverse = 1.0 / l_row
    # Backwards: the tiles read last are the likeliest to be cached still.
    last = (n - 1) // BLOCK_N * BLOCK_N
    for done in tl.range(0, n, BLOCK_N, num_stages=LOOP_STAGES):
        start = last - done
        mask = start + cols < n
        x_cols = x_tile + start + cols
        out_cols = out_tile + start + cols
        s = tl.load(x_cols, mask=mask, other=float("-inf"))
        p = online_exp(s.to(tl.float32), m_row, LOG2E) * inverse
        tl.store(out_cols, p.to(out_ptr.dtype.element_ty), mask=mask)


def launch(x: torch.Tensor, out: torch.Tensor, **options: int) -> None:
    """Write the softmax of ``x`` [m, n] to ``out``; both have an inner stride of 1."""
    m, n = x.shape
    if m == 0 or n == 0:
        return
    softmax_streaming[(m,)](x, out, x.stride(0), out.stride(0), n, **options)
