"""Evaluate the small expressions of a search space, and nothing else, safely."""

from __future__ import annotations

import ast
import difflib
import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ktune.errors import SpaceError
from ktune.operations.base import next_power_of_two

LONGEST = 2000
"""Most characters of an expression."""
DEEPEST = 40
"""Most levels of an expression."""
LARGEST = 1 << 62
"""Largest magnitude that arithmetic may reach."""
DEVICE = "device"
DEVICE_ATTRIBUTES = (
    "name",
    "backend",
    "arch",
    "sm_count",
    "shared_memory",
    "l2_bytes",
    "memory_gib",
    "capability",
    "warp_size",
)

Names = Mapping[str, Any]
Evaluator = Callable[[Names], Any]


class ExpressionError(SpaceError):
    """An expression is not allowed, or cannot be evaluated.

    Attributes:
        reason: what is wrong.
        column: characters before the place, from 0.
    """

    def __init__(self, text: str, column: int, reason: str) -> None:
        super().__init__(f"{text!r}, column {column + 1}: {reason}")
        self.reason = reason
        self.column = column


@dataclass(frozen=True, slots=True)
class Comparison:
    """A name compared, by ``==``, ``!=`` or ``in``, with a text constant."""

    name: str
    value: str
    column: int


class Expression:
    """An expression over names, compiled once.

    It may hold names, constants, ``+ - * / // %``, comparisons, ``in`` a literal list, ``and``,
    ``or``, ``not``, ``x if y else z``, calls of ``min max cdiv next_power_of_two log2``, and
    attributes of ``device``.

    Attributes:
        text: as written.
        names: the free names, in order of appearance, ``device`` among them.
        columns: where each name first stands, from 0.
        comparisons: what the names are compared with.
    """

    __slots__ = ("_run", "columns", "comparisons", "names", "text")

    def __init__(self, text: str) -> None:
        compiler = _Compiler(text)
        self.text = text
        self._run = compiler.compile()
        self.columns: dict[str, int] = compiler.columns
        self.names: tuple[str, ...] = tuple(compiler.columns)
        self.comparisons: tuple[Comparison, ...] = tuple(compiler.comparisons)

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[type[Expression], tuple[str]]:
        return Expression, (self.text,)

    def evaluate(self, names: Names) -> Any:
        """Return the value.

        Raises:
            ExpressionError: a name is not given, or an operation does not fit its operands.
        """
        return self._run(names)

    def holds(self, names: Names) -> bool:
        """Return the value of a condition.

        Raises:
            ExpressionError: as ``evaluate``, or the value is not true or false.
        """
        value = self._run(names)
        if value is not True and value is not False:
            raise ExpressionError(self.text, 0, f"gives {value!r}; it must be true or false")
        return value


def _cdiv(a: Any, b: Any) -> Any:
    return -(-a // b)


def _next_power_of_two(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError("next_power_of_two takes a whole number")
    return next_power_of_two(value)


FUNCTIONS: dict[str, tuple[Callable[..., Any], range]] = {
    "min": (min, range(2, 17)),
    "max": (max, range(2, 17)),
    "cdiv": (_cdiv, range(2, 3)),
    "next_power_of_two": (_next_power_of_two, range(1, 2)),
    "log2": (math.log2, range(1, 2)),
}
"""Functions, each with the numbers of arguments that it takes."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_EQUALITY: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_COMPARE = {**_ORDER, **_EQUALITY}


class _Compiler:
    """Turn the syntax tree into nested closures, refusing every node that is not listed."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.columns: dict[str, int] = {}
        self.comparisons: list[Comparison] = []
        self._indent = len(text) - len(text.lstrip())
        self._line = " ".join(text.strip().splitlines())
        self._depth = 0

    def compile(self) -> Evaluator:
        """Return the evaluator of the whole text."""
        if not self._line:
            raise ExpressionError(self.text, 0, "is empty")
        if len(self.text) > LONGEST:
            raise ExpressionError(self.text[:40], 0, f"is longer than {LONGEST} characters")
        try:
            tree = ast.parse(self._line, mode="eval")
        except SyntaxError as error:
            column = self._indent + (error.offset or len(self._line)) - 1
            column = min(column, len(self.text) - 1)
            hint = "; write == to compare" if self.text[column] == "=" else ""
            raise ExpressionError(self.text, column, f"cannot be read: {error.msg}{hint}") from None
        except (ValueError, RecursionError, MemoryError):
            raise ExpressionError(self.text, 0, "cannot be read: it is too deep") from None
        return self._visit(tree.body)

    def _column(self, node: ast.expr) -> int:
        before = self._line.encode()[: node.col_offset]
        return self._indent + len(before.decode(errors="ignore"))

    def _refuse(self, node: ast.expr, reason: str) -> ExpressionError:
        return ExpressionError(self.text, self._column(node), reason)

    def _visit(self, node: ast.expr) -> Evaluator:
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._refuse(node, f"is deeper than {DEEPEST} levels")
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise self._refuse(node, f"{_word(node)} is not allowed in an expression")
        run: Evaluator = method(node)
        self._depth -= 1
        return run

    def _constant(self, node: ast.Constant) -> Evaluator:
        value = node.value
        if not isinstance(value, bool | int | float | str):
            raise self._refuse(node, f"{value!r} is not a number, a text, True or False")
        if isinstance(value, int | float) and not abs(value) <= LARGEST:
            raise self._refuse(node, "the number is too large")
        return lambda names: value

    def _name(self, node: ast.Name) -> Evaluator:
        name = node.id
        if name in {"true", "false"}:
            value = name == "true"
            return lambda names: value
        if name in FUNCTIONS:
            raise self._refuse(node, f"{name} is a function; write {name}(...)")
        if name == DEVICE:
            raise self._refuse(node, "write device.NAME, with NAME one of " + _device_names())
        return self._lookup(name, node)

    def _lookup(self, name: str, node: ast.expr) -> Evaluator:
        column = self._column(node)
        self.columns.setdefault(name, column)
        text = self.text

        def run(names: Names) -> Any:
            try:
                return names[name]
            except KeyError:
                raise ExpressionError(text, column, f"{name!r} has no value") from None

        return run

    def _attribute(self, node: ast.Attribute) -> Evaluator:
        if not isinstance(node.value, ast.Name) or node.value.id != DEVICE:
            raise self._refuse(node, "only device has attributes")
        attribute = node.attr
        if attribute not in DEVICE_ATTRIBUTES:
            hint = did_you_mean(attribute, DEVICE_ATTRIBUTES)
            message = f"device has no {attribute!r}{hint}; it has {_device_names()}"
            raise self._refuse(node, message)
        device = self._lookup(DEVICE, node)
        return lambda names: getattr(device(names), attribute)

    def _unaryop(self, node: ast.UnaryOp) -> Evaluator:
        operand = self._visit(node.operand)
        if isinstance(node.op, ast.Not):
            return lambda names: not operand(names)
        if isinstance(node.op, ast.USub):
            return self._numeric(node, operator.neg, [operand])
        raise self._refuse(node, "only 'not' and '-' may stand before a value")

    def _binop(self, node: ast.BinOp) -> Evaluator:
        function = _BINARY.get(type(node.op))
        if function is None:
            sign = "** (a power)" if isinstance(node.op, ast.Pow) else "this operator"
            raise self._refuse(node, f"{sign} is not allowed; use + - * / // %")
        return self._numeric(node, function, [self._visit(node.left), self._visit(node.right)])

    def _call(self, node: ast.Call) -> Evaluator:
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name not in FUNCTIONS:
            known = ", ".join(FUNCTIONS)
            raise self._refuse(node, f"only these functions may be called: {known}")
        function, counts = FUNCTIONS[name]
        if node.keywords or len(node.args) not in counts:
            wanted = counts.start if len(counts) == 1 else f"{counts.start} or more"
            raise self._refuse(node, f"{name} takes {wanted} plain argument(s)")
        return self._numeric(node, function, [self._visit(argument) for argument in node.args])

    def _numeric(
        self, node: ast.expr, function: Callable[..., Any], operands: list[Evaluator]
    ) -> Evaluator:
        text, column = self.text, self._column(node)

        def run(names: Names) -> Any:
            values = [operand(names) for operand in operands]
            for value in values:
                if type(value) is not int and type(value) is not float:
                    raise ExpressionError(text, column, f"{value!r} is not a number")
            try:
                result = function(*values)
            except (ArithmeticError, ValueError, TypeError) as error:
                raise ExpressionError(text, column, f"cannot compute: {error}") from None
            if not -LARGEST <= result <= LARGEST:
                raise ExpressionError(text, column, "the result is too large")
            return result

        return run

    def _compare(self, node: ast.Compare) -> Evaluator:
        first = self._visit(node.left)
        steps: list[tuple[Callable[[Any, Any], bool], Evaluator]] = []
        for op, right in zip(node.ops, node.comparators, strict=True):
            if type(op) not in _COMPARE:
                raise self._refuse(node, "'is' is not allowed; use ==")
            literal = isinstance(right, ast.List | ast.Tuple)
            if literal != isinstance(op, ast.In | ast.NotIn):
                raise self._refuse(right, "write: name in [a, b], with a literal list")
            steps.append((_COMPARE[type(op)], self._visit(right)))
        self._note(node)
        return self._chain(node, first, steps)

    def _chain(
        self,
        node: ast.Compare,
        first: Evaluator,
        steps: list[tuple[Callable[[Any, Any], bool], Evaluator]],
    ) -> Evaluator:
        text, column = self.text, self._column(node)

        def run(names: Names) -> bool:
            left = first(names)
            for compare, operand in steps:
                right = operand(names)
                try:
                    if not compare(left, right):
                        return False
                except TypeError:
                    reason = f"{left!r} and {right!r} cannot be ordered"
                    raise ExpressionError(text, column, reason) from None
                left = right
            return True

        return run

    def _note(self, node: ast.Compare) -> None:
        """Remember comparisons of a name with text constants."""
        left = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            items = right.elts if isinstance(right, ast.List | ast.Tuple) else [right]
            if isinstance(left, ast.Name) and type(op) in _EQUALITY:
                for item in items:
                    if isinstance(item, ast.Constant) and isinstance(item.value, str):
                        found = Comparison(left.id, item.value, self._column(item))
                        self.comparisons.append(found)
            left = right

    def _list(self, node: ast.List | ast.Tuple) -> Evaluator:
        items = [self._visit(item) for item in node.elts]
        return lambda names: [item(names) for item in items]

    _tuple = _list

    def _boolop(self, node: ast.BoolOp) -> Evaluator:
        operands = [self._visit(value) for value in node.values]
        return functools.reduce(_both if isinstance(node.op, ast.And) else _either, operands)

    def _ifexp(self, node: ast.IfExp) -> Evaluator:
        test, yes, no = (self._visit(part) for part in (node.test, node.body, node.orelse))
        return lambda names: yes(names) if test(names) else no(names)


def _both(left: Evaluator, right: Evaluator) -> Evaluator:
    return lambda names: left(names) and right(names)


def _either(left: Evaluator, right: Evaluator) -> Evaluator:
    return lambda names: left(names) or right(names)


def did_you_mean(word: str, known: tuple[str, ...] | list[str]) -> str:
    """Return ``; did you mean 'x'?`` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _device_names() -> str:
    return ", ".join(DEVICE_ATTRIBUTES)


def _word(node: ast.expr) -> str:
    words = {"Lambda": "a lambda", "Subscript": "indexing", "Starred": "*", "Dict": "a dict"}
    name = type(node).__name__
    return words.get(name, f"{name} syntax")
