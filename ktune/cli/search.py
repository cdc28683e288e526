"""``ktune search``: find the fastest right variant of each problem and fill the table."""

from __future__ import annotations

import math
from pathlib import Path

import click
from click.core import ParameterSource

from ktune.cli.options import common, parse_devices
from ktune.search.effort import LEVELS, SAMPLERS, Effort, Level, parse_seconds

PROBLEMS_HELP = (
    'A named set, as llama-3-8b, or one problem, as "m=4096 n=50257"; repeatable. '
    "By default the space's own default set."
)
TARGET_HELP = (
    "What measures: a GPU here (live), a recording that comes with ktune (h200) or its FILE. "
    "auto: a GPU if there is one, else the recording."
)

SAMPLER_HELP = (
    "How the next variant is chosen. auto: from what neighbouring problems and similar variants "
    "took (the best in `ktune replay`'s comparison); tpe and gp are Optuna's."
)

EXAMPLES = """\b
Examples:
  ktune search softmax
  ktune search softmax attention --problems llama-3-8b
  ktune search softmax --problems "m=4096 n=50257" --effort full
  ktune search attention --budget 10m --devices all
  ktune search softmax --storage postgresql://user:password@host/database
"""


@click.command(epilog=EXAMPLES)
@click.argument("spaces", nargs=-1, required=True, metavar="OP|SPACE.yaml...")
@click.option("--problems", "--problem", multiple=True, metavar="SET|TEXT", help=PROBLEMS_HELP)
@click.option("--target", default="auto", metavar="auto|live|h200|FILE", help=TARGET_HELP)
@click.option(
    "--devices",
    "--device",
    metavar="cuda:0,...|all|cpu",
    help="Which GPUs, all alike, one timing worker each; cpu is Triton's interpreter, whose times "
    "mean nothing, for writing templates. Implies --target live.",
)
@click.option(
    "--effort",
    type=click.Choice(LEVELS),
    default="standard",
    show_default=True,
    help="Share of each problem's legal variants to measure: a tenth, a quarter, all.",
)
@click.option("--trials", type=click.IntRange(1), help="Measurements for each problem instead.")
@click.option(
    "--budget",
    metavar="10m",
    help="Time to measure variants of all problems: 90s, 10m, 1h; finals come on top. In a replay, "
    "the recorded machine's time.",
)
@click.option(
    "--sampler", type=click.Choice(SAMPLERS), default="auto", show_default=True, help=SAMPLER_HELP
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sampler.")
@click.option(
    "--max-variants",
    type=click.IntRange(1),
    help="Most variants for an operation, even where the default one is faster.",
)
@click.option(
    "--batch-invariant", is_flag=True, help="One variant for all batch sizes: see the README."
)
@click.option(
    "--storage",
    metavar="URL",
    help="Optuna storage: sqlite:///FILE; a database server, to share with `ktune worker`; "
    "or 'memory', which keeps nothing.",
)
@click.option("--table", type=click.Path(dir_okay=False, path_type=Path), help="Table to fill.")
@click.option("--fresh", is_flag=True, help="Forget earlier searches of these problems first.")
@click.option("--exhaustive", is_flag=True, help="The same as --effort full.")
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write every outcome to a recording, to be replayed by --target FILE.",
)
@click.option(
    "--held-out",
    multiple=True,
    metavar="SET|TEXT",
    help="Problems to judge the table by: searched, but given no entry; shows what its picks lose.",
)
@click.option(
    "--no-local",
    is_flag=True,
    help="Measure nothing here: publish the search in the shared --storage, wait for "
    "`ktune worker` on other machines, and collect.",
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
    devices: str | None,
    effort: Level,
    trials: int | None,
    budget: str | None,
    sampler: str,
    seed: int,
    max_variants: int | None,
    batch_invariant: bool,
    storage: str | None,
    table: Path | None,
    fresh: bool,
    exhaustive: bool,
    record: Path | None,
    held_out: tuple[str, ...],
    no_local: bool,
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
    from ktune.cli.request import Request
    from ktune.cli.session import run_search

    if exhaustive:
        source = ctx.get_parameter_source("effort")
        if trials is not None or (source == ParameterSource.COMMANDLINE and effort != "full"):
            raise click.UsageError(
                "--exhaustive measures every variant; leave out --trials and --effort"
            )
        effort = "full"
    request = Request(
        spaces=spaces,
        problems=problems,
        target=target,
        devices=parse_devices(devices),
        effort=Effort(
            level=effort,
            trials=trials,
            budget_s=parse_seconds(budget) if budget else math.inf,
            sampler=sampler,
            seed=seed,
            max_variants=max_variants,
            batch_invariant=batch_invariant,
        ),
        storage=storage,
        table=table,
        fresh=fresh,
        record=record,
        held_out=held_out,
        proof=not no_proof,
        quiet=quiet,
        as_json=as_json,
        local=not no_local,
    )
    ctx.exit(run_search(request))
