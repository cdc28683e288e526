"""The trials of one study: how they are made, taken, and ended, each kept alive meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from datetime import datetime

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from ktune.bench.measurement import Measurement
from ktune.search.sampling.parameters import Axes
from ktune.search.trials.storage import FEASIBLE, Heartbeat, end_trial, take_trial
from ktune.variant import Variant


class Ledger:
    """Writes the trials of a study in as few calls of the storage as will do.

    Whatever ends a trial returns whether it did: one that was taken for dead, because its
    heartbeat was late, has been ended by another process.

    Args:
        study: whose trials.
        axes: how Optuna sees a variant.
        heartbeat: keeps this process's trials alive.
    """

    def __init__(self, study: optuna.Study, axes: Axes, heartbeat: Heartbeat) -> None:
        self._study, self._axes, self._heartbeat = study, axes, heartbeat

    @property
    def _storage(self) -> BaseStorage:
        return self._study._storage

    def read(self) -> list[FrozenTrial]:
        """Return all trials, by number."""
        return self._study.get_trials(deepcopy=False)

    def create(self, variant: Variant, state: TrialState, source: str | None) -> int:
        """Make a trial with exactly this variant's parameters, queued or running; return its id."""
        attributes = {"variant": variant.text}
        if source is not None:
            attributes["source"] = source
        template = optuna.trial.create_trial(
            state=state,
            params=self._axes.encode(variant),
            distributions=self._axes.distributions(variant),
            user_attrs=attributes,
        )
        trial_id = self._storage.create_new_trial(self._study._study_id, template)
        if state == TrialState.RUNNING:
            self._heartbeat.watch(trial_id)
        return trial_id

    def record(
        self, variant: Variant, source: str | None, measurement: Measurement, begun: datetime
    ) -> None:
        """Make a trial that has ended, in one transaction: a third of a trial's usual cost."""
        infeasible = measurement.latency_ms is None
        template = optuna.trial.create_trial(
            value=math.inf if infeasible else measurement.latency_ms,
            params=self._axes.encode(variant),
            distributions=self._axes.distributions(variant),
            user_attrs={
                "variant": variant.text,
                **({} if source is None else {"source": source}),
                "measurement": measurement.to_dict(),
            },
            constraints={FEASIBLE: 1.0} if infeasible else None,
        )
        template.datetime_start = begun
        self._storage.create_new_trial(self._study._study_id, template)

    def borrow(self, legal: Mapping[str, Variant], known: Mapping[str, Measurement]) -> Set[str]:
        """Give this study what other studies of the problem have measured; return the texts."""
        trials = self.read()
        borrowed = known.keys() - {trial.user_attrs.get("variant") for trial in trials}
        for text in sorted(borrowed - {trial.user_attrs.get("borrowed") for trial in trials}):
            if known[text].latency_ms is not None:
                self._borrow(legal[text], known[text])
        return borrowed

    def _borrow(self, variant: Variant, measurement: Measurement) -> None:
        """Keep another study's measurement, for the sampler to learn from."""
        self._study.add_trial(
            optuna.trial.create_trial(
                params=self._axes.encode(variant),
                distributions=self._axes.distributions(variant),
                value=measurement.latency_ms,
                constraints={FEASIBLE: 0.0} if self._axes.static else None,
                user_attrs={"borrowed": variant.text, "measurement": measurement.to_dict()},
            )
        )

    def ask(self) -> Trial:
        """Let Optuna's sampler make a trial; it may be one that was queued a moment ago."""
        trial = self._study.ask()
        self._heartbeat.watch(trial._trial_id)
        return trial

    def take(self, trial: FrozenTrial) -> bool:
        """Take a queued trial; return False if another process has."""
        if not take_trial(self._storage, trial._trial_id):
            return False
        self._heartbeat.watch(trial._trial_id)
        return True

    def complete(self, trial_id: int, measurement: Measurement, repeat: bool = False) -> bool:
        """Tell a trial's outcome, and keep the measurement unless it is a repeat."""
        try:
            if repeat:
                self._storage.set_trial_user_attr(trial_id, "repeat", True)
            else:
                self._storage.set_trial_user_attr(trial_id, "measurement", measurement.to_dict())
        except UpdateFinishedTrialError:
            self._heartbeat.forget(trial_id)
            return False
        if measurement.latency_ms is None:
            return self.refuse(trial_id)
        if self._axes.static and not self._constrain(trial_id, 0.0):
            return False
        return self.end(trial_id, TrialState.COMPLETE, measurement.latency_ms)

    def refuse(self, trial_id: int, illegal: bool = False) -> bool:
        """End a trial of a variant without a time in a way that the sampler learns from."""
        try:
            if illegal:
                self._storage.set_trial_user_attr(trial_id, "illegal", True)
        except UpdateFinishedTrialError:
            self._heartbeat.forget(trial_id)
            return False
        if not self._constrain(trial_id, 1.0):
            return False
        return self.end(trial_id, TrialState.COMPLETE, math.inf)

    def _constrain(self, trial_id: int, value: float) -> bool:
        """Say whether a variant is feasible (0) or not (1); return False if the trial has ended."""
        try:
            Trial(self._study, trial_id).set_constraint(FEASIBLE, value)
        except UpdateFinishedTrialError:
            self._heartbeat.forget(trial_id)
            return False
        return True

    def end(self, trial_id: int, state: TrialState, value: float | None = None) -> bool:
        """End a trial."""
        self._heartbeat.forget(trial_id)
        return end_trial(self._storage, trial_id, state, value)

    def drop(self, trial: FrozenTrial) -> None:
        """End a queued trial that nobody wants any more, unless somebody has just taken it."""
        if self.take(trial):
            self.end(trial._trial_id, TrialState.PRUNED)
