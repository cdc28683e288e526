"""The search on one problem: a sampler proposes, the target answers, everything is kept.

A trial of the study is one variant that was measured, or one that a sampler proposed and that was
answered without measuring: illegal ones are told as infeasible, repeats with the value that is
known, and the nearest legal variant that is new is measured in their place. Only new measurements
count against the budget, each variant once, whoever made them.

Several processes may search in one study. A trial names its variant from birth, or as soon as the
sampler has spoken; whoever has made one looks for others of the same variant, and the one with
the lowest number proceeds. A process that is alone and uses a sampler of ktune's writes a trial
when it has ended, in one transaction.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from ktune.bench.measurement import Measurement
from ktune.errors import KtuneError, StorageError
from ktune.problem import Problem
from ktune.search.effort import AUTO
from ktune.search.ground import Ground, Outcome
from ktune.search.sampling.parameters import Axes
from ktune.search.sampling.samplers import make_chooser, make_sampler
from ktune.search.sampling.sight import Hint, Sight
from ktune.search.trials.archive import Archive, family_name, study_name
from ktune.search.trials.ledger import Ledger
from ktune.search.trials.storage import Heartbeat, is_shared
from ktune.space import distance
from ktune.target.target import Target
from ktune.variant import Variant

UNFINISHED = (TrialState.RUNNING, TrialState.WAITING)
NO_TRIAL = -1
"""Stands for the id of a trial that is not yet written."""


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
        static = sampler == "gp"
        self._axes = Axes(ground.space, ground.problem, ground.device, static)
        self._shared = is_shared(storage)
        self._heartbeat = heartbeat or Heartbeat(storage)
        self._pending: dict[str, int] = {}
        self._begun: dict[str, datetime] = {}
        self._line: deque[Variant] = deque()
        self._late: dict[str, Measurement] = {}
        self._trials: list[FrozenTrial] = []
        self._elsewhere: set[str] = set()
        self._goal = 0
        self._last: int | None = None
        self._hints: Sequence[Hint] = ()
        self._chooser = make_chooser(sampler, seed)
        self._alone = self._chooser is not None and not self._shared
        self.outcome = Outcome(legal=len(ground.legal), rejected=dict(ground.rejected))
        try:
            self._study = optuna.create_study(
                storage=storage,
                study_name=study_name(ground.space, ground.problem, target, static),
                sampler=make_sampler(sampler, seed),
                load_if_exists=True,
            )
            self._ledger = Ledger(self._study, self._axes, self._heartbeat)
            self._heartbeat.fail_stale(self._study)
            known = (archive or Archive(storage)).known(family_name(ground.problem, target))
        except optuna.exceptions.StorageInternalError as error:
            raise StorageError(f"the study storage failed: {error}") from error
        self._checked = time.monotonic()
        if known:
            self.outcome.measurements = {
                text: known[key]
                for text, variant in self._legal.items()
                if (key := self._key_or_none(variant)) in known
            }
        self._borrowed = self._ledger.borrow(self._legal, self.outcome.measurements)
        self._refresh()
        if self._alone:
            self.close()  # what an earlier process had queued

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
        fresh = [v for v in {v.text: v for v in first}.values() if self._is_wanted(v.text)]
        for variant in fresh[: max(room, 0)]:
            self._queue(variant)

    def extend(self, variants: Iterable[Variant]) -> None:
        """Ask for some more variants, beyond the budget; known ones are passed over."""
        self._last = None
        if not self._alone:
            self._refresh()
        fresh = [v for v in variants if self._is_wanted(v.text)]
        self._goal = self.count + len(self._elsewhere) + len(fresh)
        for variant in fresh:
            self._queue(variant)

    def next(self) -> Variant | None:
        """Return a variant to measure; None if the budget is spent or nothing is new."""
        while self._last is None and self.count + len(self._pending) < self._goal:
            if not self._alone:
                self._refresh()
            waiting = self._in_state(TrialState.WAITING)
            if self._line:
                variant = self._begin(self._line.popleft())
            elif waiting:
                variant = self._pop(waiting[0])
            elif self.count + self._under_way() >= self._goal:
                return None  # others measure what is left
            elif not any(self._is_new(text) for text in self._legal):
                return None
            elif self._chooser is None:
                variant = self._ask()
            else:
                chosen = self._chooser(self._sight())
                if chosen is None:
                    return None
                variant = self._begin(chosen)
            if variant is not None:
                return variant
        return None

    def tell(self, variant: Variant, measurement: Measurement) -> None:
        """Keep the outcome of a variant that ``next`` handed out.

        A trial that was taken for dead meanwhile is queued anew; that one gets the outcome if
        this process comes to it first.
        """
        trial_id = self._pending.pop(variant.text)
        if self._alone:
            self._record(variant, measurement)
            return
        if not self._finish(trial_id, variant.text, measurement):
            self._late[variant.text] = measurement

    def stop(self) -> None:
        """Ask for nothing more, and wait only for what is under way at this moment."""
        if self._last is None:
            self._trials = self._ledger.read()
            self._last = max((trial.number for trial in self._trials), default=-1)

    def settled(self) -> bool:
        """Return whether nothing is on its way, here or in another process."""
        if self._pending:
            return False
        if not self._shared:
            return True
        self._heartbeat.fail_stale(self._study)
        self._refresh()
        if self._last is None and self.count < self._goal:
            # A dead process's trial is ended a moment before it is queued anew: then its variant
            # is nobody's, and is asked for again.
            left = any(self._is_new(text) for text in self._legal)
            return not left and not self._in_state(*UNFINISHED)
        last = math.inf if self._last is None else self._last
        return all(trial.number > last for trial in self._in_state(TrialState.RUNNING))

    def close(self) -> None:
        """End the queued trials that the budget did not reach."""
        self._elsewhere.difference_update(variant.text for variant in self._line)
        self._line.clear()
        self._refresh()
        for trial in self._in_state(TrialState.WAITING):
            self._ledger.drop(trial)

    def give_back(self) -> None:
        """Let other processes measure at once what this one has begun and will not end."""
        pending, self._pending = self._pending, {}
        for text, trial_id in pending.items():
            if self._ledger.end(trial_id, TrialState.FAIL):
                self._queue(self._legal[text])

    def _is_new(self, text: str) -> bool:
        seen = (self.outcome.measurements, self._pending, self._elsewhere)
        return not any(text in each for each in seen)

    def _is_wanted(self, text: str) -> bool:
        return text in self._legal and self._is_new(text)

    def _sight(self) -> Sight:
        pending = self._pending.keys() | self._elsewhere
        return Sight(self._problem, self._legal, self.outcome.measurements, pending, self._hints)

    def _queue(self, variant: Variant) -> None:
        if self._alone:
            self._line.append(variant)
        else:
            self._ledger.create(variant, TrialState.WAITING, self._key_or_none(variant))
        self._elsewhere.add(variant.text)

    def _begin(self, variant: Variant) -> Variant | None:
        """Make a trial of a variant that is to be measured; None if it was answered at once."""
        if not self._alone:
            key = self._key_or_none(variant)
            return self._take(self._ledger.create(variant, TrialState.RUNNING, key), variant)
        self._elsewhere.discard(variant.text)
        self._begun[variant.text] = datetime.now()  # local and naive, as Optuna's own
        if failure := self._failure(variant):
            self._record(variant, failure)
            return None
        self._pending[variant.text] = NO_TRIAL
        return variant

    def _record(self, variant: Variant, measurement: Measurement) -> None:
        """Keep an outcome that no other process can know of."""
        begun = self._begun.pop(variant.text)
        self._ledger.record(variant, self._key_or_none(variant), measurement, begun)
        self.outcome.measurements[variant.text] = measurement
        self.outcome.measured += 1

    def _pop(self, trial: FrozenTrial) -> Variant | None:
        """Take a queued trial, unless another process does."""
        if not self._ledger.take(trial):
            return None
        return self._take_queued(trial._trial_id, trial.user_attrs)

    def _ask(self) -> Variant | None:
        """Let Optuna's sampler name a variant; if it is none to measure, queue the nearest new."""
        trial = self._ledger.ask()
        if "variant" in trial.user_attrs:  # queued by another process a moment ago
            return self._take_queued(trial._trial_id, trial.user_attrs)
        variant = Variant.of(self._problem.op, self._axes.suggest(trial))
        trial.set_user_attr("variant", variant.text)
        if variant.text in self._legal and (key := self._key_or_none(variant)) is not None:
            trial.set_user_attr("source", key)
        taken = self._take(trial._trial_id, variant, named=False)
        if taken is None:
            unseen = [other for other in self._legal.values() if self._is_new(other.text)]
            if unseen:
                nearest = min(unseen, key=lambda o: distance(variant.values, o.values))
                self._queue(nearest)
        return taken

    def _take_queued(self, trial_id: int, attributes: Mapping[str, Any]) -> Variant | None:
        variant = self._legal.get(attributes.get("variant", ""))
        if variant is None:  # its process died before the sampler had named it
            self._ledger.end(trial_id, TrialState.FAIL)
            return None
        if "measurement" in attributes:  # its process died before the trial's end was told
            self._late[variant.text] = Measurement.from_dict(attributes["measurement"])
        return self._take(trial_id, variant)

    def _take(self, trial_id: int, variant: Variant, named: bool = True) -> Variant | None:
        """Make a trial this process's own; None if it was answered at once, or has to yield."""
        text, known = variant.text, self.outcome.measurements
        if text not in self._legal:
            self._ledger.refuse(trial_id, illegal=True)
            return None
        if text in known:
            self._ledger.complete(trial_id, known[text], repeat=True)
            return None
        if text in self._pending or not self._may_proceed(trial_id, text, named):
            self._ledger.end(trial_id, TrialState.FAIL)  # PRUNED would count as slow with TPE
            return None
        if text in self._late:
            self._finish(trial_id, text, self._late.pop(text))
            return None
        if failure := self._failure(variant):
            self._finish(trial_id, text, failure)
            return None
        self._elsewhere.discard(text)
        self._pending[text] = trial_id
        return variant

    def _may_proceed(self, trial_id: int, text: str, named: bool) -> bool:
        """Return whether no other process is before this trial, nor the budget spent.

        Trials that name their variant from birth yield to lower numbers only, so exactly one
        proceeds. A sampler's trial gets its name late, and yields to any other.
        """
        if not self._shared:
            return True
        self._refresh()
        (own,) = [trial for trial in self._trials if trial._trial_id == trial_id]
        ahead = 0
        for other in self._trials:
            if other is own:
                continue
            unfinished, before = other.state in UNFINISHED, other.number < own.number
            if other.user_attrs.get("variant") == text and (
                other.state == TrialState.COMPLETE or (unfinished and (before or not named))
            ):
                return False
            ahead += unfinished and before
        return self.count + ahead < self._goal

    def _finish(self, trial_id: int, text: str, measurement: Measurement) -> bool:
        """Keep an outcome; return False if the trial was ended as stale before."""
        if not self._ledger.complete(trial_id, measurement):
            return False
        self.outcome.measurements[text] = measurement
        self.outcome.measured += 1
        return True

    def _failure(self, variant: Variant) -> Measurement | None:
        """Return the outcome of a variant that does not render; None if it does."""
        try:
            self.ground.key(variant)
            return None
        except KtuneError as error:
            return Measurement("compile_error", detail=str(error).splitlines()[0])

    def _key_or_none(self, variant: Variant) -> str | None:
        """Return the key; None for a variant that does not render (it will say so when tried)."""
        return None if self._failure(variant) else self.ground.key(variant)

    def _in_state(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials that were in these states at the last look."""
        return [trial for trial in self._trials if trial.state in states]

    def _under_way(self) -> int:
        """Return how many variants are being measured."""
        return len(self._in_state(*UNFINISHED)) if self._shared else len(self._pending)

    def _refresh(self) -> None:
        """Take in what other processes have measured, and what they are at."""
        if self._shared and time.monotonic() - self._checked > self._heartbeat.interval_s:
            self._checked = time.monotonic()
            self._heartbeat.fail_stale(self._study)
        self._trials = self._ledger.read()
        states = UNFINISHED if self._shared else (TrialState.WAITING,)
        self._elsewhere = {
            str(trial.user_attrs["variant"])
            for trial in self._in_state(*states)
            if "variant" in trial.user_attrs
        } - self._pending.keys()
        if not self._shared:
            return
        for trial in self._in_state(TrialState.COMPLETE):
            text = str(trial.user_attrs.get("variant"))
            if text in self._legal and text not in self.outcome.measurements:
                found = trial.user_attrs.get("measurement")
                if found:
                    self.outcome.measurements[text] = Measurement.from_dict(found)
