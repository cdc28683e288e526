"""How much a search may spend, and how it chooses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ktune.errors import UsageError

if TYPE_CHECKING:
    from ktune.space import Space

AUTO = "auto"
SAMPLERS = (AUTO, "tpe", "gp", "random", "grid", "hillclimb")
"""Names for ``--sampler``."""

Level = Literal["quick", "standard", "full"]
LEVELS: tuple[str, ...] = get_args(Level)

_SHARES = {"quick": (0.10, 8), "standard": (0.25, 24)}
"""Share of the legal space to measure, and the least number of variants."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Effort:
    """The budget of a search and its sampler.

    Attributes:
        level: ``quick`` measures a tenth of a problem's legal space, ``standard`` a quarter (as
            far as the space's own budget of trials), ``full`` all of it.
        trials: measurements for each problem, in place of the level's.
        budget_s: seconds for all problems together.
        sampler: one of ``samplers.SAMPLERS``.
        seed: of the sampler.
        max_variants: most variants that the winners of an operation may use; None: as few as
            keep every problem within the loss.
        batch_invariant: one variant for all batch sizes.
    """

    level: Level = "standard"
    trials: int | None = None
    budget_s: float = math.inf
    sampler: str = AUTO
    seed: int = 0
    max_variants: int | None = None
    batch_invariant: bool = False

    def trials_for(self, space: Space, legal: int) -> int:
        """Return how many variants of a problem to measure."""
        if self.trials is not None:
            return min(self.trials, legal)
        if self.level == "full":
            return legal
        share, least = _SHARES[self.level]
        wanted = max(math.ceil(share * legal), least)
        return min(wanted, space.budget.trials, legal)


def parse_seconds(text: str) -> float:
    """Return the seconds in ``90``, ``90s``, ``10m`` or ``1.5h``.

    Raises:
        UsageError: the text is no length of time.
    """
    number, unit = (text[:-1], text[-1]) if text and text[-1] in _UNITS else (text, "s")
    try:
        seconds = float(number) * _UNITS[unit]
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"{text!r} is not a length of time; write 90s, 10m or 1.5h")
    return seconds
