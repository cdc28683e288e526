"""Draw how samplers' regret falls, over evaluations and over simulated seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktune.report.plot import new_figure, require_matplotlib, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Document = Mapping[str, Any]
SHARES, SECONDS = "by_share", "by_seconds"
LEAST, MOST = 0.1, 200.0
"""Regrets in percent between which curves are drawn; less counts as ``LEAST``."""


def plot_samplers(operations: Sequence[Document], path: Path) -> None:
    """Draw regret over evaluations in each setting, and over seconds in the last.

    A line is a sampler's median over problems and seeds, and its band reaches up to the 95th
    percentile. There is a row of charts for each operation.

    Args:
        operations: ``Trials.to_dict()`` of each operation.
        path: the file to write; its suffix names the format.
    """
    require_matplotlib(path)
    drawn = [(setting, SHARES) for setting in _settings(operations[0])]
    drawn = [*(drawn[:-1] or drawn), (drawn[-1][0], SECONDS)]
    figure = new_figure(5.0 * len(drawn), 3.8 * len(operations))
    charts = figure.subplots(len(operations), len(drawn), squeeze=False, sharey=True)
    for row, operation in zip(charts, operations, strict=True):
        for chart, (setting, kind) in zip(row, drawn, strict=True):
            scores = [s for s in operation["scores"] if _setting(s) == setting]
            _draw(chart, scores, kind)
            title = f"{operation['op']}, {operation['device']}: replayed\n{setting}"
            chart.set_title(title, fontsize=8)
        row[0].set_ylabel("regret, %: median (line) to 95th percentile (dots)", fontsize=8)
    charts[0][0].legend(fontsize=8)
    save_figure(figure, path)


def _settings(operation: Document) -> list[str]:
    return list(dict.fromkeys(_setting(score) for score in operation["scores"]))


def _setting(score: Document) -> str:
    return str(score["setting"])


def _draw(chart: Axes, scores: Sequence[Document], kind: str) -> None:
    unit = 100.0 if kind == SHARES else 1.0
    for place, score in enumerate(scores):
        curve, colour = score[kind], f"C{place}"
        at = [unit * point for point in curve["at"]]
        median, high = _percent(curve["median"]), _percent(curve["p95"])
        chart.plot(at, median, label=score["sampler"], linewidth=1.6, color=colour)
        chart.fill_between(at, median, high, alpha=0.08, linewidth=0, color=colour)
        chart.plot(at, high, linewidth=0.8, linestyle=":", color=colour)
    chart.set_yscale("log")
    chart.set_ylim(LEAST, MOST)
    chart.axhline(2, color="grey", linewidth=0.5)
    if kind == SHARES:
        chart.axvline(10, color="grey", linewidth=0.5)
        chart.set_xlim(1, 50)
        chart.set_xlabel("share of the legal space evaluated, %", fontsize=8)
    else:
        chart.set_xscale("log")
        chart.set_xlim(1, 64)
        chart.set_xlabel("simulated seconds since a problem's start", fontsize=8)


def _percent(regrets: Sequence[float | None]) -> list[float]:
    """Return regrets in percent, within what is drawn; none yet counts as the most."""
    return [MOST if r is None else min(max(100.0 * r, LEAST), MOST) for r in regrets]
