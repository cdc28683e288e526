"""A search space: which variants of an operation are legal for a problem on a device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktune.device import Device
from ktune.errors import SpaceError, UsageError, VariantError
from ktune.operations import Operation, operation
from ktune.problem import (
    Problem,
    Scalar,
    format_fields,
    format_scalar,
    parse_fields,
    short_hash,
)
from ktune.resources import shipped
from ktune.space.checks import DEFAULT_SET, WHEN, check, expand, pick
from ktune.space.document import Document, issue_lines, label_of
from ktune.space.expressions import DEVICE, Expression, did_you_mean
from ktune.space.schema import BudgetModel, SpaceModel, validate
from ktune.space.walk import Constraint, Parameter, Values, Walk, distance
from ktune.variant import Variant

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Seed:
    """Settings to try first, on the problems where ``when`` holds."""

    values: tuple[tuple[str, Scalar], ...]
    when: Expression | None


@dataclass(frozen=True, slots=True)
class Budget:
    """What a search of one problem may spend."""

    trials: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Space:
    """The parameters of an operation and the rules that make an assignment legal.

    Attributes:
        label: the file, as messages show it.
        op: the operation's name.
        summary: one sentence.
        parameters: in file order, launch options last.
        constraints: in file order.
        seeds: settings to try first.
        strategies: named settings of the algorithm's axes.
        problems: named sets of problems; ``default`` is what a bare search tunes.
        budget: what a search of one problem may spend.
    """

    label: str
    op: str
    summary: str
    parameters: tuple[Parameter, ...]
    constraints: tuple[Constraint, ...]
    seeds: tuple[Seed, ...]
    strategies: Mapping[str, Mapping[str, Scalar]]
    problems: Mapping[str, tuple[Problem, ...]]
    budget: Budget

    @property
    def operation(self) -> Operation:
        """The operation itself."""
        return operation(self.op)

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits that stand for operation, parameters and constraints."""
        parameters = [
            f"{p.name} {p.choices!r} {p.when.text if p.when else ''} {p.is_launch}"
            for p in self.parameters
        ]
        constraints = [c.require.text for c in self.constraints]
        return short_hash("\n".join([self.op, *parameters, *constraints]))

    @property
    def templates(self) -> tuple[str, ...]:
        """The template files' names."""
        (parameter,) = [p for p in self.parameters if p.name == "template"]
        return tuple(str(choice) for choice in parameter.choices)

    def variants(self, problem: Problem, device: Device) -> tuple[Variant, ...]:
        """Return every legal variant, in file order."""
        legal = self._walk(problem, device).legal()
        return tuple(dict.fromkeys(Variant.of(self.op, values) for values in legal))

    def rejections(self, problem: Problem, device: Device) -> dict[str, int]:
        """Return how many assignments each constraint rules out, by its ``because``.

        An assignment that breaks several counts for the one that is decided first.
        """
        walk = self._walk(problem, device)
        for _ in walk.legal():
            pass
        return walk.rejected

    def why_not(self, values: Mapping[str, Scalar], problem: Problem, device: Device) -> list[str]:
        """Return why an assignment is not legal; nothing if it is."""
        return self._examine(values, problem, device)[1]

    def variant(self, values: Mapping[str, Scalar], problem: Problem, device: Device) -> Variant:
        """Return the variant of a full assignment.

        Raises:
            VariantError: it is not legal; the message says why.
        """
        clean, reasons = self._examine(values, problem, device)
        if reasons:
            what = f"{self.op} variant {format_fields(values)!r} is not legal"
            raise VariantError(f"{what} for {problem.text!r}: {'; '.join(reasons)}")
        return Variant.of(self.op, clean)

    def complete(self, partial: Mapping[str, Scalar], problem: Problem, device: Device) -> Variant:
        """Return the legal variant with these settings that is nearest to the default variant.

        Among equally near ones the first in file order wins, so files list preferred choices
        first.

        Raises:
            VariantError: no legal variant has these settings; the message says why.
        """
        chosen = self._settings(partial)
        default = self.operation.default_variant(problem, device).values
        narrowed = tuple(_narrow(p, chosen) for p in self.parameters)
        walk = self._walk(problem, device, narrowed)
        legal = [values for values in walk.legal() if chosen.keys() <= values.keys()]
        if not legal:
            raise VariantError(self._no_completion(chosen, problem, walk))
        return Variant.of(self.op, min(legal, key=lambda values: distance(values, default)))

    def seeds_for(self, problem: Problem, device: Device) -> list[Variant]:
        """Return the seeds that are legal for a problem, in file order.

        What a seed leaves open is completed as by ``complete``.
        """
        names = self.names(problem, device)
        variants = []
        for seed in self.seeds:
            if seed.when is None or seed.when.holds(names):
                with suppress(VariantError):
                    variants.append(self.complete(dict(seed.values), problem, device))
        return list(dict.fromkeys(variants))

    def problem_set(self, name: str = DEFAULT_SET) -> list[Problem]:
        """Return a named set of problems, or the one problem that a text describes.

        Args:
            name: ``default``, or ``m=4096 n=1024``, or ``softmax m=4096 n=1024``.

        Raises:
            UsageError: there is no such set.
            ProblemError: the text is not a problem of this operation.
        """
        if name in self.problems:
            return list(self.problems[name])
        if "=" in name:
            words = name.split()
            return [self.operation.problem(parse_fields(words[words[0] == self.op :]))]
        sets = list(self.problems)
        raise UsageError(
            f"{self.label} has no problem set {name!r}{did_you_mean(name, sets)}; "
            f"it has {', '.join(sets)}. A single problem is written as name=value words"
        )

    def strategy(self, name: str) -> dict[str, Scalar]:
        """Return the settings of a named strategy.

        Raises:
            UsageError: there is no such strategy.
        """
        if name not in self.strategies:
            known = list(self.strategies)
            raise UsageError(
                f"{self.label} has no strategy {name!r}{did_you_mean(name, known)}; "
                f"it has {', '.join(known) or 'none'}"
            )
        return dict(self.strategies[name])

    def names(self, problem: Problem, device: Device) -> dict[str, Any]:
        """Return what expressions may name beside parameters: the problem's names, ``device``."""
        if problem.op != self.op:
            raise UsageError(f"{self.label} is a space of {self.op}; {problem.text!r} is not")
        return {**self.operation.names(problem), DEVICE: device}

    def _walk(
        self, problem: Problem, device: Device, parameters: tuple[Parameter, ...] = ()
    ) -> Walk:
        return Walk(parameters or self.parameters, self.constraints, self.names(problem, device))

    def _examine(
        self, values: Mapping[str, Scalar], problem: Problem, device: Device
    ) -> tuple[Values, list[str]]:
        """Return an assignment with its values as the file writes them, and what is wrong."""
        walk, names = self._walk(problem, device), self.names(problem, device)
        clean: Values = {}
        reasons = [self._unknown(name) for name in values if name not in self._by_name()]
        for parameter in self.parameters:
            applies = walk.applies(parameter, names)
            reason = _misfit(parameter, applies, values)
            if reason:
                reasons.append(reason)
            elif applies:
                choice = pick(parameter.choices, values[parameter.name])
                assert choice is not None
                names[parameter.name] = clean[parameter.name] = choice
        broken = [c for c in self.constraints if walk.broken(c, names)]
        return clean, reasons + [f"{c.because} (requires {c.require.text})" for c in broken]

    def _by_name(self) -> dict[str, Parameter]:
        return {p.name: p for p in self.parameters}

    def _unknown(self, name: str) -> str:
        known = list(self._by_name())
        return f"no parameter {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}"

    def _settings(self, partial: Mapping[str, Scalar]) -> Values:
        """Return settings with their values as the file writes them.

        Raises:
            VariantError: a name or a value is unknown.
        """
        known = self._by_name()
        reasons = [self._unknown(name) for name in partial if name not in known]
        given = [known[name] for name in partial if name in known]
        reasons += [reason for p in given if (reason := _misfit(p, True, partial))]
        if reasons:
            raise VariantError(f"{self.op}: {'; '.join(reasons)}")
        picked = {p.name: pick(p.choices, partial[p.name]) for p in given}
        return {name: choice for name, choice in picked.items() if choice is not None}

    def _no_completion(self, chosen: Values, problem: Problem, walk: Walk) -> str:
        known = self._by_name()
        reasons = [because for because, count in walk.rejected.items() if count]
        for name in chosen:
            when = known[name].when
            if when is not None:
                reasons.append(f"{name} applies only when {when.text}")
        text = f"no legal {self.op} variant has {format_fields(chosen)!r} for {problem.text!r}"
        return f"{text}: {'; '.join(reasons)}"


def _narrow(parameter: Parameter, chosen: Values) -> Parameter:
    if parameter.name not in chosen:
        return parameter
    only = (chosen[parameter.name],)
    return Parameter(parameter.name, only, parameter.when, parameter.is_launch)


def _misfit(parameter: Parameter, applies: bool, values: Mapping[str, Scalar]) -> str | None:
    """Return what is wrong with the value of one parameter, absent or present."""
    name, choices = parameter.name, ", ".join(format_scalar(c) for c in parameter.choices)
    if not applies:
        condition = parameter.when.text if parameter.when else ""
        return f"{name} applies only when {condition}" if name in values else None
    if name not in values:
        return f"{name} is missing; choose one of {choices}"
    if pick(parameter.choices, values[name]) is None:
        return f"{name}={format_scalar(values[name])} is not one of {choices}"
    return None


def load_space(name: str | os.PathLike[str], folders: Iterable[str | Path] = ()) -> Space:
    """Read a search space.

    Args:
        name: ``softmax`` for ``softmax.yaml`` in one of the folders or among the shipped
            spaces; or the path of a file.
        folders: where to look before the shipped spaces.

    Raises:
        SpaceError: there is no such file, or it is wrong; the message then has a line
            ``file:line:column: key: reason`` for each error.
    """
    return parse_space(*read_space(name, folders))


def read_space(name: str | os.PathLike[str], folders: Iterable[str | Path] = ()) -> tuple[str, str]:
    """Return the text of a search space's file, and the file as messages show it.

    Raises:
        SpaceError: there is no such file.
    """
    path = _locate(name, folders)
    label = label_of(path)
    try:
        return path.read_text(encoding="utf-8"), label
    except (OSError, UnicodeDecodeError) as error:
        raise SpaceError(f"cannot read the search space {label}: {error}") from error


def parse_space(text: str, label: str) -> Space:
    """Read a search space from the text of a file.

    Args:
        text: YAML.
        label: the file's name in messages.

    Raises:
        SpaceError: the text is wrong.
    """
    document = Document.read(label, text)
    model, issues = validate(document)
    issues = [*document.issues, *issues, *check(document)]
    if model is None or issues:
        raise SpaceError(issue_lines(label, issues))
    return _build(model, label)


def _locate(name: str | os.PathLike[str], own: Iterable[str | Path]) -> Path:
    path = Path(name)
    if not isinstance(name, str) or path.suffix in SUFFIXES or len(path.parts) != 1:
        return path
    folders = [*map(Path, own), shipped("search_spaces")]
    for folder in folders:
        for suffix in SUFFIXES:
            if (folder / f"{name}{suffix}").is_file():
                return folder / f"{name}{suffix}"
    known = sorted({f.stem for folder in folders for s in SUFFIXES for f in folder.glob(f"*{s}")})
    raise SpaceError(
        f"no search space {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}. "
        "A file of your own is named by its path, ending in .yaml"
    )


def _build(model: SpaceModel, label: str) -> Space:
    op = operation(model.operation)
    sections = ((model.parameters, False), (model.launch, True))
    return Space(
        label=label,
        op=op.name,
        summary=model.summary,
        parameters=tuple(
            Parameter(name, tuple(p.choices), _compiled(p.when), is_launch)
            for section, is_launch in sections
            for name, p in section.items()
        ),
        constraints=tuple(Constraint(Expression(c.require), c.because) for c in model.constraints),
        seeds=tuple(_seed(seed) for seed in model.seeds),
        strategies=model.strategies,
        problems={
            name: tuple(op.problem(fields) for item in items for fields in expand(item))
            for name, items in model.problems.items()
        },
        budget=_budget(model.budget),
    )


def _compiled(text: str | None) -> Expression | None:
    return None if text is None else Expression(text)


def _seed(values: dict[str, Scalar]) -> Seed:
    when = values.get(WHEN)
    rest = tuple((name, value) for name, value in values.items() if name != WHEN)
    return Seed(rest, None if when is None else Expression(str(when)))


def _budget(model: BudgetModel) -> Budget:
    return Budget(model.trials, model.timeout_s)
