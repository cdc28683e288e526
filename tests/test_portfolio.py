"""Few variants for many problems: noise, covers, limits, regions, and what they cost."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktune.bench.measurement import Measurement
from ktune.device import COMPILE_TARGETS
from ktune.errors import UsageError
from ktune.operations import operation, parse_problem
from ktune.portfolio.cover import Cover, cover, held_out_loss, shortlist
from ktune.portfolio.losses import DRIFT, MEDIAN_ERROR, Grid, noise_ms
from ktune.portfolio.regions import by_problem, regions
from ktune.table import Entry, Provenance, Table
from ktune.table.region import covers_problem, kernel_key
from ktune.target.recording import find_recording
from ktune.variant import Variant

DEVICE = COMPILE_TARGETS["sm_90"]
A, B, C = (f"one_tile block_m={m} eviction=none num_warps=4" for m in (1, 2, 4))
NUMBERS = Provenance(0.1, 0.0, 0.2, 0.5, False, 50, "test", "2026-01-31", 3)


def softmax(m, n=1000):
    return parse_problem(f"softmax m={m} n={n}").text


def ok(latency_ms, spread=0.01, samples=50):
    return Measurement("ok", latency_ms, spread * latency_ms, samples)


def table_of(times, found, device=DEVICE):
    """Return a table as a campaign writes it: each measured problem with its region's variant."""
    entries = []
    for region in found:
        for text in region.problems:
            problem = parse_problem(text)
            variant = Variant.parse(problem.op, region.variant)
            entries.append(Entry(device.key, problem, variant, "id", NUMBERS, region.covers))
    assert {e.problem.text for e in entries} == set(times)
    return Table.of(entries, [device])


def shuffled(times, seed):
    """Return the same times in another order."""
    order = random.Random(seed)
    problems = list(times.items())
    order.shuffle(problems)
    found = {}
    for problem, own in problems:
        variants = list(own.items())
        order.shuffle(variants)
        found[problem] = dict(variants)
    return found


@pytest.fixture(scope="module", params=["softmax", "attention"])
def recording(request):
    return find_recording("h200", request.param)


@pytest.fixture
def recorded(recording):
    return {text: seen.outcomes for text, seen in recording.problems.items()}


# --- noise ------------------------------------------------------------------------------------


def test_noise_is_errors_of_medians_but_never_less_than_drift():
    assert noise_ms(ok(1.0), ok(2.0, 0.0)) == DRIFT
    wide = noise_ms(ok(1.0, 0.1, 25), ok(1.0, 0.1, 25))
    assert wide == pytest.approx(3 * 0.93 * math.sqrt(2) * 0.1 / 5)
    assert noise_ms(ok(1.0, 0.1, 100), ok(1.0, 0.1, 100)) == pytest.approx(wide / 2)
    assert noise_ms(Measurement("ok", 1.0), Measurement("ok", 1.0)) == DRIFT


def test_only_sound_measurements_count():
    bad = Measurement("wrong", detail="NaN")
    grid = Grid({softmax(1): {A: ok(1.0), B: bad}, softmax(2): {A: bad}})
    assert list(grid.problems) == [softmax(1)] and list(grid.measured(softmax(1))) == [A]
    assert cover({softmax(1): {A: bad}}).variants == ()
    assert regions({}, cover({})) == []


# --- cover ------------------------------------------------------------------------------------


def test_cover_of_the_recordings(recorded):
    """H200, 2026-11-30: 5 variants for 12 softmax problems, 5 for 14 attention problems."""
    found = cover(recorded)
    best = {min((m.latency_ms, v) for v, m in own.items() if m.ok)[1] for own in recorded.values()}
    assert len(found.variants) <= 6 < len(recorded) / 2 + 1
    assert len(found.variants) < len(best)
    assert found.worst <= 0.03 and found.mean < 0.01
    for problem, variant in found.chosen.items():
        fastest = min(m.latency_ms for m in recorded[problem].values() if m.ok)
        assert recorded[problem][variant].latency_ms <= 1.03 * fastest
        assert variant in found.variants
    assert set(found.chosen) == set(recorded)


def test_limits_hold_and_cost(recorded):
    """H200, 3, 4, 5 variants: softmax loses 18.7, 9.1, 1.8 % at worst, attention 8.6, 8.6, 1.0."""
    free, before = cover(recorded), math.inf
    for limit in (3, 4, 5, 6):
        found = cover(recorded, limit=limit)
        assert len(found.variants) <= limit
        assert found.worst <= before + 1e-9
        before = found.worst
    assert cover(recorded, limit=len(free.variants)) == free
    assert cover(recorded, limit=100) == free


def test_impossible_limits_say_the_least():
    softmax_times = {t: p.outcomes for t, p in find_recording("h200", "softmax").problems.items()}
    with pytest.raises(UsageError, match=r"2 variants cannot serve .* least possible is 3"):
        cover(softmax_times, limit=2)
    assert len(cover(softmax_times, limit=3).variants) == 3


def test_least_possible_is_exact_where_greedy_is_not():
    """Greedy takes the largest set first and then needs three; two do."""
    texts = [f"one_tile block_m={m} eviction=none num_warps=4" for m in (1, 2, 4)]
    first, second, third = texts  # evens, odds, and the four in the middle
    serves = {first: {0, 2, 4}, second: {1, 3, 5}, third: {1, 2, 3, 4}}
    times = {
        softmax(1 << i): {v: ok(1.0) for v, own in serves.items() if i in own} for i in range(6)
    }
    assert len(cover(times).variants) in (2, 3)
    assert set(cover(times, limit=2).variants) == {first, second}
    with pytest.raises(UsageError, match="least possible is 2"):
        cover(times, limit=1)


def test_ties_go_to_the_variant_that_serves_more():
    times = {softmax(1): {A: ok(1.0), B: ok(1.005)}, softmax(2): {A: ok(2.0), B: ok(1.0)}}
    assert cover(times).variants == (B,)
    assert cover(times).losses[softmax(1)] == pytest.approx(0.005)


def test_a_variant_that_is_legal_nowhere_else_stands_for_its_own():
    times = {softmax(1): {A: ok(1.0)}, softmax(2): {B: ok(1.0), C: ok(1.02)}}
    assert set(cover(times).variants) == {A, B}


def test_batch_invariant_cover_minimises_the_worst():
    fast_alone = {A: ok(1.0), B: ok(1.3), C: ok(1.1)}
    fast_together = {A: ok(1.5), B: ok(1.0), C: ok(1.1)}
    times = {softmax(1): fast_alone, softmax(512): fast_together, softmax(8, 64): {A: ok(1.0)}}
    free = cover(times)
    assert {free.chosen[softmax(1)], free.chosen[softmax(512)]} == {A, B}
    found = cover(times, batch_invariant=True)
    assert found.chosen[softmax(1)] == found.chosen[softmax(512)] == C
    assert found.worst == pytest.approx(0.1)
    homes = by_problem(regions(times, found))
    assert homes[softmax(1)] is homes[softmax(512)] and homes[softmax(1)].variant == C
    with pytest.raises(UsageError, match="no variant has a time on all of"):
        cover({softmax(1): {A: ok(1.0)}, softmax(2): {B: ok(1.0)}}, batch_invariant=True)


def test_batch_invariant_cover_leaves_out_coupled_rows():
    coupled = (
        "streaming block_m=8 block_n=512 loop_stages=1 rescale=conditional "
        "rescale_granularity=tile rescale_threshold=8.0 num_warps=8"
    )
    times = {"softmax m=64 n=4096 dtype=bfloat16 layout=strided": {coupled: ok(1.0), A: ok(2.0)}}
    assert cover(times).variants == (coupled,)
    assert cover(times, batch_invariant=True).variants == (A,)


# --- shortlist --------------------------------------------------------------------------------


def test_shortlist_asks_for_what_a_cover_needs():
    times = {
        softmax(64): {A: ok(1.0), B: ok(2.0), C: ok(3.0)},
        softmax(128): {C: ok(1.0), B: Measurement("wrong")},
        softmax(128, 2000): {B: ok(1.0)},  # another structure
    }
    found = shortlist(times, lambda _: {A, B, C}, per_problem=2)
    assert found == {parse_problem(softmax(128)): [Variant.parse("softmax", A)]}
    assert shortlist(times, lambda _: {B, C}, per_problem=2) == {}
    wide = shortlist(times, lambda _: {A, B, C}, per_problem=2, everywhere=True)
    assert [v.text for v in wide[parse_problem(softmax(128, 2000))]] == [A, C]


def test_nothing_is_missing_in_an_exhaustive_recording(recorded):
    assert shortlist(recorded, lambda p: set(recorded[p.text])) == {}


# --- regions ----------------------------------------------------------------------------------


def test_flips_within_the_noise_are_gone():
    """Two variants by turns the fastest, by less than the noise: one variant, one region."""
    times = {
        softmax(1 << i): {A: ok(1.0 + 0.009 * (i % 2)), B: ok(1.009 - 0.009 * (i % 2))}
        for i in range(20)
    }
    best = {problem: min(own, key=lambda v: own[v].latency_ms) for problem, own in times.items()}
    flipping = Cover((A, B), best, dict.fromkeys(best, 0.0))
    found = cover(times, loss=0.0)
    assert set(best.values()) == {A, B} and len(found.variants) == 1
    for chosen in (found, flipping):
        (only,) = regions(times, chosen, loss=0.0)
        assert only.covers == {"m": (1, 1 << 19), "n": (513, 1023)}


def test_equal_variants_with_random_noise_are_one():
    """A true tie of noisy medians on 20 sizes, drawn 200 times: next to no draw splits it."""
    order, split = random.Random(0), 0
    error = MEDIAN_ERROR * 0.05 / math.sqrt(50)
    for _ in range(200):
        times = {
            softmax(1 << i): {v: ok(order.gauss(1, error), 0.05) for v in (A, B)} for i in range(20)
        }
        found = cover(times, loss=0.0)
        split += len(regions(times, found, loss=0.0)) > 1
    assert split <= 20, "a tenth, where 2 standard errors would split over half"


def test_a_crossover_is_one_split_at_the_geometric_mean():
    times = {
        softmax(4**i): {A: ok(1.0 if i < 5 else 1.2), B: ok(1.2 if i < 5 else 1.0)}
        for i in range(10)
    }
    below, above = regions(times, cover(times))
    assert (below.variant, above.variant) == (A, B)
    assert below.covers["m"] == (1, 512) and above.covers["m"] == (513, 4**9)


def test_a_gain_within_the_allowed_loss_still_splits():
    times = {
        softmax(1 << i): {A: ok(1.0 if i < 5 else 1.015), B: ok(1.015 if i < 5 else 1.0)}
        for i in range(10)
    }
    assert len(cover(times).variants) == 1, "one is within 2 %"
    both = cover(times, loss=0.01)
    assert [r.variant for r in regions(times, both)] == [A, B]


def test_alternating_winners_need_a_region_each():
    times = {softmax(4**i): {(A, B)[i % 2]: ok(1.0), (B, A)[i % 2]: ok(1.5)} for i in range(5)}
    found = regions(times, cover(times))
    assert [r.variant for r in sorted(found, key=lambda r: r.covers["m"])] == [A, B, A, B, A]


def test_borders_end_with_the_bucket_and_with_the_structure():
    times = {softmax(m, n): {A: ok(1.0)} for m, n in ((3, 1000), (100, 600), (5, 1024))}
    ragged, even = regions(times, cover(times))[::-1]
    if len(even.problems) > 1:
        ragged, even = even, ragged
    assert ragged.covers == {"m": (3, 128), "n": (513, 1023)}
    assert even.covers == {"m": (5, 8), "n": (1024, 1024)}
    zero = "attention heads=8 seqlen_q=0 head_dim=64"
    (only,) = regions({parse_problem(zero).text: {"forward num_warps=4": ok(1.0)}}, cover(
        {parse_problem(zero).text: {"forward num_warps=4": ok(1.0)}}
    ))  # fmt: skip
    assert only.covers["seqlen_q"] == (0, 1) and "head_dim" not in only.covers


def test_lengths_that_grow_together_do_not_promise_what_was_never_measured():
    def attention(length):
        return parse_problem(f"attention heads=8 seqlen_q={length} head_dim=64").text

    v, w = "forward block_m=64 num_warps=4", "forward block_m=128 num_warps=4"
    times = {
        attention(512): {v: ok(1.0), w: ok(1.5)},
        attention(8192): {v: ok(1.5), w: ok(1.0)},
    }
    short, long = regions(times, cover(times))
    assert short.covers["seqlen_q"] == (257, 2048) and short.covers["seqlen_k"] == (257, 512)
    assert long.covers["seqlen_q"] == (2049, 8192) and long.covers["seqlen_k"] == (4097, 8192)


def test_regions_of_the_recordings(recorded):
    """H200: 11 regions for 12 softmax problems (rows of 11 structures), 9 for 14 of attention."""
    found = regions(recorded, cover(recorded))
    grid = Grid(recorded)
    assert len(found) <= len(recorded) - 1
    for region in found:
        for problem in region.problems:
            assert grid.ratio(problem, region.variant) <= 0.03
    check_regions(recorded, found)


def check_regions(times, found):
    """Every problem lies in one region, its own; regions of one kernel share no size."""
    homes = [text for region in found for text in region.problems]
    assert sorted(homes) == sorted(times), "each in one"
    boxes = [(region, parse_problem(region.problems[0])) for region in found]
    for text in times:
        problem = parse_problem(text)
        op = operation(problem.op)
        inside = [
            region
            for region, first in boxes
            if kernel_key(op, first) == kernel_key(op, problem)
            and all(low <= problem.size(f) <= high for f, (low, high) in region.covers.items())
        ]
        assert len(inside) == 1 and text in inside[0].problems
    for i, (a, first) in enumerate(boxes):
        for b, second in boxes[:i]:
            op = operation(first.op)
            if kernel_key(op, first) == kernel_key(op, second):
                apart = [f for f in a.covers if a.covers[f][1] < b.covers[f][0]]
                apart += [f for f in a.covers if b.covers[f][1] < a.covers[f][0]]
                assert apart, f"{a} and {b} overlap"


latencies = st.floats(0.5, 2.0, allow_nan=False)
sizes = st.tuples(st.integers(1, 100_000), st.integers(513, 1024))
grids = st.dictionaries(
    sizes.map(lambda s: softmax(*s)),
    st.fixed_dictionaries({A: latencies, B: latencies}, optional={C: latencies}),
    min_size=1,
    max_size=8,
).map(lambda rows: {p: {v: ok(t) for v, t in own.items()} for p, own in rows.items()})
lengths = st.integers(0, 5000)
attentions = st.dictionaries(
    st.tuples(
        st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), lengths, lengths, st.booleans()
    ).map(
        lambda s: (
            parse_problem(
                f"attention batch={s[0]} heads={s[1] * s[2]} heads_kv={s[1]} seqlen_q={s[3]} "
                f"seqlen_k={s[4]} head_dim=64 causal={'upper_left' if s[5] else 'none'}"
            ).text
        )
    ),
    st.fixed_dictionaries({"forward num_warps=4": latencies, "forward num_warps=8": latencies}),
    min_size=1,
    max_size=8,
).map(lambda rows: {p: {v: ok(t) for v, t in own.items()} for p, own in rows.items()})


@settings(max_examples=120, deadline=None)
@given(st.one_of(grids, attentions), st.integers(0, 9), st.booleans())
def test_regions_keep_their_promises(times, seed, batch_invariant):
    found = cover(times, batch_invariant=batch_invariant)
    boxes = regions(times, found)
    check_regions(times, boxes)
    grid = Grid(times)
    for region in boxes:
        for problem in region.problems:
            own = grid.loss(problem, found.chosen[problem])
            assert grid.loss(problem, region.variant) <= max(0.03, own)
    again = shuffled(times, seed)
    assert cover(again, batch_invariant=batch_invariant) == found
    assert regions(again, found) == boxes
    if not batch_invariant:
        assert all(grid.loss(p, v) <= 0.03 for p, v in found.chosen.items())


@settings(max_examples=60, deadline=None)
@given(grids, st.integers(1, 3))
def test_limits_hold_on_anything(times, limit):
    found = cover(times, limit=limit)
    assert len(found.variants) <= limit
    assert found == cover(shuffled(times, 1), limit=limit)


@settings(max_examples=60, deadline=None)
@given(grids, sizes)
def test_a_table_of_regions_answers_as_they_say(times, asked):
    boxes = regions(times, cover(times))
    table = table_of(times, boxes)
    problem = parse_problem(softmax(*asked))
    inside = [e for e in table if covers_problem(e, problem)]
    inside = [e for e in inside if kernel_key(operation("softmax"), e.problem)
              == kernel_key(operation("softmax"), problem)]  # fmt: skip
    found = held_out_loss({problem.text: {v: ok(1.0) for v in (A, B, C)}}, table, DEVICE)
    (kind,) = found.kinds.values()
    assert kind in (("exact", "region") if inside else ("bucket", "nearest", "default"))
    assert len({e.variant for e in inside}) <= 1


# --- problems that were not in the grid -------------------------------------------------------


def test_held_out_loss_names_how_and_what_is_unknown():
    times = {softmax(64): {A: ok(1.0)}}
    table = table_of(times, regions(times, cover(times)))
    asked = {
        softmax(60): {A: ok(1.1), B: ok(1.0)},
        softmax(50): {B: ok(1.0)},
        softmax(4096): {B: ok(1.0)},
    }
    found = held_out_loss(asked, table, DEVICE)
    assert found.losses == {softmax(60): pytest.approx(0.1)}
    assert found.kinds == {softmax(60): "region", softmax(50): "region", softmax(4096): "default"}
    assert set(found.unknown) == {softmax(50), softmax(4096)}
    assert found.worst == found.median == pytest.approx(0.1)
    assert found.of("default").losses == {} and found.of("default").unknown == (softmax(4096),)


def leave_one_out(times, device):
    """Return the loss of every problem under the table that the others make, by kind."""
    kept, kinds = {}, {}
    for text in times:
        rest = {p: own for p, own in times.items() if p != text}
        table = table_of(rest, regions(rest, cover(rest)), device)
        found = held_out_loss({text: times[text]}, table, device)
        kept |= found.losses
        kinds |= found.kinds
    return kept, kinds


def test_leave_one_problem_out(recording, recorded):
    """H200: what a table loses on each problem when it was made from all the others.

    Regions and the nearest entries lose nothing in the median. What neither reaches is alone with
    its structure, and gets the default variant.
    """
    losses, kinds = leave_one_out(recorded, recording.device)
    found = {
        kind: [losses[p] for p in losses if kinds[p] == kind]
        for kind in ("region", "nearest", "default")
    }
    counts, worst, alone = {
        "softmax": ((0, 14, 6), 0.015, 0.25),  # seen: 0.8 % and 19.1 %
        "attention": ((7, 11, 4), 0.05, 1.5),  # seen: 3.0 % and 126 %
    }[recording.op]
    assert tuple(map(len, found.values())) == counts
    assert statistics.median([*found["region"], *found["nearest"]]) <= 0.01
    assert max(found["region"], default=0.0) <= 0.01
    assert max(found["nearest"]) <= worst and max(found["default"]) <= alone
