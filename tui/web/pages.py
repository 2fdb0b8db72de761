"""What a browser is given: pages, and how little each may do."""

from __future__ import annotations

import secrets
from pathlib import Path

import jinja2
import textual_serve
from aiohttp import hdrs, web

STATIC = Path(textual_serve.__file__).parent / "static"
"""The browser's half: a terminal (xterm.js) and its font."""

_HEADERS = {
    "Referrer-Policy": "same-origin",  # not `no-referrer`: forms would come from the origin "null"
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_POLICY = (
    "default-src 'none'; script-src 'self' 'nonce-{nonce}'; style-src 'self' 'unsafe-inline'; "
    "font-src 'self'; img-src 'self' data:; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
"""Nothing from other hosts. The terminal writes styles for its colours into the page."""

_NONCE = web.RequestKey("nonce", str)
_PAGES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True
)


def terminal_page(request: web.Request) -> web.Response:
    """The terminal in which a dashboard is shown."""
    return _page(request, "terminal.html", 200)


def login_page(request: web.Request, why: str, *, takes_key: bool) -> web.Response:
    """Where a key is asked for, if one `takes_key` here; `why` is what was wrong with the last."""
    return _page(request, "login.html", 401, why=why, takes_key=takes_key)


async def harden(request: web.Request, response: web.StreamResponse) -> None:
    """Before any answer is sent."""
    response.headers.update(_HEADERS)
    response.headers["Content-Security-Policy"] = _POLICY.format(nonce=_nonce(request))
    kept = request.path.startswith("/static/")
    response.headers[hdrs.CACHE_CONTROL] = "private, no-cache" if kept else "no-store"


def _page(request: web.Request, name: str, status: int, **words: object) -> web.Response:
    text = _PAGES.get_template(name).render(nonce=_nonce(request), **words)
    return web.Response(text=text, status=status, content_type="text/html")


def _nonce(request: web.Request) -> str:
    """Allows the scripts that stand in this page."""
    if _NONCE not in request:
        request[_NONCE] = secrets.token_urlsafe(16)
    return request[_NONCE]
