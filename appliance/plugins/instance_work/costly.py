"""Where switches are costly: how long the model that runs goes on, and what comes next.

Elsewhere loads hide behind the turns of other models. Where one takes as long as a good part of an
answer they do not, and an instance whose models are late would do little but load: each is next as
soon as the one before it has decoded for a moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from appliance.plugins.instance_work.outlook import Condition, ModelWork
from appliance.scheduling.policy_api import InstanceView
from appliance.vocabulary import InstanceId, ModelName

LEAST_SWITCHES, MOST_SWITCHES = 3, 20
"""While others wait, a model runs for so many times what the costliest switch takes: at least, so
that loads take no more than a quarter of the time, and at most on an instance that is behind, where
they take a twentieth."""
LEAST_SHARE = 0.5
"""The least time is at most this share of the strictest TTFT target there."""


class CostlyTurn(NamedTuple):
    """What runs next, and for how long at most."""

    work: ModelWork
    seconds: float


class CostlySwitches:
    """Knows since when each instance has had the model that it runs."""

    def __init__(self, longest_seconds: float) -> None:
        """No model runs for longer than that while others wait."""
        self._longest_seconds = longest_seconds
        self._since: dict[InstanceId, tuple[ModelName | None, float]] = {}

    def next(
        self,
        now: float,
        view: InstanceView,
        works: Mapping[ModelName, ModelWork],
        condition: Condition,
    ) -> CostlyTurn | None:
        """The model that runs, until it has nothing to do or its time is over. On an instance that
        is behind, then one whose weights are there, then one that can be in time, then the one
        whose prompts would be computed first. None if the other rules decide: also where a longest
        gap is to be kept. O(models with work)."""
        model, since = self._since.get(view.id, (None, now))
        if model != view.current_model:
            since = now
            self._since[view.id] = view.current_model, since
        costliest = max([work.costly_seconds for work in works.values()], default=0.0)
        able = [work for work in works.values() if work.runs] if costliest else []
        if len(able) < 2 or condition.gap_seconds < math.inf:
            return None
        if not any([work.switch_seconds for work in able]):
            return None  # they are all there
        behind = condition.behind
        if behind:
            seconds = min(MOST_SWITCHES * costliest, self._longest_seconds)
        else:
            strictest = min([work.ttft_seconds for work in able])
            seconds = min(LEAST_SWITCHES * costliest, LEAST_SHARE * strictest)
        current = works.get(view.current_model or "")
        if current is not None and current.runs:
            if since + seconds > now:
                return CostlyTurn(current, since + seconds - now)
            able.remove(current)
        return CostlyTurn(min(able, key=soonest), seconds) if behind else None


def soonest(work: ModelWork) -> tuple[bool, bool, float, float, ModelName]:
    """Orders what comes next on an instance that is behind."""
    late, seconds = work.overdue < math.inf, work.switch_seconds + work.prompt_seconds
    return work.switch_seconds > 0, late, seconds, work.due, work.model
