"""Render a variant's template to the source of one complete Python module."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2
from jinja2 import meta, nodes

from ktune.errors import TemplateError
from ktune.operations import operation
from ktune.problem import Problem, Scalar, format_fields, short_hash
from ktune.resources import shipped
from ktune.variant import Variant

FIXED_CONTEXT = frozenset({"header"})


@dataclass(frozen=True, slots=True)
class Source:
    """The text of a rendered module.

    The text depends on the variant's template and parameters and on the problem's structure,
    and on nothing else: same variant and structure, same bytes. Launch options are not in it.
    """

    op: str
    template: str
    text: str

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits that stand for the text."""
        return short_hash(self.text)


def template_name(op: str, template: str) -> str:
    """Return the file name of a template inside a templates folder."""
    return f"{op}/{template}.py.jinja"


def template_folders(op: str) -> tuple[str, ...]:
    """Return where an operation's templates are looked for: its own folder, then the shipped."""
    own = operation(op).templates
    return (own, str(shipped("templates"))) if own else (str(shipped("templates")),)


@cache
def environment(folders: tuple[str, ...]) -> jinja2.Environment:
    """Return the one, strict template environment of some folders."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the output is Python, not HTML
    )


def render(variant: Variant, problem: Problem, **overrides: Scalar) -> Source:
    """Render the module that computes a problem's structure the variant's way.

    Args:
        variant: template and parameters.
        problem: gives the structure: head dim, mask, layout and so on.
        **overrides: structure to change, for example ``count_rescales=True``.

    Raises:
        TemplateError: there is no such template, or it uses a name that nobody gives.
    """
    structure = {**operation(problem.op).structure(problem), **overrides}
    name = template_name(variant.op, variant.template)
    context = {**structure, **dict(variant.params), "header": _header(variant, name, structure)}
    try:
        text = environment(template_folders(variant.op)).get_template(name).render(context)
    except jinja2.TemplateNotFound as error:
        raise TemplateError(
            f"no template {error.name!r} in {' or '.join(template_folders(variant.op))}"
        ) from error
    except jinja2.TemplateError as error:
        raise TemplateError(f"templates/{name} with {variant.text}: {error.message}") from error
    return Source(variant.op, variant.template, text)


def _header(variant: Variant, name: str, structure: dict[str, Scalar]) -> str:
    lines = [
        f"Rendered by ktune from templates/{name}. Do not edit.",
        "",
        "Parameters:",
        *_wrap(format_fields(dict(variant.params))),
        "Structure:",
        *_wrap(format_fields(dict(sorted(structure.items())))),
    ]
    return "\n".join(lines)


def _wrap(text: str) -> list[str]:
    return [f"    {word}" for word in text.split()]


def template_variables(op: str, template: str) -> frozenset[str]:
    """Return the context variables that a template and everything it may include ask for.

    An include whose name is computed (``"online/rescale_" ~ rescale ~ ".py.jinja"``) counts
    with every file that it could name.

    Raises:
        TemplateError: there is no such template, or it cannot be parsed.
    """
    folders = template_folders(op)
    found: set[str] = set()
    todo, seen = [template_name(op, template)], set[str]()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        tree = _parse(folders, name)
        found |= meta.find_undeclared_variables(tree)
        for node in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport)):
            todo += _included(folders, node.template)  # type: ignore[attr-defined]
    return frozenset(found - FIXED_CONTEXT)


def template_digest(op: str) -> str:
    """Return a short hash of the operation's templates and of those it may share.

    Times recorded under another digest are those of other kernels.
    """
    folders = [Path(folder) / part for folder in template_folders(op) for part in (op, "online")]
    files = [path for folder in folders for path in sorted(folder.glob("*.jinja"))]
    return short_hash("\0".join(path.read_text(encoding="utf-8") for path in files))


def _parse(folders: tuple[str, ...], name: str) -> nodes.Template:
    env = environment(folders)
    assert env.loader is not None
    try:
        return env.parse(env.loader.get_source(env, name)[0], name)
    except jinja2.TemplateNotFound as error:
        raise TemplateError(f"no template {error.name!r} in {' or '.join(folders)}") from error
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"templates/{name}:{error.lineno}: {error.message}") from error


def _included(folders: tuple[str, ...], expression: nodes.Expr) -> list[str]:
    if isinstance(expression, nodes.Const):
        return [str(expression.value)]
    if not isinstance(expression, nodes.Concat):
        raise TemplateError("an include must name a file, or join constants with parameters by ~")
    pattern = "".join(
        str(part.value) if isinstance(part, nodes.Const) else "*" for part in expression.nodes
    )
    return [
        str(path.relative_to(folder))
        for folder in map(Path, folders)
        for path in sorted(folder.glob(pattern))
    ]
