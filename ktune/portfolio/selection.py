"""Select few variants that serve every demand: a set cover, by loss or by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ktune.errors import UsageError
from ktune.portfolio.losses import Loss


@dataclass(frozen=True, slots=True)
class Demand:
    """Problems that need one variant, and what each variant would lose on them."""

    problems: tuple[str, ...]
    options: Mapping[str, Loss]

    @property
    def least(self) -> float:
        """The least worst loss to be had: 0 for a single problem."""
        return min(worst for worst, _ in self.options.values())

    def served(self, loss: float) -> set[str]:
        """Return the variants that are good enough."""
        most = max(loss, self.least)
        return {v for v, (worst, _) in self.options.items() if worst <= most}


def greedy(demands: Sequence[Demand], loss: float) -> list[str]:
    """Return variants that serve all demands, the first ones serving the most."""
    served = [demand.served(loss) for demand in demands]
    left = set(range(len(demands)))
    selected: list[str] = []
    while left:
        gains: dict[str, list[int]] = {}
        for i in sorted(left):
            for variant in served[i]:
                gains.setdefault(variant, []).append(i)

        def rank(variant: str, gains: dict[str, list[int]] = gains) -> tuple[int, float, str]:
            given = sum(demands[i].options[variant][0] for i in gains[variant])
            return -len(gains[variant]), given, variant

        best = min(gains, key=rank)
        selected.append(best)
        left -= set(gains[best])
    for variant in selected[::-1]:
        rest = [v for v in selected if v != variant]
        if all(not options.isdisjoint(rest) for options in served):
            selected = rest
    return selected


def at_most(demands: Sequence[Demand], limit: int) -> list[str]:
    """Return at most ``limit`` variants: the least worst loss, then the least mean."""
    levels = sorted({worst for d in demands for worst, _ in d.options.values()})
    selected = greedy(demands, levels[-1])
    if len(selected) > limit:
        selected = fewest([set(demand.options) for demand in demands], limit)
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        tried = greedy(demands, levels[middle])
        if len(tried) <= limit:
            selected, high = tried, middle
        else:
            low = middle + 1
    return _improved(demands, selected, limit)


def _improved(demands: Sequence[Demand], selected: list[str], limit: int) -> list[str]:
    """Add variants, up to the limit, while one makes the total loss smaller."""

    def total(variants: list[str]) -> Loss:
        least = [min(d.options[v] for v in variants if v in d.options) for d in demands]
        return max(worst for worst, _ in least), sum(mean for _, mean in least)

    texts = sorted({v for demand in demands for v in demand.options})
    while len(selected) < limit:
        best = min(texts, key=lambda v: (total([*selected, v]), v))
        if total([*selected, best]) >= total(selected):
            break
        selected = [*selected, best]
    return selected


def fewest(options: Sequence[set[str]], limit: int) -> list[str]:
    """Return a smallest set that meets every set of options.

    Raises:
        UsageError: it has more than ``limit`` members.
    """
    found = _fewest(options)
    if len(found) > limit:
        raise UsageError(
            f"{limit} variant{'s' * (limit != 1)} cannot serve all problems: too few are legal on "
            f"several of them. The least possible is {len(found)}"
        )
    return found


def _fewest(options: Sequence[set[str]]) -> list[str]:
    """Return a smallest set that meets every set of options: exact, by deepening.

    Structures make the choice: variants that serve the same problems are one, and one that serves
    a part of another's is none, so few remain.
    """
    serves: dict[frozenset[int], str] = {}
    for variant in sorted({v for own in options for v in own}, reverse=True):
        serves[frozenset(i for i, own in enumerate(options) if variant in own)] = variant
    sets = [s for s in serves if not any(s < other for other in serves)]
    sets.sort(key=lambda s: (-len(s), serves[s]))

    def search(left: frozenset[int], depth: int) -> list[str] | None:
        if not left:
            return []
        if depth == 0 or len(left) > depth * max(len(s & left) for s in sets):
            return None
        hardest = min(left, key=lambda i: (sum(i in s for s in sets), i))
        for s in sets:
            if hardest in s and (rest := search(left - s, depth - 1)) is not None:
                return [serves[s], *rest]
        return None

    everything, depth = frozenset(range(len(options))), 1
    while (found := search(everything, depth)) is None:
        depth += 1
    return found
