"""Show what a table loses on problems that were held out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ktune.cli.console import number, short_names, table

if TYPE_CHECKING:
    from ktune.cli.finding import Finding


def judged_table(op: str, judged: Sequence[Finding]) -> Any:
    """Return the table of one operation's held-out problems, worst loss last."""
    rows = judged_dict(judged)
    same, names = short_names([finding.result.problem.fields_text for finding in judged])
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    title = f"{op}: what the table's pick loses on problems held out"
    if losses:
        median, worst = statistics.median(losses), max(losses)
        title += f": median {median:.1%}, worst {worst:.1%}"
    cells = [
        [
            name,
            row["match"] or "-",
            number(row["pick_ms"]),
            number(row["best_ms"]),
            "-" if row["loss"] is None else f"{row['loss']:.1%}",
            number(row["default_ms"]),
            row["pick"] or "-",
        ]
        for name, row in zip(names, rows, strict=True)
    ]
    columns = [same or "problem", "found by", "pick ms", "best ms", "loss", "default ms", "pick"]
    return table(title, columns, cells)


def judged_dict(judged: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the held-out problems as JSON values."""
    return [_row(finding) for finding in judged]


def _row(finding: Finding) -> dict[str, Any]:
    result = finding.result
    medians = {
        name: statistics.median(values)
        for name, values in result.samples.items()
        if values and not name.startswith("baseline:")
    }
    pick = result.pick.variant.text if result.pick else None
    known = pick in medians
    best = min(medians, key=lambda text: (medians[text], text), default=None)
    return {
        "problem": result.problem.text,
        "match": result.pick.kind if result.pick else None,
        "entry": result.pick.entry.problem.text if result.pick and result.pick.entry else None,
        "pick": pick,
        "pick_ms": medians[pick] if pick is not None and known else None,
        "best": best,
        "best_ms": medians[best] if best is not None else None,
        "loss": round(result.loss, 5) if known else None,
        "default_ms": medians.get(result.default.text),
    }
