"""Figures of the papers that are no runs of policies: formulas, and what is simulated beside them.

A function gets the row of its table, the point on the x axis and the seed, and gives the metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from appliance.lab.workload import Lengths, drawn

SERVICE_SECONDS = 16.79
"""What a request takes on average (Aegaeon §3.1)."""
RATE = 0.037
"""Requests a second of each model (Aegaeon §3.1)."""


def active_models(row: str, models: float, seed: int) -> Mapping[str, float]:
    """How many of so many models have a request at a time (Aegaeon Theorem 3.1, Fig. 4): by the
    theorem ``M (1 - exp(-rate T))``, and as the mean over an hour of the lab's own Poisson
    arrivals, every request served for T seconds."""
    if row == "the theorem":
        return _active(models, models * -math.expm1(-RATE * SERVICE_SECONDS))
    names = [f"m{index:03}" for index in range(round(models))]
    until = 3600.0
    active = 0.0
    ends = dict.fromkeys(names, 0.0)
    for arrival in drawn(dict.fromkeys(names, RATE), Lengths([(1, 1)]), until, seed):
        end = min(arrival.seconds + SERVICE_SECONDS, until)
        active += max(0.0, end - max(ends[arrival.model], arrival.seconds))
        ends[arrival.model] = max(ends[arrival.model], end)
    return _active(models, active / until)


def _active(models: float, active: float) -> Mapping[str, float]:
    return {"active_models": round(active, 6), "models_per_gpu": round(models / active, 6)}


FUNCTIONS: Mapping[str, Callable[[str, float, int], Mapping[str, float]]] = {
    "active_models": active_models,
}
"""By the name that a table gives as ``computed``."""
