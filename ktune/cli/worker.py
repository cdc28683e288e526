"""``ktune worker``: help searches of other machines, through the storage they share."""

from __future__ import annotations

import math

import click

from ktune.cli.options import common
from ktune.search.effort import parse_seconds

EXAMPLES = """\b
Examples:
  ktune worker --storage postgresql://user:password@host/database
  ktune worker --storage postgresql://host/database --devices cuda:0,cuda:1
  ktune worker --once --wait 10m
"""


@click.command(epilog=EXAMPLES)
@click.option(
    "--storage",
    metavar="URL",
    help="The database that `ktune search --storage` names; by default KTUNE_STORAGE.",
)
@click.option(
    "--target",
    default="live",
    show_default=True,
    metavar="live|h200|FILE",
    help="What measures: the GPUs here, or a recording, which helps only searches of recordings.",
)
@click.option(
    "--devices",
    "--device",
    metavar="cuda:0,...|all|cpu",
    help="Which GPUs, all alike, one timing worker each; by default all.",
)
@click.option("--once", is_flag=True, help="End when no search is open, rather than wait for more.")
@click.option(
    "--wait",
    metavar="10m",
    help="End when nothing has been to do for so long; with --once, how long to wait for a first "
    "search. By default for ever, with --once not at all.",
)
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@common
@click.pass_context
def worker(
    ctx: click.Context,
    storage: str | None,
    target: str,
    devices: str | None,
    once: bool,
    wait: str | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Help searches of other machines, through the storage they share.

    Looks for searches that `ktune search --storage URL` has begun there and measures what they
    ask for. Where the device is another than theirs, it is searched for itself, and its winners
    go into the same table. Ctrl-C gives back what is being measured, for others to do.
    """
    from ktune.cli.work import WorkerRequest, run_worker

    request = WorkerRequest(
        storage=storage,
        target=target,
        devices=devices,
        once=once,
        wait_s=parse_seconds(wait) if wait else 0.0 if once else math.inf,
        quiet=quiet,
        as_json=as_json,
    )
    ctx.exit(run_worker(request))
