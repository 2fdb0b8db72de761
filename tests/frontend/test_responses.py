"""Responses that are stored: what a front end has the core keep, and how it goes on from there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
import pytest_asyncio

from appliance.service.front_frames import FindResponse, KeepEvent, KeepResponse, Leave, Submit
from tests.frontend.stand_in_core import StandInCore
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASKED: dict[str, Any] = {"model": "talker", "max_output_tokens": 4}


@pytest_asyncio.fixture(loop_scope="session")
async def client(core: StandInCore) -> AsyncIterator[openai.AsyncOpenAI]:
    core.responses.clear()
    async with openai.AsyncOpenAI(
        base_url=f"{core.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


def status_of(kept: KeepResponse) -> str:
    return str(msgspec.json.decode(kept.answer)["status"])


async def tokens_of(core: StandInCore, *texts: str, **fields: str) -> tuple[int, ...]:
    """The prompt of a request that sends a whole conversation: the user and the model by turns."""
    roles = ("user", "assistant")
    items = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
        body = {"model": "talker", "input": items, **fields}
        return tuple((await http.post("/v1/responses/render", json=body)).json()["token_ids"])


async def test_a_response_is_stored_as_it_is_sent(
    core: StandInCore, client: openai.AsyncOpenAI
) -> None:
    answer = await client.responses.with_raw_response.create(**ASKED, input="hello")
    (kept,) = core.said(KeepResponse)
    assert kept.response == answer.parse().id
    assert msgspec.json.decode(kept.answer) == answer.http_response.json()
    assert not kept.background


@pytest.mark.parametrize("stream", [False, True])
async def test_a_next_request_goes_on_from_it(
    core: StandInCore, client: openai.AsyncOpenAI, stream: bool
) -> None:
    """In any front end: this one knows only what the core keeps."""
    first = await client.responses.create(**ASKED, input="hello")
    second = await client.responses.create(**ASKED, input="go on", previous_response_id=first.id)
    third: Any = await client.responses.create(
        **ASKED, input="and on", previous_response_id=second.id, stream=stream
    )
    if stream:
        async for _ in third:
            pass
    said = ["hello", first.output_text, "go on", second.output_text, "and on"]
    assert core.said(Submit)[-1].prompt == await tokens_of(core, *said)


async def test_a_response_that_the_core_does_not_have_is_not_found(
    core: StandInCore, client: openai.AsyncOpenAI
) -> None:
    """Even one that this front end has just made: it may be another key's."""
    first = await client.responses.create(**ASKED, input="hello")
    core.responses.clear()
    core.frames.clear()
    with pytest.raises(openai.NotFoundError) as error:
        await client.responses.create(**ASKED, input="go on", previous_response_id=first.id)
    assert error.value.param == "previous_response_id"
    assert [frame.response for frame in core.said(FindResponse)] == [first.id]
    assert not core.said(Submit)


async def test_nothing_is_stored_without_store(
    core: StandInCore, client: openai.AsyncOpenAI
) -> None:
    await client.responses.create(**ASKED, input="hello", store=False)
    assert not core.said(KeepResponse)


async def test_a_response_in_the_background_outlives_its_answer(
    core: StandInCore, client: openai.AsyncOpenAI
) -> None:
    core.hold_at = lambda submit: 2
    queued = await client.responses.create(**ASKED, input="hello", background=True)
    assert queued.status == "queued"
    kept = await core.seen(KeepResponse)
    assert (kept.response, status_of(kept), kept.background) == (queued.id, "queued", True)
    core.go_on()
    await core.seen(Leave)
    made = core.responses[queued.id]
    assert status_of(made) in ("completed", "incomplete")
    assert not made.background
    assert core.frames.index(made) < core.frames.index(core.said(Leave)[-1])


async def test_events_of_the_background_are_stored_as_they_are_sent(
    core: StandInCore, client: openai.AsyncOpenAI
) -> None:
    body = {**ASKED, "input": "hello", "background": True, "stream": True}
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
        sent = (await http.post("/v1/responses", json=body)).content
    await core.seen(Leave)
    events = [f"{event}\n\n" for event in sent.decode().split("\n\n") if event[:1] not in ":"]
    assert [frame.event.decode() for frame in core.said(KeepEvent)] == events
    assert b"event: response.completed\n" in sent


async def test_a_response_in_the_background_that_is_given_up_ends(
    core: StandInCore, client: openai.AsyncOpenAI
) -> None:
    """Its stream, too."""
    core.hold_at = lambda submit: 2
    stream: Any = await client.responses.create(
        **ASKED, input="hello", background=True, stream=True
    )
    submit = await core.seen(Submit)
    await core.seen(KeepEvent, lambda frame: b"output_text.delta" in frame.event)
    core.give_up(submit.request)
    kinds = [event.type async for event in stream]
    assert "response.completed" not in kinds
    await core.seen(Leave)
    assert status_of(core.responses[next(iter(core.responses))]) in ("queued", "failed")


async def test_the_tokens_of_an_input_are_counted(
    core: StandInCore, client: openai.AsyncOpenAI
) -> None:
    first = await client.responses.create(**ASKED, input="hello")
    asked: Any = {"model": "talker", "input": "go on", "previous_response_id": first.id}
    counted = await client.responses.input_tokens.count(**asked)
    await client.responses.create(**asked, max_output_tokens=4)
    assert counted.input_tokens == len(core.said(Submit)[-1].prompt)
    assert counted.object == "response.input_tokens"
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_tokens.count(**asked | {"previous_response_id": "resp_none"})


async def test_a_response_is_rendered(core: StandInCore, client: openai.AsyncOpenAI) -> None:
    await client.responses.create(**ASKED, input="hello")
    assert core.said(Submit)[-1].prompt == await tokens_of(core, "hello")
