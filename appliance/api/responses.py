"""What the core answers about responses that are stored: ``/v1/responses/{id}``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from litestar import Request, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from appliance.access.auth import current
from appliance.api.admin.events import KEEP_ALIVE, WatchResponse
from appliance.gateway.responses import StoredResponse, StoredResponses
from appliance.http.errors import ApiError, BadRequest
from appliance.http.json import json_answer
from appliance.http.paging import query_of

_BOOLEANS: Final = {"true": True, "1": True, "false": False, "0": False}


class _Deleted(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True


def response_routes(
    responses: StoredResponses, keep_alive_seconds: float
) -> list[HTTPRouteHandler]:
    """Clients see those of their own key. Front ends make and store them."""

    @get("/v1/responses/{id:str}", operation_id="getResponse")
    async def retrieve(request: Request[Any, Any, Any], id: FromPath[str]) -> ASGIResponse:
        response = _own(responses, id)
        query = query_of(request, {"stream", "starting_after", "include", "include_obfuscation"})
        streams, start = _streams(query.get("stream")), _start(query.get("starting_after"))
        if not streams:
            return ASGIResponse(body=response.answer, media_type="application/json")
        if not response.has_events:
            raise BadRequest(
                "stream: only a response that was made with background and stream", "stream"
            )
        return WatchResponse(_sent(response, start, keep_alive_seconds))

    @delete("/v1/responses/{id:str}", status_code=200, operation_id="deleteResponse")
    async def remove(id: FromPath[str]) -> ASGIResponse:
        response = _own(responses, id)
        if response.cancel is not None:
            response.cancel()
        responses.remove(response)
        return json_answer(_Deleted(response.id))

    @post("/v1/responses/{id:str}/cancel", status_code=200, operation_id="cancelResponse")
    async def cancel(id: FromPath[str]) -> ASGIResponse:
        response = _own(responses, id)
        if response.cancel is None or response.is_finished:
            raise BadRequest("Cannot cancel a synchronous response.", "response_id")
        response.cancel()
        return ASGIResponse(body=response.answer, media_type="application/json")

    return [retrieve, remove, cancel]


def _own(responses: StoredResponses, id: str) -> StoredResponse:
    response = responses.find(current.get().owner, id)
    if response is None:
        message = f"Response with id '{id[:100]}' not found."
        raise ApiError(404, message, param="id", code="not_found")
    return response


def _streams(stream: str | None) -> bool:
    """Whether its events are wanted."""
    if stream is None:
        return False
    if (value := stream.lower()) not in _BOOLEANS:
        raise BadRequest("stream: has to be true or false", "stream")
    return _BOOLEANS[value]


def _start(after: str | None) -> int:
    """The number of the first event that is wanted."""
    if after is None:
        return 0
    if not (after.isascii() and after.isdigit() and len(after) < 20):
        raise BadRequest("starting_after: has to be the number of an event", "starting_after")
    return int(after) + 1


async def _sent(
    response: StoredResponse, start: int, keep_alive_seconds: float
) -> AsyncIterator[bytes]:
    async for event in response.events(start, keep_alive_seconds):
        yield KEEP_ALIVE if event is None else event
