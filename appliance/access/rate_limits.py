"""Limits of a key and of its organization: requests and tokens per minute, requests at once.
Callers pass the time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from appliance.access.keys import Key
from appliance.access.organizations import Limited, Organization

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
    organization: str = ""
    """Whose limit it is; "": the key's own."""

    @property
    def named(self) -> str:
        """As metrics name it."""
        return f"organization_{self.limit}" if self.organization else self.limit


_CONCURRENCY_RETRY_SECONDS: Final = 1.0

_Of = TypeVar("_Of", bound=Limited)


class Counts(Generic[_Of]):
    """What was asked for lately under the limits of a key, or of an organization."""

    def __init__(self, of: _Of, now: float, organization: str = "") -> None:
        """`organization` is its name, if it is one."""
        self.of = of
        self.requests = _bucket(None, of.requests_per_minute, now)
        self.tokens = _bucket(None, of.tokens_per_minute, now)
        self.live = 0
        """Requests that are being answered."""
        self._organization = organization

    def change(self, of: _Of, now: float) -> None:
        """There are other limits now; what has not changed goes on."""
        self.of = of
        self.requests = _bucket(self.requests, of.requests_per_minute, now)
        self.tokens = _bucket(self.tokens, of.tokens_per_minute, now)

    def forbids(self, now: float) -> LimitRefusal | None:
        """The limit that forbids another request."""
        most = self.of.concurrency
        if most is not None and self.live >= most:
            return self._refusal("concurrency", most, _CONCURRENCY_RETRY_SECONDS)
        if self.requests is not None and (wait := self.requests.wait_seconds(1, now)):
            return self._refusal("requests", self.requests.per_minute, wait)
        return None

    def begin(self, now: float) -> None:
        """Count another request."""
        if self.requests is not None:
            self.requests.take(1, now)
        self.live += 1

    def forbids_tokens(self, tokens: int, now: float) -> LimitRefusal | None:
        """The limit that forbids so many tokens at this moment."""
        if self.tokens is not None and (wait := self.tokens.wait_seconds(tokens, now)):
            return self._refusal("tokens", self.tokens.per_minute, wait)
        return None

    def take_tokens(self, tokens: int, now: float) -> float:
        """What is to be said when they are settled."""
        return 0.0 if self.tokens is None else self.tokens.take(tokens, now)

    def settle(self, reserved: float, tokens: int, now: float) -> None:
        """What had reserved so much came to so many tokens."""
        if self.tokens is not None:
            self.tokens.settle(tokens - reserved, now)

    def _refusal(self, limit: str, bound: int, wait: float) -> LimitRefusal:
        return LimitRefusal(limit, bound, wait, self._organization)


OrganizationCounts: TypeAlias = Counts[Organization]


class Reserved(NamedTuple):
    """What a sequence took of the tokens of its key, and of its organization."""

    of_key: float = 0.0
    of_organization: float = 0.0
    organization: OrganizationCounts | None = None
    """Which it was when they were taken: its key may belong to another one at the end."""


class Meter:
    """What one key has asked for lately, against its limits and those of its organization."""

    def __init__(
        self, key: Key, now: float, organization: OrganizationCounts | None = None
    ) -> None:
        self.own = Counts(key, now)
        self.organization = organization

    @property
    def key(self) -> Key:
        return self.own.of

    def change(self, key: Key, now: float) -> None:
        """The key has other limits now; what has not changed goes on."""
        self.own.change(key, now)

    def join(self, organization: OrganizationCounts | None) -> None:
        """The key belongs to an organization, or to none, with what is being answered."""
        if organization is self.organization:
            return
        if self.organization is not None:
            self.organization.live -= self.own.live
        if organization is not None:
            organization.live += self.own.live
        self.organization = organization

    def counts(self) -> Iterator[Counts[Key] | OrganizationCounts]:
        """Those of the key, and those of its organization."""
        yield self.own
        if self.organization is not None:
            yield self.organization

    def begin(self, now: float) -> LimitRefusal | None:
        """Count another request, whose `end` is due later; or say which limit forbids it."""
        for counts in self.counts():
            if refusal := counts.forbids(now):
                return refusal
        for counts in self.counts():
            counts.begin(now)
        return None

    def end(self) -> None:
        """A request that had begun was answered."""
        for counts in self.counts():
            counts.live -= 1

    def reserve(self, tokens: int, now: float, *, of_tokens: int = 0) -> Reserved | LimitRefusal:
        """Take what a sequence needs at most; if it is the first of several, only if there are
        `of_tokens` for all. Answers what is to be said when it is settled."""
        for counts in self.counts():
            if refusal := counts.forbids_tokens(max(tokens, of_tokens), now):
                return refusal
        of_key, organization = self.own.take_tokens(tokens, now), self.organization
        if organization is None:
            return Reserved(of_key)
        return Reserved(of_key, organization.take_tokens(tokens, now), organization)

    def settle(self, reserved: Reserved, tokens: int, now: float) -> None:
        """What had reserved so much came to so many tokens."""
        self.own.settle(reserved.of_key, tokens, now)
        if reserved.organization is not None:
            reserved.organization.settle(reserved.of_organization, tokens, now)


def _bucket(old: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    return old if old is not None and old.per_minute == per_minute else Bucket(per_minute, now)
