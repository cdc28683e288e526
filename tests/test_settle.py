"""After the searches: few variants, regions, finals again, problems held out; and budgets."""

from __future__ import annotations

import math

import pytest
from helpers import Silent
from test_search import H200, FakeTarget

from ktune.bench.measurement import Measurement
from ktune.errors import UsageError
from ktune.operations import parse_problem
from ktune.search.campaign import Campaign
from ktune.search.effort import Effort, parse_seconds
from ktune.search.trials.storage import open_storage
from ktune.space import load_space

SIZES = (64, 256, 1024, 4096, 16384, 65536)
PROBLEMS = [parse_problem(f"softmax m={m} n=1024") for m in SIZES]


def time_of(problem, variant):
    """Few rows like one row in a program, many rows eight; near ties flip with every size."""
    values = variant.values
    rows, warps = math.log2(values["block_m"]), math.log2(values["num_warps"])
    wanted = 0 if problem.size("m") <= 512 else 3
    flip = 0.002 * (problem.size("m") in (256, 4096)) * (warps == 2)
    return 1.0 + 0.2 * abs(rows - wanted) + 0.1 * abs(warps - 1.5) - flip


class Landscape(FakeTarget):
    """A target whose times depend on the problem; some variants may be wrong on some."""

    def __init__(self, capacity=1, wrong=()):
        super().__init__(capacity)
        self.wrong, self.verified, self.order = set(wrong), [], []

    def submit(self, problem, variant):
        super().submit(problem, variant)
        self.order.append(problem.text)

    def next(self):
        problem, variant = self._queue.popleft()
        return problem, variant, Measurement("ok", time_of(problem, variant), 0.001, 50)

    def finals(self, problem, variants):
        return {v.text: [time_of(problem, v)] * 20 for v in variants}

    def verify(self, problem, variant):
        self.verified.append((problem.text, variant.text))
        return "made up" if (problem.text, variant.text) in self.wrong else ""


@pytest.fixture
def space():
    return load_space("softmax")


def run(space, target, problems=PROBLEMS, held_out=(), **effort):
    kept = {}

    def sink(entries, device):
        kept.update({entry.problem.text: entry for entry in entries})

    campaign = Campaign(
        target,
        open_storage("memory"),
        sink,
        Effort(**effort),
        Silent(),
        held_out={problem.text for problem in held_out},
    )
    results = list(campaign.run([(space, p) for p in (*problems, *held_out)]))
    return results, kept


def test_near_ties_share_a_variant_and_a_crossover_splits(space):
    results, kept = run(space, Landscape(), level="full")
    best = {r.outcome.best()[0][0] for r in results}
    used = {entry.variant.text for entry in kept.values()}
    assert len(best) > len(used) == 2
    for text, entry in kept.items():
        m = parse_problem(text).size("m")
        low, high = entry.covers["m"]
        assert low <= m <= high
        assert (low > 256) == (m > 512), "the border lies between 256 and 1024"
        assert entry.provenance.loss <= 0.03
        assert time_of(parse_problem(text), entry.variant) == entry.provenance.latency_ms


def test_the_best_of_each_is_measured_on_all(space):
    results, _ = run(space, Landscape(), level="quick")
    tops = {r.outcome.best()[0][0] for r in results}
    assert all(top in r.outcome.measurements for top in tops for r in results)


def test_every_stored_variant_was_rechecked_on_its_problem(space):
    target = Landscape()
    _, kept = run(space, target)
    assert {(text, entry.variant.text) for text, entry in kept.items()} <= set(target.verified)


def test_a_region_does_not_give_a_problem_what_is_wrong_there(space):
    _, kept = run(space, Landscape())
    moved = PROBLEMS[1].text
    bad = kept[moved].variant.text
    target = Landscape(wrong={(moved, bad)})
    _, again = run(space, target)
    assert again[moved].variant.text != bad
    assert again[PROBLEMS[0].text].variant.text in {bad, again[moved].variant.text}


def test_a_winner_that_is_wrong_on_the_whole_problem_is_not_stored(space):
    problem = PROBLEMS[0]
    _, kept = run(space, Landscape(), [problem])
    wrong = kept[problem.text].variant.text
    results, again = run(space, Landscape(wrong={(problem.text, wrong)}), [problem])
    assert again[problem.text].variant.text != wrong
    assert results[0].outcome.measurements[wrong].status == "wrong"


def test_nothing_passes_where_everything_is_wrong(space):
    problem = PROBLEMS[0]
    every = {(problem.text, v.text) for v in space.variants(problem, H200)}
    results, kept = run(space, Landscape(wrong=every), [problem])
    assert kept == {} and results[0].entry is None and results[0].winner is None


def test_max_variants(space):
    _, kept = run(space, Landscape(), max_variants=1)
    assert len({entry.variant.text for entry in kept.values()}) == 1
    worlds = [*PROBLEMS, parse_problem("softmax m=64 n=65536")]
    with pytest.raises(UsageError, match="2"):
        run(space, Landscape2(), worlds, max_variants=1)


class Landscape2(Landscape):
    """As above, with long rows too."""

    def next(self):
        problem, variant = self._queue.popleft()
        return problem, variant, Measurement("ok", self.cost(problem, variant), 0.001, 50)

    def cost(self, problem, variant):
        return 1.0 if "block_m" not in variant.values else time_of(problem, variant)

    def finals(self, problem, variants):
        return {v.text: [self.cost(problem, v)] * 20 for v in variants}


def test_batch_invariant_is_one_variant_for_all_batches(space):
    _, kept = run(space, Landscape(), batch_invariant=True)
    assert len({entry.variant.text for entry in kept.values()}) == 1


def test_held_out_problems_judge_the_table_and_get_no_entry(space):
    between, beyond = (parse_problem(f"softmax m={m} n=1024") for m in (2048, 300))
    results, kept = run(space, Landscape(), held_out=[between, beyond])
    judged = {r.problem.size("m"): r for r in results if r.pick is not None}
    assert set(judged) == {2048, 300} and set(kept) == {p.text for p in PROBLEMS}
    assert judged[2048].pick.kind == "region" and judged[2048].loss < 0.03
    assert judged[300].pick.kind == "region"
    picked = time_of(beyond, judged[300].pick.variant)
    best = min(time_of(beyond, v) for v in space.variants(beyond, H200))
    assert judged[300].loss == pytest.approx(picked / best - 1, abs=0.05)


def test_searches_overlap_where_the_target_takes_several(space):
    target = Landscape(capacity=8)
    run(space, target, PROBLEMS[:2], trials=12)
    first = [text == PROBLEMS[0].text for text in target.order]
    assert first[:12] == [True] * 12, "a problem's own variants go first"
    serial = Landscape(capacity=1)
    run(space, serial, PROBLEMS[:2], trials=12)
    assert serial.order[:24] == [PROBLEMS[0].text] * 12 + [PROBLEMS[1].text] * 12


def test_the_next_problem_starts_before_the_last_outcomes(space):
    events = []

    class Watch(Silent):
        def problem_started(self, problem):
            events.append(("start", problem.size("m")))

        def problem_done(self, result):
            events.append(("done", result.problem.size("m")))

    campaign = Campaign(
        Landscape(capacity=8), open_storage("memory"), lambda *_: None, Effort(trials=12), Watch()
    )
    list(campaign.run([(space, p) for p in PROBLEMS[:2]]))
    assert events[:3] == [("start", 64), ("start", 256), ("done", 64)]


def test_a_budget_in_seconds_is_shared_and_kept(space):
    """The fake clock counts one second a variant."""
    target = Landscape()
    results, kept = run(space, target, budget_s=60.0, level="full")
    counts = [r.outcome.measured for r in results]
    assert sum(counts) <= 60 + len(PROBLEMS) and min(counts) >= 7
    assert len(kept) == len(PROBLEMS)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400)]
)
def test_lengths_of_time(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1m", "nan", "inf", "10 minutes", "0"])
def test_what_is_no_length_of_time(text):
    with pytest.raises(UsageError, match="10m"):
        parse_seconds(text)


def test_levels_of_effort(space):
    counts = {}
    for level in ("quick", "standard", "full"):
        target = Landscape2()
        run(space, target, [parse_problem("softmax m=4096 n=4096")], level=level)
        counts[level] = len(target.asked)
    legal = len(space.variants(parse_problem("softmax m=4096 n=4096"), H200))
    assert counts["quick"] == math.ceil(0.1 * legal)
    assert counts["standard"] == math.ceil(0.25 * legal)
    assert counts["full"] == legal


def test_a_variant_that_stands_for_one_problem_alone_is_the_winner_of_its_finals(space):
    """Within the noise the cover may name another; that would save nothing."""

    class Noisy(Landscape):
        def finals(self, problem, variants):
            # What was measured apart within the noise turns out 1 % apart side by side.
            best = {"none": 1.01, "evict_first": 1.0}
            return {
                v.text: [time_of(problem, v) * best[v.values["eviction"]]] * 20 for v in variants
            }

    for seed in range(3):
        (result,), kept = run(space, Noisy(), PROBLEMS[3:4], level="full", seed=seed)
        assert kept[result.problem.text].variant.values["eviction"] == "evict_first"
        assert result.loss == 0


def test_a_limit_that_no_choice_keeps_is_refused_before_measuring(tmp_path):
    from click.testing import CliRunner

    from ktune.cli import cli

    words = ["search", "softmax", "--target", "h200", "--max-variants", "1", "--no-proof"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2, done.output
    assert "The least possible is 3" in done.stderr and "trials" not in done.stderr


def test_a_problem_cannot_be_tuned_and_judge(tmp_path):
    from click.testing import CliRunner

    from ktune.cli import cli

    words = ["search", "softmax", "--target", "h200", "--held-out", "default", "--no-proof"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2 and "cannot judge" in done.stderr
