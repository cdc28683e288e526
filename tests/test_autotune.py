"""``triton.autotune`` over a space's variants: the real tuner, in the interpreter and compiling."""

from __future__ import annotations

import os
import time

import pytest
import torch
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources

from ktune.bench import autotune
from ktune.bench.autotune import TUNE, Tuning, autotune_problems, autotuned, kernel_name, tune
from ktune.bench.worker import Worker, WorkerTimeout
from ktune.codegen import load_module, render
from ktune.device import COMPILE_TARGETS
from ktune.operations import operation, parse_problem
from ktune.space import load_space
from ktune.variant import Variant

H200 = COMPILE_TARGETS["sm_90"]
CPU = torch.device("cpu")
ROWS = parse_problem("softmax m=8 n=300 dtype=float32")
HEADS = parse_problem("attention heads=2 seqlen_q=16 head_dim=8 dtype=float32")
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


def kernels(problem, device=H200):
    """Return a problem's variants by what they render to, the kernel with most options first."""
    groups = {}
    for variant in load_space(problem.op).variants(problem, device):
        groups.setdefault(render(variant, problem).id, []).append(variant)
    return sorted(groups.values(), key=len, reverse=True)


class Clock:
    """A benchmark that calls once and says what it is told; an error in its list is raised."""

    def __init__(self, *answers):
        self.answers, self.calls = list(answers), 0

    def __call__(self, call, quantiles):
        assert quantiles == (0.5, 0.2, 0.8)
        call()
        self.calls += 1
        answer = self.answers.pop(0) if self.answers else 1.0
        if isinstance(answer, Exception):
            raise answer
        return [answer, answer, answer]


@interpreted
class TestWrapping:
    def test_the_real_tuner_chooses_and_the_launch_computes(self):
        group = kernels(ROWS)[0]
        assert len(group) > 2
        module = load_module(render(group[0], ROWS))
        kernel = module.softmax_one_tile
        op = operation("softmax")
        inputs = op.make_inputs(ROWS, "normal", 0, CPU)
        outputs = op.make_outputs(ROWS, inputs)
        clock = Clock(3.0, 1.0, 2.0)
        with autotuned(module, group, clock) as tuner:
            assert isinstance(module.softmax_one_tile, Autotuner)
            assert not tuner.cache_results
            module.launch(*op.arguments(ROWS, inputs, outputs))
            assert clock.calls == len(group)
            module.launch(*op.arguments(ROWS, inputs, outputs))
            assert clock.calls == len(group), "one tuning is enough"
        assert module.softmax_one_tile is kernel
        assert tuner.best_config.all_kwargs() == group[1].options
        assert [config.all_kwargs() for config in tuner.configs_timings] == [
            variant.options for variant in group
        ]
        torch.testing.assert_close(outputs["out"], torch.softmax(inputs["x"], -1))

    @pytest.mark.parametrize("problem", [ROWS, HEADS], ids=["softmax", "attention"])
    def test_every_variant_is_timed(self, problem):
        groups = [kernels(problem)[0], kernels(problem)[-1]]
        variants = [variant for group in groups for variant in group]
        best = len(groups[0])  # the first of the second kernel
        clock = Clock(*(0.5 if i == best else 1.0 + i for i in range(len(variants))))
        tuning = tune(problem, variants, CPU, None, clock)
        assert (tuning.variants, tuning.sources) == (len(variants), 2)
        assert tuning.timings.keys() == {variant.text for variant in variants}
        assert tuning.best == variants[best].text
        assert tuning.timings[tuning.best] == 0.5
        assert not (tuning.failed or tuning.fatal or tuning.unreached or tuning.stopped)
        assert tuning.seconds.keys() == {"render", "compile", "benchmark", "other"}
        assert tuning.seconds["compile"] > 0

    def test_a_single_configuration_is_timed_too(self):
        variant = kernels(ROWS)[0][0]
        tuning = tune(ROWS, [variant], CPU, None, Clock(0.25))
        assert tuning.timings == {variant.text: 0.25}

    def test_problems_tune_anew(self):
        group = kernels(ROWS)[0]
        first = tune(ROWS, group, CPU, None, Clock(0.5))
        second = tune(ROWS, group, CPU, None, Clock(1.0, 0.5))
        assert (first.best, second.best) == (group[0].text, group[1].text)


@interpreted
class TestFailures:
    def test_what_triton_expects_and_what_ends_it(self):
        group = kernels(ROWS)[0]
        answers = [OutOfResources(300, 200, "shared memory"), RuntimeError("odd\nmore"), 0.5]
        tuning = tune(ROWS, group, CPU, None, Clock(*answers))
        assert tuning.failed.keys() == {group[0].text, group[1].text}
        assert "out of resource" in tuning.failed[group[0].text]
        assert tuning.fatal == [group[1].text]
        assert tuning.failed[group[1].text] == "RuntimeError: odd"
        assert len(tuning.timings) == len(group) - 2
        assert tuning.best == group[2].text

    def test_a_kernel_whose_configurations_all_fail_ends_nothing(self):
        broken, sound = kernels(ROWS)[:2]
        answers = [OutOfResources(1, 0, "registers")] * len(broken)
        tuning = tune(ROWS, [*broken, *sound], CPU, None, Clock(*answers))
        assert tuning.failed.keys() == {variant.text for variant in broken}
        assert tuning.timings.keys() == {variant.text for variant in sound}
        assert tuning.fatal == []

    def test_a_launch_that_fails_before_it_tunes_is_recorded(self, monkeypatch):
        group = kernels(ROWS)[0]
        module = load_module(render(group[0], ROWS))

        def launch(*arguments, **options):
            if not options:  # the kernel stays in sight
                raise ValueError("no grid")
            module.softmax_one_tile[(1,)](*arguments, **options)

        launch = type(launch)(
            launch.__code__, {**module.__dict__, "module": module}, "launch", None,
            launch.__closure__,
        )  # fmt: skip
        monkeypatch.setattr(module, "launch", launch)
        tuning = tune(ROWS, group, CPU, None, Clock())
        assert tuning.fatal == [variant.text for variant in group]
        assert set(tuning.failed.values()) == {"ValueError: no grid"}

    def test_a_module_without_a_kernel(self):
        module = load_module(render(kernels(ROWS)[0][0], ROWS))
        assert kernel_name(module) == "softmax_one_tile"
        empty = type(module)("empty")
        empty.launch = lambda: None
        with pytest.raises(ValueError, match="launch starts none"):
            kernel_name(empty)

    def test_a_variant_that_does_not_render(self):
        group = [*kernels(ROWS)[0], Variant.parse("softmax", "no_such_template num_warps=4")]
        tuning = tune(ROWS, group, CPU, None, Clock())
        assert list(tuning.failed) == ["no_such_template num_warps=4"]
        assert len(tuning.timings) == len(group) - 1

    def test_a_gpu_that_no_longer_answers_stops_it(self, monkeypatch):
        def sticky(error):
            raise autotune.StoppedError("illegal address") from error

        monkeypatch.setattr(autotune, "_raise_if_sticky", sticky)
        first, second = kernels(ROWS)[:2]
        tuning = tune(ROWS, [*first, *second], CPU, None, Clock(1.0, RuntimeError("bang")))
        assert tuning.stopped == "illegal address"
        assert list(tuning.timings) == [first[0].text], "what was timed before is kept"
        assert tuning.fatal == [first[1].text]
        assert tuning.unreached == [variant.text for variant in [*first[2:], *second]]


@interpreted
class TestLimit:
    def test_nothing_is_started_after_it(self):
        variants = [variant for group in kernels(ROWS)[:2] for variant in group]
        tuning = tune(ROWS, variants, CPU, 0.0, Clock())
        assert tuning.unreached == [variant.text for variant in variants]
        assert (tuning.best, tuning.timings, tuning.failed) == (None, {}, {})

    def test_it_holds_within_a_kernel(self):
        group = kernels(ROWS)[0]

        def slow(call, quantiles):
            call()
            time.sleep(0.6)
            return [1.0] * 3

        tuning = tune(ROWS, group, CPU, 0.5, slow)
        assert list(tuning.timings) == [group[0].text]
        assert len(tuning.unreached) == len(group) - 1
        assert tuning.seconds["benchmark"] >= 0.6


TASKS = """
import torch
from ktune.bench.autotune import tune
from ktune.codegen.compile import _captured_launches
from ktune.device import COMPILE_TARGETS
from ktune.operations import parse_problem
from ktune.variant import Variant

def compile_only(problem, texts):
    asked = parse_problem(problem)
    variants = [Variant.parse(asked.op, text) for text in texts]
    with _captured_launches(COMPILE_TARGETS["sm_90"]) as kernels:
        once = lambda call, quantiles: (call(), [1.0] * 3)[1]
        tuning = tune(asked, variants, torch.device("meta"), None, once)
    options = [(k.metadata.num_warps, k.metadata.num_stages) for k in kernels]
    return tuning.to_dict(), options
"""


@pytest.mark.parametrize(
    "text", ["softmax m=64 n=1000", "attention heads=2 seqlen_q=256 head_dim=64"]
)
def test_the_tuner_compiles_each_configuration_for_a_gpu(text, tmp_path, monkeypatch):
    """The compiler sees exactly the variants' launch options, whatever ``launch`` passes."""
    (tmp_path / "tests_autotune_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    problem = parse_problem(text)
    group = kernels(problem)[0][:3]
    worker = Worker({"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")})
    texts = [variant.text for variant in group]
    try:
        seen, compiled = worker.call(
            "tests_autotune_tasks:compile_only", problem.text, texts, timeout_s=120
        )
    finally:
        worker.kill()
    tuning = Tuning.from_dict(seen)
    assert list(tuning.timings) == texts, tuning.failed
    wanted = [(v.options["num_warps"], v.options.get("num_stages", 3)) for v in group]
    assert set(compiled) == set(wanted)


class FakeWorker:
    """Stands in for the process; its class holds what to answer."""

    answers: dict
    log: list
    sleep_s: float

    def __init__(self, environment):
        self.log.append(("start", environment))

    def call(self, function, problem, variants, where, limit_s, timeout_s):
        assert function == TUNE
        self.log.append((problem, where, limit_s, timeout_s))
        time.sleep(self.sleep_s)
        answer = self.answers[problem]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self):
        self.log.append("kill")


class TestProblems:
    @pytest.fixture
    def worker(self, monkeypatch):
        FakeWorker.answers, FakeWorker.log, FakeWorker.sleep_s = {}, [], 0.0
        monkeypatch.setattr(autotune, "Worker", FakeWorker)
        return FakeWorker

    def test_one_process_from_a_cold_cache(self, worker, tmp_path):
        tuned = Tuning("p", 2, 1, {"a": 1.0, "b": 0.5}, seconds={"compile": 1.0})
        worker.answers = {"p": tuned.to_dict()}
        lines = []
        seen, seconds = autotune_problems({"p": ["a", "b"]}, "cuda:0", tmp_path, tell=lines.append)
        assert seen == {"p": tuned}
        assert seen["p"].ranked == ["b", "a"]
        assert seconds >= 0
        assert lines == ["triton.autotune 1/1 p: 2 variants"]
        (_, environment), call, end = worker.log
        assert environment["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
        assert environment["TRITON_CACHE_AUTOTUNING"] == "0"
        assert call[:3] == ("p", "cuda:0", None)
        assert end == "kill"

    def test_a_hang_costs_its_problem_only(self, worker, tmp_path):
        tuned = Tuning("q", 1, 1, {"b": 0.5})
        worker.answers = {"p": WorkerTimeout("out of time"), "q": tuned.to_dict()}
        seen, _ = autotune_problems({"p": ["a"], "q": ["b"]}, "cuda:0", tmp_path)
        assert (seen["p"].stopped, seen["p"].unreached) == ("out of time", ["a"])
        assert seen["q"] == tuned

    def test_no_time_left_is_said(self, worker, tmp_path):
        worker.answers = {"p": Tuning("p", 1, 1, {"a": 1.0}).to_dict()}
        worker.sleep_s = 0.3
        seen, seconds = autotune_problems(
            {"p": ["a"], "q": ["b", "c"]}, "cuda:0", tmp_path, limit_s=0.2
        )
        assert seen["q"] == Tuning("q", 2, unreached=["b", "c"])
        assert 0.1 < worker.log[1][2] <= 0.2
        assert seconds >= 0.3


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    """Run with TRITON_INTERPRET=0 or 1: the worker compiles in any case."""
    from ktune.device import device_of

    problems = [parse_problem("softmax m=64 n=128"), parse_problem("softmax m=32 n=300")]
    device = device_of(0)
    space = load_space("softmax")
    variants = {p.text: [v.text for v in space.variants(p, device)] for p in problems}
    seen, seconds = autotune_problems(variants, "cuda:0", tmp_path)
    for text, tuning in seen.items():
        assert len(tuning.timings) == len(variants[text]), tuning.failed
        assert 0 < tuning.timings[tuning.best] < 1
        assert tuning.seconds["compile"] > 0
        assert tuning.seconds["benchmark"] > 0
        assert not (tuning.unreached or tuning.stopped)
    assert seconds > sum(tuning.total_s for tuning in seen.values())
    assert any((tmp_path / "triton").rglob("*.cubin"))
