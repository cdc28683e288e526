"""A problem's result with where it comes from, as the summary shows it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ktune.cli.plan import Part
from ktune.operations import operation
from ktune.search.proof import Proof
from ktune.search.result import Result
from ktune.target.replay import UNRECORDED
from ktune.target.target import Target


@dataclass(slots=True)
class Finding:
    """A problem's result, where it comes from, and for a replay its proof."""

    part: Part
    target: Target
    result: Result
    saved: bool
    proof: Proof | None = None

    @property
    def good(self) -> bool:
        """Whether there is a winner, and no proof of it failed."""
        proof = self.proof
        return self.result.winner is not None and (proof is None or not proof.detail)

    @property
    def counts(self) -> Counter[str]:
        """How many variants ended how."""
        return Counter(m.status for m in self.result.outcome.measurements.values())

    @property
    def unrecorded(self) -> int:
        """Variants that a replay could not answer for."""
        return sum(m.detail == UNRECORDED for m in self.result.outcome.measurements.values())

    def gain(self, other_ms: float | None) -> float | None:
        """Return how many times faster than another time the winner is."""
        winner = self.result.winner
        return other_ms / winner.latency_ms if winner and other_ms else None

    @property
    def roof_share(self) -> float | None:
        """Share of the device's ceiling: copy rate or matrix rate, as the operation says."""
        problem, winner = self.result.problem, self.result.winner
        op = operation(problem.op)
        memory = op.roof == "memory"
        roof = self.target.roofs.get("copy_gb_per_s" if memory else "matmul_tflop_per_s")
        if winner is None or not roof:
            return None
        seconds = winner.latency_ms / 1e3
        rate = op.least_bytes(problem) / 1e9 if memory else op.flops(problem) / 1e12
        return rate / seconds / roof

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        result, winner = self.result, self.result.winner
        return {
            "problem": result.problem.text,
            "device": self.target.device.key,
            "replayed_from": self.target.replayed_from,
            "measured": self.target.measured,
            "winner": winner.text if winner else None,
            "latency_ms": winner.latency_ms if winner else None,
            "spread_ms": winner.spread_ms if winner else None,
            "default": result.default.text,
            "default_latency_ms": winner.default_latency_ms if winner else None,
            "baselines_ms": result.baselines,
            "speedup": {
                "default": self.gain(winner.default_latency_ms if winner else None),
                **{name: self.gain(value) for name, value in result.baselines.items()},
            },
            "roof": operation(result.problem.op).roof,
            "roof_share": self.roof_share,
            "trials": len(result.outcome.measurements),
            "new_trials": result.outcome.measured,
            "legal": result.outcome.legal,
            "outcomes": dict(self.counts),
            "rejected": result.outcome.rejected,
            "loss": round(max(result.loss, 0.0), 5),
            "covers": {name: list(ends) for name, ends in result.covers.items()},
            "margin_interval": winner.interval if winner else None,
            "saved": self.saved,
            "proof": _proof_dict(self.proof),
        }


def _proof_dict(proof: Proof | None) -> dict[str, Any] | None:
    if proof is None:
        return None
    return {
        "passed": not proof.detail,
        "detail": proof.detail,
        "error": proof.error,
        "error_limit": proof.limit,
        **proof.resources,
    }
