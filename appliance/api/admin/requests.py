"""The endpoints of an admin who looks at live requests, asks why they wait, and ends them."""

from __future__ import annotations

from collections.abc import Callable

from litestar import delete, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from appliance.http.json import json_answer
from appliance.service.front_frames import BodyActivity
from appliance.service.interface import Service


def request_routes(
    service: Service, bodies: Callable[[], list[BodyActivity]]
) -> list[HTTPRouteHandler]:
    """Requests are known by the id that their clients are given. `bodies` are those that are still
    coming in: what they ask is not known yet."""

    @get("/api/requests", operation_id="requests")
    async def requests() -> ASGIResponse:
        return json_answer({"requests": service.requests(), "bodies": bodies()})

    @get("/api/requests/{name:str}", operation_id="request")
    async def request(name: FromPath[str]) -> ASGIResponse:
        return json_answer(service.request(name))

    @delete("/api/requests/{name:str}", status_code=200, operation_id="cancelRequest")
    async def cancel(name: FromPath[str]) -> ASGIResponse:
        found = service.request(name)
        service.cancel_request(name)
        return json_answer({"cancelled": found})

    return [requests, request, cancel]
