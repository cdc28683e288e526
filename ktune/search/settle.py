"""Settle on few variants for many problems, and on the sizes that each stands for.

After the searches of a campaign: the best few variants of every problem are measured on the other
problems too, a small cover is chosen (``portfolio/cover.py``), regions of sizes are drawn
(``portfolio/regions.py``), and where a region's variant is not the problem's own winner, the two
meet the default in one more final. A variant that loses more there than the cover may give away,
or that is wrong on the problem, or that the default beats beyond the noise, does not get it. (With
``--max-variants`` or ``--batch-invariant`` only a wrong one does not.)
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from ktune.bench.measurement import Measurement
from ktune.portfolio.cover import LOSS, cover, shortlist
from ktune.portfolio.regions import Region, by_problem, regions
from ktune.problem import Problem
from ktune.search.result import Result, Searched
from ktune.search.winner import LEAST_MARGIN, as_winner, beats
from ktune.variant import Variant


def settle(campaign: Searched, results: Sequence[Result]) -> list[Result]:
    """Choose the variants that stand for one operation's problems; change results and entries.

    Args:
        campaign: measures, and holds finals.
        results: of one operation.

    Returns:
        The results whose entry is to be written anew.
    """
    won = [result for result in results if result.entry is not None]
    if not won:
        return []
    effort = campaign.effort
    known = {result.problem.text: result.outcome.measurements for result in won}

    def legal(problem: Problem) -> set[str]:
        return set(campaign.grounds[problem.text].legal)

    missing = shortlist(known, legal, everywhere=True)
    campaign.measure({problem.text: variants for problem, variants in missing.items()})
    chosen = cover(known, LOSS, effort.max_variants, effort.batch_invariant)
    homes = by_problem(regions(known, chosen))
    uses = Counter(home.variant for home in homes.values())
    for result in won:
        home = homes.get(result.problem.text)
        if home is not None:
            _give(campaign, result, home, alone=uses[home.variant] == 1)
    return won


def _give(campaign: Searched, result: Result, home: Region, alone: bool) -> None:
    """Let the region's variant have the problem, if it holds in finals of its own.

    One that would stand for this problem alone saves nothing: then the winner of the finals stays.
    """
    assert result.entry is not None and result.winner is not None
    own, picked = result.entry.variant, Variant.parse(result.problem.op, home.variant)
    if alone:
        picked = own
    if picked != own and not _replace(campaign, result, own, picked):
        return
    result.covers = dict(home.covers)
    assert result.winner is not None
    result.entry = campaign.entry(result, picked, result.winner)


def _replace(campaign: Searched, result: Result, own: Variant, picked: Variant) -> bool:
    """Time the region's variant against the own winner and the default; return whether it won."""
    problem, target = result.problem, campaign.target
    contenders = list(dict.fromkeys([picked, own, result.default]))
    samples = target.finals(problem, contenders)
    if not samples.get(picked.text) or not samples.get(own.text):
        return False
    loss = statistics.median(samples[picked.text]) / statistics.median(samples[own.text]) - 1.0
    measured, default = result.outcome.measurements, result.default.text
    free = campaign.effort.max_variants is None and not campaign.effort.batch_invariant
    if free and loss > LOSS:
        return False
    if free and samples.get(default):
        lost = statistics.median(samples[picked.text]) / statistics.median(samples[default]) - 1.0
        if lost > LEAST_MARGIN or beats(default, picked.text, samples, measured):
            return False
    if wrong := target.verify(problem, picked):
        measured[picked.text] = Measurement("wrong", detail=wrong)
        return False
    winner = as_winner(picked.text, default, samples, measured)
    result.samples = result.samples | samples
    result.winner, result.loss = winner, loss
    return True
