"""The endpoints of an admin who looks at policies, chooses others, and goes back."""

from __future__ import annotations

from typing import Any

from litestar import Request, get, post, put
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from appliance.http.bodies import parse
from appliance.http.json import json_answer
from appliance.service.interface import Service
from appliance.service.policy_report import PolicyChoice


def policy_routes(service: Service) -> list[HTTPRouteHandler]:
    """Each answers what is the case afterwards."""

    @get("/api/policies", operation_id="policies")
    async def policies() -> ASGIResponse:
        return await report()

    @put("/api/policies", operation_id="setPolicy")
    async def set_policy(request: Request[Any, Any, Any]) -> ASGIResponse:
        await service.set_policy(parse(await request.body(), PolicyChoice))
        return await report()

    @post("/api/policies/rollback", status_code=200, operation_id="rollbackPolicy")
    async def rollback() -> ASGIResponse:
        await service.rollback_policy()
        return await report()

    @post("/api/policies/{name:str}/enable", status_code=200, operation_id="enablePolicy")
    async def enable(name: FromPath[str]) -> ASGIResponse:
        service.enable_policy(name)
        return await report()

    async def report() -> ASGIResponse:
        return json_answer(await service.policies())

    return [policies, set_policy, rollback, enable]
