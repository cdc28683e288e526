"""Judge a table by problems that it was not made from."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ktune.search.result import Result, Searched
from ktune.search.winner import FINALISTS
from ktune.table import Matcher, Table
from ktune.variant import Variant


def judge(campaign: Searched, results: Sequence[Result]) -> None:
    """Time, on each problem held out, the table's pick beside the problem's own best variants.

    The table is the one that this campaign's other problems make. Fills ``pick``, ``samples``
    and ``loss`` of the results: the pick's median over the least median among the finalists,
    less 1; 0 where the pick itself is the fastest.
    """
    entries = [result.entry for result in campaign.results if result.entry is not None]
    device = campaign.target.device
    matcher = Matcher([Table.of(entries, [device])])
    for result in results:
        result.pick = matcher.match(device, result.problem, campaign.effort.batch_invariant)
    wanted = {r.problem.text: [r.pick.variant] for r in results if r.pick is not None}
    campaign.measure(wanted)
    for result in results:
        assert result.pick is not None
        best = [Variant.parse(result.problem.op, text) for text, _ in result.outcome.best()]
        contenders = dict.fromkeys([result.pick.variant, *best[:FINALISTS], result.default])
        result.samples = campaign.target.finals(result.problem, list(contenders))
        medians = {
            variant.text: statistics.median(result.samples[variant.text])
            for variant in contenders
            if result.samples.get(variant.text)
        }
        own = medians.get(result.pick.variant.text)
        if own is not None:
            result.loss = own / min(medians.values()) - 1.0
