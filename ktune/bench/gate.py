"""The gate: all that a variant must pass before it is timed.

Small, ragged problems of the same structure prove the kernel on every distribution; then the
problem itself is computed once more, on friendly inputs. Every launch is guarded (see ``check``);
adversarial inputs and the problem itself are launched twice.
"""

from __future__ import annotations

import torch

from ktune.bench.check import NOTHING_WRONG, CaseCache, Verdict, check_module, make_case
from ktune.codegen import load_module, render
from ktune.codegen.render import Source
from ktune.operations import operation
from ktune.problem import Problem
from ktune.variant import Variant


class Gate:
    """Checks variants on one device; remembers cases, and what passed.

    The same source with the same options on the same small problem is checked once in a process:
    another problem of the structure then costs its own check alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._passed: dict[tuple[str, str, str], Verdict] = {}
        self.cases = CaseCache(device)

    def prove(self, problem: Problem, variant: Variant) -> Verdict:
        """Check a variant on the small problems, with every distribution."""
        worst = NOTHING_WRONG
        for small in operation(problem.op).proving(problem):
            source = render(variant, small)
            key = (source.id, str(variant.launch), small.text)
            verdict = self._passed.get(key) or self._prove(source, variant, small)
            if not verdict.passed:
                return verdict
            self._passed[key] = verdict
            worst = verdict.worse(worst)
        return worst

    def check(self, problem: Problem, variant: Variant) -> Verdict:
        """Prove a variant, then check it on the problem itself, on friendly inputs."""
        proved = self.prove(problem, variant)
        if not proved.passed:
            return proved
        case = self.cases.get(problem, operation(problem.op).distributions[0], large=True)
        module = load_module(render(variant, problem))
        verdict = check_module(module, variant.options, case, repeat=True)
        return verdict.worse(proved) if verdict.passed else verdict

    def verify(self, problem: Problem, variant: Variant) -> Verdict:
        """Check a variant on the problem itself with every distribution, each launched twice."""
        module, worst = load_module(render(variant, problem)), NOTHING_WRONG
        for distribution in operation(problem.op).distributions:
            case = make_case(problem, distribution, self._device)
            verdict = check_module(module, variant.options, case, repeat=True)
            if not verdict.passed:
                return verdict
            worst = verdict.worse(worst)
        return worst

    def _prove(self, source: Source, variant: Variant, small: Problem) -> Verdict:
        module, worst = load_module(source), NOTHING_WRONG
        kinds = operation(small.op).distributions
        for distribution in kinds:
            case = self.cases.get(small, distribution, large=False)
            repeat = distribution == kinds[:2][-1]
            verdict = check_module(module, variant.options, case, repeat)
            if not verdict.passed:
                return verdict
            worst = verdict.worse(worst)
        return worst
