"""Responses that clients may ask for again: vLLM's stores of them, over the core's.

vLLM keeps responses in dicts of each model's serving object, for ever and for all clients. Here
such a dict has what belongs to the call at hand; what a later call may need is stored by the core,
so that it outlives this process, is known to all front ends, and to one key alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, MutableMapping
from typing import Any

import msgspec
from openai_harmony import Message
from pydantic_core import to_json
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse

from appliance.frontend.calls import Call, current
from appliance.frontend.core import Core
from appliance.service.front_frames import UNFINISHED, KeepEvent, KeepResponse

log = logging.getLogger(__name__)


class _OfCall(MutableMapping[str, Any]):
    """One of vLLM's dicts by a response's id, with the entries of the call at hand."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def _entries(self) -> dict[str, Any]:
        return current.get().stored.setdefault(self._kind, {})

    def __getitem__(self, response: str) -> Any:
        return self._entries()[response]

    def __setitem__(self, response: str, value: Any) -> None:
        self._entries()[response] = value

    def __delitem__(self, response: str) -> None:
        del self._entries()[response]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries())

    def __len__(self) -> int:
        return len(self._entries())


class _Responses(_OfCall):
    """Those are stored by the core at once: the client may ask for one as soon as it has it."""

    def __init__(self, core: Core, messages: _OfCall) -> None:
        super().__init__("responses")
        self._core = core
        self._messages = messages

    def __setitem__(self, response: str, value: Any) -> None:
        super().__setitem__(response, value)
        self.keep(response)

    def keep(self, response: str) -> None:
        """Store a response of the call as it is now."""
        value = self[response]
        answer = to_json(value.model_dump(mode="json", by_alias=True))
        try:
            messages = to_json(self._messages.get(response, []))
        except ValueError as error:  # some content that is not JSON
            log.warning("a response is not stored: %s", error)
            return
        self._core.send(
            KeepResponse(
                call=current.get().number,
                response=response,
                answer=answer,
                messages=messages,
                background=value.status in UNFINISHED,
            )
        )


class _Background(_OfCall):
    """Tasks of responses that are made after their answer; their calls last as long."""

    def __init__(self, responses: _Responses) -> None:
        super().__init__("tasks")
        self._responses = responses

    def __setitem__(self, response: str, task: Any) -> None:
        super().__setitem__(response, task)
        task.add_done_callback(lambda task: self._made(response, task))
        current.get().background.add(task)

    def _made(self, response: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("a response in the background failed: %s", error)  # the core says so of it
        elif self._responses[response].status == "failed":  # vLLM changed it where it lies
            self._responses.keep(response)


def serve(serving: Any, core: Core) -> None:
    """Have a model's serving object keep its responses in the core; None: it makes none."""
    if serving is None:
        return
    serving.msg_store = _OfCall("messages")
    serving.response_store = _Responses(core, serving.msg_store)
    serving.event_store = _OfCall("events")
    serving.background_tasks = _Background(serving.response_store)
    events = _OfCall("streams")
    make = serving.responses_stream_generator

    def streamed(request: Any, *args: Any, **settings: Any) -> AsyncIterator[Any]:
        made = make(request, *args, **settings)
        return stored(request.request_id, made) if request.background else made

    async def stored(response: str, made: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The events of a response that is made in the background."""
        queue = events.setdefault(response, asyncio.Queue())
        try:
            async for event in made:
                core.send(KeepEvent(current.get().number, _sent(event)))
                queue.put_nowait(event)
                yield event
        finally:
            queue.put_nowait(None)

    async def answered(response: str) -> AsyncIterator[Any]:
        """The same for the client that asked for it. vLLM's never ends when they end early."""
        queue = events.setdefault(response, asyncio.Queue())
        while (event := await queue.get()) is not None:
            yield event

    serving.responses_stream_generator = streamed
    serving.responses_background_stream_generator = answered


def _sent(event: Any) -> bytes:
    data = event.model_dump_json(indent=None, by_alias=True).encode()
    return b"event: %s\ndata: %s\n\n" % (event.type.encode(), data)


async def recall(call: Call, core: Core, serving: Any, response: str) -> bool:
    """Have vLLM find a stored response that a request of the call goes on from. False: the key of
    the call has none of this name. Raises `CallRefused` when the core is gone."""
    found = await core.find_response(call, response)
    if found.answer is None or found.messages is None:
        return False
    messages = msgspec.json.decode(found.messages)
    if serving.use_harmony:
        messages = [Message.from_dict(message) for message in messages]
    call.stored.setdefault("responses", {})[response] = ResponsesResponse.model_validate_json(
        found.answer
    )
    call.stored.setdefault("messages", {})[response] = messages
    return True
