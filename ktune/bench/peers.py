"""Kernels of other projects, to time ktune's beside: optional packages, imported when asked for.

A peer takes a problem and its inputs and returns a call that is ready to be timed; the call
returns the output. It raises where the package is missing or cannot do the problem.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ktune.operations import operation
from ktune.operations.base import Tensors
from ktune.problem import Problem

Call = Callable[[], object]
Peer = Callable[[Problem, Tensors], Call]


class UnsuitableError(Exception):
    """The peer cannot do this problem."""


def peer_names(problem: Problem) -> list[str]:
    """Return every peer a problem may have: PyTorch's own first, then other projects'."""
    op = operation(problem.op)
    inputs = op.make_inputs(problem, op.distributions[0], 0, torch.device("meta"))
    return [*op.baselines(problem, inputs), *PEERS.get(problem.op, {})]


def make_peer(name: str, problem: Problem, inputs: Tensors) -> Call:
    """Return a peer's call on these inputs.

    Raises:
        UnsuitableError: there is no such peer for the operation, or not for this problem.
        ImportError: its package is not installed.
    """
    offered = operation(problem.op).baselines(problem, inputs)
    if name in offered:
        return offered[name]
    if name not in PEERS.get(problem.op, {}):
        raise UnsuitableError(f"{problem.op} has no peer {name!r}")
    return PEERS[problem.op][name](problem, inputs)


def output_of(result: object) -> torch.Tensor | None:
    """Return the output tensor in whatever a peer returned."""
    if isinstance(result, dict):
        result = result.get("out")
    if isinstance(result, tuple):
        result = result[0]
    return result if isinstance(result, torch.Tensor) else None


def _quack_softmax(problem: Problem, inputs: Tensors) -> Call:
    from quack.softmax import softmax_fwd

    x = inputs["x"]
    if x.dim() != 2 or x.stride(-1) != 1:
        raise UnsuitableError("quack takes 2-D rows of unit stride")

    def call() -> object:
        return softmax_fwd(x)

    return call


def _fa4_attention(problem: Problem, inputs: Tensors) -> Call:
    from flash_attn.cute import flash_attn_func

    causal = problem.word("causal")
    if causal == "upper_left" and problem.size("seqlen_q") != problem.size("seqlen_k"):
        raise UnsuitableError("flash-attn-4 aligns the mask lower right")
    if problem.word("dtype") == "float32":
        raise UnsuitableError("flash-attn-4 takes 16-bit inputs")
    q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k", "v"))
    options: dict[str, Any] = {"softmax_scale": float(inputs["scale"]), "causal": causal != "none"}

    def call() -> object:
        out, *_ = flash_attn_func(q, k, v, **options)
        return out.transpose(1, 2)

    return call


PEERS: dict[str, dict[str, Peer]] = {
    "softmax": {"quack": _quack_softmax},
    "attention": {"fa4": _fa4_attention},
}
"""Peers of other projects, by operation and name."""
