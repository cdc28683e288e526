"""A campaign: the searches of one ``ktune search``, each ending with an entry in the table."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from optuna.storages import BaseStorage

from ktune.bench.measurement import Measurement
from ktune.codegen import render, template_digest
from ktune.device import Device
from ktune.errors import TableError
from ktune.operations import operation
from ktune.problem import Problem, separation
from ktune.search.archive import Archive
from ktune.search.effort import Effort
from ktune.search.failures import Failures
from ktune.search.ground import Ground, Outcome
from ktune.search.recording import RecordedProblem, Recording
from ktune.search.storage import Heartbeat, PatientStorage, quiet_optuna
from ktune.search.study import ProblemSearch
from ktune.search.target import Target
from ktune.search.winner import FINALISTS, Winner, choose
from ktune.space import Space
from ktune.table import Entry, Provenance
from ktune.variant import Variant

NEIGHBOURS = 3
"""Neighbouring problems whose winners are tried first, and whose outcomes guide the sampler."""
POLL_S = 0.5
"""Seconds between two looks at what other processes are measuring."""

Sink = Callable[[Sequence[Entry], Device], None]
"""Keeps entries; raises TableError if it cannot."""


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


@dataclass(slots=True)
class Result:
    """The outcome of one problem.

    Attributes:
        problem: what was tuned.
        default: its default variant.
        outcome: everything that was measured.
        samples: of the finals, in ms.
        winner: of the finals.
        entry: what the table holds; None if nothing passed.
        table_error: why it holds nothing.
    """

    problem: Problem
    default: Variant
    outcome: Outcome
    samples: dict[str, list[float]] = field(default_factory=dict)
    winner: Winner | None = None
    entry: Entry | None = None
    table_error: str = ""

    @property
    def baselines(self) -> dict[str, float]:
        """Medians of the baselines in ms."""
        return {
            name.removeprefix("baseline:"): statistics.median(values)
            for name, values in self.samples.items()
            if name.startswith("baseline:") and values
        }


@dataclass(slots=True)
class _Active:
    """A search under way.

    Attributes:
        deadline: on the target's clock; no more is asked for after it.
        dry: nothing was left to ask for at the last look.
    """

    search: ProblemSearch
    result: Result
    deadline: float
    dry: bool = False


class Campaign:
    """Searches problems and writes the table as it goes.

    Where the target takes several variants at a time, the next problem's are compiled while the
    last ones of a problem are timed.

    Args:
        target: what measures.
        storage: Optuna's.
        sink: keeps the entries of the table.
        effort: how much to spend, and how to choose.
        listener: hears of progress.
        winners: of other problems, known before; the nearest are tried first.
        finals: whether to end each search with finals and an entry; a helper of another
            process's campaign does not.
        stop: asked again and again; once it says yes, nothing more is begun.
    """

    def __init__(
        self,
        target: Target,
        storage: BaseStorage,
        sink: Sink,
        effort: Effort,
        listener: Listener,
        winners: Sequence[tuple[Problem, Variant]] = (),
        finals: bool = True,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._target, self._storage, self._sink = target, storage, sink
        self._effort, self._listener = effort, listener
        self._winners, self._finals, self._stop = list(winners), finals, stop
        self._heartbeat = Heartbeat(storage)
        with quiet_optuna():
            self._failures = Failures(storage, target)
        self._archive: Archive | None = None
        self._flight = 0
        self._left = 0
        self.grounds: dict[str, Ground] = {}
        self.results: list[Result] = []

    def run(self, work: Sequence[tuple[Space, Problem]]) -> Iterator[Result]:
        """Search every problem; yields each result once its entry is kept."""
        todo, active = deque(work), list[_Active]()
        self._left = len(work)
        with quiet_optuna():
            self._archive = Archive(self._storage)
            try:
                while todo or active:
                    if todo and self._stop():
                        todo.clear()
                    self._fill(active, todo)
                    if self._flight:
                        self._take(active)
                    for done in [a for a in active if self._is_over(a)]:
                        active.remove(done)
                        yield self._conclude(done)
                    if active and not self._flight and all(a.dry for a in active):
                        time.sleep(POLL_S)  # other processes are at it
            except (KeyboardInterrupt, GeneratorExit):
                self._give_back(active)
                raise
            finally:
                self._heartbeat.close()

    def _fill(self, active: list[_Active], todo: deque[tuple[Space, Problem]]) -> None:
        """Keep the target busy, with the next problem too if this one has nothing to ask."""
        while self._flight < self._target.capacity:
            if any(self._ask(each) for each in active):
                continue
            if not todo or (active and self._target.capacity == 1):
                return
            active.append(self._start(*todo.popleft()))

    def _ask(self, active: _Active) -> bool:
        """Submit one more variant of a search; return whether there was one."""
        search = active.search
        if self._target.now() >= active.deadline or self._stop():
            search.stop()
            active.dry = True
            return False
        variant = search.next()
        active.dry = variant is None
        if variant is None:
            return False
        known = self._failures.get(search.ground.key(variant))
        if known is not None:
            self._tell(active, variant, known)
            return True
        self._target.submit(search.problem, variant)
        self._flight += 1
        return True

    def _take(self, active: list[_Active]) -> None:
        problem, variant, measurement = self._target.next()
        self._flight -= 1
        (own,) = [each for each in active if each.search.problem == problem]
        self._failures.note(own.search.ground.key(variant), measurement)
        self._tell(own, variant, measurement.sane())

    def _tell(self, active: _Active, variant: Variant, measurement: Measurement) -> None:
        search = active.search
        search.tell(variant, measurement)
        self._listener.trial_done(search.problem, variant, measurement, search.count, search.goal)

    def _is_over(self, active: _Active) -> bool:
        return active.dry and not active.search.pending and active.search.settled()

    def _give_back(self, active: list[_Active]) -> None:
        """Leave what is under way to other processes, if there can be any."""
        if isinstance(self._storage, PatientStorage):
            self._storage.patience_s = 1.0
            for each in active:
                each.search.give_back()

    def _start(self, space: Space, problem: Problem) -> _Active:
        self._listener.problem_started(problem)
        target, effort = self._target, self._effort
        self._failures.refresh()
        if problem.text not in self.grounds:
            self.grounds[problem.text] = Ground.of(space, problem, target.device)
        ground = self.grounds[problem.text]
        search = ProblemSearch(
            ground,
            target,
            self._storage,
            effort.sampler,
            effort.seed,
            self._archive,
            self._heartbeat,
        )
        default = operation(problem.op).default_variant(problem, target.device)
        result = Result(problem, default, search.outcome)
        hints = self._neighbours(problem)
        first = [default, *self._neighbours_winners(problem)]
        first += space.seeds_for(problem, target.device)
        search.begin(effort.trials_for(space, len(ground.legal)), first, hints)
        self.results.append(result)
        share = (effort.budget_s - target.now()) / max(self._left, 1)
        return _Active(search, result, target.now() + share)

    def _neighbours(self, problem: Problem) -> list[Mapping[str, Measurement]]:
        """Return what is known of the nearest other problems of this campaign."""
        others = [r for r in self.results if r.problem.op == problem.op]
        others.sort(key=lambda r: (separation(problem, r.problem), r.problem.text))
        return [r.outcome.measurements for r in others[:NEIGHBOURS] if r.outcome.best()]

    def _neighbours_winners(self, problem: Problem) -> list[Variant]:
        """Return the winners of the nearest problems, of this campaign and of tables."""
        known = [
            (r.problem, Variant.parse(r.problem.op, best[0][0]))
            for r in self.results
            if (best := r.outcome.best())
        ]
        known += [(other, variant) for other, variant in self._winners if other.op == problem.op]
        known = [pair for pair in known if pair[0].op == problem.op]
        known.sort(key=lambda pair: (separation(problem, pair[0]), pair[0].text))
        return list(dict.fromkeys(variant for _, variant in known))[:NEIGHBOURS]

    def _conclude(self, active: _Active) -> Result:
        """End a search with its finals, and keep the entry."""
        active.search.close()
        self._left -= 1
        result = active.result
        self._target.spent.render = sum(ground.render_s for ground in self.grounds.values())
        if self._finals:
            self._hold_finals(result)
            self._save(result)
        self._listener.problem_done(result)
        return result

    def _hold_finals(self, result: Result) -> None:
        """Time the best few, the default and the baselines in turn; the winner must hold."""
        finalists = _finalists(result.outcome, result.default)
        while finalists:
            target, problem = self._target, result.problem
            result.samples = target.finals(problem, finalists)
            own = {v.text: result.samples.get(v.text, []) for v in finalists}
            winner = choose(result.default.text, own, result.outcome.measurements)
            if winner is None:
                return
            variant = Variant.parse(problem.op, winner.text)
            wrong = target.verify(problem, variant)
            if not wrong:
                result.winner = winner
                result.entry = self.entry(result, variant, winner)
                return
            result.outcome.measurements[winner.text] = Measurement("wrong", detail=wrong)
            finalists = [v for v in finalists if v != variant]

    def entry(self, result: Result, variant: Variant, winner: Winner) -> Entry:
        """Return the table's entry of a problem."""
        target = self._target
        provenance = Provenance(
            latency_ms=winner.latency_ms,
            spread_ms=winner.spread_ms,
            default_latency_ms=winner.default_latency_ms,
            margin=winner.margin,
            is_default=variant == result.default,
            samples=winner.samples,
            protocol=target.protocol,
            versions=target.versions,
            measured=target.measured,
            replayed_from=target.replayed_from,
            trials=len(result.outcome.measurements),
            baselines=result.baselines,
        )
        source = render(variant, result.problem)
        return Entry(target.device.key, result.problem, variant, source.id, provenance)

    def _save(self, result: Result) -> None:
        if result.entry is None:
            return
        try:
            self._sink([result.entry], self._target.device)
        except TableError as error:
            result.table_error = str(error)


def _finalists(outcome: Outcome, default: Variant) -> list[Variant]:
    """Return the best few variants and the default, if it has a time."""
    best = [text for text, _ in outcome.best()]
    chosen = dict.fromkeys(best[:FINALISTS])
    if default.text in best:
        chosen[default.text] = None
    return [Variant.parse(default.op, text) for text in chosen]


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
        workers=target.spent.workers,
    )
    for result in results:
        recording.problems[result.problem.text] = RecordedProblem(
            dict(result.outcome.measurements), result.samples, result.outcome.rejected
        )
    return recording
