"""``ktune replay``: how good each sampler is, on a recording, without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktune.cli.console import emit, note, short_names, show, table, warn
from ktune.cli.options import common
from ktune.errors import KtuneError, UsageError
from ktune.search.effort import AUTO, SAMPLERS, parse_seconds

if TYPE_CHECKING:
    from ktune.report.exam import Paper, Setting
    from ktune.report.samplers import ProblemScore, Score, Spread, Trials

ALL = "all"
NEVER = "\N{INFINITY}"
WORKERS = 16
EXAMPLE = """\b
Examples:
  ktune replay h200 --sampler auto,random,tpe
  ktune replay my-gpu.json --trials 20 --seeds 5
  ktune replay h200 --sampler all --output samplers.json --plot samplers.svg
"""


@click.command(epilog=EXAMPLE)
@click.argument("target", metavar="FILE|h200")
@click.option("--op", metavar="OP", help="Only this operation.")
@click.option(
    "--sampler",
    default=f"{AUTO},random",
    show_default=True,
    metavar="A,B|all",
    help=f"What to compare: {', '.join(SAMPLERS)}.",
)
@click.option(
    "--seeds", default=30, show_default=True, type=click.IntRange(1), help="Runs of each."
)
@click.option("--trials", type=click.IntRange(1), help="Evaluations of each problem.")
@click.option("--budget", metavar="10m", help="Simulated time for all problems together.")
@click.option(
    "--compilers", type=click.IntRange(1), help="Compile workers to simulate; only this number."
)
@click.option("--no-seeds", is_flag=True, help="Only without the seed variants of the YAML file.")
@click.option("--shuffle", is_flag=True, help="Only with the problems in another order each run.")
@click.option("--jobs", type=click.IntRange(1), help="Processes.  [default: one for each core]")
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw FILE.svg or FILE.png.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Also write FILE.json."
)
@common
def replay(
    target: str,
    op: str | None,
    sampler: str,
    seeds: int,
    trials: int | None,
    budget: str | None,
    compilers: int | None,
    no_seeds: bool,
    shuffle: bool,
    jobs: int | None,
    plot: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Compare samplers on a recording: regret after a tenth of the space, and time until 2 %.

    The search is the real one; recorded times answer, and compiling and timing take simulated
    time. Regret is the best latency so far / the best recorded - 1. All problems are searched as
    one campaign in the space's order, so later ones profit from earlier ones.

    Without an option that chooses, there are three settings: one compile worker with and without
    the YAML's seed variants, and 16 with. Without --trials or --budget each problem goes on until
    its best is found, and its neighbours are told what a tenth of its space had shown.
    """
    from ktune.report.plot_samplers import plot_samplers
    from ktune.report.samplers import FEWER_SEEDS, all_cores, try_samplers

    if plot is not None:
        from ktune.report.plot import require_matplotlib

        require_matplotlib(plot)
    names = _samplers(sampler)
    papers = _papers(target, op)
    budget_s = parse_seconds(budget) if budget else math.inf
    settings = _settings(compilers, no_seeds, shuffle, trials, budget_s)
    for name in names:
        if FEWER_SEEDS.get(name, seeds) < seeds:
            note(f"{name}: {FEWER_SEEDS[name]} of {seeds} seeds")
    found = try_samplers(papers, settings, names, seeds, jobs or all_cores(), _progress())
    for each in found:
        _warn(each)
    document = {"operations": [each.to_dict() for each in found]}
    if as_json:
        emit("replay", document)
    else:
        show(*(part for each in found for part in _parts(each)))
    if output is not None:
        _write(output, document)
    if plot is not None:
        plot_samplers(document["operations"], plot)
        note(f"drawn to {plot}")


def _samplers(text: str) -> list[str]:
    names = [word.strip() for word in text.split(",") if word.strip()]
    if names == [ALL]:
        return list(SAMPLERS)
    for name in names:
        if name not in SAMPLERS:
            known = ", ".join([*SAMPLERS, ALL])
            raise UsageError(f"no sampler {name!r}; samplers: {known}")
    if not names:
        raise UsageError("--sampler names none")
    return list(dict.fromkeys(names))


def _papers(target: str, op: str | None) -> list[Paper]:
    from ktune.cli.recording import open_recordings
    from ktune.report.exam import Paper

    return [Paper(target, known.op) for _, known in open_recordings(target, op)]


def _settings(
    compilers: int | None, no_seeds: bool, shuffle: bool, trials: int | None, budget_s: float
) -> list[Setting]:
    from ktune.report.exam import Setting

    if compilers is None and not no_seeds and not shuffle:
        kinds = [(1, True), (1, False), (WORKERS, True)]
    else:
        kinds = [(compilers or 1, not no_seeds)]
    return [Setting(count, seeded, shuffle, trials, budget_s) for count, seeded in kinds]


def _progress() -> Callable[[str], None]:
    """Return a listener that writes a line every 15 s at most."""
    from time import monotonic

    last = [monotonic()]

    def say(text: str) -> None:
        if monotonic() - last[0] > 15:
            last[0] = monotonic()
            note(text)

    return say


def _warn(trials: Trials) -> None:
    what = f"{trials.paper.op} in {trials.paper.target}"
    if trials.stale:
        warn(f"{what}: the templates have changed since; the times are of other kernels")
    if trials.unrecorded:
        warn(f"{what}: {trials.unrecorded} legal variants are not recorded and count as failed")


def _parts(trials: Trials) -> list[Any]:
    """Return what a person reads of one operation: a table a setting, and the worst cases."""
    parts: list[Any] = []
    for setting in trials.settings:
        scores = trials.of(setting)
        after = "a tenth of the space" if setting.open else "the budget"
        title = (
            f"{trials.paper.op} on {trials.device}, recorded {trials.measured}: {setting.title}\n"
            f"regret after {after}; evaluations and simulated seconds until it is at most 2 %"
        )
        parts.append(table(title, _COLUMNS, [_row(score) for score in scores]))
        parts.append(_worst(scores))
    cost = ", ".join(f"{name} {ms:.2g}" for name, ms in trials.cost.items())
    parts.append(f"ms of this machine for an evaluation: {cost}\n")
    return parts


_COLUMNS = [
    *("sampler", "seeds", "median", "95th", "worst", "evaluations: mean", "median"),
    *("seconds: mean", "median"),
]


def _row(score: Score) -> list[str]:
    return [
        score.sampler,
        str(score.seeds),
        *_percents(score.regret),
        *_counts(score.evaluations),
        *_counts(score.seconds),
    ]


def _worst(scores: Sequence[Score]) -> Any:
    cases: list[tuple[str, ProblemScore]] = [
        (score.sampler, case) for score in scores for case in score.worst_cases
    ]
    same, names = short_names([case.problem.partition(" ")[2] for _, case in cases])
    columns = ["sampler", f"worst cases ({same})", "legal", "median", "95th", "worst",
               "evaluations: mean", "median"]  # fmt: skip
    rows = [
        [sampler, name, str(case.legal), *_percents(case.regret), *_counts(case.evaluations)]
        for name, (sampler, case) in zip(names, cases, strict=True)
    ]
    return table("", columns, rows)


def _percents(spread: Spread) -> list[str]:
    values = (spread.median, spread.p95, spread.worst)
    return [NEVER if value is None else f"{100 * value:.2f} %" for value in values]


def _counts(spread: Spread) -> list[str]:
    return [NEVER if v is None else f"{v:.1f}" for v in (spread.mean, spread.median)]


def _write(path: Path, document: dict[str, Any]) -> None:
    from ktune.files import write_atomically
    from ktune.report.samplers import document_text

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, document_text(document["operations"]))
    except OSError as error:
        raise KtuneError(f"cannot write {path}: {error.strerror}") from error
    note(f"written to {path}")
