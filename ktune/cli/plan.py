"""Decide what a search runs on, and which problems of which spaces it tunes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ktune.cli.options import find_space, meant
from ktune.device import CPU
from ktune.errors import NoDeviceError, UsageError

if TYPE_CHECKING:
    from ktune.problem import Problem
    from ktune.space import Space
    from ktune.target.recording import Recording

AUTO, LIVE = "auto", "live"
DEFAULT_RECORDING = "h200"
DEFAULT_SET = "default"


@dataclass(frozen=True, slots=True)
class Part:
    """One space of a search.

    Attributes:
        space: where variants come from.
        problems: what to tune.
        recording: what answers; None for a GPU.
        left_out: problems of the default set that the recording does not hold.
        held_out: problems to judge the table by, which get no entry.
    """

    space: Space
    problems: list[Problem]
    recording: Recording | None
    left_out: int = 0
    held_out: Sequence[Problem] = ()

    @property
    def all_problems(self) -> list[Problem]:
        """What is searched: the problems to tune, then those to judge by."""
        return [*self.problems, *self.held_out]


def recording_name(target: str, devices: Sequence[str], replayable: bool = True) -> str | None:
    """Return the recording that answers, by name or path; None for a GPU of this machine.

    Raises:
        NoDeviceError: a GPU was asked for and there is none.
        UsageError: target and device contradict each other.
    """
    from ktune.device import cuda_available

    if devices and target not in {AUTO, LIVE}:
        raise UsageError(
            f"--devices {','.join(devices)} names a GPU and --target {target} a recording; "
            "give one of them"
        )
    if target == AUTO and not devices:
        return None if cuda_available() else DEFAULT_RECORDING
    if target not in {AUTO, LIVE}:
        return target
    if list(devices) == [CPU]:
        return None
    if not cuda_available():
        instead = f"Search a recorded device instead: --target {DEFAULT_RECORDING}; or c"
        raise NoDeviceError(
            "no GPU: PyTorch sees no CUDA or ROCm device on this machine. "
            f"{instead if replayable else 'C'}heck the driver: ktune doctor"
        )
    return None


def make_parts(
    names: Sequence[str],
    wanted: Sequence[str],
    recording: str | None,
    target: str,
    held_out: Sequence[str] = (),
) -> list[Part]:
    """Return the parts of a search.

    Args:
        names: spaces by operation name or path.
        wanted: problem sets and problem texts; empty for each space's default set.
        recording: name or path of the recording that answers; None for a GPU.
        target: as the user wrote it, for messages.
        held_out: problem sets and texts to judge the table by.
    """
    from ktune.codegen.render import template_variables

    spaces = [find_space(name) for name in dict.fromkeys(names)]
    for space in spaces:
        for template in space.templates:
            template_variables(space.op, template)  # says so if there is no such file
    if twice := {s.op for s in spaces if sum(t.op == s.op for t in spaces) > 1}:
        raise UsageError(f"two spaces of {', '.join(twice)} in one search; give one at a time")
    chosen = choose_problems(spaces, wanted)
    judged = choose_problems(spaces, held_out) if held_out else {}
    parts = []
    for space in spaces:
        problems, apart = chosen[space.op], judged.get(space.op, [])
        if both := [p.text for p in apart if p in problems]:
            raise UsageError(
                "--held-out names problems that are to be tuned too, and so cannot judge:\n  "
                + "\n  ".join(both)
            )
        if problems and recording is None:
            parts.append(Part(space, problems, None, held_out=apart))
        elif problems:
            opened = open_recording(recording or "", space.op, target)
            part = _replayed(space, problems, opened, not wanted)
            kept = _replayed(space, apart, opened, False).problems if apart else []
            parts.append(replace(part, held_out=kept))
    return parts


def choose_problems(spaces: Sequence[Space], wanted: Sequence[str]) -> dict[str, list[Problem]]:
    """Return the problems to tune, by operation.

    A named set must be known to every space. A text that begins with an operation's name is
    for that one; a text without it needs a single space.
    """
    found: dict[str, dict[str, Problem]] = {space.op: {} for space in spaces}
    for text in wanted or [DEFAULT_SET]:
        for space in _addressed(spaces, text):
            found[space.op] |= {p.text: p for p in space.problem_set(text)}
    return {op: list(problems.values()) for op, problems in found.items()}


def _addressed(spaces: Sequence[Space], text: str) -> list[Space]:
    if "=" not in text:
        return list(spaces)
    named = [space for space in spaces if text.split()[0] == space.op]
    if named or len(spaces) == 1:
        return named or list(spaces)
    first = spaces[0].op
    raise UsageError(
        f"--problems {text!r} could be of {' or '.join(s.op for s in spaces)}; "
        f'say which: "{first} {text}"'
    )


def open_recording(name: str, op: str, target: str) -> Recording:
    """Return an operation's recording by shipped name or path.

    Raises:
        NoDeviceError: it was to stand in for a missing GPU and does not come with ktune.
        RecordingError: there is none.
    """
    from ktune.target.recording import find_recording, shipped_recordings

    shipped = shipped_recordings()
    if target == AUTO and not any(path.stem == op for path in shipped.get(name, [])):
        raise NoDeviceError(
            f"no GPU: PyTorch sees none on this machine, and no recording of {op} comes with "
            "ktune. Name a recording: --target FILE; or search on a machine with a GPU"
        )
    if name not in shipped and not Path(name).is_file():
        known = [AUTO, LIVE, *shipped]
        raise UsageError(
            f"no target {name!r}{meant(name, known)}; targets: {', '.join(known)}, "
            "or the path of a recording"
        )
    return find_recording(name, op)


def _replayed(space: Space, problems: list[Problem], recording: Recording, bare: bool) -> Part:
    """Return a part with the problems that a recording holds; all must be held if asked for."""
    from ktune.operations import parse_problem

    held = [problem for problem in problems if problem.text in recording.problems]
    missing = [problem.text for problem in problems if problem.text not in recording.problems]
    if bare and recording.problems:
        everything = [parse_problem(text) for text in recording.problems]
        return Part(space, held or everything, recording, len(missing))
    if missing:
        lines = ["the recording of", recording.title, "does not hold\n  ", "\n  ".join(missing)]
        known = "\n  ".join(recording.problems) or "nothing"
        raise UsageError(
            f"{' '.join(lines)}\nit holds\n  {known}\nChoose among these, or search on a GPU"
        )
    return Part(space, held, recording)
