"""A campaign: the searches of one ``ktune search``, each ending with an entry in the table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from optuna.storages import BaseStorage

from ktune.bench.measurement import Measurement
from ktune.bench.tasks import COMPILE, COMPILER, INTERPRET, INTERPRETER
from ktune.bench.worker import Pool, Task, WorkerError
from ktune.codegen import render, template_digest
from ktune.errors import TableError
from ktune.operations import operation
from ktune.problem import Problem
from ktune.search.recording import RecordedProblem, Recording
from ktune.search.storage import quiet_optuna
from ktune.search.study import Budget, Outcome, ProblemSearch
from ktune.search.target import Target
from ktune.search.winner import FINALISTS, Winner, choose
from ktune.space import Space
from ktune.table import Entry, Provenance, update_table
from ktune.variant import Variant

BASELINES = ("torch", "compile", "flash", "cudnn")
PROOF_LIMIT_S = 240.0


class Listener(Protocol):
    """Hears of a campaign's progress; the command line draws bars from it."""

    def problem_started(self, problem: Problem) -> None:
        """A problem's search begins."""

    def trial_done(
        self, problem: Problem, variant: Variant, measurement: Measurement, done: int, goal: int
    ) -> None:
        """A variant was measured."""

    def problem_done(self, result: Result) -> None:
        """A problem has its winner (or none)."""

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


@dataclass(slots=True)
class Result:
    """The outcome of one problem."""

    problem: Problem
    default: Variant
    outcome: Outcome
    samples: dict[str, list[float]] = field(default_factory=dict)
    winner: Winner | None = None
    entry: Entry | None = None
    proof: Proof | None = None
    table_error: str = ""

    @property
    def baselines(self) -> dict[str, float]:
        """Medians of the baselines in ms."""
        return {
            name.removeprefix("baseline:"): statistics.median(values)
            for name, values in self.samples.items()
            if name.startswith("baseline:") and values
        }


class Campaign:
    """Searches problems one after the other and writes the table as it goes.

    Args:
        target: what measures.
        storage: Optuna's.
        table: the dispatch table to update; None writes none.
        budget: for each problem; None takes the space's.
        seed: of the samplers.
        listener: hears of progress.
    """

    def __init__(
        self,
        target: Target,
        storage: BaseStorage,
        table: Path | None,
        budget: Budget | None,
        seed: int,
        listener: Listener,
    ) -> None:
        self._target, self._storage, self._table = target, storage, table
        self._budget, self._seed, self._listener = budget, seed, listener

    def run(self, work: Sequence[tuple[Space, Problem]]) -> Iterator[Result]:
        """Search every problem; yields each result once its entry is in the table."""
        with quiet_optuna():
            for space, problem in work:
                self._listener.problem_started(problem)
                result = self._search(space, problem)
                self._save(result)
                self._listener.problem_done(result)
                yield result

    def _search(self, space: Space, problem: Problem) -> Result:
        op = operation(problem.op)
        default = op.default_variant(problem, self._target.device)
        search = ProblemSearch(space, problem, self._target, self._storage, self._seed)

        def on_trial(variant: Variant, measurement: Measurement, done: int, goal: int) -> None:
            self._listener.trial_done(problem, variant, measurement, done, goal)

        budget = self._budget or Budget(space.budget.trials, space.budget.timeout_s)
        outcome = search.run(budget, default, on_trial)
        result = Result(problem, default, outcome)
        finalists = _finalists(outcome, default)
        if finalists:
            result.samples = self._target.finals(problem, finalists, list(BASELINES))
            own = {v.text: result.samples.get(v.text, []) for v in finalists}
            result.winner = choose(default.text, own, outcome.measurements)
        if result.winner:
            result.entry = self._entry(result, result.winner)
        return result

    def _entry(self, result: Result, winner: Winner) -> Entry:
        variant = Variant.parse(result.problem.op, winner.text)
        provenance = Provenance(
            latency_ms=winner.latency_ms,
            spread_ms=winner.spread_ms,
            default_latency_ms=winner.default_latency_ms,
            margin=winner.margin,
            is_default=variant == result.default,
            samples=winner.samples,
            protocol=self._target.protocol,
            versions=self._target.versions,
            measured=self._target.measured,
            replayed_from=self._target.replayed_from,
            trials=len(result.outcome.measurements),
            baselines=result.baselines,
        )
        source = render(variant, result.problem)
        return Entry(self._target.device.key, result.problem, variant, source.id, provenance)

    def _save(self, result: Result) -> None:
        if self._table is None or result.entry is None:
            return
        try:
            update_table(self._table, [result.entry], [self._target.device])
        except TableError as error:
            result.table_error = str(error)


def _finalists(outcome: Outcome, default: Variant) -> list[Variant]:
    """Return the best few variants and the default, if it has a time."""
    best = [text for text, _ in outcome.best()]
    chosen = dict.fromkeys(best[:FINALISTS])
    if default.text in best:
        chosen[default.text] = None
    return [Variant.parse(default.op, text) for text in chosen]


def prove(
    results: Sequence[Result], target: Target, workers: int, listener: Listener
) -> dict[str, Proof]:
    """Compile replayed winners for their device and run them in Triton's interpreter, here.

    Winners of equal source and launch options are proved once. Results get their ``proof``.
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result.entry:
            variant = result.entry.variant
            groups.setdefault((result.entry.source_id, variant.text), []).append(result)
    listener.proof_started(len(groups))
    for key, proof in _proofs(groups, target, workers):
        for result in groups[key]:
            result.proof = proof
        listener.proof_done(proof)
    return {result.problem.text: result.proof for result in results if result.proof}


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


def record(
    target: Target, results: Sequence[Result], op: str, known: Recording | None = None
) -> Recording:
    """Return the recording of an exhaustive search's results, added to an earlier one."""
    recording = known or Recording(
        op,
        target.device,
        target.protocol,
        target.measured,
        target.versions,
        target.roofs,
        template_digest(op),
    )
    for result in results:
        recording.problems[result.problem.text] = RecordedProblem(
            dict(result.outcome.measurements), result.samples, result.outcome.rejected
        )
    return recording
