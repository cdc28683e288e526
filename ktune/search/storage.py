"""Open Optuna's storage, the one record of a search, and keep its trials alive."""

from __future__ import annotations

import functools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import optuna
import sqlalchemy
from optuna.storages import (
    BaseStorage,
    InMemoryStorage,
    RDBStorage,
    RetryHeartbeatStaleTrialCallback,
)
from optuna.trial import TrialState

from ktune import settings
from ktune.errors import StorageError

Result = TypeVar("Result")

_log = logging.getLogger("ktune.search")
_CANNOT_OPEN = (
    OSError,
    ImportError,
    sqlalchemy.exc.SQLAlchemyError,
    optuna.exceptions.OptunaError,
)
_SERVER_GONE = (
    optuna.exceptions.StorageInternalError,
    sqlalchemy.exc.OperationalError,
    sqlalchemy.exc.InterfaceError,
    sqlalchemy.exc.DBAPIError,
)
MEMORY = "memory"
"""The storage name for a search that keeps nothing."""

PATIENCE_S = 180.0
"""How long a database server may be away before a search gives up on it."""

MOST_RETRIES = 3
"""A trial whose worker died is tried so often; one that kills its workers must end too."""


def is_shared(storage: BaseStorage) -> bool:
    """Return whether other machines may work in this storage at the same time."""
    return isinstance(storage, PatientStorage)


def open_storage(url: str) -> BaseStorage:
    """Open an Optuna storage by URL, or ``memory``.

    SQLite runs in WAL mode: a killed process loses nothing that was told, and a write costs a
    few milliseconds less. A database server may go away for minutes and come back.

    Raises:
        StorageError: the storage cannot be opened; says why and what to do.
    """
    if url == MEMORY:
        return InMemoryStorage()
    try:
        with quiet_optuna():
            return _open(url)
    except _CANNOT_OPEN as error:
        reason = str(error).splitlines()[0]
        hint = "" if "psycopg" not in reason else "; pip install 'ktune-kernels[postgres]'"
        raise StorageError(
            f"cannot open the study storage {settings.masked(url)}: {reason}{hint}. "
            "Name another by --storage or KTUNE_STORAGE; --storage memory keeps nothing"
        ) from error


def _open(url: str) -> RDBStorage:
    heartbeat_s = settings.heartbeat_s()
    care: dict[str, Any] = {
        "heartbeat_interval": heartbeat_s,
        "grace_period": 3 * heartbeat_s,
        "heartbeat_stale_trial_callback": RetryHeartbeatStaleTrialCallback(max_retry=MOST_RETRIES),
    }
    if url.startswith("sqlite"):
        if url.startswith("sqlite:///"):
            Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        storage = RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}}, **care)
        _quicken(storage.engine)
        return storage
    return PatientStorage(url, engine_kwargs={"pool_pre_ping": True}, **care)


def _quicken(engine: sqlalchemy.Engine) -> None:
    @sqlalchemy.event.listens_for(engine, "connect")
    def _pragmas(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    engine.dispose()


def _patient(method: Callable[..., Result]) -> Callable[..., Result]:
    """Return the method, tried again while the database server is away.

    A call whose answer was lost may have been carried out: ending a trial that has ended is then
    no error, and ``Heartbeat.fail_stale`` finds a trial that nobody owns.
    """

    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Result:
        deadline, again = time.monotonic() + PATIENCE_S, False
        while True:
            try:
                return method(*arguments, **options)
            except optuna.exceptions.UpdateFinishedTrialError:
                if again and method.__name__ == "set_trial_state_values":
                    return True  # type: ignore[return-value]
                raise
            except _SERVER_GONE as error:
                if time.monotonic() > deadline:
                    raise
                if not again:
                    text = str(error).splitlines()[0]
                    _log.warning("the database does not answer (%s); trying again", text[:120])
                again = True
                time.sleep(0.5)

    return call


class PatientStorage(RDBStorage):
    """Optuna's storage in a database server, which may be restarted while a search runs."""

    create_new_study = _patient(RDBStorage.create_new_study)
    set_study_user_attr = _patient(RDBStorage.set_study_user_attr)
    set_study_system_attr = _patient(RDBStorage.set_study_system_attr)
    get_study_id_from_name = _patient(RDBStorage.get_study_id_from_name)
    get_study_name_from_id = _patient(RDBStorage.get_study_name_from_id)
    get_study_directions = _patient(RDBStorage.get_study_directions)
    get_study_user_attrs = _patient(RDBStorage.get_study_user_attrs)
    get_study_system_attrs = _patient(RDBStorage.get_study_system_attrs)
    get_all_studies = _patient(RDBStorage.get_all_studies)
    create_new_trial = _patient(RDBStorage.create_new_trial)
    set_trial_param = _patient(RDBStorage.set_trial_param)
    set_trial_state_values = _patient(RDBStorage.set_trial_state_values)
    set_trial_user_attr = _patient(RDBStorage.set_trial_user_attr)
    set_trial_system_attr = _patient(RDBStorage.set_trial_system_attr)
    get_trial = _patient(RDBStorage.get_trial)
    get_all_trials = _patient(RDBStorage.get_all_trials)
    _get_trials = _patient(RDBStorage._get_trials)
    get_n_trials = _patient(RDBStorage.get_n_trials)
    get_best_trial = _patient(RDBStorage.get_best_trial)
    record_heartbeat = _patient(RDBStorage.record_heartbeat)
    _get_stale_trial_ids = _patient(RDBStorage._get_stale_trial_ids)


class Heartbeat:
    """Keeps the trials of this process alive, and ends those of processes that died.

    Optuna's own heartbeat belongs to ``study.optimize``; a search that asks and tells needs this.
    Does nothing for a storage without heartbeats.
    """

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage if isinstance(storage, RDBStorage) else None
        self._own: set[int] = set()
        self._adopted: set[int] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, trial_id: int) -> None:
        """Record a first heartbeat of an own trial now, and more from a thread."""
        if self._storage is None:
            return
        self._storage.record_heartbeat(trial_id)
        with self._lock:
            self._own.add(trial_id)
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._thread.start()

    def forget(self, trial_id: int) -> None:
        """Record no more: the trial has ended."""
        with self._lock:
            self._own.discard(trial_id)

    def close(self) -> None:
        """Stop."""
        self._stop.set()

    def fail_stale(self, study: optuna.Study) -> None:
        """End trials whose heartbeat has stopped, and queue each one anew (Optuna's retry).

        A running trial may have no heartbeat at all: its process died between two writes, or the
        answer to its creation was lost. Such a stranger is given its first one here; if it has an
        owner after all, that one goes on beating, else the trial goes stale.
        """
        if self._storage is None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.storages.fail_stale_trials(study)
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if trial._trial_id not in self._own | self._adopted:
                self._adopted.add(trial._trial_id)
                self._storage.record_heartbeat(trial._trial_id)

    def _beat(self) -> None:
        assert self._storage is not None
        while not self._stop.wait(self._storage.get_heartbeat_interval()):
            with self._lock:
                trials = sorted(self._own)
            for trial_id in trials:
                with suppress(Exception):  # the search itself will say that the storage is gone
                    self._storage.record_heartbeat(trial_id)


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Within, Optuna logs warnings only and does not announce experimental features."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            warnings.filterwarnings("ignore", "Heartbeat of storage")  # class Heartbeat beats
            # An infeasible trial's value is infinite; GPSampler takes it for the worst seen.
            warnings.filterwarnings("ignore", "Clip non-finite values")
            yield
    finally:
        optuna.logging.set_verbosity(before)
