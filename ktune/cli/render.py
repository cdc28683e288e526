"""``ktune render``: print the Python module of a variant."""

from __future__ import annotations

from pathlib import Path

import click

from ktune.cli.console import emit, note, out
from ktune.cli.options import (
    common,
    find_space,
    one_problem,
    parse_settings,
    problem_option,
    render_device,
)
from ktune.errors import UsageError


@click.command()
@click.argument("space", metavar="OP|SPACE.yaml")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A parameter; repeatable."
)
@click.option("--strategy", metavar="NAME", help="A named strategy of the space, as fa2.")
@problem_option
@click.option("--arch", metavar="ARCH", help="Target; by default the GPU here, else sm_90.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE")
@common
def render(
    space: str,
    settings: tuple[str, ...],
    strategy: str | None,
    problem: str | None,
    arch: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Print the Python module that computes a problem one way.

    Parameters that are not set are those of the legal variant nearest to the default one.
    The module needs PyTorch and Triton alone.

    Example: ktune render attention --set rescale=conditional
    """
    from ktune.codegen import render as render_source

    found = find_space(space)
    asked = one_problem(found, problem)
    chosen = {**(found.strategy(strategy) if strategy else {}), **parse_settings(settings)}
    variant = found.complete(chosen, asked, render_device(arch))
    source = render_source(variant, asked)
    if output is not None:
        _write(output, source.text)
        note(f"wrote {output}")
    note(f"{variant.op} {variant.text}\nfor {asked.text}")
    if as_json:
        emit(
            "render",
            {
                "problem": asked.text,
                "variant": variant.text,
                "id": variant.id,
                "source_id": source.id,
                "launch": variant.options,
                "text": source.text,
            },
        )
    elif output is None:
        out(source.text)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
