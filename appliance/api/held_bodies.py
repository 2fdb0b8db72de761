"""Bodies of requests that the core itself answers: bounded, as those of front ends are."""

from __future__ import annotations

from typing import Final

from litestar.enums import ScopeType
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Receive, Scope, Send

from appliance.access.auth import current
from appliance.http.body_budget import BodyBudget

UPLOADS: Final = "/v1/files"
"""Goes to the disk as it comes."""


class HeldBodies(ASGIMiddleware):
    """Counts the body of each request until it is answered."""

    scopes = (ScopeType.HTTP,)

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        assert scope["type"] == ScopeType.HTTP  # what `scopes` says
        if scope["path_template"] == UPLOADS:
            await next_app(scope, receive, send)
            return
        key = current.get().key
        with self._budget.hold(None if key is None else key.name, scope) as body:
            await next_app(scope, body.receiving(receive), send)
