"""``ktune search``: find the fastest right variant of each problem and fill the table."""

from __future__ import annotations

from pathlib import Path

import click

from ktune.cli.options import common

PROBLEMS_HELP = (
    'A named set, as llama-3-8b, or one problem, as "m=4096 n=50257"; repeatable. '
    "By default the space's own default set."
)
TARGET_HELP = (
    "What measures: a GPU here (live), a recording that comes with ktune (h200) or its FILE. "
    "auto: a GPU if there is one, else the recording."
)

EXAMPLES = """\b
Examples:
  ktune search softmax
  ktune search softmax attention --problems llama-3-8b
  ktune search softmax --problems "m=4096 n=50257" --trials 100
"""


@click.command(epilog=EXAMPLES)
@click.argument("spaces", nargs=-1, required=True, metavar="OP|SPACE.yaml...")
@click.option("--problems", "--problem", multiple=True, metavar="SET|TEXT", help=PROBLEMS_HELP)
@click.option("--target", default="auto", metavar="auto|live|h200|FILE", help=TARGET_HELP)
@click.option("--device", metavar="cuda:0", help="Which GPU; implies --target live.")
@click.option("--trials", type=click.IntRange(1), help="Measurements for each problem.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), metavar="S", help="Seconds.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sampler.")
@click.option("--storage", metavar="URL", help="Optuna storage; 'memory' keeps nothing.")
@click.option("--table", type=click.Path(dir_okay=False, path_type=Path), help="Table to fill.")
@click.option("--fresh", is_flag=True, help="Forget earlier searches of these problems first.")
@click.option("--exhaustive", is_flag=True, help="Measure every legal variant.")
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write every outcome to a recording, to be replayed by --target FILE.",
)
@click.option("--no-proof", is_flag=True, help="Do not prove a replay's winners here.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@common
@click.pass_context
def search(
    ctx: click.Context,
    spaces: tuple[str, ...],
    problems: tuple[str, ...],
    target: str,
    device: str | None,
    trials: int | None,
    timeout: float | None,
    seed: int,
    storage: str | None,
    table: Path | None,
    fresh: bool,
    exhaustive: bool,
    record: Path | None,
    no_proof: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Find the fastest right variant of each problem; winners go to the dispatch table.

    A variant is checked against float64 before it is timed, and the default variant stays
    unless another beats it beyond the noise. A search that was stopped goes on where it was.

    Without a GPU, recorded times of an NVIDIA H200 answer, and the winners are compiled for it
    and checked in Triton's interpreter here.
    """
    from ktune.cli.session import Request, run_search

    if exhaustive and trials is not None:
        raise click.UsageError("--exhaustive measures every variant; leave out --trials")
    request = Request(
        spaces=spaces,
        problems=problems,
        target=target,
        device=device,
        trials=trials,
        timeout_s=timeout,
        seed=seed,
        storage=storage,
        table=table,
        fresh=fresh,
        exhaustive=exhaustive,
        record=record,
        proof=not no_proof,
        quiet=quiet,
        as_json=as_json,
    )
    ctx.exit(run_search(request))
