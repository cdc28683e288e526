"""An entry: the winner for one problem on one device, and how its numbers were taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ktune.errors import KtuneError, TableError
from ktune.problem import Problem, parse_fields
from ktune.variant import Variant

Covers = Mapping[str, tuple[int, int]]
"""First and last size, inclusive, by field name."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """How the numbers of an entry came about.

    Attributes:
        latency_ms: median latency of the winner in the final.
        spread_ms: spread of those samples.
        default_latency_ms: median latency of the default variant in the same final; None where it
            has none, being wrong or too large for the device.
        margin: share by which the winner beats the default; 0.0 for the default itself.
        is_default: the winner is the default variant.
        samples: timed samples per variant.
        protocol: name of the timing protocol.
        measured: ISO date of the measurement.
        trials: variants evaluated in the search.
        versions: of torch, triton, ktune, driver.
        baselines: latency in ms of what users have today, by name.
        interval: 95 % interval of ``margin``, from paired samples of the finals; None without.
        loss: share by which a faster variant of this very problem was given up, so that few
            variants stand for many problems.
        replayed_from: name and date of the recording, where no GPU was timed for this entry.
    """

    latency_ms: float
    spread_ms: float
    default_latency_ms: float | None
    margin: float
    is_default: bool
    samples: int
    protocol: str
    measured: str
    trials: int
    versions: Mapping[str, str] = field(default_factory=dict)
    baselines: Mapping[str, float] = field(default_factory=dict)
    replayed_from: str | None = None
    interval: tuple[float, float] | None = None
    loss: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {"versions": dict(self.versions), "baselines": dict(self.baselines)}
        values["interval"] = list(self.interval) if self.interval else None
        return {k: v for k, v in values.items() if v or k not in _OPTIONAL}

    @classmethod
    def from_dict(cls, values: object) -> Provenance:
        """Build a provenance from ``to_dict``'s result.

        Raises:
            TableError: a key is unknown or missing, or a value has the wrong type.
        """
        names = {f.name for f in fields(cls)}
        found = _object(values, "provenance", names - _OPTIONAL, _OPTIONAL)
        for name, check in _CHECKS.items():
            if name in found and not check(found[name]):
                raise TableError(f"provenance.{name} has the wrong type: {found[name]!r:.80}")
        if found.get("interval"):
            low, high = found["interval"]
            found = {**found, "interval": (low, high)}
        return cls(**found)


@dataclass(frozen=True, slots=True)
class Entry:
    """The winner for a problem on a device.

    Attributes:
        device_key: ``Device.key`` of the GPU it was measured on.
        problem: what was measured.
        variant: the winner.
        source_id: id of the winner's rendered source; another id today makes the entry stale.
        provenance: how the numbers were taken.
        covers: inclusive ranges of sizes, by field, over which the winner stands too, for problems
            that render to the same kernel; a size that is not named must be the problem's own.
            Empty: for the problem itself and its bucket only.
    """

    device_key: str
    problem: Problem
    variant: Variant
    source_id: str
    provenance: Provenance
    covers: Covers = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """What a table files the entry under: device key and problem text."""
        return self.device_key, self.problem.text

    def to_dict(self) -> dict[str, Any]:
        """Return what a table file holds under the device key and the problem text."""
        values = {
            "variant": self.variant.text,
            "source_id": self.source_id,
            "provenance": self.provenance.to_dict(),
        }
        if self.covers:
            values["covers"] = {name: list(ends) for name, ends in self.covers.items()}
        return values

    @classmethod
    def from_dict(cls, device_key: str, problem_text: str, values: object) -> Entry:
        """Build an entry from its place in a table and ``to_dict``'s result.

        The operation itself need not be known: a table may hold entries of operations that
        this process has not registered.

        Raises:
            TableError: a key is unknown or missing, or a value cannot be read.
        """
        needed = {"variant", "source_id", "provenance"}
        found = _object(values, "entry", needed, frozenset({"covers"}))
        for name in ("variant", "source_id"):
            if not isinstance(found[name], str) or not found[name].strip():
                raise TableError(f"{name} has the wrong type: {found[name]!r:.80}")
        problem = _problem(problem_text)
        try:
            variant = Variant.parse(problem.op, found["variant"])
        except KtuneError as error:
            raise TableError(f"variant {found['variant']!r:.80}: {error}") from error
        provenance = Provenance.from_dict(found["provenance"])
        covers = _covers(found.get("covers", {}), problem)
        return cls(device_key, problem, variant, found["source_id"], provenance, covers)


def _problem(text: str) -> Problem:
    """Read a problem's text without asking its operation."""
    op, *words = text.split() or [""]
    try:
        problem = Problem(op, tuple(parse_fields(words).items()))
    except KtuneError as error:
        raise TableError(f"problem {text!r:.80}: {error}") from error
    if problem.text != text or not words:
        raise TableError(f"problem {text!r:.80} is not in canonical form")
    return problem


def _covers(values: object, problem: Problem) -> dict[str, tuple[int, int]]:
    """Read the ranges of an entry, which must be of sizes and hold the entry's own problem."""
    if not isinstance(values, dict):
        raise TableError(f"covers must be an object, not {type(values).__name__}")
    found: dict[str, tuple[int, int]] = {}
    own = dict(problem.fields)
    for name, ends in values.items():
        value = own.get(name)
        if not _is_count(value):
            raise TableError(f"covers.{name:.40} is no size of {problem.text:.120}")
        if not (isinstance(ends, list) and len(ends) == 2 and all(map(_is_count, ends))):
            raise TableError(f"covers.{name} must be [first, last], two integers: {ends!r:.80}")
        if not ends[0] <= value <= ends[1]:
            raise TableError(f"covers.{name} {ends!r:.80} does not hold the problem's own {value}")
        found[name] = (ends[0], ends[1])
    return found


def _object(
    values: object, what: str, names: set[str], optional: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return the JSON object, or raise TableError unless it has these keys, and optional ones."""
    if not isinstance(values, dict):
        raise TableError(f"{what} must be an object, not {type(values).__name__}")
    if unknown := sorted(set(values) - names - optional):
        raise TableError(f"{what} has unknown keys: {', '.join(unknown):.120}")
    if missing := sorted(names - set(values)):
        raise TableError(f"{what} lacks keys: {', '.join(missing)}")
    return values


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_texts(value: object) -> bool:
    return isinstance(value, dict) and all(_is_text(v) for v in value.values())


def _is_numbers(value: object) -> bool:
    return isinstance(value, dict) and all(_is_number(v) for v in value.values())


def _is_interval(value: object) -> bool:
    return value is None or (
        isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
    )


_OPTIONAL = frozenset({"interval", "loss"})
"""Keys of a provenance that are left out where they say nothing."""

_CHECKS: dict[str, Callable[[object], bool]] = {
    "latency_ms": _is_number,
    "spread_ms": _is_number,
    "default_latency_ms": lambda value: value is None or _is_number(value),
    "margin": _is_number,
    "is_default": lambda value: isinstance(value, bool),
    "samples": _is_count,
    "protocol": _is_text,
    "measured": _is_text,
    "trials": _is_count,
    "versions": _is_texts,
    "baselines": _is_numbers,
    "replayed_from": lambda value: value is None or isinstance(value, str),
    "interval": _is_interval,
    "loss": _is_number,
}
