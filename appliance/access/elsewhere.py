"""What a key may have of models of other servers: the same limits. Tokens are estimated before such
a server is asked, and settled when it has said how many there were."""

from __future__ import annotations

from collections import Counter
from typing import Final

from appliance.access.auth import Access, Caller, Forbidden, LimitMet, Used
from appliance.access.keys import Key
from appliance.access.rate_limits import (
    Counts,
    LimitRefusal,
    Meter,
    OrganizationCounts,
    Reserved,
)
from appliance.http.errors import BadRequest
from appliance.vocabulary import RequestClass

_RETRY_SECONDS: Final = 1.0


class Elsewhere:
    """Counts the requests that other servers compute. Nothing waits here for its turn: it is the
    other server's affair which of them it computes first."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._sequences: Counter[str] = Counter()
        """By the hash of their key, and by the name of its organization."""

    def begin(
        self,
        caller: Caller,
        *,
        prompt_tokens: int,
        max_tokens: int,
        choices: int,
        request_class: RequestClass,
        guided: bool,
    ) -> Admitted:
        """Take a request in. Raises `Forbidden`, `LimitMet` and `BadRequest`."""
        meter = caller.meter
        if meter is None:
            return Admitted(self, caller, None, choices)
        if guided:
            caller.check_guides()
        if request_class is RequestClass.BATCH and RequestClass.BATCH not in meter.key.classes:
            raise Forbidden("service_tier: the API key has no batch work", "service_tier")
        tokens = choices * (prompt_tokens + max_tokens)
        for counts in meter.counts():
            self._check(counts, meter, choices, tokens)
        reserved = meter.reserve(tokens, self._access.clock())
        if isinstance(reserved, LimitRefusal):
            raise self._refusal(meter, reserved)
        if caller.bill is None:
            self._access.metrics.taken(meter.key.name)
        for name in names_of(meter):
            self._sequences[name] += choices
        return Admitted(self, caller, reserved, choices)

    def _check(
        self, counts: Counts[Key] | OrganizationCounts, meter: Meter, choices: int, tokens: int
    ) -> None:
        own = counts is meter.own
        whose = "the API key" if own else "the organization of the API key"
        most = counts.of.concurrency
        if most is not None:
            if choices > most:
                raise BadRequest(
                    f"n: {whose} may have {most} sequences at once; ask for fewer", "n"
                )
            name = meter.key.sha256 if own else counts.of.name
            if self._sequences[name] + choices > most:
                organization = "" if own else counts.of.name
                refusal = LimitRefusal("concurrency", most, _RETRY_SECONDS, organization)
                raise self._refusal(meter, refusal)
        if choices > 1 and counts.tokens is not None and tokens > counts.tokens.per_minute:
            raise BadRequest(
                f"n: all answers together may come to {tokens} tokens, but {whose} has "
                f"{counts.tokens.per_minute} per minute; ask for fewer or shorter ones",
                "n",
                "token_limit_exceeded",
            )

    def _refusal(self, meter: Meter, refusal: LimitRefusal) -> LimitMet:
        self._access.metrics.refused(meter.key.name, refusal.named)
        return LimitMet(refusal)

    def ended(self, admitted: Admitted, prompt_tokens: int, output_tokens: int) -> None:
        """A request is over that came to so many tokens."""
        caller, meter, reserved = admitted.caller, admitted.caller.meter, admitted.reserved
        if meter is None or reserved is None:
            return
        for name in admitted.names:
            self._sequences[name] -= admitted.choices
            if not self._sequences[name]:
                del self._sequences[name]
        meter.settle(reserved, prompt_tokens + output_tokens, self._access.clock())
        if caller.bill is None:
            self._access.metrics.ended(meter.key.name, prompt_tokens, output_tokens)
        else:
            caller.bill.append(Used(prompt_tokens, output_tokens))


class Admitted:
    """A request that was taken in; it is to be ended once."""

    def __init__(
        self, elsewhere: Elsewhere, caller: Caller, reserved: Reserved | None, choices: int
    ) -> None:
        self.caller = caller
        self.reserved = reserved
        self.choices = choices
        self.names = () if caller.meter is None else names_of(caller.meter)
        """Of those that it counts for, also if its key is assigned elsewhere meanwhile."""
        self._elsewhere = elsewhere

    def end(self, prompt_tokens: int, output_tokens: int) -> None:
        """It came to so many tokens; every choice counts its prompt, as with models of this box."""
        self._elsewhere.ended(self, self.choices * prompt_tokens, output_tokens)


def names_of(meter: Meter) -> tuple[str, ...]:
    """What the sequences of a key are counted by: no name of an organization is a hash's."""
    of = meter.organization
    return (meter.key.sha256,) if of is None else (meter.key.sha256, of.of.name)
