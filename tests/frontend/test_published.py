"""Responses say what their published schema requires, and write null only where it allows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from openai.types.responses import ResponseReasoningItem

from appliance.frontend.serving.published import publish_responses
from appliance.service.front_frames import KeepResponse
from appliance.vocabulary import FinishReason
from tests.frontend.stand_in_core import StandInCore
from tests.patience import PATIENCE_SECONDS

ASKED: dict[str, Any] = {"model": "talker", "input": "hello", "max_output_tokens": 4}
NOT_NULL = ("logprobs", "phase", "encrypted_content", "verbosity")
"""Optional in the schema, where they are."""

asynchronous = pytest.mark.asyncio(loop_scope="session")


async def answer(core: StandInCore, **fields: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
        sent = await http.post("/v1/responses", json=ASKED | fields)
    assert sent.status_code == 200, sent.text
    return dict(sent.json())


async def events(core: StandInCore, **fields: Any) -> list[dict[str, Any]]:
    body = ASKED | fields | {"stream": True}
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
        lines = (await http.post("/v1/responses", json=body)).text.splitlines()
    return [msgspec.json.decode(line[6:]) for line in lines if line.startswith("data: {")]


def nulls(value: Any) -> Iterator[str]:
    """The names of all fields that are null, at any depth."""
    if isinstance(value, list):
        for one in value:
            yield from nulls(one)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if inner is None:
                yield name
            yield from nulls(inner)


@asynchronous
async def test_an_answer_says_all_that_the_schema_requires(core: StandInCore) -> None:
    core.ending = lambda submit: FinishReason.STOP
    made = await answer(core)
    assert made["status"] == "completed"
    assert made["completed_at"] >= made["created_at"]
    assert made["error"] is made["prompt_cache_key"] is made["safety_identifier"] is None
    assert made["text"] == {"format": {"type": "text"}}
    assert made["top_logprobs"] == 0
    assert made["store"] is True
    assert set(nulls(made)).isdisjoint(NOT_NULL)


@asynchronous
async def test_what_was_asked_is_repeated(core: StandInCore) -> None:
    described = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    asked = {
        "store": False,
        "prompt_cache_key": "a",
        "safety_identifier": "b",
        "text": {"format": described},
    }
    made = await answer(core, **asked)
    assert {name: made[name] for name in asked if name != "text"} == {
        name: value for name, value in asked.items() if name != "text"
    }
    assert made["text"]["format"].items() >= described.items()
    assert (await answer(core, text={"verbosity": "low"}))["text"] == {
        "format": {"type": "text"},
        "verbosity": "low",
    }


@asynchronous
async def test_what_is_cut_off_is_not_completed(core: StandInCore) -> None:
    made = await answer(core)
    assert (made["status"], made["completed_at"]) == ("incomplete", None)


@asynchronous
async def test_the_number_of_logprobs_is_repeated(core: StandInCore) -> None:
    made = await answer(core, include=["message.output_text.logprobs"], top_logprobs=2)
    assert made["top_logprobs"] == 2


@asynchronous
async def test_events_say_the_same(core: StandInCore) -> None:
    core.ending = lambda submit: FinishReason.STOP
    sent = await events(core)
    assert set(nulls(sent)).isdisjoint(NOT_NULL)
    responses = {event["type"]: event["response"] for event in sent if "response" in event}
    assert list(responses) == ["response.created", "response.in_progress", "response.completed"]
    for response in responses.values():
        assert response["text"] == {"format": {"type": "text"}}
        assert response["top_logprobs"] == 0
        assert response["store"] is True
        assert response["error"] is None
    assert responses["response.created"]["completed_at"] is None
    assert responses["response.completed"]["completed_at"] is not None


@asynchronous
async def test_what_is_stored_says_the_same(core: StandInCore) -> None:
    made = await answer(core)
    (kept,) = core.said(KeepResponse)
    assert msgspec.json.decode(kept.answer) == made


def test_thoughts_are_written_without_null() -> None:
    publish_responses()
    item = ResponseReasoningItem(id="rs_1", type="reasoning", summary=[])
    assert item.model_dump(mode="json") == {"id": "rs_1", "type": "reasoning", "summary": []}
