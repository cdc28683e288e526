"""Attention forward: problem, reference, inputs, defaults.

Tensors are ``q [B, H, Sq, D]``, ``k`` and ``v [B, Hkv, Sk, D]``, ``out`` like q, all by strides
(BHSD), and ``lse [B, H, Sq]`` in float32, natural logarithm, where asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ktune.device import Device
from ktune.errors import ProblemError
from ktune.operations.base import (
    DTYPES,
    Field,
    Operation,
    Tensors,
    generator,
    itemsize,
    next_power_of_two,
)
from ktune.problem import Problem, Scalar
from ktune.variant import Variant

CAUSAL = ("none", "upper_left", "lower_right")
HUGE = {"float16": 65504.0, "bfloat16": 2.0**63, "float32": 2.0**63}
"""Largest queries and keys of the huge scores, whose float32 products stay finite."""
CHUNK_BYTES = 2 << 30
"""Most bytes of float64 scores that the reference holds at once."""


class Attention(Operation):
    """``softmax(q k^T * scale + mask) v`` (Dao, arXiv:2307.08691), forward.

    Rows without a visible key give output 0 and LSE -inf (contract D3). ``causal`` names the
    alignment: ``upper_left`` lets query i see keys j <= i (PyTorch), ``lower_right`` lets it see
    j <= i + Sk - Sq (FlashAttention >= 2.1).
    """

    name = "attention"
    fields = (
        Field("batch", 1, help="B"),
        Field("heads", help="query heads, H"),
        Field("heads_kv", help="key and value heads, Hkv; divides heads"),
        Field("seqlen_q", minimum=0, help="Sq"),
        Field("seqlen_k", minimum=0, help="Sk"),
        Field("head_dim", help="D, 1 to 256"),
        Field("causal", "none", choices=CAUSAL, help="mask and its alignment"),
        Field("dtype", "bfloat16", choices=tuple(DTYPES), help="of q, k, v and out"),
        Field("layout", "aligned", choices=("aligned", "strided"), help="aligned: TMA can read"),
        Field("tf32", False, help="float32 products may use TF32"),
        Field("return_lse", False, help="also return the log-sum-exp"),
    )
    distributions = ("normal", "adversarial", "rising", "falling", "peaky", "sink", "huge")
    roof = "compute"
    batch_fields = ("batch",)
    relative_outputs = frozenset({"out"})

    def fill(self, fields: dict[str, Scalar]) -> None:
        """Let heads_kv default to heads, and seqlen_k to seqlen_q."""
        if "heads" in fields:
            fields.setdefault("heads_kv", fields["heads"])
        if "seqlen_q" in fields:
            fields.setdefault("seqlen_k", fields["seqlen_q"])

    def validate(self, problem: Problem) -> None:
        """Check the head ratio, the head dim and the TF32 flag."""
        heads, kv = problem.size("heads"), problem.size("heads_kv")
        if heads % kv:
            raise ProblemError(f"attention: heads={heads} is not a multiple of heads_kv={kv}")
        if problem.size("head_dim") > 256:
            raise ProblemError(f"attention: head_dim={problem['head_dim']} is over 256")
        if problem["tf32"] and problem.word("dtype") != "float32":
            raise ProblemError(f"attention: tf32=true is for float32, not {problem['dtype']}")

    def structure(self, problem: Problem) -> dict[str, Scalar]:
        """Return what shapes the kernel: head dim, mask, layout, LSE, precision."""
        head_dim = problem.size("head_dim")
        return {
            "head_dim": head_dim,
            "block_d": max(16, next_power_of_two(head_dim)),
            "causal": problem.word("causal"),
            "return_lse": bool(problem["return_lse"]),
            "input_precision": "tf32" if problem["tf32"] else "ieee",
            "count_rescales": False,
        }

    def default_variant(self, problem: Problem, device: Device) -> Variant:
        """Return FA-2 with pointer loads and tiles that fit 99 KB of shared memory."""
        block_d = max(16, next_power_of_two(problem.size("head_dim")))
        wide = block_d * itemsize(problem)
        if wide <= 128:
            block_m, block_n, warps, stages = 128, 64, 4, 3
        elif wide <= 256:
            block_m, block_n, warps, stages = 128, 64, 8, 2
        elif wide <= 512:
            block_m, block_n, warps, stages = 64, 32, 4, 2
        else:
            block_m, block_n, warps, stages = 32, 16, 4, 1
        if problem.size("seqlen_q") <= 16:
            block_m, warps = 16, 4
        causal = problem.word("causal") != "none"
        return Variant.of(
            self.name,
            {
                "template": "forward",
                "load": "pointer",
                "normalization": "deferred",
                "rescale": "always",
                "tile_order": "reversed" if causal else "sequential",
                "block_m": block_m,
                "block_n": block_n,
                "num_warps": warps,
                "num_stages": stages,
            },
        )

    def bucket(self, problem: Problem) -> Problem:
        """Return the problem with batch, heads and lengths rounded up to powers of two.

        The LSE costs next to nothing, so problems with and without it share an entry.
        """
        heads = next_power_of_two(problem.size("heads"))
        ratio = next_power_of_two(problem.size("heads") // problem.size("heads_kv"))
        return problem.replace(
            batch=next_power_of_two(problem.size("batch")),
            heads=max(heads, ratio),
            heads_kv=max(heads, ratio) // ratio,
            seqlen_q=next_power_of_two(problem.size("seqlen_q")),
            seqlen_k=next_power_of_two(problem.size("seqlen_k")),
            return_lse=False,
        )

    def proving(self, problem: Problem) -> list[Problem]:
        """Return two ragged problems, one with more queries than keys, both with an LSE.

        The latter has rows that see no key where the mask is aligned lower right.
        """
        ratio = min(problem.size("heads") // problem.size("heads_kv"), 2)
        small = problem.replace(batch=2, heads=2 * ratio, heads_kv=2, return_lse=True)
        return [
            small.replace(seqlen_q=203, seqlen_k=331),
            small.replace(batch=1, seqlen_q=197, seqlen_k=101),
        ]

    def make_inputs(
        self, problem: Problem, distribution: str, seed: int, device: torch.device
    ) -> Tensors:
        """Return ``q``, ``k``, ``v`` and ``scale``; strided ones are cut from a packed tensor."""
        batch, heads, kv, sq, sk, d = (
            problem.size(name)
            for name in ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "head_dim")
        )
        source = generator(seed, device)
        q, k, v = (
            torch.randn(batch, h, s, d, generator=source, device=device)
            for h, s in ((heads, sq), (kv, sk), (kv, sk))
        )
        _shape_scores(q, k, distribution, HUGE[problem.word("dtype")])
        q, k, v = (_lay_out(t.to(self.dtype(problem)), problem) for t in (q, k, v))
        return {"q": q, "k": k, "v": v, "scale": 1.0 / math.sqrt(d)}

    def make_outputs(self, problem: Problem, inputs: Tensors) -> Tensors:
        """Return ``out``, laid out like q, and ``lse`` where asked for."""
        outputs = {"out": torch.empty_like(inputs["q"])}
        if problem["return_lse"]:
            q = inputs["q"]
            outputs["lse"] = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        return outputs

    def arguments(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Any, ...]:
        """Return ``(q, k, v, out, lse or None, scale)``."""
        q, k, v, scale = (inputs[name] for name in ("q", "k", "v", "scale"))
        return q, k, v, outputs["out"], outputs.get("lse"), float(scale)

    def reference(self, problem: Problem, inputs: Tensors) -> Tensors:
        """Return output and LSE computed in float64."""
        return self._compose(problem, inputs, torch.float64)

    def eager(self, problem: Problem, inputs: Tensors) -> Tensors:
        """Return the same composition in the inputs' own dtype; of TF32 values where asked."""
        if problem["tf32"]:
            inputs = {**inputs, **{name: _cut_to_tf32(inputs[name]) for name in ("q", "k", "v")}}
        return self._compose(problem, inputs, self.dtype(problem))

    def _compose(self, problem: Problem, inputs: Tensors, dtype: torch.dtype) -> Tensors:
        q, k, v = (inputs[name] for name in ("q", "k", "v"))
        out, lse = compose(q, k, v, float(inputs["scale"]), problem.word("causal"), dtype)
        return {"out": out, "lse": lse} if problem["return_lse"] else {"out": out}

    def baselines(self, problem: Problem, inputs: Tensors) -> dict[str, Callable[[], object]]:
        """Return PyTorch's own attention: its choice, then FlashAttention-2 and cuDNN by name."""
        backends = {
            "torch": [],
            "flash": [SDPBackend.FLASH_ATTENTION],
            "cudnn": [SDPBackend.CUDNN_ATTENTION],
        }
        return {name: _sdpa(problem, inputs, chosen) for name, chosen in backends.items()}

    def least_bytes(self, problem: Problem) -> int:
        """Return one read of q, k, v and one write of out (and the LSE)."""
        b, h, kv, sq, sk, d = (
            problem.size(name)
            for name in ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "head_dim")
        )
        lse = 4 * b * h * sq if problem["return_lse"] else 0
        return 2 * b * d * (h * sq + kv * sk) * itemsize(problem) + lse

    def flops(self, problem: Problem) -> int:
        """Return 4 D for each query and key; half of that under a causal mask (FlashAttention)."""
        b, h, sq, sk, d = (
            problem.size(name) for name in ("batch", "heads", "seqlen_q", "seqlen_k", "head_dim")
        )
        full = 4 * b * h * sq * sk * d
        return full if problem.word("causal") == "none" else full // 2


def _sdpa(problem: Problem, inputs: Tensors, backends: list[SDPBackend]) -> Callable[[], object]:
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    if problem.word("causal") == "lower_right" and q.shape[2] != k.shape[2]:
        mask: torch.Tensor | None = causal_mask(q.shape[2], k.shape[2], "lower_right", q.device)
        causal = False
    else:
        mask, causal = None, problem.word("causal") != "none"

    def call() -> object:
        with sdpa_kernel(backends) if backends else nullcontext():
            return torch.nn.functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=causal,
                scale=float(inputs["scale"]),
                enable_gqa=q.shape[1] != k.shape[1],
            )

    return call


def _cut_to_tf32(t: torch.Tensor) -> torch.Tensor:
    """Return float32 values as Tensor Cores read them for TF32: without the last 13 bits.

    cuBLAS rounds before it multiplies, and so errs a fifth as much; kernels of Triton do not.
    """
    return (t.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def causal_mask(
    seqlen_q: int, seqlen_k: int, causal: str, device: torch.device
) -> torch.Tensor | None:
    """Return the bool mask [Sq, Sk], True where the query sees the key; None if it sees all."""
    if causal == "none":
        return None
    offset = seqlen_k - seqlen_q if causal == "lower_right" else 0
    rows = torch.arange(seqlen_q, device=device)[:, None]
    return torch.arange(seqlen_k, device=device)[None, :] <= rows + offset


def compose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: str,
    dtype: torch.dtype,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention with plain PyTorch operations, a few heads at a time.

    For 16-bit dtypes scores and sums are float32, and P is rounded to ``dtype`` before it meets
    V, as in every fused kernel; float32 and float64 are used throughout for those.

    Args:
        q: [B, H, Sq, D].
        k: [B, Hkv, Sk, D].
        v: [B, Hkv, Sk, D].
        scale: multiplies the scores.
        causal: ``none``, ``upper_left`` or ``lower_right``.
        dtype: of P and of the output.
        mask: bool (True: visible) or additive, broadcast to [B, H, Sq, Sk].

    Returns:
        ``out`` [B, H, Sq, D] in ``dtype`` and ``lse`` [B, H, Sq] (float32 or float64).
    """
    group = q.shape[1] // max(k.shape[1], 1)
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    visible = causal_mask(q.shape[2], k.shape[2], causal, q.device)
    step = max(1, CHUNK_BYTES // max(8 * q.shape[0] * q.shape[2] * k.shape[2], 1))
    outs, lses = [], []
    for start in range(0, q.shape[1], step):
        heads = torch.arange(start, min(start + step, q.shape[1]), device=q.device)
        s = q[:, heads].to(wide) @ k[:, heads // group].to(wide).transpose(-1, -2) * scale
        if mask is not None:
            part = mask[:, heads] if mask.dim() == 4 and mask.shape[1] != 1 else mask
            if part.dtype == torch.bool:
                s = s.masked_fill(~part, -math.inf)
            else:
                s = s + part.to(s.dtype)
        if visible is not None:
            s = s.masked_fill(~visible, -math.inf)
        lse = torch.logsumexp(s, -1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)
        p = torch.softmax(s, -1).masked_fill((lse == -math.inf)[..., None], 0)
        outs.append((p.to(dtype).to(wide) @ v[:, heads // group].to(wide)).to(dtype))
        lses.append(lse)
    if not outs:
        return q.to(dtype), q.new_empty(q.shape[:-1], dtype=wide)
    return torch.cat(outs, 1), torch.cat(lses, 1)


def _lay_out(t: torch.Tensor, problem: Problem) -> torch.Tensor:
    if problem.word("layout") == "aligned":
        return t
    b, h, s, d = t.shape
    packed = torch.zeros(b, s, h, d + 1, dtype=t.dtype, device=t.device)
    packed[..., 1:] = t.transpose(1, 2)
    return packed[..., 1:].transpose(1, 2)


def _shape_scores(q: torch.Tensor, k: torch.Tensor, distribution: str, top: float) -> None:
    """Turn normal queries and keys into the named distribution of scores, in place."""
    sk, d = k.shape[-2:]
    ramp = torch.arange(sk, device=k.device, dtype=k.dtype) / max(sk - 1, 1)
    root = math.sqrt(math.sqrt(d))
    if distribution == "peaky":
        q *= 8
    elif distribution in {"rising", "falling", "sink"}:
        q[..., 0] = root
        k[..., 0] = 0
        if distribution == "sink":
            k[..., :1, 0] = 30 * root
        else:
            k[..., 0] = root * 100 * (ramp if distribution == "rising" else -ramp)
    elif distribution == "adversarial":
        _adversarial_heads(q, k.flatten(0, 1), ramp, root)
    elif distribution == "huge":
        _huge_heads(q, k.flatten(0, 1), ramp, top)
    elif distribution != "normal":
        raise ValueError(f"attention inputs have no distribution {distribution!r}")


def _adversarial_heads(q: torch.Tensor, k: torch.Tensor, ramp: torch.Tensor, root: float) -> None:
    """Give each key head [B * Hkv, Sk, D], by turns, one of four patterns of scores up to +-300."""
    q[..., 0] = root
    k[0::4, :, 0] = root * (600 * ramp - 300)  # the maximum rises in every tile
    k[1::4, :, 0] = root * (300 - 600 * ramp)  # it never rises again
    k[2::4, :, 0] = 0
    k[2::4, ramp.shape[0] // 3 :: 97, 0] = root * 300  # spikes
    k[3::4, :, 0] = root * -300  # all far below zero


def _huge_heads(q: torch.Tensor, k: torch.Tensor, ramp: torch.Tensor, top: float) -> None:
    """Give each key head, by turns, one of four patterns of scores; three reach ``+-top ** 2``.

    Each is a product of two numbers of few bits, so every precision computes it exactly, ties
    included; every other query has the sign changed.
    """
    levels = ((2 * ramp - 1) * 64).round() / 64
    q.zero_()
    k.zero_()
    q[:, :, 0::2, 0], q[:, :, 1::2, 0] = top, -top
    k[0::4, :, 0] = levels * top
    k[1::4, :, 0] = -top
    k[1::4, ramp.shape[0] // 3, 0] = top  # one spike over all others
    k[2::4, :, 0] = top  # equal scores: the mean of V
    k[3::4, :, 0] = 1.375 * 2**20 / top  # equal ones of a size that is rounded when scaled
