"""How long things take: a formula for each model, corrected by what was observed.

Prefill is ``a + b t + c t²`` seconds for t tokens and a decoding step ``a + b kv + c n`` for n
requests that read kv tokens of KV (Aegaeon App. A.2, Eq. 5 and 6, with the batch term that Eq. 6
lacks), a switch weight bytes over bandwidth. Two things that the papers' forms lack bend these
lines: up to a knee, reading the weights and launching kernels takes longer than computing does, and
more costs little; and matrix products compute whole tiles of rows, so that a step jumps where its
batch needs one tile more. What a model really takes is smoothed into a factor on its formula. A
model that comes without one gets the lines of its own prompts and turns (`LearnedLine`).
Deterministic: it changes only with what it is shown. O(1) per question and per observation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from appliance.vocabulary import ModelName, ModelSpec, Word

SMOOTHING = 0.25
"""Weight of the newest observation."""
MEMORY = 64
"""About as many observations of each size count as came last."""
SIZES = 20
"""Work is of one size up to 1 (request, token), 3, 7, and so on; the last size has no end."""
LEAST_OBSERVED = 4
"""So many observations of each of two sizes are needed, or nothing is known."""
KNOWN_FROM, KNOWN_TO = 12.0, 4.0
"""A line is known from when its F statistic (how much of the variance of times each of its slopes
explains, over what is left of it for an observation) is so large, until it is less than the other.
"""
LEAST_VARIATION = 1e-6
"""Variance over the mean square, below which something does not vary: the rest is rounding."""
LEAST_BASE_SHARE = 0.1
"""Of the shortest time seen, what no work takes at least."""
LEAST_SECONDS = 1e-9
"""What took less was not measured."""
FITTED_EVERY = 8
"""The line is fitted again after so many observations."""
UNSEEN_TURNS = 8
"""After so many turns that computed prompts, too, one has to be computed alone, if none was."""
COUNTED_STEPS = 16
"""A turn counts by its steps, but not by more than these."""


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


class Line(NamedTuple):
    """``base + first x + second z`` seconds; nothing of it is negative, and the base not 0."""

    base: float
    first: float
    second: float

    def seconds(self, x: float, z: float) -> float:
        """Of so much work."""
        return self.base + self.first * x + self.second * z

    def scaled(self, factor: float) -> Line:
        """One that takes so many times as long."""
        return Line(self.base * factor, self.first * factor, self.second * factor)


class LearnedLine:
    """The line of what was observed: x is the size of the work, z grows with it. Least squares of
    the relative error.

    Sums are kept for each power of two of x, and what was seen is forgotten only as other work of
    its size comes. So a size that stays the same for long does not make others forgotten. The time
    and memory of an observation do not depend on how many there were.
    """

    def __init__(self) -> None:
        self.line: Line | None = None
        """None as long as it is not known."""
        self._sums: dict[int, list[float]] = {}
        """By size, of each observation's weight w: w, wx, wz, wy, wxx, wxz, wzz, wxy, wzy and wyy,
        for y seconds."""
        self._observed: dict[int, int] = {}
        self._left = FITTED_EVERY

    def observe(
        self, x: float, z: float, seconds: float, expected: float, share: float = 1.0
    ) -> None:
        """Work took `seconds` where `expected` (both above 0) were. If these are far from each
        other, it counts little. It counts by its `share` in any case."""
        shorter, longer = sorted((seconds, expected))
        w = share * (shorter / longer) ** 2 / longer**2
        wx, wz, wy = w * x, w * z, w * seconds
        added = (w, wx, wz, wy, wx * x, wx * z, wz * z, wx * seconds, wz * seconds, wy * seconds)
        size = min(int(x).bit_length(), SIZES)
        sums = self._sums.get(size)
        if sums is None:
            self._sums[size], self._observed[size] = list(added), 1
        else:
            kept = 1 - 1 / MEMORY
            self._sums[size] = [kept * old + new for old, new in zip(sums, added, strict=True)]
            self._observed[size] = min(MEMORY, self._observed[size] + 1)
        self._left -= 1
        if not self._left:
            self._left = FITTED_EVERY
            self._fit()

    def _fit(self) -> None:
        if sum([number >= LEAST_OBSERVED for number in self._observed.values()]) < 2:
            return
        total = [sum(column) for column in zip(*self._sums.values(), strict=True)]
        _, x, z, y, xx, xz, zz, xy, zy, yy = [value / total[0] for value in total]
        by_x, by_z = xy - x * y, zy - z * y
        first, second = _slopes(_variance(xx, x), xz - x * z, _variance(zz, z), by_x, by_z)
        explained = first * by_x + second * by_z
        left = max(yy - y * y - explained, LEAST_VARIATION * yy)
        least = KNOWN_FROM if self.line is None else KNOWN_TO
        if explained / 2 < least * left / (sum(self._observed.values()) - 3):
            self.line = None
            return
        base = y - first * x - second * z
        shortest = min([sums[3] / sums[0] for sums in self._sums.values()])
        if base < LEAST_BASE_SHARE * shortest:
            base = LEAST_BASE_SHARE * shortest
            first, second = _slopes(xx, xz, zz, xy - base * x, zy - base * z)
        self.line = Line(base, first, second)


def _variance(square: float, mean: float) -> float:
    """0 if there is none but that of rounding."""
    found = square - mean * mean
    return found if found > LEAST_VARIATION * square else 0.0


def _slopes(xx: float, xz: float, zz: float, xy: float, zy: float) -> tuple[float, float]:
    """The best b and c of ``b x + c z = y``, neither negative, by the products of x, z and y."""
    both = xx * zz - xz * xz
    if both > LEAST_VARIATION * xx * zz:
        b, c = (zz * xy - xz * zy) / both, (xx * zy - xz * xy) / both
        if b >= 0 and c >= 0:
            return b, c
    b = max(0.0, xy / xx) if xx else 0.0
    c = max(0.0, zy / zz) if zz else 0.0
    return (b, 0.0) if b * xy >= c * zy else (0.0, c)


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


class Learned:
    """What was learned of models' steps, or of their prompts."""

    def __init__(self, *fields: str) -> None:
        self.fields = fields
        """Of `StepTimes`, in the order of a `Line`."""
        self.first_guess = Line(*[getattr(FIRST_GUESS, field) for field in fields])
        self.factors: dict[ModelName, float] = {}
        """What is observed over the formula, smoothed."""
        self.lines: dict[ModelName, LearnedLine] = {}


class CostModel:
    """Estimates in seconds that follow what is observed. Models without `times` begin with the
    first guesses above, until their prompts or steps give a line."""

    def __init__(
        self,
        models: Iterable[ModelSpec],
        times: Mapping[ModelName, StepTimes] | None = None,
        load_bytes_per_second: float = FIRST_GUESS_LOAD_BYTES_PER_SECOND,
    ) -> None:
        self._weight_bytes = {model.name: model.weight_bytes for model in models}
        self._times = dict(times or {})
        self._given = frozenset(self._times)
        self._steps = Learned("step_base", "step_per_request", "step_per_kv_token")
        self._prompts = Learned("prefill_base", "prefill_per_token", "prefill_per_token_squared")
        self._load_bytes_per_second = load_bytes_per_second
        self._unseen: dict[ModelName, int] = {}
        """Turns that computed prompts, too, of models of which no prompt was seen alone."""
        self._switch: dict[ModelName, float] = {}
        self._move: tuple[float, float] | None = None
        """Bytes of KV that a move has, and the seconds it takes."""

    def add(self, model: ModelSpec) -> None:
        """A model of which nothing was observed yet."""
        self._weight_bytes[model.name] = model.weight_bytes

    def forget(self, model: ModelName) -> None:
        """The model is gone; another one may have its name."""
        del self._weight_bytes[model]
        self._switch.pop(model, None)
        self._unseen.pop(model, None)
        for learned in (self._steps, self._prompts):
            learned.factors.pop(model, None)
            learned.lines.pop(model, None)
        if model not in self._given:
            self._times.pop(model, None)

    def estimates(self) -> Estimates:
        """For readers."""
        return Estimates(
            self.step_seconds, self.prefill_seconds, self.switch_seconds, self.move_seconds
        )

    def observe_turn(
        self,
        model: ModelName,
        steps: int,
        seconds: float,
        requests: int,
        kv_tokens: int,
        tokens: int = 0,
    ) -> None:
        """`steps` steps of `requests` requests with about `kv_tokens` tokens of KV in all. They
        made `tokens`, fewer than one for each request and step if some ended before the others; 0
        if that is not known."""
        if not steps:
            return
        if model not in self._given and requests and seconds >= LEAST_SECONDS * steps:
            self._learn_steps(
                model, steps, seconds, requests, kv_tokens, tokens or requests * steps
            )
        expected = self._of(model).step_seconds(requests, kv_tokens)
        _smooth(self._steps.factors, model, seconds / steps / expected)

    def observe_mixed_turn(
        self,
        model: ModelName,
        steps: int,
        seconds: float,
        requests: int,
        kv_tokens: int,
        tokens: int,
        prompts: int,
        prompt_tokens: int,
    ) -> None:
        """The same of steps that also computed so many prompts (at least one) of so many tokens in
        all. What these took is not known but expected: the larger its share of the time, the less
        the rest says. It says nothing if no prompt was seen alone."""
        if model in self._given or not requests:
            return
        if model not in self._prompts.factors:
            self._unseen[model] = self._unseen.get(model, 0) + 1
            return
        long, least = (self.prefill_seconds(model, n) for n in (prompt_tokens // prompts, 1))
        left = seconds - prompts * (long - least)
        if not steps or left < LEAST_SECONDS * steps:
            return
        share = (left / seconds) ** 2
        self._learn_steps(model, steps, left, requests, kv_tokens, tokens, share)
        expected = self._of(model).step_seconds(requests, kv_tokens)
        self._steps.factors.setdefault(model, left / steps / expected)

    def lacks_prompt(self, model: ModelName) -> bool:
        """Whether the next prompt should be computed alone: all so far were computed in the steps
        of other requests, so that neither what prompts take nor what steps take is known."""
        return self._unseen.get(model, 0) >= UNSEEN_TURNS

    def _learn_steps(
        self,
        model: ModelName,
        steps: int,
        seconds: float,
        requests: int,
        kv_tokens: int,
        tokens: int,
        share: float = 1.0,
    ) -> None:
        """From a batch that was as large as it was in the mean."""
        there = min(1.0, max(1.0, tokens / steps) / requests)
        x, z = there * requests, there * kv_tokens
        guess = self._of(model).step_seconds(round(x), round(z))
        share *= min(1.0, steps / COUNTED_STEPS)
        self._learn(self._steps, model, x, z, seconds / steps, guess, share)

    def observe_prefill(self, model: ModelName, tokens: int, seconds: float) -> None:
        self._unseen.pop(model, None)
        guess = self._of(model).prefill_seconds(tokens)
        if model not in self._given and seconds >= LEAST_SECONDS:
            self._learn(self._prompts, model, tokens, tokens * tokens, seconds, guess)
        expected = self._of(model).prefill_seconds(tokens)
        _smooth(self._prompts.factors, model, seconds / expected)

    def _learn(
        self,
        learned: Learned,
        model: ModelName,
        x: float,
        z: float,
        seconds: float,
        guess: float,
        share: float = 1.0,
    ) -> None:
        """A line that becomes known, or changes, is the model's formula from now on. When it is
        known no more, the first guess is again, at the level of the last; `guess` is what the
        formula so far says."""
        factor = learned.factors.get(model)
        expected = seconds if factor is None else factor * guess
        own = learned.lines.setdefault(model, LearnedLine())
        before = own.line
        own.observe(x, z, seconds, expected, share)
        line = own.line
        if line is before:
            return
        if line is None or before is None:
            learned.factors.pop(model, None)  # it was of another formula
        if line is None:
            line = learned.first_guess.scaled(expected / learned.first_guess.seconds(x, z))
        changes = dict(zip(learned.fields, line, strict=True))
        self._times[model] = msgspec.structs.replace(self._of(model), **changes)

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
        factor, times = self._steps.factors.get(model, 1.0), self._times.get(model, FIRST_GUESS)
        return factor * times.step_seconds(requests, kv_tokens)

    def prefill_seconds(self, model: ModelName, tokens: int) -> float:
        factor, times = self._prompts.factors.get(model, 1.0), self._times.get(model, FIRST_GUESS)
        return factor * times.prefill_seconds(tokens)

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
