"""The endpoints of an admin who looks at the configuration, reloads it, and sets models' limits."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import msgspec
from litestar import Request, get, post, put
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from appliance.http.bodies import parse
from appliance.http.errors import ApiError
from appliance.http.json import json_answer
from appliance.platform import logs
from appliance.service.interface import Watch
from appliance.service.settings import Settings


class _Strict(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    pass


class SloChange(_Strict, kw_only=True):
    """Durations as the configuration has them; what is left out stays."""

    ttft: str | msgspec.UnsetType = msgspec.UNSET
    tbt: str | msgspec.UnsetType = msgspec.UNSET
    gap: str | msgspec.UnsetType = msgspec.UNSET


class ModelLimits(_Strict, kw_only=True):
    """The body of ``PUT /api/models/NAME/limits``; what is left out stays."""

    slo: SloChange | msgspec.UnsetType = msgspec.UNSET
    batch_slo: SloChange | msgspec.UnsetType = msgspec.UNSET
    max_queue: Annotated[int, msgspec.Meta(ge=1)] | msgspec.UnsetType = msgspec.UNSET


class LogLevel(_Strict, kw_only=True):
    """The body of ``PUT /api/log-level``."""

    level: logs.LogLevel


def config_routes(service: Watch, settings: Settings) -> list[HTTPRouteHandler]:
    """What is changed here is there after a restart, too, but for the log's level."""

    @get("/api/config", operation_id="config")
    async def config() -> ASGIResponse:
        return json_answer(settings.in_force())

    @post("/api/config/check", status_code=200, operation_id="checkConfig")
    async def check() -> ASGIResponse:
        return json_answer(await settings.check())

    @post("/api/config/reload", status_code=200, operation_id="reloadConfig")
    async def reload() -> ASGIResponse:
        return json_answer(await settings.reload())

    @put("/api/models/{target:path}", operation_id="limitModel")
    async def limit(request: Request[Any, Any, Any], target: FromPath[str]) -> ASGIResponse:
        name, _, what = target.removeprefix("/").rpartition("/")
        if what != "limits" or not name:
            raise ApiError(404, "PUT /api/models/NAME/... ends with limits", code="not_found")
        limits = parse(await request.body(), ModelLimits)
        service.model_activity(name)  # the key may not know it
        await settings.change_model(name, msgspec.to_builtins(limits))
        return json_answer(service.model_activity(name))

    return [config, check, reload, limit]


def log_routes() -> list[HTTPRouteHandler]:
    """The level of the appliance's own log, until the daemon ends."""

    @get("/api/log-level", operation_id="logLevel")
    async def level() -> ASGIResponse:
        return shown()

    @put("/api/log-level", operation_id="setLogLevel")
    async def set_level(request: Request[Any, Any, Any]) -> ASGIResponse:
        logs.set_level(parse(await request.body(), LogLevel).level)
        return shown()

    def shown() -> ASGIResponse:
        number = logging.getLogger(logs.LOGGER).getEffectiveLevel()
        return json_answer({"level": logging.getLevelName(number).lower()})

    return [level, set_level]
