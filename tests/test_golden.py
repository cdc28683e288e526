"""Rendered kernels, byte for byte: a change of output is a change that a reviewer reads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from ktune.codegen import render
from ktune.codegen.render import template_variables
from ktune.device import Device
from ktune.operations import operation, parse_problem
from ktune.space import load_space
from ktune.variant import Variant

GOLDEN = Path(__file__).parent / "golden"
H200 = Device("NVIDIA H200", "cuda", "sm_90", 132, 232_448, 60 << 20, 140)
ATTENTION = "attention heads=2 seqlen_q=256 head_dim=64"
BASE = "block_m=64 block_n=64 num_warps=4"
STREAM = "streaming block_n=4096 eviction=none loop_stages=1 second_pass"
CASES = {
    "softmax_one_tile": ("softmax m=64 n=1024", "one_tile block_m=4 eviction=none"),
    "softmax_one_tile_ragged_strided": (
        "softmax m=64 n=1000 layout=strided",
        "one_tile block_m=4 eviction=evict_first",
    ),
    "softmax_streaming_lanes": (
        "softmax m=64 n=50257",
        f"{STREAM}=reverse lanes=512 rescale=always",
    ),
    "softmax_streaming_safe": ("softmax m=64 n=50257", f"{STREAM}=forward lanes=1 rescale=never"),
    "softmax_streaming_conditional": (
        "softmax m=64 n=50257 layout=strided",
        f"{STREAM}=forward block_m=8 rescale=conditional rescale_granularity=row "
        "rescale_threshold=8.0",
    ),
    "attention_fa1": (
        f"{ATTENTION} causal=none",
        f"forward load=pointer normalization=per_tile rescale=always tile_order=sequential {BASE}",
    ),
    "attention_fa2_descriptor_causal": (
        f"{ATTENTION} causal=upper_left return_lse=true",
        "forward load=descriptor normalization=deferred rescale=always "
        f"tile_order=reversed_across_heads {BASE}",
    ),
    "attention_fa4_row_lower_right": (
        "attention heads=2 seqlen_q=256 head_dim=80 causal=lower_right",
        "forward load=pointer normalization=deferred rescale=conditional rescale_granularity=row "
        f"rescale_threshold=8.0 tile_order=reversed {BASE}",
    ),
    "attention_fa4_tile": (
        f"{ATTENTION} causal=none",
        "forward load=descriptor normalization=deferred rescale=conditional "
        f"rescale_granularity=tile rescale_threshold=8.0 tile_order=sequential {BASE}",
    ),
    "attention_safe": (
        f"{ATTENTION} causal=none",
        f"forward load=pointer normalization=deferred rescale=never tile_order=sequential {BASE}",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rendered_source_is_as_reviewed(name, request):
    problem, variant = CASES[name]
    asked = parse_problem(problem)
    text = render(Variant.parse(asked.op, variant), asked).text
    ast.parse(text)
    path = GOLDEN / f"{name}.py"
    if request.config.getoption("--update-golden"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "read the change; accept: --update-golden"


def test_rendered_sources_are_formatted_as_rendered():
    command = [sys.executable, "-m", "ruff", "format", "--check", "--line-length=100", "--isolated"]
    done = subprocess.run([*command, *sorted(GOLDEN.glob("*.py"))], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("op", ["softmax", "attention"])
def test_every_parameter_is_used_and_every_variable_is_given(op):
    space = load_space(op)
    problem = space.problem_set()[0]
    given = set(operation(op).structure(problem))
    parameters = {p.name for p in space.parameters if not p.is_launch} - {"template"}
    families = next(p.choices for p in space.parameters if p.name == "template")
    used = set().union(*(template_variables(op, str(family)) for family in families))
    assert used <= given | parameters
    assert parameters <= used


def test_same_variant_same_bytes_and_launch_options_are_not_in_them():
    problem = parse_problem("softmax m=64 n=1024")
    texts = {
        render(Variant.parse("softmax", f"one_tile block_m=4 eviction=none num_warps={w}"), problem)
        for w in (1, 2, 4)
    }
    assert len(texts) == 1
