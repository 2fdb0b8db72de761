"""The HTTP server of the dashboard: lets people in, gives them its page, joins it to a process."""

from __future__ import annotations

import asyncio
import signal
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import hdrs, web

from tui.connection import UNIX
from tui.web.gate import GateAnswer, KeyGate, KeyVerdict
from tui.web.origins import is_local, is_own
from tui.web.pages import STATIC, harden, login_page, terminal_page
from tui.web.terminal import Terminal
from tui.web.visitors import KEPT_SECONDS, Visitor, Visitors

MOST_DASHBOARDS = 8
FORM = "application/x-www-form-urlencoded"
LONGEST_FORM_BYTES = 4096
LONGEST_MESSAGE_BYTES = 256 * 1024
"""What is pasted is one message."""
HEARTBEAT_SECONDS = 15.0
"""A page that does not answer for half of this after a ping is gone."""
GRACE_SECONDS = 10.0

_OPEN = frozenset({"/", "/login", "/logout"})
_LINK_ONLY = "open the link that `appliance top --web` printed last"
_NO_KEYS = (
    "the daemon has no keys: it is for its own machine only. Configure keys (api.keys), or serve "
    "the dashboard on a loopback address"
)


class CannotListen(Exception):
    """There is no listening at an address; the text says why."""


class Site:
    """The dashboard of the daemon at `url`, as one `aiohttp` application.

    `local`: it can only be reached from this machine. `encrypted`: over HTTPS. With an `own_key`,
    or where `url` is an admin socket, there is a link that lets one browser in with the server's
    own rights; `announce` is called with each new link.
    """

    def __init__(
        self,
        url: str,
        *,
        own_key: str | None = None,
        local: bool = True,
        encrypted: bool = False,
        readonly: bool = False,
        theme: str = "dark",
        announce: Callable[[str], None] = lambda link: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # -P: nothing is imported from the folder in which this was started.
        self._command = [
            *(sys.executable, "-P", "-m", "tui.web.child", url, "--theme", theme),
            *(["--readonly"] if readonly else []),
        ]
        self._gate = None if url.startswith(UNIX) else KeyGate(url)
        self._own_key = own_key
        self._local = local
        self._encrypted = encrypted
        self._announce = announce
        self._clock = clock
        self._visitors = Visitors(clock)

    def runner(self) -> web.AppRunner:
        """Serves it."""
        app = web.Application(middlewares=[self._guard], client_max_size=LONGEST_FORM_BYTES)
        app.add_routes(
            [
                web.get("/", self._front, allow_head=False),
                web.post("/login", self._login),
                web.post("/logout", self._logout),
                web.get("/ws", self._converse, allow_head=False),
                web.get("/download/{name}", self._download, allow_head=False),
                web.static("/static", STATIC),
            ]
        )
        app.on_response_prepare.append(harden)
        app.on_shutdown.append(self._end)
        return web.AppRunner(
            app, access_log=None, shutdown_timeout=GRACE_SECONDS, auto_decompress=False
        )

    # --- who may ---------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """No page of another site gets anything done, whatever its name was made to mean."""
        try:
            _ = request.url
        except ValueError as error:
            raise web.HTTPBadRequest(text="Host: this is no address") from error
        if self._local and not is_local(request.host):
            raise web.HTTPForbidden(text=f"this is for this machine only, not {request.host!r}")
        if request.method == hdrs.METH_POST or hdrs.UPGRADE in request.headers:
            origin = request.headers.get(hdrs.ORIGIN)
            if not is_own(origin, request.host, encrypted=self._encrypted):
                raise web.HTTPForbidden(text=f"no page of {origin or 'nowhere'} is answered")
        if request.path not in _OPEN:
            self._visitor(request)
        return await handler(request)  # type: ignore[no-any-return]

    def _known(self, request: web.Request) -> Visitor | None:
        return self._visitors.find(request.cookies.get(_cookie_name(request), ""))

    def _visitor(self, request: web.Request) -> Visitor:
        if (visitor := self._known(request)) is None:
            raise web.HTTPUnauthorized(text="a dashboard requires an admin key")
        return visitor

    async def _let_in(
        self, request: web.Request, response: web.StreamResponse, key: str | None, by_link: bool
    ) -> None:
        """A browser is one visitor: the visitor that it was before is forgotten."""
        await self._forget(request)
        cookie = self._visitors.admit(key, by_link=by_link)
        response.set_cookie(
            _cookie_name(request), cookie, max_age=int(KEPT_SECONDS), path="/",
            httponly=True, samesite="Strict", secure=self._encrypted,
        )  # fmt: skip

    async def _forget(self, request: web.Request) -> None:
        """The visitor with this cookie is not let in any more, and its open dashboards end."""
        visitor = self._visitors.forget(request.cookies.get(_cookie_name(request), ""))
        if visitor is not None:
            await asyncio.gather(*(one.close() for one in list(visitor.open)))

    async def _ask(self, key: str | None) -> GateAnswer:
        """The daemon's answer to a key, or to a visitor without one."""
        if self._gate is None:
            return GateAnswer(KeyVerdict.REFUSED, _LINK_ONLY)
        without = await self._gate.ask(None)
        if without.verdict is KeyVerdict.ADMITTED and not self._local:
            return GateAnswer(KeyVerdict.REFUSED, _NO_KEYS)
        if without.verdict is not KeyVerdict.REFUSED:
            return without
        return GateAnswer(KeyVerdict.REFUSED) if key is None else await self._gate.ask(key)

    # --- pages -----------------------------------------------------------------------------------

    async def _front(self, request: web.Request) -> web.Response:
        """The dashboard's page, or the way to it."""
        if self._visitors.redeem(request.query.get("link", "")):
            response = web.HTTPSeeOther("/")
            await self._let_in(request, response, self._own_key, by_link=True)
            with suppress(OSError):  # the output for announcements is closed
                self.make_link()
            raise response
        visitor = self._known(request)
        if visitor is not None and visitor.by_link:
            return terminal_page(request)
        answer = await self._ask(None if visitor is None else visitor.key)
        if answer.verdict is KeyVerdict.REFUSED or (visitor is None and answer.why):
            return self._form(request, answer.why)
        page = terminal_page(request)  # of a daemon that is away the dashboard itself says so
        if visitor is None:
            await self._let_in(request, page, None, by_link=False)
        return page

    async def _login(self, request: web.Request) -> web.Response:
        key = (await _fields(request)).get("key", "").strip()
        answer = await self._ask(key)
        if answer.verdict is not KeyVerdict.ADMITTED:
            return self._form(request, answer.why)
        response = web.HTTPSeeOther("/")
        await self._let_in(request, response, key, by_link=False)
        raise response

    async def _logout(self, request: web.Request) -> web.Response:
        await self._forget(request)
        response = web.HTTPSeeOther("/")
        response.del_cookie(_cookie_name(request))
        raise response

    def _form(self, request: web.Request, why: str) -> web.Response:
        return login_page(request, why, takes_key=self._gate is not None)

    # --- dashboards ------------------------------------------------------------------------------

    async def _converse(self, request: web.Request) -> web.StreamResponse:
        """One dashboard, until its page is closed, or its cookie is not valid any more."""
        visitor = self._visitor(request)
        if sum(1 for _ in self._visitors.open()) >= MOST_DASHBOARDS:
            raise web.HTTPServiceUnavailable(text=f"{MOST_DASHBOARDS} dashboards are open already")
        socket = web.WebSocketResponse(
            heartbeat=HEARTBEAT_SECONDS, max_msg_size=LONGEST_MESSAGE_BYTES, compress=False
        )
        terminal = Terminal(self._command, visitor.key, socket)
        visitor.open.add(terminal)
        try:
            await socket.prepare(request)
            if self._known(request) is visitor:  # who did not log out meanwhile
                await terminal.start(_number(request, "width", 80), _number(request, "height", 24))
                async with asyncio.timeout(visitor.until - self._clock()):
                    await terminal.hear()
        except TimeoutError:
            pass
        finally:
            try:
                await terminal.stop()
            finally:
                visitor.open.discard(terminal)
                await terminal.close()
        return socket

    async def _download(self, request: web.Request) -> web.StreamResponse:
        """What a dashboard of this visitor wants saved."""
        name = request.match_info["name"]
        for terminal in list(self._visitor(request).open):
            assert isinstance(terminal, Terminal)
            if (download := await terminal.download(name)) is not None:
                break
        else:
            raise web.HTTPNotFound(text="there is nothing to save by this name")
        response = web.StreamResponse()
        response.content_type = "text/csv"
        response.headers[hdrs.CONTENT_DISPOSITION] = f'attachment; filename="{download.file_name}"'
        await response.prepare(request)
        async for piece in terminal.pieces(name):
            await response.write(piece)
        await response.write_eof()
        return response

    # --- the server's life -----------------------------------------------------------------------

    def make_link(self) -> None:
        """Announce a link, if who serves has rights to give."""
        if self._gate is None or self._own_key is not None:
            self._announce(f"?link={self._visitors.link()}")

    async def _end(self, app: web.Application) -> None:
        await asyncio.gather(*(one.close() for one in self._visitors.open()))
        if self._gate is not None:
            await self._gate.close()


async def serve(
    site: Site, host: str, port: int, tls: ssl.SSLContext | None, opened: Callable[[int], None]
) -> None:
    """Until a signal ends it; `opened` is called with the port. Raises `CannotListen`."""
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has it
            loop.add_signal_handler(number, over.set)
    runner = site.runner()
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, ssl_context=tls).start()
        except OSError as error:
            raise CannotListen(error.strerror or str(error)) from error
        opened(runner.addresses[0][1])
        site.make_link()
        await over.wait()
    finally:
        await runner.cleanup()


def _cookie_name(request: web.Request) -> str:
    """Browsers send the cookies of a host to all of its ports."""
    return f"appliance-{request.url.port}"


async def _fields(request: web.Request) -> dict[str, str]:
    """Of a form, as our page sends it. Raises `HTTPBadRequest` for any other, and
    `HTTPRequestEntityTooLarge`."""
    if request.content_type != FORM or (request.charset or "utf-8").lower() != "utf-8":
        raise web.HTTPBadRequest(text=f"Content-Type: expected {FORM} in UTF-8")
    if hdrs.CONTENT_ENCODING in request.headers:
        raise web.HTTPBadRequest(text="Content-Encoding: expected none")
    try:
        return dict(parse_qsl((await request.read()).decode(), errors="strict"))
    except (ValueError, ConnectionError) as error:
        raise web.HTTPBadRequest(text="this is no form in UTF-8") from error


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 6 else default
