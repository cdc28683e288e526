"""``ktune compare``: counts are exact, replays are honest, and the command line says so."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ktune.bench.measurement import Measurement
from ktune.bench.tasks import INTERPRETER
from ktune.bench.worker import Worker, WorkerError
from ktune.cli import cli
from ktune.device import Device
from ktune.operations import operation, parse_problem
from ktune.report import Strategy
from ktune.report.compare import (
    OBSERVE,
    replay_lines,
    search_lines,
    small_problem,
    strategies_of,
    time_lines,
    usual_problem,
)
from ktune.space import load_space
from ktune.target.recording import RecordedProblem, Recording
from ktune.target.replay import ReplayTarget

H200 = Device("NVIDIA H200", "cuda", "sm_90", 132, 232_448, 50 << 20, 141)
BLOCK = 64
COUNTED = parse_problem("attention heads=1 seqlen_q=128 seqlen_k=512 head_dim=64 dtype=float32")
TIMED = parse_problem("attention heads=4 seqlen_q=256 seqlen_k=256 head_dim=64")
THRESHOLDS = (0.0, 1.0, 4.0, 8.0)


def run(*arguments):
    return CliRunner().invoke(cli, list(arguments))


@pytest.fixture(scope="module")
def interpreter():
    worker = Worker(INTERPRETER | {"PYTHONWARNINGS": "ignore::RuntimeWarning"})
    yield worker
    worker.kill()


def variant_text(threshold, granularity):
    rule = f"rescale=conditional rescale_threshold={threshold} rescale_granularity={granularity}"
    if threshold is None:
        rule = "rescale=always"
    return (
        f"forward load=pointer normalization=deferred {rule} tile_order=sequential "
        f"block_m={BLOCK} block_n={BLOCK} num_warps=4 num_stages=2"
    )


def plain_counts(distribution, threshold, granularity):
    """Count the moves of theory.md's rule with a loop over tiles."""
    inputs = operation("attention").make_inputs(COUNTED, distribution, 0, torch.device("cpu"))
    q, k = (inputs[name][0, 0].numpy() for name in ("q", "k"))
    scale = np.float32(inputs["scale"] * 1.4426950408889634)
    counts = [0, 0, 0, 0]
    for i in range(0, q.shape[0], BLOCK):
        kept = np.full(BLOCK, -np.inf, np.float32)
        for j in range(0, k.shape[0], BLOCK):
            top = np.maximum(kept, (q[i : i + BLOCK] @ k[j : j + BLOCK].T).max(1))
            moves = (top - kept) * scale > (threshold or 0.0)
            if granularity == "tile":
                moves = np.full(BLOCK, moves.any())
            fresh = np.where(moves, top, kept)
            possible, moved = kept > -np.inf, (kept > -np.inf) & (fresh > kept)
            for place, value in enumerate(
                (moved.sum(), possible.sum(), moved.any(), possible.any())
            ):
                counts[place] += int(value)
            kept = fresh
    return counts


@pytest.mark.parametrize("distribution", ["normal", "rising", "falling", "sink"])
@pytest.mark.parametrize("granularity", ["row", "tile"])
def test_counts_equal_a_plain_count(interpreter, distribution, granularity):
    shares = []
    for threshold in THRESHOLDS:
        variant = variant_text(threshold, granularity)
        seen = interpreter.call(OBSERVE, COUNTED.text, variant, distribution, None, timeout_s=120)
        assert seen["detail"] == ""
        assert seen["error"] <= seen["limit"]
        assert seen["counts"] == plain_counts(distribution, threshold, granularity)
        shares.append(seen["counts"][0] / seen["counts"][1])
    assert shares == sorted(shares, reverse=True)
    if distribution == "rising":
        assert shares == [1.0] * 4
    elif distribution == "normal":
        assert shares[0] > 0.1 > shares[2]
        assert shares[3] == 0.0
    else:
        assert shares == [0.0] * 4


def test_always_moves_as_often_as_threshold_0(interpreter):
    seen = [
        interpreter.call(OBSERVE, COUNTED.text, text, "normal", None, timeout_s=120)["counts"]
        for text in (variant_text(None, ""), variant_text(0.0, "row"))
    ]
    assert seen[0] == seen[1]


def test_a_broken_variant_is_reported_not_raised(interpreter):
    text = variant_text(0.0, "row").replace("rescale=conditional", "rescale=nonsense")
    seen = interpreter.call(OBSERVE, COUNTED.text, text, "normal", None, timeout_s=120)
    assert "nonsense" in seen["detail"]
    assert seen["counts"] is None


@pytest.fixture(scope="module")
def recording():
    space = load_space("attention")
    outcomes = {
        variant.text: Measurement("ok", 1.0 + 0.001 * place, 0.01, 20)
        for place, variant in enumerate(space.variants(TIMED, H200))
        if variant.values["rescale"] != "never"
    }
    outcomes[next(iter(outcomes))] = Measurement("wrong", detail="out: error 1 over 0.1")
    return Recording(
        "attention", H200, "test-protocol", "2026-01-02", {"torch": "2"},
        {"copy_gb_per_s": 4000.0, "matmul_tflop_per_s": 800.0},
        "x", {TIMED.text: RecordedProblem(outcomes)},
    )  # fmt: skip


@pytest.fixture
def recorded(recording, tmp_path):
    path = tmp_path / "recording.json"
    recording.write(path)
    return path


def test_replay_takes_the_fastest_right_variant_of_each_strategy(recording):
    space = load_space("attention")
    lines = replay_lines(recording, space, TIMED, strategies_of(space, "rescale"))
    outcomes = recording.problems[TIMED.text].outcomes
    for line in lines:
        own = [
            m.latency_ms
            for text, m in outcomes.items()
            if m.ok and all(f"{k}={v}" in text.split() for k, v in line.strategy.settings.items())
        ]
        assert line.latency_ms == min(own, default=None)
    safe = next(line for line in lines if line.strategy.name == "safe")
    assert safe.latency_ms is None
    assert safe.variant is not None
    assert "no recorded variant" in safe.detail


def test_search_gives_every_strategy_the_same_budget(recording):
    space = load_space("attention")
    strategies = strategies_of(space, "rescale", ["fa2", "fa4_row"])
    heard = []
    target = ReplayTarget(recording)
    lines = search_lines(target, space, TIMED, strategies, 4, heard.append)
    assert [line.considered for line in lines] == [4, 4]
    assert all(line.variant and line.strategy.holds(line.variant) for line in lines)
    assert heard[-1] == "measured 8/8 variants"


def test_times_on_each_distribution_come_from_one_task_each(monkeypatch, recording):
    class FakePool:
        def __init__(self, size, environment):
            self.keys = []

        def submit(self, key, task, timeout_s):
            self.keys.append((key, task))

        def next(self):
            key, task = self.keys.pop(0)
            if key == "sink":
                return key, WorkerError("lost")
            return key, {text: (2.0 + place, 0.1) for place, text in enumerate(task.arguments[1])}

        def close(self):
            self.keys.clear()

    monkeypatch.setattr("ktune.report.compare.Pool", FakePool)
    space = load_space("attention")
    lines = replay_lines(recording, space, TIMED, strategies_of(space, "rescale", ["fa1", "fa2"]))
    time_lines(lines, TIMED, ["normal", "sink"], 0, lambda text: None)
    assert [line.latency_ms for line in lines] == [2.0, 3.0]
    assert "not timed: lost" in lines[0].observations["sink"].detail


def test_axes():
    space = load_space("attention")
    assert {s.name for s in strategies_of(space, "rescale", ["fa4"])} >= {"fa4_row", "fa4_tile"}
    assert strategies_of(space, "normalization") == [
        Strategy("deferred", {"normalization": "deferred"}),
        Strategy("per_tile", {"normalization": "per_tile"}),
    ]


def test_usual_problem_is_one_that_most_strategies_can_do():
    space = load_space("softmax")
    problem = usual_problem(space, strategies_of(space, "rescale"), H200, None)
    assert problem.size("n") > 2048


def test_small_problems_are_small_and_alike():
    large = "attention batch=4 heads=32 heads_kv=8 seqlen_q=8192 head_dim=128 causal=upper_left"
    small = small_problem(parse_problem(large))
    assert math.prod(small.size(n) for n in ("batch", "heads", "seqlen_q")) <= 1024
    assert (small["causal"], small["head_dim"], small["dtype"]) == ("upper_left", 128, "float16")
    assert small == parse_problem(small.text)


def test_command_on_a_recording(recorded, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.svg"
    result = run(
        "compare", "rescale", "--target", str(recorded), "--problem", TIMED.text,
        "--strategies", "fa1,fa2,fa4_row", "--distributions", "normal,falling",
        "--json", "--plot", str(plot),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["schema"] == 1
    (comparison,) = document["comparisons"]
    assert comparison["target"]["replayed_from"] == "NVIDIA H200, 2026-01-02"
    assert comparison["observed"]["interpreted"]
    assert [s["name"] for s in comparison["strategies"]] == ["fa1", "fa2", "fa4_row"]
    for strategy in comparison["strategies"]:
        falling = strategy["distributions"]["falling"]
        assert falling["rescales"]["rows"] == 0
        assert falling["error"] <= falling["limit"]
    assert "<svg" in plot.read_text()
    assert "replayed" in result.stderr


def test_command_for_softmax_has_no_counts(tmp_path):
    problem = parse_problem("softmax m=8 n=4097")
    space = load_space("softmax")
    outcomes = {v.text: Measurement("ok", 1.0, 0.1, 9) for v in space.variants(problem, H200)}
    recording = Recording("softmax", H200, "p", "2026-01-02", {}, {}, "x")
    recording.problems[problem.text] = RecordedProblem(outcomes)
    recording.write(tmp_path / "softmax.json")
    result = run(
        "compare", "rescale", "--op", "softmax", "--target", str(tmp_path / "softmax.json"),
        "--strategies", "one_tile,safe", "--distributions", "rising",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "replayed from NVIDIA H200, 2026-01-02" in result.stdout
    assert "rescales of possible" not in result.stdout
    assert "FAILS" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rescal"], "did you mean 'rescale'"),
        (["rescale", "--strategies", "fa9"], "has no 'fa9'"),
        (["rescale", "--distributions", "odd"], "no input distribution 'odd'"),
        (["rescale", "--plot", "x.txt"], "cannot draw to x.txt"),
        (["rescale", "--target", "no-such-file"], "no target 'no-such-file'"),
        (["rescale", "--op", "nothing"], "no search space 'nothing'"),
    ],
)
def test_wrong_use_exits_2_and_says_what_is_known(arguments, says):
    result = run("compare", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""


def test_plot_without_matplotlib_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("ktune.report.plot.has_matplotlib", lambda: False)
    result = run("compare", "rescale", "--plot", "x.svg")
    assert result.exit_code == 2
    assert "ktune-kernels[plot]" in result.stderr


def test_live_without_a_gpu_exits_3(monkeypatch):
    monkeypatch.setattr("ktune.device.cuda_available", lambda: False)
    assert run("compare", "rescale", "--target", "live").exit_code == 3
