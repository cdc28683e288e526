"""Run the search that ``ktune search`` asks for, and lose nothing on the way."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.storages import BaseStorage
from sqlalchemy.exc import SQLAlchemyError

from ktune import settings
from ktune.cli import INTERRUPTED, check_interrupt
from ktune.cli.console import note, warn
from ktune.cli.coordinate import make_coordinator
from ktune.cli.finding import Finding
from ktune.cli.options import first_line
from ktune.cli.plan import AUTO, LIVE, Part, make_parts, recording_name
from ktune.cli.progress import Tracker, make_view
from ktune.cli.request import Request
from ktune.cli.summary import print_summary
from ktune.device import CPU, Device
from ktune.errors import KtuneError, StorageError, TableError, UsageError
from ktune.portfolio.selection import fewest
from ktune.problem import Problem
from ktune.search.campaign import Campaign
from ktune.search.proof import prove
from ktune.search.result import Result, record
from ktune.search.trials.archive import family_name
from ktune.search.trials.storage import MEMORY, is_shared, open_storage, quiet_optuna
from ktune.settings import masked
from ktune.table import Entry, check_writable, read_table, update_table
from ktune.target.live import LiveTarget
from ktune.target.recording import Recording, read_recording
from ktune.target.replay import ReplayTarget
from ktune.target.target import Target
from ktune.variant import Variant

STORAGE_ERRORS = (StorageError, optuna.exceptions.StorageInternalError, SQLAlchemyError)


def run_search(request: Request) -> int:
    """Search, print the summary, and return the exit code."""
    live = not request.local and request.target in {AUTO, LIVE}  # and needs no GPU here
    recording = None if live else recording_name(request.target, request.devices)
    parts = make_parts(
        request.spaces, request.problems, recording, request.target, request.held_out
    )
    session = Session(request, parts)
    try:
        session.run()
    except KeyboardInterrupt:
        session.close()
        session.say_where()
        session.report(interrupted=True)
        return INTERRUPTED
    except KtuneError:
        if session.findings:
            session.report()
        raise
    finally:
        session.close()
    return session.report()


class Session:
    """The parts of one search, run one after the other.

    Args:
        request: what was asked.
        parts: spaces and problems, with what answers.
    """

    def __init__(self, request: Request, parts: list[Part]) -> None:
        self._request, self._parts = request, parts
        self.findings: list[Finding] = []
        self.judged: list[Finding] = []
        self._known = _earlier_recording(request, parts)
        self._live: LiveTarget | None = None
        self._failed = False
        _announce(request, parts)
        self._table = _writable_table(request.table or settings.table_path())
        self._storage_name = self._choose_storage()
        self._storage = self._open_storage()
        self._coordinator = make_coordinator(request, parts, self._storage)
        self._view = make_view(request.quiet)
        self._tracker = Tracker(self._view, sum(len(part.all_problems) for part in parts))

    def run(self) -> None:
        """Search every part, and prove what was replayed."""
        own, targets = self._parts if self._request.local else [], dict[str, Target]()
        for part in own:
            with self._target(part) as target:
                self._check_recording(target)
                self._check_limit(part, target)
                if self._request.fresh:
                    forget(self._storage, part, target)
                targets[part.space.op] = target
        if self._coordinator is not None:
            self._coordinator.open(targets)
        for part in own:
            self._search(part)
        if self._coordinator is not None and is_shared(self._storage):
            found = self._coordinator.finish(self._sink)
            self._failed |= not (found or own)
        for part in self._parts:
            if part.recording is not None and self._request.proof:
                self._prove(part)
        self._view.close()

    def close(self) -> None:
        """End the workers and the bar."""
        self._view.close()
        if self._coordinator is not None:
            self._coordinator.close()
        if self._live is not None:
            self._live.close()
            self._live = None

    def report(self, interrupted: bool = False) -> int:
        """Print the summary and return the exit code."""
        print_summary(
            self.findings,
            self.judged,
            self._table,
            masked(self._storage_name),
            interrupted,
            self._request.as_json,
        )
        self._warn_of_holes()
        bad = any(not finding.good for finding in self.findings)
        return 1 if bad or self._failed else 0

    def say_where(self) -> None:
        """Say, after an interrupt, what is safe and how to go on."""
        done, total = len(self.findings), sum(len(part.problems) for part in self._parts)
        saved = f"winners of {done} of {total} problems are in {self._table}"
        if self._table is None or not done:
            saved = f"{done} of {total} problems were finished, and no table was written"
        if self._storage_name == MEMORY:
            resume = "This search kept no trials; run the same command again to start over"
        else:
            resume = (
                f"Trials are in {masked(self._storage_name)}; run the same command again to go on"
            )
        note(f"interrupted: {saved}. {resume}.")

    def _check_recording(self, target: Target) -> None:
        """Raise UsageError unless an earlier recording is of this device and protocol."""
        known = self._known
        if known is None:
            return
        for what, has, is_now in (
            ("device", known.device.key, target.device.key),
            ("protocol", known.protocol, target.protocol),
        ):
            if has != is_now:
                raise UsageError(
                    f"{self._request.record} is of {what} {has}, and this search is of {is_now}; "
                    "name another file"
                )

    def _check_limit(self, part: Part, target: Target) -> None:
        """Raise UsageError, before anything is measured, if so few variants cannot do."""
        limit = self._request.effort.max_variants
        if limit is not None:
            legal = [part.space.variants(problem, target.device) for problem in part.problems]
            fewest([{variant.text for variant in variants} for variants in legal], limit)

    def _search(self, part: Part) -> None:
        """Search a part's problems; if the storage fails on the way, go on without it."""
        todo = part.all_problems
        apart = {problem.text for problem in part.held_out}
        while todo:
            with self._target(part) as target:
                campaign = Campaign(
                    target,
                    self._storage,
                    self._sink,
                    self._request.effort,
                    self._tracker,
                    winners=self._tuned_before(part, target),
                    held_out=apart,
                    stop=_never,
                )
                try:
                    for result in campaign.run([(part.space, problem) for problem in todo]):
                        todo.remove(result.problem)
                        self._keep(part, target, result)
                    self._record(part, target, campaign.results)
                except STORAGE_ERRORS as error:
                    self._leave_storage(error)

    def _sink(self, entries: Sequence[Entry], device: Device) -> None:
        if self._table is not None:
            update_table(self._table, entries, [device])
        if self._coordinator is not None and is_shared(self._storage):
            self._coordinator.keep(entries)

    def _tuned_before(self, part: Part, target: Target) -> list[tuple[Problem, Variant]]:
        """Return the winners that the user's table holds for other problems of the operation.

        None for a replay: a table may have been made from the recording itself.
        """
        if part.recording is not None or self._table is None or not self._table.exists():
            return []
        try:
            entries = list(read_table(self._table))
        except TableError:
            return []
        return [
            (entry.problem, entry.variant)
            for entry in entries
            if entry.device_key == target.device.key and entry.problem.op == part.space.op
        ]

    def _keep(self, part: Part, target: Target, result: Result) -> None:
        saved = self._table is not None and result.entry is not None and not result.table_error
        kept = self.judged if result.problem in part.held_out else self.findings
        kept.append(Finding(part, target, result, saved))
        if result.table_error:
            warn(f"{result.problem.text} is not saved: {result.table_error}")
        self._record(part, target, [result])

    def _record(self, part: Part, target: Target, results: Sequence[Result]) -> None:
        """Add results to the recording, if one is asked for."""
        path = self._request.record
        if path is None:
            return
        self._known = record(target, results, part.space.op, self._known)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._known.write(path)
        except (OSError, TableError) as error:
            self._failed = True
            warn(f"the recording {path} was not written: {error}")

    def _prove(self, part: Part) -> None:
        results = [finding.result for finding in self.findings if finding.part is part]
        if any(result.entry for result in results):
            with self._target(part) as target:
                proofs = prove(results, target, len(os.sched_getaffinity(0)), self._tracker)
            for finding in self.findings:
                finding.proof = proofs.get(finding.result.problem.text, finding.proof)

    @contextmanager
    def _target(self, part: Part) -> Iterator[Target]:
        """Yield what answers for a part; one live target serves all parts."""
        target: Target
        if part.recording is not None:
            target = ReplayTarget(part.recording)
        else:
            self._live = self._live or LiveTarget(self._request.devices or ("cuda:0",))
            target = self._live
        self._tracker.device = target.device
        yield target
        if part.recording is not None:
            target.close()

    def _choose_storage(self) -> str:
        """Return the storage's name: a replay keeps nothing unless told where."""
        if self._request.storage:
            return self._request.storage
        replay = all(part.recording is not None for part in self._parts)
        return MEMORY if replay and not os.environ.get(settings.STORAGE) else settings.storage_url()

    def _open_storage(self) -> BaseStorage:
        """Open the storage; if the one nobody named cannot be used, search without."""
        try:
            with quiet_optuna():
                return open_storage(self._storage_name)
        except StorageError as error:
            if self._request.storage or os.environ.get(settings.STORAGE):
                raise
            self._storage_name = MEMORY
            warn(f"{error}\nthis search goes on and keeps no trials")
            return open_storage(MEMORY)

    def _leave_storage(self, error: Exception) -> None:
        """Go on in memory, with a fresh target: the old one holds trials of the lost study."""
        if self._storage_name == MEMORY:
            raise StorageError(f"the study storage failed: {first_line(error)}") from error
        name = masked(self._storage_name)
        warn(f"the storage {name} failed: {first_line(error)}; going on without it")
        self._storage_name, self._storage = MEMORY, open_storage(MEMORY)
        if self._live is not None:
            self._live.close()
            self._live = None

    def _warn_of_holes(self) -> None:
        holes = sum(finding.unrecorded for finding in self.findings)
        if holes:
            warn(
                f"{holes} variants are not in the recording and count as failed: it was not taken "
                "exhaustively, or the search space has changed since"
            )


def _never() -> bool:
    """Never stop a campaign; raise an interrupt that was lost in a garbage collection."""
    check_interrupt()
    return False


def forget(storage: BaseStorage, part: Part, target: Target) -> None:
    """Delete the studies of a part's problems on this target, of whatever space."""
    families = {family_name(problem, target) for problem in part.all_problems}
    with quiet_optuna():
        for summary in optuna.get_all_study_summaries(storage, include_best_trial=False):
            if summary.study_name.rpartition(" | space ")[0] in families:
                optuna.delete_study(study_name=summary.study_name, storage=storage)


def _announce(request: Request, parts: list[Part]) -> None:
    """Say what measures; for a replay, whose times these are and of when."""
    for part in parts:
        count = f"{len(part.problems)} problem{'s' * (len(part.problems) != 1)}"
        if not request.local:
            note(f"{part.space.op}: {count}, measured by workers on other machines")
            continue
        if part.recording is None:
            where = "on a GPU of this machine"
            if request.devices == (CPU,):
                where = "by Triton's interpreter: the times mean nothing"
            note(f"{part.space.op}: {count}, measured {where}")
            continue
        why = "PyTorch sees no GPU here. " if request.target == AUTO else ""
        versions = ", ".join(f"{k} {v}" for k, v in sorted(part.recording.versions.items()))
        note(
            f"{why}{part.space.op}: {count}. Times are REPLAYED, not measured: recorded "
            f"on {part.recording.device.name}, {part.recording.measured} ({versions})"
        )
        if part.recording.stale:
            warn("the templates have changed since: the times are of kernels that no longer exist")
        if part.left_out:
            note(f"{part.left_out} problems of the default set are not in the recording")


def _writable_table(path: Path) -> Path | None:
    """Return the path if a table can be written there; else say that nothing will be saved."""
    try:
        check_writable(path)
    except TableError as error:
        warn(f"{error}\nresults will be printed, and NOT saved")
        return None
    return path


def _earlier_recording(request: Request, parts: list[Part]) -> Recording | None:
    """Return the recording that ``--record`` adds to, if there is one already.

    Raises:
        UsageError: it is of another operation, or several operations are searched.
    """
    path = request.record
    if path is None:
        return None
    if len(parts) != 1:
        raise UsageError(f"--record {path} takes one operation; search one at a time")
    if request.effort.level != "full":
        warn(f"--record without --effort full: {shlex.quote(str(path))} will have gaps")
    if not path.exists():
        return None
    known = read_recording(path)
    if known.op != parts[0].space.op:
        raise UsageError(f"{path} records {known.op}, not {parts[0].space.op}; name another file")
    return known
