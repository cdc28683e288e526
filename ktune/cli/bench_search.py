"""``ktune bench search``: ktune's own search beside another tuner's, over the same variants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktune import settings
from ktune.cli.console import emit, note, show, table
from ktune.cli.options import common, find_space, parse_device
from ktune.cli.plan import LIVE, choose_problems, recording_name
from ktune.errors import KtuneError, UsageError

if TYPE_CHECKING:
    from ktune.bench.autotune import Tuning
    from ktune.bench.worker import Worker
    from ktune.device import Device
    from ktune.problem import Problem
    from ktune.report.search_race import Race, RaceRow
    from ktune.space import Space

START_LIMIT_S = 120.0
FINALS_LIMIT_S = 600.0
RAN = (0, 1)
"""Exit codes of a search that ran to its end; 1 if a problem has no winner."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for."""

    op: str
    index: int
    rounds: int
    top: int
    limit_s: float | None
    options: tuple[str, ...]
    reference: str | None

    @property
    def where(self) -> str:
        """The GPU as PyTorch writes it."""
        return f"cuda:{self.index}"


@click.command()
@click.argument("op", metavar="OP|SPACE.yaml")
@click.option("--problems", "--problem", "problems", multiple=True, metavar="SET|TEXT")
@click.option(
    "--against",
    type=click.Choice(["triton"]),
    default="triton",
    show_default=True,
    help="The other tuner: triton.autotune, exhaustively.",
)
@click.option("--effort", metavar="NAME", help="Handed to ktune search.")
@click.option("--trials", type=click.IntRange(1), help="Handed to ktune search.")
@click.option("--device", default="cuda:0", show_default=True, help="The GPU to measure on.")
@click.option(
    "--limit",
    type=click.FloatRange(0, min_open=True),
    metavar="S",
    help="Seconds that the other tuner has for all problems; what it does not reach is said.",
)
@click.option("--rounds", default=30, show_default=True, type=click.IntRange(3), help="Of finals.")
@click.option(
    "--top",
    default=3,
    show_default=True,
    type=click.IntRange(1),
    help="How many of the fastest, as the other tuner saw them, take part in the finals.",
)
@click.option(
    "--reference",
    metavar="FILE|h200",
    help="An exhaustive recording of this device, whose fastest take part in the finals too.",
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.json")
@common
def bench_search(
    op: str,
    problems: tuple[str, ...],
    against: str,
    effort: str | None,
    trials: int | None,
    device: str,
    limit: float | None,
    rounds: int,
    top: int,
    reference: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Search with ktune and with triton.autotune, from cold caches, and compare both.

    Wall time of each, and how far each one's pick is from the best that is known, all timed in
    turn in a last run.

    Example: ktune bench search softmax --problems baseline --limit 1800
    """
    recording_name(LIVE, [device], replayable=False)
    options = [*(["--effort", effort] if effort else [])]
    options += ["--trials", str(trials)] if trials else []
    request = Request(op, parse_device(device), rounds, top, limit, tuple(options), reference)
    space = find_space(op)
    race = run_race(request, space, choose_problems([space], problems)[space.op])
    if output is not None:
        _write(output, race.to_dict())
    if as_json:
        emit("bench search", race.to_dict())
    else:
        _print(race)
    if not race.complete:
        click.get_current_context().exit(1)


def run_race(request: Request, space: Space, problems: Sequence[Problem]) -> Race:
    """Let ktune search, then the other tuner, then time what they picked in turn."""
    from datetime import UTC, datetime

    from ktune import __version__
    from ktune.bench.autotune import autotune_problems
    from ktune.bench.timer import PROTOCOL
    from ktune.report.search_race import KTUNE, TRITON, Race
    from ktune.target.target import versions

    device, below = _describe(request.index)
    references = _reference(request, space, problems, device)
    texts = [problem.text for problem in problems]
    note(f"ktune search {space.op}: {len(texts)} problems")
    picks, own_s, own_phases = run_ktune_search(request.op, texts, request.where, request.options)
    variants = {p.text: [v.text for v in space.variants(p, device)] for p in problems}
    with tempfile.TemporaryDirectory(prefix="ktune-race-") as folder:
        seen, other_s = autotune_problems(
            variants, request.where, Path(folder), request.limit_s, note
        )
        phases: dict[str, float] = {}
        for tuning in seen.values():
            for name, value in tuning.seconds.items():
                phases[name] = round(phases.get(name, 0.0) + value, 3)
        phases["start"] = round(max(0.0, other_s - sum(phases.values())), 3)
        both = {
            text: {
                **({KTUNE: picks[text]} if text in picks else {}),
                **({TRITON: best} if (best := seen[text].best) else {}),
            }
            for text in texts
        }
        rows = list(_finals(request, both, seen, references, Path(folder)))
    return Race(
        op=space.op,
        device=device,
        protocol=PROTOCOL,
        measured=datetime.now(UTC).date().isoformat(),
        versions={**versions(), **below, "ktune": __version__},
        rounds=request.rounds,
        options=list(request.options),
        limit_s=request.limit_s,
        seconds={KTUNE: round(own_s, 3), TRITON: round(other_s, 3)},
        breakdown={KTUNE: own_phases, TRITON: phases},
        rows=rows,
    )


def run_ktune_search(
    op: str, problems: Sequence[str], where: str = "cuda:0", options: Sequence[str] = ()
) -> tuple[dict[str, str], float, dict[str, float]]:
    """Run ``ktune search`` as a user does, in a process of its own and from cold caches.

    Args:
        op: the operation, or a space's path.
        problems: their texts.
        where: the GPU.
        options: further words of the command line.

    Returns:
        the winners' texts by problem text, wall seconds, and seconds by phase if it says so.

    Raises:
        KtuneError: the search did not run to its end.
    """
    command = [sys.executable, "-m", "ktune.cli", "search", op, "--device", where, "--json"]
    for text in problems:
        command += ["--problem", text]
    with tempfile.TemporaryDirectory(prefix="ktune-race-") as folder:
        started = time.monotonic()
        done = subprocess.run(
            [*command, *options],
            env={**os.environ, **_cold(Path(folder))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - started
    if done.returncode not in RAN:
        raise KtuneError(
            f"ktune search ended with exit code {done.returncode}; its messages are above"
        )
    try:
        document = json.loads(done.stdout)
        results = document["results"]
        picks = {each["problem"]: each["winner"] for each in results if each["winner"]}
    except (ValueError, KeyError, TypeError) as error:
        raise KtuneError(f"ktune search printed no document with results: {error!r}") from error
    return picks, seconds, _phases(document.get("breakdown"))


def _cold(folder: Path) -> dict[str, str]:
    """Return the environment of a first run on a new machine, with this very ktune."""
    return {
        settings.CACHE_DIR: str(folder / "ktune"),
        settings.TABLE_PATH: str(folder / "table.json"),
        settings.STORAGE: f"sqlite:///{folder / 'studies.sqlite3'}",
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "PYTHONPATH": os.pathsep.join(part or str(Path.cwd()) for part in sys.path),
    }


def _phases(found: Any) -> dict[str, float]:
    """Return the seconds by phase in what a search says of itself, whatever phases it has."""
    items = found.items() if isinstance(found, Mapping) else ()
    return {
        str(name): float(value)
        for name, value in items
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _describe(index: int) -> tuple[Device, dict[str, str]]:
    """Return the device and the versions below PyTorch, from a process that then ends."""
    from ktune.bench.tasks import DEVICE
    from ktune.device import Device
    from ktune.report.bench import VERSIONS

    with _worker({}) as worker:
        fields = worker.call(DEVICE, f"cuda:{index}", timeout_s=START_LIMIT_S)
        return Device.from_dict(fields), worker.call(VERSIONS, index, timeout_s=START_LIMIT_S)


def _reference(
    request: Request, space: Space, problems: Sequence[Problem], device: Device
) -> dict[str, list[str]]:
    """Return the fastest variants that a recording knows, by problem text.

    Raises:
        UsageError: the recording is of another device.
    """
    from ktune.target.recording import find_recording

    if request.reference is None:
        return {}
    known = find_recording(request.reference, space.op)
    if known.device.key != device.key:
        raise UsageError(
            f"--reference {request.reference} is of {known.device.key}, and this is {device.key}"
        )
    fastest = {}
    for problem in problems:
        outcomes = known.problem(problem).outcomes
        legal = {variant.text for variant in space.variants(problem, device)}
        timed = {t: m.latency_ms for t, m in outcomes.items() if m.ok and m.latency_ms}
        ranked = sorted(timed.keys() & legal, key=timed.__getitem__)
        fastest[problem.text] = ranked[: request.top]
    return fastest


def _finals(
    request: Request,
    picks: Mapping[str, dict[str, str]],
    seen: Mapping[str, Tuning],
    references: Mapping[str, list[str]],
    folder: Path,
) -> Iterator[RaceRow]:
    """Check each problem's finalists, and time the right ones in turn.

    A failing worker costs that problem only.
    """
    from ktune.bench.tasks import FINALS
    from ktune.bench.worker import WorkerError
    from ktune.report.search_race import RaceRow, finalists

    cache = {"TRITON_CACHE_DIR": str(folder / "triton"), settings.CACHE_DIR: str(folder / "ktune")}
    with _worker(cache) as worker:
        for text, chosen in picks.items():
            todo = finalists(chosen, seen[text], references.get(text, []), request.top)
            note(f"finals of {text}: {len(todo)} variants")
            unfit = _unfit(worker, text, todo, request.where)
            fit = [variant for variant in todo if variant not in unfit]
            if not fit:
                yield RaceRow(chosen, {}, seen[text], unfit, "no finalist passed")
                continue
            rest = (request.rounds, request.where)
            try:
                found = worker.call(FINALS, text, fit, [], *rest, timeout_s=FINALS_LIMIT_S)
                yield RaceRow(chosen, found, seen[text], unfit)
            except WorkerError as error:
                yield RaceRow(chosen, {}, seen[text], unfit, str(error))


def _unfit(worker: Worker, problem: str, variants: Sequence[str], where: str) -> dict[str, str]:
    """Return which variants are wrong or fail, and why; the other tuner does not look."""
    from ktune.bench.measurement import Measurement
    from ktune.bench.tasks import MEASURE
    from ktune.bench.worker import WorkerError

    found = {}
    for text in variants:
        try:
            values = worker.call(MEASURE, problem, text, where, None, timeout_s=FINALS_LIMIT_S)
            outcome = Measurement.from_dict(values)
            if not outcome.ok:
                found[text] = f"{outcome.status}: {outcome.detail}"
        except WorkerError as error:
            found[text] = str(error)
    return found


@contextmanager
def _worker(environment: Mapping[str, str]) -> Iterator[Worker]:
    from ktune.bench.tasks import COMPILER
    from ktune.bench.worker import Worker

    worker = Worker({**COMPILER, **environment})
    try:
        yield worker
    finally:
        worker.kill()


def _print(race: Race) -> None:
    from ktune.report.search_race import notes, problems_table, sides_table

    columns, rows = problems_table(race)
    first = table(f"{race.op}: {race.provenance}", columns, rows)
    show(first, table("", *sides_table(race)), *notes(race))


def _write(path: Path, document: Mapping[str, Any]) -> None:
    from ktune.files import write_atomically

    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        write_atomically(path, text)
    except OSError as error:
        raise KtuneError(f"cannot write {path}: {error.strerror}") from error
    note(f"wrote {path}")
