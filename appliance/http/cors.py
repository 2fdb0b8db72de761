"""Pages of other origins: which may use the API, and what browsers ask before they let them.

Keys travel in headers that a page sets itself, so nothing here ever allows credentials.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from functools import lru_cache
from typing import Any, Final, TypeAlias

App: TypeAlias = Callable[..., Awaitable[None]]
"""Of any framework."""
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Any]]
Send: TypeAlias = Callable[[Any], Awaitable[None]]

_THIS_MACHINE: Final = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0")
DEFAULT_ORIGINS: Final = (
    *(f"{scheme}://{host}" for scheme in ("http", "https") for host in _THIS_MACHINE),
    *(f"{scheme}://{host}:*" for scheme in ("http", "https") for host in _THIS_MACHINE),
    *("app://*", "file://*", "tauri://*", "vscode-webview://*", "vscode-file://*"),
)
"""Pages of this machine, and applications whose windows are pages: as Ollama has it."""

_METHODS: Final = "DELETE, GET, HEAD, OPTIONS, POST, PUT"
_NAMES: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~ ,-]{1,4096}")
_EXPOSED: Final = ", ".join(
    (
        *("x-request-id", "request-id", "x-appliance-request", "x-appliance-ignored"),
        *("server-timing", "retry-after", "www-authenticate"),
    )
)
_SECONDS: Final = "600"


def origin_allowed(origin: str, configured: Iterable[str] = ()) -> bool:
    """Whether a page of `origin` may use the API: one of `DEFAULT_ORIGINS`, or of `configured`
    (`api.origins`), in which ``*`` is a part of a host, a port, or, alone, any origin.
    """
    return _allowed(origin, tuple(configured))


@lru_cache(maxsize=256)
def _allowed(origin: str, configured: tuple[str, ...]) -> bool:
    return any(_pattern(one).fullmatch(origin) for one in (*DEFAULT_ORIGINS, *configured))


@lru_cache(maxsize=256)
def _pattern(allowed: str) -> re.Pattern[str]:
    if allowed == "*":
        return re.compile(r".+")
    if allowed.endswith(":*"):
        return re.compile(_with_stars(allowed[:-1]) + r"\d{1,5}", re.IGNORECASE)
    return re.compile(_with_stars(allowed.rstrip("/")), re.IGNORECASE)


def _with_stars(allowed: str) -> str:
    return r"[^/?#@\s]*".join(map(re.escape, allowed.split("*")))


class Cors:
    """An ASGI application around another one, outside of what asks for keys: browsers send no key
    with what they ask first, and a page has to be able to read refusals.

    A page of an origin that is not allowed learns nothing: its browser does not show it the
    answer. Whether it is answered at all without keys is what `appliance.access.auth` decides.
    """

    def __init__(self, app: App, origins: Iterable[str] = ()) -> None:
        self._app = app
        self._origins = tuple(origins)

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        origin = _header(scope["headers"], b"origin") if scope["type"] == "http" else None
        if origin is None:
            await self._app(scope, receive, send)
            return
        allowed = origin_allowed(origin, self._origins)
        if scope["method"] == "OPTIONS" and (
            _header(scope["headers"], b"access-control-request-method") is not None
        ):
            await self._answer(scope, send, origin if allowed else None)
            return

        async def send_allowed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"vary", b"Origin")]
                if allowed:
                    headers.append((b"access-control-allow-origin", origin.encode("latin-1")))
                    headers.append((b"access-control-expose-headers", _EXPOSED.encode()))
                message["headers"] = headers
            await send(message)

        await self._app(scope, receive, send_allowed)

    async def _answer(self, scope: Mapping[str, Any], send: Send, origin: str | None) -> None:
        """What a browser asks before it sends a page's request; `origin` is None if it may not."""
        vary = b"Origin, Access-Control-Request-Headers, Access-Control-Request-Private-Network"
        headers = [(b"vary", vary)]
        if origin is not None:
            headers += [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-allow-methods", _METHODS.encode()),
                (b"access-control-max-age", _SECONDS.encode()),
            ]
            asked = _header(scope["headers"], b"access-control-request-headers")
            if asked is not None and _NAMES.fullmatch(asked):
                headers.append((b"access-control-allow-headers", asked.encode("latin-1")))
            if _header(scope["headers"], b"access-control-request-private-network") == "true":
                headers.append((b"access-control-allow-private-network", b"true"))
        status = 403 if origin is None else 204
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in headers if key.lower() == name), None)
