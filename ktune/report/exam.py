"""Run a sampler on a recording, and keep how its best time fell: what ``ktune replay`` repeats.

The search is the real one (``Campaign``, ``ProblemSearch``, Optuna's storage in memory); only the
times are recorded and the clock is simulated. All problems are one campaign, in the space's file
order, so that later ones profit from earlier ones as in ``ktune search``.

An exam without a budget asks two things at once: how good is the best after a tenth of the legal
space, and how long until it is within 2 % of the best recorded. For the second, each problem goes
on until its recorded best is found. So that this tells its neighbours nothing that a search of a
tenth would not know, they see the outcomes, winners and compiled kernels of its first tenth only.
With one compile worker the first tenth of each problem is then, bit for bit, what a search of a
tenth does. With several, the next problem starts while a few variants of the last are on their
way, as it would in a search.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from ktune.bench.measurement import Measurement
from ktune.errors import RecordingError
from ktune.problem import Problem
from ktune.search.campaign import Campaign
from ktune.search.effort import Effort
from ktune.search.ground import Ground, Outcome
from ktune.search.result import Result
from ktune.search.trials.storage import MEMORY, open_storage
from ktune.space import Space, load_space
from ktune.target.recording import Recording, find_recording
from ktune.target.replay import ReplayTarget, kernel_of
from ktune.variant import Variant

SHARE = 0.10
"""Of a problem's legal space, after which regret is reported: what ``--effort quick`` measures."""
SLOW = frozenset({"gp"})
"""Samplers that think for most of a second; an open exam ends at ``MOST`` of the legal space."""
MOST = 0.25


@dataclass(frozen=True, slots=True)
class Setting:
    """Under what conditions samplers are compared.

    Attributes:
        compilers: compile workers to simulate; 1 means that every outcome is seen before the
            next choice.
        seeded: whether the YAML's seed variants are tried first; the default variant and the
            winners of neighbours are in any case.
        shuffled: whether each run takes the problems in an order of its own.
        trials: evaluations of each problem; None: until its recorded best is found.
        budget_s: simulated seconds for all problems.
    """

    compilers: int = 1
    seeded: bool = True
    shuffled: bool = False
    trials: int | None = None
    budget_s: float = math.inf

    @property
    def open(self) -> bool:
        """Whether there is no budget: each problem goes on until its best is found."""
        return self.trials is None and math.isinf(self.budget_s)

    @property
    def title(self) -> str:
        """The setting in words."""
        count = self.compilers
        workers = "one compile worker" if count == 1 else f"{count} compile workers"
        words = [workers, "with the YAML's seeds" if self.seeded else "without the YAML's seeds"]
        words += ["problems shuffled"] if self.shuffled else []
        words += [f"{self.trials} trials"] if self.trials is not None else []
        words += [f"{self.budget_s:g} s"] if math.isfinite(self.budget_s) else []
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Paper:
    """Whose answers are asked for: a recording and the space that is searched.

    Attributes:
        target: a shipped recording's name, or a file.
        op: the operation.
    """

    target: str
    op: str


@dataclass(slots=True)
class Path:
    """How the best time of one problem fell in one search.

    Attributes:
        legal: size of the legal space.
        regrets: after each evaluation: best latency so far / best recorded - 1, by first
            measurements; infinite until one is right.
        seconds: simulated, from the problem's start to the end of each evaluation.
        variants: texts of what was measured, in order.
    """

    problem: str
    legal: int
    regrets: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    variants: list[str] = field(default_factory=list)

    @property
    def tenth(self) -> int:
        """Evaluations that are ``SHARE`` of the legal space."""
        return math.ceil(SHARE * self.legal)

    def after(self, evaluations: int) -> float:
        """Return the regret after some evaluations, or after the last."""
        return self.regrets[min(evaluations, len(self.regrets)) - 1] if self.regrets else math.inf

    def at(self, seconds: float) -> float:
        """Return the regret after some simulated seconds."""
        return self.after(n) if (n := sum(s <= seconds for s in self.seconds)) else math.inf

    def until(self, regret: float) -> int | None:
        """Return the evaluations until the regret is at most this; None if it never was."""
        return next((n for n, r in enumerate(self.regrets, 1) if r <= regret), None)


@dataclass(slots=True)
class Sitting:
    """One search of all problems.

    Attributes:
        paths: of each problem, in the order of their start.
        total_s: simulated seconds for all; finals, which are alike for all samplers, aside.
        wall_s: seconds that it took here.
    """

    paths: list[Path]
    total_s: float = 0.0
    wall_s: float = 0.0


class _Exam(Campaign):
    """A campaign that keeps each problem's path, as its own listener."""

    def __init__(self, target: _Target, effort: Effort, desk: Desk, setting: Setting) -> None:
        storage = open_storage(MEMORY)
        super().__init__(target, storage, lambda *_: None, effort, self, finals=False)
        self._desk, self._open, self._clock = desk, setting.open, target
        self._most = MOST if effort.sampler in SLOW else 1.0
        self._started: dict[str, float] = {}
        self.grounds = desk.grounds
        self.paths: dict[str, Path] = {}

    def problem_started(self, problem: Problem) -> None:
        """Start the problem's path."""
        self.paths[problem.text] = Path(problem.text, len(self._desk.grounds[problem.text].legal))
        self._started[problem.text] = self._clock.now()

    def trial_done(
        self, problem: Problem, variant: Variant, measurement: Measurement, done: int, goal: int
    ) -> None:
        """Add a step to the problem's path."""
        path, best = self.paths[problem.text], self._desk.best[problem.text]
        regret = (measurement.latency_ms or math.inf) / best - 1 if measurement.ok else math.inf
        path.regrets.append(min(regret, path.after(done)))
        path.seconds.append(self._clock.now() - self._started[problem.text])
        path.variants.append(variant.text)

    def problem_done(self, result: Result) -> None:
        """Nothing is left to do."""

    def settled(self, op: str, results: Sequence[Result]) -> None:
        """Nothing is settled: there are no finals."""

    def enough(self, result: Result) -> bool:
        """Return whether the path cannot change any more, and what is asked is known."""
        path = self.paths[result.problem.text]
        if not self._open or len(path.regrets) < path.tenth:
            return False
        return path.regrets[-1] <= 0 or len(path.regrets) >= self._most * path.legal

    def recall(self, result: Result) -> Outcome:
        """Return what was known of a problem after a tenth."""
        if not self._open:
            return result.outcome
        known = list(result.outcome.measurements.items())
        return Outcome(dict(known[: self.paths[result.problem.text].tenth]))


class _Target(ReplayTarget):
    """A replay whose compile cache forgets what an open exam compiles beyond a tenth."""

    def __init__(self, recording: Recording, compilers: int, tenths: dict[str, int] | None) -> None:
        super().__init__(recording, compilers)
        self._tenths = tenths
        self._submitted: dict[str, int] = {}

    def submit(self, problem: Problem, variant: Variant) -> None:
        """Take a variant for evaluation."""
        kernel = kernel_of(problem, variant)
        cached = kernel in self._compiled
        super().submit(problem, variant)
        count = self._submitted[problem.text] = self._submitted.get(problem.text, 0) + 1
        if self._tenths is not None and not cached and count > self._tenths[problem.text]:
            self._compiled.discard(kernel)


@dataclass(slots=True)
class Desk:
    """What searches of one recording share: spaces are walked and kernels rendered once.

    Attributes:
        problems: in the space's file order, then those that only the recording names.
        best: the least recorded time of a legal variant, in ms, by problem.
        unrecorded: legal variants without a recorded outcome.
    """

    recording: Recording
    space: Space
    problems: list[Problem]
    grounds: dict[str, Ground]
    best: dict[str, float]
    unrecorded: int

    @classmethod
    def of(cls, recording: Recording, space: Space, problems: Sequence[Problem]) -> Desk:
        """Walk the space of each problem; those of which no legal variant is right are left out."""
        grounds, best, missing = {}, {}, 0
        for problem in problems:
            seen = recording.problem(problem).outcomes
            ground = Ground.of(space, problem, recording.device)
            times = [seen[t].latency_ms for t in ground.legal if t in seen and seen[t].ok]
            missing += sum(text not in seen for text in ground.legal)
            if right := [ms for ms in times if ms]:
                grounds[problem.text], best[problem.text] = ground, min(right)
        kept = [problem for problem in problems if problem.text in best]
        return cls(recording, space, kept, grounds, best, missing)

    def sit(self, setting: Setting, sampler: str, seed: int) -> Sitting:
        """Search all problems once."""
        started = time.perf_counter()
        space = self.space if setting.seeded else replace(self.space, seeds=())
        tenths = {text: math.ceil(SHARE * len(g.legal)) for text, g in self.grounds.items()}
        target = _Target(self.recording, setting.compilers, tenths if setting.open else None)
        effort = Effort("full", setting.trials, setting.budget_s, sampler, seed)
        problems = list(self.problems)
        if setting.shuffled:
            random.Random(seed).shuffle(problems)
        exam = _Exam(target, effort, self, setting)
        for _ in exam.run([(space, problem) for problem in problems]):
            pass
        wall_s = time.perf_counter() - started
        return Sitting(list(exam.paths.values()), target.now(), wall_s)


@cache
def desk(paper: Paper) -> Desk:
    """Return the desk of a recording; read once by each process."""
    from ktune.operations import parse_problem

    recording, space = find_recording(paper.target, paper.op), load_space(paper.op)
    listed = {p.text: p for problems in space.problems.values() for p in problems}
    ordered = [p for text, p in listed.items() if text in recording.problems]
    ordered += [parse_problem(text) for text in recording.problems if text not in listed]
    if not ordered:
        raise RecordingError(f"the recording of {recording.title} holds no problems")
    return Desk.of(recording, space, ordered)


def sit(paper: Paper, setting: Setting, sampler: str, seed: int) -> Sitting:
    """Search all problems of a recording once."""
    return desk(paper).sit(setting, sampler, seed)
