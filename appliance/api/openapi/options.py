"""Which methods there are at a path: what OPTIONS is answered.

Litestar answers with those of one handler, also where several share a path.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Any

from litestar.enums import ScopeType
from litestar.middleware import ASGIMiddleware
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp, Receive, Scope, Send

from appliance.api.openapi.document import document


class Options(ASGIMiddleware):
    """Answers OPTIONS for every path of the OpenAPI document."""

    scopes = (ScopeType.HTTP,)

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        assert scope["type"] == ScopeType.HTTP  # what `scopes` says
        methods = methods_at(scope["path"]) if scope["method"] == "OPTIONS" else ()
        if not methods:
            await next_app(scope, receive, send)
            return
        allowed = ", ".join(sorted({*methods, "OPTIONS"}))
        answer: Any = ASGIResponse(status_code=204, headers={"allow": allowed})
        await answer(scope, receive, send)


@lru_cache(maxsize=64)
def methods_at(path: str) -> tuple[str, ...]:
    """The methods that are documented for a path; none if it is not in the document."""
    for pattern, methods in _patterns():
        if pattern.fullmatch(path):
            return methods
    return ()


@cache
def _patterns() -> list[tuple[re.Pattern[str], tuple[str, ...]]]:
    """What paths look like; those first of which most is written out. A name may have slashes."""
    found: list[tuple[str, tuple[str, ...]]] = [
        (path, tuple(method.upper() for method in item))
        for path, item in document()["paths"].items()
    ]
    found.sort(key=lambda one: -len(re.sub(r"{\w+}", "", one[0])))
    return [
        (re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(path)), re.DOTALL), methods)
        for path, methods in found
    ]
