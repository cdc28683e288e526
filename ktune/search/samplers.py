"""How a search chooses the next variant: Optuna's samplers, and choosers over the legal list.

A chooser picks from the legal variants that have not been measured, so it never asks twice nor
asks for what cannot be. Optuna's samplers work on the parameters; what they name is mapped to
the nearest legal variant that is new.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import optuna
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler

from ktune.bench.measurement import Measurement
from ktune.errors import UsageError
from ktune.problem import Problem
from ktune.search.effort import AUTO, SAMPLERS
from ktune.space import distance
from ktune.variant import Variant


@dataclass(frozen=True, slots=True)
class Hint:
    """What is known of a neighbouring problem."""

    problem: Problem
    measurements: Mapping[str, Measurement]


@dataclass(slots=True)
class Sight:
    """What a chooser sees of one problem's search.

    Attributes:
        problem: what is tuned.
        legal: every legal variant by text, in file order.
        seen: outcomes so far.
        pending: texts of variants being measured, here or elsewhere.
        hints: outcomes of neighbouring problems, the nearest first.
    """

    problem: Problem
    legal: Mapping[str, Variant]
    seen: dict[str, Measurement]
    pending: AbstractSet[str]
    hints: Sequence[Hint] = ()

    def is_new(self, text: str) -> bool:
        """Return whether a variant is neither measured nor being measured."""
        return text not in self.seen and text not in self.pending

    def unseen(self) -> Iterator[Variant]:
        """Yield the legal variants that are new, in file order."""
        return (variant for text, variant in self.legal.items() if self.is_new(text))


FloatArray = npt.NDArray[np.float64]

WORST = math.log(3.0)
"""The log time, over the best, that a variant three times as slow or without a time counts for."""

Chooser = Callable[[Sight], Variant | None]
"""Picks a new variant; None when there is none."""


def make_chooser(name: str, seed: int) -> Chooser | None:
    """Return the chooser of a sampler's name; None for Optuna's own samplers.

    Raises:
        UsageError: there is no such sampler.
    """
    if name not in SAMPLERS:
        raise UsageError(f"no sampler {name!r}; samplers: {', '.join(SAMPLERS)}")
    if name == "grid":
        return lambda sight: next(sight.unseen(), None)
    if name == "random":
        return Shuffled(seed)
    if name == "hillclimb":
        return HillClimb(seed)
    return Transfer(seed) if name == AUTO else None


def make_sampler(name: str, seed: int) -> BaseSampler:
    """Return the Optuna sampler of a study: TPE or GP where named, else one that is not asked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name == "tpe":
            return TPESampler(multivariate=True, group=True, constant_liar=True, seed=seed)
        if name == "gp":
            try:
                return GPSampler(seed=seed)
            except ImportError as error:
                raise UsageError("--sampler gp needs SciPy: pip install scipy") from error
        return RandomSampler(seed=seed)


class Shuffled:
    """Uniform over the legal list, without repeats."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, sight: Sight) -> Variant | None:
        """Pick any new variant."""
        unseen = list(sight.unseen())
        return self._random.choice(unseen) if unseen else None


class HillClimb:
    """The nearest new neighbour of the best variant so far; sometimes anything.

    Where the neighbourhood of the best is exhausted, the next best one is the centre.

    Args:
        seed: of ties and leaps.
        reach: how far a neighbour may be (``space.distance``): 2 is a size four times as large,
            or two sizes twice as large; 4 a changed word.
        leap: share of picks that are random.
    """

    def __init__(self, seed: int, reach: float = 4.0, leap: float = 0.05) -> None:
        self._random, self._reach, self._leap = random.Random(seed), reach, leap
        self._map: Map | None = None

    def __call__(self, sight: Sight) -> Variant | None:
        """Pick the nearest new neighbour of a good variant."""
        unseen = [i for i, text in enumerate(sight.legal) if sight.is_new(text)]
        if not unseen:
            return None
        self._map = self._map or Map(list(sight.legal.values()))
        variants = self._map.variants
        if self._random.random() < self._leap:
            return variants[self._random.choice(unseen)]
        for centre in self._centres(sight):
            apart = self._map.row(self._map.places[centre])[unseen]
            if apart.min() <= self._reach:
                nearest: list[int] = np.flatnonzero(apart == apart.min()).tolist()
                return variants[unseen[self._random.choice(nearest)]]
        return variants[self._random.choice(unseen)]

    def _centres(self, sight: Sight) -> list[str]:
        """Return the right variants, fastest first."""
        right = [(_log_time(m), text) for text, m in sight.seen.items() if m.ok]
        return [text for _, text in sorted(right) if text in sight.legal]


class Transfer:
    """What neighbouring problems liked, corrected by what this one says.

    Each new variant's log time is predicted: first from the neighbours, whose own best is taken
    as the unit; then the differences between this problem's outcomes and that prediction are
    spread to similar variants, weighted by a Laplace kernel of ``space.distance``
    (Nadaraya-Watson with a prior). The pick is the lowest prediction less a bonus for being far
    from all that was measured.

    Args:
        seed: of ties.
        width: distance over which two variants resemble each other.
        curiosity: the bonus, in units of log time, of a variant that resembles nothing measured.
    """

    def __init__(self, seed: int, width: float = 2.0, curiosity: float = 0.1) -> None:
        self._random, self._width, self._curiosity = random.Random(seed), width, curiosity
        self._map: Map | None = None
        self._prior: FloatArray | None = None

    def __call__(self, sight: Sight) -> Variant | None:
        """Pick the variant whose predicted time, less the bonus, is least."""
        if self._map is None:
            self._map = Map(list(sight.legal.values()))
            self._prior = self._from(sight.hints)
        assert self._prior is not None
        texts = list(sight.legal)
        new = np.fromiter((sight.is_new(text) for text in texts), bool, len(texts))
        if not new.any():
            return None
        guess, trust = self._correct(self._prior, sight.seen, sight.pending)
        score = guess - self._curiosity / np.sqrt(1.0 + trust)
        score += 1e-9 * np.array([self._random.random() for _ in texts])
        return self._map.variants[int(np.argmin(np.where(new, score, np.inf)))]

    def _from(self, hints: Sequence[Hint]) -> FloatArray:
        """Return the log times that the neighbours predict, nearer ones counting more."""
        assert self._map is not None
        flat = np.zeros(len(self._map.variants))
        total, weights = flat.copy(), np.full_like(flat, 1e-9)
        for rank, hint in enumerate(hints):
            guess, trust = self._correct(flat, hint.measurements, ())
            weight = np.minimum(trust, 1.0) / (1.0 + rank)
            total, weights = total + weight * guess, weights + weight
        return total / weights

    def _correct(
        self,
        prior: FloatArray,
        outcomes: Mapping[str, Measurement],
        pending: AbstractSet[str] | tuple[()],
    ) -> tuple[FloatArray, FloatArray]:
        """Return predicted log times, and how much was measured near each variant."""
        assert self._map is not None
        places = self._map.places
        known = [(places[t], _log_time(m)) for t, m in outcomes.items() if t in places]
        best = min((value for _, value in known), default=0.0)
        error = np.zeros(len(prior))
        trust = np.zeros(len(prior))
        for place, value in known:
            near = np.exp(-self._map.row(place) / self._width)
            error += near * (min(value - best, WORST) - prior[place])
            trust += near
        for text in pending:
            if text in places:
                trust += np.exp(-self._map.row(places[text]) / self._width)
        return prior + error / (0.1 + trust), trust


class Map:
    """Distances between the variants of a list, computed by row and kept."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        self.variants = list(variants)
        self.places = {variant.text: i for i, variant in enumerate(self.variants)}
        self._rows: dict[int, FloatArray] = {}

    def row(self, place: int) -> FloatArray:
        """Return the distances of one variant to all."""
        if place not in self._rows:
            values = self.variants[place].values
            apart = [distance(values, other.values) for other in self.variants]
            self._rows[place] = np.array(apart)
        return self._rows[place]


def _log_time(measurement: Measurement) -> float:
    """Return the logarithm of a time; infinite for a variant that has none."""
    return math.log(measurement.latency_ms) if measurement.latency_ms else math.inf
