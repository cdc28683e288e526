"""Every structural variant of the shipped spaces, in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from ktune.bench.check import check_module, make_case
from ktune.bench.tasks import COMPILE, COMPILER, interpretable
from ktune.bench.worker import Worker
from ktune.codegen import load_module, render
from ktune.device import Device, compile_target
from ktune.operations import operation, parse_problem
from ktune.space import load_space
from ktune.variant import Variant

H200 = Device("NVIDIA H200", "cuda", "sm_90", 132, 232_448, 60 << 20, 140)
SIZES = {"block_m", "block_n", "lanes", "loop_stages", "num_warps", "num_stages"}
SMALL = {"block_m": 16, "block_n": 32}
PROBLEMS = [
    "softmax m=13 n=5000",
    "softmax m=13 n=300",
    "softmax m=13 n=256",
    "softmax m=13 n=5000 layout=strided",
    *(
        f"attention heads=4 heads_kv=2 seqlen_q=256 head_dim={d} causal={causal}"
        for d, causal in ((16, "none"), (32, "upper_left"), (80, "lower_right"))
    ),
]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def structural_variants():
    """Return one variant, the first, of each setting of what changes the code's structure."""
    for text in PROBLEMS:
        problem, seen = parse_problem(text), set()
        for variant in load_space(problem.op).variants(problem, H200):
            key = tuple((k, v) for k, v in variant.values.items() if k not in SIZES)
            if key not in seen:
                seen.add(key)
                yield pytest.param(problem, variant, id=f"{text} {variant.text}")


@pytest.mark.parametrize(("problem", "variant"), list(structural_variants()))
def test_structural_variant_is_right(problem, variant):
    values = variant.values
    if problem.op == "attention":
        values |= SMALL
    variant = Variant.of(problem.op, values)
    op = operation(problem.op)
    for small in map(interpretable, op.proving(problem)):
        if problem.op == "attention":
            sq, sk = small.size("seqlen_q"), small.size("seqlen_k")
            small = small.replace(batch=1, seqlen_q=sq // 4, seqlen_k=sk // 4)
        module = load_module(render(variant, small))
        for distribution in op.distributions[:2]:
            case = make_case(small, distribution, torch.device("cpu"))
            verdict = check_module(module, variant.options, case)
            assert verdict.passed, verdict.detail


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_defaults_compile_without_a_gpu(arch):
    device, worker = compile_target(arch), Worker(COMPILER)
    try:
        for text in (PROBLEMS[0], "attention heads=4 seqlen_q=256 head_dim=64 causal=upper_left"):
            problem = parse_problem(text)
            variant = operation(problem.op).default_variant(problem, device)
            arguments = (problem.text, variant.text, device.to_dict())
            used = worker.call(COMPILE, *arguments, timeout_s=200)
            assert used["registers"] > 0
            assert used["shared_bytes"] <= device.shared_memory
    finally:
        worker.kill()


def test_descriptor_loads_compile_to_tma_for_hopper():
    problem = parse_problem("attention heads=4 seqlen_q=256 head_dim=128")
    text = (
        "forward block_m=64 block_n=128 load=descriptor normalization=deferred rescale=always "
        "tile_order=sequential num_warps=4 num_stages=1"
    )
    worker = Worker(COMPILER)
    try:
        device = compile_target("sm_90").to_dict()
        used = worker.call(COMPILE, problem.text, text, device, timeout_s=200)
    finally:
        worker.kill()
    # Three programs of 128 threads share the 65536 registers of a multiprocessor.
    assert used["registers"] <= 168
    assert used["spill_bytes"] == 0
