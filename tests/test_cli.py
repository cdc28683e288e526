"""The command line: what it prints where, its exit codes, and that it loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from ktune.cli import cli
from ktune.device import Device

SMALL = "m=64 n=128 dtype=float32"
OTHER = "m=32 n=64 dtype=float32"
H200 = Device("NVIDIA H200", "cuda", "sm_90", 132, 232_448, 60 << 20, 140)
COMMAND = [sys.executable, "-c", "from ktune.cli import main; main()"]


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    for name in ("KTUNE_STORAGE", "KTUNE_STRICT", "KTUNE_DISABLE", "KTUNE_LOG", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KTUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KTUNE_TABLE_PATH", str(tmp_path / "table.json"))
    yield
    from ktune.runtime.dispatch import dispatcher

    dispatcher().reload()


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("ktune.device.cuda_available", lambda: False)


def fake_outcome(text: str):
    """Return a made-up measurement: one in seven wrong, one in eleven does not compile."""
    from ktune.bench.measurement import Measurement

    number = zlib.crc32(text.encode())
    if number % 7 == 0:
        return Measurement("wrong", error=1.0, error_limit=1e-5, detail="out: error 1 over 1e-05")
    if number % 11 == 0:
        return Measurement("compile_error", detail="ptxas refuses")
    latency = 0.1 + number % 1000 / 1e4
    return Measurement("ok", latency, 0.001, 25, error=1e-6, error_limit=1e-5)


def make_recording(path: Path, problems=(SMALL,), baselines=True, outcome=fake_outcome) -> Path:
    """Write a recording of softmax problems with made-up times; the default takes 1 ms."""
    from ktune.bench.measurement import Measurement
    from ktune.space import load_space
    from ktune.target.recording import RecordedProblem, Recording

    space = load_space("softmax")
    roofs = {"copy_gb_per_s": 4000.0, "matmul_tflop_per_s": 700.0}
    versions = {"torch": "2.11.0", "triton": "3.6.0"}
    recording = Recording("softmax", H200, "made-up", "2026-01-02", versions, roofs, "x")
    for text in problems:
        problem = space.problem_set(text)[0]
        outcomes = {v.text: outcome(v.text) for v in space.variants(problem, H200)}
        default = space.operation.default_variant(problem, H200).text
        outcomes[default] = Measurement("ok", 1.0, 0.001, 25, error=1e-6, error_limit=1e-5)
        finals = {"baseline:torch": [0.5] * 9, "baseline:compile": [0.3] * 9} if baselines else {}
        recording.problems[problem.text] = RecordedProblem(outcomes, finals, {})
    recording.write(path)
    return path


@pytest.fixture
def recording(tmp_path) -> Path:
    return make_recording(tmp_path / "made_up.json", (SMALL, OTHER))


def ktune(*words: str) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)


def document(result: Result) -> dict:
    found = json.loads(result.stdout)
    assert found["schema"] == 1
    return found


def replay(recording: Path, *words: str) -> Result:
    return ktune("search", "softmax", "--target", recording, "--no-proof", *words)


class TestMain:
    def test_help_is_quick_and_imports_nothing_heavy(self):
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *COMMAND[1:], "--help"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert time.perf_counter() - began < 5  # 0.1 s on a machine with nothing else to do
        for heavy in ("torch", "triton", "optuna", "rich", "pydantic", "jinja2"):
            assert f" {heavy}\n" not in done.stderr
        assert "doctor" in done.stdout

    @pytest.mark.parametrize("command", ["search", "render", "check", "table", "explain", "doctor"])
    def test_help_of_each_command_imports_no_torch(self, command):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *COMMAND[1:], command, "--help"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert " torch\n" not in done.stderr

    def test_bare_call_prints_help_to_stderr_and_exits_2(self):
        result = ktune()
        assert (result.exit_code, result.stdout) == (2, "")
        assert "search" in result.stderr

    def test_mistyped_command(self):
        result = ktune("serch")
        assert result.exit_code == 2
        assert "'search'" in result.stderr

    def test_reader_that_goes_away(self):
        command = f"{' '.join(map(repr, COMMAND))} render softmax | head -1"
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0
        assert done.stdout.count("\n") == 1
        assert "Traceback" not in done.stderr and "Broken" not in done.stderr

    def test_closed_stdout(self):
        done = subprocess.run(
            ["bash", "-c", f"{' '.join(map(repr, COMMAND))} render softmax >&-"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0
        assert "Traceback" not in done.stderr

    def test_full_stdout(self):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [*COMMAND, "render", "softmax"],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert done.returncode == 1
        assert "No space left" in done.stderr and "Traceback" not in done.stderr

    def test_debug_shows_the_traceback(self):
        assert "Traceback" not in ktune("render", "softmx").stderr
        result = ktune("render", "softmx", "-v")
        assert result.exit_code == 2
        assert "Traceback" in result.stderr
        assert "did you mean 'softmax'" in result.stderr


class TestRender:
    def test_prints_the_module_and_nothing_else(self):
        result = ktune("render", "softmax", "--set", "num_warps=4", "--problem", SMALL)
        assert result.exit_code == 0
        compile(result.stdout, "kernel.py", "exec")
        assert "num_warps=4" in result.stderr

    def test_json_and_file(self, tmp_path):
        path = tmp_path / "kernel.py"
        found = document(ktune("render", "softmax", "-o", path, "--json"))
        assert found["text"] == path.read_text()
        assert found["launch"]["num_warps"] > 0

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (["--set", "blok_m=4"], "did you mean 'block_m'"),
            (["--set", "block_m"], "name=value"),
            (["--set", "block_m=3"], "is not one of"),
            (["--strategy", "onlin"], "did you mean 'online'"),
            (["--problem", "m=4 nn=4"], "did you mean 'n'"),
            (["--problem", "defualt"], "did you mean 'default'"),
            (["--arch", "sm_1"], "unknown architecture"),
        ],
    )
    def test_mistakes(self, words, expected):
        result = ktune("render", "softmax", *words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert expected in result.stderr

    def test_strategy(self):
        result = ktune("render", "softmax", "--strategy", "safe", "--problem", "m=64 n=50257")
        assert result.exit_code == 0
        assert "rescale=never" in result.stderr


class TestSearch:
    def test_replay_says_so_everywhere(self, recording, tmp_path):
        result = replay(recording)
        assert result.exit_code == 0, result.stderr
        assert "REPLAYED" in result.stderr and "2026-01-02" in result.stderr
        assert "REPLAYED" in result.stdout and "NVIDIA H200" in result.stdout
        assert "import ktune; ktune.softmax(x)" in result.stdout
        assert "\x1b" not in result.stdout + result.stderr
        table = (tmp_path / "table.json").read_text()
        assert '"replayed_from": "NVIDIA H200, 2026-01-02"' in table

    def test_progress_lines(self, recording):
        result = replay(recording)
        assert any(
            line.startswith("[") and " trials" in line and "x default)" in line
            for line in result.stderr.splitlines()
        )
        assert "trials" not in replay(recording, "--quiet").stderr

    def test_json(self, recording):
        found = document(replay(recording, "--json"))
        assert len(found["results"]) == 2
        first = found["results"][0]
        assert first["speedup"]["default"] == pytest.approx(1.0 / first["latency_ms"])
        assert first["baselines_ms"] == {"torch": 0.5, "compile": 0.3}
        assert 0 < first["roof_share"] < 1
        assert first["saved"] and not found["interrupted"]
        assert found["storage"] == "memory"
        assert first["trials"] <= first["legal"]

    def test_budget_and_problem(self, recording):
        found = document(replay(recording, "--problems", SMALL, "--trials", "7", "--json"))
        (only,) = found["results"]
        assert only["trials"] == 7

    def test_exhaustive(self, recording):
        found = document(replay(recording, "--exhaustive", "--json"))
        assert all(r["trials"] == r["legal"] for r in found["results"])
        assert replay(recording, "--exhaustive", "--trials", "3").exit_code == 2

    def test_storage_is_resumed_and_forgotten(self, recording, tmp_path):
        url = f"sqlite:///{tmp_path / 'studies.sqlite3'}"
        words = ("--problems", SMALL, "--trials", "5", "--json", "--storage", url)
        assert document(replay(recording, *words))["results"][0]["new_trials"] == 5
        assert document(replay(recording, *words))["results"][0]["new_trials"] == 0
        again = document(replay(recording, *words, "--fresh"))
        assert again["results"][0]["new_trials"] == 5

    def test_record_can_be_replayed(self, recording, tmp_path):
        path = tmp_path / "again" / "softmax.json"
        words = ("--exhaustive", "--record", path, "--json", "--problems")
        document(replay(recording, *words, SMALL))
        document(replay(recording, *words, OTHER))
        first = document(replay(recording, "--exhaustive", "--json"))
        second = document(replay(path, "--exhaustive", "--json"))
        assert [r["winner"] for r in first["results"]] == [r["winner"] for r in second["results"]]

    def test_record_refuses_another_device(self, recording, tmp_path):
        path = tmp_path / "other.json"
        path.write_text(recording.read_text().replace("NVIDIA H200", "NVIDIA H100"))
        before = path.read_text()
        result = replay(recording, "--record", path, "--exhaustive")
        assert result.exit_code == 2
        assert "H100" in result.stderr
        assert path.read_text() == before

    def test_unwritable_table_prints_the_result(self, recording, tmp_path):
        blocker = tmp_path / "file"
        blocker.write_text("")
        result = replay(recording, "--table", blocker / "table.json")
        assert result.exit_code == 0
        assert "NOT saved" in result.stderr
        assert "one_tile" in result.stdout
        assert "import ktune" not in result.stdout

    def test_other_table_is_named_in_the_line_that_loads_it(self, recording, tmp_path):
        path = tmp_path / "my table.json"
        result = replay(recording, "--table", path)
        assert f"export KTUNE_TABLE_PATH='{path}'" in result.stdout

    def test_unopenable_storage(self, recording, tmp_path, monkeypatch):
        blocker = tmp_path / "file"
        blocker.write_text("")
        result = replay(recording, "--storage", f"sqlite:///{blocker}/x.sqlite3")
        assert result.exit_code == 1
        assert "--storage memory" in result.stderr and "Traceback" not in result.stderr

    def test_storage_that_fails_midway(self, recording, tmp_path, monkeypatch):
        from optuna.exceptions import StorageInternalError
        from optuna.storages import RDBStorage

        keep, calls = RDBStorage._create_new_trial, []

        def fail(self, *args, **kwargs):
            calls.append(1)
            if len(calls) > 3:
                raise StorageInternalError("database or disk is full")
            return keep(self, *args, **kwargs)

        monkeypatch.setattr(RDBStorage, "_create_new_trial", fail)
        result = replay(recording, "--storage", f"sqlite:///{tmp_path}/x.sqlite3", "--json")
        assert result.exit_code == 0, result.stderr
        assert "disk is full" in result.stderr
        found = document(result)
        assert len(found["results"]) == 2 and found["storage"] == "memory"

    def test_no_variant_passes(self, tmp_path):
        from ktune.bench.measurement import Measurement

        path = make_recording(tmp_path / "bad.json", (SMALL,))
        text = path.read_text()
        path.write_text(text.replace('"status": "ok"', '"status": "crashed"'))
        result = replay(path)
        assert Measurement("crashed").latency_ms is None
        assert result.exit_code == 1
        assert "no variant passed" in result.stdout

    def test_variants_that_are_not_recorded(self, tmp_path):
        path = make_recording(tmp_path / "few.json", (SMALL,))
        whole = json.loads(path.read_text())
        (seen,) = whole["problems"].values()
        outcomes = seen["outcomes"]
        good = [text for text, outcome in outcomes.items() if outcome["status"] == "ok"]
        seen["outcomes"] = {text: outcomes[text] for text in good[:3]}
        path.write_text(json.dumps(whole))
        result = replay(path)
        assert "not in the recording" in result.stderr

    @pytest.mark.parametrize(
        ("words", "code", "expected"),
        [
            (["softmx"], 2, "did you mean 'softmax'"),
            (["softmax", "--target", "live"], 3, "--target h200"),
            (["softmax", "--device", "cuda:0"], 3, "no GPU"),
            (["softmax", "--device", "gpu0"], 2, "write cuda:0"),
            (["softmax", "--target", "lvie"], 2, "did you mean 'live'"),
            (["softmax", "--target", "h200", "--device", "cuda:0"], 2, "give one of them"),
            (["softmax", "--problems", "llama-3-8"], 2, "did you mean 'llama-3-8b'"),
            (["softmax", "attention", "--problems", "experts"], 2, "no problem set 'experts'"),
            (["softmax", "attention", "--problems", "m=4 n=4"], 2, "say which"),
            (["missing.yaml"], 2, "missing.yaml"),
            (["softmax", "--trials", "0"], 2, "--trials"),
            ([], 2, "Missing argument"),
        ],
    )
    def test_mistakes(self, no_gpu, words, code, expected):
        result = ktune("search", *words)
        assert result.exit_code == code, result.stderr
        assert expected in result.stderr
        assert result.stdout == "" and "Traceback" not in result.stderr

    def test_problems_that_the_recording_lacks(self, recording):
        result = replay(recording, "--problems", "m=4 n=4")
        assert result.exit_code == 2
        assert "does not hold" in result.stderr and "m=64 n=128" in result.stderr

    def test_recording_of_another_operation(self, recording):
        result = ktune("search", "attention", "--target", recording)
        assert result.exit_code == 2
        assert "records softmax" in result.stderr

    def test_damaged_recording(self, tmp_path):
        path = tmp_path / "damaged.json"
        path.write_text("{")
        result = replay(path)
        assert result.exit_code == 2
        assert "damaged" in result.stderr

    def test_failed_proof(self, recording, monkeypatch):
        from ktune.search.proof import Proof

        def prove(results, target, workers, listener):
            listener.proof_started(1)
            result = results[0]
            proof = Proof(
                result.problem, result.entry.variant, {"registers": 32}, 1.0, 1e-5, "out: error 1"
            )
            listener.proof_done(proof)
            return {result.problem.text: proof}

        monkeypatch.setattr("ktune.cli.session.prove", prove)
        words = ("search", "softmax", "--target", recording, "--problems", SMALL)
        result = ktune(*words)
        assert result.exit_code == 1
        assert "FAILED" in result.stdout and "out: error 1" in result.stdout
        found = document(ktune(*words, "--json"))
        assert found["results"][0]["proof"]["passed"] is False

    @pytest.mark.slow
    def test_proof(self, recording):
        result = ktune("search", "softmax", "--target", recording, "--problems", SMALL, "--json")
        proof = document(result)["results"][0]["proof"]
        assert result.exit_code == 0, result.stderr
        assert proof["passed"] and proof["registers"] > 0
        assert proof["error"] <= proof["error_limit"]


class TestLive:
    """The path of a GPU, with a stand-in that answers from a recording."""

    @pytest.fixture(autouse=True)
    def _gpu(self, recording, monkeypatch):
        from ktune.target.recording import read_recording
        from ktune.target.replay import ReplayTarget

        self.closed = []

        def live(places):
            target = ReplayTarget(read_recording(recording))
            target.replayed_from = None
            target.close = lambda: self.closed.append(places[0])
            return target

        monkeypatch.setattr("ktune.device.cuda_available", lambda: True)
        monkeypatch.setattr("ktune.cli.session.LiveTarget", live)

    def search(self, *words):
        words = ("search", "softmax", "--problem", SMALL, "--trials", "3", *words)
        return ktune(*words)

    def test_keeps_trials_in_the_cache_and_the_table(self, tmp_path):
        found = document(self.search("--json", "--device", "cuda:1"))
        assert found["storage"] == f"sqlite:///{tmp_path}/cache/studies.sqlite3"
        assert found["results"][0]["replayed_from"] is None
        assert self.closed == ["cuda:1"]
        assert document(self.search("--json"))["results"][0]["new_trials"] == 0

    def test_says_that_it_measures(self):
        result = self.search()
        assert "measured on a GPU of this machine" in result.stderr
        assert "REPLAYED" not in result.stdout + result.stderr

    def test_unwritable_cache(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("KTUNE_CACHE_DIR", str(tmp_path / "file" / "cache"))
        result = self.search("--json")
        assert result.exit_code == 0, result.stderr
        assert "keeps no trials" in result.stderr
        assert document(result)["storage"] == "memory"

    def test_storage_that_fails_midway_gets_a_new_target(self, monkeypatch):
        from ktune.errors import StorageError
        from ktune.search.study import ProblemSearch

        tell, calls = ProblemSearch.tell, []

        def fail(self, *args, **kwargs):
            calls.append(1)
            if len(calls) == 1:
                raise StorageError("database or disk is full")
            return tell(self, *args, **kwargs)

        monkeypatch.setattr(ProblemSearch, "tell", fail)
        result = self.search("--json")
        assert document(result)["results"][0]["saved"]
        assert self.closed == ["cuda:0", "cuda:0"]


SLOW_MAIN = """
import time
from ktune.target.replay import ReplayTarget
answer = ReplayTarget.next
ReplayTarget.next = lambda self: (time.sleep(0.2), answer(self))[1]
from ktune.cli import main
main()
"""


class TestInterrupt:
    def start(self, recording, tmp_path, *words):
        """Start a slow search of two problems, and wait until the second has begun."""
        storage = f"sqlite:///{tmp_path}/s.sqlite3"
        options = ["--no-proof", "--trials", "4", "--storage", storage, *words]
        search = ["search", "softmax", "--target", str(recording), *options]
        running = subprocess.Popen(
            [sys.executable, "-c", SLOW_MAIN, *search],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for line in running.stderr:
            if "2/2" in line:
                return running
        pytest.fail(f"ended with {running.wait()} before the first problem was done")

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_keeps_what_was_found(self, recording, tmp_path, number):
        running = self.start(recording, tmp_path, "--json")
        running.send_signal(number)
        stdout, stderr = running.communicate(timeout=60)
        assert running.returncode == 130, stderr
        assert "Traceback" not in stderr
        assert "run the same command again to go on" in stderr
        found = json.loads(stdout)
        assert found["interrupted"] and len(found["results"]) == 1
        entries = json.loads((tmp_path / "table.json").read_text())["entries"]
        assert sum(map(len, entries.values())) == 1

        words = ("--storage", f"sqlite:///{tmp_path}/s.sqlite3", "--trials", "4", "--json")
        again = document(replay(recording, *words))
        first, known = again["results"][0], found["results"][0]["trials"]
        assert first["trials"] - first["new_trials"] == known, "nothing is measured again"
        assert first["new_trials"] <= 3, "the other problem's best, to settle on few variants"


class TestCheck:
    def test_everything_that_ships(self):
        result = ktune("check", "--json")
        found = document(result)
        assert result.exit_code == 0, found
        assert {Path(space["space"]).stem for space in found["spaces"]} >= {"softmax", "attention"}

    def own_space(self, tmp_path, *changes):
        from ktune.resources import shipped

        text = (shipped("search_spaces") / "softmax.yaml").read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new, 1)
        start, end = text.index("problems:"), text.index("budget:")
        path = tmp_path / "own.yaml"
        path.write_text(f"{text[:start]}problems:\n  default: [{{m: 16, n: 64}}]\n{text[end:]}")
        return path

    def test_parameter_that_no_template_uses(self, tmp_path):
        path = self.own_space(tmp_path, ("launch:\n", "  colour: {choices: [red]}\n\nlaunch:\n"))
        result = ktune("check", path)
        assert result.exit_code == 1
        line = 1 + path.read_text()[: path.read_text().index("  colour:")].count("\n")
        assert f"own.yaml:{line}:3: parameters.colour" in result.stdout
        assert "no template uses it" in result.stdout

    def test_name_that_nobody_gives(self, tmp_path):
        path = self.own_space(tmp_path, ("  eviction:", "  evictoin:"))
        result = ktune("check", path)
        assert result.exit_code == 1
        assert "eviction" in result.stdout and "Traceback" not in result.stdout

    def test_seed_that_is_never_legal(self, tmp_path):
        result = ktune("check", self.own_space(tmp_path))
        assert result.exit_code == 1
        assert "is legal for no problem of any set" in result.stdout  # those for long rows

    def test_yaml_mistakes(self, tmp_path):
        path = tmp_path / "bad.yaml"
        path.write_text("schema: 1\noperatoin: softmax\n")
        result = ktune("check", path)
        assert result.exit_code == 1
        assert "bad.yaml:2:1" in result.stdout
        found = document(ktune("check", path, "--json"))
        assert found["spaces"][0]["errors"]

    def test_unknown_space(self):
        result = ktune("check", "softmx")
        assert result.exit_code == 2
        assert "did you mean 'softmax'" in result.stderr

    @pytest.mark.slow
    def test_compile_and_interpret(self, tmp_path):
        text = self.own_space(tmp_path).read_text()
        start, end = text.index("problems:"), text.index("budget:")
        path = tmp_path / "small.yaml"
        path.write_text(f"{text[:start]}problems:\n  default: [{{m: 16, n: 64}}]\n{text[end:]}")
        result = ktune("check", path, "--compile", "sm_90", "--interpret", "--json")
        trials = document(result)["trials"]
        assert result.exit_code in {0, 1}
        assert trials and all(t["registers"] > 0 and not t["detail"] for t in trials)


class TestTable:
    def test_the_shipped_table_is_there_before_any_search(self):
        result = ktune("table", "show")
        assert result.exit_code == 0
        assert "NVIDIA H200" in result.stdout
        tables = document(ktune("table", "list", "--json"))["tables"]
        assert {Path(table["path"]).name for table in tables} == {"nvidia-h200.json"}

    def test_show_list_merge_diff(self, recording, tmp_path):
        first, second, both = (tmp_path / f"{n}.json" for n in ("first", "second", "both"))
        replay(recording, "--table", first, "--problems", SMALL)
        replay(recording, "--table", second, "--problems", OTHER)
        assert "REPLAYED" in ktune("table", "show", first).stdout
        assert "1 entries merged" in ktune("table", "merge", first, "-o", both).stdout
        assert document(ktune("table", "merge", second, "-o", both, "--json"))["entries"] == 2
        assert len(document(ktune("table", "show", both, "--json"))["entries"]) == 2
        (change,) = document(ktune("table", "diff", first, both, "--json"))["changes"]
        assert change["change"] == "added"
        assert "no differences" in ktune("table", "diff", both, both).stderr
        assert ktune("table", "diff", first, both).stdout.count("one_tile") == 1
        (row,) = document(ktune("table", "list", both, "--json"))["tables"]
        assert row["entries"] == 2

    def test_damaged_table(self, tmp_path):
        path = tmp_path / "table.json"
        path.write_text("{")
        assert ktune("table", "show", path).exit_code == 1
        result = ktune("table", "show")
        assert result.exit_code == 0
        assert "damaged" in result.stderr


class TestExplain:
    def test_default(self, no_gpu):
        result = ktune("explain", "softmax", *SMALL.split())
        assert result.exit_code == 0
        assert "default" in result.stdout and "ktune search softmax" in result.stdout

    def test_exact_and_bucket(self, no_gpu, recording):
        replay(recording)
        found = document(ktune("explain", "softmax", *SMALL.split(), "--json"))
        (only,) = found["devices"]
        assert only["match"] == "exact"
        assert only["entry"]["provenance"]["replayed_from"] == "NVIDIA H200, 2026-01-02"
        assert Path(only["module"]).is_file()
        words = ("softmax", "m=60", "n=120", "dtype=float32", "--target", "h200")
        result = ktune("explain", *words)
        assert "bucket" in result.stdout and "replayed from" in result.stdout

    def test_nearest(self, no_gpu, recording):
        replay(recording, "--problems", SMALL)
        words = ("softmax", "m=64", "n=128", "dtype=float16", "--target", "H200", "--json")
        (only,) = document(ktune("explain", *words))["devices"]
        assert only["match"] == "default"
        assert only["nearest"]["differs"] == {"dtype": {"asked": "float16", "has": "float32"}}

    @pytest.mark.parametrize(
        ("words", "code", "expected"),
        [
            (["softmax", "m=4"], 2, "needs n="),
            (["softmax", "m=4", "k=4"], 2, "no field 'k'"),
            (["softmux", "m=4"], 2, "unknown operation"),
            (["softmax", *SMALL.split(), "--target", "sm_91"], 2, "did you mean 'sm_90'"),
            (["softmax", *SMALL.split(), "--device", "cuda:99"], 3, "no GPU"),
        ],
    )
    def test_mistakes(self, no_gpu, words, code, expected):
        result = ktune("explain", *words)
        assert result.exit_code == code
        assert expected in result.stderr


class TestDoctor:
    def test_without_a_gpu(self):
        found = document(ktune("doctor", "--json"))
        assert found["versions"]["torch"] and found["cache"]["writable"]
        assert found["compiler"]["version"]
        assert found["tables"][0]["exists"] is False

    def test_counts_entries_and_hides_passwords(self, recording, monkeypatch):
        replay(recording)
        monkeypatch.setenv("KTUNE_STORAGE", "postgresql://me:secret@host/db")
        result = ktune("doctor")
        assert result.exit_code == 0
        assert f"2 for {H200.key}" in result.stdout
        assert "secret" not in result.stdout

    def test_broken_setting(self, monkeypatch):
        monkeypatch.setenv("KTUNE_DISABLE", "yes")
        result = ktune("doctor")
        assert result.exit_code == 2
        assert "KTUNE_DISABLE" in result.stderr


class TestProgress:
    def test_a_line_every_30_seconds(self, capsys):
        from ktune.cli.progress import Lines

        now = [0.0]
        lines = Lines(lambda: now[0])
        for second in range(95):
            now[0] = float(second)
            lines.step(second, 95, f"step {second}", False)
        assert capsys.readouterr().err.splitlines() == [
            "[ 30s] step 30",
            "[ 60s] step 60",
            "[ 90s] step 90",
        ]

    def test_state(self):
        from ktune.bench.measurement import Measurement
        from ktune.cli.progress import State

        state = State("softmax m=1", "a", done=3, goal=9)
        assert state.take("a", Measurement("ok", 0.5))
        assert not state.take("b", Measurement("wrong"))
        assert state.take("c", Measurement("ok", 0.25))
        assert not state.take("d", Measurement("ok", 0.3))
        assert state.text == ("softmax m=1 3/9 trials  1 wrong  best 0.25 ms (2.00x default)  c")

    def test_a_bar_on_a_terminal_only(self, monkeypatch):
        from ktune.cli import progress

        console = SimpleNamespace(is_terminal=False)
        monkeypatch.setattr(progress, "progress_console", lambda: console)
        assert isinstance(progress.make_view(), progress.Lines)
        assert isinstance(progress.make_view(quiet=True), progress.Silence)


def test_no_color_codes_in_a_file(recording, tmp_path):
    path = tmp_path / "out.txt"
    with path.open("w") as file:
        subprocess.run(
            [*COMMAND, "search", "softmax", "--target", str(recording), "--no-proof"],
            stdout=file,
            stderr=subprocess.STDOUT,
            check=True,
            env={**os.environ, "TERM": "xterm-256color"},
        )
    assert "\x1b" not in path.read_text()
    assert max(map(len, path.read_text().splitlines())) > 80
