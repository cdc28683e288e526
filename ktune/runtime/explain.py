"""Say which variant a call would use, and why."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from ktune.device import Device, device_of
from ktune.operations import operation, parse_problem
from ktune.problem import Problem
from ktune.runtime.dispatch import dispatcher
from ktune.table.entry import Entry
from ktune.table.match import Kind, Match, Nearest, Stale
from ktune.table.region import describe
from ktune.variant import Variant


@dataclass(frozen=True, slots=True)
class Explanation:
    """The variant that a problem gets on a device, and where it comes from.

    Attributes:
        problem: what was asked.
        device: where.
        match: how the variant was found.
        table: the table file it came from; None for the default variant.
    """

    problem: Problem
    device: Device
    match: Match
    table: Path | None

    @property
    def kind(self) -> Kind:
        """``exact``, ``region``, ``bucket`` or ``default``."""
        return self.match.kind

    @property
    def variant(self) -> Variant:
        """The variant that is used."""
        return self.match.variant

    @property
    def entry(self) -> Entry | None:
        """The table's entry; None for the default variant."""
        return self.match.entry

    @property
    def nearest(self) -> Nearest | None:
        """For the default variant, the closest entry in any table."""
        return self.match.nearest

    @property
    def stale(self) -> tuple[Stale, ...]:
        """Entries passed over, and why."""
        return self.match.stale

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields that had no say, being the batch of a batch-invariant call."""
        return operation(self.problem.op).batch_fields if self.match.batch_invariant else ()

    @property
    def other_versions(self) -> dict[str, tuple[str, str]]:
        """Packages whose version is not the one measured: ``(measured, here)`` by name."""
        versions = self.entry.provenance.versions if self.entry else {}
        return {
            name: (measured, here)
            for name, measured in versions.items()
            if (here := _version(name)) is not None and here != measured
        }

    def __str__(self) -> str:
        """Return a few lines for a person."""
        lines = [f"{self.problem.text}", f"on {self.device.key}", f"{self.kind}: {self.variant}"]
        if self.ignored:
            lines.append(f"batch-invariant: {', '.join(self.ignored)} ignored")
        if self.entry:
            numbers = self.entry.provenance
            lines.append(f"from {self.table}, entry {self.entry.problem.text}")
            if self.kind == "region":
                lines.append(f"which covers {describe(self.entry)}")
            lines += [
                f"{numbers.latency_ms:.4g} ms, {numbers.margin:.1%} better than the default, "
                f"measured {numbers.measured}",
            ]
        else:
            lines.append(self.match.message(self.device, self.problem))
        lines += [f"passed over {s.entry.problem.text}: {s.reason}" for s in self.stale]
        for name, (measured, here) in self.other_versions.items():
            lines.append(f"measured with {name} {measured}; here is {here}")
        return "\n".join(lines)


def explain(problem: Problem | str, device: Device | int | None = None) -> Explanation:
    """Say which variant a problem gets; launches and compiles nothing.

    Within ``ktune.batch_invariant()``, which one it gets there.

    Args:
        problem: for example ``"softmax m=4096 n=50257"``.
        device: a device, or the index of a GPU; the current GPU by default.

    Raises:
        ProblemError: the text is not a problem.
        NoDeviceError: this machine has no such GPU.
    """
    asked = parse_problem(problem) if isinstance(problem, str) else problem
    there = device if isinstance(device, Device) else device_of(_index(device))
    match = dispatcher().match(asked, there)
    return Explanation(asked, there, match, dispatcher().path(match))


def _index(device: int | None) -> int:
    import torch

    if device is not None:
        return device
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
