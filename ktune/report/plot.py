"""Draw comparisons and benchmarks with matplotlib, which is an optional extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktune.errors import KtuneError, UsageError
from ktune.operations import parse_problem
from ktune.report.bench import DEFAULT, OWN, Bench, rate, short_fields

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".pdf")


def has_matplotlib() -> bool:
    """Return whether plots can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib(path: Path) -> None:
    """Raise UsageError unless a plot can be drawn to this file."""
    if path.suffix not in FORMATS:
        raise UsageError(f"cannot draw to {path}: end its name in {', '.join(FORMATS)}")
    if not has_matplotlib():
        raise UsageError(
            "a plot needs matplotlib, which is not installed. Run: "
            "pip install 'ktune-kernels[plot]'"
        )


def plot_comparisons(documents: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw times of strategies, and shares of rows rescaled; one line of charts a problem.

    Args:
        documents: ``Comparison.to_dict()`` of each problem.
        path: the file to write; its suffix names the format.
    """
    require_matplotlib(path)
    figure = new_figure(12.0, 4.5 * max(len(documents), 1))
    charts = figure.subplots(max(len(documents), 1), 2, squeeze=False)
    for (left, right), document in zip(charts, documents, strict=True):
        _strategy_times(left, document)
        _rescale_shares(right, document)
    save_figure(figure, path)


def _strategy_times(chart: Axes, document: Mapping[str, Any]) -> None:
    strategies = [s for s in document["strategies"] if s["latency_ms"]]
    chart.barh([s["name"] for s in strategies], [s["latency_ms"] for s in strategies])
    chart.invert_yaxis()
    target = document["target"]
    times = "replayed" if target["replayed_from"] else "measured"
    where = f"{target['device']['name']}, {times}, {target['measured']}"
    chart.set_title(f"{_short(document['problem'])}\n{where}", fontsize=7)
    chart.set_xlabel("ms")


def _rescale_shares(chart: Axes, document: Mapping[str, Any]) -> None:
    strategies = document["strategies"]
    names = list(dict.fromkeys(name for s in strategies for name in s["distributions"]))
    shares = {
        s["name"]: [_share(s["distributions"].get(name)) for name in names] for s in strategies
    }
    drawn = {name: values for name, values in shares.items() if any(v is not None for v in values)}
    width = 0.8 / max(len(drawn), 1)
    for place, (name, values) in enumerate(drawn.items()):
        left = [index + width * place for index in range(len(names))]
        chart.bar(left, [value or 0.0 for value in values], width, label=name)
    chart.set_xticks([index + 0.4 - width / 2 for index in range(len(names))], names, fontsize=8)
    chart.set_ylabel("rows rescaled of possible")
    chart.set_title(f"on {_short(document['observed']['problem'])}", fontsize=7)
    if drawn:
        chart.legend(fontsize=7)


def _short(text: str) -> str:
    """Return a problem's operation and the fields that are not at their defaults."""
    problem = parse_problem(text)
    return f"{problem.op} {short_fields(problem)}"


def _share(seen: Mapping[str, Any] | None) -> float | None:
    counts = seen and seen["rescales"]
    if not counts or not counts["rows_possible"]:
        return None
    return float(counts["rows"] / counts["rows_possible"])


def plot_bench(bench: Bench, path: Path) -> None:
    """Draw the rate of every contender on every problem.

    Args:
        bench: the results.
        path: the file to write; its suffix names the format.
    """
    require_matplotlib(path)
    names = [OWN, DEFAULT, *bench.peers]
    figure = new_figure(max(8.0, 1.3 * len(bench.rows)), 5.5)
    chart = figure.subplots()
    width = 0.8 / len(names)
    problems = [parse_problem(row.problem) for row in bench.rows]
    for place, name in enumerate(names):
        left = [index + width * place for index in range(len(problems))]
        chart.bar(left, _rates(bench, name), width, label=name)
    ticks = [index + 0.4 - width / 2 for index in range(len(problems))]
    labels = [short_fields(problem).replace(" ", "\n") for problem in problems]
    chart.set_xticks(ticks, labels, fontsize=6)
    chart.set_ylabel(" or ".join(_units(bench)))
    chart.set_title(f"{bench.op}: {bench.device.name}, {bench.measured}")
    chart.legend(fontsize=8)
    save_figure(figure, path)


def _rates(bench: Bench, name: str) -> list[float]:
    times = [(parse_problem(row.problem), row.latency(name)) for row in bench.rows]
    return [rate(bench, problem, time)[0] if time else 0.0 for problem, time in times]


def _units(bench: Bench) -> list[str]:
    problems = [parse_problem(row.problem) for row in bench.rows]
    return list(dict.fromkeys(rate(bench, problem, 1.0)[1] for problem in problems))


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure that needs no display; sizes in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure; the same figure gives the same SVG."""
    import matplotlib

    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context({"svg.hashsalt": "ktune"}):
            figure.savefig(path, metadata=metadata)
    except OSError as error:
        raise KtuneError(f"cannot write {path}: {error.strerror}") from error
