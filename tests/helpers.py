"""What several test files share."""

from __future__ import annotations

from ktune.search.campaign import Campaign
from ktune.search.effort import Effort


class Silent:
    """A listener that does nothing."""

    def __getattr__(self, name):
        return lambda *arguments: None


def one_search(space, problem, target, storage, trials, **effort):
    """Search one problem without finals; return its outcome."""
    plan = Effort(trials=trials, **effort)
    campaign = Campaign(target, storage, lambda *_: None, plan, Silent(), finals=False)
    (result,) = campaign.run([(space, problem)])
    return result.outcome
