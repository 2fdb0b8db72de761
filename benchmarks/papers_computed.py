"""Figures of the papers that are no runs of policies: formulas, and what is simulated beside them.

A function gets the row of its table, the point on the x axis and the seed, and gives the metrics.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from appliance.lab.calibration.least_squares import r_squared
from appliance.lab.workload import Lengths, drawn
from appliance.plugins.chiron_formulas import waiting_seconds

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


SLOTS = 256
"""Requests that decode at once (vLLM's default)."""
LENGTHS = Path(__file__).parent / "scenarios/lengths/sharegpt.csv"


def waiting_estimate(row: str, queued: float, seed: int) -> Mapping[str, float]:
    """How well Chiron's estimator (§5.3, `appliance.plugins.chiron`) foretells how long each of so
    many requests waits (Fig. 14): R², and the mean of estimate over truth. Time is counted in
    steps. In truth a request begins when one of the `SLOTS` that decode is done; outputs are drawn
    from ShareGPT, and who decodes at first is somewhere in the middle. The row names the
    quantile.
    """
    outputs = Lengths.read(LENGTHS).outputs
    draw = np.random.Generator(np.random.PCG64([seed, round(queued)]))
    count, quantile = round(queued), float(row.removeprefix("quantile "))
    # Who decodes now is a long one rather than a short one, at any place of it.
    likely = outputs / outputs.sum()
    running = draw.choice(outputs, SLOTS, p=likely) * draw.random(SLOTS)
    ends = [float(end) for end in running]
    heapq.heapify(ends)
    waits = np.empty(count)
    for place, tokens in enumerate(draw.choice(outputs, count)):
        waits[place] = ends[0]
        heapq.heapreplace(ends, ends[0] + float(tokens))
    mean, variance = float(outputs.mean()), float(outputs.var())
    estimates = np.array(
        [waiting_seconds(n * mean, n * variance, SLOTS, quantile) for n in range(count)]
    )
    ratio = float(estimates.sum() / waits.sum())
    return {"r2": round(r_squared(waits, estimates), 6), "estimate_over_truth": round(ratio, 6)}


FUNCTIONS: Mapping[str, Callable[[str, float, int], Mapping[str, float]]] = {
    "active_models": active_models,
    "waiting_estimate": waiting_estimate,
}
"""By the name that a table gives as ``computed``."""
