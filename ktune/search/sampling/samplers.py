"""How a search chooses the next variant: Optuna's samplers, and choosers over the legal list.

A chooser picks from the legal variants that have not been measured, so it never asks twice nor
asks for what cannot be. Optuna's samplers work on the parameters; what they name is mapped to
the nearest legal variant that is new.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import optuna
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler

from ktune.errors import UsageError
from ktune.search.effort import AUTO, SAMPLERS
from ktune.search.sampling.sight import Sight, log_time
from ktune.search.sampling.transfer import Transfer
from ktune.space import distance
from ktune.variant import Variant

FloatArray = npt.NDArray[np.float64]

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
                raise UsageError(
                    "--sampler gp needs SciPy: pip install 'ktune-kernels[gp]'"
                ) from error
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
        right = [(log_time(m), text) for text, m in sight.seen.items() if m.ok]
        return [text for _, text in sorted(right) if text in sight.legal]


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
