"""Remember what does not compile, so that no search of any problem tries it again."""

from __future__ import annotations

import optuna
from optuna.storages import BaseStorage

from ktune.bench.measurement import Measurement
from ktune.search.trials.storage import is_shared
from ktune.target.target import Target


class Failures:
    """Compile failures by source and launch options, for one architecture and set of versions.

    They are attributes of one study without trials, so they live where the search's record does.
    A replay neither reads nor writes any.

    Args:
        storage: Optuna's.
        target: gives architecture and versions.
    """

    def __init__(self, storage: BaseStorage, target: Target) -> None:
        self._study: optuna.Study | None = None
        self._known: dict[str, str] = {}
        if target.replayed_from is None:
            versions = " ".join(f"{k} {v}" for k, v in sorted(target.versions.items()))
            name = f"compile failures | {target.device.arch} | {versions}"
            self._study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
            self._known = dict(self._study.user_attrs)
        self._shared = is_shared(storage)

    def refresh(self) -> None:
        """Take in what other processes have found not to compile."""
        if self._study is not None and self._shared:
            self._known |= self._study.user_attrs

    def get(self, key: str) -> Measurement | None:
        """Return the outcome of a source that is known not to compile."""
        detail = self._known.get(key)
        return None if detail is None else Measurement("compile_error", detail=detail)

    def note(self, key: str, measurement: Measurement) -> None:
        """Keep an outcome if it is a failure to compile."""
        if measurement.status == "compile_error" and key not in self._known:
            self._known[key] = measurement.detail
            if self._study is not None:
                self._study.set_user_attr(key, measurement.detail)
