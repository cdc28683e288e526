"""The shape of a search-space file: pydantic models, and their errors as file positions."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from ktune.problem import Scalar
from ktune.space.document import Document, Issue, Trail
from ktune.space.expressions import Expression, ExpressionError, did_you_mean

SCHEMA = 1
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")


def _scalar(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str):
        raise PydanticCustomError("scalar", "should be a number, a word, true or false")
    if isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("scalar", "should be a finite number")
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        raise PydanticCustomError("scalar", "should be a number; write {n}", {"n": _number(value)})
    return value


def _expression(text: str) -> str:
    try:
        Expression(text)
    except ExpressionError as error:
        context = {"reason": error.reason, "offset": error.column}
        raise PydanticCustomError("expression", "{reason}", context) from None
    return text


def _distinct(choices: list[Scalar]) -> list[Scalar]:
    for index, choice in enumerate(choices):
        if choice in choices[:index]:
            context = {"choice": choice, "index": index}
            raise PydanticCustomError("duplicate", "{choice} stands twice", context)
    return choices


Value = Annotated[Any, BeforeValidator(_scalar)]
ExpressionText = Annotated[str, AfterValidator(_expression)]
Choices = Annotated[list[Value], Field(min_length=1), AfterValidator(_distinct)]
Positive = Annotated[float, Field(gt=0)]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class ParameterModel(_Model):
    """One thing that may vary."""

    choices: Choices
    when: ExpressionText | None = None


class ConstraintModel(_Model):
    """What a legal variant must satisfy, and why."""

    require: ExpressionText
    because: Annotated[str, Field(min_length=1)]


class BudgetModel(_Model):
    """What a search of one problem may spend."""

    trials: Annotated[int, Field(gt=0)] = 60
    timeout_s: Positive = 600.0


class SpaceModel(_Model):
    """A whole file."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    operation: str
    summary: str = ""
    parameters: dict[str, ParameterModel]
    launch: dict[str, ParameterModel] = {}
    constraints: list[ConstraintModel] = []
    seeds: list[dict[str, Value]] = []
    strategies: dict[str, dict[str, Value]] = {}
    problems: dict[str, Annotated[list[dict[str, Any]], Field(min_length=1)]]
    budget: BudgetModel = BudgetModel()


_INNER: dict[str, type[BaseModel]] = {
    "parameters": ParameterModel,
    "launch": ParameterModel,
    "constraints": ConstraintModel,
    "budget": BudgetModel,
}


def validate(document: Document) -> tuple[SpaceModel | None, list[Issue]]:
    """Return the model of a document, or None with everything that is wrong in its shape."""
    try:
        return SpaceModel.model_validate(document.data), []
    except ValidationError as error:
        return None, [_issue(document, detail) for detail in error.errors(include_url=False)]


def _issue(document: Document, detail: ErrorDetails) -> Issue:
    kind, trail, context = detail["type"], tuple(detail["loc"]), detail.get("ctx", {})
    if kind == "extra_forbidden":
        return document.issue(trail, f"unknown key{_known(trail)}", at_key=True)
    if kind == "missing":
        return document.issue(trail[:-1], f"the key {str(trail[-1])!r} is missing", at_key=True)
    if kind == "duplicate":
        return document.issue((*trail, context["index"]), detail["msg"])
    if kind == "expression":
        return document.issue_inside(trail, context["offset"], detail["msg"])
    if trail[-1:] == ("[key]",):
        return document.issue(trail[:-1], "a key must be text", at_key=True)
    return document.issue(trail, _message(detail, trail))


def _known(trail: Trail) -> str:
    model = SpaceModel if len(trail) == 1 else _INNER[str(trail[0])]
    keys = [field.alias or name for name, field in model.model_fields.items()]
    return did_you_mean(str(trail[-1]), keys) or f"; the keys here are {', '.join(keys)}"


def _message(detail: ErrorDetails, trail: Trail) -> str:
    kind, given = detail["type"], detail["input"]
    if trail == ("schema",):
        return f"this ktune reads schema {SCHEMA}, not {given!r}"
    if kind in {"too_short", "string_too_short"}:
        return "needs at least one" if kind == "too_short" else "needs text"
    if kind in _WORDS:
        if isinstance(given, str) and _NUMBER.fullmatch(given):
            return f"should be a number; write {_number(given)}"
        return f"should be {_WORDS[kind]}, not {_shown(given)}"
    return detail["msg"].replace("Input should be", "should be")


_WORDS = {
    "float_type": "a number",
    "int_type": "a whole number",
    "string_type": "text",
    "list_type": "a list: [a, b]",
    "dict_type": "a mapping: {name: value}",
    "model_type": "a mapping: {name: value}",
}


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return repr(value)


def _number(text: str) -> str:
    """Write a number so that YAML 1.1 reads it as one: ``1e-3`` becomes ``1.0e-3``."""
    mantissa, exponent = text.lower().split("e")
    mantissa = mantissa if "." in mantissa else mantissa + ".0"
    return f"{mantissa}e{exponent if exponent[0] in '+-' else '+' + exponent}"
