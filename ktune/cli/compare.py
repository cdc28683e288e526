"""``ktune compare``: set strategies side by side on time, rescales and error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktune.cli.console import emit, note, show, table
from ktune.cli.options import common, find_space, parse_device
from ktune.cli.plan import AUTO, open_recording, recording_name

if TYPE_CHECKING:
    from ktune.problem import Problem
    from ktune.report import Comparison, Line, Strategy
    from ktune.space import Space

NONE = "\N{EN DASH}"
BUDGET = 12


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for."""

    axis: str
    space: Space
    strategies: list[Strategy]
    distributions: list[str]
    problems: str | None
    budget: int


@click.command()
@click.argument("axis", metavar="AXIS")
@click.option("--op", default="attention", show_default=True, help="Operation, or a space's path.")
@click.option("--problem", "--problems", "problems", metavar="TEXT", help="A problem, or a set.")
@click.option(
    "--target", default=AUTO, show_default=True, help="auto, live, h200 or a recording's path."
)
@click.option("--device", metavar="cuda:0", help="The GPU to measure on.")
@click.option("--strategies", metavar="A,B", help="Only these; fa4 stands for fa4_row, fa4_tile.")
@click.option("--distributions", metavar="A,B", help="Only these distributions of inputs.")
@click.option(
    "--trials",
    default=BUDGET,
    show_default=True,
    type=click.IntRange(1),
    help="Variants of each strategy to measure on a GPU.",
)
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw FILE.svg or FILE.png.")
@common
def compare(
    axis: str,
    op: str,
    problems: str | None,
    target: str,
    device: str | None,
    strategies: str | None,
    distributions: str | None,
    trials: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Set strategies side by side: time, rescales done of possible, error.

    AXIS is `rescale` (all named strategies of the operation), or any parameter, such as
    `normalization`. On a GPU everything is measured; elsewhere times are those of a recording,
    and rescales and errors come from Triton's interpreter on a smaller problem.

    Example: ktune compare rescale --strategies fa2,fa4
    """
    from ktune.report.compare import distributions_of, strategies_of
    from ktune.report.plot import plot_comparisons, require_matplotlib

    space = find_space(op)
    chosen = strategies_of(space, axis, _words(strategies))
    kinds = distributions_of(space, _words(distributions))
    if plot is not None:
        require_matplotlib(plot)
    request = Request(axis, space, chosen, kinds, problems, trials)
    recording = recording_name(target, [device] if device else [])
    if recording is None:
        found = _live(request, parse_device(device or "cuda:0"))
    else:
        found = _replayed(request, recording, target)
    documents = [comparison.to_dict() for comparison in found]
    if as_json:
        emit("compare", {"comparisons": documents})
    else:
        for comparison in found:
            show(*_parts(comparison))
    if plot is not None:
        plot_comparisons(documents, plot)
        note(f"drawn to {plot}")


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _replayed(request: Request, name: str, target: str) -> list[Comparison]:
    from ktune.report import Comparison
    from ktune.report.compare import (
        observe_lines,
        replay_lines,
        small_problem,
        small_tiles,
        target_fields,
        usual_problem,
    )

    recording = open_recording(name, request.space.op, target)
    note(f"times are replayed from {recording.title}; rescales and errors are interpreted here")
    usual = usual_problem(request.space, request.strategies, recording.device, recording)
    found = []
    for problem in _problems(request, usual):
        lines = replay_lines(recording, request.space, problem, request.strategies)
        small = small_problem(problem)
        observe_lines(lines, small, request.distributions, None, _progress())
        fields = target_fields(recording, recording.title)
        tiles = small_tiles(small)
        found.append(Comparison(request.axis, problem, small, True, tiles, fields, lines))
    return found


def _live(request: Request, index: int) -> list[Comparison]:
    from ktune.report import Comparison
    from ktune.report.compare import (
        observe_lines,
        search_lines,
        target_fields,
        time_lines,
        usual_problem,
    )
    from ktune.target.live import LiveTarget

    target = LiveTarget([f"cuda:{index}"])
    try:
        usual = usual_problem(request.space, request.strategies, target.device, None)
        found = []
        for problem in _problems(request, usual):
            asked, kinds = request.strategies, request.distributions
            lines = search_lines(target, request.space, problem, asked, request.budget, _progress())
            observe_lines(lines, problem, kinds, index, _progress())
            time_lines(lines, problem, kinds, index, _progress())
            fields = target_fields(target, None)
            found.append(Comparison(request.axis, problem, problem, False, {}, fields, lines))
        return found
    finally:
        target.close()


def _problems(request: Request, usual: Problem) -> list[Problem]:
    return request.space.problem_set(request.problems) if request.problems else [usual]


def _progress() -> Callable[[str], None]:
    """Return a listener that writes a line every 10 s at most."""
    from time import monotonic

    last = [monotonic()]

    def say(text: str) -> None:
        if monotonic() - last[0] > 10:
            last[0] = monotonic()
            note(text)

    return say


def _parts(comparison: Comparison) -> list[Any]:
    """Return what a person reads of a comparison."""
    lines, target = comparison.lines, comparison.target
    where = target["device"]["name"]
    times = f"replayed from {target['replayed_from']}" if target["replayed_from"] else "measured"
    title = f"{comparison.problem.text}\ntimes on {where}, {times}, {target['protocol']}"
    parts: list[Any] = [table(title, _TIME_COLUMNS, _time_rows(lines), numbers=False)]
    names = list(dict.fromkeys(name for line in lines for name in line.observations))
    seen = "at the same problem"
    if comparison.interpreted:
        seen = f"in Triton's interpreter on {comparison.observed.text}"
    if any(o.rescales for line in lines for o in line.observations.values()):
        title = f"rescales of possible, rows / tiles, {seen}"
        parts.append(table(title, ["strategy", *names], _rows(lines, names, _share), False))
    title = f"largest error against float64 / limit, {seen}"
    parts.append(table(title, ["strategy", *names], _rows(lines, names, _error), False))
    if any(o.latency_ms for line in lines for o in line.observations.values()):
        rows = _rows(lines, names, _time)
        parts.append(table("time on each distribution, ms", ["strategy", *names], rows, False))
    details = [f"{line.strategy.name}: {line.detail}" for line in lines if line.detail]
    details += [
        f"{line.strategy.name} on {name}: {seen.detail}"
        for line in lines
        for name, seen in line.observations.items()
        if seen.detail
    ]
    return [*parts, *details]


_TIME_COLUMNS = ["strategy", "ms", "of the fastest", "best of", "variant"]


def _time_rows(lines: Sequence[Line]) -> list[list[str]]:
    fastest = min((line.latency_ms for line in lines if line.latency_ms), default=None)
    return [
        [
            line.strategy.name,
            f"{line.latency_ms:.4g}" if line.latency_ms else NONE,
            f"{line.latency_ms / fastest:.3f}x" if line.latency_ms and fastest else NONE,
            str(line.considered),
            line.variant.text if line.variant else NONE,
        ]
        for line in lines
    ]


def _rows(
    lines: Sequence[Line], names: Sequence[str], cell: Callable[[Any], str]
) -> list[list[str]]:
    return [
        [line.strategy.name]
        + [cell(line.observations[n]) if n in line.observations else NONE for n in names]
        for line in lines
    ]


def _share(seen: Any) -> str:
    counts = seen.rescales
    if counts is None:
        return NONE
    shares = (counts.row_share, counts.tile_share)
    return " / ".join(NONE if share is None else f"{share:.3g}" for share in shares)


def _error(seen: Any) -> str:
    if seen.error is None or seen.limit is None:
        return "fails" if seen.detail else NONE
    return f"{seen.error:.2g} / {seen.limit:.2g}" + ("  FAILS" if seen.detail else "")


def _time(seen: Any) -> str:
    return f"{seen.latency_ms:.4g}" if seen.latency_ms else NONE
