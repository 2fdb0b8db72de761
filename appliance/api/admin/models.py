"""The endpoints of an admin who looks after models: where they are, whether they take requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from litestar import Request, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from appliance.access.auth import current
from appliance.api.admin.catalog import NewAdapter
from appliance.api.admin.model_files import OfferedModels, names_files
from appliance.errors import alternatives
from appliance.http.bodies import parse
from appliance.http.errors import ApiError
from appliance.http.json import json_answer
from appliance.service.interface import ModelNotFound, Service
from appliance.service.settings import Settings


def model_admin_routes(service: Service, settings: Settings | None) -> list[HTTPRouteHandler]:
    """A model's name may have slashes, so what is to be done is the last part of the path. Each
    answers what is the case afterwards. A pin lasts, so it needs `settings`."""
    verbs: dict[str, Callable[[str], None]] = {
        "load": lambda name: service.load_model(name),
        "evict": lambda name: service.evict_model(name),
        "drain": lambda name: service.drain_model(name, True),
        "resume": lambda name: service.drain_model(name, False),
    }
    lasting: dict[str, Callable[[str], Awaitable[None]]] = {}
    if settings is not None:
        lasting["pin"] = lambda name: settings.change_model(name, {"pin": True})
        lasting["unpin"] = lambda name: settings.change_model(name, {"pin": False})

    files = OfferedModels(service)

    @get("/api/models", operation_id="modelActivities")
    async def models() -> ASGIResponse:
        return json_answer({"models": service.activity().models})

    @get("/api/models/{name:path}", operation_id="modelActivity")
    async def model(request: Request[Any, Any, Any], name: FromPath[str]) -> ASGIResponse:
        name = name.removeprefix("/")
        try:
            activity = service.model_activity(name)
        except ModelNotFound:
            knows = current.get().allows(name)
            removal = settings.removal(name) if settings is not None and knows else None
            if removal is None and names_files(name):
                return await files.answer(request, name)
            if removal is None:
                raise
            activity = removal
        return json_answer(activity)

    @post("/api/models/{target:path}", status_code=200, operation_id="changeModel")
    async def change(request: Request[Any, Any, Any], target: FromPath[str]) -> ASGIResponse:
        name, _, verb = target.removeprefix("/").rpartition("/")
        if name and verb == "adapters" and settings is not None:
            new = parse(await request.body(), NewAdapter)
            service.model_activity(name)  # the key may not know it
            await settings.add_adapter(name, new.name, new.path)
            return json_answer(service.model_activity(name))
        if not name or verb not in (*verbs, *lasting):
            message = f"POST /api/models/NAME/... ends with {alternatives((*verbs, *lasting))}"
            raise ApiError(404, message, code="not_found")
        service.model_activity(name)  # the key may not know it
        if verb in lasting:
            await lasting[verb](name)
        else:
            verbs[verb](name)
        return json_answer(service.model_activity(name))

    return [models, model, change]
