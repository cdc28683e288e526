"""A campaign as other machines see it: a study in the shared storage that says what to search.

The study is named ``campaign <id>``. Its attributes hold the spaces, the problems and the effort;
its trials are parts that processes play: the coordinator, and for each device unlike the
coordinator's the one worker that leads, holding the finals there. Optuna's heartbeats say who is
alive, and its retry hands the part of a dead worker to the next.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from ktune.codegen import template_digest
from ktune.device import Device
from ktune.errors import KtuneError, UsageError
from ktune.operations import parse_problem
from ktune.problem import Problem, short_hash
from ktune.search.effort import Effort
from ktune.search.study import UNFINISHED
from ktune.search.trials.archive import study_name, team_name
from ktune.search.trials.storage import Heartbeat, end_trial, quiet_optuna, take_trial
from ktune.space import Space, parse_space
from ktune.table import Entry
from ktune.target.target import Target

PREFIX = "campaign "
OPEN, PAUSED, DONE = "open", "paused", "done"
COORDINATOR = "coordinator"
LOOK_S = 1.0
"""Seconds between two looks at a campaign's state."""


@dataclass(frozen=True, slots=True)
class Errand:
    """One operation of a campaign.

    Attributes:
        op: its name.
        label: the space's file, for messages.
        text: of that file.
        problems: texts of what to tune.
        templates: ``codegen.template_digest``, lest machines measure different kernels.
    """

    op: str
    label: str
    text: str
    problems: tuple[str, ...]
    templates: str

    @classmethod
    def of(cls, space: Space, text: str, problems: Sequence[Problem]) -> Errand:
        """Describe a part of a search."""
        texts = tuple(problem.text for problem in problems)
        return cls(space.op, space.label, text, texts, template_digest(space.op))

    def read(self) -> tuple[Space, list[Problem]]:
        """Return space and problems.

        Raises:
            UsageError: this machine lacks the operation, or its templates are others.
        """
        space = parse_space(self.text, self.label)
        if template_digest(space.op) != self.templates:
            raise UsageError(
                f"the templates of {self.op} differ from the coordinator's, so times would be of "
                "different kernels: install the same ktune, and the same templates, on both"
            )
        return space, [parse_problem(text) for text in self.problems]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a campaign is to do, wherever it is done.

    Attributes:
        kind: ``live`` or ``replay``: one never counts as the other.
        effort: of each device.
        errands: one an operation.
    """

    kind: str
    effort: Effort
    errands: tuple[Errand, ...]

    @property
    def id(self) -> str:
        """Twelve digits; the same search has the same."""
        return short_hash(json.dumps(self.to_dict(), sort_keys=True))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; no limit of seconds is None."""
        effort = asdict(self.effort)
        effort["budget_s"] = None if math.isinf(self.effort.budget_s) else self.effort.budget_s
        return {"kind": self.kind, "effort": effort, "errands": [asdict(e) for e in self.errands]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Build a plan from ``to_dict``'s result; what a newer ktune adds to it is refused.

        Raises:
            UsageError: another version of ktune wrote it.
        """
        try:
            effort = dict(values["effort"])
            effort["budget_s"] = math.inf if effort["budget_s"] is None else effort["budget_s"]
            errands = [Errand(**{**e, "problems": tuple(e["problems"])}) for e in values["errands"]]
            return cls(values["kind"], Effort(**effort), tuple(errands))
        except (KeyError, TypeError) as error:
            raise UsageError(f"it was begun by another version of ktune ({error})") from error


@dataclass(frozen=True, slots=True)
class Part:
    """A part that this process plays in a campaign: a running trial."""

    name: str
    trial_id: int


class Fleet:
    """One campaign in a shared storage.

    Args:
        storage: the shared one.
        name: of the campaign's study.
        heartbeat: keeps the parts of this process alive.
    """

    def __init__(self, storage: BaseStorage, name: str, heartbeat: Heartbeat) -> None:
        self._storage, self._heartbeat = storage, heartbeat
        self._study = optuna.load_study(study_name=name, storage=storage)
        self._looked = -math.inf
        self.name = name
        self._attributes = self._study.user_attrs

    @classmethod
    def publish(
        cls, storage: BaseStorage, plan: Plan, targets: Mapping[str, Target], heartbeat: Heartbeat
    ) -> Fleet:
        """Open a campaign, or take up one that was left.

        Args:
            storage: the shared one.
            plan: what to do.
            targets: what the coordinator itself measures on, by operation; may be empty.
            heartbeat: keeps the parts of this process alive.
        """
        name = f"{PREFIX}{plan.id}"
        study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
        known = study.user_attrs
        own = {op: {"team": team_name(t), "versions": t.versions} for op, t in targets.items()}
        again = known.get("state") == DONE
        study.set_user_attr("plan", plan.to_dict())
        study.set_user_attr("coordinator", own)
        study.set_user_attr("round", int(known.get("round", 0)) + again)
        study.set_user_attr("state", OPEN)
        return cls(storage, name, heartbeat)

    @property
    def plan(self) -> Plan:
        """What to do.

        Raises:
            UsageError: another version of ktune wrote it.
        """
        return Plan.from_dict(self._attributes["plan"])

    @property
    def round(self) -> int:
        """How often the campaign was done, and begun again."""
        return int(self._attributes["round"])

    def team(self, op: str) -> str:
        """Return what the coordinator itself searches an operation on; nothing if it does not."""
        return str(self._attributes["coordinator"].get(op, {}).get("team", ""))

    @property
    def state(self) -> str:
        """Whether work is wanted, as of a second ago."""
        if time.monotonic() - self._looked > LOOK_S:
            self._attributes = self._study.user_attrs
            self._looked = time.monotonic()
        return str(self._attributes["state"])

    def set_state(self, state: str) -> None:
        """Say that the campaign is open, paused or done."""
        self._study.set_user_attr("state", state)
        self._looked = -math.inf

    def parts(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the parts of this round that are in these states, after ending stale ones."""
        self._heartbeat.fail_stale(self._study)
        return [t for t in self._round() if t.state in states]

    def play(self, name: str, versions: dict[str, str] | None = None) -> Part | None:
        """Take a part; None if another process plays it or has played it to the end."""
        self._heartbeat.fail_stale(self._study)
        for trial in self._named(name):
            if trial.state == TrialState.WAITING and self._take(trial):
                self._heartbeat.watch(trial._trial_id)
                return Part(name, trial._trial_id)
        if any(trial.state in _TAKEN for trial in self._named(name)):
            return None
        trial_id = self._create(name, versions, TrialState.RUNNING)
        self._heartbeat.watch(trial_id)
        first = next(t for t in self._named(name) if t.state in _TAKEN)
        if first._trial_id == trial_id:
            return Part(name, trial_id)
        self._end(trial_id, TrialState.PRUNED)
        return None

    def coordinate(self) -> Part:
        """Play the coordinator; one before this process is over."""
        for trial in self._named(COORDINATOR):
            if trial.state in UNFINISHED:
                self._end(trial._trial_id, TrialState.FAIL)
        trial_id = self._create(COORDINATOR, None, TrialState.RUNNING)
        self._heartbeat.watch(trial_id)
        return Part(COORDINATOR, trial_id)

    def discard(self, trial: FrozenTrial) -> None:
        """End a part that nobody plays any more, unless somebody has just taken it."""
        if self._take(trial):
            self._end(trial._trial_id, TrialState.PRUNED)

    def end(self, part: Part, entries: int = 0) -> None:
        """Say that a part was played to its end."""
        self._end(part.trial_id, TrialState.COMPLETE, float(entries))

    def give_back(self, part: Part, versions: dict[str, str] | None = None) -> None:
        """Let another process take a part at once."""
        if self._end(part.trial_id, TrialState.FAIL) and part.name != COORDINATOR:
            self._create(part.name, versions, TrialState.WAITING)

    def attended(self) -> bool:
        """Return whether the coordinator is alive."""
        parts = self.parts(TrialState.RUNNING)
        return any(trial.user_attrs.get("part") == COORDINATOR for trial in parts)

    def check_versions(self, op: str, target: Target) -> None:
        """Raise UsageError if those who search on the same device have other versions."""
        known = self._attributes["coordinator"].get(op, {})
        if known.get("team") != team_name(target):
            parts = self._named(part_name(op, target))
            found = [t.user_attrs["versions"] for t in parts if t.user_attrs.get("versions")]
            known = {"versions": found[0]} if found else {}
        if known and known["versions"] != target.versions:
            theirs, ours = (
                ", ".join(f"{k} {v}" for k, v in sorted(versions.items()))
                for versions in (known["versions"], target.versions)
            )
            raise UsageError(
                f"{target.device.name} is searched with {theirs}, and this machine has {ours}: "
                "times of different versions are never mixed; install the same"
            )

    def settle(self) -> None:
        """Wait until no trial of the campaign's studies runs that did so at the first look."""
        last: dict[int, int] = {}
        while True:
            busy = False
            for study in self._studies():
                self._heartbeat.fail_stale(study)
                trials = study.get_trials(deepcopy=False, states=UNFINISHED)
                limit = last.setdefault(study._study_id, max((t.number for t in trials), default=0))
                for trial in trials:
                    if trial.state == TrialState.WAITING:
                        self.discard(trial)
                    elif trial.number <= limit:
                        busy = True
            if not busy:
                return
            time.sleep(LOOK_S / 2)

    def is_busy(self, part: str) -> bool:
        """Return whether anybody measures for a part that nobody plays at the moment."""
        op, _, team = part.partition(": ")
        return any(
            study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            for study in self._studies()
            if study.study_name.startswith(f"{op} ") and f" | {team} | space " in study.study_name
        )

    def _studies(self) -> list[optuna.Study]:
        """Return the studies of this campaign's problems, of all devices."""
        wanted = {text for errand in self.plan.errands for text in errand.problems}
        names = [study.study_name for study in self._storage.get_all_studies()]
        with quiet_optuna():
            return [
                optuna.load_study(study_name=name, storage=self._storage)
                for name in names
                if name.partition(" | ")[0] in wanted
            ]

    def _round(self) -> list[FrozenTrial]:
        trials = self._study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.user_attrs.get("round") == self.round]

    def _named(self, name: str) -> list[FrozenTrial]:
        return [trial for trial in self._round() if trial.user_attrs.get("part") == name]

    def _create(self, name: str, versions: dict[str, str] | None, state: TrialState) -> int:
        attributes = {"part": name, "round": self.round, "versions": versions or {}}
        template = optuna.trial.create_trial(state=state, user_attrs=attributes)
        return self._storage.create_new_trial(self._study._study_id, template)

    def _take(self, trial: FrozenTrial) -> bool:
        return take_trial(self._storage, trial._trial_id)

    def _end(self, trial_id: int, state: TrialState, value: float | None = None) -> bool:
        self._heartbeat.forget(trial_id)
        return end_trial(self._storage, trial_id, state, value)


_TAKEN = (TrialState.RUNNING, TrialState.WAITING, TrialState.COMPLETE)


def part_name(op: str, target: Target) -> str:
    """Return the name of the part that leads an operation's search on a device."""
    return f"{op}: {team_name(target)}"


def open_campaigns(storage: BaseStorage, heartbeat: Heartbeat) -> list[Fleet]:
    """Return the campaigns that want work, the oldest first."""
    found = [
        study.study_name
        for study in storage.get_all_studies()
        if study.study_name.startswith(PREFIX) and study.user_attrs.get("state") == OPEN
    ]
    return [Fleet(storage, name, heartbeat) for name in found]


def keep_entries(
    storage: BaseStorage, space: Space, target: Target, entries: Iterable[Entry]
) -> None:
    """Leave a device's winners at its studies, for every campaign to collect."""
    for entry in entries:
        study = optuna.create_study(
            storage=storage,
            study_name=study_name(space, entry.problem, target),
            load_if_exists=True,
        )
        values = {"problem": entry.problem.text, **entry.to_dict()}
        study.set_user_attr("device", target.device.to_dict())
        study.set_user_attr("entry", values)


def collect(
    storage: BaseStorage, plan: Plan, spaces: Iterable[Space], but: Iterable[str] = ()
) -> Iterator[tuple[Entry, Device]]:
    """Yield the winners of a plan's problems on all devices, except those of some teams."""
    ids, skipped = {space.op: space.id for space in spaces}, set(but)
    wanted = {
        text: f" {plan.kind} | space {ids[errand.op]}"
        for errand in plan.errands
        for text in errand.problems
        if errand.op in ids
    }
    for study in storage.get_all_studies():
        family, _, _ = study.study_name.rpartition(" | space ")
        text, _, team = family.partition(" | ")
        ending = wanted.get(text)
        if ending is None or not study.study_name.endswith(ending) or team in skipped:
            continue
        if {"entry", "device"} <= study.user_attrs.keys():
            device = Device.from_dict(study.user_attrs["device"])
            values = dict(study.user_attrs["entry"])
            with suppress(KtuneError):  # an older ktune's
                yield Entry.from_dict(device.key, values.pop("problem"), values), device
