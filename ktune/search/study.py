"""The search on one problem: a sampler proposes, the target answers, everything is kept.

A trial of the study is one variant that was measured, or one that a sampler proposed and that was
answered without measuring: illegal ones are told as infeasible, repeats with the value that is
known, and the nearest legal variant that is new is measured in their place. Only new measurements
count against the budget, each variant once, whoever made them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from ktune.bench.measurement import Measurement
from ktune.errors import KtuneError, StorageError
from ktune.problem import Problem
from ktune.search.archive import Archive, family_name, study_name
from ktune.search.effort import AUTO
from ktune.search.ground import Ground, Outcome
from ktune.search.parameters import Axes
from ktune.search.samplers import make_chooser, make_sampler
from ktune.search.sight import Hint, Sight
from ktune.search.storage import Heartbeat, is_shared
from ktune.search.target import Target
from ktune.space import distance
from ktune.variant import Variant

FEASIBLE = "has a time"
"""Optuna's name of the constraint that a variant is legal and has a time: broken above 0.

GPSampler wants it of every trial; other samplers take its absence for a constraint that holds.
"""
UNFINISHED = (TrialState.RUNNING, TrialState.WAITING)


class ProblemSearch:
    """Searches one problem; asks and tells, and measures nothing itself.

    Args:
        ground: the problem and its legal variants.
        target: gives the names under which results are kept.
        storage: where trials are kept.
        sampler: one of ``samplers.SAMPLERS``.
        seed: of the sampler.
        archive: earlier studies; read from the storage if not given.
        heartbeat: keeps this process's trials alive.
    """

    def __init__(
        self,
        ground: Ground,
        target: Target,
        storage: BaseStorage,
        sampler: str = AUTO,
        seed: int = 0,
        archive: Archive | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.ground = ground
        self._problem, self._legal = ground.problem, ground.legal
        self._static = sampler == "gp"
        self._axes = Axes(ground.space, ground.problem, ground.device, self._static)
        self._shared = is_shared(storage)
        self._heartbeat = heartbeat or Heartbeat(storage)
        self._pending: dict[str, Trial] = {}
        self._elsewhere: set[str] = set()
        self._goal = 0
        self._hints: Sequence[Hint] = ()
        self._chooser = make_chooser(sampler, seed)
        self.outcome = Outcome(legal=len(ground.legal), rejected=dict(ground.rejected))
        try:
            self._study = optuna.create_study(
                storage=storage,
                study_name=study_name(ground.space, ground.problem, target, self._static),
                sampler=make_sampler(sampler, seed),
                load_if_exists=True,
            )
            self._heartbeat.fail_stale(self._study)
            known = (archive or Archive(storage)).known(family_name(ground.problem, target))
        except optuna.exceptions.StorageInternalError as error:
            raise StorageError(f"the study storage failed: {error}") from error
        if known:
            self.outcome.measurements = {
                text: known[key]
                for text, variant in self._legal.items()
                if (key := self._key_or_none(variant)) in known
            }
        self._borrowed = self._borrow()
        self._refresh()

    @property
    def problem(self) -> Problem:
        """What is tuned."""
        return self._problem

    @property
    def pending(self) -> int:
        """Variants handed out by ``next`` and not yet told."""
        return len(self._pending)

    @property
    def goal(self) -> int:
        """Measurements that are wanted in all, borrowed ones aside."""
        return self._goal

    @property
    def count(self) -> int:
        """Measurements that count against the budget: those of this very study."""
        return len(self.outcome.measurements) - len(self._borrowed)

    def begin(
        self,
        trials: int,
        first: Iterable[Variant] = (),
        hints: Sequence[Hint] = (),
    ) -> None:
        """Set the budget, and queue what comes before the sampler's own choice.

        Args:
            trials: measurements wanted; all if the space has fewer.
            first: variants to try first; those that are illegal or known are passed over.
            hints: outcomes of neighbouring problems, the nearest first.
        """
        self._goal = min(trials, len(self._legal) - len(self._borrowed))
        self._hints = hints
        room = self._goal - self.count - len(self._elsewhere)
        fresh = [v for v in {v.text: v for v in first}.values() if self._is_new(v.text)]
        for variant in fresh[: max(room, 0)]:
            self._enqueue(variant)

    def extend(self, variants: Iterable[Variant]) -> None:
        """Ask for some more variants, beyond the budget; known ones are passed over."""
        fresh = [v for v in variants if v.text in self._legal and self._is_new(v.text)]
        self._goal = self.count + len(self._elsewhere) + len(fresh)
        for variant in fresh:
            self._enqueue(variant)

    def next(self) -> Variant | None:
        """Return a variant to measure; None if the budget is spent or nothing is new."""
        if self._shared:
            self._refresh()
        while self.count + len(self._pending) < self._goal:
            if not self._waiting():
                if self._shared and self.count + len(self._unfinished()) >= self._goal:
                    return None  # others measure what is left
                if not any(self._is_new(text) for text in self._legal):
                    return None
                if self._chooser is not None:
                    chosen = self._chooser(self._sight())
                    if chosen is None:
                        return None
                    self._enqueue(chosen)
            variant = self._take(self._study.ask())
            if variant is not None:
                return variant
        return None

    def tell(self, variant: Variant, measurement: Measurement) -> None:
        """Keep the outcome of a variant that ``next`` handed out."""
        trial = self._pending.pop(variant.text)
        self.outcome.measurements[variant.text] = measurement
        self.outcome.measured += 1
        self._finish(trial, measurement)
        self._heartbeat.forget(trial._trial_id)

    def settled(self) -> bool:
        """Return whether nothing is on its way, here or in another process."""
        if self._pending:
            return False
        if not self._shared:
            return True
        self._heartbeat.fail_stale(self._study)
        self._refresh()
        return not self._unfinished()

    def close(self) -> None:
        """End the queued trials that the budget did not reach."""
        while self._waiting():
            self._study.tell(self._study.ask(), state=TrialState.PRUNED)

    def _is_new(self, text: str) -> bool:
        return (
            text not in self.outcome.measurements
            and text not in self._pending
            and text not in self._elsewhere
        )

    def _sight(self) -> Sight:
        pending = self._pending.keys() | self._elsewhere
        return Sight(self._problem, self._legal, self.outcome.measurements, pending, self._hints)

    def _enqueue(self, variant: Variant) -> None:
        """Queue a trial with exactly this variant's parameters."""
        attributes = {"variant": variant.text}
        if (key := self._key_or_none(variant)) is not None:
            attributes["source"] = key
        self._study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.WAITING,
                params=self._axes.encode(variant),
                distributions=self._axes.distributions(variant),
                user_attrs=attributes,
            )
        )
        self._elsewhere.add(variant.text)

    def _take(self, trial: Trial) -> Variant | None:
        """Make a trial of the study this process's own; None if it was answered at once."""
        self._heartbeat.watch(trial._trial_id)
        queued = trial.user_attrs.get("variant")
        variant = Variant.of(self._problem.op, self._axes.suggest(trial))
        text = variant.text
        if queued is None:
            trial.set_user_attr("variant", text)
        answer = self._answer(trial, variant, queued is not None)
        if answer is None:
            self._elsewhere.discard(text)
            self._pending[text] = trial
            return variant
        self._heartbeat.forget(trial._trial_id)
        if queued is None:
            unseen = [other for other in self._legal.values() if self._is_new(other.text)]
            if unseen:
                self._enqueue(min(unseen, key=lambda o: distance(variant.values, o.values)))
        return None

    def _answer(self, trial: Trial, variant: Variant, queued: bool) -> str | None:
        """Tell a trial whose answer needs no measuring; return why, or None if it does."""
        text, known = variant.text, self.outcome.measurements
        if text not in self._legal:
            trial.set_user_attr("illegal", True)
            self._tell_infeasible(trial)
            return "illegal"
        if text in known:
            trial.set_user_attr("repeat", True)
            self._finish(trial, known[text], keep=False)
            return "known"
        if text in self._pending or self._is_claimed(trial, text, queued):
            self._study.tell(trial, state=TrialState.PRUNED)
            return "claimed"
        try:
            key = self.ground.key(variant)
        except KtuneError as error:
            known[text] = Measurement("compile_error", detail=str(error).splitlines()[0])
            self._finish(trial, known[text])
            return "does not render"
        if "source" not in trial.user_attrs:
            trial.set_user_attr("source", key)
        return None

    def _is_claimed(self, trial: Trial, text: str, queued: bool) -> bool:
        """Return whether another process measures this very variant.

        Queued trials name their variant from birth, so the lowest number goes first and exactly
        one proceeds. A sampler's trial gets its name late, and yields to any other.
        """
        if not self._shared:
            return False
        others = [
            other
            for other in self._study.get_trials(deepcopy=False)
            if other.number != trial.number
            and other.user_attrs.get("variant") == text
            and other.state in (*UNFINISHED, TrialState.COMPLETE)
            and "borrowed" not in other.user_attrs
        ]
        if queued:
            return any(
                other.number < trial.number or other.state == TrialState.COMPLETE
                for other in others
            )
        return bool(others)

    def _finish(self, trial: Trial, measurement: Measurement, keep: bool = True) -> None:
        if keep:
            trial.set_user_attr("measurement", measurement.to_dict())
        if measurement.latency_ms is None:
            self._tell_infeasible(trial)
        else:
            if self._static:
                trial.set_constraint(FEASIBLE, 0.0)
            self._study.tell(trial, measurement.latency_ms)

    def _tell_infeasible(self, trial: Trial) -> None:
        """Tell a variant without a time in a way that the sampler learns from."""
        trial.set_constraint(FEASIBLE, 1.0)
        self._study.tell(trial, math.inf)

    def _key_or_none(self, variant: Variant) -> str | None:
        """Return the key; None for a variant that does not render (it will say so when tried)."""
        try:
            return self.ground.key(variant)
        except KtuneError:
            return None

    def _waiting(self) -> bool:
        return bool(self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def _unfinished(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=UNFINISHED)

    def _refresh(self) -> None:
        """Take in what other processes have measured, and what they are at."""
        trials = self._study.get_trials(deepcopy=False)
        states = UNFINISHED if self._shared else (TrialState.WAITING,)
        self._elsewhere = {
            str(trial.user_attrs["variant"])
            for trial in trials
            if trial.state in states and "variant" in trial.user_attrs
        } - self._pending.keys()
        if self._shared:
            for trial in trials:
                text = str(trial.user_attrs.get("variant"))
                if trial.state == TrialState.COMPLETE and text in self._legal:
                    found = trial.user_attrs.get("measurement")
                    if found and text not in self.outcome.measurements:
                        self.outcome.measurements[text] = Measurement.from_dict(found)

    def _borrow(self) -> set[str]:
        """Give this study the measurements that other studies of the problem have made."""
        trials = self._study.get_trials(deepcopy=False)
        own = {trial.user_attrs.get("variant") for trial in trials}
        there = {trial.user_attrs.get("borrowed") for trial in trials}
        borrowed = self.outcome.measurements.keys() - own
        for text in sorted(borrowed - there):
            variant, measurement = self._legal[text], self.outcome.measurements[text]
            if measurement.latency_ms is not None:
                self._study.add_trial(
                    optuna.trial.create_trial(
                        params=self._axes.encode(variant),
                        distributions=self._axes.distributions(variant),
                        value=measurement.latency_ms,
                        constraints={FEASIBLE: 0.0} if self._static else None,
                        user_attrs={"borrowed": text, "measurement": measurement.to_dict()},
                    )
                )
        return borrowed
