"""T4, the results format that Kernel Tuner writes: from a recording and back.

A T4 document holds the configurations of one problem, so a recording becomes one document a
problem. What T4 has no place for stands in its ``metadata`` under ``ktune`` and as further
``measurements``: ktune -> T4 -> ktune loses nothing. A document of another tuner has times and
outcomes; problem, device and protocol it does not say, so the reader is told (``Origin``).

The schema, https://github.com/odgaard/TuningSchema (T4), wants ``configuration``, ``times``,
``invalidity`` and ``correctness`` in each result. Kernel Tuner writes ``times.compilation`` where
the schema says ``compilation_time``, and readers of T4 want all its times; both names are written.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ktune.bench.measurement import Measurement
from ktune.device import Device
from ktune.errors import KtuneError, RecordingError
from ktune.operations import parse_problem
from ktune.problem import Problem, Scalar, format_fields
from ktune.space import Space, load_space
from ktune.space.checks import pick
from ktune.space.expressions import did_you_mean
from ktune.space.walk import Walk
from ktune.target.recording import RecordedProblem, Recording
from ktune.variant import Variant

SCHEMA_VERSION = "1.0.0"
OWN, OWN_SCHEMA = "ktune", 1
FOREIGN_PROTOCOL = "t4-of-another-tuner"
"""Protocol of imported times that ktune did not take: comparable to no others."""

TIME = "time"
INVALIDITY = {
    "ok": "correct",
    "wrong": "correctness",
    "compile_error": "compile",
    "over_limit": "constraints",
    "crashed": "runtime",
    "timeout": "timeout",
    "bad_timing": "runtime",
}
"""T4's word for each status; the exact status is a measurement of its own."""

STATUS = {word: status for status, word in INVALIDITY.items() if status != "bad_timing"}
TIME_UNITS_MS = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds", ""), 1.0),
    **dict.fromkeys(("s", "second", "seconds"), 1e3),
    **dict.fromkeys(("us", "microsecond", "microseconds"), 1e-3),
    **dict.fromkeys(("ns", "nanosecond", "nanoseconds"), 1e-6),
}
PHASES = {"compile_s": "compilation", "check_s": "validation", "time_s": "benchmark"}
"""Seconds of a measurement, where it has them, and T4's name for them."""

PLAIN_TIMES = ("compilation", "benchmark", "framework", "search_algorithm", "validation")
NOT_FINITE = ("inf", "-inf", "nan")


@dataclass(frozen=True, slots=True)
class Origin:
    """What documents of other tuners do not say.

    Attributes:
        problems: of each such document, in order.
        device: that the times were taken on.
        settings: parameters that all configurations share, for example the template.
        space: that the configurations are of; by default the operation's shipped one.
    """

    problems: tuple[Problem, ...]
    device: Device
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    space: Space | None = None


def to_t4(recording: Recording, problem: Problem) -> dict[str, Any]:
    """Return what was seen on a problem as a T4 document.

    A time that is not known is 0 in ``times``, as Kernel Tuner writes it.

    Raises:
        RecordingError: the problem was not recorded.
    """
    seen = recording.problem(problem)
    head = {f.name: getattr(recording, f.name) for f in fields(Recording) if f.name != "problems"}
    rest = {f.name: getattr(seen, f.name) for f in fields(RecordedProblem) if f.name != "outcomes"}
    own = {
        "schema": OWN_SCHEMA,
        "recording": {**head, "device": recording.device.to_dict()},
        "problem": problem.text,
        **rest,
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "metadata": {
            "timeunit": "milliseconds",
            "environment": {
                "requirements": [f"{name}=={value}" for name, value in recording.versions.items()]
            },
            OWN: own,
        },
        "results": [
            _result(Variant.parse(recording.op, text), outcome, recording.measured)
            for text, outcome in seen.outcomes.items()
        ],
    }


def _result(variant: Variant, outcome: Measurement, measured: str) -> dict[str, Any]:
    values = outcome.to_dict()
    latency = values.pop("latency_ms", None)
    times: dict[str, Any] = dict.fromkeys(PLAIN_TIMES, 0.0)
    for name, phase in PHASES.items():
        times[phase] = 1e3 * values.get(name, 0.0)
    times["compilation_time"] = times["compilation"]
    times["runtimes"] = [] if latency is None else [latency]
    measurements = [] if latency is None else [_measured(TIME, latency, "ms")]
    measurements += [_measured(name, value, _unit(name)) for name, value in values.items()]
    return {
        "timestamp": measured,
        "configuration": variant.values,
        "objectives": [TIME],
        "times": times,
        "invalidity": INVALIDITY[outcome.status],
        "correctness": int(outcome.status in {"ok", "bad_timing"}),
        "measurements": measurements,
    }


def _measured(name: str, value: Any, unit: str) -> dict[str, Any]:
    if isinstance(value, float) and not math.isfinite(value):
        value = str(value)  # JSON has no such numbers
    return {"name": name, "value": value, "unit": unit}


def _unit(name: str) -> str:
    suffix = name.rpartition("_")[2]
    return suffix if suffix in {"ms", "s", "bytes"} else ""


def from_t4(documents: Mapping[str, Any], origin: Origin | None = None) -> Recording:
    """Return the recording that T4 documents hold together.

    Args:
        documents: by the name that messages use, for example the path.
        origin: what documents of other tuners do not say.

    Raises:
        RecordingError: a document is no T4 results document, does not say enough, or does not
            fit together with the others.
    """
    if not documents:
        raise RecordingError("no T4 documents: name at least one")
    asked = list(origin.problems) if origin else []
    foreign = [name for name, document in documents.items() if _is_foreign(name, document)]
    if foreign and len(asked) != len(foreign):
        raise RecordingError(_unsaid(foreign, len(asked)))
    if asked and not foreign:
        raise RecordingError("these documents say their problems; leave out --problem")
    parts = []
    for name, document in documents.items():
        try:
            if name in foreign:
                assert origin is not None
                parts.append((name, _read_foreign(name, document, asked.pop(0), origin)))
            else:
                parts.append((name, _read_own(document)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RecordingError(f"{name} is a damaged T4 document: {error!r}") from error
        except KtuneError as error:
            raise RecordingError(f"{name}: {error}") from error
    return _joined(parts)


def _unsaid(foreign: Sequence[str], told: int) -> str:
    if told:
        return (
            f"{len(foreign)} documents were not written by ktune and {told} problems are named; "
            f"give one --problem for each, in the order of {', '.join(foreign)}"
        )
    return (
        f"{foreign[0]} was not written by ktune: T4 does not say which problem and device its "
        'times are of. Say it: --problem "softmax m=4096 n=4096" --device h200, and, with '
        "--set template=..., what all configurations share"
    )


def _is_foreign(name: str, document: Any) -> bool:
    """Return whether another tuner wrote the document.

    Raises:
        RecordingError: it is no T4 results document.
    """
    what = f"{name} is not a T4 results document"
    if not isinstance(document, dict):
        raise RecordingError(f"{what}: it is no JSON object")
    if not isinstance(document.get("results"), list):
        if "cache" in document:
            raise RecordingError(
                f"{what} but a Kernel Tuner cache file; write its results with "
                "kernel_tuner.file_utils.store_output_file"
            )
        if "metadata" in document:
            raise RecordingError(f"{what} but T4 metadata alone; name the file with the results")
        raise RecordingError(f"{what}: it has no list 'results'")
    version = str(document.get("schema_version", SCHEMA_VERSION))
    if version.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
        raise RecordingError(f"{name} is of T4 schema {version}; ktune reads {SCHEMA_VERSION}")
    own = _metadata(document).get(OWN)
    if isinstance(own, dict) and own.get("schema") != OWN_SCHEMA:
        raise RecordingError(f"{name} was written by another ktune (schema {own.get('schema')!r})")
    return not isinstance(own, dict)


def _metadata(document: Mapping[str, Any]) -> dict[str, Any]:
    found = document.get("metadata")
    return found if isinstance(found, dict) else {}


def _read_own(document: Mapping[str, Any]) -> Recording:
    own = document["metadata"][OWN]
    head, problem = own["recording"], parse_problem(own["problem"])
    outcomes = {
        Variant.of(problem.op, result["configuration"]).text: Measurement.from_dict(
            _values(result["measurements"])
        )
        for result in document["results"]
    }
    rest = {f.name: own[f.name] for f in fields(RecordedProblem) if f.name in own}
    known = {f.name: head[f.name] for f in fields(Recording) if f.name in head}
    seen = {problem.text: RecordedProblem(outcomes=outcomes, **rest)}
    return Recording(**{**known, "device": Device.from_dict(head["device"]), "problems": seen})


def _values(measurements: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of a measurement from those of a T4 result that ktune wrote."""
    values = {each["name"]: each["value"] for each in measurements}
    if TIME in values:
        values["latency_ms"] = values.pop(TIME)
    text = {"status", "detail"}
    return {
        name: float(value) if value in NOT_FINITE and name not in text else value
        for name, value in values.items()
    }


def _read_foreign(
    name: str, document: Mapping[str, Any], problem: Problem, origin: Origin
) -> Recording:
    space = origin.space or load_space(problem.op)
    metadata = _metadata(document)
    outcomes: dict[str, Measurement] = {}
    for number, result in enumerate(document["results"], 1):
        where = f"result {number}"
        variant = _variant(where, result["configuration"], problem, origin, space)
        outcome = _outcome(where, result, metadata)
        before = outcomes.get(variant.text)
        if before is None or (outcome.ok and not before.ok):
            outcomes[variant.text] = outcome
    stamps = sorted(str(result.get("timestamp", ""))[:10] for result in document["results"])
    return Recording(
        op=problem.op,
        device=origin.device,
        protocol=FOREIGN_PROTOCOL,
        measured=stamps[-1] if stamps and stamps[-1] else "unknown day",
        versions=_versions(metadata),
        roofs={},
        templates="unknown",
        problems={problem.text: RecordedProblem(outcomes)},
    )


def _variant(
    where: str, configuration: Mapping[str, Any], problem: Problem, origin: Origin, space: Space
) -> Variant:
    """Return the variant that a configuration means; what does not apply is left out.

    Raises:
        RecordingError: a parameter is unknown, or one that applies is missing.
    """
    given = {**origin.settings, **configuration}
    known = [parameter.name for parameter in space.parameters]
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise RecordingError(
                f"{where} has {name!r}, which is no parameter of {space.op}{hint}; "
                f"it has {', '.join(known)}"
            )
    names = space.names(problem, origin.device)
    walk = Walk(space.parameters, (), names)
    values: dict[str, Scalar] = {}
    for parameter in space.parameters:
        if not walk.applies(parameter, names):
            continue
        if parameter.name not in given:
            raise RecordingError(
                f"{where} ({format_fields(given)}) does not say {parameter.name!r}; if all "
                f"configurations share it: --set {parameter.name}=..."
            )
        value = given[parameter.name]
        if not isinstance(value, Scalar):
            raise RecordingError(f"{where}: {parameter.name}={value!r} is no number, word or flag")
        choice = pick(parameter.choices, value)
        names[parameter.name] = values[parameter.name] = value if choice is None else choice
    return Variant.of(space.op, values)


def _outcome(where: str, result: Mapping[str, Any], metadata: Mapping[str, Any]) -> Measurement:
    word = result["invalidity"]
    if word not in STATUS:
        raise RecordingError(f"{where}: invalidity {word!r} is none of {', '.join(STATUS)}")
    status = STATUS[word]
    if status == "ok" and not result["correctness"]:
        status = "wrong"
    taken = {each["name"]: each for each in result.get("measurements", [])}
    factor = _factor(where, metadata.get("timeunit", ""))
    times = result["times"]
    compilation = times.get("compilation", times.get("compilation_time"))
    phases = {**times, "compilation": compilation}
    values: dict[str, Any] = {
        name: phases[phase] * factor / 1e3 for name, phase in PHASES.items() if phases.get(phase)
    }
    values["status"] = status
    if status != "ok":
        detail = taken.get("__error__", {}).get("value") or f"{word}, says the T4 document"
        return Measurement.from_dict({**values, "detail": str(detail)})
    runtimes = [float(each) * factor for each in times.get("runtimes", [])]
    if runtimes:
        values["latency_ms"] = statistics.median(runtimes)
        values["samples"] = len(runtimes)
        if len(runtimes) > 1:
            low, _, high = statistics.quantiles(runtimes, n=4)
            values["spread_ms"] = high - low
    elif TIME in taken:
        unit = _factor(where, taken[TIME].get("unit") or metadata.get("timeunit", ""))
        values |= {"latency_ms": float(taken[TIME]["value"]) * unit, "samples": 1}
    else:
        raise RecordingError(
            f"{where} is correct and has no time: neither times.runtimes nor a measurement "
            f"{TIME!r}. Tune for the objective {TIME!r}, and write the file again"
        )
    return Measurement.from_dict(values)


def _factor(where: str, unit: Any) -> float:
    if unit not in TIME_UNITS_MS:
        known = ", ".join(filter(None, TIME_UNITS_MS))
        raise RecordingError(f"{where}: the time unit {unit!r} is none of {known}")
    return TIME_UNITS_MS[unit]


def _versions(metadata: Mapping[str, Any]) -> dict[str, str]:
    environment = metadata.get("environment")
    lines = environment.get("requirements", []) if isinstance(environment, dict) else []
    pairs = [str(line).partition("==") for line in lines]
    return {name: version for name, _, version in pairs if version}


def _joined(parts: Sequence[tuple[str, Recording]]) -> Recording:
    """Return one recording of several; all must be of one operation, device and protocol."""
    first_name, whole = parts[0]
    for name, part in parts[1:]:
        for each in fields(Recording):
            one, other = getattr(whole, each.name), getattr(part, each.name)
            if each.name not in {"problems", "measured"} and one != other:
                raise RecordingError(
                    f"{first_name} and {name} are not of one recording: {each.name} is {one!r} "
                    f"and {other!r}; import them to files of their own"
                )
        if twice := part.problems.keys() & whole.problems.keys():
            raise RecordingError(f"{name} holds {', '.join(twice)}, and so does an earlier file")
        whole.problems |= part.problems
        whole.measured = max(whole.measured, part.measured)
    return whole
