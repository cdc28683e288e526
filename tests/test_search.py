"""The search: what it asks, what it remembers, what it stores, and that nothing ends it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import optuna
import pytest
from helpers import Silent

from ktune.bench.measurement import Measurement
from ktune.codegen import template_digest
from ktune.device import Device
from ktune.errors import RecordingError, StorageError
from ktune.operations import operation, parse_problem
from ktune.search.campaign import Campaign
from ktune.search.effort import Effort
from ktune.search.sampling.parameters import Axis
from ktune.search.study import Ground
from ktune.search.trials.storage import open_storage
from ktune.search.winner import choose
from ktune.space import Parameter, load_space
from ktune.table import read_table, update_table
from ktune.target.recording import RecordedProblem, Recording, find_recording, read_recording
from ktune.target.replay import ReplayTarget
from ktune.target.target import Spent
from ktune.variant import Variant

H200 = Device("NVIDIA H200", "cuda", "sm_90", 132, 232_448, 60 << 20, 140)
PROBLEM = parse_problem("softmax m=16384 n=4096")


def cost(variant: Variant) -> float:
    """A made-up time in ms: best at 4 rows and 4 warps, streaming twice as slow."""
    values = variant.values
    if values["template"] == "streaming":
        return 2.0 + 0.01 * float(values["num_warps"])
    distance = abs(math.log2(values["block_m"]) - 2) + abs(math.log2(values["num_warps"]) - 2)
    return 1.0 + 0.1 * distance


class FakeTarget:
    """Answers by ``cost``; counts what it is asked."""

    def __init__(self, capacity: int = 3, outcome=None) -> None:
        self.device, self.protocol, self.measured = H200, "fake", "2026-01-01"
        self.versions, self.roofs, self.replayed_from = {}, {}, None
        self.capacity, self.asked, self._queue = capacity, [], deque()
        self.spent = Spent()
        self._outcome = outcome or (lambda variant: Measurement("ok", cost(variant), 0.001, 20))

    def now(self):
        return float(len(self.asked))

    def submit(self, problem, variant):
        self.asked.append(variant.text)
        self._queue.append((problem, variant))

    def next(self):
        problem, variant = self._queue.popleft()
        return problem, variant, self._outcome(variant)

    def finals(self, problem, variants):
        return {variant.text: [cost(variant)] * 20 for variant in variants}

    def verify(self, problem, variant):
        return ""

    def close(self):
        pass


@pytest.fixture
def space():
    return load_space("softmax")


@pytest.fixture
def storage():
    return open_storage("memory")


def campaign(space, target, storage, table=None, trials=20, problems=(PROBLEM,), **effort):
    def sink(entries, device):
        if table:
            update_table(table, entries, [device])

    work = [(space, problem) for problem in problems]
    plan = Effort(trials=trials, **effort)
    return list(Campaign(target, storage, sink, plan, Silent()).run(work))


def search(space, target, storage, trials=20, seed=0, problem=PROBLEM, **effort):
    options = {"trials": trials, "seed": seed, "problems": [problem], **effort}
    return campaign(space, target, storage, **options)[0].outcome


def test_the_default_is_measured_first_then_the_seeds(space, storage):
    target = FakeTarget()
    search(space, target, storage)
    seeds = [variant.text for variant in space.seeds_for(PROBLEM, H200)]
    default = operation("softmax").default_variant(PROBLEM, H200).text
    first = list(dict.fromkeys([default, *seeds]))
    assert target.asked[: len(first)] == first


def test_nothing_is_measured_twice_and_all_is_legal(space, storage):
    target = FakeTarget()
    outcome = search(space, target, storage, trials=50)
    legal = {variant.text for variant in space.variants(PROBLEM, H200)}
    assert len(target.asked) == len(set(target.asked)) == outcome.measured == 50
    assert set(target.asked) <= legal


def test_a_space_smaller_than_the_budget_is_measured_whole(space, storage):
    target = FakeTarget()
    outcome = search(space, target, storage, trials=100_000)
    assert len(target.asked) == outcome.legal == len(space.variants(PROBLEM, H200))


def test_the_sampler_finds_the_best_of_a_smooth_space_early(space, storage):
    target = FakeTarget(capacity=1)
    outcome = search(space, target, storage, trials=40)
    legal = space.variants(PROBLEM, H200)
    assert outcome.best()[0][1].latency_ms == min(map(cost, legal))


def test_same_seed_same_search(space):
    runs = []
    for _ in range(2):
        target = FakeTarget(capacity=1)
        search(space, target, open_storage("memory"), trials=30, seed=7)
        runs.append(target.asked)
    assert runs[0] == runs[1]


def test_bad_outcomes_never_win_and_never_fail(space, storage):
    bad = iter(["wrong", "crashed", "compile_error", "over_limit", "timeout"] * 4)

    def outcome(variant):
        if variant.values["template"] == "one_tile" and (status := next(bad, None)):
            return Measurement(status, detail="made up")
        return Measurement("ok", cost(variant), 0.001, 20)

    result = search(space, FakeTarget(outcome=outcome), storage, trials=40, sampler="random")
    assert all(m.ok for _, m in result.best())
    assert {m.status for m in result.measurements.values()} >= {"wrong", "timeout", "ok"}
    study = optuna.load_study(study_name=optuna.get_all_study_names(storage)[0], storage=storage)
    assert not study.get_trials(states=(optuna.trial.TrialState.FAIL,))


@pytest.mark.parametrize("latency", [math.nan, math.inf, -1.0, 0.0, None])
def test_c119_a_timer_that_lies_never_wins(space, storage, latency):
    def outcome(variant):
        return Measurement("ok", latency, 0.0, 20)

    result = search(space, FakeTarget(outcome=outcome), storage, trials=5)
    assert not result.best()
    assert {m.status for m in result.measurements.values()} == {"bad_timing"}


def test_a_second_run_measures_nothing_again(space, tmp_path):
    url = f"sqlite:///{tmp_path / 'a folder é' / 'studies.sqlite3'}"
    first, second, third = FakeTarget(), FakeTarget(), FakeTarget()
    search(space, first, open_storage(url), trials=15)
    again = search(space, second, open_storage(url), trials=15)
    search(space, third, open_storage(url), trials=25)
    assert len(first.asked) == 15
    assert second.asked == [] and len(again.measurements) == 15
    assert len(third.asked) == 10 and not set(third.asked) & set(first.asked)


def test_c142_widening_a_space_keeps_what_was_measured(space, storage, tmp_path):
    rule = "constraints:\n  - {require: num_warps <= 4, because: made up}\n"
    text = space_file().read_text(encoding="utf-8").replace("constraints:\n", rule, 1)
    narrow_file = tmp_path / "softmax.yaml"
    narrow_file.write_text(text)
    narrow, first, second = load_space(str(narrow_file)), FakeTarget(), FakeTarget()
    assert narrow.id != space.id
    search(narrow, first, storage, trials=1000)
    wide = search(space, second, storage, trials=1000)
    assert first.asked and second.asked
    assert not set(first.asked) & set(second.asked)
    assert len(wide.measurements) == wide.legal


def space_file():
    from ktune.resources import shipped

    return shipped("search_spaces") / "softmax.yaml"


def test_another_device_and_an_edited_template_share_nothing(space, storage, monkeypatch):
    search(space, FakeTarget(), storage, trials=10)
    other = FakeTarget()
    other.device = Device("NVIDIA H100", "cuda", "sm_90", 132, 232_448, 50 << 20, 80)
    search(space, other, storage, trials=10)
    assert len(other.asked) == 10
    edited = FakeTarget()
    key = Ground.key
    monkeypatch.setattr(Ground, "key", lambda self, v: "edited " + key(self, v))
    search(space, edited, storage, trials=10)
    assert len(edited.asked) == 10


def test_a_storage_that_cannot_be_opened_says_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="--storage"):
        open_storage(f"sqlite:///{tmp_path / 'file' / 'studies.sqlite3'}")


def test_the_winner_is_stored_with_its_margin(space, storage, tmp_path):
    table = tmp_path / "table.json"
    (result,) = campaign(space, FakeTarget(), storage, table, trials=60)
    entry = read_table(table).get(H200, PROBLEM)
    default = cost(result.default)
    assert entry is not None and result.entry == entry
    assert (
        cost(entry.variant)
        == entry.provenance.latency_ms
        == min(cost(v) for v in space.variants(PROBLEM, H200))
    )
    assert entry.provenance.margin == pytest.approx(1 - entry.provenance.latency_ms / default)


def test_the_default_is_stored_unless_beaten_beyond_the_noise():
    default, other = "a", "b"
    level = [1.0, 1.1] * 10
    noisy = {default: level, other: [1.0, 1.09] * 10}
    assert choose(default, noisy, {}).text == default
    sure = {default: level, other: [0.9, 0.99] * 10}
    winner = choose(default, sure, {})
    assert winner.text == other and winner.margin == pytest.approx(0.1, abs=0.01)
    assert choose(default, {other: [1.0]}, {}).text == other  # a default without a time
    assert choose(default, {}, {}) is None


def test_single_samples_must_win_by_more_than_their_spread():
    measured = {"b": Measurement("ok", 0.95, 0.1, 20)}
    assert choose("a", {"a": [1.0], "b": [0.95]}, measured).text == "a"
    assert choose("a", {"a": [1.0], "b": [0.8]}, measured).text == "b"


@pytest.mark.parametrize(
    ("choices", "name", "low"),
    [
        (["a", "b"], "x", None),
        ([16, 32, 64], "log2(x)", 4),
        ([1, 2, 3], "x", 1),
        ([0.0, 4.0, 8.0], "index(x)", 0),
        ([96, 128, 300], "index(x)", 0),
        ([False, True], "x", None),
    ],
)
def test_axes_keep_the_order_of_sizes(choices, name, low):
    axis = Axis.of(Parameter("x", tuple(choices), None, False))
    assert (axis.name, axis.low) == (name, low)
    assert [axis.decode(axis.encode(value)) for value in choices] == choices


def recording(space, problems=(PROBLEM,)) -> Recording:
    made = Recording("softmax", H200, "fake", "2026-01-01", {"torch": "2.11"}, {}, "x")
    for problem in problems:
        outcomes = {
            v.text: Measurement("ok", cost(v), 0.001, 20) for v in space.variants(problem, H200)
        }
        default = operation("softmax").default_variant(problem, H200).text
        finals = {"baseline:torch": [3.0, 3.1], default: [1.3, 1.31]}
        made.problems[problem.text] = RecordedProblem(outcomes, finals, {"too large": 3})
    return made


def test_a_recording_reads_back_and_replays(space, storage, tmp_path):
    path = tmp_path / "r.json"
    recording(space).write(path)
    read = read_recording(path)
    assert read.problems[PROBLEM.text].outcomes == recording(space).problems[PROBLEM.text].outcomes
    (result,) = campaign(space, ReplayTarget(read), storage, tmp_path / "t.json")
    assert result.baselines == {"torch": 3.05}
    assert result.entry.provenance.replayed_from == "NVIDIA H200, 2026-01-01"
    read.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_a_recording_knows_when_the_templates_have_changed(space):
    made = recording(space)
    assert made.stale
    made.templates = template_digest("softmax")
    assert not made.stale


@pytest.mark.parametrize("text", ["", "[]", "null", '{"kind": "ktune-recording"}', '{"schema": 9}'])
def test_a_damaged_recording_is_a_clear_error(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(RecordingError, match=r"r\.json"):
        read_recording(path)


def test_what_was_not_recorded_is_refused_by_name(space, tmp_path):
    with pytest.raises(RecordingError, match="does not hold softmax m=1 "):
        ReplayTarget(recording(space)).finals(parse_problem("softmax m=1 n=4096"), [])
    with pytest.raises(RecordingError, match="no target 'h2000'"):
        find_recording("h2000", "softmax")


KILLED = """
import sys, time
sys.path.insert(0, {tests!r})
import test_search as t
class Slow(t.FakeTarget):
    def next(self):
        time.sleep(0.02)
        print(len(self.asked), flush=True)
        return super().next()
t.campaign(t.load_space("softmax"), Slow(capacity=1), t.open_storage({url!r}), t.Path({table!r}),
           trials=60)
"""


def test_kill_9_loses_at_most_the_trial_in_flight(space, tmp_path):
    url, table = f"sqlite:///{tmp_path / 's.sqlite3'}", tmp_path / "table.json"
    script = KILLED.format(tests=str(Path(__file__).parent), url=url, table=str(table))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    seen = 0
    for line in process.stdout:
        seen = int(line)
        if seen == 12:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    process.stdout.close()
    target = FakeTarget()
    started = time.monotonic()
    campaign(space, target, open_storage(url), table, trials=60)
    assert time.monotonic() - started < 60
    assert 60 - 13 <= len(target.asked) <= 60 - 10
    assert read_table(table).get(H200, PROBLEM) is not None


def test_a_variant_that_kills_its_processes_counts_as_infeasible_like_any_other():
    """GPSampler wants the same constraint of every trial."""
    from ktune.search.trials.storage import FEASIBLE, TryAgain, quiet_optuna

    state = optuna.trial.TrialState
    with quiet_optuna():
        study = optuna.create_study()
        dead = optuna.trial.create_trial(
            state=state.FAIL,
            user_attrs={"variant": "a"},
            system_attrs={"retry_history": [0, 1, 2]},
        )
        TryAgain(max_retry=3)(study, dead)
    (kept,) = study.get_trials()
    assert kept.state == state.COMPLETE and kept.value == math.inf
    assert kept.user_attrs["measurement"]["status"] == "crashed"
    assert kept.constraints == {FEASIBLE: 1.0}


def test_a_search_is_not_over_while_a_dead_trial_is_not_yet_queued_anew(space, monkeypatch):
    """Optuna ends a stale trial, then queues it: a search that looks in between goes on."""
    from ktune.search import study as module
    from ktune.search.trials.storage import quiet_optuna

    state = optuna.trial.TrialState
    monkeypatch.setattr(module, "is_shared", lambda storage: True)
    ground = Ground.of(space, PROBLEM, H200)
    lost = next(iter(ground.legal.values()))
    with quiet_optuna():
        search = module.ProblemSearch(ground, FakeTarget(), open_storage("memory"))
        search.begin(len(ground.legal))
        trial_id = search._ledger.create(lost, state.RUNNING, None)  # another process's
        while (variant := search.next()) is not None:
            search.tell(variant, Measurement("ok", cost(variant), 0.001, 20))
        assert search.count == len(ground.legal) - 1 and not search.settled()
        search._ledger.end(trial_id, state.FAIL)
        assert not search.settled()
        assert search.next() == lost
        search.tell(lost, Measurement("ok", 1.0, 0.001, 20))
        assert search.settled()
