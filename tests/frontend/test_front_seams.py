"""vLLM is as front ends need it, and a vLLM that is not is told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import vllm
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient

from appliance.frontend.serving import seams
from appliance.frontend.serving.engine_client import (
    CoreRefusal,
    EngineClient,
    NotAvailable,
    is_refusal,
)
from appliance.service.front_frames import Refused


def test_this_vllm_is_the_one() -> None:
    seams.check_seams()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(seams.SeamMoved, match=r"0\.33\.0"):
        seams.check_seams()


def test_a_method_that_takes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def abort(self: object, requests: object) -> None: ...

    monkeypatch.setattr(seams, "SIGNATURES", ((abort, ("request_id", "internal")),))
    with pytest.raises(seams.SeamMoved, match="abort"):
        seams.check_seams()


def test_a_source_that_does_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "SOURCES", ((AsyncLLM.__init__, ("self.no_such_thing",)),))
    with pytest.raises(seams.SeamMoved, match="no_such_thing"):
        seams.check_seams()


@pytest.mark.parametrize("name", ["sleep_async", "collective_rpc_async", "profile_async"])
def test_methods_without_meaning_say_so_by_name(name: str) -> None:
    assert hasattr(EngineCoreClient, name)
    client: Any = EngineClient.__new__(EngineClient)
    with pytest.raises(NotAvailable, match=name):
        getattr(client, name)()


REFUSED = CoreRefusal(Refused(call=1, status=429, code="queue_full", message="full"))


@pytest.mark.parametrize(
    ("exc_info", "refusal"),
    [
        ((CoreRefusal, REFUSED, None), True),
        ((ValueError, ValueError("no"), None), False),
        (None, False),
        (False, False),
    ],
    ids=["a refusal", "another error", "no error", "asyncio reports without an error"],
)
def test_refusals_are_told_from_faults(exc_info: Any, refusal: bool) -> None:
    assert is_refusal(logging.makeLogRecord({"exc_info": exc_info})) is refusal
