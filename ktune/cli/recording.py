"""``ktune recording``: look at recordings, and exchange them with other tuners as T4."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktune.cli.console import emit, note, number, short_names, show, warn
from ktune.cli.console import table as rich_table
from ktune.cli.options import common, parse_device, parse_settings
from ktune.errors import KtuneError, RecordingError, UsageError

if TYPE_CHECKING:
    from ktune.device import Device
    from ktune.problem import Problem
    from ktune.target.recording import RecordedProblem, Recording

RECORDING = "FILE|h200"
ANY = click.Path(path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)

IMPORT_EXAMPLE = """\b
Examples:
  ktune recording import t4/softmax_* -o softmax.json
  ktune recording import tuned.json -o softmax.json --device h200 \\
    --problem "softmax m=4096 n=4096" --set template=one_tile
"""


@click.group()
def recording() -> None:
    """Look after recordings: every variant's outcome on one device, to be replayed.

    A recording is a file, or the name of one that comes with ktune (h200).
    """


def open_recordings(target: str, op: str | None) -> list[tuple[Path, Recording]]:
    """Return the recordings of a shipped name, or the one in a file; of one operation if asked.

    Raises:
        RecordingError: there is none, or it cannot be read.
    """
    from ktune.target.recording import find_recording, read_recording, shipped_recordings

    shipped = shipped_recordings()
    if target in shipped:
        if op is not None:
            find_recording(target, op)
        return [(path, read_recording(path)) for path in shipped[target] if op in {None, path.stem}]
    path = Path(target)
    if op is None and path.is_file():
        return [(path, read_recording(path))]
    return [(path, find_recording(target, op or ""))]


@recording.command("show")
@click.argument("target", metavar=RECORDING)
@click.option("--op", metavar="OP", help="Only this operation.")
@common
def show_recording(target: str, op: str | None, as_json: bool) -> None:
    """Print what a recording holds: problems, outcomes, best times, and how they were taken."""
    found = open_recordings(target, op)
    if as_json:
        emit("recording show", {"recordings": [_document(path, known) for path, known in found]})
        return
    for path, known in found:
        show(_table(path, known))
        if known.stale:
            warn(f"{path}: the templates have changed since; the times are of other kernels")


@recording.command()
@click.argument("target", metavar=RECORDING)
@click.argument("output", metavar="OUT", type=ANY)
@click.option("--op", metavar="OP", help="Only this operation.")
@click.option(
    "--problem",
    "--problems",
    "problems",
    multiple=True,
    metavar="TEXT",
    help="Only this problem; repeatable. With the operation's name first if there are several.",
)
@common
def export(
    target: str, output: Path, op: str | None, problems: tuple[str, ...], as_json: bool
) -> None:
    """Write a recording as T4, the results format of Kernel Tuner: one file a problem.

    OUT is a folder; or FILE.json, for a single problem.

    Example: ktune recording export h200 t4 --op softmax
    """
    from ktune.target.t4 import to_t4

    found = open_recordings(target, op)
    chosen = _chosen([known for _, known in found], problems)
    single = output.suffix == ".json"
    if single and len(chosen) != 1:
        raise UsageError(
            f"T4 holds one problem a file, and {len(chosen)} are chosen for {output}; choose one "
            "with --problem, or name a folder"
        )
    written = []
    for known, problem in chosen:
        path = output if single else output / f"{problem.text.replace(' ', '_')}.json"
        document = to_t4(known, problem)
        _write(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
        written.append({"path": path, "problem": problem.text, "results": len(document["results"])})
    if as_json:
        emit("recording export", {"files": written})
    else:
        show(*(f"{each['path']}: {each['results']} results" for each in written))


@recording.command("import", epilog=IMPORT_EXAMPLE)
@click.argument("sources", nargs=-1, required=True, metavar="T4FILE...", type=ANY)
@click.option("-o", "--output", required=True, type=FILE, help="The recording to write.")
@click.option(
    "--problem",
    "problems",
    multiple=True,
    metavar="TEXT",
    help="Of a file that another tuner wrote; one for each, in their order.",
)
@click.option(
    "--device",
    metavar="h200|FILE|cuda:0",
    help="What another tuner's times were taken on: a recording's device, or a GPU here.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter that all of another tuner's configurations share; repeatable.",
)
@common
def import_t4(
    sources: tuple[Path, ...],
    output: Path,
    problems: tuple[str, ...],
    device: str | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Read T4 files, or folders of them, into one recording that `ktune search` can replay.

    Files that ktune exported say everything. Of files that another tuner wrote, the options say
    which problem and device the times are of, and what all configurations share.
    """
    from ktune.target.t4 import Origin, from_t4

    origin = None
    if problems or device or settings:
        if not problems or not device:
            raise UsageError("another tuner's file needs both: --problem and --device")
        asked = tuple(_problem(text) for text in problems)
        origin = Origin(asked, _device(device), parse_settings(settings))
    documents = {str(path): _read(path) for path in _files(sources)}
    known = from_t4(documents, origin)
    try:
        known.write(output)
    except OSError as error:
        raise KtuneError(f"cannot write {output}: {error.strerror}") from error
    if as_json:
        emit("recording import", {"path": output, "recording": _document(output, known)})
        return
    show(_table(output, known))
    note(f"wrote {output}; replay it: ktune search {known.op} --target {output}")


def _chosen(
    recordings: Sequence[Recording], texts: Sequence[str]
) -> list[tuple[Recording, Problem]]:
    """Return the problems to export, with their recordings; all if none is named."""
    from ktune.operations import parse_problem

    if not texts:
        return [(known, parse_problem(text)) for known in recordings for text in known.problems]
    chosen = []
    for text in texts:
        first = text.split()[0] if text.split() else ""
        of = [known for known in recordings if "=" not in first and known.op == first]
        if "=" not in first and not of:
            held = ", ".join(known.op for known in recordings)
            raise RecordingError(f"--problem {text!r}: the recording is of {held}")
        if not of and len(recordings) > 1:
            raise UsageError(
                f"--problem {text!r} could be of {' or '.join(k.op for k in recordings)}; "
                f'say which: "{recordings[0].op} {text}"'
            )
        known = (of or list(recordings))[0]
        problem = parse_problem(text if of else f"{known.op} {text}")
        known.problem(problem)
        chosen.append((known, problem))
    return chosen


def _problem(text: str) -> Problem:
    from ktune.operations import parse_problem

    try:
        return parse_problem(text)
    except (UsageError, ValueError) as error:
        raise UsageError(f'--problem {text!r}: {error}. Write "softmax m=4096 n=1024"') from error


def _device(text: str) -> Device:
    """Return the device of a recording, or the GPU of this machine that the text names."""
    from ktune.device import device_of
    from ktune.target.recording import shipped_recordings

    if text in shipped_recordings() or Path(text).is_file():
        return open_recordings(text, None)[0][1].device
    if text.startswith("cuda"):
        return device_of(parse_device(text))
    names = ", ".join(shipped_recordings())
    raise UsageError(f"--device {text!r} is no recording ({names}, or a FILE) and no GPU (cuda:0)")


def _files(sources: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for source in sources:
        inside = sorted(source.glob("*.json")) if source.is_dir() else [source]
        if not inside:
            raise RecordingError(f"{source} is a folder without .json files")
        found += inside
    return list(dict.fromkeys(found))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise RecordingError(f"{path} is not JSON: {error}") from error


def _write(path: Path, text: str) -> None:
    from ktune.files import write_atomically

    try:
        write_atomically(path, text)
    except OSError as error:
        raise KtuneError(f"cannot write {path}: {error.strerror}") from error


def _best(seen: RecordedProblem) -> tuple[str, float] | None:
    """Return the variant with the least median, and that median in ms."""
    timed = [(m.latency_ms, text) for text, m in seen.outcomes.items() if m.ok and m.latency_ms]
    return (min(timed)[1], min(timed)[0]) if timed else None


def _document(path: Path, known: Recording) -> dict[str, Any]:
    problems = []
    for text, seen in known.problems.items():
        best = _best(seen)
        problems.append(
            {
                "problem": text,
                "outcomes": dict(Counter(m.status for m in seen.outcomes.values())),
                "best": best[0] if best else None,
                "best_ms": best[1] if best else None,
                "finals": list(seen.finals),
                "rejected": seen.rejected,
            }
        )
    return {
        "path": path,
        "operation": known.op,
        "device": known.device.to_dict(),
        "protocol": known.protocol,
        "measured": known.measured,
        "versions": known.versions,
        "roofs": known.roofs,
        "templates": known.templates,
        "stale": known.stale,
        "problems": problems,
    }


def _table(path: Path, known: Recording) -> Any:
    same, names = short_names([text.partition(" ")[2] for text in known.problems])
    columns = [same or "problem", "variants", "ok", "wrong", "failed", "best ms", "best"]
    rows = []
    for name, seen in zip(names, known.problems.values(), strict=True):
        counts, best = Counter(m.status for m in seen.outcomes.values()), _best(seen)
        failed = counts.total() - counts["ok"] - counts["wrong"]
        times = [number(best[1]), best[0]] if best else ["-", "none passed"]
        cells = [counts.total(), counts["ok"], counts["wrong"], failed]
        rows.append([name, *map(str, cells), *times])
    versions = ", ".join(f"{name} {version}" for name, version in sorted(known.versions.items()))
    title = f"{known.op} on {known.title} ({versions or 'versions unknown'}), {known.protocol}"
    return rich_table(f"{title}\n{path}", columns, rows)
