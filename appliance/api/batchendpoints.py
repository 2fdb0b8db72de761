"""The endpoints whose requests a batch may hold: how each answers one, as work of the class batch.

A request of a batch is decoded, planned, generated and worded by what HTTP uses.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import msgspec

from appliance.api.choices import Choices
from appliance.api.embeddings import embeddings_answer, plan_embeddings
from appliance.api.errors import BadRequest
from appliance.api.openai import prepare_chat, prepare_completion
from appliance.api.plan import Plan, off_loop
from appliance.api.pooled import UNDER_WAY, pool_all
from appliance.api.replies import Dialect
from appliance.api.service import Service, SubmitRequest
from appliance.api.stream import whole_answer
from appliance.batches.room import Room
from appliance.vocabulary import RequestClass

Answer: TypeAlias = Callable[[bytes], Awaitable[bytes]]
"""From the body of a request to that of its answer. Raises what the endpoint raises."""

_Prepare: TypeAlias = Callable[[bytes, Service], Awaitable[tuple[Plan, Dialect]]]


def batch_endpoints(service: Service, room: Room) -> dict[str, Answer]:
    """What batches may be made for, by path. All their sequences together have `room`."""
    return {
        "/v1/chat/completions": _generated(prepare_chat, service, room),
        "/v1/completions": _generated(prepare_completion, service, room),
        "/v1/embeddings": _embedded(service, room),
    }


def _generated(prepare: _Prepare, service: Service, room: Room) -> Answer:
    async def answer(body: bytes) -> bytes:
        plan, dialect = await prepare(body, service)
        try:
            if plan.stream:
                raise BadRequest("stream: a batch has no streams", "stream")
            choices = tuple(_as_batch(choice) for choice in plan.choices)
            plan = msgspec.structs.replace(plan, choices=choices)
            async with room.taken(len(choices)):
                return await whole_answer(Choices.submit(plan, service), dialect)
        finally:
            if plan.interpretation is not None:
                plan.interpretation.end()

    return answer


def _embedded(service: Service, room: Room) -> Answer:
    async def answer(body: bytes) -> bytes:
        plan = await plan_embeddings(body, service)
        requests = [_as_batch(request) for request in plan.requests]
        at_once = min(len(requests), UNDER_WAY, room.size)
        async with room.taken(at_once):
            pooled = await pool_all(requests, service, at_once)
        elements = sum(map(len, pooled.vectors))
        return await off_loop(
            elements, lambda: msgspec.json.encode(embeddings_answer(plan, pooled))
        )

    return answer


def _as_batch(request: SubmitRequest) -> SubmitRequest:
    """The same as work that nobody waits for."""
    return msgspec.structs.replace(request, request_class=RequestClass.BATCH)
