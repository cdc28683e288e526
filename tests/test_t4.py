"""T4: a recording survives the way there and back, and other tuners' files mean what they can."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import fields
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from ktune.bench.measurement import STATUSES, Measurement
from ktune.cli import cli
from ktune.device import Device
from ktune.errors import RecordingError
from ktune.operations import parse_problem
from ktune.target import t4
from ktune.target.recording import RecordedProblem, Recording, find_recording, read_recording
from ktune.target.t4 import FOREIGN_PROTOCOL, INVALIDITY, Origin, from_t4, to_t4
from ktune.variant import Variant

H200 = Device("NVIDIA H200", "cuda", "sm_90", 132, 232_448, 60 << 20, 140)
ROWS = parse_problem("softmax m=64 n=1000 dtype=float32")
OTHER = parse_problem("softmax m=32 n=64 dtype=float32")
ORIGIN = Origin((ROWS,), H200, {"template": "one_tile"})

# What the schema of T4 results asks of one of them, as (type, words), and which must be there.
NUMBER = (int, float)
RESULT = {
    "timestamp": str,
    "configuration": dict,
    "objectives": list,
    "times": dict,
    "invalidity": str,
    "correctness": NUMBER,
    "measurements": list,
}
REQUIRED = {"configuration", "times", "invalidity", "correctness"}
WORDS = {"timeout", "compile", "runtime", "correctness", "constraints", "correct"}
TIMES = {
    "compilation_time": NUMBER,
    "runtimes": list,
    "framework": NUMBER,
    "search_algorithm": NUMBER,
    "validation": NUMBER,
}


def assert_follows_the_schema(document):
    assert re.match(r"^[0-9]{1,}.[0-9]{1,}.[0-9]{1,}$", document["schema_version"])
    assert isinstance(document["results"], list)
    for result in document["results"]:
        assert result.keys() >= REQUIRED
        for name, kind in RESULT.items():
            assert name not in result or isinstance(result[name], kind), name
        for name, kind in TIMES.items():
            assert name not in result["times"] or isinstance(result["times"][name], kind), name
        assert result["invalidity"] in WORDS
        for measurement in result["measurements"]:
            assert isinstance(measurement["name"], str)
            assert isinstance(measurement["value"], (*NUMBER, str, list))
            assert not isinstance(measurement["value"], bool)
            assert isinstance(measurement["unit"], str)


def outcome(status):
    if status == "ok":
        return Measurement(
            "ok", 0.012345678901, 0.0001, 50, registers=32, spill_bytes=8, shared_bytes=1024,
            error=1.25e-7, error_limit=1e-6,
        )  # fmt: skip
    error = float("inf") if status == "wrong" else None
    return Measurement(status, error=error, detail=f"{status}: why; nan")


def make_recording(*problems):
    recording = Recording(
        "softmax", H200, "made-up-v1", "2026-01-02", {"torch": "2.11.0", "triton": "3.6.0"},
        {"copy_gb_per_s": 4000.0}, "0123456789ab",
    )  # fmt: skip
    for problem in problems:
        variants = {
            f"one_tile block_m={2**i} eviction=none num_warps=4": outcome(status)
            for i, status in enumerate(STATUSES)
        }
        finals = {next(iter(variants)): [0.01, 0.02], "baseline:torch": [0.5, 0.25]}
        recording.problems[problem.text] = RecordedProblem(variants, finals, {"too big": 7})
    return recording


def through_json(document):
    return json.loads(json.dumps(document, allow_nan=False))


def kernel_tuner_file():
    """Return what Kernel Tuner 1.4 writes (store_output_file): seven runs, failures, one repeat."""

    def result(configuration, word, time=None, runtimes=(), **extra):
        measured = [{"name": "time", "value": time, "unit": "ms"}] if time else []
        if word != "correct":
            measured.append({"name": "__error__", "value": "", "unit": ""})
        return {
            "timestamp": "2026-06-18 09:42:13.123456+00:00",
            "configuration": configuration,
            "times": {
                "compilation": 412.5,
                "benchmark": 31.0 if time else 0,
                "framework": 2.5,
                "search_algorithm": 0.125,
                "validation": 0,
                "runtimes": list(runtimes),
            },
            "invalidity": word,
            "correctness": 1,
            "measurements": [*measured, *extra.get("measurements", [])],
            "objectives": ["time"],
        }

    def tried(block_m, num_warps):
        return {"block_m": block_m, "eviction": "none", "num_warps": num_warps}

    rate = {"name": "GB/s", "value": 1234.5, "unit": ""}
    runtimes = [0.011, 0.0102, 0.0101, 0.01, 0.0103, 0.0101, 0.0102]
    return {
        "results": [
            result(tried(1, 4), "correct", 0.0103, runtimes, measurements=[rate]),
            result(tried(2, 4), "correct", 0.0234),
            result(tried(4, 1), "compile"),
            result(tried(4, 2), "runtime"),
            result(tried(8, 32), "constraints"),
        ],
        "schema_version": "1.0.0",
        "metadata": {"timeunit": "milliseconds"},
    }


class TestOwnDocuments:
    def test_every_status_has_a_word_of_the_schema(self):
        assert set(INVALIDITY) == set(STATUSES)
        assert set(INVALIDITY.values()) == WORDS

    def test_export_follows_the_schema(self):
        assert_follows_the_schema(through_json(to_t4(make_recording(ROWS), ROWS)))

    def test_export_says_what_kernel_tuner_says(self):
        document = to_t4(make_recording(ROWS), ROWS)
        first, second = document["results"][:2]
        assert first["configuration"] == {
            "template": "one_tile", "block_m": 1, "eviction": "none", "num_warps": 4,
        }  # fmt: skip
        assert first["measurements"][0] == {"name": "time", "value": 0.012345678901, "unit": "ms"}
        assert first["times"]["runtimes"] == [0.012345678901]
        assert (first["invalidity"], first["correctness"]) == ("correct", 1)
        assert (second["invalidity"], second["correctness"]) == ("correctness", 0)
        written_there = set(kernel_tuner_file()["results"][0]["times"])
        assert first["times"].keys() >= written_there
        assert document["metadata"]["timeunit"] == "milliseconds"

    def test_round_trip_loses_nothing(self):
        recording = make_recording(ROWS, OTHER)
        documents = {
            problem.text: through_json(to_t4(recording, problem)) for problem in (ROWS, OTHER)
        }
        back = from_t4(documents)
        assert back == recording
        statuses = [m.status for m in back.problems[ROWS.text].outcomes.values()]
        assert statuses == list(STATUSES)

    @pytest.mark.parametrize("op", ["softmax", "attention"])
    def test_round_trip_of_what_is_shipped(self, op):
        recording = find_recording("h200", op)
        problems = [parse_problem(text) for text in recording.problems]
        documents = {p.text: through_json(to_t4(recording, p)) for p in problems}
        assert from_t4(documents) == recording
        assert_follows_the_schema(documents[problems[0].text])

    def test_seconds_by_phase_are_times_of_t4(self):
        timed = outcome("ok").to_dict() | {"compile_s": 1.5, "check_s": 0.25, "time_s": 0.125}
        variant = Variant.parse("softmax", "one_tile block_m=1 eviction=none num_warps=4")
        measurement = SimpleNamespace(status="ok", to_dict=lambda: dict(timed))
        result = t4._result(variant, measurement, "2026-01-02")
        times = result["times"]
        assert (times["compilation"], times["validation"], times["benchmark"]) == (1500, 250, 125)
        assert times["compilation_time"] == 1500
        assert t4._values(result["measurements"]) == timed
        assert {"name": "compile_s", "value": 1.5, "unit": "s"} in result["measurements"]

    def test_new_fields_travel_without_a_change_here(self):
        recording = make_recording(ROWS)
        document = to_t4(recording, ROWS)
        head = document["metadata"]["ktune"]["recording"]
        assert head.keys() == {f.name for f in fields(Recording)} - {"problems"}
        document["results"][0]["measurements"].append(
            {"name": "of_a_later_ktune", "value": 1, "unit": ""}
        )
        head["of_a_later_ktune"] = 1
        assert from_t4({"x": document}) == recording

    def test_documents_must_fit_together(self):
        one, other = make_recording(ROWS), make_recording(OTHER)
        other.protocol = "another"
        with pytest.raises(RecordingError, match=r"a\.json and b\.json .* protocol"):
            from_t4({"a.json": to_t4(one, ROWS), "b.json": to_t4(other, OTHER)})
        with pytest.raises(RecordingError, match=r"b\.json holds softmax m=64"):
            from_t4({"a.json": to_t4(one, ROWS), "b.json": to_t4(one, ROWS)})

    def test_own_documents_need_no_origin(self):
        with pytest.raises(RecordingError, match="leave out --problem"):
            from_t4({"a": to_t4(make_recording(ROWS), ROWS)}, ORIGIN)

    def test_unrecorded_problem(self):
        with pytest.raises(RecordingError, match="does not hold"):
            to_t4(make_recording(ROWS), OTHER)


class TestForeignDocuments:
    def test_fixture_follows_the_schema(self):
        assert_follows_the_schema(kernel_tuner_file())

    def test_import(self):
        recording = from_t4({"tuned.json": kernel_tuner_file()}, ORIGIN)
        assert (recording.op, recording.device, recording.measured) == (
            "softmax", H200, "2026-06-18",
        )  # fmt: skip
        assert recording.protocol == FOREIGN_PROTOCOL
        assert recording.stale
        outcomes = recording.problems[ROWS.text].outcomes
        assert [m.status for m in outcomes.values()] == [
            "ok", "ok", "compile_error", "crashed", "over_limit",
        ]  # fmt: skip
        first = outcomes["one_tile block_m=1 eviction=none num_warps=4"]
        assert (first.latency_ms, first.samples) == (0.0102, 7)
        assert first.spread_ms == pytest.approx(0.0002)
        second = outcomes["one_tile block_m=2 eviction=none num_warps=4"]
        assert (second.latency_ms, second.samples) == (0.0234, 1)

    def test_imported_recording_can_be_written_and_exported_again(self, tmp_path):
        recording = from_t4({"tuned.json": kernel_tuner_file()}, ORIGIN)
        recording.write(tmp_path / "x.json")
        assert read_recording(tmp_path / "x.json").problems.keys() == recording.problems.keys()
        assert from_t4({"again": to_t4(recording, ROWS)}) == recording

    def test_what_does_not_apply_is_left_out_and_a_success_counts(self):
        document = kernel_tuner_file()
        first = document["results"][0]
        again = copy.deepcopy(first)
        first["invalidity"] = "timeout"
        first["configuration"]["block_n"] = 512  # of another template
        again["configuration"]["block_n"] = 1024
        document["results"].append(again)
        outcomes = from_t4({"x": document}, ORIGIN).problems[ROWS.text].outcomes
        assert outcomes["one_tile block_m=1 eviction=none num_warps=4"].ok
        assert len(outcomes) == 5

    def test_units(self):
        document = kernel_tuner_file()
        document["metadata"]["timeunit"] = "microseconds"
        document["results"][1]["measurements"][0] |= {"value": 2.0, "unit": "s"}
        outcomes = list(from_t4({"x": document}, ORIGIN).problems[ROWS.text].outcomes.values())
        assert outcomes[0].latency_ms == pytest.approx(0.0102e-3)
        assert outcomes[1].latency_ms == 2000.0

    def test_a_failed_correctness_is_wrong_and_no_time_is_no_ok(self):
        document = kernel_tuner_file()
        document["results"][0]["correctness"] = 0
        document["results"][1]["measurements"][0]["value"] = 0.0
        statuses = [
            m.status for m in from_t4({"x": document}, ORIGIN).problems[ROWS.text].outcomes.values()
        ]
        assert statuses[:2] == ["wrong", "bad_timing"]

    def test_problem_and_device_must_be_told(self):
        with pytest.raises(RecordingError, match=r"tuned\.json was not written.*--problem"):
            from_t4({"tuned.json": kernel_tuner_file()})
        with pytest.raises(RecordingError, match="one --problem for each, in the order of a, b"):
            from_t4({"a": kernel_tuner_file(), "b": kernel_tuner_file()}, ORIGIN)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda r: r["configuration"].pop("block_m"), "does not say 'block_m'.*--set block_m="),
            (lambda r: r["configuration"].update(blok_m=1), "'blok_m'.*did you mean 'block_m'"),
            (lambda r: r["configuration"].update(block_m=[1]), "no number, word or flag"),
            (lambda r: r.update(invalidity="sad"), "result 1: invalidity 'sad' is none of"),
            (lambda r: r.pop("invalidity"), "damaged.*invalidity"),
            (lambda r: r.pop("times"), "damaged.*times"),
            (lambda r: r.pop("configuration"), "damaged.*configuration"),
            (
                lambda r: (r["times"].pop("runtimes"), r.update(measurements=[])),
                "correct and has no time",
            ),
            (
                lambda r: (
                    r["times"].pop("runtimes"),
                    r.update(measurements=[{"name": "time", "value": 1, "unit": "weeks"}]),
                ),
                "'weeks' is none of ms",
            ),
        ],
    )
    def test_what_is_missing_is_said(self, change, says):
        document = kernel_tuner_file()
        change(document["results"][0])
        with pytest.raises(RecordingError, match=f"(?s)^tuned.json.*{says}"):
            from_t4({"tuned.json": document}, ORIGIN)

    def test_template_can_be_missing(self):
        with pytest.raises(RecordingError, match=r"does not say 'template'.*--set template="):
            from_t4({"x": kernel_tuner_file()}, Origin((ROWS,), H200))

    @pytest.mark.parametrize(
        ("document", "says"),
        [
            ([], "no JSON object"),
            ({}, "no list 'results'"),
            ({"results": {}}, "no list 'results'"),
            ({"device_name": "A100", "cache": {}}, "Kernel Tuner cache file.*store_output_file"),
            ({"schema_version": "1.0.0", "metadata": {}}, "metadata alone"),
            ({"schema_version": "2.0.0", "results": []}, "T4 schema 2.0.0"),
            ({"results": [], "metadata": {"ktune": {"schema": 9}}}, "another ktune"),
            ({"results": [], "metadata": {"ktune": {"schema": 1}}}, "damaged"),
        ],
    )
    def test_other_files(self, document, says):
        with pytest.raises(RecordingError, match=f"x.json.*{says}"):
            from_t4({"x.json": document})

    def test_no_documents(self):
        with pytest.raises(RecordingError, match="at least one"):
            from_t4({})


class TestCommand:
    def run(self, *words):
        return CliRunner().invoke(cli, ["recording", *map(str, words)], catch_exceptions=False)

    @pytest.fixture
    def stored(self, tmp_path):
        path = tmp_path / "softmax.json"
        make_recording(ROWS, OTHER).write(path)
        return path

    def test_there_and_back(self, stored, tmp_path):
        result = self.run("export", stored, tmp_path / "t4")
        assert result.exit_code == 0
        files = sorted((tmp_path / "t4").iterdir())
        assert [f.name for f in files] == [
            "softmax_m=32_n=64_dtype=float32_layout=rows.json",
            "softmax_m=64_n=1000_dtype=float32_layout=rows.json",
        ]
        for name, sources in (("a.json", files), ("b.json", [tmp_path / "t4"])):
            result = self.run("import", *sources, "--output", tmp_path / name)
            assert result.exit_code == 0
            assert (tmp_path / name).read_bytes() == stored.read_bytes()
            assert f"--target {tmp_path / name}" in result.stderr

    def test_one_problem_to_one_file(self, stored, tmp_path):
        out = tmp_path / "one.json"
        result = self.run("export", stored, out, "--problem", "m=64 n=1000 dtype=float32", "--json")
        document = json.loads(result.stdout)
        assert document["files"] == [
            {"path": str(out), "problem": ROWS.text, "results": len(STATUSES)}
        ]
        assert_follows_the_schema(json.loads(out.read_text()))
        named = self.run("export", stored, out, "--problem", ROWS.text, "--op", "softmax")
        assert named.exit_code == 0

    def test_show(self, stored):
        result = self.run("show", stored)
        assert result.exit_code == 0
        assert "made-up-v1" in result.stdout
        assert "one_tile block_m=1" in result.stdout
        assert "templates have changed" in result.stderr
        found = json.loads(self.run("show", stored, "--json").stdout)["recordings"][0]
        assert found["stale"] is True
        assert found["problems"][0]["outcomes"] == dict.fromkeys(STATUSES, 1)
        assert found["problems"][0]["best_ms"] == pytest.approx(0.012346)

    def test_show_shipped(self):
        result = self.run("show", "h200", "--op", "softmax", "--json")
        found = json.loads(result.stdout)["recordings"]
        assert [each["operation"] for each in found] == ["softmax"]
        both = json.loads(self.run("show", "h200", "--json").stdout)["recordings"]
        assert [each["operation"] for each in both] == ["attention", "softmax"]

    def test_import_of_another_tuner(self, tmp_path):
        source, out = tmp_path / "tuned.json", tmp_path / "out.json"
        source.write_text(json.dumps(kernel_tuner_file()))
        words = ("import", source, "-o", out, "--problem", ROWS.text, "--device", "h200")
        result = self.run(*words, "--set", "template=one_tile", "--json")
        assert result.exit_code == 0, result.stderr
        found = json.loads(result.stdout)["recording"]
        assert found["problems"][0]["outcomes"]["ok"] == 2
        replayed = CliRunner().invoke(
            cli, ["search", "softmax", "--target", str(out), "--no-proof", "--json", "-q"]
        )
        winner = json.loads(replayed.stdout)["results"][0]
        assert winner["winner"] == "one_tile block_m=1 eviction=none num_warps=4"

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["show", "nothing"], "no target 'nothing'"),
            (["show", "h200", "--op", "sofmax"], "no recording of sofmax on h200"),
            (["show", "{stored}", "--op", "attention"], "records softmax, not attention"),
            (["export", "{stored}", "x.json"], "2 are chosen for x.json"),
            (["export", "{stored}", "out", "--problem", "m=1 n=8"], "does not hold"),
            (["export", "{stored}", "out", "--problem", "attention m=1"], "is of softmax"),
            (["export", "h200", "out", "--problem", "m=1 n=8"], "attention or softmax; say which"),
            (["import", "{empty}", "-o", "x.json"], "without .json files"),
            (["import", "missing.json", "-o", "x.json"], "cannot read missing.json"),
            (["import", "{text}", "-o", "x.json"], "is not JSON"),
            (["import", "{stored}", "-o", "x.json"], "is not a T4 results document"),
            (["import", "{stored}", "-o", "x.json", "--problem", "m=1"], "both"),
            (
                ["import", "{stored}", "-o", "x", "--problem", "m=1 n=8", "--device", "h200"],
                'Write "softmax',
            ),
            (
                ["import", "{stored}", "-o", "x", "--problem", ROWS.text, "--device", "h10"],
                "no recording (h200, or a FILE) and no GPU",
            ),
        ],
    )
    def test_wrong_use_exits_2(self, words, says, stored, tmp_path):
        (tmp_path / "empty").mkdir()
        (tmp_path / "text").write_text("no JSON")
        names = {"stored": stored, "empty": tmp_path / "empty", "text": tmp_path / "text"}
        result = self.run(*(word.format(**names) for word in words))
        assert result.exit_code == 2, result.output
        assert says in result.stderr
        assert result.stdout == ""
