"""``ktune bench``: stored results render the same anywhere; live ones need a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from ktune.bench.peers import PEERS, UnsuitableError, make_peer, output_of, peer_names
from ktune.cli import cli
from ktune.device import Device
from ktune.operations import operation, parse_problem
from ktune.report.bench import Bench, Contender, Row, markdown, rate, read_benches, roof_share

H200 = Device("NVIDIA H200", "cuda", "sm_90", 132, 232_448, 50 << 20, 141)
ROWS = parse_problem("softmax m=4096 n=1024")
HEADS = parse_problem("attention heads=16 seqlen_q=4096 head_dim=128")
DECODE = parse_problem(
    "attention batch=8 heads=32 heads_kv=8 seqlen_q=1 seqlen_k=8192 head_dim=128"
)


def run(*arguments):
    return CliRunner().invoke(cli, list(arguments))


def make_bench(problem, **times):
    contenders = {
        name: Contender(time, 0.001, 30, 1e-3, 2e-3) if time else Contender(reason="ImportError: x")
        for name, time in times.items()
    }
    return Bench(
        problem.op, H200, "test-protocol", "2026-01-02", 30,
        {"torch": "2.11.0", "driver": "580.1", "ptxas": "12.8"},
        {"copy_gb_per_s": 4000.0, "matmul_tflop_per_s": 800.0},
        [Row(problem.text, "exact", "one_tile a=1", "one_tile a=2", contenders)],
    )  # fmt: skip


@pytest.fixture
def bench():
    return make_bench(ROWS, ktune=0.005, default=0.006, torch=0.01, quack=None)


@pytest.fixture
def stored(bench, tmp_path):
    path = tmp_path / "softmax.json"
    path.write_text(json.dumps(bench.to_dict()))
    return path


def test_document_survives_a_round_trip(bench, stored):
    assert read_benches(stored) == [bench]


def test_ratios_rates_and_roofs(bench):
    assert bench.rows[0].ratio("torch") == pytest.approx(2.0)
    assert bench.rows[0].ratio("quack") is None
    value, unit = rate(bench, ROWS, 0.005)
    assert unit == "GB/s"
    assert value == pytest.approx(2 * 4096 * 1024 * 2 / 0.005e-3 / 1e9)
    assert roof_share(bench, ROWS, 0.005) == pytest.approx(value / 4000)


def test_attention_is_bound_by_compute_and_decode_by_memory():
    bench = make_bench(HEADS, ktune=1.0)
    value, unit = rate(bench, HEADS, 1.0)
    assert unit == "TFLOP/s"
    assert value == pytest.approx(4 * 16 * 4096 * 4096 * 128 / 1e-3 / 1e12)
    assert rate(bench, DECODE, 1.0)[1] == "GB/s"


def test_markdown_has_provenance_ratios_and_reasons(bench):
    text = markdown(bench)
    assert "NVIDIA H200, 2026-01-02" in text
    assert "driver 580.1" in text
    assert "(2.00x)" in text
    assert "- quack on m=4096 n=1024: ImportError: x" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1


def test_from_prints_a_table(stored):
    result = run("bench", "--from", str(stored))
    assert result.exit_code == 0, result.output
    assert "(2.00x)" in result.stdout
    assert "\N{EN DASH}" in result.stdout
    assert "quack: ImportError: x" in result.stdout


def test_from_regenerates_the_folder(stored, tmp_path):
    pytest.importorskip("matplotlib")
    for folder in ("a", "b"):
        result = run("bench", "--from", str(stored), "--output", str(tmp_path / folder))
        assert result.exit_code == 0, result.output
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    stem = "softmax.nvidia-h200"
    assert sorted(files) == [f"{stem}.json", f"{stem}.md", f"{stem}.svg"]
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    assert json.loads(files[f"{stem}.json"])["schema"] == 1


def test_json_output_is_one_document_that_from_reads(stored, tmp_path):
    result = run("bench", "--from", str(stored), "--json")
    document = json.loads(result.stdout)
    assert document["schema"] == 1
    assert document["benchmarks"][0]["device"]["name"] == "NVIDIA H200"
    again = tmp_path / "again.json"
    again.write_text(result.stdout)
    assert run("bench", "--from", str(again), "--json").stdout == result.stdout


def test_without_matplotlib_the_plot_alone_is_missing(stored, tmp_path, monkeypatch):
    monkeypatch.setattr("ktune.report.plot.has_matplotlib", lambda: False)
    result = run("bench", "--from", str(stored), "--output", str(tmp_path / "out"))
    assert result.exit_code == 0
    assert "ktune-kernels[plot]" in result.stderr
    assert sorted(p.suffix for p in (tmp_path / "out").iterdir()) == [".json", ".md"]


def test_a_winner_without_a_time_exits_1(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(make_bench(ROWS, ktune=None, torch=0.01).to_dict()))
    result = run("bench", "--from", str(path))
    assert result.exit_code == 1
    assert "ktune: ImportError: x" in result.stdout


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"kind": "ktune-bench", "schema": 9}'])
def test_damaged_files_exit_2_and_name_the_file(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    result = run("bench", "--from", str(path))
    assert result.exit_code == 2
    assert "bad.json" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name an operation"),
        (["--from", "no-such-file.json"], "cannot read no-such-file.json"),
        (["softmax", "attention", "--output", "x.json"], "name a folder"),
    ],
)
def test_wrong_use_exits_2(arguments, says):
    result = run("bench", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr


def test_live_without_a_gpu_exits_3(monkeypatch):
    monkeypatch.setattr("ktune.device.cuda_available", lambda: False)
    result = run("bench", "softmax")
    assert result.exit_code == 3
    assert result.stdout == ""


def test_peers_are_known_without_their_packages():
    assert peer_names(ROWS) == ["torch", "compile", "quack"]
    assert peer_names(HEADS) == ["torch", "flash", "cudnn", "fa4"]


@pytest.mark.parametrize(
    "text",
    [
        "softmax m=4 n=33 dtype=float32",
        "attention heads=2 seqlen_q=16 head_dim=8 dtype=float32",
    ],
)
def test_peers_of_pytorch_agree_on_the_cpu(text):
    problem = parse_problem(text)
    op = operation(problem.op)
    inputs = op.make_inputs(problem, "normal", 0, torch.device("cpu"))
    out = output_of(make_peer("torch", problem, inputs)())
    torch.testing.assert_close(out, op.reference(problem, inputs)["out"].float())


def test_unsuitable_peers_say_why():
    with pytest.raises(UnsuitableError, match="no peer 'nothing'"):
        make_peer("nothing", ROWS, {"x": torch.zeros(1, 4)})
    assert set(PEERS) == {"softmax", "attention"}
    assert output_of(None) is None


EMULATED = """
import json, torch
import ktune.report.bench as bench
from ktune.bench.check import make_case
from ktune.bench.timer import Timing

class FakeTimer:
    def interleave(self, launches, rounds):
        return [Timing((1.0 + place,) * rounds) for place, _ in enumerate(launches)]

bench._timer = lambda index: FakeTimer()
bench._leave_if_sticky = lambda index: None
bench.make_case = lambda problem, kind, device: make_case(problem, kind, torch.device("cpu"))
torch.cuda.set_device = torch.cuda.synchronize = lambda *arguments: None
torch.cuda.current_device = lambda: 0
wide, broken = ("one_tile block_m=%s eviction=none num_warps=4" % rows for rows in (4, 3))
own = {"ktune": wide, "default": broken}
print(json.dumps(bench.bench_problem("softmax m=8 n=100 dtype=float32", own, ["torch", "x"], 5, 0)))
"""


def test_contenders_are_checked_then_timed_together():
    """The task of the worker, with the GPU's clock replaced and kernels interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", EMULATED],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    seen = json.loads(done.stdout)
    assert seen["ktune"]["latency_ms"] == 1.0
    assert seen["torch"]["latency_ms"] == 2.0
    assert seen["ktune"]["error"] <= seen["ktune"]["limit"]
    assert seen["default"]["reason"]
    assert "latency_ms" not in seen["default"]
    assert "no peer 'x'" in seen["x"]["reason"]
