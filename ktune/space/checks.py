"""Check what a file's shape cannot tell: names, values and problems that do not fit together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ktune.errors import KtuneError, ProblemError
from ktune.operations import Operation, operation
from ktune.problem import Problem, Scalar, format_scalar
from ktune.space.document import Document, Issue, Trail
from ktune.space.expressions import DEVICE, FUNCTIONS, Expression, ExpressionError, did_you_mean
from ktune.variant import LAUNCH_OPTIONS

TEMPLATE = "template"
WHEN = "when"
DEFAULT_SET = "default"


@dataclass(frozen=True, slots=True)
class _Scope:
    """The names that a file may use.

    Attributes:
        choices: of each parameter, in file order; empty where the file has them wrong.
        problem: names that the operation gives; None where they cannot be known.
        words: legal words of the operation's text fields.
    """

    choices: dict[str, list[Any]]
    problem: frozenset[str] | None
    words: dict[str, tuple[str, ...]]


def check(document: Document) -> list[Issue]:
    """Return every issue of a document, also of one whose shape is wrong elsewhere."""
    op, issues = _operation(document)
    problems: list[Problem] = []
    if op is not None:
        problems, found = _problems(document, op)
        issues += found
    scope = _scope(document, op, problems)
    for part in (_parameters, _conditions, _constraints, _seeds, _strategies):
        issues += part(document, scope)
    return issues


def expand(item: Mapping[str, Any]) -> Iterator[dict[str, Scalar]]:
    """Yield the cartesian product of an item whose fields may be lists."""
    lists = [value if isinstance(value, list) else [value] for value in item.values()]
    for values in itertools.product(*lists):
        yield dict(zip(item, values, strict=True))


def pick(choices: list[Any] | tuple[Scalar, ...], value: Any) -> Scalar | None:
    """Return the choice that a value means, or None; true is not 1, but 8 is 8.0."""
    for choice in choices:
        if choice == value and isinstance(choice, bool) == isinstance(value, bool):
            return choice
    return None


def _dict(document: Document, *trail: str | int) -> dict[str, Any]:
    """Return the mapping at a trail with its text keys; empty where it is something else."""
    value = _value(document, *trail)
    return {k: v for k, v in value.items() if type(k) is str} if isinstance(value, dict) else {}


def _list(document: Document, *trail: str | int) -> list[Any]:
    value = _value(document, *trail)
    return value if isinstance(value, list) else []


def _value(document: Document, *trail: str | int) -> Any:
    value = document.data
    for step in trail:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step]
        else:
            return None
    return value


def _operation(document: Document) -> tuple[Operation | None, list[Issue]]:
    name = _value(document, "operation")
    if not isinstance(name, str):
        return None, []
    try:
        return operation(name), []
    except KtuneError as error:
        return None, [document.issue(("operation",), str(error))]


def _scope(document: Document, op: Operation | None, problems: list[Problem]) -> _Scope:
    choices = {
        name: _list(document, section, name, "choices")
        for section in ("parameters", "launch")
        for name in _dict(document, section)
    }
    names = frozenset(op.names(problems[0])) if op is not None and problems else None
    words = {field.name: field.choices for field in op.fields if field.choices} if op else {}
    return _Scope(choices, names, words)


def _problems(document: Document, op: Operation) -> tuple[list[Problem], list[Issue]]:
    """Return the problems that are right, and an issue for each that is not."""
    problems: list[Problem] = []
    issues: list[Issue] = []
    sets = _dict(document, "problems")
    if sets and DEFAULT_SET not in sets:
        message = f"the set {DEFAULT_SET!r} is missing: it is what a bare search tunes"
        issues.append(document.issue(("problems",), message, at_key=True))
    for name in sets:
        for index, item in enumerate(_list(document, "problems", name)):
            if isinstance(item, dict):
                found = _item_issues(document, op, ("problems", name, index), item, problems)
                issues += found
    return problems, issues


def _item_issues(
    document: Document, op: Operation, trail: Trail, item: dict[str, Any], problems: list[Problem]
) -> list[Issue]:
    """Append an item's problems, or return what is wrong with it."""
    known = [field.name for field in op.fields]
    issues = []
    for key, value in item.items():
        if key not in known:
            hint = did_you_mean(str(key), known) or f"; its fields are {', '.join(known)}"
            message = f"{op.name} has no such field{hint}"
            issues.append(document.issue((*trail, str(key)), message, at_key=True))
        for inner in value if isinstance(value, list) else [value]:
            if not isinstance(inner, bool | int | float | str):
                message = "should be a number, a word, true, false, or a list of those"
                issues.append(document.issue((*trail, str(key)), message))
    if issues:
        return issues
    try:
        problems += [op.problem(fields) for fields in expand(item)]
    except ProblemError as error:
        return [document.issue(trail, str(error))]
    return []


def _parameters(document: Document, scope: _Scope) -> list[Issue]:
    """Check the names of parameters and launch options."""
    issues = []
    parameters = _dict(document, "parameters")
    if parameters and TEMPLATE not in parameters:
        message = f"the parameter {TEMPLATE!r} is missing: its choices name the template files"
        issues.append(document.issue(("parameters",), message, at_key=True))
    for index, choice in enumerate(_list(document, "parameters", TEMPLATE, "choices")):
        if not isinstance(choice, str):
            at: Trail = ("parameters", TEMPLATE, "choices", index)
            message = f"names a template, but YAML reads it as {choice!r}; put it in quotes"
            issues.append(document.issue(at, message))
    for name in parameters:
        reason = _bad_name(name, scope)
        if reason:
            issues.append(document.issue(("parameters", name), reason, at_key=True))
    for name in _dict(document, "launch"):
        if name not in LAUNCH_OPTIONS:
            hint = did_you_mean(name, LAUNCH_OPTIONS)
            message = f"is not a launch option{hint}; they are {', '.join(LAUNCH_OPTIONS)}"
            issues.append(document.issue(("launch", name), message, at_key=True))
        for index, choice in enumerate(_list(document, "launch", name, "choices")):
            if type(choice) is not int or choice < 1:
                trail: Trail = ("launch", name, "choices", index)
                issues.append(document.issue(trail, "should be a whole number of at least 1"))
    return issues


def _bad_name(name: str, scope: _Scope) -> str | None:
    if name in LAUNCH_OPTIONS:
        return "is a launch option; move it to 'launch'"
    if name in (scope.problem or ()):
        return "is a name that the operation gives; take another one"
    if name in {DEVICE, WHEN, *FUNCTIONS} or not name.isidentifier():
        return "cannot name a parameter; take another word"
    return None


def _conditions(document: Document, scope: _Scope) -> list[Issue]:
    """Check each ``when``: it may only name earlier parameters and the problem."""
    issues: list[Issue] = []
    earlier: dict[str, list[Any]] = {}
    for section in ("parameters", "launch"):
        for name in _dict(document, section):
            trail: Trail = (section, name, WHEN)
            if _value(document, *trail) is not None:
                if name == TEMPLATE:
                    issues.append(document.issue(trail, "the template always applies; remove it"))
                inner = _Scope(earlier, scope.problem, scope.words)
                issues += _expression(document, trail, inner, tuple(scope.choices))
            earlier[name] = scope.choices[name]
    return issues


def _constraints(document: Document, scope: _Scope) -> list[Issue]:
    issues: list[Issue] = []
    for index in range(len(_list(document, "constraints"))):
        issues += _expression(document, ("constraints", index, "require"), scope)
    return issues


def _expression(
    document: Document, trail: Trail, scope: _Scope, later: tuple[str, ...] = ()
) -> list[Issue]:
    """Check the names and words in an expression; its syntax is the schema's business."""
    text = _value(document, *trail)
    try:
        expression = Expression(text) if isinstance(text, str) else None
    except ExpressionError:
        return []
    if expression is None or scope.problem is None:
        return []
    known = [*scope.choices, *sorted(scope.problem)]
    issues = []
    for name, column in expression.columns.items():
        if name in later and name not in scope.choices:
            message = f"{name!r} stands later in the file; move it before this parameter"
            issues.append(document.issue_inside(trail, column, message))
        elif name not in known and name != DEVICE:
            message = f"unknown name {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}"
            issues.append(document.issue_inside(trail, column, message))
    return issues + _words(document, trail, expression, scope)


def _words(document: Document, trail: Trail, expression: Expression, scope: _Scope) -> list[Issue]:
    """Check that a text which a name is compared with is a value that it can have."""
    issues = []
    for comparison in expression.comparisons:
        choices = scope.choices.get(comparison.name) or scope.words.get(comparison.name, ())
        if choices and comparison.value not in choices:
            words = [str(choice) for choice in choices]
            message = (
                f"{comparison.name} is never {comparison.value!r}"
                f"{did_you_mean(comparison.value, words)}; its choices: {', '.join(words)}"
            )
            issues.append(document.issue_inside(trail, comparison.column, message))
    return issues


def _seeds(document: Document, scope: _Scope) -> list[Issue]:
    issues: list[Issue] = []
    for index in range(len(_list(document, "seeds"))):
        seed = _dict(document, "seeds", index)
        issues += _settings(document, ("seeds", index), seed, scope)
        if isinstance(seed.get(WHEN), str):
            trail: Trail = ("seeds", index, WHEN)
            try:
                Expression(seed[WHEN])
            except ExpressionError as error:
                issues.append(document.issue_inside(trail, error.column, error.reason))
            issues += _expression(document, trail, _Scope({}, scope.problem, scope.words))
        elif WHEN in seed:
            issues.append(document.issue(("seeds", index, WHEN), "should be an expression"))
    return issues


def _strategies(document: Document, scope: _Scope) -> list[Issue]:
    issues: list[Issue] = []
    for name in _dict(document, "strategies"):
        settings = _dict(document, "strategies", name)
        issues += _settings(document, ("strategies", name), settings, scope)
    return issues


def _settings(
    document: Document, trail: Trail, settings: dict[str, Any], scope: _Scope
) -> list[Issue]:
    """Check that settings name parameters and give them values among their choices."""
    issues = []
    for name, value in settings.items():
        if name == WHEN and trail[0] == "seeds":
            continue
        if name not in scope.choices:
            known = list(scope.choices)
            hint = did_you_mean(name, known) or f"; the parameters are {', '.join(known)}"
            message = f"unknown parameter{hint}"
            issues.append(document.issue((*trail, name), message, at_key=True))
        elif scope.choices[name] and pick(scope.choices[name], value) is None:
            words = ", ".join(format_scalar(choice) for choice in scope.choices[name])
            issues.append(document.issue((*trail, name), f"is not one of {words}"))
    return issues
