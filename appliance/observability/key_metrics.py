"""What each API key has had, as metrics: by the names of the keys that there are, and no others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from appliance.observability.registry import Registry

WAITING: Final = "waiting"
"""The limit of who is refused since too many wait, or has waited too long."""


class KeyUse(msgspec.Struct, kw_only=True):
    """What a key has had since the daemon began, counted as in the metrics; `live` are the requests
    that are being answered, or wait for their turn."""

    live: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    refusals: int = 0


class KeyMetrics:
    """Counts for keys, from their names' first appearance until their removal."""

    def __init__(self) -> None:
        self.registry = Registry()
        self._known: dict[str, KeyUse] = {}
        self._requests = self.registry.counter(
            "appliance_key_requests",
            "Sequences of a key that were taken in, those of a batch once their line has an "
            "outcome.",
            "key",
        )
        self._tokens = self.registry.counter(
            "appliance_key_tokens",
            "Tokens of a key's sequences that are over, those of a batch once their line has an "
            "outcome; `kind` is `prompt` or `output`.",
            "key",
            "kind",
        )
        self._refusals = self.registry.counter(
            "appliance_key_rejections",
            "Requests of a key that got 429; `limit` is `requests`, `tokens`, `concurrency`, "
            "`budget` for the tokens of a month, one of these with `organization_` in front if it "
            "is that of its organization, or `waiting` if too many of its requests wait, or one "
            "has waited too long.",
            "key",
            "limit",
        )
        self._waiting = self.registry.gauge(
            "appliance_key_waiting", "Sequences of a key that wait for their turn.", "key"
        )

    def know(self, key: str) -> None:
        """Count for a key from now on."""
        self._known.setdefault(key, KeyUse())

    def forget(self, key: str) -> None:
        """A key is gone, and all that was counted for it."""
        self._known.pop(key, None)
        for metric in (self._requests, self._tokens, self._refusals, self._waiting):
            metric.remove_by_labels({"key": key})

    def taken(self, key: str) -> None:
        """A sequence was taken in."""
        if (use := self._known.get(key)) is not None:
            use.requests += 1
            self._requests.labels(key).inc()

    def ended(self, key: str, prompt_tokens: int, output_tokens: int) -> None:
        """A sequence is over."""
        if (use := self._known.get(key)) is not None:
            use.prompt_tokens += prompt_tokens
            use.output_tokens += output_tokens
            self._tokens.labels(key, "prompt").inc(prompt_tokens)
            self._tokens.labels(key, "output").inc(output_tokens)

    def refused(self, key: str, limit: str) -> None:
        """A request was refused for a limit."""
        if (use := self._known.get(key)) is not None:
            use.refusals += 1
            self._refusals.labels(key, limit).inc()

    def use(self, key: str) -> KeyUse:
        """The counters of a key that was added here."""
        return self._known[key]

    def waiting(self, sequences: Mapping[str, int]) -> None:
        """So many of each key wait now; none of a key that is not named."""
        for key in self._known:
            self._waiting.labels(key).set(sequences.get(key, 0))
