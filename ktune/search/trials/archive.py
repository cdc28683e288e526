"""What earlier studies of a storage have measured."""

from __future__ import annotations

from collections.abc import Iterable

from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from ktune.bench.measurement import Measurement
from ktune.problem import Problem
from ktune.space import Space
from ktune.target.target import Target


def kind_name(target: Target) -> str:
    """Return whether a target's times are measured here and now: ``live`` or ``replay``."""
    return "replay" if target.replayed_from else "live"


def team_name(target: Target) -> str:
    """Return what targets must share to work in one study: device, protocol, live or replay."""
    return f"{target.device.key} | {target.protocol} {kind_name(target)}"


def family_name(problem: Problem, target: Target) -> str:
    """Return what studies must share for their measurements to hold in each other."""
    return f"{problem.text} | {team_name(target)}"


def study_name(space: Space, problem: Problem, target: Target, static: bool = False) -> str:
    """Return the name of a problem's study; a changed space is another study.

    Static trials have every parameter (``Axes``) and stand in a study of their own: a sampler
    that needs them falls back to chance where others are among them.
    """
    name = f"{family_name(problem, target)} | space {space.id}"
    return f"{name} static" if static else name


class Archive:
    """The studies of a storage, by family; read once."""

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage
        self._families: dict[str, list[int]] = {}
        for study in storage.get_all_studies():
            family = study.study_name.rpartition(" | space ")[0]
            self._families.setdefault(family, []).append(study._study_id)

    def known(self, family: str) -> dict[str, Measurement]:
        """Return the measurements of a problem in all studies, by source and launch options."""
        found: dict[str, Measurement] = {}
        for study_id in self._families.get(family, []):
            found |= _by_source(self._storage.get_all_trials(study_id, deepcopy=False))
        return found


def _by_source(trials: Iterable[FrozenTrial]) -> dict[str, Measurement]:
    found = {}
    for trial in trials:
        attributes = trial.user_attrs
        if trial.state.is_finished() and {"source", "measurement"} <= attributes.keys():
            found[attributes["source"]] = Measurement.from_dict(attributes["measurement"])
    return found
