"""Where switches are costly: how long the model that runs goes on, and what comes next.

Elsewhere loads hide behind the turns of other models. Where one takes as long as a good part of an
answer they do not, and an instance whose models are late would do little but load: each is next as
soon as the one before it has decoded for a moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from appliance.plugins.instance_work.outlook import ModelWork
from appliance.scheduling.policy_api import InstanceView
from appliance.vocabulary import InstanceId, ModelName

LEAST_SWITCHES, MOST_SWITCHES = 3, 20
"""While others wait a model runs for so many times what the costliest switch takes: at least, so
that loads take no more than a quarter of the time, and at most on an instance that is behind, where
they take a twentieth."""


class CostlyTurn(NamedTuple):
    """What runs next, and for how long at most."""

    work: ModelWork
    seconds: float


class CostlySwitches:
    """Knows since when each instance has run the model that it runs."""

    def __init__(self) -> None:
        self._since: dict[InstanceId, tuple[ModelName | None, float]] = {}

    def next(
        self, now: float, view: InstanceView, works: Mapping[ModelName, ModelWork], behind: bool
    ) -> CostlyTurn | None:
        """The model that runs, until it has nothing to do or its time is over. On an instance that
        is behind, then one whose weights are there, then one that can be in time, then the one
        whose prompts would be computed first. None if the other rules decide. O(models with
        work)."""
        model, since = self._since.get(view.id, (None, now))
        if model != view.current_model:
            since = now
            self._since[view.id] = view.current_model, since
        costliest = max([work.costly_seconds for work in works.values()], default=0.0)
        if not costliest:
            return None
        able = [work for work in works.values() if work.runs]
        seconds = costliest * (MOST_SWITCHES if behind else LEAST_SWITCHES)
        current = works.get(view.current_model or "")
        if current is not None and current.runs and len(able) > 1:
            if since + seconds > now:
                return CostlyTurn(current, since + seconds - now)
            able.remove(current)
        return CostlyTurn(min(able, key=_order), seconds) if behind and able else None


def _order(work: ModelWork) -> tuple[bool, bool, float, float, ModelName]:
    late, seconds = work.overdue < math.inf, work.switch_seconds + work.prompt_seconds
    return work.switch_seconds > 0, late, seconds, work.due, work.model
