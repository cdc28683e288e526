"""Time winners beside the default variant and peers, and keep it as one JSON document.

Everything of a problem is timed in turn in one process, so that ratios come from one run. The
document re-renders to the same Markdown table and plot anywhere.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ktune.bench.check import Case, compare, make_case
from ktune.bench.peers import make_peer, output_of
from ktune.bench.tasks import leave_if_sticky
from ktune.bench.timer import Timer, Timing
from ktune.bench.worker import Worker, WorkerError
from ktune.codegen import load_module, render
from ktune.codegen.compile import first_line
from ktune.device import Device, device_of
from ktune.errors import UsageError
from ktune.operations import operation, parse_problem
from ktune.problem import Problem, short_hash
from ktune.table.match import Match
from ktune.variant import Variant

SCHEMA = 1
KIND = "ktune-bench"
BENCH = "ktune.report.bench:bench_problem"
VERSIONS = "ktune.report.bench:driver_versions"
BENCH_LIMIT_S = 600.0
OWN, DEFAULT = "ktune", "default"
NONE = "\N{EN DASH}"


@dataclass(frozen=True, slots=True)
class Contender:
    """What was seen of one kernel on one problem.

    Attributes:
        latency_ms: median of the samples; None if it was not timed.
        spread_ms: interquartile range.
        samples: rounds.
        error: largest error against float64; None if not known or not finite.
        limit: the error that ktune's own kernels may have.
        reason: why there is no time, or how it disagrees; empty if all is well.
    """

    latency_ms: float | None = None
    spread_ms: float | None = None
    samples: int = 0
    error: float | None = None
    limit: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One problem: the variant that dispatch chooses, and all contenders.

    Attributes:
        problem: text of the problem.
        match: ``exact``, ``bucket`` or ``default``: how dispatch found the variant.
        variant: text of it.
        default: text of the default variant.
        contenders: by name: ``ktune``, ``default``, then the peers.
    """

    problem: str
    match: str
    variant: str
    default: str
    contenders: dict[str, Contender]

    def latency(self, name: str) -> float | None:
        """Return a contender's median in ms."""
        return self.contenders[name].latency_ms if name in self.contenders else None

    def ratio(self, name: str) -> float | None:
        """Return how many times faster than a contender ktune is."""
        own, other = self.latency(OWN), self.latency(name)
        return other / own if own and other else None


@dataclass(slots=True)
class Bench:
    """The results of one operation on one device, with provenance."""

    op: str
    device: Device
    protocol: str
    measured: str
    rounds: int
    versions: dict[str, str]
    roofs: dict[str, float]
    rows: list[Row] = field(default_factory=list)

    @property
    def peers(self) -> list[str]:
        """Names of the peers of any problem."""
        names = dict.fromkeys(name for row in self.rows for name in row.contenders)
        return [name for name in names if name not in {OWN, DEFAULT}]

    @property
    def slug(self) -> str:
        """File stem: operation and device."""
        device = re.sub(r"[^a-z0-9]+", "-", self.device.name.lower()).strip("-")
        return f"{self.op}.{device or short_hash(self.device.name)}"

    @property
    def provenance(self) -> str:
        """One line that says how the numbers were taken."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.device.name}, {self.measured}; {versions}; protocol {self.protocol}, "
            f"median of {self.rounds} interleaved rounds; roofs of the same run: "
            f"copy {self.roofs['copy_gb_per_s']:.0f} GB/s, "
            f"bf16 matmul {self.roofs['matmul_tflop_per_s']:.0f} TFLOP/s"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the document."""
        rows = {
            row.problem: {
                "match": row.match,
                "variant": row.variant,
                "default": row.default,
                "contenders": {name: _kept(c) for name, c in row.contenders.items()},
            }
            for row in self.rows
        }
        head = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[:-1]}
        head["device"] = self.device.to_dict()
        return {"schema": SCHEMA, "kind": KIND, **head, "problems": rows}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Bench:
        """Build results from ``to_dict``'s document.

        Raises:
            UsageError: the document is something else.
        """
        try:
            if values["kind"] != KIND or values["schema"] != SCHEMA:
                raise UsageError(f"not a {KIND} document of schema {SCHEMA}")
            head = {f.name: values[f.name] for f in dataclasses.fields(cls)[:-1]}
            head["device"] = Device.from_dict(values["device"])
            rows = [_row(text, seen) for text, seen in values["problems"].items()]
            return cls(**head, rows=rows)
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"a damaged {KIND} document: {error!r}") from error


def _kept(contender: Contender) -> dict[str, Any]:
    return {key: value for key, value in asdict(contender).items() if value not in (None, "", 0)}


def _row(text: str, seen: dict[str, Any]) -> Row:
    contenders = {name: Contender(**values) for name, values in seen["contenders"].items()}
    problem = parse_problem(text).text
    return Row(problem, seen["match"], seen["variant"], seen["default"], contenders)


def read_benches(path: Path) -> list[Bench]:
    """Read stored results: one operation's document, or what ``ktune bench --json`` printed.

    Raises:
        UsageError: the file cannot be read or is something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} is not a {KIND} document")
    try:
        return [Bench.from_dict(each) for each in values.get("benchmarks", [values])]
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def bound_by(bench: Bench, problem: Problem) -> str:
    """Return ``compute`` or ``memory``: which of the device's roofs a problem meets first."""
    by_memory, by_compute = _least_ms(bench, problem)
    return "compute" if by_compute > by_memory else "memory"


def rate(bench: Bench, problem: Problem, latency_ms: float) -> tuple[float, str]:
    """Return the rate of useful work and its unit: GB/s, or TFLOP/s if bound by compute."""
    op = operation(problem.op)
    if bound_by(bench, problem) == "compute":
        return op.flops(problem) / latency_ms / 1e9, "TFLOP/s"
    return op.least_bytes(problem) / latency_ms / 1e6, "GB/s"


def roof_share(bench: Bench, problem: Problem, latency_ms: float) -> float:
    """Return the least time that the measured roofs allow, as a share of a time."""
    return max(_least_ms(bench, problem)) / latency_ms


def _least_ms(bench: Bench, problem: Problem) -> tuple[float, float]:
    op = operation(problem.op)
    return (
        op.least_bytes(problem) / bench.roofs["copy_gb_per_s"] / 1e6,
        op.flops(problem) / bench.roofs["matmul_tflop_per_s"] / 1e9,
    )


def table_of(bench: Bench) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the table that a person reads."""
    names = [DEFAULT, *bench.peers]
    columns = ["problem", "found", "ktune ms", "ktune", "of roof", *names]
    return columns, [_cells(bench, row, names) for row in bench.rows]


def _cells(bench: Bench, row: Row, names: Sequence[str]) -> list[str]:
    problem, own = parse_problem(row.problem), row.latency(OWN)
    cells = [short_fields(problem), row.match]
    if own is None:
        cells += [NONE, NONE, NONE]
    else:
        share = roof_share(bench, problem, own)
        cells += [f"{own:.4g}", _rate_text(bench, problem, own), f"{share:.0%}"]
    return cells + [_peer_cell(bench, row, problem, name) for name in names]


def _peer_cell(bench: Bench, row: Row, problem: Problem, name: str) -> str:
    latency, ratio = row.latency(name), row.ratio(name)
    if latency is None:
        return NONE
    text = _rate_text(bench, problem, latency).split()[0]
    return f"{text} ({ratio:.2f}x)" if ratio is not None else text


def _rate_text(bench: Bench, problem: Problem, latency_ms: float) -> str:
    value, unit = rate(bench, problem, latency_ms)
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.3g} {unit}"


def short_fields(problem: Problem) -> str:
    """Return the fields that are not at their defaults, as words."""
    usual = {f.name: f.default for f in operation(problem.op).fields}
    kept = [(name, value) for name, value in problem if value != usual[name]]
    return Problem(problem.op, tuple(kept)).fields_text


def markdown(bench: Bench) -> str:
    """Return the results as a Markdown document."""
    columns, rows = table_of(bench)
    lines = [" | ".join(cells) for cells in (columns, ["---"] * len(columns), *rows)]
    body = "\n".join(f"| {line} |" for line in lines)
    failures = [
        f"- {name} on {short_fields(parse_problem(row.problem))}: {contender.reason}"
        for row in bench.rows
        for name, contender in row.contenders.items()
        if contender.reason
    ]
    notes = "\n".join(["", *failures, ""]) if failures else ""
    return (
        f"# {bench.op}, {bench.device.name}\n\n{bench.provenance}.\n\n"
        "`found` says how the table found ktune's variant. Rates count useful work: inputs and "
        "outputs once, or the matrix products' operations (half of them under a causal mask). "
        "In brackets: how many times faster ktune is.\n\n"
        f"{body}\n{notes}"
    )


def bench_row(
    worker: Worker, problem: Problem, match: Match, default: Variant, peers: Sequence[str],
    rounds: int, index: int,
) -> Row:  # fmt: skip
    """Time a problem's contenders in the worker; a failing worker costs this row only."""
    own = {OWN: match.variant.text, DEFAULT: default.text}
    arguments = (problem.text, own, list(peers), rounds, index)
    try:
        seen = worker.call(BENCH, *arguments, timeout_s=BENCH_LIMIT_S)
    except WorkerError as error:
        seen = {name: {"reason": str(error)} for name in [*own, *peers]}
    contenders = {name: Contender(**values) for name, values in seen.items()}
    return Row(problem.text, match.kind, match.variant.text, default.text, contenders)


def bench_problem(
    problem: str, variants: dict[str, str], peers: list[str], rounds: int, index: int
) -> dict[str, dict[str, Any]]:
    """Check, then time variants and peers in turn on one GPU; outcomes by name.

    A variant that is wrong is not timed. A peer that disagrees is, and its outcome says so.
    """
    torch.cuda.set_device(index)
    asked = parse_problem(problem)
    case = make_case(asked, operation(asked.op).distributions[0], torch.device("cuda", index))
    makers: dict[str, Callable[[], Callable[[], object]]] = {}
    for name, text in variants.items():
        makers[name] = lambda text=text: _launch(case, Variant.parse(asked.op, text))  # type: ignore[misc]
    for name in peers:
        makers[name] = lambda name=name: make_peer(name, asked, case.inputs)  # type: ignore[misc]
    seen, launches = {}, {}
    for name, make in makers.items():
        seen[name], launch = _ready(case, make)
        if launch is not None and (name in peers or not seen[name].get("reason")):
            launches[name] = launch
    timings = _timer(index).interleave(list(launches.values()), rounds)
    for name, timing in zip(launches, timings, strict=True):
        seen[name] |= _times(timing)
    return seen


def _times(timing: Timing) -> dict[str, Any]:
    return {
        "latency_ms": round(timing.latency_ms, 6),
        "spread_ms": round(timing.spread_ms, 6),
        "samples": len(timing.samples),
    }


def _ready(
    case: Case, make: Callable[[], Callable[[], object]]
) -> tuple[dict[str, Any], Callable[[], object] | None]:
    """Make a call, run it once and compare its output; return the outcome and the call."""
    try:
        launch = make()
        out = output_of(launch())
        torch.cuda.synchronize()
        return _agreement(case, out), launch
    except Exception as error:
        leave_if_sticky(torch.cuda.current_device())
        return {"reason": first_line(error)}, None


def _agreement(case: Case, out: torch.Tensor | None) -> dict[str, Any]:
    if out is None:
        return {"reason": "its output is not known, so not compared"}
    only = dataclasses.replace(case, expected={"out": case.expected["out"]})
    verdict = compare(only, {"out": out})
    error = verdict.error if math.isfinite(verdict.error) else None
    return {"error": error, "limit": verdict.limit, "reason": verdict.detail}


def _launch(case: Case, variant: Variant) -> Callable[[], object]:
    op = operation(case.problem.op)
    outputs = op.make_outputs(case.problem, case.inputs)
    for value in outputs.values():
        value.fill_(math.nan)
    arguments = op.arguments(case.problem, case.inputs, outputs)
    module, options = load_module(render(variant, case.problem)), variant.options

    def call() -> object:
        module.launch(*arguments, **options)
        return outputs

    return call


@cache
def _timer(index: int) -> Timer:
    return Timer(device_of(index), index)


def driver_versions(index: int) -> dict[str, str]:
    """Return the versions of what lies below PyTorch and Triton: CUDA, driver, ptxas."""
    found = {"cuda": str(torch.version.cuda or torch.version.hip)}
    command = ["nvidia-smi", f"--id={index}", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        found["driver"] = done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        found["driver"] = "unknown"
    try:
        from triton import knobs

        found["ptxas"] = str(knobs.nvidia.ptxas.version)
    except (ImportError, AttributeError, RuntimeError):
        found["ptxas"] = "unknown"
    return found
