"""Which requests may use each other's cached prefixes."""

from __future__ import annotations

import pytest

from appliance.access.admission import Admission
from appliance.access.auth import Access, Caller
from appliance.access.keys import Key
from appliance.access.rate_limits import Meter
from appliance.engines.protocol import Produced
from appliance.service.interface import RequestTimes, Sink, SubmitRequest
from appliance.vocabulary import FinishReason


class Service:
    """Takes in everything, and computes nothing."""

    def __init__(self) -> None:
        self.salts: list[str] = []

    def submit(self, request: SubmitRequest, sink: Sink) -> Service:
        self.salts.append(request.prefix_salt)
        return self

    def cancel(self, reason: FinishReason) -> None:
        raise AssertionError("nothing is cancelled")


class Ignoring:
    def produced(self, produced: Produced) -> None: ...

    def ended(self, times: RequestTimes | None, failure: Exception | None) -> None: ...


def key(name: str, digit: str) -> Caller:
    return Caller(Meter(Key(name=name, sha256=digit * 64, created_seconds=0.0), 0.0))


@pytest.mark.parametrize("shared", [False, True])
def test_each_key_has_a_salt_of_its_own(shared: bool) -> None:
    """Unless they share the prefix cache; clients without keys share it always."""
    service = Service()
    admission = Admission(
        service,  # type: ignore[arg-type]
        Access(clock=lambda: 0.0),
        share_prefix_cache=shared,
    )
    alice, bob = key("alice", "a"), key("bob", "b")
    for number, caller in enumerate([alice, bob, alice, Caller()]):
        request = SubmitRequest(
            id=f"r{number}", model="m", prompt=(1, 2), max_tokens=3, body=b"asked"
        )
        admission.submit(request, caller, Ignoring())

    first, other, again, open_ = service.salts
    assert open_ == ""
    assert first == again
    if shared:
        assert (first, other) == ("", "")
    else:
        assert len({first, other, open_}) == 3
        assert "a" * 64 not in first  # no worker sees what keys are found by
