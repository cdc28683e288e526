"""A recording: every legal variant's outcome on one device, and a target that replays it.

A recording is one JSON file: where and when it was taken (device, versions, protocol), and for
each problem the outcome of every variant, the finals' times and the baselines'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktune.bench.measurement import Measurement
from ktune.codegen import template_digest
from ktune.device import Device
from ktune.errors import RecordingError
from ktune.files import write_atomically
from ktune.operations import parse_problem
from ktune.problem import Problem
from ktune.resources import data
from ktune.variant import Variant

SCHEMA = 1
KIND = "ktune-recording"


@dataclass(slots=True)
class RecordedProblem:
    """What was seen on one problem.

    Attributes:
        outcomes: by variant text.
        finals: interleaved samples in milliseconds, by variant text or ``baseline:<name>``.
        rejected: how many points of the raw space each constraint ruled out.
    """

    outcomes: dict[str, Measurement] = field(default_factory=dict)
    finals: dict[str, list[float]] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Recording:
    """The outcomes of one operation on one device, with provenance.

    Attributes:
        templates: digest of the templates that were rendered (``codegen.template_digest``).
        workers: compile workers that ran beside each other; the compile seconds are theirs.
    """

    op: str
    device: Device
    protocol: str
    measured: str
    versions: dict[str, str]
    roofs: dict[str, float]
    templates: str
    problems: dict[str, RecordedProblem] = field(default_factory=dict)
    workers: int = 1

    @property
    def title(self) -> str:
        """One line that says what is replayed: device and date."""
        return f"{self.device.name}, {self.measured}"

    @property
    def stale(self) -> bool:
        """Whether the templates have changed since: the times are then of other kernels."""
        return self.templates != template_digest(self.op)

    def problem(self, problem: Problem) -> RecordedProblem:
        """Return what was seen on a problem.

        Raises:
            RecordingError: the problem was not recorded.
        """
        if problem.text not in self.problems:
            known = "\n  ".join(self.problems)
            raise RecordingError(
                f"the recording of {self.title} does not hold {problem.text}; it holds\n  {known}\n"
                "Choose one of these, or search on a GPU"
            )
        return self.problems[problem.text]

    def write(self, path: Path) -> None:
        """Write the file; atomic, sorted, one variant a line."""
        write_atomically(path, _dump(self))


def _dump(recording: Recording) -> str:
    head = {
        "schema": SCHEMA,
        "kind": KIND,
        "op": recording.op,
        "device": recording.device.to_dict(),
        "protocol": recording.protocol,
        "measured": recording.measured,
        "versions": recording.versions,
        "roofs": recording.roofs,
        "templates": recording.templates,
        "workers": recording.workers,
    }
    lines = json.dumps(head, indent=1, sort_keys=True).removesuffix("\n}") + ',\n "problems": {'
    blocks = []
    for text in sorted(recording.problems):
        seen = recording.problems[text]
        outcomes = _block({key: value.to_dict() for key, value in seen.outcomes.items()})
        blocks.append(
            f"\n  {json.dumps(text)}: {{\n"
            f'   "outcomes": {outcomes},\n   "finals": {_block(seen.finals)},\n'
            f'   "rejected": {_block(seen.rejected)}\n  }}'
        )
    return lines + ",".join(blocks) + "\n }\n}\n"


def _block(values: Mapping[str, Any]) -> str:
    rows = [f"\n    {json.dumps(k)}: {json.dumps(_rounded(values[k]))}" for k in sorted(values)]
    return "{" + ",".join(rows) + "}"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def read_recording(path: Path) -> Recording:
    """Read a recording.

    Raises:
        RecordingError: the file cannot be read or is no recording.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.get("kind") != KIND or values.get("schema") != SCHEMA:
            raise RecordingError(f"{path} is not a ktune recording of schema {SCHEMA}")
        return _load(values)
    except OSError as error:
        raise RecordingError(f"cannot read recording {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordingError(f"{path} is damaged or not a ktune recording: {error}") from error


def _load(values: dict[str, Any]) -> Recording:
    problems = {
        parse_problem(text).text: RecordedProblem(
            {
                Variant.parse(values["op"], key).text: Measurement.from_dict(value)
                for key, value in seen["outcomes"].items()
            },
            seen["finals"],
            seen["rejected"],
        )
        for text, seen in values["problems"].items()
    }
    return Recording(
        op=values["op"],
        device=Device.from_dict(values["device"]),
        protocol=values["protocol"],
        measured=values["measured"],
        versions=values["versions"],
        roofs=values["roofs"],
        templates=values["templates"],
        workers=int(values.get("workers", 1)),
        problems=problems,
    )


def shipped_recordings() -> dict[str, list[Path]]:
    """Return the recordings that come with ktune: device short name to one file an operation."""
    found: dict[str, list[Path]] = {}
    for path in sorted(data("recordings").glob("*/*.json")):
        found.setdefault(path.parent.name, []).append(path)
    return found


def find_recording(target: str, op: str) -> Recording:
    """Return the recording of an operation by shipped device name (``h200``) or file path.

    Raises:
        RecordingError: there is none.
    """
    shipped = shipped_recordings()
    if target in shipped:
        for path in shipped[target]:
            if path.stem == op:
                return read_recording(path)
        raise RecordingError(f"no recording of {op} on {target} comes with ktune")
    path = Path(target)
    if not path.is_file():
        raise RecordingError(
            f"no target {target!r}: name a recording file, or one that comes with ktune: "
            f"{', '.join(shipped) or 'none'}"
        )
    recording = read_recording(path)
    if recording.op != op:
        raise RecordingError(f"{path} records {recording.op}, not {op}")
    return recording
