"""Batch invariance: a row's bits stay the same whatever other rows are computed with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ktune import settings

_asked: ContextVar[bool | None] = ContextVar("ktune_batch_invariant", default=None)


@contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Within, the batch has no say in which kernel computes a call.

    A tuned table may hold another variant for each batch size, and each adds up a row in an order
    of its own: a prompt then gets other bits alone than among others. Here the variant is chosen
    from the other fields only (softmax ignores the number of rows, ``m``; attention ignores
    ``batch``), by a fixed order: an entry of the problem but for the batch, then one whose region
    holds it, then one of its bucket, then the default.

    What is promised: on one device, with the same tables and versions, the same row gives the
    same bits in every batch, where it lies in memory in the same way. That is: softmax over the
    last dimension of rows, contiguous or cut from one padded tensor, and attention on contiguous
    or packed tensors. It holds because

    - a variant and the row alone fix the order of all sums: one program reduces a row from start
      to end, nothing is split over programs, and no atomic addition meets a result. The batch
      enters the grid and the mask of rows that exist, never a loop bound. The one rendering in
      which rows decide together (softmax over strided rows, ``rescale_granularity=tile``) is
      passed over.
    - Triton compiles another kernel where an integer argument is 1 or divisible by 16, and may
      then spread a row over threads differently. The counts ``m``, ``b``, ``num_heads``,
      ``group``, ``seqlen_q`` and ``seqlen_k`` are therefore ``do_not_specialize`` in the
      templates, ``n`` bounds the loop and the mask only, and strides and base addresses are those
      of the layout: a single row of a padded tensor keeps its stride. A test compiles for sm_90
      and finds one binary for all batches.

    Not promised: softmax over another dimension than the last, where a batch of one loses its
    stride; a batch that changes a tensor's layout word (see ``ktune explain``); what PyTorch
    computes: masks, dropout, gradients, the CPU.

    The mode belongs to the current context, so to this thread or task; one started within does
    not inherit it unless its context is copied. ``KTUNE_BATCH_INVARIANT=1`` turns it on for the
    process. Blocks nest, the innermost wins. Put it around a function that ``torch.compile`` has
    made, not inside.

    Args:
        enabled: False turns the mode off within, also against the environment.

    Example:
        >>> import ktune, torch
        >>> with ktune.batch_invariant():
        ...     y = ktune.softmax(torch.zeros(2, 4))
    """
    token = _asked.set(enabled)
    try:
        yield
    finally:
        _asked.reset(token)


def is_batch_invariant() -> bool:
    """Return whether the batch is to be ignored, by the innermost block or the environment."""
    asked = _asked.get()
    return settings.batch_invariant() if asked is None else asked
