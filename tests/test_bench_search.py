"""``ktune bench search``: both sides, with fakes for their processes, and real on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from ktune.bench.autotune import TUNE, Tuning
from ktune.bench.tasks import DEVICE, FINALS, MEASURE
from ktune.bench.worker import WorkerDied
from ktune.cli import bench_search, cli
from ktune.cli.bench_search import run_ktune_search
from ktune.device import Device
from ktune.errors import KtuneError
from ktune.operations import parse_problem
from ktune.report.bench import VERSIONS
from ktune.report.search_race import Race, RaceRow, finalists, notes, problems_table, sides_table
from ktune.space import load_space

H200 = Device("NVIDIA H200", "cuda", "sm_90", 132, 232_448, 60 << 20, 140)
ROWS = parse_problem("softmax m=64 n=128 dtype=float32")
OTHER = parse_problem("softmax m=32 n=64 dtype=float32")
SPACE = load_space("softmax")


def variants(problem):
    return [variant.text for variant in SPACE.variants(problem, H200)]


def make_row(**changes):
    tuning = Tuning(
        ROWS.text, 5, 2, {"a": 1.0, "b": 1.1, "c": 2.0}, {"d": "RuntimeError: odd"}, ["d"], ["e"],
        {"compile": 2.0, "benchmark": 1.0},
    )  # fmt: skip
    finals = {"b": [1.1, 1.0, 1.2], "a": [1.2, 1.21, 1.19], "c": [2.0] * 3}
    values = {"picks": {"ktune": "b", "triton": "a"}, "finals": finals, "tuning": tuning}
    return RaceRow(**(values | changes))


def make_race(*rows, **changes):
    values = {
        "op": "softmax", "device": H200, "protocol": "made-up-v1", "measured": "2026-01-02",
        "versions": {"triton": "3.6.0"}, "rounds": 3, "options": [], "limit_s": 60.0,
        "seconds": {"ktune": 10.0, "triton": 25.0},
        "breakdown": {"ktune": {}, "triton": {"compile": 20.0, "benchmark": 5.0}},
        "rows": list(rows),
    }  # fmt: skip
    return Race(**(values | changes))


class TestReport:
    def test_losses_are_against_the_best_of_the_finals(self):
        row = make_row()
        assert row.best == "b"
        assert row.loss("ktune") == 0
        assert row.loss("triton") == pytest.approx(1.2 / 1.1 - 1)
        assert make_row(picks={"ktune": "b"}).loss("triton") is None
        assert make_row(finals={}).loss("ktune") is None

    def test_finalists_stand_once(self):
        row = make_row()
        assert finalists(row.picks, row.tuning, ["c", "z"], 2) == ["b", "a", "c", "z"]

    def test_what_was_not_reached_is_said_and_nothing_extrapolated(self):
        race = make_race(make_row())
        text = "\n".join(notes(race))
        assert "did NOT finish: 1 of 5 variants were not reached (its limit: 60 s)" in text
        assert "times the wall time" not in text
        assert race.to_dict()["unreached"] == 1

    def test_a_finished_race_has_a_ratio(self):
        row = make_row()
        row.tuning.unreached.clear()
        assert "took 2.50 times the wall time of ktune's" in "\n".join(notes(make_race(row)))

    def test_failures_are_said(self):
        unfit = {"a": "wrong: out: error 1 over 0.1"}
        rows = [make_row(unfit=unfit, finals={"b": [1.0]}), make_row(reason="out of time")]
        rows[1].tuning.stopped = "illegal address"
        text = "\n".join(notes(make_race(*rows)))
        assert "would have ended on 1 variants, as d: RuntimeError: odd" in text
        assert "triton's pick is UNFIT (wrong: out: error 1 over 0.1): a" in text
        assert "no finals: out of time" in text
        assert "stopped: illegal address" in text
        assert not make_race(*rows).complete

    def test_tables(self):
        race = make_race(make_row(), make_row(picks={"triton": "a"}))
        columns, rows = problems_table(race)
        assert {len(row) for row in rows} == {len(columns)}
        first, second = (dict(zip(columns, row, strict=True)) for row in rows)
        assert (first["ktune loses"], first["triton loses"]) == ("0.0%", "9.1%")
        assert (first["timed"], first["failed"], first["not reached"]) == ("3", "1", "1")
        assert (first["picks"], second["picks"]) == ("differ", "none by ktune")
        columns, rows = sides_table(race)
        own, other = (dict(zip(columns, row, strict=True)) for row in rows)
        assert (own["picks"], other["picks"]) == ("1 of 2", "2 of 2")
        assert other["seconds by phase"] == "compile 20.0, benchmark 5.0"

    def test_document_is_json(self):
        document = json.loads(json.dumps(make_race(make_row()).to_dict(), allow_nan=False))
        problem = document["problems"][0]
        assert problem["finals"]["b"]["latency_ms"] == 1.1
        assert problem["triton"]["failed"] == {"d": "RuntimeError: odd"}


class Search:
    """Stands in for ``subprocess.run`` of ``ktune search``."""

    def __init__(self, winners, code=0, stdout=None, **more):
        results = [{"problem": problem, "winner": text} for problem, text in winners.items()]
        self.stdout = json.dumps({"results": results, **more}) if stdout is None else stdout
        self.code = code

    def __call__(self, command, env, **options):
        self.command, self.environment, self.options = command, env, options
        return SimpleNamespace(returncode=self.code, stdout=self.stdout)


class TestOwnSide:
    def run(self, monkeypatch, search, **options):
        monkeypatch.setattr(bench_search.subprocess, "run", search)
        return run_ktune_search("softmax", [ROWS.text, OTHER.text], **options)

    def test_picks_seconds_and_phases(self, monkeypatch):
        search = Search({ROWS.text: "a", OTHER.text: None}, breakdown={"compile": 2, "note": "x"})
        picks, seconds, phases = self.run(
            monkeypatch, search, where="cuda:1", options=["--effort", "quick"]
        )
        assert picks == {ROWS.text: "a"}
        assert seconds >= 0
        assert phases == {"compile": 2.0}
        assert search.command[1:] == [
            "-m", "ktune.cli", "search", "softmax", "--device", "cuda:1", "--json",
            "--problem", ROWS.text, "--problem", OTHER.text, "--effort", "quick",
        ]  # fmt: skip

    def test_everything_is_cold_and_the_user_s_own_untouched(self, monkeypatch):
        search = Search({})
        self.run(monkeypatch, search)
        names = ["KTUNE_CACHE_DIR", "KTUNE_TABLE_PATH", "TRITON_CACHE_DIR", "KTUNE_STORAGE"]
        folder = os.path.dirname(search.environment["KTUNE_TABLE_PATH"])  # noqa: PTH120
        for name in names:
            assert folder in search.environment[name]
            assert search.environment[name] != os.environ.get(name)
        assert not os.path.exists(folder)  # noqa: PTH110

    def test_problems_without_a_winner_are_no_error(self, monkeypatch):
        assert self.run(monkeypatch, Search({ROWS.text: "a"}, code=1))[0] == {ROWS.text: "a"}

    @pytest.mark.parametrize(
        ("search", "says"),
        [
            (Search({}, code=2), "exit code 2; its messages are above"),
            (Search({}, stdout="no JSON"), "printed no document"),
            (Search({}, stdout="{}"), "printed no document"),
        ],
    )
    def test_a_search_that_failed(self, monkeypatch, search, says):
        with pytest.raises(KtuneError, match=says):
            self.run(monkeypatch, search)

    def test_the_real_command_s_document_is_understood(self, monkeypatch, tmp_path):
        text = "softmax m=32768 n=1024 dtype=bfloat16 layout=rows"
        real = subprocess.run

        def replay(command, **options):
            at = command.index("--device")
            del command[at : at + 2]
            return real([*command, "--target", "h200", "--no-proof", "--trials", "3"], **options)

        monkeypatch.setattr(bench_search.subprocess, "run", replay)
        picks, seconds, _ = run_ktune_search("softmax", [text])
        assert picks.keys() == {text}
        assert picks[text].startswith("one_tile ")
        assert seconds > 0.1

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_without_a_gpu_the_real_command_fails(self):
        with pytest.raises(KtuneError, match="exit code 3"):
            run_ktune_search("softmax", [ROWS.text])


class FakeWorker:
    """Answers for the GPU's processes: every variant takes as many ms as its place says."""

    died: tuple = ()

    def __init__(self, environment):
        assert environment["TRITON_INTERPRET"] == "0"

    def call(self, function, *arguments, timeout_s):
        if function in self.died:
            raise WorkerDied("the worker ended with signal SIGKILL")
        return self.answers[function](*arguments)

    def kill(self):
        pass

    @staticmethod
    def tune(problem, texts, where, limit_s):
        assert where == "cuda:0"
        timed = {text: 2.0 + i for i, text in enumerate(texts[1:])}
        return Tuning(
            problem, len(texts), 3, timed, unreached=texts[:1], seconds={"compile": 1.5}
        ).to_dict()

    @staticmethod
    def finals(problem, texts, baselines, rounds, where):
        places = variants(parse_problem(problem))
        assert (baselines, where) == ([], "cuda:0")
        return {text: [1.0 + places.index(text)] * rounds for text in texts}

    @staticmethod
    def measure(problem, text, where, best_ms):
        if text == variants(parse_problem(problem))[3]:
            return {"status": "wrong", "detail": "out: error 1"}
        return {"status": "ok", "latency_ms": 1.0}


@pytest.fixture
def gpu(monkeypatch):
    FakeWorker.died = ()
    FakeWorker.answers = {
        DEVICE: lambda where: H200.to_dict(),
        VERSIONS: lambda index: {"driver": "580.1"},
        TUNE: FakeWorker.tune,
        FINALS: FakeWorker.finals,
        MEASURE: FakeWorker.measure,
    }
    monkeypatch.setattr("ktune.device.cuda_available", lambda: True)
    monkeypatch.setattr("ktune.bench.worker.Worker", FakeWorker)
    monkeypatch.setattr("ktune.bench.autotune.Worker", FakeWorker)
    search = Search({p.text: variants(p)[0] for p in (ROWS, OTHER)}, breakdown={"proof": 0.5})
    monkeypatch.setattr(bench_search.subprocess, "run", search)
    return search


def run(*words):
    problems = ["--problem", ROWS.fields_text, "--problem", OTHER.fields_text]
    arguments = ["bench", "search", "softmax", *problems, *map(str, words)]
    return CliRunner().invoke(cli, arguments, catch_exceptions=False)


class TestCommand:
    def test_race(self, gpu, tmp_path):
        out = tmp_path / "race.json"
        result = run("--limit", "60", "--trials", "4", "--json", "--output", out)
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        assert document["command"] == "bench search"
        assert document["device"]["name"] == "NVIDIA H200"
        assert document["versions"]["driver"] == "580.1"
        assert document["options"] == ["--trials", "4"] == gpu.command[-2:]
        assert document["breakdown"]["ktune"] == {"proof": 0.5}
        assert document["breakdown"]["triton"]["compile"] == 3.0
        assert document["unreached"] == 2
        first = document["problems"][0]
        texts = variants(ROWS)
        assert first["picks"] == {"ktune": texts[0], "triton": texts[1]}
        assert first["loss"] == {"ktune": 0.0, "triton": 1.0}
        assert first["unfit"] == {texts[3]: "wrong: out: error 1"}
        assert list(first["finals"]) == [texts[0], texts[1], texts[2]]
        stored = json.loads(out.read_text())
        assert stored["problems"] == document["problems"]
        assert stored["kind"] == "ktune-search-race"

    def test_tables(self, gpu):
        result = run("--limit", "60")
        assert result.exit_code == 0
        for text in (
            "NVIDIA H200",
            "cold caches",
            "100.0%",
            "did NOT finish",
            "a finalist is UNFIT",
        ):
            assert text in result.stdout
        assert "triton.autotune 1/2" in result.stderr

    def test_reference_joins_the_finals(self, gpu, tmp_path):
        from ktune.bench.measurement import Measurement
        from ktune.target.recording import RecordedProblem, Recording

        known = Recording("softmax", H200, "p", "2026-01-02", {}, {}, "x")
        for problem in (ROWS, OTHER):
            last = variants(problem)[-1]
            outcomes = {last: Measurement("ok", 0.1), "gone block_m=1": Measurement("ok", 0.01)}
            known.problems[problem.text] = RecordedProblem(outcomes)
        known.write(tmp_path / "known.json")
        result = run("--reference", tmp_path / "known.json", "--json")
        assert variants(ROWS)[-1] in json.loads(result.stdout)["problems"][0]["finals"]
        known.device = Device("another", "cuda", "sm_80", 108, 166_912, 40 << 20, 40)
        known.write(tmp_path / "known.json")
        result = run("--reference", tmp_path / "known.json")
        assert result.exit_code == 2
        assert "is of another" in result.stderr

    def test_finals_that_die_exit_1_and_keep_the_rest(self, gpu):
        FakeWorker.died = (FINALS,)
        result = run("--json")
        assert result.exit_code == 1
        rows = json.loads(result.stdout)["problems"]
        assert "SIGKILL" in rows[0]["reason"]
        assert rows[0]["loss"] == {"ktune": None, "triton": None}

    def test_a_tuner_that_dies_has_no_pick(self, gpu):
        FakeWorker.died = (TUNE,)
        result = run()
        assert result.exit_code == 1
        assert "none by triton" in result.stdout
        assert "stopped: the worker ended with signal SIGKILL" in result.stdout

    def test_wrong_use(self, monkeypatch):
        monkeypatch.setattr("ktune.device.cuda_available", lambda: False)
        assert run().exit_code == 3
        assert run("--against", "helion").exit_code == 2
        assert "triton.autotune" in run("--help").stdout
        plain = CliRunner().invoke(cli, ["bench", "--help"])
        assert "ktune bench search --help" in plain.stdout


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu(tmp_path):
    problems = ["--problem", "m=64 n=128", "--problem", "m=32 n=300"]
    done = subprocess.run(
        [sys.executable, "-m", "ktune.cli", "bench", "search", "softmax", *problems,
         "--trials", "4", "--rounds", "5", "--json"],
        env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["unreached"] == 0
    for row in document["problems"]:
        assert row["reason"] == ""
        assert row["unfit"] == {}
        assert min(row["loss"].values()) >= 0
        assert row["triton"]["fatal"] == []
    assert document["seconds"]["ktune"] > 0
    assert document["seconds"]["triton"] > sum(
        sum(row["triton"]["seconds"].values()) for row in document["problems"]
    )
