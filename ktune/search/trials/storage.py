"""Open Optuna's storage, the one record of a search, and keep its trials alive."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import optuna
import sqlalchemy
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import (
    BaseStorage,
    InMemoryStorage,
    RDBStorage,
    RetryHeartbeatStaleTrialCallback,
)
from optuna.trial import FrozenTrial, TrialState

from ktune import settings
from ktune.bench.measurement import Measurement
from ktune.errors import StorageError, UsageError

Result = TypeVar("Result")

_log = logging.getLogger("ktune.search")
_CANNOT_OPEN = (
    OSError,
    ImportError,
    ValueError,
    sqlalchemy.exc.SQLAlchemyError,
    optuna.exceptions.OptunaError,
)
MEMORY = "memory"
"""The storage name for a search that keeps nothing."""

PATIENCE_S = 180.0
"""How long a database server may be away before a search gives up on it."""

CONNECT_S = 10
"""How long a server may take to answer at the start."""

FEASIBLE = "has a time"
"""Optuna's name of the constraint that a variant is legal and has a time: broken above 0.

GPSampler wants it of every trial; other samplers take its absence for a constraint that holds.
"""

MOST_RETRIES = 3
"""A trial whose worker died is tried so often; one that kills its workers must end too."""

_AWAY = (
    sqlalchemy.exc.OperationalError,
    sqlalchemy.exc.InterfaceError,
    sqlalchemy.exc.PendingRollbackError,  # Optuna asks again in the transaction that was lost
)
_BORN_TWICE = (
    sqlalchemy.exc.IntegrityError,
    sqlalchemy.exc.ProgrammingError,
    optuna.exceptions.StorageInternalError,
)


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
    if "://" not in url or url in {"sqlite://", "sqlite:///"}:
        raise UsageError(
            f"--storage {url!r} is no storage; write sqlite:///FILE, postgresql://USER:PASSWORD@"
            f"HOST/DATABASE, or {MEMORY}"
        )
    try:
        with quiet_optuna():
            return _open(_with_driver(url))
    except _CANNOT_OPEN as error:
        raise StorageError(
            f"cannot open the study storage {settings.masked(url)}: {_reason(error, url)}. "
            "Name another by --storage or KTUNE_STORAGE; --storage memory keeps nothing"
        ) from error


def _with_driver(url: str) -> str:
    """Return the URL with psycopg as PostgreSQL's driver where it names none."""
    scheme, colon, rest = url.partition("://")
    return f"postgresql+psycopg{colon}{rest}" if scheme in {"postgres", "postgresql"} else url


def _reason(error: BaseException, url: str) -> str:
    """Return the first line of why a storage cannot be opened, what helps, and no password."""
    reason = settings.masked((str(error).strip().splitlines() or [type(error).__name__])[0])
    try:
        password = sqlalchemy.make_url(_with_driver(url)).password
    except (sqlalchemy.exc.ArgumentError, ValueError):
        return "this is not a database URL: user:password@host:port/database, after driver://"
    reason = reason.replace(str(password), "***") if password else reason
    if isinstance(error, ImportError) and url.startswith("postgres"):
        return "PostgreSQL needs psycopg: pip install 'ktune-kernels[postgres]'"
    return reason.rstrip(".")


def _open(url: str) -> RDBStorage:
    heartbeat_s = settings.heartbeat_s()
    care: dict[str, Any] = {
        "heartbeat_interval": heartbeat_s,
        "grace_period": 3 * heartbeat_s,
        "heartbeat_stale_trial_callback": TryAgain(max_retry=MOST_RETRIES),
    }
    if url.startswith("sqlite"):
        if url.startswith("sqlite:///"):
            Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        storage = RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}}, **care)
        _quicken(storage.engine)
        return storage
    engine: dict[str, Any] = {}
    if url.startswith("postgresql"):
        engine["connect_args"] = {"connect_timeout": CONNECT_S}
    url = url.replace("{", "{{").replace("}", "}}")  # Optuna formats it
    for again in range(5):
        try:
            return PatientStorage(url, engine_kwargs=engine, **care)
        except _BORN_TWICE:  # others make the tables of an empty database at this moment
            time.sleep(0.2 * (again + 1))
    return PatientStorage(url, engine_kwargs=engine, **care)


def _quicken(engine: sqlalchemy.Engine) -> None:
    @sqlalchemy.event.listens_for(engine, "connect")
    def _pragmas(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    engine.dispose()


class TryAgain(RetryHeartbeatStaleTrialCallback):
    """Optuna's retry; a variant whose workers died every time is kept as crashed."""

    def __call__(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Queue a trial anew, or end its variant for good."""
        tried = len(trial.system_attrs.get("retry_history", []))
        super().__call__(study, trial)
        if tried < MOST_RETRIES or "variant" not in trial.user_attrs:
            return
        crash = Measurement("crashed", detail=f"{tried + 1} processes died while measuring it")
        study.add_trial(
            optuna.create_trial(
                value=math.inf,
                params=trial.params,
                distributions=trial.distributions,
                user_attrs={**trial.user_attrs, "measurement": crash.to_dict()},
                constraints={FEASIBLE: 1.0},
            )
        )


def _is_away(error: BaseException) -> bool:
    """Return whether an error means that the database server could not be talked to."""
    if isinstance(error, optuna.exceptions.StorageInternalError) and error.__cause__:
        error = error.__cause__
    if isinstance(error, _AWAY):
        return True
    return isinstance(error, sqlalchemy.exc.DBAPIError) and error.connection_invalidated


def _patient(method: Callable[..., Result]) -> Callable[..., Result]:
    """Return the method, tried again while the database server is away.

    A call whose answer was lost may have been carried out. Ending a trial a second time is then
    no error, and ``Heartbeat.fail_stale`` finds a trial that nobody owns.
    """

    @functools.wraps(method)
    def call(self: PatientStorage, *arguments: Any, **options: Any) -> Result:
        deadline, pause_s = time.monotonic() + self.patience_s, 0.0
        while True:
            try:
                return method(self, *arguments, **options)
            except UpdateFinishedTrialError:
                if pause_s and self._has_ended_so(method.__name__, *arguments, **options):
                    return True  # type: ignore[return-value]
                raise
            except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.DBAPIError) as error:
                if not _is_away(error) or time.monotonic() > deadline:
                    raise
                if pause_s:  # the first failure may be an old connection's
                    self._warn(error.__cause__ or error)
                time.sleep(pause_s)
                pause_s = 0.5

    return call


class PatientStorage(RDBStorage):
    """Optuna's storage in a database server, which may be restarted while a search runs.

    Attributes:
        patience_s: how long the server may be away.
    """

    patience_s = PATIENCE_S
    _warned = -math.inf

    create_new_study = _patient(RDBStorage.create_new_study)
    delete_study = _patient(RDBStorage.delete_study)
    set_study_user_attr = _patient(RDBStorage.set_study_user_attr)
    set_study_system_attr = _patient(RDBStorage.set_study_system_attr)
    get_study_id_from_name = _patient(RDBStorage.get_study_id_from_name)
    get_study_name_from_id = _patient(RDBStorage.get_study_name_from_id)
    get_study_directions = _patient(RDBStorage.get_study_directions)
    get_study_user_attrs = _patient(RDBStorage.get_study_user_attrs)
    get_study_system_attrs = _patient(RDBStorage.get_study_system_attrs)
    get_all_studies = _patient(RDBStorage.get_all_studies)
    _create_new_trial = _patient(RDBStorage._create_new_trial)
    _set_trial_param = _patient(RDBStorage._set_trial_param)
    set_trial_state_values = _patient(RDBStorage.set_trial_state_values)
    set_trial_user_attr = _patient(RDBStorage.set_trial_user_attr)
    set_trial_system_attr = _patient(RDBStorage.set_trial_system_attr)
    get_trial = _patient(RDBStorage.get_trial)
    _get_trials = _patient(RDBStorage._get_trials)
    record_heartbeat = _patient(RDBStorage.record_heartbeat)
    _get_stale_trial_ids = _patient(RDBStorage._get_stale_trial_ids)

    def _has_ended_so(
        self, method: str, trial_id: int, state: TrialState | None = None, values: Any = None
    ) -> bool:
        """Return whether a trial is in the final state that a repeated call asks for."""
        if method != RDBStorage.set_trial_state_values.__name__:
            return False
        return bool(self.get_trial(trial_id).state == state)

    def _warn(self, error: BaseException) -> None:
        """Say, twice a minute at most, that the server is away."""
        if time.monotonic() - self._warned > 30.0:
            self._warned = time.monotonic()
            reason = _reason(error, self.url)
            _log.warning("the database does not answer (%.160s); trying again", reason)


def take_trial(storage: BaseStorage, trial_id: int) -> bool:
    """Make a queued trial this process's; return False if another has taken or ended it."""
    return end_trial(storage, trial_id, TrialState.RUNNING)


def end_trial(
    storage: BaseStorage, trial_id: int, state: TrialState, value: float | None = None
) -> bool:
    """Set a trial's state; return False if it has ended before, as a stale one does."""
    with suppress(UpdateFinishedTrialError):
        values = None if value is None else [value]
        return bool(storage.set_trial_state_values(trial_id, state, values))
    return False


class Heartbeat:
    """Keeps the trials of this process alive, and ends those of processes that died.

    Optuna's own heartbeat belongs to ``study.optimize``; a search that asks and tells needs this.
    Does nothing for a storage without heartbeats.
    """

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage if isinstance(storage, RDBStorage) else None
        self.interval_s = settings.heartbeat_s()
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
        if self._thread is not None:
            self._thread.join(timeout=1.0)

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
        self._storage.remove_session()


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
