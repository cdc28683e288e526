"""``ktune bench``: time winners side by side with what users have today."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktune.cli.console import emit, note, show, table, warn
from ktune.cli.options import common, find_space, parse_device
from ktune.cli.plan import LIVE, choose_problems, recording_name
from ktune.errors import KtuneError, UsageError

if TYPE_CHECKING:
    from ktune.bench.worker import Worker
    from ktune.problem import Problem
    from ktune.report.bench import Bench

START_LIMIT_S = 120.0


class BenchCommand(click.Command):
    """``ktune bench``, which hands ``ktune bench search`` on to a command of its own."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Read the arguments; the first one decides whose they are."""
        if args[:1] != ["search"]:
            return super().make_context(info_name, args, parent, **extra)
        from ktune.cli.bench_search import bench_search

        return bench_search.make_context(f"{info_name} search", args[1:], parent, **extra)


@click.command(cls=BenchCommand)
@click.argument("ops", nargs=-1, metavar="[OP]...")
@click.option("--problems", "--problem", "problems", multiple=True, metavar="SET|TEXT")
@click.option("--against", metavar="A,B", help="Peers: torch, compile, cudnn, flash, quack, fa4.")
@click.option("--device", default="cuda:0", show_default=True, help="The GPU to measure on.")
@click.option("--rounds", default=30, show_default=True, type=click.IntRange(3))
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="A folder for JSON, Markdown and a plot of each operation; or FILE.json.",
)
@click.option(
    "--from",
    "stored",
    type=click.Path(path_type=Path),
    help="Render stored results again; needs no GPU.",
)
@common
def bench(
    ops: tuple[str, ...],
    problems: tuple[str, ...],
    against: str | None,
    device: str,
    rounds: int,
    output: Path | None,
    stored: Path | None,
    as_json: bool,
) -> None:
    """Time the variants that ktune would run beside the default variant and peers, in one run.

    Example: ktune bench softmax --against torch,compile --output benchmarks

    `ktune bench search` compares tuners instead: ktune bench search --help
    """
    from ktune.report.bench import read_benches

    if not ops and stored is None:
        raise UsageError("name an operation, for example: ktune bench softmax; or --from FILE.json")
    if output is not None and output.suffix == ".json" and len(set(ops)) > 1:
        raise UsageError(f"--output {output} is one file; name a folder for several operations")
    if stored is not None:
        if problems or against:
            raise UsageError("--from shows stored results as they are; leave out other choices")
        benches = [b for b in read_benches(stored) if not ops or b.op in ops]
    else:
        names = None if against is None else [w.strip() for w in against.split(",") if w.strip()]
        recording_name(LIVE, [device] if device else [], replayable=False)
        benches = _measure(ops, problems, names, parse_device(device), rounds)
    if as_json:
        emit("bench", {"benchmarks": [bench.to_dict() for bench in benches]})
    else:
        _print(benches)
    if output is not None:
        _write(benches, output)
    if any(row.latency("ktune") is None for bench in benches for row in bench.rows):
        click.get_current_context().exit(1)


def _print(benches: Sequence[Bench]) -> None:
    from ktune.report.bench import table_of

    for bench in benches:
        columns, rows = table_of(bench)
        reasons = dict.fromkeys(
            f"{name}: {contender.reason}"
            for row in bench.rows
            for name, contender in row.contenders.items()
            if contender.reason
        )
        show(table(f"{bench.op}: {bench.provenance}", columns, rows, numbers=False), *reasons)


def _measure(
    ops: Sequence[str],
    wanted: Sequence[str],
    against: Sequence[str] | None,
    index: int,
    rounds: int,
) -> list[Bench]:
    from ktune.bench.tasks import COMPILER
    from ktune.bench.worker import Worker

    spaces = [find_space(name) for name in dict.fromkeys(ops)]
    problems = choose_problems(spaces, wanted)
    worker = Worker(COMPILER)
    try:
        return [_bench(worker, op, problems[op], against, index, rounds) for op in problems]
    finally:
        worker.kill()


def _bench(
    worker: Worker,
    op: str,
    problems: Sequence[Problem],
    against: Sequence[str] | None,
    index: int,
    rounds: int,
) -> Bench:
    from ktune.bench.peers import peer_names
    from ktune.operations import operation
    from ktune.report.bench import bench_row
    from ktune.runtime.dispatch import dispatcher

    bench = _empty_bench(worker, op, index, rounds)
    for number, problem in enumerate(problems, 1):
        note(f"{number}/{len(problems)} {problem.text}")
        match = dispatcher().match(problem, bench.device)
        default = operation(op).default_variant(problem, bench.device)
        peers = peer_names(problem) if against is None else against
        bench.rows.append(bench_row(worker, problem, match, default, peers, rounds, index))
    return bench


def _empty_bench(worker: Worker, op: str, index: int, rounds: int) -> Bench:
    """Describe the device and measure its roofs, in the process that will time everything."""
    from datetime import UTC, datetime

    from ktune import __version__
    from ktune.bench.tasks import DEVICE, ROOFS
    from ktune.bench.timer import PROTOCOL
    from ktune.device import Device
    from ktune.report.bench import VERSIONS, Bench
    from ktune.target.target import versions

    device = Device.from_dict(worker.call(DEVICE, f"cuda:{index}", timeout_s=START_LIMIT_S))
    below = worker.call(VERSIONS, index, timeout_s=START_LIMIT_S)
    roofs = worker.call(ROOFS, f"cuda:{index}", timeout_s=START_LIMIT_S)
    found = {**versions(), **below, "ktune": __version__}
    day = datetime.now(UTC).date().isoformat()
    return Bench(op, device, PROTOCOL, day, rounds, found, roofs)


def _write(benches: Sequence[Bench], output: Path) -> None:
    """Write one JSON file, or JSON, Markdown and a plot of each operation to a folder."""
    from ktune.report.bench import markdown
    from ktune.report.plot import has_matplotlib, plot_bench

    if output.suffix == ".json":
        document = {"schema": 1, "benchmarks": [bench.to_dict() for bench in benches]}
        _write_text(output, _json(benches[0].to_dict() if len(benches) == 1 else document))
        return
    for bench in benches:
        _write_text(output / f"{bench.slug}.json", _json(bench.to_dict()))
        _write_text(output / f"{bench.slug}.md", markdown(bench))
        if has_matplotlib():
            plot_bench(bench, output / f"{bench.slug}.svg")
            note(f"wrote {output / bench.slug}.svg")
    if not has_matplotlib():
        warn("no plot: matplotlib is not installed. Run: pip install 'ktune-kernels[plot]'")


def _json(document: object) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _write_text(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KtuneError(f"cannot write {path}: {error.strerror}") from error
    note(f"wrote {path}")
