"""The life of a daemon and its server: told to the manager, ended by signals, drained."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from litestar import Litestar

from appliance.daemon.lifecycle import Lifetime, Server, bound_beside
from appliance.errors import ApplianceError
from appliance.http.connections import Connection
from appliance.platform.systemd import Notifier
from appliance.units import Address
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.notify import Manager, manager


class DaemonDouble:
    """Drains when the test says so; progresses while the test says so."""

    def __init__(self) -> None:
        self.life: list[str] = []
        self.idle = asyncio.Event()
        self.well = True

    def start(self) -> None:
        self.life.append("start")

    async def drain(self, patience_seconds: float) -> None:
        self.life.append(f"drain {patience_seconds:g}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.idle.wait(), patience_seconds)
        self.life.append("drained")

    async def stop(self) -> None:
        self.life.append("stop")

    def progresses(self) -> bool:
        return self.well

    def summary(self) -> str:
        return "as it is"


class FrontEndsDouble:
    """Notes what is asked of front ends."""

    def __init__(self) -> None:
        self.life: list[str] = []

    def start(self) -> None:
        self.life.append("start")

    def drain(self) -> None:
        self.life.append("drain")

    async def stop(self, patience_seconds: float) -> None:
        self.life.append(f"stop {patience_seconds:g}")


class App:
    """Answers every request when the test lets it."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.asked = asyncio.Event()

    async def __call__(self, scope: object, receive: Callable, send: Callable) -> None:
        self.asked.set()
        await self.let.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


class House:
    """A lifetime that runs, and what is around it."""

    def __init__(self, listener: socket.socket, told: Manager, *, activated: bool) -> None:
        self.daemon = DaemonDouble()
        self.front_ends = FrontEndsDouble()
        self.app = App()
        port = 0 if activated else listener.getsockname()[1]
        if not activated:
            listener.close()
        self.server = Server(
            uvicorn.Config(
                self.app,
                http=Connection,
                host="127.0.0.1",
                port=port,
                log_config=None,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
        )
        self.told = told
        self.lifetime = Lifetime(
            self.daemon,
            self.server,
            Notifier(told.address, watchdog_seconds=0.03),
            # as systemd would: the test keeps the socket that it passes
            [listener.dup()] if activated else [],
            drain_seconds=30,
            front_ends=self.front_ends,
        )


@asynccontextmanager
async def running(directory: Path, *, activated: bool) -> AsyncIterator[tuple[House, str]]:
    with manager(directory) as told, socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        house = House(listener, told, activated=activated)
        life = asyncio.create_task(house.lifetime.run())
        await house.server.listening.wait()
        yield house, url
        house.app.let.set()
        house.daemon.idle.set()
        house.lifetime.end()
        await life


async def heard_until(told: Manager, true: Callable[[dict[str, str]], bool]) -> list[dict]:
    """What is told up to the first message for which it is so."""
    messages: list[dict] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            for message in told.heard():
                messages.append(message)
                if true(message):
                    return messages
            await asyncio.sleep(0.005)


async def test_ready_when_the_sockets_listen(tmp_path: Path) -> None:
    """READY=1 is the first word, and by then a request is answered."""
    async with running(tmp_path, activated=True) as (house, url):
        house.app.let.set()
        first, *_ = await heard_until(house.told, lambda message: "READY" in message)

        assert first == {"READY": "1", "STATUS": "as it is"}
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
            assert (await client.get(url)).text == "done"
    assert house.daemon.life == ["start", "drain 30", "drained", "stop"]
    assert house.front_ends.life == ["start", "drain", "stop 3"]


async def test_the_watchdog_hears_of_progress_only(tmp_path: Path) -> None:
    """While nothing progresses the manager is told why, and not that we live."""
    async with running(tmp_path, activated=True) as (house, _):
        await heard_until(house.told, lambda message: "WATCHDOG" in message)
        house.daemon.well = False
        await heard_until(house.told, lambda message: "WATCHDOG" not in message)

        silent = await heard_until(house.told, lambda message: "no progress" in message["STATUS"])
        silent += await heard_until(house.told, lambda message: "no progress" in message["STATUS"])
        assert not any("WATCHDOG" in message for message in silent)

        house.daemon.well = True
        await heard_until(house.told, lambda message: "WATCHDOG" in message)


async def test_a_drain_lets_answers_end(tmp_path: Path) -> None:
    """What was asked before the signal is answered after it; the manager is told of the end, and
    the daemon goes on being watched."""
    async with (
        running(tmp_path, activated=True) as (house, url),
        httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client,
    ):
        asking = asyncio.create_task(client.get(url))
        await house.app.asked.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await heard_until(house.told, lambda message: "STOPPING" in message)
        house.daemon.well = False
        await heard_until(house.told, lambda message: "WATCHDOG" in message)

        house.app.let.set()
        house.daemon.idle.set()

        answer = await asking
        assert answer.text == "done"
        assert answer.headers["connection"] == "close"


async def test_with_passed_sockets_the_next_daemon_gets_what_comes(tmp_path: Path) -> None:
    """From the signal on connections wait, not refused, for whoever else has the socket."""
    async with running(tmp_path, activated=True) as (house, url):
        house.lifetime.end()
        await heard_until(house.told, lambda message: "STOPPING" in message)
        port = int(url.rpartition(":")[2])

        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await writer.drain()
        house.daemon.idle.set()
        await heard_until(house.told, lambda message: "ending" in message.get("STATUS", ""))

        assert not house.app.asked.is_set()
        writer.close()


async def test_without_them_it_answers_until_the_end(tmp_path: Path) -> None:
    """Connections in the drain are accepted, since nobody else would; each answer is the last."""
    async with running(tmp_path, activated=False) as (house, url):
        house.app.let.set()
        house.lifetime.end()
        await heard_until(house.told, lambda message: "STOPPING" in message)

        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
            answer = await client.get(url)

        assert answer.text == "done"
        assert answer.headers["connection"] == "close"


async def test_a_request_on_its_way_is_not_cut_off(tmp_path: Path) -> None:
    """A connection that was accepted before the signal may still send its first request."""
    async with running(tmp_path, activated=True) as (house, url):
        house.app.let.set()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        while not house.server.acceptor.undecided:  # noqa: ASYNC110 - they tell nobody
            await asyncio.sleep(0.001)
        house.daemon.idle.set()
        house.lifetime.end()
        await heard_until(house.told, lambda message: "STOPPING" in message)

        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")

        assert b"200" in await reader.readline()
        writer.close()


async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """It does not wait for requests, nor for a third."""
    async with (
        running(tmp_path, activated=True) as (house, url),
        httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client,
    ):
        asking = asyncio.create_task(client.get(url))
        await house.app.asked.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await heard_until(house.told, lambda message: "STOPPING" in message)

        os.kill(os.getpid(), signal.SIGTERM)
        await heard_until(house.told, lambda message: "ending" in message.get("STATUS", ""))

        assert house.daemon.life == ["start", "drain 30", "drain 0", "drained", "stop"]
        asking.cancel()


@pytest.mark.parametrize("failed", [False, True])
async def test_the_status_says_whether_it_failed(tmp_path: Path, failed: bool) -> None:
    """1 after a failure, 0 after a signal."""
    with manager(tmp_path) as told, socket.create_server(("127.0.0.1", 0)) as listener:
        house = House(listener, told, activated=True)
        life = asyncio.create_task(house.lifetime.run())
        await house.server.listening.wait()
        house.daemon.idle.set()
        if failed:
            house.lifetime.fail(RuntimeError("books"))
        else:
            house.lifetime.end()

        assert await life == (1 if failed else 0)


# --- what cannot begin, and what ends at once -----------------------------------------------------


class Beside:
    """Something that lives as long as the application, such as batches."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.life: list[str] = []
        self._refusal = refusal

    @asynccontextmanager
    async def running(self, app: Litestar) -> AsyncIterator[None]:
        if self._refusal is not None:
            raise self._refusal
        self.life.append("started")
        yield
        self.life.append("ended")


def lifetime(beside: Beside, port: int = 0) -> tuple[Lifetime, DaemonDouble]:
    """That of a daemon with an application."""
    daemon = DaemonDouble()
    config = uvicorn.Config(
        Litestar(lifespan=[beside.running], logging_config=None),
        http=Connection,
        host="127.0.0.1",
        port=port,
        log_config=None,
        lifespan="on",
        timeout_graceful_shutdown=1,
    )
    return Lifetime(daemon, Server(config), Notifier(), drain_seconds=30), daemon


async def test_what_the_application_refuses_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    """By itself, with nothing in the log; the daemon has ended."""
    refusal = ApplianceError("batches.directory: another daemon has its batches in batches")
    begun, daemon = lifetime(Beside(refusal))
    with pytest.raises(ApplianceError) as raised:
        await begun.run()

    assert raised.value is refusal
    assert daemon.life == ["start", "stop"]
    assert caplog.records == []


async def test_a_port_in_use(caplog: pytest.LogCaptureFixture) -> None:
    """One line: the key, the address, why and what to do. What began beside it has ended."""
    beside = Beside()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        begun, daemon = lifetime(beside, port)
        with pytest.raises(ApplianceError) as raised:
            await begun.run()

    assert str(raised.value) == (
        f"api.bind: 127.0.0.1, port {port}: Address already in use; end the program that listens "
        "there, or set another port"
    )
    assert (daemon.life, beside.life) == (["start", "stop"], ["started", "ended"])
    assert caplog.records == []


async def test_a_second_signal_ends_what_is_beside_in_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What has files open closes them, and nothing is logged but the one line."""
    beside = Beside()
    begun, daemon = lifetime(beside)
    life = asyncio.create_task(begun.run())
    while beside.life != ["started"]:  # noqa: ASYNC110 - no event says it
        await asyncio.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
    while "drain 30" not in daemon.life:  # noqa: ASYNC110 - no event says it
        await asyncio.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

    assert await life == 0
    assert beside.life == ["started", "ended"]
    assert [record.getMessage() for record in caplog.records] == [
        "ending at once, as a second signal came"
    ]


# --- where it listens ----------------------------------------------------------------------------


def passed_at(host: str) -> tuple[socket.socket, int]:
    listener = socket.create_server((host, 0))
    return listener, int(listener.getsockname()[1])


async def test_the_log_says_where_it_listens(caplog: pytest.LogCaptureFixture) -> None:
    begun, daemon = lifetime(Beside())
    daemon.idle.set()
    with caplog.at_level(logging.INFO, "appliance.serve"):
        life = asyncio.create_task(begun.run())
        await asyncio.wait_for(begun._server.listening.wait(), PATIENCE_SECONDS)
        begun.end()
        await life

    assert any(
        record.getMessage().startswith("listening at 127.0.0.1:") for record in caplog.records
    )


def test_an_address_of_the_configuration_is_listened_at_beside_a_passed_socket(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log warns, and names both and what to do."""
    listener, port = passed_at("127.0.0.1")
    with listener, contextlib.ExitStack() as opened:
        free, other = passed_at("127.0.0.1")
        free.close()
        (beside,) = bound_beside([listener], Address(f"127.0.0.1:{other}"))
        opened.enter_context(beside)
        assert beside.getsockname() == ("127.0.0.1", other)

    assert f"127.0.0.1:{other} is not where the service manager listens" in caplog.text
    assert f"(127.0.0.1:{port})" in caplog.text
    assert "systemctl edit appliance.socket" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_passed_socket_that_serves_the_address_is_enough(
    caplog: pytest.LogCaptureFixture, host: str
) -> None:
    listener, port = passed_at(host)
    with listener:
        assert bound_beside([listener], Address(f"127.0.0.1:{port}")) == []
    assert caplog.records == []


def test_an_address_that_cannot_be_had_ends_the_start() -> None:
    listener, _ = passed_at("127.0.0.1")
    taken, port = passed_at("127.0.0.2")
    with listener, taken, pytest.raises(ApplianceError, match=r"^api\.bind: 127\.0\.0\.2, port"):
        bound_beside([listener], Address(f"127.0.0.2:{port}"))
