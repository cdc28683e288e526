"""What ``ktune worker`` does: look for campaigns, join each, and leave cleanly."""

from __future__ import annotations

import os
import socket
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from ktune import settings
from ktune.cli import INTERRUPTED, check_interrupt
from ktune.cli.console import emit, note, warn
from ktune.cli.options import parse_devices
from ktune.cli.plan import LIVE, open_recording, recording_name
from ktune.cli.progress import Tracker, View, make_view
from ktune.device import Device
from ktune.errors import KtuneError, StorageError, UsageError
from ktune.problem import Problem
from ktune.search.campaign import Campaign
from ktune.search.result import Result
from ktune.search.trials.archive import team_name
from ktune.search.trials.fleet import (
    OPEN,
    PAUSED,
    Errand,
    Fleet,
    Part,
    Plan,
    keep_entries,
    open_campaigns,
)
from ktune.search.trials.fleet import part_name as name_of_part
from ktune.search.trials.storage import Heartbeat, PatientStorage, open_storage, quiet_optuna
from ktune.space import Space
from ktune.table import Entry
from ktune.target.live import LiveTarget
from ktune.target.replay import ReplayTarget
from ktune.target.target import Target

POLL_S = 1.0
"""Seconds between two looks for campaigns."""


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """What the command line asks for."""

    storage: str | None
    target: str
    devices: str | None
    once: bool
    wait_s: float
    quiet: bool
    as_json: bool


def run_worker(request: WorkerRequest) -> int:
    """Work until told to stop or nothing is left to do, and return the exit code."""
    worker = Worker(request)
    code = 1
    try:
        code = worker.run()
    except KeyboardInterrupt:
        note("interrupted: what was being measured here was given back")
        code = INTERRUPTED
    finally:
        worker.close()
        worker.report(code == INTERRUPTED)
    return code


class HelperTracker(Tracker):
    """Shows the progress of a search whose winners another process chooses."""

    def problem_done(self, result: Result) -> None:
        """Say how much was measured here."""
        known = len(result.outcome.measurements)
        self._view.line(
            f"{result.problem.text}: {result.outcome.measured} of {known} variants measured here"
        )


class Worker:
    """Joins the campaigns of a storage, one after the other.

    Args:
        request: what was asked.
    """

    def __init__(self, request: WorkerRequest) -> None:
        devices = request.devices or ("all" if request.target == LIVE else None)
        self._places = parse_devices(devices)
        self._recording = recording_name(request.target, self._places)
        self._kind = "live" if self._recording is None else "replay"
        url = request.storage or settings.storage_url()
        self._storage = _open_shared(url)
        self._request, self._url = request, settings.masked(url)
        self._heartbeat = Heartbeat(self._storage)
        self._view: View = make_view(request.quiet)
        self._live: LiveTarget | None = None
        self._helped: set[tuple[str, int, str]] = set()
        self._refused: set[tuple[str, str]] = set()
        self._salt = zlib.crc32(f"{socket.gethostname()} {os.getpid()}".encode())
        self.measured = self.winners = 0
        self.campaigns: set[str] = set()

    def run(self) -> int:
        """Look for campaigns and join them, until nothing has been to do for long enough."""
        note(f"looking for searches in {self._url}")
        idle_since, said = time.monotonic(), False
        while True:
            check_interrupt()
            with quiet_optuna():
                campaigns = open_campaigns(self._storage, self._heartbeat)
                worked = [self._join(fleet) for fleet in campaigns]
                waiting = any(self._may_need_us(fleet) for fleet in campaigns)
            if any(worked):
                said = False
            elif not said and not campaigns and self._patience_s:
                said = True
                note("no search is open; waiting for one")
            if any(worked) or waiting:
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since >= self._patience_s:
                return 1 if self._refused and not self.campaigns else 0
            if not campaigns:
                self._close_live()  # somebody else may want the GPUs
            if not any(worked):
                time.sleep(POLL_S)

    @property
    def _patience_s(self) -> float:
        """How long to stay with nothing to do."""
        return 0.0 if self._request.once and self.campaigns else self._request.wait_s

    def close(self) -> None:
        """End the workers, the bar and the heartbeat."""
        self._view.close()
        self._heartbeat.close()
        self._close_live()

    def report(self, interrupted: bool) -> None:
        """Say what was done."""
        if self._request.as_json:
            document = {
                "interrupted": interrupted,
                "storage": self._url,
                "campaigns": sorted(self.campaigns),
                "measured": self.measured,
                "winners": self.winners,
            }
            emit("worker", document)
            return
        winners = f", {self.winners} winners chosen" if self.winners else ""
        for_how_many = f"{len(self.campaigns)} search{'es' * (len(self.campaigns) != 1)}"
        note(f"measured {self.measured} variants for {for_how_many}{winners}")

    def _may_need_us(self, fleet: Fleet) -> bool:
        """Return whether an open campaign of this worker's may yet ask for something."""
        return fleet.name in self.campaigns and fleet.attended()

    def _join(self, fleet: Fleet) -> bool:
        """Do what there is to do for a campaign; return whether there was anything."""
        worked = False
        try:
            plan = fleet.plan
        except UsageError as error:
            return self._refuse(fleet, "", error)
        if plan.kind != self._kind:
            which = "recorded" if plan.kind == "replay" else "live"
            reason = UsageError(f"it wants {which} times; see --target")
            return self._refuse(fleet, "", reason)
        for errand in plan.errands:
            if fleet.state == OPEN:
                try:
                    worked |= self._do(fleet, plan, errand)
                except StorageError:
                    raise
                except KtuneError as error:
                    self._refuse(fleet, errand.op, error)
                except KeyError:
                    if any(
                        f.name == fleet.name for f in open_campaigns(self._storage, self._heartbeat)
                    ):
                        warn(f"{fleet.name}: its studies were deleted; beginning anew")
        return worked

    def _refuse(self, fleet: Fleet, op: str, error: KtuneError) -> bool:
        """Say once why a campaign, or an operation of it, is not joined."""
        if (fleet.name, op) not in self._refused:
            self._refused.add((fleet.name, op))
            what = f"{fleet.name}, {op}" if op else fleet.name
            hint = ""
            if "cannot import operation" in str(error):
                hint = (
                    ". Install its package on this machine, or put its folder on PYTHONPATH, "
                    "and start the worker again"
                )
            warn(f"cannot help {what}: {error}{hint}")
        return False

    def _do(self, fleet: Fleet, plan: Plan, errand: Errand) -> bool:
        """Lead or help the search of one operation, if there is anything to do."""
        space, problems = errand.read()
        key = (fleet.name, fleet.round, errand.op)
        with self._target(errand.op) as (target, held):
            problems = [p for p in problems if held is None or p.text in held]
            fleet.check_versions(errand.op, target)
            part = None
            if problems and fleet.team(errand.op) != team_name(target):
                part = fleet.play(name_of_part(errand.op, target), target.versions)
            if not problems or (part is None and key in self._helped):
                return False
            self.campaigns.add(fleet.name)
            if part is None:
                self._help(fleet, plan, space, problems, target)
                if fleet.state == OPEN:
                    self._helped.add(key)
            else:
                self._lead(fleet, plan, space, problems, target, part)
        return True

    def _help(
        self, fleet: Fleet, plan: Plan, space: Space, problems: Sequence[Problem], target: Target
    ) -> None:
        """Measure for a search that another process of the same device leads."""
        note(f"helping {fleet.name}: {space.op}, {len(problems)} problems, {target.device.name}")
        tracker = HelperTracker(self._view, len(problems))
        tracker.device = target.device
        effort = replace(plan.effort, seed=(plan.effort.seed + self._salt) % 2**31)
        campaign = Campaign(
            target, self._storage, _no_sink, effort, tracker,
            finals=False, stop=lambda: _state(fleet) != OPEN,
        )  # fmt: skip
        self._run(campaign, space, problems)

    def _lead(
        self,
        fleet: Fleet,
        plan: Plan,
        space: Space,
        problems: Sequence[Problem],
        target: Target,
        part: Part,
    ) -> None:
        """Search on a device that the coordinator has not, and leave the winners for it."""
        note(f"leading {fleet.name}: {space.op}, {len(problems)} problems, {target.device.name}")

        def sink(entries: Sequence[Entry], device: Device) -> None:
            keep_entries(self._storage, space, target, entries)
            self.winners += len(entries)

        tracker = Tracker(self._view, len(problems))
        tracker.device = target.device
        campaign = Campaign(
            target, self._storage, sink, plan.effort, tracker, stop=lambda: _state(fleet) == PAUSED
        )
        before = self.winners
        try:
            self._run(campaign, space, problems)
        except BaseException:
            with suppress(Exception):
                fleet.give_back(part, target.versions)
            raise
        if fleet.state == PAUSED:
            fleet.give_back(part, target.versions)
        else:
            fleet.end(part, self.winners - before)

    def _run(self, campaign: Campaign, space: Space, problems: Sequence[Problem]) -> None:
        try:
            for _ in campaign.run([(space, problem) for problem in problems]):
                pass
        finally:
            self.measured += sum(result.outcome.measured for result in campaign.results)

    @contextmanager
    def _target(self, op: str) -> Iterator[tuple[Target, set[str] | None]]:
        """Yield what answers for an operation, and the problems it can answer for (None: all)."""
        if self._recording is None:
            self._live = self._live or LiveTarget(self._places)
            yield self._live, None
            return
        recording = open_recording(self._recording, op, self._request.target)
        target = ReplayTarget(recording)
        yield target, set(recording.problems)
        target.close()

    def _close_live(self) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None


def _state(fleet: Fleet) -> str:
    check_interrupt()
    return fleet.state


def _no_sink(entries: Sequence[Entry], device: Device) -> None:
    """Keep nothing: who leads the search does."""


def _open_shared(url: str) -> PatientStorage:
    """Open a storage that machines can share.

    Raises:
        UsageError: it is of one machine.
        StorageError: it cannot be opened.
    """
    storage = open_storage(url) if "://" in url and not url.startswith("sqlite") else None
    if not isinstance(storage, PatientStorage):
        raise UsageError(
            f"the storage {settings.masked(url)} is of one machine. Name the database server that "
            "the search uses: --storage postgresql://user:password@host/database"
        )
    return storage
