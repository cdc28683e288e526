"""The side of ``ktune search`` that other machines see: publish, wait, and collect."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from ktune import settings
from ktune.cli import check_interrupt
from ktune.cli.console import note, warn
from ktune.cli.plan import Part
from ktune.device import Device
from ktune.errors import TableError, UsageError
from ktune.search.campaign import Sink
from ktune.search.trials.archive import team_name
from ktune.search.trials.fleet import (
    COORDINATOR,
    DONE,
    PAUSED,
    Errand,
    Fleet,
    Plan,
    collect,
    keep_entries,
)
from ktune.search.trials.storage import Heartbeat, PatientStorage, quiet_optuna
from ktune.space import read_space
from ktune.table import Entry
from ktune.target.target import Target

if TYPE_CHECKING:
    from ktune.cli.request import Request

ABANDONED_S = 60.0
"""How long to wait for another worker where one has left before its device was done."""
EVERY_S = 60.0
"""Seconds between two lines of a wait."""


def make_coordinator(
    request: Request, parts: Sequence[Part], storage: BaseStorage
) -> Coordinator | None:
    """Return the coordinator of a search in a shared storage; None for any other.

    Raises:
        UsageError: the search is to be done by others, and the storage is not shared.
    """
    if isinstance(storage, PatientStorage):
        return Coordinator(request, parts, storage)
    if not request.local:
        raise UsageError(
            "--no-local leaves the search to workers, which need a storage to share: "
            "--storage postgresql://user:password@host/database"
        )
    return None


class Coordinator:
    """Publishes a search, keeps its winners for others, and takes theirs.

    Args:
        request: what was asked.
        parts: spaces and problems.
        storage: the shared one.
    """

    def __init__(self, request: Request, parts: Sequence[Part], storage: PatientStorage) -> None:
        self._request, self._storage = request, storage
        self._heartbeat = Heartbeat(storage)
        self._spaces = {part.space.op: part.space for part in parts}
        texts = {label: text for text, label in map(read_space, request.spaces)}
        kind = "replay" if any(part.recording for part in parts) else "live"
        errands = [Errand.of(p.space, texts[p.space.label], p.problems) for p in parts]
        self._plan = Plan(kind, request.effort, tuple(errands))
        self._targets: Mapping[str, Target] = {}
        self._fleet: Fleet | None = None
        self._over = False

    def open(self, targets: Mapping[str, Target]) -> None:
        """Publish the campaign; workers join from now on.

        Args:
            targets: what is searched on here, by operation.
        """
        self._targets = targets
        with quiet_optuna():
            self._fleet = Fleet.publish(self._storage, self._plan, targets, self._heartbeat)
            self._part = self._fleet.coordinate()
        url = settings.masked(self._request.storage or os.environ.get(settings.STORAGE, ""))
        note(f"{self._fleet.name} is open; on other machines: ktune worker --storage '{url}'")

    def keep(self, entries: Sequence[Entry]) -> None:
        """Leave winners of this process in the storage, for searches of other machines."""
        with quiet_optuna():
            for entry in entries:
                op = entry.problem.op
                if op in self._targets:
                    keep_entries(self._storage, self._spaces[op], self._targets[op], [entry])

    def finish(self, sink: Sink) -> list[Entry]:
        """Wait for unlike devices, end the campaign, and put their winners into the table."""
        fleet = self._fleet
        assert fleet is not None
        with quiet_optuna():
            self._wait(fleet)
            fleet.set_state(DONE)
            self._wait(fleet)  # for whoever joined in this very moment
            fleet.settle()
            fleet.end(self._part)
            self._over = True
            own = [team_name(target) for target in self._targets.values()]
            found = list(collect(self._storage, self._plan, self._spaces.values(), own))
        return self._merge(found, sink)

    def close(self) -> None:
        """Pause a campaign that was not finished: workers leave it until it is taken up again."""
        fleet, self._fleet = self._fleet, None
        if fleet is not None and not self._over:
            self._storage.patience_s = 1.0
            with suppress(Exception), quiet_optuna():
                fleet.set_state(PAUSED)
                fleet.give_back(self._part)
                note(f"{fleet.name} is paused: its workers stop until it is taken up again")
        self._heartbeat.close()

    def _wait(self, fleet: Fleet) -> None:
        """Return when every unlike device that takes part has its winners."""
        vacant: dict[str, float] = {}
        said = _Said(self._request.quiet)
        while True:
            check_interrupt()
            parts = _led(fleet.parts(TrialState.RUNNING, TrialState.WAITING))
            if not parts:
                if self._targets or _led(fleet.parts(TrialState.COMPLETE)):
                    return
                said.once("waiting for workers")
            for trial in parts:
                name = trial.user_attrs["part"]
                if trial.state == TrialState.RUNNING or fleet.is_busy(name):
                    vacant.pop(name, None)
                    said.once(f"waiting for {name}")
                elif time.monotonic() - vacant.setdefault(name, time.monotonic()) > ABANDONED_S:
                    fleet.discard(trial)
                    warn(f"no worker is left for {name}; run the same command again to go on")
            time.sleep(0.5)

    def _merge(self, found: Sequence[tuple[Entry, Device]], sink: Sink) -> list[Entry]:
        by_device: dict[str, tuple[Device, list[Entry]]] = {}
        for entry, device in found:
            by_device.setdefault(device.key, (device, []))[1].append(entry)
        self._targets = {}  # these are in the storage
        for device, entries in by_device.values():
            try:
                sink(entries, device)
                note(f"collected {len(entries)} winner{'s' * (len(entries) != 1)} on {device.name}")
            except TableError as error:
                warn(f"winners on {device.name} are not saved: {error}")
        return [entry for entry, _ in found]


def _led(parts: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the parts of those who lead on a device."""
    return [trial for trial in parts if trial.user_attrs["part"] != COORDINATOR]


class _Said:
    """Says a line when it is new, and again after a while."""

    def __init__(self, quiet: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet, self._clock = quiet, clock
        self._when: dict[str, float] = {}

    def once(self, text: str) -> None:
        """Say a line unless it was said within the last minute."""
        if not self._quiet and self._clock() - self._when.get(text, -EVERY_S) >= EVERY_S:
            self._when[text] = self._clock()
            note(text)
