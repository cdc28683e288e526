"""``ktune check``: validate search spaces and templates, with no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktune.cli.console import emit, number, short_names, show, table
from ktune.cli.options import DEFAULT_ARCH, common, find_space, shipped_spaces
from ktune.errors import SpaceError

if TYPE_CHECKING:
    from ktune.cli.contract import Report
    from ktune.device import Device
    from ktune.problem import Problem
    from ktune.space import Space
    from ktune.variant import Variant

LIMIT_S = 300.0
COLUMNS = ("registers", "spill B", "shared B", "error", "limit", "")
MOST_ERRORS = 20
"""Errors of one space that are printed; --json has all."""


@dataclass(slots=True)
class Trial:
    """The default variant or a seed, compiled or interpreted on one problem."""

    problem: str
    variant: str
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    error: float | None = None
    error_limit: float | None = None
    detail: str = ""


@click.command()
@click.argument("spaces", nargs=-1, metavar="[OP|SPACE.yaml...]")
@click.option("--compile", "arch", metavar="ARCH", help="Compile defaults and seeds, as sm_90.")
@click.option("--interpret", is_flag=True, help="Run defaults and seeds in Triton's interpreter.")
@common
@click.pass_context
def check(
    ctx: click.Context, spaces: tuple[str, ...], arch: str | None, interpret: bool, as_json: bool
) -> None:
    """Validate search spaces and their templates; all that ship with ktune by default.

    Checks the YAML, that templates and parameters fit together, that every structure renders
    and parses, and that defaults and seeds are legal. Exits with 1 if anything is wrong.
    """
    from ktune.device import compile_target

    device = compile_target(arch or DEFAULT_ARCH)
    found = [_examined(name, device) for name in spaces or shipped_spaces()]
    trials: list[Trial] = []
    good = [(space, report) for space, report in found if space is not None]
    if arch is not None or interpret:
        trials = try_out(good, device, arch is not None, interpret)
    reports = [report for _, report in found]
    if as_json:
        _emit(reports, trials)
    else:
        _show(reports, trials)
    ctx.exit(1 if any(r.errors for r in reports) or any(t.detail for t in trials) else 0)


def _examined(name: str, device: Device) -> tuple[Space | None, Report]:
    """Return a space and what is wrong with it; a name that does not exist is a usage error."""
    from ktune.cli.contract import Report, examine

    try:
        space = find_space(name)
    except SpaceError as error:
        if name not in shipped_spaces() and not Path(name).is_file():
            raise
        return None, Report(name, errors=str(error).splitlines())
    return space, examine(space, device)


def try_out(
    spaces: Sequence[tuple[Space, Report]], device: Device, compiling: bool, interpret: bool
) -> list[Trial]:
    """Compile and interpret the default variants and seeds in worker processes."""
    from ktune.bench import tasks

    jobs: dict[tuple[str, str], Trial] = {}
    for space, report in spaces:
        for problem, variant in _first(space, report, device):
            key = _job(variant, problem)
            if key is not None:
                jobs.setdefault(key, Trial(problem.text, variant.text))
    trials = list(jobs.values())
    if compiling:
        _in_workers("compile", trials, tasks.COMPILE, tasks.COMPILER, (device.to_dict(),))
    if interpret:
        environment = {**tasks.INTERPRETER, "PYTHONWARNINGS": "ignore::RuntimeWarning"}
        _in_workers("interpret", trials, tasks.INTERPRET, environment, ())
    return trials


def _first(space: Space, report: Report, device: Device) -> Iterator[tuple[Problem, Variant]]:
    from ktune.cli.contract import first_choices

    for problem in report.problems:
        for variant in first_choices(space, problem, device):
            yield problem, variant


def _job(variant: Variant, problem: Problem) -> tuple[str, str] | None:
    """Return what makes two trials the same; None if the variant does not render."""
    from ktune.codegen import render
    from ktune.errors import KtuneError

    try:
        return render(variant, problem).id, str(variant.options)
    except KtuneError:
        return None


def _in_workers(
    what: str,
    trials: Sequence[Trial],
    function: str,
    environment: dict[str, str],
    arguments: tuple[Any, ...],
) -> None:
    """Run a task on every trial, and write the outcome into it."""
    from ktune.bench.worker import Pool, Task
    from ktune.cli.progress import make_view

    pool, view = Pool(len(os.sched_getaffinity(0)), environment), make_view()
    try:
        view.begin(f"{what} 0/{len(trials)}", len(trials))
        for index, trial in enumerate(trials):
            task = Task(function, (trial.problem, trial.variant, *arguments))
            pool.submit(index, task, LIMIT_S)
        for done in range(1, len(trials) + 1):
            index, outcome = pool.next()
            _take(trials[index], what, outcome)
            view.step(done, len(trials), f"{what} {done}/{len(trials)}", False)
    finally:
        pool.close()
        view.close()


def _take(trial: Trial, what: str, outcome: object) -> None:
    if not isinstance(outcome, dict):
        trial.detail = f"{trial.detail}; {what}: {outcome}".removeprefix("; ")
    elif what == "compile":
        for name in ("registers", "spill_bytes", "shared_bytes"):
            setattr(trial, name, outcome.get(name))
    else:
        trial.error, trial.error_limit = outcome["error"], outcome["limit"]
        trial.detail = f"{trial.detail}; {outcome['detail']}".strip("; ")


def _emit(reports: Sequence[Report], trials: Sequence[Trial]) -> None:
    spaces = [
        {
            "space": report.label,
            "templates": report.templates,
            "problems": len(report.problems),
            "legal": report.legal,
            "rendered": report.rendered,
            "errors": report.errors,
        }
        for report in reports
    ]
    emit("check", {"spaces": spaces, "trials": [asdict(trial) for trial in trials]})


def _show(reports: Sequence[Report], trials: Sequence[Trial]) -> None:
    columns = ["space", "templates", "problems", "legal variants", "rendered", "errors"]
    rows = [
        [
            report.label,
            ", ".join(report.templates) or "-",
            *map(str, (len(report.problems), report.legal, report.rendered, len(report.errors))),
        ]
        for report in reports
    ]
    show(table("Search spaces", columns, rows))
    show(*_trial_tables(trials))
    for report in reports:
        show(*report.errors[:MOST_ERRORS])
        if len(report.errors) > MOST_ERRORS:
            show(f"{report.label}: {len(report.errors) - MOST_ERRORS} more; --json has all")
    show(*(f"FAILED {t.problem}, {t.variant}: {t.detail}" for t in trials if t.detail))


def _trial_tables(trials: Sequence[Trial]) -> Iterator[Any]:
    """Yield a table of each operation's trials."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.problem.split()[0], []).append(trial)
    for op, members in groups.items():
        same, problems = short_names([trial.problem for trial in members])
        alike, variants = short_names([trial.variant for trial in members])
        columns = [same.removeprefix(op).strip() or "problem", alike or "variant", *COLUMNS]
        rows = [
            [problem, variant, *_cells(trial)]
            for problem, variant, trial in zip(problems, variants, members, strict=True)
        ]
        yield table(f"{op}: default variants and seeds", columns, rows)


def _cells(trial: Trial) -> list[str]:
    used = (trial.registers, trial.spill_bytes, trial.shared_bytes)
    return [
        *("-" if value is None else str(value) for value in used),
        number(trial.error, 2),
        number(trial.error_limit, 2),
        "FAILED" if trial.detail else "ok",
    ]
