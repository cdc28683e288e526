"""Samplers side by side on recordings: how good after a tenth of the space, how long until 2 %.

A regret is the best latency so far / the best recorded - 1, by first measurements. Figures are of
all problems of a recording and all seeds together: a median, a 95th percentile and a worst each.
``exam.py`` says how a search is run.

What is in-sample: the seed variants in the YAML files were chosen knowing the shipped recordings,
so figures with them say how well a search does where such knowledge exists. Figures without them
(only the default variant, and winners of problems that the same campaign has searched before) are
of the sampler by itself. The few numbers in ``transfer.Transfer`` were chosen on the shipped
recordings too; its docstring says how. Neither is a promise for another device or operation.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ktune.bench.worker import Pool, WorkerError
from ktune.bench.worker import Task as WorkerTask
from ktune.report.exam import SHARE, SLOW, Paper, Path, Setting, Sitting, desk, sit

SCHEMA = 1
KIND = "ktune-samplers"
NEAR = 0.02
"""The regret that counts as found."""
FEWER_SEEDS = {"grid": 1, "gp": 1}
"""Most seeds of a sampler: grid has no randomness, gp takes hundreds of times as long as others."""
SHARES = tuple(n / 100 for n in (*range(1, 21), *range(22, 42, 2), *range(45, 105, 5)))
SECONDS = tuple(round(0.5 * 2 ** (n / 4), 3) for n in range(41))
"""Where the curves have points: shares of the legal space, and simulated seconds."""
WORST_CASES = 5

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over problems and seeds; None where it is infinite: never reached."""

    median: float | None
    mean: float | None
    p95: float | None
    worst: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Sum up values, at least one."""
        ordered = sorted(values)
        last = ordered[-1]
        mean = statistics.fmean(ordered) if math.isfinite(last) else None
        return cls(
            _finite(quantile(ordered, 0.5)), mean, _finite(quantile(ordered, 0.95)), _finite(last)
        )

    def to_dict(self) -> dict[str, float | None]:
        """Return the figures, rounded for a file."""
        return {
            "median": rounded(self.median),
            "mean": rounded(self.mean),
            "p95": rounded(self.p95),
            "worst": rounded(self.worst),
        }


@dataclass(frozen=True, slots=True)
class ProblemScore:
    """One sampler on one problem, over seeds.

    Attributes:
        legal: size of the legal space.
        regret: after a tenth of it, or at the end of the budget.
        evaluations: until the regret is at most ``NEAR``.
        seconds: the same, simulated, from the problem's start.
        reached: share of seeds that came there.
    """

    problem: str
    legal: int
    regret: Spread
    evaluations: Spread
    seconds: Spread
    reached: float

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "problem": self.problem,
            "legal": self.legal,
            "regret": self.regret.to_dict(),
            "evaluations": self.evaluations.to_dict(),
            "seconds": self.seconds.to_dict(),
            "reached": self.reached,
        }


@dataclass(frozen=True, slots=True)
class Curve:
    """Median and 95th percentile of regret over something that is spent."""

    at: tuple[float, ...]
    median: tuple[float | None, ...]
    p95: tuple[float | None, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the points as JSON values."""
        return {
            "at": list(self.at),
            "median": [rounded(value) for value in self.median],
            "p95": [rounded(value) for value in self.p95],
        }


@dataclass(frozen=True, slots=True)
class Score:
    """One sampler in one setting, over problems and seeds.

    Attributes:
        seeds: how many.
        regret: after a tenth of each problem's legal space, or at the end of the budget.
        evaluations: until the regret is at most ``NEAR``.
        seconds: the same, simulated, from each problem's start.
        total: simulated seconds of all problems together; None where problems go on until their
            best is found, which no search would.
        problems: the same by problem.
        by_share: regret over the share of the legal space that was evaluated.
        by_seconds: regret over simulated seconds since each problem's start.
    """

    sampler: str
    setting: Setting
    seeds: int
    regret: Spread
    evaluations: Spread
    seconds: Spread
    total: float | None
    problems: tuple[ProblemScore, ...]
    by_share: Curve
    by_seconds: Curve

    @property
    def worst_cases(self) -> list[ProblemScore]:
        """The problems with the largest regrets."""

        def size(each: ProblemScore) -> float:
            return math.inf if each.regret.worst is None else each.regret.worst

        return sorted(self.problems, key=lambda each: (-size(each), each.problem))[:WORST_CASES]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "sampler": self.sampler,
            "setting": self.setting.title,
            "compilers": self.setting.compilers,
            "yaml_seeds": self.setting.seeded,
            "shuffled": self.setting.shuffled,
            "trials": self.setting.trials,
            "budget_s": _finite(self.setting.budget_s),
            "seeds": self.seeds,
            "regret": self.regret.to_dict(),
            "evaluations": self.evaluations.to_dict(),
            "seconds": self.seconds.to_dict(),
            "total_s": rounded(self.total),
            "problems": [each.to_dict() for each in self.problems],
            "by_share": self.by_share.to_dict(),
            "by_seconds": self.by_seconds.to_dict(),
        }


@dataclass(slots=True)
class Trials:
    """Samplers on one recording.

    Attributes:
        unrecorded: legal variants without a recorded outcome; they count as failures.
        stale: whether templates have changed since the recording.
        cost: milliseconds of this machine for an evaluation, by sampler: of one process, the
            search's own book-keeping included. The only figure that differs from run to run.
    """

    paper: Paper
    device: str
    measured: str
    versions: Mapping[str, str]
    unrecorded: int
    stale: bool
    scores: list[Score] = field(default_factory=list)
    cost: dict[str, float] = field(default_factory=dict)

    @property
    def settings(self) -> list[Setting]:
        """The settings, in their order."""
        return list(dict.fromkeys(score.setting for score in self.scores))

    def of(self, setting: Setting) -> list[Score]:
        """Return the samplers' scores in a setting."""
        return [score for score in self.scores if score.setting == setting]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "op": self.paper.op,
            "device": self.device,
            "measured": self.measured,
            "versions": dict(self.versions),
            "unrecorded": self.unrecorded,
            "stale": self.stale,
            "share": SHARE,
            "near": NEAR,
            "scores": [score.to_dict() for score in self.scores],
            "ms_per_evaluation": {name: float(f"{ms:.2g}") for name, ms in self.cost.items()},
        }


def try_samplers(
    papers: Sequence[Paper],
    settings: Sequence[Setting],
    samplers: Sequence[str],
    seeds: int,
    jobs: int = 1,
    say: Say = lambda text: None,
) -> list[Trials]:
    """Run every sampler on every recording in every setting.

    Args:
        papers: recordings and operations.
        settings: what is run.
        samplers: names.
        seeds: of each; fewer where ``FEWER_SEEDS`` says so.
        jobs: processes; the results do not depend on it.
        say: hears of progress.
    """
    work = [
        (paper, setting, sampler, seed)
        for paper in papers
        for setting in settings
        for sampler in samplers
        for seed in range(min(seeds, FEWER_SEEDS.get(sampler, seeds)))
    ]
    work.sort(key=lambda task: task[2] not in SLOW)  # the longest first, to end together
    found: dict[tuple[Paper, Setting, str], list[Sitting]] = {}
    sittings: dict[Task, Sitting] = {}
    for done, (task, sitting) in enumerate(_sittings(work, jobs), 1):
        sittings[task] = sitting
        say(f"{done} of {len(work)} searches")
    for task in work:
        found.setdefault(task[:3], []).append(sittings[task])
    trials = [_trials(paper) for paper in papers]
    for each in trials:
        for setting in settings:
            each.scores += [_score(name, setting, found[each.paper, setting, name])
                            for name in samplers]  # fmt: skip
        each.cost = {
            name: _cost([found[each.paper, setting, name] for setting in settings])
            for name in samplers
        }
    return trials


Task = tuple[Paper, Setting, str, int]
SIT = "ktune.report.exam:sit"
LIMIT_S = 3600.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment of a process that leaves the other cores to the others."""


def _sittings(work: Sequence[Task], jobs: int) -> Iterator[tuple[Task, Sitting]]:
    """Yield the search of each task, as they end."""
    if jobs == 1:
        for task in work:
            yield task, sit(*task)
        return
    pool = Pool(jobs, ONE_THREAD)
    try:
        for task in work:
            pool.submit(task, WorkerTask(SIT, task), LIMIT_S)
        for _ in work:
            task, sitting = pool.next()
            if isinstance(sitting, WorkerError):
                raise sitting
            yield task, sitting
    finally:
        pool.close()


def all_cores() -> int:
    """Return how many processes can run beside each other."""
    return len(os.sched_getaffinity(0))


def _trials(paper: Paper) -> Trials:
    own = desk(paper)
    recording = own.recording
    return Trials(
        paper,
        recording.device.name,
        recording.measured,
        recording.versions,
        own.unrecorded,
        recording.stale,
    )


def _cost(groups: Sequence[Sequence[Sitting]]) -> float:
    sittings = [sitting for group in groups for sitting in group]
    evaluations = sum(len(path.regrets) for sitting in sittings for path in sitting.paths)
    return 1e3 * sum(sitting.wall_s for sitting in sittings) / max(evaluations, 1)


def _score(sampler: str, setting: Setting, sittings: Sequence[Sitting]) -> Score:
    by_problem: dict[str, list[Path]] = {path.problem: [] for path in sittings[0].paths}
    if setting.shuffled:
        by_problem = {problem: by_problem[problem] for problem in sorted(by_problem)}
    for sitting in sittings:
        for path in sitting.paths:
            by_problem[path.problem].append(path)
    paths = [path for group in by_problem.values() for path in group]
    totals = [sitting.total_s for sitting in sittings]
    shares = [[path.after(math.ceil(share * path.legal)) for path in paths] for share in SHARES]
    seconds = [[path.at(moment) for path in paths] for moment in SECONDS]
    return Score(
        sampler,
        setting,
        len(sittings),
        Spread.of([_regret(path, setting) for path in paths]),
        Spread.of([_evaluations(path) for path in paths]),
        Spread.of([_seconds(path) for path in paths]),
        None if setting.open else statistics.fmean(totals),
        tuple(_problem_score(group, setting) for group in by_problem.values()),
        _curve(SHARES, shares),
        _curve(SECONDS, seconds),
    )


def _problem_score(paths: Sequence[Path], setting: Setting) -> ProblemScore:
    evaluations = [_evaluations(path) for path in paths]
    return ProblemScore(
        paths[0].problem,
        paths[0].legal,
        Spread.of([_regret(path, setting) for path in paths]),
        Spread.of(evaluations),
        Spread.of([_seconds(path) for path in paths]),
        sum(math.isfinite(count) for count in evaluations) / len(paths),
    )


def _curve(at: Sequence[float], regrets: Sequence[Sequence[float]]) -> Curve:
    ordered = [sorted(values) for values in regrets]
    median = tuple(_finite(quantile(values, 0.5)) for values in ordered)
    return Curve(tuple(at), median, tuple(_finite(quantile(values, 0.95)) for values in ordered))


def _regret(path: Path, setting: Setting) -> float:
    return path.after(path.tenth if setting.open else len(path.regrets))


def _evaluations(path: Path) -> float:
    count = path.until(NEAR)
    return math.inf if count is None else count


def _seconds(path: Path) -> float:
    count = path.until(NEAR)
    return math.inf if count is None else path.seconds[count - 1]


def document_text(operations: Sequence[Mapping[str, Any]]) -> str:
    """Return the file of ``Trials.to_dict()`` of each operation: JSON, one score a line."""
    blocks = []
    for operation in operations:
        head = {key: value for key, value in operation.items() if key != "scores"}
        scores = ",\n".join(json.dumps(each, allow_nan=False) for each in operation["scores"])
        blocks.append(f'{json.dumps(head)[:-1]}, "scores": [\n{scores}\n]}}')
    joined = ",\n".join(blocks)
    return f'{{"schema": {SCHEMA}, "kind": "{KIND}", "operations": [\n{joined}\n]}}\n'


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the least of some ordered values that at least a share of them does not exceed."""
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def rounded(value: float | None) -> float | None:
    """Return a figure as a file holds it: four digits."""
    return None if value is None else float(f"{value:.4g}")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
