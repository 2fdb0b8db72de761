"""The ASGI application: routes, error shapes and limits put together."""

from __future__ import annotations

import uuid

from litestar import Litestar
from litestar.datastructures import Headers, MutableScopeHeaders
from litestar.types import Message, Scope

from appliance.api.errors import EXCEPTION_HANDLERS
from appliance.api.openai import generation_routes, model_routes, operator_routes
from appliance.api.policies import policy_routes
from appliance.api.service import Service

KEEP_ALIVE_SECONDS = 5.0
MAX_BODY_BYTES = 8 * 1024 * 1024
_MAX_REQUEST_ID = 128


def create_app(
    service: Service,
    *,
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Litestar:
    """The API in front of `service`, for any ASGI server.

    While an open stream has nothing to say, a comment goes out every `keep_alive_seconds`.
    """
    return Litestar(
        route_handlers=[
            *generation_routes(service, keep_alive_seconds),
            *model_routes(service),
            *operator_routes(service),
            *policy_routes(service),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
        before_send=[_name_request],
        request_max_body_size=max_body_bytes,
        logging_config=None,
        openapi_config=None,  # the dialect is documented by OpenAI; ours would say less
    )


async def _name_request(message: Message, scope: Scope) -> None:
    """Give the answer the client's ``x-request-id``, or one of our own."""
    if message["type"] != "http.response.start":
        return
    name = Headers.from_scope(scope).get("x-request-id", "")
    if not (name.isascii() and name.isprintable() and 0 < len(name) <= _MAX_REQUEST_ID):
        name = uuid.uuid4().hex
    MutableScopeHeaders.from_message(message)["x-request-id"] = name
