"""``ktune explain``: say which variant a problem gets, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktune.cli.console import aligned, emit, note, show
from ktune.cli.options import DEFAULT_ARCH, common, meant, parse_device, parse_settings
from ktune.errors import UsageError

if TYPE_CHECKING:
    from ktune.device import Device
    from ktune.problem import Problem
    from ktune.runtime.explain import Explanation
    from ktune.table import Entry, Nearest


@click.command()
@click.argument("op", metavar="OP")
@click.argument("fields", nargs=-1, metavar="NAME=VALUE...")
@click.option("--device", metavar="cuda:0", help="A GPU of this machine.")
@click.option(
    "--target",
    "--device-key",
    "target",
    metavar="TEXT",
    help="Another device: part of a key in a table (h200), a recording, or an architecture.",
)
@common
def explain(
    op: str, fields: tuple[str, ...], device: str | None, target: str | None, as_json: bool
) -> None:
    """Say which variant a problem gets, where it comes from, and where its module is.

    Asks for this machine's GPU; without one, for every device in the tables.

    Example: ktune explain softmax m=4096 n=50257 dtype=bfloat16
    """
    from ktune.operations import operation
    from ktune.runtime.explain import explain as explain_problem

    problem = operation(op).problem(parse_settings(fields))
    found = [explain_problem(problem, there) for there in choose_devices(device, target)]
    documents = [_document(explanation) for explanation in found]
    if as_json:
        emit("explain", {"problem": problem.text, "devices": documents})
        return
    for explanation, document in zip(found, documents, strict=True):
        show(*_lines(explanation, document), "")


def choose_devices(device: str | None, target: str | None) -> list[Device]:
    """Return the devices to explain for."""
    from ktune.device import compile_target, cuda_available, device_of

    if target is not None:
        return named_devices(target)
    if device is not None or cuda_available():
        return [device_of(parse_device(device or "cuda:0"))]
    known = known_devices()
    if not known:
        note(f"no GPU here and no device in any table: explained for any {DEFAULT_ARCH}")
        return [compile_target(DEFAULT_ARCH)]
    note("no GPU here: explained for every device in the tables")
    return list(known.values())


def known_devices() -> dict[str, Device]:
    """Return the devices of all tables, by key."""
    from ktune.cli.table import read_tables
    from ktune.device import Device

    found = [whole.devices for _, whole in read_tables(())]
    return {key: Device.from_dict(fields) for devices in found for key, fields in devices.items()}


def named_devices(text: str) -> list[Device]:
    """Return the devices that a text means.

    Raises:
        UsageError: there is none.
    """
    from ktune.device import COMPILE_TARGETS
    from ktune.target.recording import read_recording, shipped_recordings

    known, shipped = known_devices(), shipped_recordings()
    if text in COMPILE_TARGETS:
        return [COMPILE_TARGETS[text]]
    if matching := [device for key, device in known.items() if text.lower() in key.lower()]:
        return matching
    if text in shipped:
        return [read_recording(shipped[text][0]).device]
    if Path(text).is_file():
        return [read_recording(Path(text)).device]
    names = [*known, *shipped, *COMPILE_TARGETS]
    raise UsageError(f"no device {text!r}{meant(text, names)}; known: {', '.join(names)}")


def _document(explanation: Explanation) -> dict[str, Any]:
    entry, nearest = explanation.entry, explanation.nearest
    return {
        "device": explanation.device.key,
        "match": explanation.kind,
        "ignored": explanation.ignored,
        "variant": explanation.variant.text,
        "id": explanation.variant.id,
        "table": explanation.table,
        "entry": _entry(entry) if entry else None,
        "nearest": _nearest(nearest) if nearest else None,
        "passed_over": [
            {**_entry(stale.entry), "reason": stale.reason} for stale in explanation.stale
        ],
        "other_versions": explanation.other_versions,
        "module": _module(explanation.problem, explanation),
        "message": None if entry else _advice(explanation),
    }


def _entry(entry: Entry) -> dict[str, Any]:
    return {"device": entry.device_key, "problem": entry.problem.text, **entry.to_dict()}


def _nearest(nearest: Nearest) -> dict[str, Any]:
    differs = {k: {"asked": a, "has": h} for k, (a, h) in nearest.differs.items()}
    return {**_entry(nearest.entry), "differs": differs}


def _module(problem: Problem, explanation: Explanation) -> str:
    """Write the module that would run, and return its path."""
    from ktune.codegen import render
    from ktune.codegen.module import write_module

    return str(write_module(render(explanation.variant, problem)))


def _advice(explanation: Explanation) -> str:
    return explanation.match.message(explanation.device, explanation.problem)


WHY = {
    "exact": "an entry of exactly this problem",
    "region": "an entry whose region of sizes holds the problem",
    "bucket": "an entry of a problem in the same bucket of sizes",
    "nearest": "the entry of the nearest sizes: the same kernel, but tuned for others",
    "default": "no entry: the default variant",
}


def _why(explanation: Explanation) -> str:
    if explanation.kind == "exact" and explanation.ignored:
        return "an entry of this problem but for its batch"
    return WHY[explanation.kind]


def _lines(explanation: Explanation, document: dict[str, Any]) -> list[str]:
    rows = [
        ("problem", explanation.problem.text),
        ("device", explanation.device.key),
        ("match", f"{explanation.kind}: {_why(explanation)}"),
        ("variant", explanation.variant.text),
    ]
    if explanation.ignored:
        rows.append(("ignored", f"{', '.join(explanation.ignored)} (batch-invariant)"))
    if explanation.entry:
        rows += _entry_rows(explanation)
    else:
        rows.append(("why", document["message"]))
    rows += [("passed over", f"{s.entry.problem.text}: {s.reason}") for s in explanation.stale]
    rows.append(("module", document["module"]))
    return aligned(rows)


def _entry_rows(explanation: Explanation) -> list[tuple[str, str]]:
    from ktune.table.region import describe

    entry = explanation.entry
    assert entry is not None
    numbers = entry.provenance
    how = f"replayed from {numbers.replayed_from}" if numbers.replayed_from else "measured here"
    versions = ", ".join(f"{name} {value}" for name, value in sorted(numbers.versions.items()))
    there = "" if entry.problem == explanation.problem else " for the entry's own problem"
    rows = [("entry", entry.problem.text)]
    if explanation.kind == "region":
        rows.append(("covers", describe(entry)))
    rows += [
        ("table", str(explanation.table)),
        ("time", f"{numbers.latency_ms:.4g} ms{there}, {numbers.margin:.1%} less than the default"),
        ("taken", f"{numbers.measured}, {how}, {numbers.protocol}, {versions}"),
    ]
    for name, (measured, here) in explanation.other_versions.items():
        rows.append(("note", f"measured with {name} {measured}; here is {here}"))
    return rows
