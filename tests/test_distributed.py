"""Many processes search in one PostgreSQL: nothing is lost, nothing is done twice."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import Counter
from copy import deepcopy
from dataclasses import replace

import pytest
from click.testing import CliRunner
from fleet_process import Ktune, lines, wait_for_lines
from optuna.trial import TrialState
from postgres import PASSWORD, Server, have_or_skip
from test_cli import OTHER, SMALL, make_recording
from test_search import H200, PROBLEM, FakeTarget

from ktune.bench.measurement import Measurement
from ktune.cli import cli
from ktune.device import Device
from ktune.errors import UsageError
from ktune.resources import shipped
from ktune.search.effort import Effort
from ktune.search.ground import Ground
from ktune.search.study import ProblemSearch
from ktune.search.trials.fleet import Errand, Fleet, Plan
from ktune.search.trials.storage import MOST_RETRIES, Heartbeat, open_storage, quiet_optuna
from ktune.space import load_space
from ktune.target.recording import read_recording

A100 = Device("NVIDIA A100", "cuda", "sm_80", 108, 166_912, 40 << 20, 40)


@pytest.fixture(scope="module")
def server():
    have_or_skip()
    running = Server()
    yield running
    running.close()


@pytest.fixture
def url(server, request, monkeypatch) -> str:
    monkeypatch.setenv("KTUNE_HEARTBEAT_S", "1")
    return server.create(re.sub(r"\W", "_", request.node.name)[:60])


@pytest.fixture
def recording(tmp_path):
    """Return a recording of one problem with 32 variants."""
    return make_recording(tmp_path / "h200.json", (OTHER,))


@pytest.fixture
def run(tmp_path, recording, url):
    """Start ``ktune search`` or ``ktune worker`` on the recording; all are killed at the end."""
    started = []

    def start(name, *words, target=recording, pause_s=0.05, storage=url, **environment):
        given = ["--target", target, "--storage", storage, *words]
        command = ["worker", *given]
        if name.startswith("search"):
            command = ["search", "softmax", *given, "--no-proof"]
        started.append(Ktune(tmp_path, name, command, pause_s, **environment))
        return started[-1]

    yield start
    for each in started:
        each.__exit__()


def studies(url):
    """Return the trials of every study, by its name."""
    with quiet_optuna():
        storage = open_storage(url)
        found = {
            s.study_name: storage.get_all_trials(s._study_id) for s in storage.get_all_studies()
        }
    storage.remove_session()
    storage.engine.dispose()
    return found


def check(url, recordings=(), exhaustive=True):
    """Every trial has ended, and each variant has exactly one measurement."""
    everything = studies(url)
    states = [trial.state for trials in everything.values() for trial in trials]
    assert all(state.is_finished() for state in states), Counter(states)
    expected = {
        f"{problem} | {recorded.device.key} |": seen.outcomes
        for recorded in map(read_recording, recordings)
        for problem, seen in recorded.problems.items()
    }
    found = {name: t for name, t in everything.items() if not name.startswith("campaign ")}
    assert len(found) == len(expected)
    for name, trials in found.items():
        (outcomes,) = [v for start, v in expected.items() if name.startswith(start)]
        kept = [
            trial
            for trial in trials
            if trial.state == TrialState.COMPLETE and "measurement" in trial.user_attrs
        ]
        counts = Counter(trial.user_attrs["variant"] for trial in kept)
        assert set(counts.values()) == {1}
        assert not exhaustive or counts.keys() == outcomes.keys()
        for trial in kept:
            outcome = outcomes[trial.user_attrs["variant"]]
            assert trial.user_attrs["measurement"] == outcome.to_dict()


def alone(recording, tmp_path, *words):
    """Return the table that a single process writes, with no storage."""
    table = tmp_path / "alone.json"
    given = ["--target", recording, "--storage", "memory", "--table", table, "--no-proof"]
    result = CliRunner().invoke(cli, list(map(str, ["search", "softmax", *given, *words])))
    assert result.exit_code == 0, result.output
    return table.read_bytes()


def test_two_killed_workers_and_a_killed_server_lose_nothing(run, server, url, recording, tmp_path):
    """Exhaustive, so the table cannot depend on the order: it is that of a single process."""
    make_recording(recording, (SMALL, OTHER))  # 80 variants
    search = run("search", "--exhaustive", pause_s=0.2)
    workers = [run(f"worker{i}", "--once", "--wait", "60", pause_s=0.2) for i in range(3)]
    wait_for_lines(tmp_path, 2, by="worker0")
    workers[0].kill()
    wait_for_lines(tmp_path, 20)
    server.kill()
    workers[1].kill()
    time.sleep(1.0)
    server.start()
    assert search.wait() == 0, search.err
    assert workers[2].wait() == 0, workers[2].err
    assert "does not answer" in search.err + workers[2].err
    check(url, [recording])
    assert (tmp_path / "table.json").read_bytes() == alone(recording, tmp_path, "--exhaustive")
    counts = Counter(line[:3] for line in lines(tmp_path))
    assert sum(counts.values()) - len(counts) <= 6  # in flight at one of the three deaths
    assert PASSWORD not in search.err + workers[2].err


def test_unlike_devices_have_studies_of_their_own_and_one_table(run, url, recording, tmp_path):
    other = read_recording(recording)
    other = replace(other, device=A100)
    other.write(tmp_path / "a100.json")
    lead = run("worker-a100", "--once", "--wait", "60", target=tmp_path / "a100.json")
    helper = run("worker-a100-too", "--once", "--wait", "60", target=tmp_path / "a100.json")
    search = run("search", "--exhaustive", pause_s=0.1)
    assert search.wait() == 0, search.err
    assert lead.wait() == helper.wait() == 0
    assert "leading" in lead.err + helper.err and "helping" in lead.err + helper.err
    check(url, [recording, tmp_path / "a100.json"])
    table = json.loads((tmp_path / "table.json").read_text())
    h200, a100 = table["entries"][read_recording(recording).device.key], table["entries"][A100.key]
    assert len(h200) == 1
    for problem, entry in h200.items():  # the same made-up times
        assert entry["provenance"].pop("replayed_from") == "NVIDIA H200, 2026-01-02"
        assert a100[problem]["provenance"].pop("replayed_from") == "NVIDIA A100, 2026-01-02"
        assert entry == a100[problem]
    assert table["devices"][A100.key]["sm_count"] == 108
    assert f"collected 1 winner on {A100.name}" in search.err


def test_a_search_that_measures_nothing_itself(run, url, recording, tmp_path):
    search = run("search", "--exhaustive", "--no-local")
    search.wait_for("waiting for workers")
    workers = [run(f"worker{i}", "--once", "--wait", "60") for i in range(2)]
    assert search.wait() == 0, search.err
    assert [worker.wait() for worker in workers] == [0, 0]
    check(url, [recording])
    assert (tmp_path / "table.json").read_bytes() == alone(recording, tmp_path, "--exhaustive")


def test_a_worker_that_joins_late_helps(run, url, recording, tmp_path):
    search = run("search", "--exhaustive", pause_s=0.2)
    wait_for_lines(tmp_path, 3)
    worker = run("worker", "--once", pause_s=0.2)
    assert search.wait() == 0 and worker.wait() == 0
    assert sum(line[3] == "worker" for line in lines(tmp_path)) > 3
    check(url, [recording])


def test_a_killed_coordinator_is_taken_up_by_the_same_command(run, url, recording, tmp_path):
    first = run("search-1", "--exhaustive", pause_s=0.1)
    worker = run("worker", "--wait", "60", pause_s=0.1)
    wait_for_lines(tmp_path, 3, by="worker")
    first.kill()
    second = run("search-2", "--exhaustive", pause_s=0.1)
    assert second.wait() == 0, second.err
    assert worker.process.is_alive()
    check(url, [recording])
    assert (tmp_path / "table.json").read_bytes() == alone(recording, tmp_path, "--exhaustive")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 130
    assert lines(tmp_path) and "Traceback" not in worker.err


def test_an_interrupted_worker_gives_back_what_it_measures(run, url, recording, tmp_path):
    search = run("search", "--exhaustive", pause_s=0.1, KTUNE_HEARTBEAT_S="30")
    worker = run("worker", pause_s=2.0, KTUNE_HEARTBEAT_S="30")
    worker.wait_for("helping")
    wait_for_lines(tmp_path, 1, by="worker")
    time.sleep(0.5)
    worker.signal(signal.SIGINT)
    assert worker.wait(10) == 130
    assert "given back" in worker.err and "Traceback" not in worker.err
    assert search.wait(20) == 0, search.err  # long before a heartbeat is missed
    check(url, [recording])


def test_an_interrupted_search_pauses_its_workers(run, url, recording, tmp_path):
    search = run("search-1", "--exhaustive", pause_s=0.1)
    run("worker", pause_s=0.1)
    wait_for_lines(tmp_path, 3, by="worker")
    search.signal(signal.SIGINT)
    assert search.wait(10) == 130
    assert "is paused" in search.err and "run the same command again" in search.err
    time.sleep(1.5)
    before = len(lines(tmp_path))
    time.sleep(0.7)
    assert len(lines(tmp_path)) == before
    again = run("search-2", "--exhaustive", pause_s=0.1)
    assert again.wait() == 0
    check(url, [recording])


def test_three_workers_share_a_sampler_and_a_budget(run, url, recording, tmp_path):
    words = ("--sampler", "tpe", "--trials", "24")
    search = run("search", *words)
    workers = [run(f"worker{i}", "--once", "--wait", "60") for i in range(2)]
    assert search.wait() == 0, search.err
    assert [worker.wait() for worker in workers] == [0, 0]
    check(url, [recording], exhaustive=False)
    counts = Counter(line[:3] for line in lines(tmp_path))
    assert set(counts.values()) == {1} and len(counts) == 24
    assert len({line[3] for line in lines(tmp_path)}) > 1


def test_a_second_search_measures_nothing_again(run, url, recording, tmp_path):
    assert run("search-1", "--trials", "12").wait() == 0
    first = len(lines(tmp_path))
    again = run("search-2", "--trials", "12", "--json")
    assert again.wait() == 0
    assert [result["new_trials"] for result in json.loads(again.out)["results"]] == [0]
    assert len(lines(tmp_path)) == first == 12


def test_a_budget_in_seconds_ends_a_shared_search(run, url, recording, tmp_path):
    search = run("search", "--exhaustive", "--budget", "20s", pause_s=0.1)
    worker = run("worker", "--once", "--wait", "60", pause_s=0.4)
    assert search.wait() == 0, search.err
    assert worker.wait() == 0, worker.err
    check(url, [recording], exhaustive=False)
    assert 0 < len(lines(tmp_path)) < 32


class TestSearch:
    """Two searches of one process on one problem, as two machines would hold them."""

    @pytest.fixture
    def join(self, url):
        space, storages, searches = load_space("softmax"), [], []

        def search(trials=1000, sampler="auto"):
            storage = open_storage(url)
            storages.append(storage)
            ground = Ground.of(space, PROBLEM, H200)
            made = ProblemSearch(ground, FakeTarget(), storage, sampler, seed=len(storages))
            made.begin(trials)
            searches.append(made)
            return made

        with quiet_optuna():
            yield search
        for each in searches:
            each._heartbeat.close()
        for storage in storages:
            storage.remove_session()
            storage.engine.dispose()

    def test_they_never_measure_the_same(self, join):
        one, two = join(), join()
        asked = [search.next().text for _ in range(10) for search in (one, two)]
        assert len(set(asked)) == 20

    @pytest.mark.parametrize("sampler", ["grid", "tpe"])
    def test_a_budget_is_of_all(self, join, sampler):
        one, two = join(5, sampler), join(5, sampler)
        asked = [two.next(), one.next(), two.next(), one.next(), one.next()]
        assert all(asked) and one.next() is None and two.next() is None
        assert not one.settled()

    def test_the_outcome_of_a_trial_taken_for_dead_is_not_lost(self, join):
        one, two = join(1), join(1)
        variant = one.next()
        one._heartbeat.close()  # as if the network were down
        assert not two.settled()
        deadline = time.monotonic() + 20
        while not two._in_state(TrialState.WAITING):
            assert time.monotonic() < deadline and not two.settled()
            time.sleep(0.1)
        one.tell(variant, Measurement("ok", 1.0, 0.1, 20))
        assert one.next() is None and one.count == 1  # the retry has got it
        assert two.settled() and two.outcome.measurements[variant.text].latency_ms == 1.0
        assert two.next() is None

    def test_a_variant_that_kills_all_its_workers_counts_as_crashed(self, join):
        storage, study = None, None
        for _ in range(1 + MOST_RETRIES):
            search = join(1)
            variant = search.next()
            assert variant is not None
            search._heartbeat.close()
            storage, study = search._study._storage, search._study
            (own,) = search._pending.values()
            storage.set_trial_state_values(own, TrialState.FAIL)
            storage.get_heartbeat_stale_trial_callback()(study, deepcopy(storage.get_trial(own)))
        last = join(1)
        assert last.next() is None and last.settled()
        assert last.outcome.measurements[variant.text].status == "crashed"

    def test_what_was_begun_is_given_back(self, join):
        one, two = join(2), join(2)
        variants = {one.next().text, one.next().text}
        assert two.next() is None
        one.give_back()
        assert {two.next().text, two.next().text} == variants


class TestJoining:
    def test_an_operation_that_cannot_be_imported(self, run, url, recording, tmp_path):
        text = (shipped("search_spaces") / "softmax.yaml").read_text()
        errand = Errand("own", "own.yaml", text.replace("operation: softmax", "operation: lab:OWN"),
                        ("own m=1",), "x")  # fmt: skip
        refused = self.refusal(run, url, Plan("replay", Effort(), (errand,)))
        assert "cannot import operation 'lab:OWN'" in refused and "PYTHONPATH" in refused

    def test_other_templates(self, run, url, recording):
        text = (shipped("search_spaces") / "softmax.yaml").read_text()
        errand = Errand("softmax", "softmax.yaml", text, (PROBLEM.text,), "others")
        refused = self.refusal(run, url, Plan("replay", Effort(), (errand,)))
        assert "templates of softmax differ" in refused

    def test_live_and_replayed_times_are_never_mixed(self, run, url, recording):
        assert "wants live times" in self.refusal(run, url, Plan("live", Effort(), ()))

    def refusal(self, run, url, plan):
        """Return what a worker says of a campaign that it cannot join."""
        with quiet_optuna():
            storage = open_storage(url)
            heartbeat = Heartbeat(storage)
            Fleet.publish(storage, plan, {}, heartbeat)
            heartbeat.close()
            storage.engine.dispose()
        worker = run("worker", "--once")
        assert worker.wait() == 1
        return worker.err

    def test_a_plan_reads_back(self):
        errand = Errand("softmax", "softmax.yaml", "text", ("a", "b"), "x")
        plan = Plan("live", Effort(trials=3), (errand,))
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
        with pytest.raises(UsageError, match="another version"):
            Plan.from_dict({**plan.to_dict(), "effort": {"budget_s": None, "new": 1}})

    def test_other_versions(self, url):
        with quiet_optuna():
            storage = open_storage(url)
            target, other = FakeTarget(), FakeTarget()
            target.versions, other.versions = {"triton": "3.6.0"}, {"triton": "3.7.0"}
            heartbeat = Heartbeat(storage)
            plan = Plan("live", Effort(), ())
            fleet = Fleet.publish(storage, plan, {"softmax": target}, heartbeat)
            fleet.check_versions("softmax", target)
            with pytest.raises(UsageError, match=r"triton 3\.6\.0, and .* has triton 3\.7\.0"):
                fleet.check_versions("softmax", other)
            heartbeat.close()
            storage.engine.dispose()


def invoke(*words):
    return CliRunner().invoke(cli, list(map(str, words)))


class TestMessages:
    def test_wrong_password(self, server, url, recording):
        wrong = server.url("postgres", "wr0ng-word")
        for words in (
            ("search", "softmax", "--target", recording),
            ("worker", "--target", recording),
        ):
            result = invoke(*words, "--storage", wrong)
            assert result.exit_code == 1
            assert "password authentication failed" in result.stderr
            assert "wr0ng-word" not in result.output and ":***@" in result.stderr

    @pytest.mark.parametrize("password", [PASSWORD, "p@ss/w:rd", "a{b}"])
    def test_unreachable_server(self, recording, password):
        have_or_skip()
        url = f"postgresql://ktune:{password}@127.0.0.1:9/x"
        began = time.monotonic()
        result = invoke("worker", "--target", recording, "--storage", url)
        assert result.exit_code == 1 and time.monotonic() - began < 15
        assert "cannot open the study storage" in result.stderr
        assert password not in result.output and "rd@" not in result.output

    def test_a_storage_of_one_machine(self, recording, tmp_path):
        file = f"sqlite:///{tmp_path}/s.sqlite3"
        for url in (file, "memory"):
            result = invoke("worker", "--target", recording, "--storage", url)
            assert result.exit_code == 2 and "of one machine" in result.stderr
        words = ("search", "softmax", "--target", recording, "--no-local")
        result = invoke(*words, "--storage", file)
        assert result.exit_code == 2 and "storage to share" in result.stderr

    def test_missing_driver(self, recording, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "psycopg", None)
        url = f"postgresql://ktune:{PASSWORD}@127.0.0.1:9/x"
        result = invoke("worker", "--target", recording, "--storage", url)
        assert result.exit_code == 1 and "pip install 'ktune-kernels[postgres]'" in result.stderr
        assert PASSWORD not in result.output
