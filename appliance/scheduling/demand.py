"""What is asked of each model lately: smoothed rates of arrivals and tokens, lengths of outputs.

A rate decays as ``exp(-t / WINDOW_SECONDS)`` and each arrival adds its share, so it needs no list
of arrivals: O(1) per arrival and per question.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from appliance.vocabulary import ModelName, RequestClass, RequestSpec

WINDOW_SECONDS = 30.0
"""Prism smooths over as much."""

OUTPUT_SMOOTHING = 0.1


@dataclass(slots=True)
class Demand:
    """One model's. Rates are as of `updated`."""

    arrivals_per_second: float = 0.0
    tokens_per_second: float = 0.0
    batch_arrivals_per_second: float = 0.0
    """Of these arrivals, those of batch requests; so with their tokens."""
    batch_tokens_per_second: float = 0.0
    output_tokens: float = 0.0
    updated: float = -math.inf
    requests: int = 0
    """Live ones."""

    def decay(self, now: float) -> float:
        """What is left now of the rates as of `updated`."""
        return math.exp((self.updated - now) / WINDOW_SECONDS)


class Demands:
    """Every model's demand, and how many requests of each API key instances have."""

    def __init__(self, models: Iterable[ModelName]) -> None:
        self._of_key: dict[str, int] = {}
        self.of = {model: Demand() for model in models}
        self.asked: dict[ModelName, None] = {}
        """Models that requests ever came for."""
        self._output_tokens = 0.0
        """Smoothed mean over all models; 0 before any output ended."""

    def add(self, model: ModelName) -> None:
        """A model without requests so far."""
        self.of[model] = Demand()

    def forget(self, model: ModelName) -> None:
        """The model is gone, and so are its requests."""
        del self.of[model]
        self.asked.pop(model, None)

    def arrived(self, request: RequestSpec, now: float) -> None:
        demand = self.of[request.model]
        kept = demand.decay(now)
        expected = demand.output_tokens or self._output_tokens or request.max_tokens
        tokens = request.prompt_tokens + min(request.max_tokens, expected)
        demand.arrivals_per_second = demand.arrivals_per_second * kept + 1 / WINDOW_SECONDS
        demand.tokens_per_second = demand.tokens_per_second * kept + tokens / WINDOW_SECONDS
        demand.batch_arrivals_per_second *= kept
        demand.batch_tokens_per_second *= kept
        if request.request_class is RequestClass.BATCH:
            demand.batch_arrivals_per_second += 1 / WINDOW_SECONDS
            demand.batch_tokens_per_second += tokens / WINDOW_SECONDS
        demand.updated = now
        self.asked[request.model] = None
        demand.requests += 1

    def of_key(self, key: str) -> int:
        """Requests of the key that instances took on, and that have not ended."""
        return self._of_key.get(key, 0)

    def taken_on(self, key: str) -> None:
        """An instance took a request of the key on."""
        self._of_key[key] = self._of_key.get(key, 0) + 1

    def let_go(self, key: str) -> None:
        """A request of the key is over that an instance took on."""
        self._of_key[key] -= 1
        if not self._of_key[key]:
            del self._of_key[key]

    def ended(self, model: ModelName, output_tokens: int) -> None:
        """A request of the model is over, after so many tokens."""
        demand = self.of[model]
        demand.requests -= 1
        if output_tokens:
            demand.output_tokens = _smoothed(demand.output_tokens, output_tokens)
            self._output_tokens = _smoothed(self._output_tokens, output_tokens)


def _smoothed(known: float, newest: int) -> float:
    known = known or newest
    return known + OUTPUT_SMOOTHING * (newest - known)
