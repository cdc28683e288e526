"""The search on one problem: Optuna proposes, the target answers, everything is kept.

A trial of the study is one variant that was measured, or one that the sampler proposed and that
was answered without measuring: illegal ones are told as infeasible, repeats with the value that
is known, and the nearest legal variant that is new is measured in their place. Only new
measurements count against the budget.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from time import monotonic

import optuna
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from ktune.bench.measurement import Measurement
from ktune.codegen import render
from ktune.errors import StorageError
from ktune.problem import Problem
from ktune.search.parameters import Axes
from ktune.search.target import Target
from ktune.space import Space, distance
from ktune.variant import Variant

ABANDONED_AFTER = timedelta(minutes=15)
"""A trial that has run so long belongs to a process that was killed."""


@dataclass(frozen=True, slots=True)
class Budget:
    """When a problem's search ends: after so many measurements or seconds, whichever is first."""

    trials: int
    timeout_s: float = math.inf


@dataclass(slots=True)
class Outcome:
    """All that is known of a problem after its search.

    Attributes:
        measurements: by variant text; those of earlier runs too.
        measured: how many of them are new.
        legal: size of the legal space.
        rejected: points of the raw space ruled out, by reason.
    """

    measurements: dict[str, Measurement] = field(default_factory=dict)
    measured: int = 0
    legal: int = 0
    rejected: dict[str, int] = field(default_factory=dict)

    def best(self) -> list[tuple[str, Measurement]]:
        """Return the variants that are right, fastest first."""
        right = [(text, m) for text, m in self.measurements.items() if m.ok]
        return sorted(right, key=lambda pair: (pair[1].latency_ms or math.inf, pair[0]))


OnTrial = Callable[[Variant, Measurement, int, int], None]
"""Called after each new measurement with the count so far and the count intended."""


def study_name(space: Space, problem: Problem, target: Target) -> str:
    """Return the name of a problem's study; a changed space is another study."""
    kind = "replay" if target.replayed_from else "live"
    return f"{problem.text} | {target.device.key} | {target.protocol} {kind} | space {space.id}"


class ProblemSearch:
    """Searches one problem.

    Args:
        space: where variants come from.
        problem: what to compute.
        target: what measures.
        storage: where trials are kept.
        seed: of the sampler.
    """

    def __init__(
        self, space: Space, problem: Problem, target: Target, storage: BaseStorage, seed: int
    ) -> None:
        self._problem, self._target = problem, target
        self._axes = Axes(space, problem, target.device)
        self._legal = {v.text: v for v in space.variants(problem, target.device)}
        self._keys = {text: self._key(variant) for text, variant in self._legal.items()}
        self._seeds = space.seeds_for(problem, target.device)
        self._name = study_name(space, problem, target)
        self._study = self._open(storage, seed)
        known = self._recall(storage)
        self._pending: dict[str, Trial] = {}
        rejected = space.rejections(problem, target.device)
        self.outcome = Outcome(legal=len(self._legal), rejected=rejected)
        self.outcome.measurements = {
            text: known[key] for text, key in self._keys.items() if key in known
        }
        self._borrowed = self._borrow()

    def run(self, budget: Budget, default: Variant, on_trial: OnTrial | None = None) -> Outcome:
        """Measure the default, then the seeds, then what the sampler proposes."""
        deadline = monotonic() + budget.timeout_s
        room = len(self._legal) - len(self._borrowed)
        goal = min(budget.trials, room)
        queue = self._first_variants(default, everything=goal == room)
        while True:
            self._fill(queue, goal, deadline)
            if not self._pending:
                return self.outcome
            variant, measurement = self._target.next()
            self._tell(variant, measurement.sane())
            if on_trial:
                on_trial(variant, measurement, self._count(), goal)

    def _fill(self, queue: list[Variant], goal: int, deadline: float) -> None:
        """Submit variants until the target is busy or the budget is spent."""
        while (
            len(self._pending) < self._target.capacity
            and self._count() + len(self._pending) < goal
            and monotonic() < deadline
        ):
            variant = self._next_queued(queue) or self._propose()
            if variant is None:
                return
            self._target.submit(self._problem, variant)

    def _count(self) -> int:
        """Return how many measurements count against the budget: those of this very study."""
        return len(self.outcome.measurements) - len(self._borrowed)

    def _borrow(self) -> set[str]:
        """Give this study the measurements that other studies of the problem have made."""
        own = {trial.user_attrs.get("variant") for trial in self._study.get_trials(deepcopy=False)}
        borrowed = self.outcome.measurements.keys() - own
        for text in sorted(borrowed):
            variant, measurement = self._legal[text], self.outcome.measurements[text]
            if measurement.latency_ms is not None:
                self._study.add_trial(
                    optuna.trial.create_trial(
                        params=self._axes.encode(variant),
                        distributions=self._axes.distributions(variant),
                        value=measurement.latency_ms,
                        user_attrs={"borrowed": text, "measurement": measurement.to_dict()},
                    )
                )
        return borrowed

    def _first_variants(self, default: Variant, everything: bool) -> list[Variant]:
        rest = list(self._legal.values()) if everything else []
        return list({v.text: v for v in [default, *self._seeds, *rest]}.values())

    def _next_queued(self, queue: list[Variant]) -> Variant | None:
        while queue:
            variant = queue.pop(0)
            if variant.text in self._legal and self._is_new(variant):
                return self._ask_for(variant)
        return None

    def _is_new(self, variant: Variant) -> bool:
        return variant.text not in self.outcome.measurements and variant.text not in self._pending

    def _ask_for(self, variant: Variant) -> Variant:
        """Open a trial with exactly this variant's parameters."""
        self._study.enqueue_trial(self._axes.encode(variant))
        trial = self._study.ask()
        self._axes.suggest(trial)
        self._pending[variant.text] = trial
        return variant

    def _propose(self) -> Variant | None:
        """Ask the sampler; where it names an illegal or known variant, take the nearest new one."""
        trial = self._study.ask()
        variant = Variant.of(self._problem.op, self._axes.suggest(trial))
        if variant.text in self._legal and self._is_new(variant):
            self._pending[variant.text] = trial
            return variant
        if variant.text not in self._legal:
            self._tell_infeasible(trial, variant, "illegal")
        elif variant.text in self._pending:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._finish(trial, variant, self.outcome.measurements[variant.text])
        unseen = [other for other in self._legal.values() if self._is_new(other)]
        nearest = min(unseen, key=lambda o: distance(variant.values, o.values), default=None)
        return self._ask_for(nearest) if nearest else None

    def _tell(self, variant: Variant, measurement: Measurement) -> None:
        trial = self._pending.pop(variant.text)
        self.outcome.measurements[variant.text] = measurement
        self.outcome.measured += 1
        trial.set_user_attr("source", self._keys[variant.text])
        self._finish(trial, variant, measurement)

    def _finish(self, trial: Trial, variant: Variant, measurement: Measurement) -> None:
        if measurement.latency_ms is None:
            self._tell_infeasible(trial, variant, measurement.status, measurement)
            return
        _describe(trial, variant, measurement)
        self._study.tell(trial, measurement.latency_ms)

    def _tell_infeasible(
        self, trial: Trial, variant: Variant, why: str, measurement: Measurement | None = None
    ) -> None:
        """Tell a variant without a time in a way that the sampler learns from."""
        trial.set_constraint(why, 1.0)
        _describe(trial, variant, measurement)
        self._study.tell(trial, math.inf)

    def _key(self, variant: Variant) -> str:
        """Return what a measurement belongs to: rendered source and launch options."""
        source = render(variant, self._problem)
        return f"{source.id} {json.dumps(variant.options, sort_keys=True)}"

    def _open(self, storage: BaseStorage, seed: int) -> optuna.Study:
        sampler = TPESampler(multivariate=True, group=True, constant_liar=True, seed=seed)
        try:
            study = optuna.create_study(
                storage=storage, study_name=self._name, sampler=sampler, load_if_exists=True
            )
            study.set_user_attr("family", self._family)
            _close_abandoned(study)
        except optuna.exceptions.StorageInternalError as error:
            raise StorageError(f"the study storage failed: {error}") from error
        return study

    @property
    def _family(self) -> str:
        """What studies must share for their measurements to hold in each other."""
        return self._name.rpartition(" | space ")[0]

    def _recall(self, storage: BaseStorage) -> dict[str, Measurement]:
        """Return the measurements of this problem in all studies of the storage, by key."""
        known: dict[str, Measurement] = {}
        for summary in optuna.get_all_study_summaries(storage, include_best_trial=False):
            if summary.user_attrs.get("family") == self._family:
                trials = storage.get_all_trials(summary._study_id, deepcopy=False)
                known |= _measurements(trials)
        return known


def _close_abandoned(study: optuna.Study) -> None:
    """End the trials that a killed process left running."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        started = trial.datetime_start
        if started is not None and datetime.now() - started > ABANDONED_AFTER:
            study.tell(trial.number, state=TrialState.FAIL)


def _describe(trial: Trial, variant: Variant, measurement: Measurement | None) -> None:
    trial.set_user_attr("variant", variant.text)
    if measurement is not None:
        trial.set_user_attr("measurement", measurement.to_dict())


def _measurements(trials: Iterable[FrozenTrial]) -> dict[str, Measurement]:
    found = {}
    for trial in trials:
        attributes = trial.user_attrs
        if trial.state.is_finished() and {"source", "measurement"} <= attributes.keys():
            found[attributes["source"]] = Measurement.from_dict(attributes["measurement"])
    return found
