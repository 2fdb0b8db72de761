"""How long things take, learnt from what they took: exponentially weighted means per model.

Deterministic: it changes only with the events it is shown. O(1) per question and per observation.
"""

from __future__ import annotations

from appliance.vocabulary import ModelName

SMOOTHING = 0.25
"""Weight of the newest observation."""

FIRST_GUESS_STEP_SECONDS = 0.005
FIRST_GUESS_PREFILL_SECONDS_PER_TOKEN = 0.0005
FIRST_GUESS_LOAD_BYTES_PER_SECOND = 5e9


class CostModel:
    """Estimates in seconds, from the first guesses above until something was observed."""

    def __init__(self) -> None:
        self._step: dict[ModelName, float] = {}
        self._prefill_per_token: dict[ModelName, float] = {}
        self._switch: dict[ModelName, float] = {}
        self._load_bytes_per_second = FIRST_GUESS_LOAD_BYTES_PER_SECOND

    def observe_turn(self, model: ModelName, steps: int, seconds: float) -> None:
        if steps:
            _smooth(self._step, model, seconds / steps)

    def observe_prefill(self, model: ModelName, tokens: int, seconds: float) -> None:
        _smooth(self._prefill_per_token, model, seconds / tokens)

    def observe_load(self, moved_bytes: int, seconds: float) -> None:
        if moved_bytes and seconds > 0:
            rate = moved_bytes / seconds
            self._load_bytes_per_second += SMOOTHING * (rate - self._load_bytes_per_second)

    def observe_switch(self, model: ModelName, seconds: float) -> None:
        """All that came between ordering a turn of another model and its first step."""
        _smooth(self._switch, model, seconds)

    def step_seconds(self, model: ModelName) -> float:
        return self._step.get(model, FIRST_GUESS_STEP_SECONDS)

    def prefill_seconds(self, model: ModelName, tokens: int) -> float:
        rate = self._prefill_per_token.get(model, FIRST_GUESS_PREFILL_SECONDS_PER_TOKEN)
        return rate * tokens

    def switch_seconds(self, model: ModelName, weight_bytes: int) -> float:
        """As observed; before that, the time its weights take to load."""
        return self._switch.get(model, weight_bytes / self._load_bytes_per_second)


def _smooth(table: dict[ModelName, float], model: ModelName, value: float) -> None:
    known = table.get(model)
    table[model] = value if known is None else known + SMOOTHING * (value - known)
