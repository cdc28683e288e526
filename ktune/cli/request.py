"""What ``ktune search`` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ktune.search.effort import Effort


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for; None where the default holds."""

    spaces: tuple[str, ...]
    problems: tuple[str, ...]
    target: str
    devices: tuple[str, ...]
    effort: Effort
    storage: str | None
    table: Path | None
    fresh: bool
    record: Path | None
    held_out: tuple[str, ...]
    proof: bool
    quiet: bool
    as_json: bool
    local: bool = True
