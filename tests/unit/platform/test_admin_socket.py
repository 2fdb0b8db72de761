"""The admin socket: who may use it, what it replaces, and how a command finds it."""

from __future__ import annotations

import asyncio
import grp
import logging
import os
import socket
import stat
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from appliance.access.auth import Access
from appliance.access.keys import KeyRing
from appliance.api import operator_socket
from appliance.api.app import create_app
from appliance.client import call, default_url
from appliance.config.loader import load_config
from appliance.config.schema import Config
from appliance.errors import KeysError
from appliance.platform import admin_socket
from appliance.platform.admin_socket import (
    AdminSocketError,
    Peer,
    admin_path,
    may_operate,
    open_socket,
    peer_of,
    running_socket,
)
from appliance.serve import (
    AdminServer,
    Server,
    make_admin_server,
    make_gateway,
    make_server,
    running,
)
from tests.unit.doubles.fake_service import FakeService

STATUS = "/api/status"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "admin.sock"


def config_of(tmp_path: Path, **api: str) -> Config:
    """A configuration whose daemon would listen on any free port."""
    lines = "".join(f'{key} = "{value}"\n' for key, value in api.items())
    file = tmp_path / "appliance.toml"
    file.write_text(
        f'[api]\nbind = "127.0.0.1:0"\n{lines}[devices]\nmemory = "8MiB"\n'
        '[[model]]\nname = "m"\npath = "m"\nmax_context = 64\n'
    )
    return load_config(file, check_files=False)


def make(config: Config) -> AdminServer | None:
    return make_admin_server(make_server(FakeService(), config), config)  # type: ignore[arg-type]


@asynccontextmanager
async def asked(path: Path) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with httpx.AsyncClient(transport=transport, base_url="http://appliance") as client:
        yield client


# --- the socket ----------------------------------------------------------------------------------


def test_the_socket_is_for_its_user_and_group(path: Path) -> None:
    """Mode 0660 whatever the umask; the directory is made."""
    group = grp.getgrgid(os.getegid()).gr_name
    before = os.umask(0)
    try:
        with open_socket(path, group):
            found = path.stat()
    finally:
        os.umask(before)

    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o660
    assert found.st_gid == os.getegid()


def test_what_a_dead_daemon_left_is_replaced(path: Path) -> None:
    """A socket without anybody behind it; one that is used is not."""
    open_socket(path).close()
    with open_socket(path):
        with pytest.raises(AdminSocketError, match="another daemon listens"):
            open_socket(path)
        assert path.is_socket()


def test_what_cannot_be_a_socket(path: Path, tmp_path: Path) -> None:
    """A file of somebody's is left alone; a group has to be there; a path has to fit."""
    path.parent.mkdir()
    path.write_text("mine")

    with pytest.raises(AdminSocketError, match="is no socket"):
        open_socket(path)
    with pytest.raises(AdminSocketError, match="no group 'nobody-has-this'"):
        open_socket(tmp_path / "other.sock", "nobody-has-this")
    with pytest.raises(AdminSocketError, match=r"api\.admin_socket"):
        open_socket(tmp_path / ("x" * 200))
    assert path.read_text() == "mine"


def test_peers_are_known_to_the_kernel() -> None:
    """This process, at both ends."""
    here, there = socket.socketpair()
    with here, there:
        peer = peer_of(here)

    assert (peer.pid, peer.uid) == (os.getpid(), os.geteuid())
    assert peer.gids >= {os.getegid(), *os.getgroups()}


def test_all_groups_of_a_peer_are_known() -> None:
    """As many as the kernel can be asked for through Python, which has a bound."""

    class Connection:
        def getsockopt(self, level: int, option: int, size: int) -> bytes:
            if option == socket.SO_PEERCRED:
                return struct.pack("=iII", 7, 501, 20)
            with socket.socket() as real:  # it says what it thinks of the size
                real.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
            return struct.pack("=3I", 20, 21, 22)

    assert peer_of(Connection()).gids == {20, 21, 22}


def test_who_is_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root, the daemon's user, and the group's members by any of their groups."""
    monkeypatch.setattr(os, "geteuid", lambda: 500)

    def operates(uid: int, *gids: int, group: int | None = None) -> bool:
        return may_operate(Peer(1, uid, frozenset(gids)), group)

    assert operates(0)
    assert operates(500)
    assert not operates(501)
    assert not operates(501, 7)
    assert operates(501, 5, 7, group=7)
    assert not operates(501, 5, group=7)


# --- the daemon on it ----------------------------------------------------------------------------


def test_operators_need_no_key(tmp_path: Path, path: Path) -> None:
    """All of the API is there without one, on a daemon that wants keys on TCP; and when it ends, so
    does the socket."""
    asyncio.run(_operate(tmp_path, path))

    assert not path.exists()


async def _operate(tmp_path: Path, path: Path) -> None:
    config = config_of(tmp_path, admin_socket=str(path), keys="keys.json")
    server = make_server(FakeService(), config)  # type: ignore[arg-type]
    admin = make_admin_server(server, config)
    async with running(admin):
        async with asked(path) as client:
            status = await client.get(STATUS)
            models = await client.get("/v1/models", headers={"authorization": "Bearer sk-x"})
    transport = httpx.ASGITransport(server.config.app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://appliance") as client:
        outside = await client.get(STATUS)

    assert (status.status_code, models.status_code, outside.status_code) == (200, 200, 401)


async def test_without_keys_only_operators_may_do_what_they_do(tmp_path: Path, path: Path) -> None:
    """On a machine that several people use, not each of them; all may have answers computed."""
    config = config_of(tmp_path, admin_socket=str(path))
    gateway = make_gateway(FakeService(), config)  # type: ignore[arg-type]
    server = make_server(FakeService(), config, gateway=gateway)  # type: ignore[arg-type]
    admin = make_admin_server(server, config)
    assert admin is not None
    gateway.access.keep_operators_at(admin.path)
    transport = httpx.ASGITransport(server.config.app)  # type: ignore[arg-type]
    local = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
    async with running(admin), local, asked(path) as operator:
        refused = await local.get(STATUS)
        statuses = [
            (await operator.get(STATUS)).status_code,
            (await local.get("/v1/models")).status_code,
            (await local.get("/livez")).status_code,
        ]

    assert refused.status_code == 403
    assert f"operators use the admin socket, {path}" in refused.json()["error"]["message"]
    assert "api.local_operators" in refused.json()["error"]["message"]
    assert statuses == [200, 200, 200]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_others_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    """Whoever gets past the socket's mode and is no operator is told so, on either event loop."""
    monkeypatch.setattr(operator_socket, "may_operate", lambda peer, gid: gid == 7)
    app = create_app(FakeService(), access=Access(KeyRing(path.parent / "keys.json")))

    async def ask(protocol: Any) -> httpx.Response:
        settings = uvicorn.Config(app, http=protocol, lifespan="off", log_config=None)
        admin = AdminServer(Server(settings), open_socket(path), path)
        async with running(admin), asked(path) as client:
            return await client.get(STATUS)

    for gid, status in ((None, 403), (7, 200)):
        protocol = type("Protocol", (operator_socket.OperatorProtocol,), {"gid": gid})
        config = uvicorn.Config(app, loop=loop)
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            answer = runner.run(ask(protocol))
        assert answer.status_code == status
    assert answer.json()["version"] == "1"


def test_where_the_socket_is(
    tmp_path: Path,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As configured; by itself where systemd or the user's session has a place; or nowhere."""
    caplog.set_level(logging.INFO)
    assert admin_path("auto") is None
    assert admin_path("") is None
    assert admin_path("/x/y.sock") == Path("/x/y.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert admin_path("auto") == Path("/run/user/1/appliance/admin.sock")
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/a:/run/b")
    assert admin_path("auto") == Path("/run/a/admin.sock")
    assert make(config_of(tmp_path, admin_socket="")) is None
    assert caplog.messages == []


def test_commands_that_need_a_key_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With keys and without a socket, at the start: `ps` and the dashboard would be refused."""
    caplog.set_level(logging.INFO)

    assert make(config_of(tmp_path, admin_socket="", keys="keys.json")) is None

    (said,) = caplog.messages
    assert "a key with the scope admin in $APPLIANCE_API_KEY" in said


def test_another_daemon_has_the_socket(
    tmp_path: Path,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A daemon that was told where fails; one that was not goes without, and says so."""
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(path.parent))
    with open_socket(path):
        with pytest.raises(AdminSocketError, match="another daemon"):
            make(config_of(tmp_path, admin_socket=str(path)))
        assert make(config_of(tmp_path)) is None
    assert "no admin socket: " in caplog.text


def test_keys_that_cannot_be_read_are_no_start(tmp_path: Path) -> None:
    """An appliance that should want keys does not begin without."""
    (tmp_path / "keys.json").write_text("{")

    with pytest.raises(KeysError):
        make(config_of(tmp_path, keys="keys.json"))


# --- the command line ----------------------------------------------------------------------------


def test_commands_find_the_socket(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's own first, then that of `run`'s daemon, then the system's; TCP where no process
    listens on any."""
    system = path.parent.parent / "system"
    monkeypatch.setattr(admin_socket, "SYSTEM_DIRECTORY", str(system))
    assert running_socket() is None
    assert default_url() == "http://127.0.0.1:11500"
    with open_socket(system / "admin.sock"):
        assert default_url() == f"unix:{system}/admin.sock"
        monkeypatch.setenv("RUNTIME_DIRECTORY", str(path.parent))
        assert default_url() == f"unix:{system}/admin.sock"
        with open_socket(path):
            assert default_url() == f"unix:{path}"
        assert path.is_socket()
        assert default_url() == f"unix:{system}/admin.sock"
        monkeypatch.setenv("XDG_STATE_HOME", str(path.parent.parent))
        own = path.parent.parent / "appliance" / "daemon-11500.sock"
        with open_socket(own):
            assert default_url() == f"unix:{own}"


def test_commands_ask_over_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--url unix:/PATH`, without the key that is for TCP."""
    monkeypatch.setenv("APPLIANCE_API_KEY", "sk-x")
    with open_socket(path) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                head = connection.recv(4096)
                assert head.startswith(b"GET /api/status HTTP/1.1")
                assert b"authorization" not in head.lower()
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

        thread = threading.Thread(target=answer)
        thread.start()
        assert call("GET", f"unix:{path}", STATUS) == {}
        thread.join()
