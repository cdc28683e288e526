"""Cases from public bug reports that need no GPU: wrong variants, bad timings, kept studies."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import one_search

from ktune.bench.check import check_cases, check_module, make_case
from ktune.bench.measurement import Measurement
from ktune.device import COMPILE_TARGETS
from ktune.operations import operation, parse_problem
from ktune.operations.attention import compose
from ktune.search.trials.storage import open_storage
from ktune.search.winner import choose
from ktune.space.space import parse_space
from ktune.target.target import Spent

CPU = torch.device("cpu")
DEVICE = COMPILE_TARGETS["sm_90"]
INF, NAN = math.inf, math.nan

# --- C112: wrong variants ---------------------------------------------------------------------


def right_softmax(x, out):
    out.copy_(torch.softmax(x.float(), -1))


def right_attention(q, k, v, out, lse, scale):
    result, log = compose(q, k, v, scale, "none", q.dtype)
    out.copy_(result)
    if lse is not None:
        lse.copy_(log)


def half(right):
    """Return a launch that leaves the second half of the output's rows as they were."""

    def launch(*arguments):
        at = 1 if len(arguments) == 2 else 3
        out, whole = arguments[at], torch.empty_like(arguments[at])
        right(*arguments[:at], whole, *arguments[at + 1 :])
        rows = out.shape[-2] // 2
        out[..., :rows, :] = whole[..., :rows, :]

    return launch


def nothing(*arguments):
    """Write nothing."""


def zeros(*arguments):
    arguments[1 if len(arguments) == 2 else 3].zero_()


def off(right):
    def launch(*arguments):
        right(*arguments)
        arguments[1 if len(arguments) == 2 else 3].mul_(1.1)

    return launch


def ragged_softmax(x, out):
    right_softmax(x, out)
    if x.shape[-1] % 64:
        out[..., -1] = 0


def ragged_attention(q, k, v, out, lse, scale):
    whole = k.shape[2] // 64 * 64
    right_attention(q, k[:, :, :whole], v[:, :, :whole], out, lse, scale)


SOFTMAX = "softmax m=64 n=384 dtype=float16"
ATTENTION = "attention heads=4 heads_kv=2 seqlen_q=128 head_dim=64 dtype=float16"
WRONG = {
    "softmax half": (SOFTMAX, half(right_softmax)),
    "softmax nothing": (SOFTMAX, nothing),
    "softmax zeros": (SOFTMAX, zeros),
    "softmax off by 0.1": (SOFTMAX, off(right_softmax)),
    "softmax wrong if ragged": (SOFTMAX, ragged_softmax),
    "attention half": (ATTENTION, half(right_attention)),
    "attention nothing": (ATTENTION, nothing),
    "attention zeros": (ATTENTION, zeros),
    "attention off by 0.1": (ATTENTION, off(right_attention)),
    "attention wrong if ragged": (ATTENTION, ragged_attention),
}


def verdicts(text, launch):
    """Return the verdict on every case that a variant of a problem is checked on."""
    module = SimpleNamespace(launch=launch)
    cases = (make_case(*case, CPU) for case in check_cases(parse_problem(text)))
    return [check_module(module, {}, case) for case in cases]


@pytest.mark.parametrize(("text", "launch"), WRONG.values(), ids=WRONG)
def test_c112_wrong_variants_never_pass(text, launch):
    found = verdicts(text, launch)
    assert not all(v.passed for v in found)
    worst = next(v for v in found if not v.passed)
    assert worst.error > worst.limit and worst.detail.startswith("out: error")
    if launch in (ragged_softmax, ragged_attention):
        assert found[-1].passed, "wrong on the small, ragged problems alone"
    else:
        assert not found[-1].passed


@pytest.mark.parametrize(
    ("text", "launch"), [(SOFTMAX, right_softmax), (ATTENTION, right_attention)]
)
def test_c112_right_ones_pass(text, launch):
    assert all(v.passed for v in verdicts(text, launch))


def test_c112_nan_of_the_reference_excuses_nothing():
    """A row that must be NaN and is not fails, and so does NaN where a number must be."""
    case = make_case(parse_problem("softmax m=9 n=100 dtype=float32"), "adversarial", CPU)
    assert case.expected["out"].isnan().any()

    def no_nan(x, out):
        out.copy_(torch.softmax(x, -1).nan_to_num(0))

    def all_nan(x, out):
        out.fill_(NAN)

    for launch in (no_nan, all_nan):
        verdict = check_module(SimpleNamespace(launch=launch), {}, case)
        assert not verdict.passed and verdict.error == INF


# --- C119, C124, C142: searches against a target without a GPU ---------------------------------

SPACE = """
schema: 1
operation: softmax
summary: For tests.
parameters:
  template: {{choices: [one_tile]}}
  block_m: {{choices: {blocks}}}
  eviction: {{choices: [none]}}
launch:
  num_warps: {{choices: [1, 2, 4]}}
problems:
  default: [{{m: 4096, n: 64}}]
budget: {{trials: 50, timeout_s: 60}}
"""
A, B = (parse_problem(f"softmax m=4096 n={n}") for n in (64, 60))


def space(blocks=(1, 2, 4, 16)):
    return parse_space(SPACE.format(blocks=list(blocks)), "tests.yaml")


class FakeTarget:
    """Answers from a function of the variant's values; counts what it was asked."""

    device, protocol, measured = DEVICE, "test", "2026-01-31"
    versions, roofs, replayed_from, capacity = {}, {}, None, 1

    def __init__(self, latency):
        self.latency, self.asked, self.queue, self.spent = latency, [], [], Spent()

    def submit(self, problem, variant):
        self.asked.append((problem, variant.text))
        self.queue.append((problem, variant))

    def now(self):
        return 0.0

    def next(self):
        problem, variant = self.queue.pop(0)
        return problem, variant, Measurement("ok", latency_ms=self.latency(variant.values))

    def close(self):
        pass


def search(storage, problem=A, blocks=(1, 2, 4, 16), latency=lambda values: 1.0, trials=50):
    target = FakeTarget(latency)
    outcome = one_search(space(blocks), problem, target, open_storage(storage), trials)
    return outcome, target.asked


@pytest.fixture
def storage(tmp_path):
    return f"sqlite:///{tmp_path / 'studies.sqlite3'}"


@pytest.mark.parametrize("bad", [NAN, INF, -INF, -1.0, 0.0, None])
def test_c119_a_time_that_is_no_positive_number_never_wins(bad, storage):
    assert Measurement("ok", latency_ms=bad).sane().status == "bad_timing"
    stored = Measurement.from_dict({"status": "ok", "latency_ms": bad})
    assert not stored.ok and stored.latency_ms is None and str(bad) in stored.detail

    def latency(values):
        return bad if values["block_m"] == 2 else 1.0 + values["block_m"]

    outcome, asked = search(storage, latency=latency)
    assert len(asked) == 12 == len(outcome.measurements)
    texts = {m.status: {t for t, o in outcome.measurements.items() if o.status == m.status}
             for m in outcome.measurements.values()}  # fmt: skip
    assert len(texts["bad_timing"]) == 3 and all("block_m=2" in t for t in texts["bad_timing"])
    assert len(outcome.best()) == 9 and "block_m=1 " in outcome.best()[0][0]
    again, asked = search(storage, latency=latency)
    assert not asked, "failed ones are stored too"
    assert {t: m.status for t, m in again.measurements.items()} == {
        t: m.status for t, m in outcome.measurements.items()
    }


def test_c119_nothing_with_a_time_has_no_winner():
    outcome, _ = search("memory", latency=lambda values: NAN)
    assert outcome.best() == [] and choose("default", {}, outcome.measurements) is None


@pytest.mark.parametrize("change", [(1, 2, 4, 8, 16), (1, 16)], ids=["added", "removed"])
def test_c124_changed_space_keeps_what_was_measured(storage, change):
    before, _ = search(storage)
    after, asked = search(storage, blocks=change)
    assert {text for _, text in asked} == after.measurements.keys() - before.measurements.keys()
    legal = {v.text for v in space(change).variants(A, DEVICE)}
    assert after.measurements.keys() == legal


def test_c142_another_problem_and_a_wider_space_measure_only_what_is_new(storage):
    first, asked = search(storage, A)
    assert len(asked) == 12
    _, asked = search(storage, B)
    assert len(asked) == 12 and {problem for problem, _ in asked} == {B}
    again, asked = search(storage, A, blocks=(1, 2, 4, 8, 16))
    assert len(asked) == 3 and all("block_m=8 " in text for _, text in asked)
    assert first.measurements.items() <= again.measurements.items()


def test_c126_storage_in_a_folder_with_spaces_and_other_letters(tmp_path):
    url = f"sqlite:///{tmp_path / 'zwölf Köpfe # 1' / 'studies.sqlite3'}"
    assert len(search(url)[1]) == 12
    assert search(url)[1] == []


KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
import test_cases

def latency(values):
    if values["num_warps"] == 4 and values["block_m"] == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0

test_cases.search({storage!r}, latency=latency)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_c122_a_killed_search_goes_on_where_it_was(storage):
    code = KILLED.format(path=sys.path, storage=storage)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    outcome, asked = search(storage)
    assert 1 <= len(asked) < 12 and len(outcome.measurements) == 12


# --- C132, C156: the process around it ---------------------------------------------------------

NO_GPU = """
import torch
torch.cuda.is_available = lambda: False
from ktune.cli import cli
cli(prog_name="ktune")
"""


def ktune(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", NO_GPU, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_c156_without_a_gpu_live_search_says_so_and_help_works():
    done = ktune("search", "softmax", "--target", "live", "--problem", "m=4 n=32")
    assert done.returncode == 3 and "no GPU" in done.stderr and "Traceback" not in done.stderr
    done = ktune("--help")
    assert done.returncode == 0 and "search" in done.stdout


USE = """
import torch, ktune
assert ktune.softmax(torch.zeros(1, 4), -1).tolist() == [[0.25] * 4]
"""


@pytest.mark.parametrize("home", [None, "/", "/dev/null"])
def test_c132_runtime_needs_no_home(home):
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("KTUNE", "XDG", "HOME"))
    }
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    if home:
        environment["HOME"] = home
    done = subprocess.run(
        [sys.executable, "-c", USE], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_c132_kernels_are_written_elsewhere_if_the_cache_is_a_file(tmp_path, monkeypatch):
    from ktune.codegen import render
    from ktune.codegen.module import write_module

    blocker = tmp_path / "blocker"
    blocker.write_text("a file")
    monkeypatch.setenv("KTUNE_CACHE_DIR", str(blocker))
    problem = parse_problem("attention heads=1 seqlen_q=64 head_dim=64")
    variant = operation("attention").default_variant(problem, DEVICE)
    source = render(variant, problem)
    path = write_module(source)
    assert path.read_text(encoding="utf-8") == source.text
    assert blocker.read_text() == "a file" and tmp_path not in path.parents
