"""What makes two problems alike: one kernel for both, and which sizes a region ranges over."""

from __future__ import annotations

from collections.abc import Hashable

from ktune.operations.base import Operation
from ktune.problem import Problem, Scalar, format_scalar, is_size
from ktune.table.entry import Covers, Entry
from ktune.variant import Variant

UNBATCHED = 1
"""What batch fields are taken to be where the batch must not matter."""


def flags_of(problem: Problem) -> dict[str, Scalar]:
    """Return the fields that are no sizes."""
    return {name: value for name, value in problem if not is_size(value)}


def sizes_of(problem: Problem) -> dict[str, int]:
    """Return the fields that are sizes."""
    return {name: value for name, value in problem if is_size(value)}


def kernel_key(op: Operation, problem: Problem) -> Hashable:
    """Return what two problems share whose entries may stand for each other at other sizes.

    These are the structure, so that a variant renders to one kernel for both, how inputs may be
    read (``Operation.access``), and all fields that are no sizes, but for those that the
    operation's buckets ignore (attention's ``return_lse``).
    """
    shape = problem.replace(**flags_of(op.bucket(problem)))
    structure = tuple(sorted(op.structure(shape).items()))
    return tuple(flags_of(shape).items()), structure, op.access(shape)


def covers_problem(entry: Entry, problem: Problem) -> bool:
    """Return whether a problem's sizes lie in an entry's region; ``kernel_key`` is the rest."""
    return _inside(entry.covers, sizes_of(entry.problem), sizes_of(problem))


def _inside(covers: Covers, own: dict[str, int], asked: dict[str, int]) -> bool:
    for name, value in asked.items():
        low, high = covers.get(name, (own.get(name, -1), own.get(name, -1)))
        if not low <= value <= high:
            return False
    return bool(covers)


def describe(entry: Entry) -> str:
    """Write an entry's problem with its ranges: ``m=1024..65536 n=4096 dtype=bfloat16 ...``."""
    words = []
    for name, value in entry.problem:
        low, high = entry.covers.get(name, (value, value))
        own = format_scalar(low)
        words.append(f"{name}={own}" if low == high else f"{name}={own}..{high}")
    return " ".join(words)


def unbatched(op: Operation, problem: Problem) -> Problem:
    """Return the problem with its batch fields set to one value."""
    return problem.replace(**dict.fromkeys(op.batch_fields, UNBATCHED))


def couples_rows(variant: Variant) -> bool:
    """Return whether a row's bits depend on which other rows its program computes.

    So they do in a softmax program of several rows whose references all move when one row's
    maximum rose (``rescale_granularity=tile``). Everywhere else in the templates a row is reduced
    by itself: attention's tiles hold rows of one sequence, which is never cut by the batch.
    """
    values = variant.values
    alone = values.get("block_m", 1) == 1
    return variant.op == "softmax" and not alone and values.get("rescale_granularity") == "tile"
