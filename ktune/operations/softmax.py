"""Softmax over one dimension: problem, reference, inputs, defaults.

A problem is ``m`` rows of ``n`` elements. ``layout=rows`` means rows of unit stride at any row
stride; ``layout=strided`` means a 4-D view ``[a, b, rows, n]`` with any strides, which is how
softmax over another dimension, or over a permuted tensor, is read in place.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ktune.device import Device
from ktune.operations.base import (
    DTYPES,
    Field,
    Operation,
    Tensors,
    generator,
    itemsize,
    next_power_of_two,
)
from ktune.problem import Problem, Scalar
from ktune.variant import Variant

ONE_TILE_LIMIT = 16_384
"""Longest row, in elements, that the default variant keeps in one tile."""


class Softmax(Operation):
    """``out[i] = exp(x[i] - max x) / sum_j exp(x[j] - max x)`` for every row.

    Special values are PyTorch's (contract D2): a row of only -inf, or with a NaN or a +inf in
    it, is NaN throughout; no other row is touched.
    """

    name = "softmax"
    fields = (
        Field("m", help="rows"),
        Field("n", help="elements in a row"),
        Field("dtype", "bfloat16", choices=tuple(DTYPES), help="of input and output"),
        Field("layout", "rows", choices=("rows", "strided"), help="how rows lie in memory"),
    )
    distributions = ("normal", "adversarial", "rising", "falling", "peaky", "sink", "huge")
    roof = "memory"
    batch_fields = ("m",)
    relative_outputs = frozenset({"out"})

    def structure(self, problem: Problem) -> dict[str, Scalar]:
        """Return ``layout``, ``row_block`` (the next power of two of n) and ``even_n``."""
        n = problem.size("n")
        row_block = next_power_of_two(n)
        return {
            "layout": problem.word("layout"),
            "row_block": row_block,
            "even_n": n == row_block,
        }

    def default_variant(self, problem: Problem, device: Device) -> Variant:
        """Return one tile for rows up to 16384 elements, the streaming family beyond."""
        block = next_power_of_two(problem.size("n"))
        if self.default_template(problem.size("n")) == "one_tile":
            rows = max(1, min(16, 1024 // block))
            warps = max(1, min(16, rows * block // 512))
            values: dict[str, Scalar] = {"template": "one_tile", "block_m": rows}
        else:
            values = {"template": "streaming", "rescale": "always", "second_pass": "forward"}
            values |= {"loop_stages": 1, **_streaming_tile(problem)}
            warps = 8
        values |= {"eviction": "none", "num_warps": warps}
        return Variant.of(self.name, values)

    def bucket(self, problem: Problem) -> Problem:
        """Return the problem with m and n rounded up to powers of two."""
        return problem.replace(
            m=next_power_of_two(problem.size("m")), n=next_power_of_two(problem.size("n"))
        )

    def access(self, problem: Problem) -> Scalar:
        """Return whether every row begins at a 16-byte word, so that loads can be wide."""
        return problem.size("n") * itemsize(problem) % 16 == 0

    def serves(self, problem: Problem, variant: Variant, tuned: Problem) -> bool:
        """Return whether both rows are long ones.

        With each problem left out in turn (H200), a long row's winner lost 0 to 0.8 % at another
        long row, where the default lost 7 to 45 %. Short rows' default loses 2 % at most, and a
        short row's winner did not serve a long one.
        """
        n, values = problem.size("n"), variant.values
        long = self.default_template(n) == values["template"] == "streaming"
        return long and next_power_of_two(n) > int(values["block_n"])

    @staticmethod
    def default_template(n: int) -> str:
        """Return the family of the default variant for a row of n elements."""
        return "one_tile" if next_power_of_two(n) <= ONE_TILE_LIMIT else "streaming"

    def proving(self, problem: Problem) -> list[Problem]:
        """Return the same row length with few, odd rows; and a ragged one of equal structure.

        There are 13 rows even where the problem has fewer, so that no adversarial row is left out.
        """
        n, few = problem.size("n"), problem.replace(m=13)
        block = next_power_of_two(n)
        if n == block or n - 1 <= block // 2:
            return [few]
        return [few, few.replace(n=block // 2 + 1 if n != block // 2 + 1 else n + 1)]

    def make_inputs(
        self, problem: Problem, distribution: str, seed: int, device: torch.device
    ) -> Tensors:
        """Return ``x``: [m, n], or [2, 1, m / 2, n]-like with permuted strides if strided."""
        m, n = problem.size("m"), problem.size("n")
        x = torch.randn(m, n, generator=generator(seed, device), device=device)
        _shape_rows(x, distribution, torch.finfo(self.dtype(problem)).max)
        x = x.to(self.dtype(problem))
        if problem.word("layout") == "strided":
            x = x.t().contiguous().t().reshape(1, 1, m, n) if m * n else x.reshape(1, 1, m, n)
        return {"x": x}

    def make_outputs(self, problem: Problem, inputs: Tensors) -> Tensors:
        """Return ``out``, of x's shape, contiguous as PyTorch's is."""
        return {"out": torch.empty_like(inputs["x"], memory_format=torch.contiguous_format)}

    def arguments(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Any, ...]:
        """Return ``(x, out)``."""
        return inputs["x"], outputs["out"]

    def reference(self, problem: Problem, inputs: Tensors) -> Tensors:
        """Return the softmax computed in float64."""
        return {"out": torch.softmax(inputs["x"].double(), -1)}

    def eager(self, problem: Problem, inputs: Tensors) -> Tensors:
        """Return ``torch.softmax``."""
        return {"out": torch.softmax(inputs["x"], -1)}

    def least_bytes(self, problem: Problem) -> int:
        """Return one read and one write of m * n elements."""
        return 2 * problem.size("m") * problem.size("n") * itemsize(problem)

    def flops(self, problem: Problem) -> int:
        """Return 0: there is no matrix product."""
        return 0


def _streaming_tile(problem: Problem) -> dict[str, Scalar]:
    """Return a loop tile of 4096 elements: one row of it, or eight where strides are free."""
    if problem.word("layout") == "rows":
        return {"block_n": 4096, "lanes": 512}
    return {"block_n": 512, "block_m": 8}


def _shape_rows(x: torch.Tensor, distribution: str, top: float) -> None:
    """Turn normal rows into the named distribution, in place; ``top`` is the dtype's largest."""
    n = x.shape[1]
    ramp = torch.arange(n, device=x.device, dtype=x.dtype) / max(n - 1, 1)
    if distribution == "normal":
        return
    if distribution == "peaky":
        x *= 8
    elif distribution == "rising":
        x += 60 * ramp
    elif distribution == "falling":
        x -= 60 * ramp
    elif distribution == "sink":
        x[:, :1] += 30
    elif distribution == "adversarial":
        _adversarial_rows(x, ramp)
    elif distribution == "huge":
        _huge_rows(x, ramp, top)
    else:
        raise ValueError(f"softmax inputs have no distribution {distribution!r}")


def _adversarial_rows(x: torch.Tensor, ramp: torch.Tensor) -> None:
    """Give each row, by turns, one of nine patterns that have broken softmax kernels."""
    n = x.shape[1]
    half = max(n // 2, 1)
    x[0::9] += 600 * ramp - 300  # the maximum rises in every tile, from -300 to 300
    x[1::9] += 300 - 600 * ramp  # it never rises again
    x[2::9, n // 3] = 300.0  # one spike: all other terms vanish
    x[3::9, :half] = -math.inf  # the first tiles hold nothing
    x[4::9, half:] = -math.inf  # the last tiles hold nothing
    x[5::9] = -math.inf  # NaN in this row only
    x[6::9, n - 1] = math.inf  # NaN in this row only
    x[7::9, n // 2] = math.nan  # NaN in this row only
    x[8::9] = 88.72284  # equal values at the edge of exp in float32


def _huge_rows(x: torch.Tensor, ramp: torch.Tensor, top: float) -> None:
    """Give each row, by turns, one of five patterns of finite scores that reach the largest."""
    n = x.shape[1]
    x[0::5] = (2 * ramp - 1) * top  # from one end of the range to the other
    x[1::5] = (1 - 2 * ramp) * top
    x[2::5] = top  # equal ones at each end: 1 / n
    x[3::5] = -top
    x[4::5] = -top
    x[4::5, n // 3] = top  # one spike over all others
