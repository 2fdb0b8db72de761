"""The stream of one request: what is pushed comes out, in order, whenever the client looks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.api.service import GenerationFailed, SubmitRequest
from appliance.engines.protocol import Produced, Sampling
from appliance.generation import RequestStream
from appliance.vocabulary import FinishReason, RequestId, Slo


def stream_of(cancelled: list[RequestId] | None = None) -> RequestStream:
    request = SubmitRequest(
        id="r", model="a", prompt=(1, 2, 3), sampling=Sampling(max_tokens=9, seed=7)
    )
    heard = [] if cancelled is None else cancelled
    return RequestStream(request, 12.5, heard.append, lambda *_: None)


def token(number: int, finished: FinishReason | None = None) -> Produced:
    return Produced(request="r", token=number, finished=finished)


async def rest(batches: AsyncIterator[list[Produced]]) -> list[int]:
    return [produced.token async for batch in batches for produced in batch]


async def test_tokens_come_in_batches() -> None:
    """Whatever came since the client last looked comes at once."""
    stream = stream_of()
    batches = aiter(stream)
    stream.push(token(1))
    stream.push(token(2))

    assert [produced.token for produced in await anext(batches)] == [1, 2]
    stream.push(token(3))
    assert [produced.token for produced in await anext(batches)] == [3]


async def test_a_client_that_waits_is_woken() -> None:
    """A client that is there before its first token gets it when it comes."""
    stream = stream_of()
    waiting = asyncio.ensure_future(anext(aiter(stream)))
    await asyncio.sleep(0)
    assert not waiting.done()

    stream.push(token(1))

    assert await waiting == [token(1)]


async def test_the_end_comes_after_the_last_token() -> None:
    """What was pushed before the end is not lost, even if the client was busy meanwhile."""
    stream = stream_of()
    batches = aiter(stream)
    stream.push(token(1))
    await anext(batches)

    stream.push(token(2))
    stream.push(token(3, FinishReason.STOP))
    stream.end()

    assert await rest(batches) == [2, 3]


async def test_a_failure_comes_after_the_last_token() -> None:
    """The client gets what there is, then hears why there is no more."""
    stream = stream_of()
    batches = aiter(stream)
    stream.push(token(1))
    await anext(batches)
    stream.push(token(2))
    stream.end(GenerationFailed("model_failed", "it broke", 500))

    assert [produced.token for produced in await anext(batches)] == [2]
    with pytest.raises(GenerationFailed, match="it broke"):
        await anext(batches)


@settings(deadline=None)
@given(steps=st.lists(st.booleans(), max_size=20))
async def test_nothing_is_lost_and_nothing_comes_twice(steps: list[bool]) -> None:
    """Pushing and reading in any interleaving, the client gets every token once, in order."""
    stream = stream_of()
    batches = aiter(stream)
    got: list[int] = []
    pushed = 0
    for push in steps:
        if push:
            stream.push(token(pushed))
            pushed += 1
        elif len(got) < pushed:
            got += [produced.token for produced in await anext(batches)]
    stream.end()

    assert got + await rest(batches) == list(range(pushed))


async def test_cancelling_is_told_once_it_matters() -> None:
    """The daemon hears of a client that left, and why, but not after the end."""
    cancelled: list[RequestId] = []
    stream = stream_of(cancelled)

    stream.cancel(FinishReason.STOP)
    assert (cancelled, stream.cancel_reason) == (["r"], FinishReason.STOP)
    stream.end()
    stream.cancel(FinishReason.CANCELLED)

    assert (cancelled, stream.cancel_reason) == (["r"], FinishReason.STOP)


async def test_a_request_can_be_continued_elsewhere() -> None:
    """The sequence for a worker has every token so far, read by the client or not."""
    stream = stream_of()
    assert stream.sequence().output == ()
    batches = aiter(stream)
    stream.push(token(5))
    await anext(batches)
    stream.push(token(6))

    sequence = stream.sequence()

    assert (sequence.request, sequence.model, sequence.prompt) == ("r", "a", (1, 2, 3))
    assert sequence.output == (5, 6)
    assert sequence.sampling == stream.request.sampling


async def test_a_client_that_was_quick_waits_again() -> None:
    """After a token that came while the client was busy there is nothing until the next one."""
    stream = stream_of()
    batches = aiter(stream)
    stream.push(token(1))
    await anext(batches)
    stream.push(token(2))
    await anext(batches)
    waiting = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    assert not waiting.done()

    stream.push(token(3))

    assert await waiting == [token(3)]


def test_who_reads_is_told_when_it_changes() -> None:
    """And of a stream that has ended nothing is."""
    heard: list[tuple[RequestId, bool]] = []
    request = SubmitRequest(id="r", model="a", prompt=(1,), sampling=Sampling(max_tokens=9))
    stream = RequestStream(request, 10.0, lambda _: None, lambda *said: heard.append(said))
    for reads in (True, False, False, True, True):
        stream.reader(reads=reads)
    stream.end()
    stream.reader(reads=False)

    assert heard == [("r", False), ("r", True)]


def test_what_is_excused_is_not_late() -> None:
    """Tokens are due so much later, and take as long as without the pause."""
    request = SubmitRequest(id="r", model="a", prompt=(1,), sampling=Sampling(max_tokens=9))
    slo = Slo(ttft_seconds=2.0, tbt_seconds=0.5)
    stream = RequestStream(request, 10.0, lambda _: None, lambda *_: None, slo)
    stream.push(token(1))
    assert (stream.due(), stream.decode_seconds()) == (12.5, 0.0)
    stream.first, stream.newest = 11.0, 14.0

    stream.excuse(100.0)

    assert (stream.due(), stream.newest) == (112.5, 114.0)
    assert stream.decode_seconds() == 3.0
