"""Search spaces: a YAML file per operation becomes the legal variants of a problem."""

from __future__ import annotations

from ktune.space.expressions import Expression, ExpressionError
from ktune.space.space import Space, load_space, parse_space, read_space
from ktune.space.walk import Parameter, Walk, distance

__all__ = [
    "Expression",
    "ExpressionError",
    "Parameter",
    "Space",
    "Walk",
    "distance",
    "load_space",
    "parse_space",
    "read_space",
]
