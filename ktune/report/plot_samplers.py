"""Draw how samplers' regret falls, over evaluations and over simulated seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktune.report.plot import new_figure, require_matplotlib, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ktune.report.samplers import Curve, Score, Trials

LEAST, MOST = 0.1, 200.0
"""Regrets in percent between which curves are drawn; less counts as ``LEAST``."""


def plot_samplers(trials: Sequence[Trials], path: Path) -> None:
    """Draw a line of charts an operation: regret over evaluations, and over seconds.

    A line is a sampler's median over problems and seeds, and its band reaches up to the 95th
    percentile. Evaluations are of the first setting, seconds of the last.

    Args:
        trials: of each operation.
        path: the file to write; its suffix names the format.
    """
    require_matplotlib(path)
    figure = new_figure(12.0, 4.2 * len(trials))
    charts = figure.subplots(len(trials), 2, squeeze=False)
    names = list(dict.fromkeys(score.sampler for each in trials for score in each.scores))
    colours = {name: f"C{place}" for place, name in enumerate(names)}
    for (left, right), each in zip(charts, trials, strict=True):
        where = f"{each.paper.op}: {each.device}, recorded {each.measured}, replayed"
        first, last = each.settings[0], each.settings[-1]
        shares = {score: score.by_share for score in each.of(first)}
        _draw(left, shares, colours, 100.0, f"{where}\n{first.title}")
        left.set_xlabel("share of the legal space evaluated, %")
        left.set_xlim(1, 50)
        left.axvline(10, color="grey", linewidth=0.5)
        seconds = {score: score.by_seconds for score in each.of(last)}
        _draw(right, seconds, colours, 1.0, f"{where}\n{last.title}")
        right.set_xlabel("simulated seconds since a problem's start")
        right.set_xscale("log")
    charts[0][0].legend(fontsize=8)
    save_figure(figure, path)


def _draw(
    chart: Axes, curves: Mapping[Score, Curve], colours: Mapping[str, str], unit: float, title: str
) -> None:
    for score, curve in curves.items():
        at = [unit * place for place in curve.at]
        median, high = _percent(curve.median), _percent(curve.p95)
        colour: dict[str, Any] = {"color": colours[score.sampler]}
        chart.plot(at, median, label=score.sampler, linewidth=1.6, **colour)
        chart.fill_between(at, median, high, alpha=0.08, linewidth=0, **colour)
        chart.plot(at, high, linewidth=0.8, linestyle=":", **colour)
    chart.set_yscale("log")
    chart.set_ylim(LEAST, MOST)
    chart.axhline(2, color="grey", linewidth=0.5)
    chart.set_ylabel("regret, %: median (line) to 95th percentile (dots)")
    chart.set_title(title, fontsize=8)


def _percent(regrets: Sequence[float | None]) -> list[float]:
    """Return regrets in percent, within what is drawn; none yet counts as the most."""
    return [MOST if r is None else min(max(100.0 * r, LEAST), MOST) for r in regrets]
