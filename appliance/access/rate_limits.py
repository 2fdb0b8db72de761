"""Limits of a key: requests and tokens per minute, requests at once. Callers pass the time."""

from __future__ import annotations

from typing import Final, NamedTuple

from appliance.access.keys import Key

_MINUTE_SECONDS: Final = 60.0
_NOTHING: Final = 1e-6
"""What a bucket may lack for rounding."""


class Bucket:
    """A token bucket: `per_minute` at once, and as many per minute in the long run.

    More than it ever holds is asked of a full bucket. What is settled afterwards may exceed what it
    holds: the excess delays later requests.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def wait_seconds(self, amount: float, now: float) -> float:
        """How long until `amount` is there; 0 if it is."""
        self._refill(now)
        missing = min(amount, self.per_minute) - self._level
        return missing / self._per_second if missing > _NOTHING else 0.0

    def take(self, amount: float, now: float) -> float:
        """What is taken for `amount`: at most all that it ever holds."""
        self._refill(now)
        taken = min(amount, float(self.per_minute))
        self._level -= taken
        return taken

    def settle(self, difference: float, now: float) -> None:
        """Take so much more than was taken before; give it back if it is negative."""
        self._refill(now)
        self._level = min(self._level - difference, float(self.per_minute))

    def remaining(self, now: float) -> int:
        """What could be taken at once."""
        self._refill(now)
        return max(0, int(self._level + _NOTHING))

    def full_in_seconds(self, now: float) -> float:
        """How long until it is full again, if nothing more is taken."""
        self._refill(now)
        return max(0.0, self.per_minute - self._level) / self._per_second

    @property
    def _per_second(self) -> float:
        return self.per_minute / _MINUTE_SECONDS

    def _refill(self, now: float) -> None:
        if now > self._at:
            gained = (now - self._at) * self._per_second
            self._level = min(self._level + gained, float(self.per_minute))
            self._at = now


class LimitRefusal(NamedTuple):
    """Which limit was met, and after how long it makes sense to try again."""

    limit: str
    """``requests``, ``tokens`` or ``concurrency``."""
    bound: int
    retry_after_seconds: float


_CONCURRENCY_RETRY_SECONDS: Final = 1.0


class Meter:
    """What one key has asked for lately, against its limits."""

    def __init__(self, key: Key, now: float) -> None:
        self.key = key
        self.requests = _bucket(None, key.requests_per_minute, now)
        self.tokens = _bucket(None, key.tokens_per_minute, now)
        self.live = 0
        """Requests that are being answered."""

    def change(self, key: Key, now: float) -> None:
        """The key has other limits now; what has not changed goes on."""
        self.key = key
        self.requests = _bucket(self.requests, key.requests_per_minute, now)
        self.tokens = _bucket(self.tokens, key.tokens_per_minute, now)

    def begin(self, now: float) -> LimitRefusal | None:
        """Count another request, whose `end` is due later; or say which limit forbids it."""
        key = self.key
        if key.concurrency is not None and self.live >= key.concurrency:
            return LimitRefusal("concurrency", key.concurrency, _CONCURRENCY_RETRY_SECONDS)
        if self.requests is not None:
            if wait := self.requests.wait_seconds(1, now):
                return LimitRefusal("requests", self.requests.per_minute, wait)
            self.requests.take(1, now)
        self.live += 1
        return None

    def end(self) -> None:
        """A request that had begun was answered."""
        self.live -= 1

    def reserve(self, tokens: int, now: float, *, of_tokens: int = 0) -> float | LimitRefusal:
        """Take what a sequence needs at most; if it is the first of several, only if there are
        `of_tokens` for all. Answers what is to be said when it is settled."""
        if self.tokens is None:
            return 0.0
        if wait := self.tokens.wait_seconds(max(tokens, of_tokens), now):
            return LimitRefusal("tokens", self.tokens.per_minute, wait)
        return self.tokens.take(tokens, now)

    def settle(self, reserved: float, tokens: int, now: float) -> None:
        """What had reserved so much came to so many tokens."""
        if self.tokens is not None:
            self.tokens.settle(tokens - reserved, now)


def _bucket(old: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    return old if old is not None and old.per_minute == per_minute else Bucket(per_minute, now)
