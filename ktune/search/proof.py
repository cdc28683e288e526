"""Confirm a replay's winners without the device: compile them for it, and interpret them here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ktune.bench.tasks import COMPILE, COMPILER, INTERPRET, INTERPRETER
from ktune.bench.worker import Pool, Task, WorkerError
from ktune.problem import Problem
from ktune.search.result import Result
from ktune.target.target import Target
from ktune.variant import Variant

PROOF_LIMIT_S = 240.0


class ProofListener(Protocol):
    """Hears of proofs."""

    def proof_started(self, count: int) -> None:
        """Winners of a replay are about to be compiled and interpreted here."""

    def proof_done(self, proof: Proof) -> None:
        """One winner was compiled and interpreted."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What this machine, without the device, could confirm of a replayed winner.

    Attributes:
        problem: whose structure was compiled.
        variant: what was compiled and interpreted.
        resources: registers, spill_bytes, shared_bytes for the device's architecture; or empty.
        error: largest error in Triton's interpreter; None if it did not run.
        limit: the error allowed.
        detail: what failed; empty if all is well.
    """

    problem: Problem
    variant: Variant
    resources: dict[str, float]
    error: float | None
    limit: float | None
    detail: str = ""


def prove(
    results: Sequence[Result], target: Target, workers: int, listener: ProofListener
) -> dict[str, Proof]:
    """Compile replayed winners for their device and run them in Triton's interpreter, here.

    Winners of equal source and launch options are proved once.

    Returns:
        Proofs by problem text.
    """
    proofs: dict[str, Proof] = {}
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result.entry:
            variant = result.entry.variant
            groups.setdefault((result.entry.source_id, variant.text), []).append(result)
    listener.proof_started(len(groups))
    for key, proof in _proofs(groups, target, workers):
        proofs |= {result.problem.text: proof for result in groups[key]}
        listener.proof_done(proof)
    return proofs


def _proofs(
    groups: dict[tuple[str, str], list[Result]], target: Target, workers: int
) -> Iterator[tuple[tuple[str, str], Proof]]:
    compilers, interpreters = Pool(workers, COMPILER), Pool(workers, INTERPRETER)
    try:
        for key, members in groups.items():
            problem, text = members[0].problem.text, key[1]
            arguments = (problem, text, target.device.to_dict())
            compilers.submit(key, Task(COMPILE, arguments), PROOF_LIMIT_S)
        compiled = dict(compilers.next() for _ in groups)
        compilers.close()
        for key, members in groups.items():
            interpreters.submit(
                key, Task(INTERPRET, (members[0].problem.text, key[1])), PROOF_LIMIT_S
            )
        for _ in groups:
            key, verdict = interpreters.next()
            yield key, _proof(groups[key][0], compiled[key], verdict)
    finally:
        compilers.close()
        interpreters.close()


def _proof(result: Result, resources: dict[str, float] | WorkerError, verdict: object) -> Proof:
    assert result.entry is not None
    variant = result.entry.variant
    details = [str(part) for part in (resources, verdict) if isinstance(part, WorkerError)]
    used = {} if isinstance(resources, WorkerError) else resources
    if not isinstance(verdict, dict):
        return Proof(result.problem, variant, used, None, None, "; ".join(details))
    details += [verdict["detail"]] if verdict["detail"] else []
    return Proof(
        result.problem, variant, used, verdict["error"], verdict["limit"], "; ".join(details)
    )
