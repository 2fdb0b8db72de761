"""Front ends of a real daemon that are stopped, killed, or kept busy by hostile requests: the core
and the other front end answer as if nothing were."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from appliance.access.keys import Key, KeyFile, Scope, digest
from appliance.client import event_lines_async
from appliance.demo.checkpoints import write_config
from appliance.demo.run import free_port
from tests import processes
from tests.hostile.bodies import many_sequences
from tests.hostile.connections import half_sent_body
from tests.patience import PATIENCE_SECONDS, until

MODEL = "llama-a"
CHAT = "/v1/chat/completions"
CONTEXT = 1024
LONG = 800
"""Tokens of a stream that is still there when something happens to it."""
UNDER_WAY = 8
"""So many tokens have come of it then."""
BODY_BYTES = 8 << 20
"""`api.max_body`, by default."""
OPERATOR = "operator"
SECRET = "hf_of_the_daemon"
"""In the daemon's environment."""
USERS = tuple(f"user-{number}" for number in range(8))


@dataclass(frozen=True)
class Daemon:
    """A running daemon with two front ends, keys, and one model."""

    url: str
    pid: int

    def get(self, path: str, key: str = OPERATOR) -> httpx.Response:
        """What the core answers."""
        return httpx.get(self.url + path, headers=_key(key), timeout=PATIENCE_SECONDS)

    def live(self) -> list[str]:
        """The ids of all requests."""
        return [
            one["id"] for one in self.get("/api/requests").raise_for_status().json()["requests"]
        ]

    def descriptors(self) -> int:
        """Open files and sockets of the core."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def front_ends(self) -> set[int]:
        """Their process ids: they are forked from a child of the daemon."""
        return set(processes.front_ends(self.pid))

    def output_tokens(self, key: str) -> float:
        """What a key was charged."""
        series = f'appliance_key_tokens_total{{key="{key}",kind="output"}} '
        lines = self.get("/metrics").raise_for_status().text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(series))


@dataclass
class Stream:
    """A chat that is streamed to a key, as far as it came."""

    key: str
    id: str
    front_end: int
    """The process that answers."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    """Whether its last event came."""
    under_way: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, answer: httpx.Response) -> None:
        """To the end of the answer, which has to be a whole one."""
        async for line in event_lines_async(answer.aiter_bytes()):
            if line == "data: [DONE]":
                self.done = True
            elif line.startswith("data: "):
                assert not self.done
                self._take(json.loads(line.removeprefix("data: ")))
        self.under_way.set()

    def _take(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        for choice in event.get("choices", ()):
            self.tokens += choice.get("token_ids") or ()
            self.text += choice["delta"].get("content") or ""
        if len(self.tokens) >= UNDER_WAY:
            self.under_way.set()


@pytest.fixture(scope="module")
def daemon(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("front-ends")
    bind = f"127.0.0.1:{free_port()}"
    file = write_config(checkpoints, [MODEL], bind=bind, instances=1, max_context=CONTEXT)
    text = file.read_text().replace("[api]\n", '[api]\nprocesses = 2\nkeys = "keys.json"\n')
    file = folder / "appliance.toml"
    file.write_text(text)
    keys = KeyFile(folder / "keys.json")
    for name in (OPERATOR, *USERS):
        scopes = (Scope.ADMIN,) if name == OPERATOR else (Scope.INFER,)
        sha256 = digest(_secret(name))
        keys.add(Key(name=name, sha256=sha256, created_seconds=0.0, scopes=scopes))
    log = folder / "daemon.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "appliance", "serve", "--config", str(file)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_TOKEN": SECRET},
        )
    daemon = Daemon(f"http://{bind}", process.pid)
    try:
        until(lambda: process.poll() is not None or _is_ready(daemon))
        assert process.poll() is None, log.read_text()[-4000:]
        yield daemon
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_SECONDS)
        finally:
            process.kill()


def _is_ready(daemon: Daemon) -> bool:
    try:
        return daemon.get("/readyz").is_success and len(daemon.front_ends()) == 2
    except (httpx.TransportError, ValueError, OSError):
        return False


def _secret(name: str) -> str:
    return f"sk-{name}"


def _key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {_secret(name)}"}


def _holder(daemon: Daemon, client: tuple[str, int]) -> int:
    """The front end that has the connection whose other end is at `client`."""
    ends = [f"{port:04X}" for port in (int(daemon.url.rpartition(":")[2]), client[1])]
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (inode,) = (
        f"socket:[{inode}]"
        for _, local, remote, *_, inode in (fields[:10] for fields in sockets)
        if [local.rpartition(":")[2], remote.rpartition(":")[2]] == ends
    )
    for pid in daemon.front_ends():
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if str(entry.readlink()) == inode:
                    return pid
            except FileNotFoundError:
                continue  # closed since it was listed
    raise AssertionError("no front end has the connection")


def _asked(key: str, tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Write to {key} about rivers"}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


@asynccontextmanager
async def streaming(
    daemon: Daemon, key: str, tokens: int = LONG
) -> AsyncIterator[tuple[Stream, asyncio.Task[None]]]:
    """A stream on a connection of its own, and what reads it to its end."""
    async with (
        httpx.AsyncClient(base_url=daemon.url, timeout=PATIENCE_SECONDS) as client,
        client.stream("POST", CHAT, json=_asked(key, tokens), headers=_key(key)) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        address = answer.extensions["network_stream"].get_extra_info("client_addr")
        holder = await asyncio.to_thread(_holder, daemon, address)
        stream = Stream(key, answer.headers["x-appliance-request"], holder)
        task = asyncio.create_task(stream.read(answer))
        try:
            yield stream, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def answered(daemon: Daemon, key: str, tokens: int = LONG) -> Stream:
    """A stream that was read to its end."""
    async with streaming(daemon, key, tokens) as (stream, reading):
        await reading
    assert stream.done
    return stream


@asynccontextmanager
async def on_all(
    daemon: Daemon, front_ends: set[int]
) -> AsyncIterator[list[tuple[Stream, asyncio.Task[None]]]]:
    """Streams that are well under way, until each of `front_ends` has one."""
    await _until_all_answer(daemon, front_ends)
    async with AsyncExitStack() as stack:
        streams: list[tuple[Stream, asyncio.Task[None]]] = []
        for key in USERS:
            streams.append(await stack.enter_async_context(streaming(daemon, key)))
            if {stream.front_end for stream, _ in streams} == front_ends:
                break
        else:
            pytest.fail(f"no connection came to one of the front ends {front_ends}")
        for stream, _ in streams:
            await stream.under_way.wait()
        yield streams


async def _until_all_answer(daemon: Daemon, front_ends: set[int]) -> None:
    """Until each of them has answered: one that was forked just now is not ready yet, and gets no
    connection. Those that were answered stay open, so that the next one goes to another."""
    answering = set[int]()
    body = _asked(USERS[-1], 1) | {"stream": False}
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_SECONDS):
        while answering != front_ends:
            client = await stack.enter_async_context(
                httpx.AsyncClient(base_url=daemon.url, timeout=PATIENCE_SECONDS)
            )
            answer = await client.post(CHAT, json=body, headers=_key(USERS[-1]))
            assert answer.status_code == 200, answer.text
            address = answer.extensions["network_stream"].get_extra_info("client_addr")
            answering.add(await asyncio.to_thread(_holder, daemon, address))


def test_the_daemon_goes_last_when_memory_runs_out(daemon: Daemon) -> None:
    """Its worker goes first, as requests outlive that, or what that is forked from; then front
    ends."""
    parent = processes.worker_parent(daemon.pid)
    workers = [parent, *processes.children(parent)]
    front_ends = [_oom_score(pid) for pid in daemon.front_ends()]

    assert len(workers) == 2
    assert len(set(front_ends)) == len(set(map(_oom_score, workers))) == 1
    assert _oom_score(workers[0]) > front_ends[0] > _oom_score(daemon.pid)


def _oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def test_a_killed_front_end_ends_its_streams_and_no_others(daemon: Daemon) -> None:
    """Theirs end with an event that says why; the others go on to the same text. The core forgets
    the killed calls, charges what was produced, keeps no descriptor; another front end comes."""
    before = daemon.front_ends()
    async with on_all(daemon, before) as warm:
        for _, reading in warm:
            await reading
    await asyncio.to_thread(until, lambda: not daemon.live())
    descriptors = daemon.descriptors()
    charged = {key: daemon.output_tokens(key) for key in USERS}

    async with on_all(daemon, before) as streams:
        victim = streams[-1][0].front_end  # has one stream, which has just begun
        os.kill(victim, signal.SIGKILL)
        for _, reading in streams:
            await reading

    ended = [stream for stream, _ in streams if stream.front_end == victim]
    others = [stream for stream, _ in streams if stream.front_end != victim]
    for stream in ended:
        *tokens, last = stream.events
        assert all(event["choices"] for event in tokens)
        assert last["error"]["code"] == "front_end_lost"
        assert UNDER_WAY <= len(stream.tokens) < LONG
        assert stream.done, "the event is the last one, and the answer is whole"
    for stream in others:
        assert stream.done
        assert len(stream.tokens) == LONG
    await asyncio.to_thread(until, lambda: not daemon.live())
    for stream in ended:
        produced = daemon.output_tokens(stream.key) - charged[stream.key]
        assert len(stream.tokens) <= produced < LONG

    def replaced() -> bool:
        now = daemon.front_ends()  # has the killed one for a moment
        return len(now) == 2 and victim not in now

    await asyncio.to_thread(until, replaced)
    after = daemon.front_ends()
    assert len(after & before) == 1
    await asyncio.to_thread(until, lambda: daemon.get("/readyz").is_success)
    for stream in others:
        assert (await answered(daemon, stream.key)).text == stream.text
    async with on_all(daemon, after) as streams:
        for stream, reading in streams:
            await reading
            assert stream.done
    await asyncio.to_thread(until, lambda: daemon.descriptors() <= descriptors)


async def test_the_core_answers_while_all_front_ends_are_stopped(daemon: Daemon) -> None:
    """Probes, metrics and the admin API; requests wait, and are answered afterwards."""
    front_ends = daemon.front_ends()
    for pid in front_ends:
        os.kill(pid, signal.SIGSTOP)
    try:
        late = asyncio.create_task(answered(daemon, USERS[0], UNDER_WAY))
        for path in ("/readyz", "/livez", "/metrics", "/api/status", "/api/requests", "/api/keys"):
            assert (await asyncio.to_thread(daemon.get, path)).status_code == 200
        assert not late.done()
    finally:
        for pid in front_ends:
            os.kill(pid, signal.SIGCONT)

    assert len((await late).tokens) == UNDER_WAY


async def test_a_conversation_goes_on_in_every_front_end(daemon: Daemon) -> None:
    """A stored response is known to all of them, and to no other key; also after the front end
    that made it was killed."""
    asked = {"model": MODEL, "input": "Where is the Tiber?", "max_output_tokens": 8}
    answered_by = set[int]()
    previous: str | None = None
    async with AsyncExitStack() as stack:
        while answered_by != daemon.front_ends():
            assert len(answered_by) <= len(USERS)
            client = await stack.enter_async_context(
                httpx.AsyncClient(base_url=daemon.url, timeout=PATIENCE_SECONDS)
            )
            body = asked if previous is None else {**asked, "previous_response_id": previous}
            answer = await client.post("/v1/responses", json=body, headers=_key(USERS[0]))
            assert answer.status_code == 200, answer.text
            address = answer.extensions["network_stream"].get_extra_info("client_addr")
            maker = await asyncio.to_thread(_holder, daemon, address)
            answered_by.add(maker)
            previous = answer.json()["id"]
    path = f"/v1/responses/{previous}"
    before = daemon.front_ends()
    os.kill(maker, signal.SIGKILL)
    stored = await asyncio.to_thread(daemon.get, path, USERS[0])
    assert stored.json() == answer.json()
    assert (await asyncio.to_thread(daemon.get, path, USERS[1])).status_code == 404
    await asyncio.to_thread(
        until, lambda: len(daemon.front_ends()) == 2 and daemon.front_ends() != before
    )
    await asyncio.to_thread(until, lambda: daemon.get("/readyz").is_success)


def _long_prompt() -> dict[str, Any]:
    """A prompt that makes the largest body."""
    body = _asked(USERS[0], 1)
    room = BODY_BYTES - len(json.dumps(body).encode())
    words = "river " * (room // 6)
    body["messages"][0]["content"] += words
    return body


def _many_messages() -> dict[str, Any]:
    return _asked(USERS[0], 1) | {"messages": [{"role": "user", "content": ""}] * 200_000}


@pytest.mark.parametrize(
    ("body", "refusal"),
    [(_long_prompt, "maximum context length"), (_many_messages, "this has 200000")],
)
async def test_others_are_served_during_hostile_requests(
    daemon: Daemon, body: Callable[[], dict[str, Any]], refusal: str
) -> None:
    """Six at once are refused by name; the core answers meanwhile, and another key's stream goes
    on to the same text. No process is lost."""
    front_ends = daemon.front_ends()
    text = (await answered(daemon, USERS[1], 64)).text
    content = json.dumps(body(), separators=(",", ":")).encode()
    assert len(content) <= BODY_BYTES

    headers = _key(USERS[0]) | {"content-type": "application/json"}

    async def attack() -> httpx.Response:
        async with httpx.AsyncClient(base_url=daemon.url, timeout=PATIENCE_SECONDS) as client:
            return await client.post(CHAT, content=content, headers=headers)

    attacks = [asyncio.create_task(attack()) for _ in range(6)]
    stream = asyncio.create_task(answered(daemon, USERS[1], 64))
    for path in ("/livez", "/readyz", "/metrics", "/api/requests"):
        assert (await asyncio.to_thread(daemon.get, path)).status_code == 200
    assert (await stream).text == text
    for answer in await asyncio.gather(*attacks):
        assert answer.status_code == 400
        assert refusal in answer.json()["error"]["message"]

    assert daemon.front_ends() == front_ends
    assert daemon.live() == []


async def test_one_key_leaves_places_to_others(daemon: Daemon) -> None:
    """It asks for 128 sequences in one request. Others are answered while most of them wait, which
    operators see."""
    headers = _key(USERS[0]) | {"content-type": "application/json"}
    content = next(many_sequences(MODEL, 128, 256))
    async with httpx.AsyncClient(base_url=daemon.url, timeout=PATIENCE_SECONDS) as client:
        attack = asyncio.create_task(client.post(CHAT, content=content, headers=headers))
        await asyncio.to_thread(until, lambda: "key" in _reasons(daemon))
        for _ in range(3):
            assert len((await answered(daemon, USERS[1], 4)).tokens) == 4
            assert "key" in _reasons(daemon)
        answer = await attack

    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 128


def _reasons(daemon: Daemon) -> list[str]:
    """Why requests wait, those that do."""
    requests = daemon.get("/api/requests").raise_for_status().json()["requests"]
    return [one["reason"]["code"] for one in requests if one["reason"] is not None]


async def test_bodies_that_never_end_leave_room_to_others(daemon: Daemon) -> None:
    """One key sends 60 of 8 MiB, but for their last bytes. What is held of them is bounded, and
    shown; the others are refused, and requests of another key are served."""
    held = 12  # in each front end: three quarters of 128 MiB
    refusals: list[bytes] = []
    place = urlsplit(daemon.url)
    content = half_sent_body(_secret(USERS[0]))

    async def hold() -> None:
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            writer.write(content)
            refusals.append(await reader.readline())
            await reader.read()
        finally:
            writer.transport.abort()

    def coming() -> int:
        bodies = daemon.get("/api/requests").raise_for_status().json()["bodies"]
        assert {body["key"] for body in bodies} <= {USERS[0]}
        return sum(body["received_bytes"] for body in bodies)

    attack = [asyncio.create_task(hold()) for _ in range(60)]
    try:
        while len(refusals) < 60 - 2 * held:
            assert await asyncio.to_thread(coming) <= 2 * held * BODY_BYTES
        assert len((await answered(daemon, USERS[1], 4)).tokens) == 4
        assert await asyncio.to_thread(coming) <= 2 * held * BODY_BYTES
        assert all(line.startswith(b"HTTP/1.1 429") for line in refusals)
    finally:
        for task in attack:
            task.cancel()
        await asyncio.gather(*attack, return_exceptions=True)
    await asyncio.to_thread(until, lambda: coming() == 0)


def test_what_children_may_and_see(daemon: Daemon) -> None:
    """Front ends read what clients send: they gain no rights, and no child has the daemon's
    secrets."""
    children = processes.children(daemon.pid)
    assert SECRET in Path(f"/proc/{daemon.pid}/environ").read_text()
    for child in [*children, *daemon.front_ends()]:
        assert SECRET not in Path(f"/proc/{child}/environ").read_text()
    for front_end in daemon.front_ends():
        assert "NoNewPrivs:\t1" in Path(f"/proc/{front_end}/status").read_text()


STARTS_A_THREAD = """
import sys, threading
zygotes = {"appliance.frontend.zygote", "appliance.worker.zygote"}
if zygotes & {*sys.orig_argv} and sys.orig_argv[-1] != "bare":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


def test_a_library_that_starts_threads(checkpoints: Path, tmp_path: Path) -> None:
    """Requests are served all the same, and so are guides: what is forked imports for itself. On
    the first machine with a GPU some package of its environment did so, and no front end came."""
    (tmp_path / "sitecustomize.py").write_text(STARTS_A_THREAD)
    bind = f"127.0.0.1:{free_port()}"
    text = write_config(checkpoints, [MODEL], bind=bind, instances=1).read_text()
    file = tmp_path / "appliance.toml"
    file.write_text(text.replace("[api]\n", "[api]\nprocesses = 1\n"))
    log = tmp_path / "daemon.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "appliance", "serve", "--config", str(file)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Yes or no?"}],
        "structured_outputs": {"choice": ["yes", "no"]},
        "max_tokens": 16,
    }
    try:
        until(lambda: process.poll() is not None or _is_up(f"http://{bind}"))
        assert process.poll() is None, log.read_text()[-4000:]
        answer = httpx.post(f"http://{bind}{CHAT}", json=body, timeout=PATIENCE_SECONDS)
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_SECONDS)
        finally:
            process.kill()

    assert answer.json()["choices"][0]["message"]["content"] in ("yes", "no")
    said = log.read_text()
    for whose in ("front ends", "workers"):
        assert said.count(f"started threads (python): every one of the {whose} imports") == 1
    assert "Traceback" not in said


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=PATIENCE_SECONDS).is_success
    except httpx.TransportError:
        return False
