"""What is expected of each model: how long its prompts, steps, answers and loads take."""

from __future__ import annotations

import itertools
from collections.abc import Container

import msgspec

from appliance.scheduling.policy_api import Costs
from appliance.vocabulary import ModelName

KEPT_SECONDS = 30.0
"""How long what is expected of a model is kept."""
RENEWED = 16
"""Not more than this part of the models is looked up anew at once."""
TIGHT_SHARE = 0.1
"""First tokens of a model are tight if a switch to it takes more than this share of their TTFT."""


class Expected(msgspec.Struct, frozen=True):
    """What is expected of a model, until it is looked up anew."""

    until: float
    prompt_seconds: float
    prompt_seconds_per_token: float
    kv_seconds_per_token: float
    """By how much a step is longer for each token of KV that it reads."""
    switch_seconds: float
    answers_seconds: dict[int, float]
    """What so many answers of usual length take that share their steps."""

    def of_prompt(self, tokens: int) -> float:
        """Seconds that a prompt takes."""
        return self.prompt_seconds + tokens * self.prompt_seconds_per_token

    def of_answers(self, model: ModelName, requests: int, costs: Costs, tokens: int) -> float:
        """Seconds that so many answers of so many tokens take; always the same number of tokens."""
        known = self.answers_seconds.get(requests)
        if known is None:
            known = costs.step_seconds(model, requests) * tokens
            self.answers_seconds[requests] = known
        return known

    def is_tight(self, ttft_seconds: float) -> bool:
        """Whether a switch takes a large part of this TTFT target: then the model cannot wait for
        turns of others."""
        return self.switch_seconds > TIGHT_SHARE * ttft_seconds


class Expectations:
    """Of all models. What is kept is O(models)."""

    def __init__(self) -> None:
        self.known: dict[ModelName, Expected] = {}
        """What was looked up so far, the oldest first; `of` looks up the rest."""

    def of(self, model: ModelName, now: float, costs: Costs) -> Expected:
        """What is known of the model. Prompts, and reading KV, are taken to be on a line through
        two estimates."""
        known = self.known.get(model)
        if known is None:
            short, long = costs.prefill_seconds(model, 1), costs.prefill_seconds(model, 1001)
            per_token = (long - short) / 1000
            reading = costs.step_seconds(model, 1, 1000) - costs.step_seconds(model, 1)
            known = self.known[model] = Expected(
                until=now + KEPT_SECONDS,
                prompt_seconds=short - per_token,
                prompt_seconds_per_token=per_token,
                kv_seconds_per_token=reading / 1000,
                switch_seconds=costs.switch_seconds(model),
                answers_seconds={},
            )
        return known

    def renew(self, now: float, models: Container[ModelName], costs: Costs) -> None:
        """Look the oldest up anew that are too old; of models that are there no more, forget
        them."""
        known = self.known
        for model in list(itertools.islice(known, 1 + len(known) // RENEWED)):
            if known[model].until > now:
                break
            del known[model]
            if model in models:
                self.of(model, now, costs)
