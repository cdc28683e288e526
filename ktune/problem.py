"""A problem: an operation at one shape, dtype and set of flags."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard

from ktune.errors import ProblemError

Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Problem:
    """An operation and the values of its fields, in the order the operation declares them.

    The text form, ``softmax m=4096 n=50257 dtype=bfloat16 layout=rows``, is canonical: equal
    problems have equal texts, and ``parse_problem`` reads it back.
    """

    op: str
    fields: tuple[tuple[str, Scalar], ...]

    def __getitem__(self, name: str) -> Scalar:
        for key, value in self.fields:
            if key == name:
                return value
        raise KeyError(f"problem {self.text!r} has no field {name!r}")

    def __iter__(self) -> Iterator[tuple[str, Scalar]]:
        return iter(self.fields)

    def __str__(self) -> str:
        return self.text

    def size(self, name: str) -> int:
        """Return an integer field."""
        value = self[name]
        assert isinstance(value, int), f"{name} is not a size"
        return value

    def word(self, name: str) -> str:
        """Return a text field."""
        return str(self[name])

    @property
    def text(self) -> str:
        """The canonical text form."""
        return f"{self.op} {self.fields_text}"

    @property
    def fields_text(self) -> str:
        """The fields alone, as ``name=value`` words."""
        return format_fields(dict(self.fields))

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits that stand for the text."""
        return short_hash(self.text)

    def replace(self, **changes: Scalar) -> Problem:
        """Return a copy with some fields changed."""
        for name in changes:
            _ = self[name]
        return Problem(self.op, tuple((k, changes.get(k, v)) for k, v in self.fields))


def separation(one: Problem, other: Problem) -> tuple[int, float]:
    """Return how far two problems of one operation are apart.

    First how many words and flags differ, then the sum of the differences of sizes in octaves.
    """
    has = dict(other.fields)
    words, octaves = 0, 0.0
    for name, value in one:
        against = has.get(name)
        if is_size(value) and is_size(against):
            octaves += octaves_apart(value, against)
        else:
            words += value != against
    return words, octaves


def octaves_apart(one: int, other: int) -> float:
    """Return how often one size must be doubled or halved to be the other; 0 counts as 1."""
    return abs(math.log2(max(one, 1) / max(other, 1)))


def is_size(value: Scalar | None) -> TypeGuard[int]:
    """Return whether a field's value is a size: an integer and no flag."""
    return isinstance(value, int) and not isinstance(value, bool)


def short_hash(text: str) -> str:
    """Return twelve hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def format_scalar(value: Scalar) -> str:
    """Write a scalar the way ``parse_scalar`` reads it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


def parse_scalar(text: str) -> Scalar:
    """Read ``true``, ``false``, an integer, a float, or else the word itself."""
    if text in {"true", "false"}:
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def format_fields(fields: Mapping[str, Scalar]) -> str:
    """Write ``name=value`` words."""
    return " ".join(f"{name}={format_scalar(value)}" for name, value in fields.items())


def parse_fields(words: list[str]) -> dict[str, Scalar]:
    """Read ``name=value`` words.

    Raises:
        ProblemError: a word has no ``=``, or a name stands twice.
    """
    fields: dict[str, Scalar] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise ProblemError(f"cannot read {word!r}: write name=value, for example n=4096")
        if name in fields:
            raise ProblemError(f"{name!r} is given twice: {word!r}")
        fields[name] = parse_scalar(value)
    return fields
