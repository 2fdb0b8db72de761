"""The endpoints of an admin who looks at instances and memory, takes instances out of service, and
back."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Request, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from appliance.http.bodies import parse
from appliance.http.errors import BadRequest
from appliance.http.json import json_answer
from appliance.service.interface import InstanceActivity, InstanceNotFound, Service


class QuarantineReason(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /api/instances/NUMBER/quarantine``."""

    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] = "an operator said so"


def instance_routes(service: Service) -> list[HTTPRouteHandler]:
    """Each answers what is the case afterwards."""

    @get("/api/instances", operation_id="instances")
    async def instances() -> ASGIResponse:
        return json_answer({"instances": service.activity().instances})

    @get("/api/instances/{name:str}", operation_id="instance")
    async def instance(name: FromPath[str]) -> ASGIResponse:
        return json_answer(_found(service, name))

    @post("/api/instances/{name:str}/quarantine", status_code=200, operation_id="quarantine")
    async def quarantine(request: Request[Any, Any, Any], name: FromPath[str]) -> ASGIResponse:
        asked = parse(await request.body(), QuarantineReason)
        if not asked.reason.isprintable():  # it is shown in terminals, and is a line of the log
            raise BadRequest("reason: control characters are refused; give one line", "reason")
        service.quarantine_instance(_found(service, name).instance, asked.reason)
        return json_answer(_found(service, name))

    @post("/api/instances/{name:str}/release", status_code=200, operation_id="release")
    async def release(name: FromPath[str]) -> ASGIResponse:
        service.release_instance(_found(service, name).instance)
        return json_answer(_found(service, name))

    @get("/api/instances/{name:str}/slabs", operation_id="poolMap")
    async def pool_map(name: FromPath[str]) -> ASGIResponse:
        return json_answer(await service.pool_map(_found(service, name).instance))

    @get("/api/host/slabs", operation_id="hostMap")
    async def host_map() -> ASGIResponse:
        return json_answer(service.host_map())

    return [instances, instance, quarantine, release, pool_map, host_map]


def _found(service: Service, name: str) -> InstanceActivity:
    """The instance of this number. Raises `InstanceNotFound`."""
    for instance in service.activity().instances:
        if str(instance.instance) == name:
            return instance
    raise InstanceNotFound(name)
