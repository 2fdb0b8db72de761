"""The dashboard in a browser: who is let in, and what they then see and can do."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import re
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web
from click.testing import CliRunner

from appliance.access.auth import Access
from appliance.access.keys import Key, KeyFile, KeyRing, Scope, digest
from appliance.api.app import create_app
from appliance.cli.main import cli
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.certificates import certify
from tests.unit.doubles.daemon import Box, box_maker
from tests.unit.doubles.serving import served
from tui.web.gate import KeyGate, KeyVerdict
from tui.web.origins import is_local, is_own
from tui.web.server import FORM, Site, serve
from tui.web.visitors import KEPT_SECONDS, MOST, Visitors

pytestmark = pytest.mark.thorough

ESCAPE = re.compile(r"\x1b(\[[0-9;:?<>=]*[ -/]*[@-~]|[()].|[=>78])")
OPERATOR, CHATTER = "sk-operator", "sk-chatter"


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Browser:
    """One that shows pages of a `Site`, and keeps its cookies."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self.session = session
        self.address = address

    async def get(self, path: str = "/", **headers: str) -> tuple[int, str]:
        async with self.session.get(self.address + path, headers=headers) as answer:
            return answer.status, await answer.text(errors="replace")

    async def post(self, path: str, origin: str | None = "", **fields: str) -> tuple[int, str]:
        """A form; `origin` is the page's own if it is "", and is not told if it is None."""
        headers = {} if origin is None else {"origin": origin or self.address}
        async with self.session.post(self.address + path, data=fields, headers=headers) as answer:
            return answer.status, await answer.text(errors="replace")

    @asynccontextmanager
    async def page(
        self, origin: str = "", size: str = "width=100&height=30"
    ) -> AsyncIterator[Page]:
        async with self.session.ws_connect(
            f"{self.address}/ws?{size}", headers={"origin": origin or self.address}
        ) as socket:
            yield Page(socket)

    async def refused(self, **options: Any) -> int:
        """The status with which no page's WebSocket is opened."""
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            async with self.page(**options):
                pass
        return refusal.value.status


class Page:
    """What is written into a page's terminal, and typed there."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.seen = ""
        self.told: list[Any] = []

    async def sees(self, *words: str) -> None:
        """Wait until all of this was written since this was last asked."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not all(word in self.seen for word in words):
                self._take(await self.socket.receive())
        self.seen = ""

    def _take(self, message: aiohttp.WSMessage) -> None:
        if message.type is aiohttp.WSMsgType.TEXT:
            self.told.append(json.loads(message.data))
        else:
            assert message.type is aiohttp.WSMsgType.BINARY, f"it ended: {self.seen}"
            self.seen += ESCAPE.sub("", message.data.decode())

    async def type(self, text: str) -> None:
        await self.say("stdin", text)

    async def say(self, *words: Any) -> None:
        await self.socket.send_json(words)

    async def offered(self) -> str:
        """The name by which something is to be fetched that the dashboard wants saved."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not self.told:
                self._take(await self.socket.receive())
        ((kind, name),) = self.told
        assert kind == "deliver_file_start"
        return str(name)

    async def ends(self) -> None:
        """Wait until it is closed from the other side."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await self.socket.receive()).type in (
                aiohttp.WSMsgType.BINARY,
                aiohttp.WSMsgType.TEXT,
            ):
                pass


@asynccontextmanager
async def browsing(url: str, **options: Any) -> AsyncIterator[Browser]:
    """A browser without cookies, and the dashboard of the daemon at `url`."""
    site = Site(url, **options)
    runner = site.runner()
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        site.make_link()
        jar = aiohttp.CookieJar(unsafe=True)  # cookies of an address, not only of a name
        async with aiohttp.ClientSession(cookie_jar=jar) as session:
            yield Browser(session, f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


@pytest.fixture
async def box(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Box]:
    with box_maker(monkeypatch, slabs=20) as make_box:
        box = make_box()
        box.start()
        yield box


@pytest.fixture
async def url(box: Box, tmp_path: Path) -> AsyncIterator[str]:
    """A daemon with keys."""
    file = KeyFile(tmp_path / "keys.json")
    for secret, scope in [(OPERATOR, Scope.ADMIN), (CHATTER, Scope.INFER)]:
        file.add(
            Key(name=secret, sha256=digest(secret), created_seconds=0.0, scopes=frozenset({scope}))
        )
    app = create_app(box.daemon, access=Access(KeyRing(file.path)), keep_alive_seconds=0.05)
    async with served(app) as port:
        yield f"http://127.0.0.1:{port}"
        box.daemon.feed.close()


@pytest.fixture
async def open_url(box: Box) -> AsyncIterator[str]:
    """A daemon without."""
    app = create_app(box.daemon, access=Access(local=True), keep_alive_seconds=0.05)
    async with served(app) as port:
        yield f"http://127.0.0.1:{port}"
        box.daemon.feed.close()


def children(parent: int | None = None) -> set[int]:
    """Processes that this one, or another, started for pages, and that are not gone."""
    numbers = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {number for number in numbers if is_child(number, parent or os.getpid())}


def is_child(process: int, parent: int | None = None) -> bool:
    """Whether it is there, for a page, and of this parent if one is given."""
    try:
        of = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        return "tui.web.child" in command_line(process) and parent in (None, of)
    except (FileNotFoundError, ProcessLookupError):
        return False


def command_line(process: int) -> str:
    """What everybody on this machine can read."""
    return Path(f"/proc/{process}/cmdline").read_text()


async def born(count: int) -> set[int]:
    """Wait until there are so many of them."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(found := children()) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # processes tell nobody
    return found


async def gone() -> None:
    assert await born(0) == set()


async def test_nothing_is_open_without_a_key(url: str) -> None:
    """There is a form, and neither a dashboard nor a file of it."""
    async with browsing(url) as browser:
        status, text = await browser.get()
        assert (status, 'name="key"' in text, 'id="terminal"' in text) == (401, True, False)
        for path in ["/static/js/textual.js", "/static/", "/download/any", "/nothing"]:
            assert (await browser.get(path))[0] == 401
        assert await browser.refused() == 401
        assert not browser.session.cookie_jar


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("sk-unknown", "the API key is not valid: unknown, revoked or expired"),
        (CHATTER, "the API key has not the scope &#39;admin&#39;"),
        ("", "this is no API key"),
        ("sk\r\nx: y", "this is no API key"),
        ("sk-ü", "this is no API key"),
    ],
)
async def test_the_daemon_says_whose_key_opens(url: str, key: str, why: str) -> None:
    """What it refuses lets nobody in, and is said in its words."""
    async with browsing(url) as browser:
        status, text = await browser.post("/login", key=key)
        assert (status, why in text) == (401, True)
        assert key == "" or key not in text
        assert not browser.session.cookie_jar


async def test_an_operator_sees_the_dashboard(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the key: the page, what it needs, and the overview; tables are saved in the browser."""
    monkeypatch.setattr("tui.web.server.MOST_DASHBOARDS", 1)
    monkeypatch.setenv("APPLIANCE_API_KEY", "sk-of-who-serves")
    async with browsing(url) as browser:
        status, text = await browser.post("/login", key=f" {OPERATOR} ")
        assert (status, 'data-session-websocket-url="/ws"' in text) == (200, True)
        (cookie,) = browser.session.cookie_jar
        assert (cookie["httponly"], cookie["samesite"]) == (True, "Strict")
        for path in re.findall(r'(?:src|href|url\()="?(/static[^"]+)"', text):
            assert (await browser.get(path))[0] == 200
        assert "//" not in re.sub(r"// [^\n]*\n", "", text), "nothing of other hosts"

        async with browser.page() as page:
            await page.sees("Overview", "2 models", "0 mixed")
            (child,) = children()
            assert OPERATOR not in command_line(child)
            assert await browser.refused() == 503
            await page.type("4")
            await page.sees("MODEL", "STATE", "TOK/S")
            await page.type("\x13")
            name = await page.offered()
            status, text = await browser.get(f"/download/{name}")
            assert (status, [row[0] for row in csv.reader(text.splitlines())][1:]) == (
                200, ["a", "b"],
            )  # fmt: skip
            assert (await browser.get(f"/download/{name}"))[0] == 404
            await page.type("q")
            await page.ends()
        await gone()


async def test_a_dashboard_only_for_looking(url: str) -> None:
    """`--readonly` holds in a browser; whatever size a page claims, it is a screen's."""
    async with browsing(url, readonly=True, theme="light") as browser:
        await browser.post("/login", key=OPERATOR)
        async with browser.page(size=f"width={10**5 - 1}&height=x") as page:
            await page.sees("2 models", "read-only")
            await page.say("resize", {"width": 10**9, "height": -1})
            await page.say("ping", "5")
            await page.type("4E")
            await page.sees("it was started with --readonly")
            assert page.told == [["pong", "5"]]
            assert len(children()) == 1
        await gone()


async def test_how_pages_end(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their process, with what no page of ours would say, when the time is over for which
    somebody was let in, and when they log out. No process is left of any, nor of one that does not
    hear."""
    clock = Clock()
    async with browsing(url, clock=clock) as browser:
        await browser.post("/login", key=OPERATOR)
        async with browser.page() as killed:
            (child,) = await born(1)
            os.kill(child, signal.SIGKILL)
            await killed.ends()
        with monkeypatch.context() as impatient:
            impatient.setattr("tui.web.terminal.LEAVE_SECONDS", 0.01)
            async with browser.page():
                (child,) = await born(1)
                os.kill(child, signal.SIGSTOP)
            await gone()
        for said in ["{", '["resize", {"width": "9", "height": 9}]']:
            async with browser.page() as strange:
                await strange.socket.send_str(said)
                await strange.ends()
        async with browser.page() as page:
            await page.sees("2 models")
            assert (await browser.post("/logout"))[0] == 401
            await page.ends()
        assert await browser.refused() == 401
        await browser.post("/login", key=OPERATOR)
        clock.now += KEPT_SECONDS - 0.01
        async with browser.page() as late:
            await late.ends()
        clock.now += 0.01
        assert (await browser.get())[0] == 401
        await gone()


async def test_pages_of_other_sites(url: str) -> None:
    """They log nobody in or out, and open no dashboard; nor does a name that was made to mean this
    machine."""
    async with browsing(url) as browser:
        assert (await browser.post("/login", key=OPERATOR))[0] == 200
        for origin in ["https://evil.example", "http://127.0.0.1:1", "null"]:
            assert await browser.refused(origin=origin) == 403
            assert (await browser.post("/login", origin=origin, key=OPERATOR))[0] == 403
            assert (await browser.post("/logout", origin=origin))[0] == 403
        assert (await browser.post("/logout", origin=None))[0] == 403
        assert (await browser.get(host="evil.example"))[0] == 403
        assert (await browser.get())[0] == 200
        assert (await browser.get("/ws"))[0] == 400, "no WebSocket"


@pytest.mark.parametrize(
    "head",
    [
        "GET / HTTP/1.1\nHost: localhost:abc",
        "GET / HTTP/1.1\nHost: localhost:99999",
        f"POST /login HTTP/1.1\nContent-Type: {FORM}; charset=nonsense",
        f"POST /login HTTP/1.1\nContent-Type: {FORM}\nContent-Encoding: gzip",
        "POST /login HTTP/1.1\nContent-Type: multipart/form-data",
        "POST /login HTTP/1.1\nContent-Type: multipart/form-data; boundary=x",
        "POST /login HTTP/1.1",
    ],
)  # fmt: skip
async def test_heads_that_are_none_of_ours(head: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without a login they are refused, and nothing breaks by them."""
    assert await refusal(head, b"key=a") == 400
    assert caplog.records == []


@pytest.mark.parametrize("body", [b"key=\xff\xfe", b"key=%ff", b"key=" + b"a" * 9000])
async def test_forms_that_are_none_of_ours(body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Other bytes than text, and too many of them."""
    head = f"POST /login HTTP/1.1\nContent-Type: {FORM}"
    assert await refusal(head, body) == (413 if len(body) > 4096 else 400)
    assert caplog.records == []


async def refusal(head: str, body: bytes) -> int:
    """The status of the answer to a request that no client would send."""
    async with browsing("unix:/nowhere") as browser:
        site = browser.address.removeprefix("http://")
        lines = [*head.split("\n"), "Connection: close", f"Origin: {browser.address}"]
        lines += [] if "Host:" in head else [f"Host: {site}"]
        lines += [f"Content-Length: {len(body)}", "", ""]
        reader, writer = await asyncio.open_connection(*site.split(":"))
        writer.write("\r\n".join(lines).encode() + body)
        async with asyncio.timeout(PATIENCE_SECONDS):
            status = await reader.readline()
        writer.close()
        return int(status.split()[1])


async def test_a_daemon_without_keys(open_url: str) -> None:
    """Whoever is on its machine may use it: here as there. Others may not."""
    async with browsing(open_url) as browser:
        status, text = await browser.get()
        assert (status, 'id="terminal"' in text) == (200, True)
        assert (await browser.get("/static/js/textual.js"))[0] == 200
    async with browsing(open_url, local=False) as browser:
        for status, text in [await browser.get(), await browser.post("/login", key="any")]:
            assert (status, "the daemon has no keys" in text) == (401, True)
        assert (await browser.get("/static/js/textual.js"))[0] == 401


async def test_a_key_that_is_revoked(url: str, tmp_path: Path) -> None:
    """Its page is asked for again; while the daemon is away nobody is turned out."""
    async with browsing(url) as browser:
        await browser.post("/login", key=OPERATOR)
        assert (await browser.get())[0] == 200
        KeyFile(tmp_path / "keys.json").remove(OPERATOR)
        assert (await browser.get())[0] == 401


async def test_a_daemon_that_is_away() -> None:
    """It is said, and nobody is let in whom it does not know yet."""
    async with browsing("http://127.0.0.1:9") as browser:
        for status, text in [await browser.get(), await browser.post("/login", key=OPERATOR)]:
            assert (status, "the daemon cannot be reached" in text) == (401, True)


async def test_links_open_once() -> None:
    """Who serves may give one browser their own rights; then there is another link."""
    links: list[str] = []
    async with browsing("unix:/nowhere", announce=links.append) as browser:
        status, text = await browser.get()
        assert (status, "open the link" in text, 'name="key"' in text) == (401, True, False)
        assert (await browser.post("/login", key=OPERATOR))[0] == 401
        assert (await browser.get("/?link=wrong"))[0] == 401
        assert len(links) == 1
        assert (await browser.get(f"/{links[0]}"))[0] == 200
        assert len(set(links)) == 2
        browser.session.cookie_jar.clear()
        assert (await browser.get(f"/{links[0]}"))[0] == 401
        async with browser.session.head(f"{browser.address}/{links[1]}") as answer:
            assert answer.status == 405, "who only looks at a link leaves it as it is"
        assert (await browser.get(f"/{links[1]}"))[0] == 200
    async with browsing("http://127.0.0.1:9", announce=links.append):
        assert len(links) == 3, "there are no rights to give"


async def test_a_link_without_a_terminal_to_print_on() -> None:
    """Who opened the one before is let in."""
    links: list[str] = []

    def announce(link: str) -> None:
        if links:
            raise BrokenPipeError
        links.append(link)

    async with browsing("unix:/nowhere", announce=announce) as browser:
        assert (await browser.get(f"/{links[0]}"))[0] == 200


async def test_a_browser_is_one_visitor() -> None:
    """What was open ends where it is let in again; after it logged out nothing is left."""
    links: list[str] = []
    async with browsing("unix:/nowhere", announce=links.append) as browser:
        assert (await browser.get(f"/{links[0]}"))[0] == 200
        async with browser.page() as first:
            assert (await browser.get(f"/{links[1]}"))[0] == 200
            await first.ends()
        async with browser.page() as second:
            assert (await browser.post("/logout"))[0] == 401
            await second.ends()
        assert await browser.refused() == 401
        await gone()


async def test_what_a_daemon_says_that_is_none() -> None:
    """It neither lets in nor turns out."""
    gate = KeyGate(
        "http://x", transport=httpx.MockTransport(lambda _: httpx.Response(500, text="?"))
    )
    assert await gate.ask("key") == (KeyVerdict.UNKNOWN, "the daemon answered 500")
    await gate.close()


def test_visitors_are_bounded() -> None:
    """The oldest is forgotten who has nothing open."""
    visitors = Visitors(Clock())
    first, second = visitors.admit("first"), visitors.admit("second")
    visitor = visitors.find(first)
    assert visitor is not None
    visitor.open.add(Nothing())
    others = [visitors.admit("other") for _ in range(MOST - 1)]

    assert visitors.find(first) is visitor
    assert visitors.find(second) is None
    assert all(visitors.find(cookie) for cookie in others)
    assert visitors.find("") is None


class Nothing:
    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("localhost", True), ("localhost:8000", True), ("127.0.0.1:80", True), ("[::1]:80", True),
        ("127.9.9.9", True), ("[::ffff:127.0.0.1]", True), ("10.0.0.1", False),
        ("localhost.evil.example", False), ("127.0.0.1.evil.example", False), ("", False),
        ("evil@[::1", False), ("0.0.0.0:80", False),
    ],
)  # fmt: skip
def test_which_addresses_are_of_this_machine(address: str, local: bool) -> None:
    """Names that only say so are not."""
    assert is_local(address) is local


@pytest.mark.parametrize(
    ("origin", "encrypted", "own"),
    [
        ("http://box:80", False, True), ("https://box:80", False, True),
        ("https://BOX:80", True, True), ("http://box:80", True, False),
        ("http://box", False, False), ("box:80", False, False),
        ("ftp://box:80", False, False), ("http://evil@box:80", False, False), (None, False, False),
    ],
)  # fmt: skip
def test_which_pages_are_our_own(origin: str | None, encrypted: bool, own: bool) -> None:
    """Those that came from where their request goes, as it is served."""
    assert is_own(origin, "box:80", encrypted=encrypted) is own


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "status"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
async def test_the_command_serves_until_it_ends(
    url: str, tmp_path: Path, how: signal.Signals, status: int
) -> None:
    """Over HTTPS on a free port; with a key of whoever calls there is a link. No page's process is
    left, also where it could not be told."""
    certificate, key = certify(tmp_path, "box")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "appliance", "top", "--web", "--connect", url),
        *("--bind", "127.0.0.1:0", "--tls-certificate", certificate, "--tls-key", key),
        env={**os.environ, "APPLIANCE_API_KEY": OPERATOR},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            told = [(await process.stdout.readline()).decode() for _ in range(2)]
            address = re.findall(r"the dashboard is at (https://127\.0\.0\.1:\d+)/", told[0])[0]
            link = re.findall(rf"rights: {address}(/\?link=\S+)", told[1])[0]
            trust = ssl.create_default_context(cafile=certificate)
            jar, connector = aiohttp.CookieJar(unsafe=True), aiohttp.TCPConnector(ssl=trust)
            async with aiohttp.ClientSession(cookie_jar=jar, connector=connector) as session:
                browser = Browser(session, address)
                assert (await browser.get(link))[0] == 200
                (cookie,) = jar
                assert cookie["secure"] is True
                async with browser.page() as page:
                    await page.sees("2 models")
                    (child,) = children(process.pid)
                    process.send_signal(how)
                    await page.ends()
            assert await process.wait() == status
            while is_child(child):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_terminal_that_is_closed_ends_nothing_under_nohup() -> None:
    """A signal that is ignored stays so; any other ends it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    while_open: list[object] = []

    def opened(port: int) -> None:
        while_open.append(signal.getsignal(signal.SIGHUP))
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await serve(Site("unix:/nowhere"), "127.0.0.1", 0, None, opened)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert while_open == [signal.SIG_IGN]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--bind", "127.0.0.1:1"], "are for --web"),
        (["--web", "--bind", "nowhere"], '--bind: expected "host:port"'),
        (["--web", "--once"], "--web goes with none of"),
        (["--web", "--tls-key", __file__], "--tls-certificate: is missing, but tls_key is set"),
        (["--web", "--url", "nowhere"], "is no address"),
    ],
)
def test_what_the_command_refuses(options: list[str], words: str) -> None:
    """Before it listens anywhere."""
    result = CliRunner().invoke(cli, ["top", *options])
    assert (result.exit_code, words in result.stderr) == (2, True), result.stderr


def test_where_the_command_cannot_listen() -> None:
    """Something else does; and that others could have read along is said before."""
    with socket.create_server(("0.0.0.0", 0)) as taken:
        bind = f"0.0.0.0:{taken.getsockname()[1]}"
        result = CliRunner().invoke(cli, ["top", "--web", "--url", "http://x:1", "--bind", bind])
    assert result.exit_code == 1
    assert f"warning: {bind} can be reached from outside this machine" in result.stderr
    assert f"error: --bind: {bind}: " in result.stderr


def test_the_web_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the command says how to get it."""
    for name in [name for name in sys.modules if name.startswith("tui.web")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual_serve", None)
    result = CliRunner().invoke(cli, ["top", "--web"])
    assert (result.exit_code, "install appliance[web]" in result.stderr) == (1, True)


def test_what_goes_wrong_behind_the_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address was not to blame."""

    async def exhausted(*arguments: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(sys.modules[Site.__module__], "serve", exhausted)
    result = CliRunner().invoke(cli, ["top", "--web", "--url", "http://x:1"])
    assert (result.exit_code, result.stderr) == (1, "error: --web: Too many open files\n")
