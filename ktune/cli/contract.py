"""Check a search space against its templates: the contract, every structure, every default."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ktune.cli.options import meant
from ktune.codegen import render
from ktune.codegen.render import template_name, template_variables
from ktune.device import COMPILE_TARGETS, Device
from ktune.errors import KtuneError, TemplateError
from ktune.problem import Problem, Scalar
from ktune.space import Space
from ktune.space.document import Document
from ktune.variant import Variant

TEMPLATE = "template"
Structure = tuple[tuple[str, Scalar], ...]


@dataclass(slots=True)
class Report:
    """What was found in one space.

    Attributes:
        label: the file.
        templates: its families.
        problems: problems of all sets, each once.
        legal: legal variants, over all problems.
        rendered: modules that were rendered and parsed.
        errors: one text for each thing that is wrong.
    """

    label: str
    templates: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    legal: int = 0
    rendered: int = 0
    errors: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def add(self, text: str, kind: str | None = None) -> None:
        """Add an error; of those of one kind (by default, of one text) only the first."""
        if (kind or text) not in self._seen:
            self._seen.add(kind or text)
            self.errors.append(text)


def examine(space: Space, device: Device) -> Report:
    """Check a space that could be read, on a device's limits."""
    report = Report(space.label, templates_of(space), all_problems(space))
    _contract(space, report)
    for problem in report.problems:
        _default(space, problem, device, report)
    _seeds(space, report)
    _structures(space, device, report)
    return report


def templates_of(space: Space) -> list[str]:
    """Return the template families that a space chooses from."""
    return [str(c) for p in space.parameters if p.name == TEMPLATE for c in p.choices]


def all_problems(space: Space) -> list[Problem]:
    """Return the problems of all sets, each once."""
    return list({p.text: p for problems in space.problems.values() for p in problems}.values())


def first_choices(space: Space, problem: Problem, device: Device) -> list[Variant]:
    """Return the default variant and the legal seeds."""
    default = space.operation.default_variant(problem, device)
    return list(dict.fromkeys([default, *space.seeds_for(problem, device)]))


def _contract(space: Space, report: Report) -> None:
    """Check that templates ask for what the space and the operation give, and for all of it."""
    own = [p.name for p in space.parameters if not p.is_launch and p.name != TEMPLATE]
    given = {*own, *space.operation.structure(report.problems[0])}
    used: dict[str, frozenset[str]] = {}
    for family in report.templates:
        try:
            used[family] = template_variables(space.op, family)
        except TemplateError as error:
            report.add(str(error))
            continue
        for name in sorted(used[family] - given):
            report.add(
                f"templates/{template_name(space.op, family)}: nobody gives {name!r}"
                f"{meant(name, sorted(given))}; add it to the parameters of {space.label} or to "
                f"the structure of the operation {space.op}"
            )
    if len(used) == len(report.templates):
        for name in own:
            if not any(name in names for names in used.values()):
                report.add(
                    f"{_place(space, 'parameters', name)}: parameters.{name}: no template uses "
                    "it; remove it, or use it in a template"
                )


def _default(space: Space, problem: Problem, device: Device, report: Report) -> None:
    default = space.operation.default_variant(problem, device)
    reasons = space.why_not(default.values, problem, device)
    if reasons:
        report.add(
            f"{space.label}: the default variant {default.text!r} is not legal for "
            f"{problem.text!r} on {device.name}: {'; '.join(reasons)}"
        )


def _seeds(space: Space, report: Report) -> None:
    """Check that every seed is legal for some problem on some device."""
    for index, seed in enumerate(space.seeds):
        alone = replace(space, seeds=(seed,))
        devices = COMPILE_TARGETS.values()
        if not any(alone.seeds_for(p, d) for p in report.problems for d in devices):
            report.add(
                f"{_place(space, 'seeds', index)}: seeds[{index}]: is legal for no problem of any "
                "set; correct or remove it"
            )


def _structures(space: Space, device: Device, report: Report) -> None:
    """Render and parse every structure that a legal variant can have."""
    used = _used(space, report)
    seen: set[tuple[Structure, Structure]] = set()
    for problem, variants in _legal(space, device, report):
        structure = tuple(sorted(space.operation.structure(problem).items()))
        for variant in variants:
            key = (structure, _shape(variant))
            if key not in seen:
                seen.add(key)
                _render(space, problem, variant, used, report)


def _used(space: Space, report: Report) -> dict[str, frozenset[str]]:
    found = {}
    for family in report.templates:
        try:
            found[family] = template_variables(space.op, family)
        except TemplateError:
            continue
    return found


def _legal(
    space: Space, device: Device, report: Report
) -> Iterator[tuple[Problem, tuple[Variant, ...]]]:
    for problem in report.problems:
        variants = space.variants(problem, device)
        report.legal += len(variants)
        if not variants:
            report.add(f"{space.label}: no variant is legal for {problem.text!r} on {device.name}")
        yield problem, variants


def _shape(variant: Variant) -> Structure:
    """Return what of a variant may change code: words, flags, and whether a size is 0 or 1."""
    shape: list[tuple[str, Scalar]] = [(TEMPLATE, variant.template)]
    for name, value in variant.params:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        shape.append((name, str(value) if not number or value in {0, 1} else "size"))
    return tuple(shape)


def _render(
    space: Space,
    problem: Problem,
    variant: Variant,
    used: dict[str, frozenset[str]],
    report: Report,
) -> None:
    """Render and parse one module, and check that it uses every parameter it is given."""
    names = used.get(variant.template)
    for name, _ in variant.params if names is not None else ():
        if names is not None and name not in names:
            report.add(
                f"{_place(space, 'parameters', name)}: parameters.{name}: the template "
                f"{variant.template} does not use it, so variants would repeat; add "
                f"when: {TEMPLATE} != '{variant.template}'"
            )
    try:
        ast.parse(render(variant, problem).text)
        report.rendered += 1
    except KtuneError as error:
        report.add(str(error), str(error).replace(variant.text, ""))
    except SyntaxError as error:
        report.add(
            f"templates/{template_name(space.op, variant.template)} with {variant.text} for "
            f"{problem.text}: line {error.lineno} of the rendered module: {error.msg}: "
            f"{(error.text or '').strip()}",
            f"{variant.template} {error.msg} {error.text}",
        )


def _place(space: Space, *trail: str | int) -> str:
    """Return ``file:line:column`` of a key in a space's file."""
    try:
        document = Document.read(space.label, Path(space.label).read_text(encoding="utf-8"))
    except (OSError, KtuneError):
        return space.label
    line, column = document.position(trail, at_key=True)
    return f"{space.label}:{line}:{column}"
