"""Read a YAML text and say at which line and column each of its values stands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ktune.errors import SpaceError

Step = str | int
Trail = tuple[Step, ...]
"""The keys and indices that lead from the root to a value."""


@dataclass(frozen=True, slots=True, order=True)
class Issue:
    """Something wrong in a file; line and column count from 1."""

    line: int
    column: int
    trail: str
    message: str


def trail_text(trail: Trail) -> str:
    """Write a trail as ``parameters.block_m.choices[2]``."""
    text = ""
    for step in trail:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def issue_lines(label: str, issues: list[Issue]) -> str:
    """Return one line for each issue, in the order of the file."""
    lines = []
    for issue in sorted(set(issues)):
        where = f"{issue.trail}: " if issue.trail else ""
        lines.append(f"{label}:{issue.line}:{issue.column}: {where}{issue.message}")
    return "\n".join(lines)


def label_of(path: Path) -> str:
    """Return a path as messages show it: relative where it lies below the current folder."""
    full, here = Path(os.path.abspath(path)), Path.cwd()  # noqa: PTH100 (keeps symlinks)
    return str(full.relative_to(here)) if full.is_relative_to(here) else str(path)


class _Loader(yaml.SafeLoader):
    """A SafeLoader without aliases: a small file cannot stand for a huge one."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, "aliases (*name) are not supported; write the value out", mark
            )
        return super().compose_node(parent, index)


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML file: its text, its node tree and its data.

    Attributes:
        label: the file's name in messages.
        text: the whole file.
        root: the node tree, which knows positions.
        data: plain lists, dicts and scalars.
        issues: keys that stand twice or are not text.
    """

    label: str
    text: str
    root: yaml.Node
    data: Any
    issues: list[Issue] = field(default_factory=list)

    @classmethod
    def read(cls, label: str, text: str) -> Document:
        """Parse a text.

        Raises:
            SpaceError: it is not YAML.
        """
        try:
            loader = _Loader(text)
            root = loader.get_single_node()
            data = loader.construct_document(root) if root is not None else None
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise SpaceError(issue_lines(label, [_syntax_issue(error, text)])) from None
        if root is None:
            raise SpaceError(issue_lines(label, [Issue(1, 1, "", "the file is empty")]))
        return cls(label, text, root, data, list(_bad_keys(root, ())))

    def issue(self, trail: Trail, message: str, *, at_key: bool = False) -> Issue:
        """Return an issue placed at a value, or at its key."""
        line, column = self.position(trail, at_key=at_key)
        return Issue(line, column, trail_text(trail), message)

    def issue_inside(self, trail: Trail, offset: int, message: str) -> Issue:
        """Return an issue placed inside a text value, after ``offset`` of its characters."""
        line, column = self._inside(self._find(trail)[1], offset)
        return Issue(line, column, trail_text(trail), message)

    def position(self, trail: Trail, *, at_key: bool = False) -> tuple[int, int]:
        """Return line and column of a value or its key, or of the nearest parent that exists."""
        key, value = self._find(trail)
        mark = (key if at_key and key is not None else value).start_mark
        return mark.line + 1, mark.column + 1

    def _find(self, trail: Trail) -> tuple[yaml.Node | None, yaml.Node]:
        key: yaml.Node | None = None
        node = self.root
        for step in trail:
            child = _child(node, step)
            if child is None:
                return key, node
            key, node = child
        return key, node

    def _inside(self, node: yaml.Node, offset: int) -> tuple[int, int]:
        """Find a character of a scalar in the file, however the scalar is quoted or folded.

        Folding changes white space only, so the characters that are not white space count.
        """
        start, end = node.start_mark.index, node.end_mark.index
        if not isinstance(node, yaml.ScalarNode):
            return self._line_column(start)
        wanted = sum(not c.isspace() for c in node.value[:offset])
        if node.style in {"'", '"'}:
            start += 1
        elif node.style in {"|", ">"}:
            start = self.text.index("\n", start) + 1
        for place in range(start, end):
            if not self.text[place].isspace():
                if wanted == 0:
                    return self._line_column(place)
                wanted -= 1
        return self._line_column(start)

    def _line_column(self, place: int) -> tuple[int, int]:
        before = self.text[:place]
        return before.count("\n") + 1, place - (before.rfind("\n") + 1) + 1


def _child(node: yaml.Node, step: Step) -> tuple[yaml.Node | None, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == step:
                return key, value
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return None, node.value[step]
    return None


def _bad_keys(node: yaml.Node, trail: Trail) -> Iterator[Issue]:
    """Yield an issue for each key that stands twice in a mapping or is not text."""
    seen: dict[str, int] = {}
    children: list[tuple[Step, yaml.Node]] = []
    if isinstance(node, yaml.SequenceNode):
        children = list(enumerate(node.value))
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = str(key.value)
        line, column = key.start_mark.line + 1, key.start_mark.column + 1
        where = trail_text((*trail, name))
        if key.tag != "tag:yaml.org,2002:str":
            yield Issue(line, column, where, f"a key must be text; write '{name}' in quotes")
        elif name in seen:
            yield Issue(line, column, where, f"stands twice; first in line {seen[name]}")
        seen.setdefault(name, line)
        children.append((name, value))
    for step, child in children:
        yield from _bad_keys(child, (*trail, step))


def _syntax_issue(error: Exception, text: str) -> Issue:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    hint = ""
    if isinstance(error, yaml.MarkedYAMLError) and "',' or '}'" in str(problem):
        hint = "; inside { } an expression with , [ ] { } or : must be in quotes"
    if mark is None:
        place = getattr(error, "position", 0)
        before = text[: place if isinstance(place, int) else 0]
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
    else:
        line, column = mark.line + 1, mark.column + 1
    return Issue(line, column, "", f"not YAML: {problem}{hint}")
