"""The operations ktune knows, by name."""

from __future__ import annotations

import importlib

from ktune.errors import UsageError
from ktune.operations.attention import Attention
from ktune.operations.base import Field, Operation, Tensors
from ktune.operations.softmax import Softmax
from ktune.problem import Problem, parse_fields

__all__ = [
    "Field",
    "Operation",
    "Tensors",
    "operation",
    "operations",
    "parse_problem",
    "references",
    "register",
]

_REGISTRY: dict[str, Operation] = {}
_REFERENCES: list[str] = []


def register(op: Operation) -> None:
    """Make an operation known by its name; a second one of the same name replaces the first."""
    _REGISTRY[op.name] = op


def operation(name: str) -> Operation:
    """Return an operation by name, or by ``package.module:NAME`` of a user's own.

    Raises:
        UsageError: there is no such operation.
    """
    if name in _REGISTRY:
        return _REGISTRY[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UsageError(
            f"unknown operation {name!r}; known: {', '.join(_REGISTRY)}. "
            "Name your own as package.module:NAME"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"cannot import operation {name!r}: {error}. Its module must be installed, or its "
            "folder be in PYTHONPATH"
        ) from error
    if not isinstance(found, Operation):
        raise UsageError(f"{name!r} is a {type(found).__name__}, not a ktune Operation")
    register(found)
    _REFERENCES.append(name)
    return found


def references() -> list[str]:
    """Return the ``package.module:NAME`` of every user operation, for a worker to import."""
    return list(dict.fromkeys(_REFERENCES))


def operations() -> list[Operation]:
    """Return every known operation."""
    return list(_REGISTRY.values())


def parse_problem(text: str) -> Problem:
    """Read a problem's text form, completing and checking it.

    Raises:
        ProblemError: the text is not a problem of a known operation.
    """
    op, *words = text.split()
    return operation(op).problem(parse_fields(words))


register(Softmax())
register(Attention())
