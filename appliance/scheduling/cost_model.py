"""How long things take: a formula for each model, corrected by what was observed.

Prefill is ``a + b t + c t²`` seconds for t tokens and a decoding step ``a + b kv + c n`` for n
requests that read kv tokens of KV (Aegaeon App. A.2, Eq. 5 and 6, with the batch term that Eq. 6
lacks), a switch weight bytes over bandwidth. Two things that the papers' forms lack bend these
lines: up to a knee, reading the weights and launching kernels takes longer than computing does, and
more costs little; and matrix products compute whole tiles of rows, so that a step jumps where its
batch needs one tile more. What a model really takes is smoothed into a factor on its formula.
Deterministic: it changes only with what it is shown. O(1) per question and per observation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from appliance.vocabulary import ModelName, ModelSpec, Word

SMOOTHING = 0.25
"""Weight of the newest observation."""


class StepTimes(Word, frozen=True):
    """Coefficients of a model on one kind of instance: seconds, but for the sizes at which the
    lines bend."""

    prefill_base: float = 0.0
    prefill_per_token: float = 0.0005
    prefill_per_token_squared: float = 0.0
    prefill_knee_tokens: int = 0
    prefill_per_token_past_knee: float = 0.0
    """On top of `prefill_per_token`."""
    step_base: float = 0.005
    step_per_kv_token: float = 0.0
    step_per_request: float = 0.0
    step_knee_requests: int = 0
    step_per_request_past_knee: float = 0.0
    """On top of `step_per_request`."""
    step_tile_requests: int = 1
    step_per_tile: float = 0.0
    """Of every tile of requests that has begun."""

    def prefill_seconds(self, tokens: int) -> float:
        """A prompt of `tokens` tokens, alone."""
        squared = self.prefill_per_token_squared * tokens * tokens
        past = self.prefill_per_token_past_knee * max(0, tokens - self.prefill_knee_tokens)
        return self.prefill_base + self.prefill_per_token * tokens + past + squared

    def step_seconds(self, requests: int, kv_tokens: int) -> float:
        """One token for each of `requests` requests that have `kv_tokens` tokens in all."""
        batch = (
            self.step_per_request * requests
            + self.step_per_request_past_knee * max(0, requests - self.step_knee_requests)
            + self.step_per_tile * -(-requests // self.step_tile_requests)
        )
        return self.step_base + self.step_per_kv_token * kv_tokens + batch


class Estimates(msgspec.Struct, frozen=True):
    """What policies see of a cost model: its answers, not its books.

    Implements `appliance.scheduling.policy_api.Costs`.
    """

    step_seconds: Callable[..., float]
    prefill_seconds: Callable[[ModelName, int], float]
    switch_seconds: Callable[[ModelName], float]
    move_seconds: Callable[[int], float]


FIRST_GUESS = StepTimes()
FIRST_GUESS_LOAD_BYTES_PER_SECOND = 5e9


class CostModel:
    """Estimates in seconds that follow what is observed. Models without `times` begin with the
    first guesses above."""

    def __init__(
        self,
        models: Iterable[ModelSpec],
        times: Mapping[ModelName, StepTimes] | None = None,
        load_bytes_per_second: float = FIRST_GUESS_LOAD_BYTES_PER_SECOND,
    ) -> None:
        self._weight_bytes = {model.name: model.weight_bytes for model in models}
        self._times = dict(times or {})
        self._load_bytes_per_second = load_bytes_per_second
        self._step_factor: dict[ModelName, float] = {}
        self._prefill_factor: dict[ModelName, float] = {}
        self._switch: dict[ModelName, float] = {}
        self._move: tuple[float, float] | None = None
        """Bytes of KV that a move has, and the seconds it takes."""

    def add(self, model: ModelSpec) -> None:
        """A model of which nothing was observed yet."""
        self._weight_bytes[model.name] = model.weight_bytes

    def forget(self, model: ModelName) -> None:
        """The model is gone; another one may have its name."""
        del self._weight_bytes[model]
        for table in (self._step_factor, self._prefill_factor, self._switch):
            table.pop(model, None)

    def estimates(self) -> Estimates:
        """For readers."""
        return Estimates(
            self.step_seconds, self.prefill_seconds, self.switch_seconds, self.move_seconds
        )

    def observe_turn(
        self, model: ModelName, steps: int, seconds: float, requests: int, kv_tokens: int
    ) -> None:
        """`steps` steps of `requests` requests with about `kv_tokens` tokens of KV in all."""
        if steps:
            expected = self._of(model).step_seconds(requests, kv_tokens)
            _smooth(self._step_factor, model, seconds / steps / expected)

    def observe_prefill(self, model: ModelName, tokens: int, seconds: float) -> None:
        expected = self._of(model).prefill_seconds(tokens)
        _smooth(self._prefill_factor, model, seconds / expected)

    def observe_load(self, moved_bytes: int, seconds: float) -> None:
        if moved_bytes and seconds > 0:
            rate = moved_bytes / seconds
            self._load_bytes_per_second += SMOOTHING * (rate - self._load_bytes_per_second)

    def observe_move(self, moved_bytes: int, seconds: float) -> None:
        """KV came to a device or left it. Bytes and seconds are smoothed apart: small moves, which
        take their latency, count as little as they move."""
        if moved_bytes and seconds > 0:
            size, took = self._move or (moved_bytes, seconds)
            size += SMOOTHING * (moved_bytes - size)
            self._move = size, took + SMOOTHING * (seconds - took)

    def observe_switch(self, model: ModelName, seconds: float) -> None:
        """All that came between ordering a turn of a model that was not there and its first
        step."""
        _smooth(self._switch, model, seconds)

    def step_seconds(self, model: ModelName, requests: int = 1, kv_tokens: int = 0) -> float:
        factor = self._step_factor.get(model, 1.0)
        return factor * self._of(model).step_seconds(requests, kv_tokens)

    def prefill_seconds(self, model: ModelName, tokens: int) -> float:
        return self._prefill_factor.get(model, 1.0) * self._of(model).prefill_seconds(tokens)

    def switch_seconds(self, model: ModelName) -> float:
        """As observed; before that, the time its weights take to load."""
        loading = self._weight_bytes[model] / self._load_bytes_per_second
        return self._switch.get(model, loading)

    def move_seconds(self, kv_bytes: int) -> float:
        """As observed; before that, as long as weights of that size take."""
        size, seconds = self._move or (self._load_bytes_per_second, 1.0)
        return kv_bytes * seconds / size

    def _of(self, model: ModelName) -> StepTimes:
        return self._times.get(model, FIRST_GUESS)


def _smooth(table: dict[ModelName, float], model: ModelName, value: float) -> None:
    known = table.get(model)
    table[model] = value if known is None else known + SMOOTHING * (value - known)
