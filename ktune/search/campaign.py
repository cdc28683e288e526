"""A campaign: the searches of one ``ktune search``, each ending with an entry in the table."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from optuna.storages import BaseStorage

from ktune.bench.measurement import Measurement
from ktune.codegen import render
from ktune.device import Device
from ktune.errors import TableError
from ktune.operations import operation
from ktune.problem import Problem, separation
from ktune.search.effort import Effort
from ktune.search.ground import Ground, Outcome
from ktune.search.held_out import judge
from ktune.search.result import Listener, Result
from ktune.search.sampling.sight import Hint
from ktune.search.settle import settle
from ktune.search.study import ProblemSearch
from ktune.search.trials.archive import Archive
from ktune.search.trials.failures import Failures
from ktune.search.trials.storage import Heartbeat, PatientStorage, quiet_optuna
from ktune.search.winner import FINALISTS, Winner, choose
from ktune.space import Space
from ktune.table import Entry, Provenance
from ktune.target.target import Target
from ktune.variant import Variant

NEIGHBOURS = 1
"""Neighbouring problems whose winners are tried first; each costs a trial. Without the seeds of the
YAML files, auto took 4.6 evaluations to 2 % with one (attention, H200), 6.4 with none, 6.8 with
three."""
HINTS = 8
"""Neighbouring problems whose outcomes guide the sampler."""
NEAR = 1.05
"""How much slower than the best a finalist may have been measured: more than times drift."""
POLL_S = 0.5
"""Seconds between two looks at what other processes are measuring."""

Sink = Callable[[Sequence[Entry], Device], None]
"""Keeps entries; raises TableError if it cannot."""


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
        held_out: texts of problems that are searched to judge the table by, and get no entry.
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
        held_out: Set[str] = frozenset(),
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.target, self.effort = target, effort
        self._storage, self._sink, self._listener = storage, sink, listener
        self._winners, self._finals, self._stop = list(winners), finals, stop
        self._held_out = held_out
        self._heartbeat = Heartbeat(storage)
        with quiet_optuna():
            self._failures = Failures(storage, target)
        self._archive: Archive | None = None
        self._flight = 0
        self._left = 0
        self.grounds: dict[str, Ground] = {}
        self.results: list[Result] = []
        self._searches: dict[str, ProblemSearch] = {}

    def run(self, work: Sequence[tuple[Space, Problem]]) -> Iterator[Result]:
        """Search every problem; yields each result once its entry is kept.

        When all are searched, the few variants that stand for them all are settled on
        (``settle.py``): entries and results may then change once more.
        """
        todo, active = deque(work), list[_Active]()
        self._left = len(work)
        with quiet_optuna():
            self._archive = Archive(self._storage)
            try:
                while todo or active:
                    if todo and self._stop():
                        todo.clear()
                    self._fill(active, todo)
                    for done in self._step(active):
                        yield self._conclude(done)
                if self._finals:
                    self._settle()
                    judge(self, [r for r in self.results if r.held_out])
            except (KeyboardInterrupt, GeneratorExit):
                self._give_back(active)
                raise
            finally:
                self._heartbeat.close()

    def measure(self, wanted: Mapping[str, Sequence[Variant]]) -> None:
        """Measure variants of problems that were searched, by problem text, if time is left."""
        if self.target.now() >= self.effort.budget_s or self._stop():
            return
        active = []
        for result in self.results:
            variants = wanted.get(result.problem.text, ())
            if variants:
                search = self._searches[result.problem.text]
                search.extend(variants)
                active.append(_Active(search, result, math.inf))
        while active:
            self._fill(active, deque())
            for done in self._step(active):
                done.search.close()

    def _step(self, active: list[_Active]) -> list[_Active]:
        """Take one outcome, or wait for other processes; return the searches that are over."""
        if self._flight:
            self._take(active)
        over = [each for each in active if self._is_over(each)]
        for each in over:
            active.remove(each)
        if active and not self._flight and all(each.dry for each in active) and not over:
            time.sleep(POLL_S)
        return over

    def _fill(self, active: list[_Active], todo: deque[tuple[Space, Problem]]) -> None:
        """Keep the target busy, with the next problem too if this one has nothing to ask."""
        while self._flight < self.target.capacity:
            if any(self._ask(each) for each in active):
                continue
            if not todo or (active and self.target.capacity == 1):
                return
            active.append(self._start(*todo.popleft()))

    def _ask(self, active: _Active) -> bool:
        """Submit one more variant of a search; return whether there was one."""
        search = active.search
        if self.enough(active.result):
            active.dry = True
            return False
        if self.target.now() >= active.deadline or self._stop():
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
        self.target.submit(search.problem, variant)
        self._flight += 1
        return True

    def _take(self, active: list[_Active]) -> None:
        problem, variant, measurement = self.target.next()
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
        target, effort = self.target, self.effort
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
        apart = problem.text in self._held_out
        result = Result(problem, default, search.outcome, held_out=apart)
        hints = self._neighbours(problem)
        first = [default, *self._neighbours_winners(problem)]
        first += space.seeds_for(problem, target.device)
        search.begin(effort.trials_for(space, len(ground.legal)), first, hints)
        self.results.append(result)
        self._searches[problem.text] = search
        share = (effort.budget_s - target.now()) / max(self._left, 1)
        if effort.level != "full":
            share = min(share, space.budget.timeout_s)
        return _Active(search, result, target.now() + share)

    def enough(self, result: Result) -> bool:
        """Return whether a problem's search may end before its budget does."""
        return False

    def recall(self, result: Result) -> Outcome:
        """Return what the searches of other problems may know of this one."""
        return result.outcome

    def _neighbours(self, problem: Problem) -> list[Hint]:
        """Return what is known of the nearest other problems of this campaign."""
        others = [r for r in self.results if r.problem.op == problem.op]
        others.sort(key=lambda r: _nearness(problem, r.problem))
        known = [Hint(r.problem, self.recall(r).measurements) for r in others[:HINTS]]
        return [hint for hint in known if any(m.ok for m in hint.measurements.values())]

    def _neighbours_winners(self, problem: Problem) -> list[Variant]:
        """Return the winners of the nearest problems, of this campaign and of tables."""
        known = [
            (r.problem, Variant.parse(r.problem.op, best[0][0]))
            for r in self.results
            if r.problem.op == problem.op and (best := self.recall(r).best())
        ]
        known += [(other, variant) for other, variant in self._winners if other.op == problem.op]
        known.sort(key=lambda pair: _nearness(problem, pair[0]))
        return list(dict.fromkeys(variant for _, variant in known))[:NEIGHBOURS]

    def _conclude(self, active: _Active) -> Result:
        """End a search with its finals, and keep the entry."""
        active.search.close()
        self._left -= 1
        result = active.result
        self.target.spent.render = sum(ground.render_s for ground in self.grounds.values())
        if self._finals and not result.held_out:
            self._hold_finals(result)
            self._save([result])
        self._listener.problem_done(result)
        return result

    def _hold_finals(self, result: Result) -> None:
        """Time the best few, the default and the baselines in turn; the winner must hold."""
        finalists = _finalists(result.outcome, result.default)
        while finalists:
            target, problem = self.target, result.problem
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

    def _settle(self) -> None:
        """Let few variants stand for all problems of each operation."""
        for op in dict.fromkeys(result.problem.op for result in self.results):
            settled = settle(self, [r for r in self.results if r.problem.op == op])
            if settled:
                self._save(settled)
                self._listener.settled(op, settled)

    def entry(self, result: Result, variant: Variant, winner: Winner) -> Entry:
        """Return the table's entry of a problem."""
        target = self.target
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
            interval=winner.interval,
            loss=round(max(result.loss, 0.0), 4),
        )
        source = render(variant, result.problem)
        return Entry(
            target.device.key, result.problem, variant, source.id, provenance, result.covers
        )

    def _save(self, results: Sequence[Result]) -> None:
        """Keep the entries of results; those that cannot be say why."""
        entries = [result.entry for result in results if result.entry is not None]
        if not entries:
            return
        try:
            self._sink(entries, self.target.device)
        except TableError as error:
            for result in results:
                result.table_error = str(error)


def _nearness(problem: Problem, other: Problem) -> tuple[tuple[int, float], str]:
    """Sort other problems by this, the nearest first."""
    return separation(problem, other), other.text


def _finalists(outcome: Outcome, default: Variant) -> list[Variant]:
    """Return the best few variants that are near the best, and the default, if it has a time."""
    best = outcome.best()
    near = [
        text for text, m in best if (m.latency_ms or 0.0) <= NEAR * (best[0][1].latency_ms or 0)
    ]
    chosen = dict.fromkeys(near[:FINALISTS])
    if any(text == default.text for text, _ in best):
        chosen[default.text] = None
    return [Variant.parse(default.op, text) for text in chosen]
