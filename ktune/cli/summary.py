"""Print what a search found: times, gains, roofs, proofs, and how to use the winners."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ktune import settings
from ktune.bench.measurement import STATUSES
from ktune.cli.console import emit, number, short_names, show, table
from ktune.cli.finding import Finding
from ktune.cli.judged import judged_dict, judged_table
from ktune.operations import operation
from ktune.search.proof import Proof
from ktune.target.target import Target

FAILURES = tuple(status for status in STATUSES if status not in {"ok", "wrong"})
CALLS = {
    "softmax": "ktune.softmax(x)",
    "attention": "ktune.scaled_dot_product_attention(q, k, v, is_causal=True)",
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
        f"finals {spent.finals:.1f}, lost {spent.lost:.1f}, idle {spent.idle:.1f} s. {cores}: "
        f"{spent.compile:.1f} core-seconds. Rendering {spent.render:.1f} s"
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
