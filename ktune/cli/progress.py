"""Show a campaign's progress: a bar on a terminal, else plain lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from ktune.cli.console import note, progress_console
from ktune.operations import operation

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ktune.bench.measurement import Measurement
    from ktune.device import Device
    from ktune.problem import Problem
    from ktune.search.proof import Proof
    from ktune.search.result import Result
    from ktune.variant import Variant

EVERY_S = 30.0
"""Seconds after which a plain line is due even without an improvement."""


class View(Protocol):
    """Shows progress in one way."""

    def begin(self, what: str, goal: int) -> None:
        """A new task begins."""

    def step(self, done: int, goal: int, text: str, important: bool) -> None:
        """The task has come this far."""

    def line(self, text: str) -> None:
        """Something that stays on the screen."""

    def close(self) -> None:
        """Nothing more will come."""


class Lines:
    """Plain lines on standard error: what is important, and one every 30 seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._began = self._last = clock()

    def begin(self, what: str, goal: int) -> None:
        """Say nothing; the first step will."""

    def step(self, done: int, goal: int, text: str, important: bool) -> None:
        """Write a line if there is reason to."""
        if important or self._clock() - self._last >= EVERY_S:
            self.line(text)

    def line(self, text: str) -> None:
        """Write a line with the time since the start."""
        self._last = self._clock()
        note(f"[{self._last - self._began:3.0f}s] {text}")

    def close(self) -> None:
        """Nothing is held."""


class Bar:
    """A bar with the best variant so far beside it."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress: Progress = Progress(
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=progress_console(),
            transient=True,
        )
        self._task: TaskID | None = None
        self._progress.start()

    def begin(self, what: str, goal: int) -> None:
        """Start the bar anew."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=goal or None)

    def step(self, done: int, goal: int, text: str, important: bool) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=goal, description=text)

    def line(self, text: str) -> None:
        """Write a line above the bar."""
        self._progress.console.print(text, markup=False)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()


class Silence:
    """Shows nothing."""

    def begin(self, what: str, goal: int) -> None:
        """Show nothing."""

    def step(self, done: int, goal: int, text: str, important: bool) -> None:
        """Show nothing."""

    def line(self, text: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing is held."""


def make_view(quiet: bool = False) -> View:
    """Return a bar if standard error is a terminal, else plain lines; nothing if quiet."""
    if quiet:
        return Silence()
    return Bar() if progress_console().is_terminal else Lines()


@dataclass(slots=True)
class State:
    """What is known of the problem that is being searched."""

    problem: str
    default: str
    done: int = 0
    goal: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    best_ms: float | None = None
    best: str = ""
    default_ms: float | None = None

    def take(self, variant: str, measurement: Measurement) -> bool:
        """Count a measurement; return whether it is the best so far."""
        latency = measurement.latency_ms
        if not measurement.ok or latency is None:
            self.bad[measurement.status] += 1
            return False
        if variant == self.default:
            self.default_ms = latency
        if self.best_ms is not None and latency >= self.best_ms:
            return False
        self.best_ms, self.best = latency, variant
        return True

    @property
    def text(self) -> str:
        """One line: trials, invalid ones, the best time and variant."""
        parts = [f"{self.problem} {self.done}/{self.goal} trials"]
        parts += [f"{count} {status.replace('_', ' ')}" for status, count in self.bad.items()]
        if self.best_ms is not None:
            gain = f" ({self.default_ms / self.best_ms:.2f}x default)" if self.default_ms else ""
            parts += [f"best {self.best_ms:.4g} ms{gain}", self.best]
        return "  ".join(parts)


class Tracker:
    """Hears of a campaign's progress (a ``Listener``) and shows it.

    Args:
        view: how.
        problems: how many will be searched, in all.
    """

    def __init__(self, view: View, problems: int) -> None:
        self._view, self._problems = view, problems
        self._states: dict[str, State] = {}
        self._shown = ""
        self._proofs = self._proof_goal = 0
        self.device: Device | None = None

    def problem_started(self, problem: Problem) -> None:
        """Begin a problem; others may still be under way."""
        default = ""
        if self.device is not None:
            default = operation(problem.op).default_variant(problem, self.device).text
        number = len(self._states) + 1
        count = f"{number}/{self._problems}"
        self._states[problem.text] = State(f"{count} {problem.text}", default)
        self._show(problem)

    def trial_done(
        self, problem: Problem, variant: Variant, measurement: Measurement, done: int, goal: int
    ) -> None:
        """Count a trial."""
        self._show(problem)
        state = self._states[problem.text]
        state.done, state.goal = done, goal
        improved = state.take(variant.text, measurement)
        self._view.step(done, goal, state.text, improved)

    def problem_done(self, result: Result) -> None:
        """Say how it ended."""
        winner, name = result.winner, self._states[result.problem.text].problem
        if result.held_out:
            self._view.line(f"{name}: searched, to judge the table by")
            return
        if winner is None:
            self._view.line(f"{name}: no variant passed")
            return
        gain = winner.default_latency_ms
        ratio = f" ({gain / winner.latency_ms:.2f}x default)" if gain else ""
        self._view.line(f"{name}: {winner.latency_ms:.4g} ms{ratio}  {winner.text}")

    def settled(self, op: str, results: Sequence[Result]) -> None:
        """Say how few variants stand for how many problems."""
        variants = {result.winner.text for result in results if result.winner}
        worst = max(result.loss for result in results)
        self._view.line(
            f"{op}: {_count(len(variants), 'variant stands', 'variants stand')} for "
            f"{_count(len(results), 'problem', 'problems')}, "
            f"at most {max(worst, 0.0):.1%} slower than each problem's own best"
        )

    def _show(self, problem: Problem) -> None:
        """Let the bar be that of the problem that moves."""
        if self._shown != problem.text:
            self._shown = problem.text
            state = self._states[problem.text]
            self._view.begin(state.problem, state.goal)

    def proof_started(self, count: int) -> None:
        """Say what is about to take a while."""
        self._proofs, self._proof_goal = 0, count
        self._view.line(f"proving {count} winners here: compiling, then Triton's interpreter")
        self._view.begin(f"proof 0/{count}", count)

    def proof_done(self, proof: Proof) -> None:
        """Say whether a winner held."""
        self._proofs += 1
        text = f"proof {self._proofs}/{self._proof_goal}"
        self._view.step(self._proofs, self._proof_goal, text, False)
        verdict = f"FAILED: {proof.detail}" if proof.detail else "ok"
        self._view.line(f"{text} {proof.problem.text}  {proof.variant.text}  {verdict}")


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
