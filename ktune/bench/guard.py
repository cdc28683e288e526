"""What a kernel must leave alone: the memory around its outputs, and its inputs.

Nothing here waits for a GPU, except to say what went wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

PATTERN = 0xA5
"""Every byte of a guard."""
LEAST_BYTES, MOST_BYTES = 64 << 10, 4 << 20
"""Size of a guard on each side: as large as the output, within these bounds."""
ALIGN = 512
"""Outputs keep their address modulo this, and so what 16-byte loads and TMA ask for."""
EXACT_BYTES = 16 << 20
"""Inputs up to this size are kept whole to compare with; of larger ones, a fingerprint."""
CHUNK_WORDS = 1 << 22

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Guarded:
    """A copy of an output, of the same shape, strides and alignment, inside a larger buffer.

    Attributes:
        view: the output, as the kernel sees it.
        buffer: all bytes; those outside of the view hold ``PATTERN``.
        start: where the view's first byte is in the buffer.
        stop: where its last one ends.
    """

    view: torch.Tensor
    buffer: torch.Tensor
    start: int
    stop: int

    def poison(self) -> None:
        """Fill the output with NaN, or with the least integer."""
        if self.view.dtype.is_floating_point or self.view.dtype.is_complex:
            self.view.fill_(math.nan)
        elif self.view.dtype != torch.bool:
            self.view.fill_(torch.iinfo(self.view.dtype).min)

    def intact(self) -> torch.Tensor:
        """Return, as a tensor of one bool, whether no byte outside of the view has changed."""
        before, after = self.buffer[: self.start], self.buffer[self.stop :]
        kept = (before == PATTERN).all() & (after == PATTERN).all()
        if self.view.numel() * self.view.itemsize < self.stop - self.start:  # it has gaps
            kept = kept & ~self._touched().any()
        return kept

    def damage(self) -> str:
        """Say where bytes outside of the view have changed."""
        places = self._touched().nonzero().flatten()
        first = int(places[0])
        if first < self.start:
            where = f"{self.start - first} before its start"
        elif first >= self.stop:
            where = f"{first - self.stop + 1} past its end"
        else:
            where = f"between its rows, {first - self.start} from its start"
        return f"{len(places)} bytes changed, the first one {where}"

    def _touched(self) -> torch.Tensor:
        whole = torch.full_like(self.buffer, PATTERN)
        _lay(whole, self.start, self.stop, self.view).copy_(self.view)
        return whole != self.buffer


def guarded(output: torch.Tensor) -> Guarded:
    """Return a poisoned copy of an output in guarded memory."""
    shape = zip(output.shape, output.stride(), strict=True)
    reach = ((count - 1) * stride for count, stride in shape)
    size = (1 + sum(reach)) * output.itemsize if output.numel() else 0
    side = -(-min(max(size, LEAST_BYTES), MOST_BYTES) // ALIGN) * ALIGN
    total = 2 * side + size + ALIGN
    buffer = torch.full((total,), PATTERN, dtype=torch.uint8, device=output.device)
    start = side + (output.data_ptr() - buffer.data_ptr()) % ALIGN
    made = Guarded(_lay(buffer, start, start + size, output), buffer, start, start + size)
    made.poison()
    return made


def _lay(buffer: torch.Tensor, start: int, stop: int, like: torch.Tensor) -> torch.Tensor:
    """Return a view of some bytes with the dtype, shape and strides of another tensor."""
    return buffer[start:stop].view(like.dtype).as_strided(like.shape, like.stride())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return, elementwise, whether two tensors of equal dtype hold the same bits."""
    bits = _BITS.get(a.itemsize)
    return a == b if bits is None else a.view(bits) == b.view(bits)


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """Return what tells later whether any byte of a tensor's memory has changed."""
    memory = _memory(tensor)
    return memory.clone() if memory.numel() <= EXACT_BYTES else fingerprint(memory)


def unchanged(tensor: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return, as a tensor of one bool, whether a tensor's memory is as it was."""
    memory = _memory(tensor)
    return (memory == kept).all() if kept.dim() else fingerprint(memory) == kept


def restore(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Copy all memory of an equally laid out tensor, gaps included."""
    _memory(tensor).copy_(_memory(source))


def fingerprint(memory: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit sum of a byte tensor's words, each mixed and times a random odd weight.

    A change in one word always shows; changes in several cancel about once in 2**32 at worst.
    """
    whole, weights = memory.numel() // 8 * 8, _weights(memory.device)
    rest = memory[whole:].long()
    total = (rest * weights[: len(rest)]).sum()
    for words in torch.split(memory[:whole].view(torch.int64), CHUNK_WORDS):
        mixed = words ^ (words >> 32)  # else an even number of changed signs would cancel
        total = total * 6364136223846793005 + (mixed * weights[: len(words)]).sum()
    return total


@cache
def _weights(device: torch.device) -> torch.Tensor:
    source = torch.Generator(device).manual_seed(1)
    made = torch.randint(-(1 << 62), 1 << 62, (CHUNK_WORDS,), generator=source, device=device)
    return made * 2 + 1


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a tensor's storage, gaps and neighbours included."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
