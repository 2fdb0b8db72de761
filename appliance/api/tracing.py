"""Where a request was asked and which trace it is part of, for those who trace it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

from litestar.datastructures import Headers
from litestar.enums import ScopeType
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Receive, Scope, Send

from appliance.api.service import Trace

LONGEST: Final = 256
"""Characters of a ``traceparent`` that is looked at; those of today have 55."""

current: ContextVar[Trace | None] = ContextVar("trace", default=None)
"""Of the request that is answered."""


class Tracing(ASGIMiddleware):
    """Remembers what a trace needs to know of a request."""

    scopes = (ScopeType.HTTP,)

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        assert scope["type"] == ScopeType.HTTP  # what `scopes` says
        parent = Headers.from_scope(scope).get("traceparent", "")
        path = scope["path_template"]
        known = current.set(Trace(path=path, parent=parent if len(parent) <= LONGEST else ""))
        try:
            await next_app(scope, receive, send)
        finally:
            current.reset(known)
