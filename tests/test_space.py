"""Search spaces: what a file may say, how wrong files are reported, which variants are legal."""

from __future__ import annotations

import itertools
import time
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from ktune.device import COMPILE_TARGETS, Device
from ktune.errors import ProblemError, SpaceError, UsageError, VariantError
from ktune.operations import operation
from ktune.problem import Problem
from ktune.space import Space, load_space
from ktune.space.space import parse_space
from ktune.variant import Variant

SPACES = Path(__file__).parents[1] / "search_spaces"
H200 = Device("NVIDIA H200", "cuda", "sm_90", 132, 232_448, 60 << 20, 141)
SMALL = Device("an sm_86", "cuda", "sm_86", 84, 102_400, 6 << 20, 24)
DEVICES = {"h200": H200, "sm_86": SMALL, **COMPILE_TARGETS}

MINIMAL = """\
schema: 1
operation: softmax
parameters:
  template: {choices: [one_tile, streaming]}
  block_m: {choices: [1, 2, 4], when: template == 'one_tile'}
  block_n: {choices: [512, 1024], when: template == 'streaming'}
  rescale: {choices: [always, conditional], when: template == 'streaming'}
  rescale_threshold: {choices: [8.0, 4.0], when: rescale == 'conditional'}
launch:
  num_warps: {choices: [4, 8]}
constraints:
  - require: block_m * row_block <= 4096
    because: the tile is too large
  - require: rescale_threshold < 8.0 or num_warps == 4
    because: eight warps want threshold 4
seeds:
  - {when: n > 1000, template: streaming, block_n: 512, rescale: always, num_warps: 4}
  - {template: one_tile, block_m: 4, num_warps: 4}
strategies:
  online: {rescale: always}
problems:
  default:
    - {m: 64, n: [512, 2048]}
  other:
    - {m: [1, 2], n: 8, dtype: [float16, float32]}
budget: {trials: 5, timeout_s: 10}
"""


@pytest.fixture(scope="module")
def minimal() -> Space:
    return parse_space(MINIMAL, "x.yaml")


@pytest.fixture(scope="module", params=["softmax", "attention"])
def shipped(request: pytest.FixtureRequest) -> Space:
    return space_of(request.param)


def softmax(**fields: Any) -> Problem:
    return operation("softmax").problem({"m": 64, **fields})


def problems_of(space: Space) -> list[Problem]:
    return list(dict.fromkeys(itertools.chain(*space.problems.values())))


@cache
def space_of(op: str) -> Space:
    return load_space(op, [SPACES])


@cache
def variants_of(op: str, problem: Problem) -> tuple[Variant, ...]:
    return space_of(op).variants(problem, H200)


def errors(text: str) -> list[str]:
    with pytest.raises(SpaceError) as caught:
        parse_space(text, "x.yaml")
    return str(caught.value).splitlines()


def changed(old: str, new: str) -> str:
    assert old in MINIMAL
    return MINIMAL.replace(old, new, 1)


# Reading


def test_a_file_becomes_a_space(minimal: Space) -> None:
    assert minimal.op == "softmax"
    assert [p.name for p in minimal.parameters] == [
        *("template", "block_m", "block_n", "rescale", "rescale_threshold", "num_warps")
    ]
    assert [p.name for p in minimal.parameters if p.is_launch] == ["num_warps"]
    assert minimal.budget.trials == 5


def test_the_id_stands_for_what_is_legal(minimal: Space) -> None:
    same = changed("m: 64", "m: 65").replace("trials: 5", "trials: 6").replace("too large", "big")
    assert parse_space(same, "y.yaml").id == minimal.id
    assert parse_space(changed("[512, 1024]", "[512]"), "x.yaml").id != minimal.id
    assert parse_space(changed("4096", "4095"), "x.yaml").id != minimal.id


def test_spaces_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(MINIMAL)
    assert load_space(mine).id == load_space("mine", [tmp_path, SPACES]).id
    assert load_space(str(mine)).id == load_space(mine).id


def test_an_unknown_space_names_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktune.space.space.shipped", lambda folder: SPACES)
    with pytest.raises(SpaceError, match=r"did you mean 'softmax'\?; known: attention, softmax"):
        load_space("sofmax")
    with pytest.raises(SpaceError, match="cannot read the search space"):
        load_space("nowhere/x.yaml")


def test_a_users_own_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    text = changed("operation: softmax", "operation: ktune.operations.softmax:MINE")
    mine = type("Mine", (type(operation("softmax")),), {"name": "mine"})()
    monkeypatch.setattr("ktune.operations.softmax.MINE", mine, raising=False)
    monkeypatch.setattr("ktune.operations._REGISTRY", {})
    space = parse_space(text, "x.yaml")
    assert (space.op, space.problem_set()[0].op) == ("mine", "mine")


# Errors, each with its exact place


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("schema: 1", "schema: 2", "1:9: schema: this ktune reads schema 1, not 2"),
        ("schema: 1", "schema: one", "1:9: schema: this ktune reads schema 1, not 'one'"),
        ("schema: 1\n", "", "1:1: the key 'schema' is missing"),
        ("budget:", "budgets:", "26:1: budgets: unknown key; did you mean 'budget'?"),
        (
            "num_warps: {choices",
            "num_warps: {choise",
            "10:15: launch.num_warps.choise: unknown key; did you mean 'choices'?",
        ),
        (
            "because: the tile",
            "xyz: the tile",
            "13:5: constraints[0].xyz: unknown key; the keys here are require, because",
        ),
        (
            "operation: softmax",
            "operation: softmaxx",
            "2:12: operation: unknown operation 'softmaxx'; known: softmax, attention. "
            "Name your own as package.module:NAME",
        ),
        ("[1, 2, 4]", "[]", "5:22: parameters.block_m.choices: needs at least one"),
        ("[1, 2, 4]", "3", "5:22: parameters.block_m.choices: should be a list: [a, b], not 3"),
        ("[1, 2, 4]", "[1, 2, 1]", "5:29: parameters.block_m.choices[2]: 1 stands twice"),
        (
            "[1, 2, 4]",
            "[1, [2]]",
            "5:26: parameters.block_m.choices[1]: should be a number, a word, true or false",
        ),
        (
            "[1, 2, 4]",
            "[1, .nan]",
            "5:26: parameters.block_m.choices[1]: should be a finite number",
        ),
        (
            "[8.0, 4.0]",
            "[8.0, 1e-3]",
            "8:38: parameters.rescale_threshold.choices[1]: should be a number; write 1.0e-3",
        ),
        (
            "timeout_s: 10",
            "timeout_s: 1e3",
            "26:32: budget.timeout_s: should be a number; write 1.0e+3",
        ),
        ("trials: 5", "trials: 5.5", "26:18: budget.trials: should be a whole number, not 5.5"),
        ("trials: 5", "trials: 0", "26:18: budget.trials: should be greater than 0"),
        ("trials: 5", "trials: yes", "26:18: budget.trials: should be a whole number, not True"),
        (
            "{choices: [4, 8]}",
            "[4, 8]",
            "10:14: launch.num_warps: should be a mapping: {name: value}, not a list",
        ),
        (
            "[4, 8]",
            "[4, 8.0]",
            "10:28: launch.num_warps.choices[1]: should be a whole number of at least 1",
        ),
        (
            "  num_warps:",
            "  num_warp:",
            "10:3: launch.num_warp: is not a launch option; did you mean 'num_warps'?; "
            "they are num_warps, num_stages, num_ctas, maxnreg",
        ),
        (
            "block_m: {ch",
            "maxnreg: {ch",
            "5:3: parameters.maxnreg: is a launch option; move it to 'launch'",
        ),
        (
            "launch:\n",
            "  layout: {choices: [a]}\nlaunch:\n",
            "9:3: parameters.layout: is a name that the operation gives; take another one",
        ),
        (
            "launch:\n",
            "  min: {choices: [1]}\nlaunch:\n",
            "9:3: parameters.min: cannot name a parameter; take another word",
        ),
        (
            "template == 'one_tile'}",
            "template = 'one_tile'}",
            "5:48: parameters.block_m.when: cannot be read: invalid syntax; write == to compare",
        ),
        (
            "rescale_threshold < 8.0",
            "rescale_treshold < 8.0",
            "14:14: constraints[1].require: unknown name 'rescale_treshold'; did you mean "
            "'rescale_threshold'?; known: template, block_m, block_n, rescale, "
            "rescale_threshold, num_warps, dtype, even_n, itemsize, layout, m, n, row_block",
        ),
        (
            "block_m * row_block <= 4096",
            ">-\n      block_m\n      * row_block\n      <= 2 ** 12",
            "15:10: constraints[0].require: ** (a power) is not allowed; use + - * / // %",
        ),
        (
            "block_m * row_block <= 4096",
            '"block_m * row_block <= device.shared"',
            "12:38: constraints[0].require: device has no 'shared'; did you mean "
            "'shared_memory'?; it has name, backend, arch, "
            "sm_count, shared_memory, l2_bytes, memory_gib, capability, warp_size",
        ),
        (
            "block_m * row_block <= 4096",
            "3",
            "12:14: constraints[0].require: should be text, not 3",
        ),
        (
            "rescale == 'conditional'}",
            "rescale == 'contitional'}",
            "8:61: parameters.rescale_threshold.when: rescale is never 'contitional'; did you mean "
            "'conditional'?; its choices: always, conditional",
        ),
        (
            "rescale_threshold < 8.0",
            "layout in ['rows', 'columns']",
            "14:33: constraints[1].require: layout is never 'columns'; its choices: rows, strided",
        ),
        (
            "[1, 2, 4], when: template == 'one_tile'}",
            "[1, 2, 4], when: rescale == 'always'}",
            "5:39: parameters.block_m.when: 'rescale' stands later in the file; "
            "move it before this parameter",
        ),
        (
            "[one_tile, streaming]}",
            "[one_tile, streaming], when: m > 1}",
            "4:52: parameters.template.when: the template always applies; remove it",
        ),
        (
            "    because: the tile is too large\n",
            "",
            "12:5: constraints[0]: the key 'because' is missing",
        ),
        ("when: n > 1000", "when: n >", "17:14: seeds[0].when: cannot be read: invalid syntax"),
        ("when: n > 1000", "when: 3", "17:12: seeds[0].when: should be an expression"),
        (
            "when: n > 1000",
            "when: block_m > 1",
            "17:12: seeds[0].when: unknown name 'block_m'; did you mean 'row_block'?; "
            "known: dtype, even_n, itemsize, layout, m, n, row_block",
        ),
        (
            "{template: one_tile, block_m: 4,",
            "{template: one_tile, block_m: 3,",
            "18:35: seeds[1].block_m: is not one of 1, 2, 4",
        ),
        (
            "{template: one_tile, block_m: 4,",
            "{template: one_tile, blok_m: 4,",
            "18:26: seeds[1].blok_m: unknown parameter; did you mean 'block_m'?",
        ),
        (
            "{rescale: always}",
            "{rescale: alway}",
            "20:21: strategies.online.rescale: is not one of always, conditional",
        ),
        (
            "  default:",
            "  defaults:",
            "21:1: problems: the set 'default' is missing: it is what a bare search tunes",
        ),
        (
            "n: 8, dtype",
            "n: 8, dtipe",
            "25:25: problems.other[0].dtipe: softmax has no such field; did you mean 'dtype'?",
        ),
        (
            "n: [512, 2048]",
            "n: [512, 0]",
            "23:7: problems.default[0]: softmax: n=0 must be an integer of at least 1",
        ),
        (
            "n: [512, 2048]",
            "n: [512, {}]",
            "23:18: problems.default[0].n: should be a number, a word, true, false, "
            "or a list of those",
        ),
        ("seeds:", "schema: 1\nseeds:", "16:1: schema: stands twice; first in line 1"),
        (
            "[one_tile, streaming]",
            "[one_tile, streaming, off]",
            "4:45: parameters.template.choices[2]: names a template, but YAML reads it as False; "
            "put it in quotes",
        ),
        (
            "block_m: {choices",
            "yes: {choices",
            "5:3: parameters.yes: a key must be text; write 'yes' in quotes",
        ),
        (
            "[1, 2, 4]",
            "&c [1, *c]",
            "5:29: not YAML: aliases (*name) are not supported; write the value out",
        ),
        ("schema: 1", "schema: !!python/name:os.system x", None),
        (
            "template == 'one_tile'}",
            "template in ['one_tile', 'a']}",
            None,
        ),
    ],
)
def test_one_error(old: str, new: str, error: str | None) -> None:
    found = errors(changed(old, new))
    if error is None:
        assert "not YAML: " in found[0]
    else:
        assert f"x.yaml:{error}" in found


def test_all_errors_of_a_file_come_at_once_in_order() -> None:
    text = """\
        schema: 1
        operation: softmax
        parameters:
          template: {choices: [a]}
          block_m: {choises: [1], when: tmplate == 'a'}
        constraints:
          - {require: block_m >, because: ''}
        problems:
          default:
            - {m: 1}
          other:
            - {m: 1, n: 1}
        budget: {trials: many}
        """
    assert errors(dedent(text)) == [
        "x.yaml:5:3: parameters.block_m: the key 'choices' is missing",
        "x.yaml:5:13: parameters.block_m.choises: unknown key; did you mean 'choices'?",
        "x.yaml:5:33: parameters.block_m.when: unknown name 'tmplate'; did you mean 'template'?; "
        "known: template, dtype, even_n, itemsize, layout, m, n, row_block",
        "x.yaml:7:23: constraints[0].require: cannot be read: invalid syntax",
        "x.yaml:7:35: constraints[0].because: needs text",
        "x.yaml:10:7: problems.default[0]: softmax needs n=...; given: m (elements in a row)",
        "x.yaml:13:18: budget.trials: should be a whole number, not 'many'",
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "x.yaml:1:1: the file is empty"),
        ("[1, 2]", "x.yaml:1:1: should be a mapping: {name: value}, not a list"),
        ("a: [1", "x.yaml:1:6: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\n---\nb: 2", "x.yaml:2:1: not YAML: but found another document"),
        ("a: \x00", "x.yaml:1:4: not YAML: special characters are not allowed"),
    ],
)
def test_files_that_are_something_else(text: str, error: str) -> None:
    assert errors(text)[0] == error


# Legal variants


def test_absent_parameters_and_constraints_on_them(minimal: Space) -> None:
    texts = {v.text for v in minimal.variants(softmax(n=1024), H200)}
    one_tile = {f"one_tile block_m={m} num_warps={w}" for m in (1, 2, 4) for w in (4, 8)}
    streaming = {
        f"streaming block_n={b} {r} num_warps={w}"
        for b in (512, 1024)
        for r, w in [
            *itertools.product(
                ["rescale=always", "rescale=conditional rescale_threshold=4.0"], "48"
            ),
            ("rescale=conditional rescale_threshold=8.0", 4),
        ]
    }
    assert texts == one_tile | streaming


def test_rejections_add_up(minimal: Space, shipped: Space) -> None:
    rejections = minimal.rejections(softmax(n=2048), H200)
    assert rejections == {"the tile is too large": 2, "eight warps want threshold 4": 2}
    problem = shipped.problem_set()[0]
    whole = {}
    for space in (minimal, shipped):
        target = softmax(n=2048) if space is minimal else problem
        legal, out = space.variants(target, H200), space.rejections(target, H200)
        whole[space.label] = len(legal) + sum(out.values())
    assert whole["x.yaml"] == 3 * 2 + 2 * 3 * 2
    raw = {"softmax": 7 * 2 * 6 + 8 * 7 * 6 * 2 * 3 * 2 * 6, "attention": 2 * 2 * 8 * 3 * 16 * 8}
    assert whole[shipped.label] == raw[shipped.op]


def test_why_not(minimal: Space) -> None:
    def why(**values: Any) -> list[str]:
        return minimal.why_not(values, softmax(n=2048), H200)

    assert why(template="one_tile", block_m=2, num_warps=4) == []
    assert why(template="one_tile", block_m=4, num_warps=4) == [
        "the tile is too large (requires block_m * row_block <= 4096)"
    ]
    assert why(template="one_tile", block_m=True, block_n=512, num_warps=4, nm_warps=1) == [
        "no parameter 'nm_warps'; did you mean 'num_warps'?; known: template, block_m, block_n, "
        "rescale, rescale_threshold, num_warps",
        "block_m=true is not one of 1, 2, 4",
        "block_n applies only when template == 'streaming'",
    ]
    assert why(template="streaming", block_n=512, rescale="conditional", num_warps=4) == [
        "rescale_threshold is missing; choose one of 8.0, 4.0"
    ]


def test_a_checked_variant(minimal: Space) -> None:
    values = {"template": "streaming", "block_n": 512, "rescale": "conditional", "num_warps": 4}
    variant = minimal.variant({**values, "rescale_threshold": 8}, softmax(n=2048), H200)
    assert variant.values["rescale_threshold"] == 8.0
    assert variant in minimal.variants(softmax(n=2048), H200)
    with pytest.raises(VariantError, match="is not legal for 'softmax m=64 n=2048"):
        minimal.variant(values, softmax(n=2048), H200)


def test_a_problem_of_another_operation(minimal: Space) -> None:
    problem = space_of("attention").problem_set()[0]
    with pytest.raises(UsageError, match=r"x\.yaml is a space of softmax"):
        minimal.variants(problem, H200)


def test_seeds(minimal: Space) -> None:
    assert [v.template for v in minimal.seeds_for(softmax(n=512), H200)] == ["one_tile"]
    assert [v.template for v in minimal.seeds_for(softmax(n=2048), H200)] == ["streaming"]


def test_completion_is_nearest_to_the_default() -> None:
    space = space_of("attention")
    for problem in space.problem_set():
        default = space.operation.default_variant(problem, H200)
        assert space.complete({}, problem, H200) == default
        found = space.complete({"rescale": "conditional"}, problem, H200)
        assert found.values == {
            **default.values,
            **{"rescale": "conditional", "rescale_threshold": 8.0, "rescale_granularity": "row"},
        } | {name: found.values[name] for name in ("block_n", "num_stages", "load")}


def test_completion_says_why_there_is_none(minimal: Space) -> None:
    with pytest.raises(VariantError, match="rescale applies only when template == 'streaming'"):
        minimal.complete({"template": "one_tile", "rescale": "always"}, softmax(n=512), H200)
    with pytest.raises(VariantError, match="the tile is too large"):
        minimal.complete({"block_m": 4}, softmax(n=2048), H200)
    with pytest.raises(VariantError, match="no parameter 'blockm'; did you mean 'block_m'"):
        minimal.complete({"blockm": 4}, softmax(n=2048), H200)


def test_problem_sets(minimal: Space) -> None:
    assert [p["n"] for p in minimal.problem_set()] == [512, 2048]
    assert len(minimal.problem_set("other")) == 4
    assert minimal.problem_set("m=64 n=512") == minimal.problem_set("softmax n=512 m=64")
    with pytest.raises(UsageError, match=r"'othr'; did you mean 'other'.*; it has default, other"):
        minimal.problem_set("othr")
    with pytest.raises(ProblemError, match="no field 'k'"):
        minimal.problem_set("k=1")


def test_strategies(minimal: Space) -> None:
    assert minimal.strategy("online") == {"rescale": "always"}
    with pytest.raises(UsageError, match=r"did you mean 'online'.*; it has online"):
        minimal.strategy("onlin")


def test_fifty_thousand_assignments_take_less_than_a_second(minimal: Space) -> None:
    choices = "".join(f"  p{i}: {{choices: [0, 1, 2, 3, 4, 5]}}\n" for i in range(6))
    text = changed("launch:\n", f"{choices}launch:\n").replace(
        "seeds:\n",
        "  - {require: p0 + p1 + p2 + p3 == 3, because: a}\n"
        "  - {require: p4 + p5 >= p0, because: b}\nseeds:\n",
    )
    space = parse_space(text, "x.yaml")
    start = time.process_time()
    legal = space.variants(softmax(n=512), H200)
    assert time.process_time() - start < 1
    assert len(legal) + sum(space.rejections(softmax(n=512), H200).values()) == 18 * 6**6


# The shipped spaces


@pytest.mark.parametrize("device", DEVICES)
def test_the_default_variant_is_legal(shipped: Space, device: str) -> None:
    for problem in problems_of(shipped):
        values = shipped.operation.default_variant(problem, DEVICES[device]).values
        assert shipped.why_not(values, problem, DEVICES[device]) == [], problem.text


@pytest.mark.parametrize("device", ["h200", "sm_86"])
def test_the_default_variant_is_legal_for_odd_problems(device: str) -> None:
    lengths = (1, 2, 7, 33, 1000, 2049, 16_385, 1_000_001)
    cases = [("softmax", {"m": m, "n": n}) for m in (1, 9, 4096) for n in lengths]
    shapes = itertools.product((0, 1, 16, 17, 40, 128, 129), (1, 16, 33, 72, 128, 192, 256))
    cases += [("attention", {"heads": 2, "seqlen_q": s, "head_dim": d}) for s, d in shapes]
    spaces = {name: space_of(name) for name in ("softmax", "attention")}
    for (op, fields), dtype in itertools.product(cases, ("bfloat16", "float32")):
        problem = operation(op).problem({**fields, "dtype": dtype})
        values = operation(op).default_variant(problem, DEVICES[device]).values
        assert spaces[op].why_not(values, problem, DEVICES[device]) == [], problem.text


def test_a_problem_and_its_bucket_have_the_same_variants(shipped: Space) -> None:
    for problem in problems_of(shipped):
        bucket = shipped.operation.bucket(problem)
        if bucket != problem:
            legal = variants_of(shipped.op, problem)
            assert variants_of(shipped.op, bucket) == legal, problem.text


def test_an_exhaustive_recording_is_feasible(shipped: Space) -> None:
    least, most = {"softmax": (30, 200), "attention": (60, 200)}[shipped.op]
    for problem in shipped.problem_set():
        assert least <= len(variants_of(shipped.op, problem)) <= most, problem.text


def test_every_default_problem_has_seeds(shipped: Space) -> None:
    for problem in shipped.problem_set():
        seeds = shipped.seeds_for(problem, H200)
        assert len(seeds) >= 2, problem.text
        assert set(seeds) <= set(variants_of(shipped.op, problem))


def test_every_seed_strategy_and_choice_is_of_use(shipped: Space) -> None:
    variants = [
        variant.values
        for problem in problems_of(shipped)
        for variant in variants_of(shipped.op, problem)
    ]
    for settings in shipped.strategies.values():
        assert any(settings.items() <= values.items() for values in variants), settings
    for seed in shipped.seeds:
        assert any(set(seed.values) <= values.items() for values in variants), seed
    for parameter in shipped.parameters:
        used = {values.get(parameter.name) for values in variants}
        assert set(parameter.choices) <= used, parameter.name


def test_every_strategy_of_attention_fits_a_small_device() -> None:
    space = space_of("attention")
    for problem, name in itertools.product(space.problem_set(), space.strategies):
        space.complete(space.strategy(name), problem, SMALL)


def test_the_example_in_the_readme_is_a_space() -> None:
    text = (SPACES / "README.md").read_text(encoding="utf-8")
    example = text.split("```yaml\n")[1].split("```")[0]
    assert parse_space(example, "README.md").strategy("online")
