"""Print what a search found: times, gains, roofs, proofs, and how to use the winners."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktune import settings
from ktune.bench.measurement import STATUSES
from ktune.cli.console import emit, number, short_names, show, table
from ktune.cli.judged import judged_dict, judged_table
from ktune.cli.plan import Part
from ktune.operations import operation
from ktune.search.proof import Proof
from ktune.search.result import Result
from ktune.target.replay import UNRECORDED
from ktune.target.target import Target

FAILURES = tuple(status for status in STATUSES if status not in {"ok", "wrong"})
CALLS = {
    "softmax": "ktune.softmax(x)",
    "attention": "ktune.scaled_dot_product_attention(q, k, v, is_causal=True)",
}


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
            "loss": round(result.loss, 5),
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


def print_summary(
    findings: Sequence[Finding],
    judged: Sequence[Finding],
    table_path: Path | None,
    storage: str,
    interrupted: bool,
    as_json: bool,
) -> None:
    """Print the summary, as tables or as one document."""
    if as_json:
        emit(
            "search",
            {
                "interrupted": interrupted,
                "table": table_path,
                "storage": storage,
                "targets": _targets(findings),
                "breakdown": findings[0].target.spent.to_dict() if findings else {},
                "results": [finding.to_dict() for finding in findings],
                "held_out": judged_dict(judged),
                "load": load_lines(findings, table_path),
            },
        )
        return
    for op in dict.fromkeys(finding.result.problem.op for finding in findings):
        _show_operation(op, [f for f in findings if f.result.problem.op == op])
    for op in dict.fromkeys(finding.result.problem.op for finding in judged):
        show(judged_table(op, [f for f in judged if f.result.problem.op == op]))
    for target in {id(f.target): f.target for f in findings}.values():
        show("", _spent_line(target))
    lines = load_lines(findings, table_path)
    if lines:
        show("", *lines)


def _spent_line(target: Target) -> str:
    """Return where the seconds of a target went."""
    spent = target.spent
    clock = "simulated wall time" if target.replayed_from else "wall time"
    timers = "1 timing worker" if spent.timers == 1 else f"{spent.timers} timing workers"
    cores = "1 compile worker" if spent.workers == 1 else f"{spent.workers} compile workers"
    return (
        f"{clock} {spent.wall:.1f} s. {timers}: check {spent.check:.1f}, time {spent.time:.1f}, "
        f"finals {spent.finals:.1f}, idle {spent.idle:.1f} s. {cores}: {spent.compile:.1f} "
        f"core-seconds. Rendering {spent.render:.1f} s"
    )


def _targets(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    found = {}
    for finding in findings:
        target = finding.target
        found[id(finding.part)] = {
            "operation": finding.result.problem.op,
            "device": target.device.to_dict(),
            "replayed_from": target.replayed_from,
            "measured": target.measured,
            "protocol": target.protocol,
            "versions": target.versions,
            "roofs": target.roofs,
            "breakdown": target.spent.to_dict(),
        }
    return list(found.values())


def _show_operation(op: str, findings: list[Finding]) -> None:
    target = findings[0].target
    how = f"measured {target.measured}"
    if target.replayed_from:
        how = f"REPLAYED: recorded {target.measured}, not measured here"
    same, names = short_names([finding.result.problem.fields_text for finding in findings])
    title = f"{op} on {target.device.name} ({how})"
    baselines = list(dict.fromkeys(n for f in findings for n in f.result.baselines))
    roof = f"% {'copy' if operation(op).roof == 'memory' else 'matmul'}"
    columns = ["", same or "problem", "ms", "/default", *(f"/{name}" for name in baselines), roof]
    columns += ["tried", "wrong", "failed"]
    rows = [
        _times(index, name, finding, baselines)
        for index, (name, finding) in enumerate(zip(names, findings, strict=True), 1)
    ]
    show(table(title, columns, rows), _winners(findings), *_troubles(findings))


def _times(index: int, name: str, finding: Finding, baselines: list[str]) -> list[str]:
    result, winner, counts = finding.result, finding.result.winner, finding.counts
    share = finding.roof_share
    return [
        str(index),
        name,
        number(winner.latency_ms if winner else None),
        _ratio(finding.gain(winner.default_latency_ms if winner else None)),
        *(_ratio(finding.gain(result.baselines.get(name))) for name in baselines),
        "-" if share is None else f"{share:.0%}",
        f"{len(result.outcome.measurements)} of {result.outcome.legal}",
        str(counts["wrong"]),
        str(sum(counts[status] for status in FAILURES)),
    ]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _winners(findings: list[Finding]) -> Any:
    """Return the table of winning variants, with what this machine proved of them."""
    proved = any(finding.proof for finding in findings)
    columns = ["", "winner"]
    columns += ["registers", "spill B", "shared B", "error", "limit", "proof"] if proved else []
    rows = []
    for index, finding in enumerate(findings, 1):
        winner, proof = finding.result.winner, finding.proof
        rows.append([str(index), winner.text if winner else "none passed"])
        rows[-1] += _proof_cells(proof) if proved else []
    return table("", columns, rows)


def _proof_cells(proof: Proof | None) -> list[str]:
    if proof is None:
        return ["-"] * 6
    used = [proof.resources.get(key) for key in ("registers", "spill_bytes", "shared_bytes")]
    return [
        *("-" if value is None else f"{value:.0f}" for value in used),
        number(proof.error, 2),
        number(proof.limit, 2),
        "FAILED" if proof.detail else "ok",
    ]


def _troubles(findings: list[Finding]) -> list[str]:
    """Return a line for each problem without a winner and each proof that failed."""
    lines = []
    for finding in findings:
        result, proof = finding.result, finding.proof
        if result.winner is None:
            counts = ", ".join(f"{n} {s.replace('_', ' ')}" for s, n in finding.counts.items())
            why = f"no variant passed ({counts or 'none tried'})"
            lines.append(f"FAILED {result.problem.text}: {why}")
        if proof is not None and proof.detail:
            lines.append(f"FAILED proof of {result.problem.text}, {proof.variant}: {proof.detail}")
    return lines


def load_lines(findings: Sequence[Finding], path: Path | None) -> list[str]:
    """Return the lines that use the winners; none if no table was written."""
    saved = dict.fromkeys(f.result.problem.op for f in findings if f.saved)
    lines = [f"import ktune; {CALLS[op]}   # uses {path}" for op in saved if op in CALLS]
    if lines and path not in settings.user_table_paths():
        lines.insert(0, f"export {settings.TABLE_PATH}={shlex.quote(str(path))}")
    return lines
