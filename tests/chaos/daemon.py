"""The daemon that is disturbed: set up with keys, started, ended and started again."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from appliance.access.keys import Key, KeyFile, Scope, digest
from appliance.demo.checkpoints import write_config
from appliance.demo.run import START_SECONDS, free_port
from benchmarks.endurance.asks import EMBEDDER, with_tool_parser
from benchmarks.endurance.connection import Closed, ask_json
from benchmarks.endurance.watch import Watch
from tests.chaos import moved_clock
from tests.chaos.disk import Disk
from tests.chaos.moved_clock import ClockFile

MODELS = ("llama-a", "qwen2-a", "qwen3-a")
"""One of each architecture. Hostile requests are for the first and the last one."""
OPERATOR, INNOCENT, BATCHES, HOSTILE = "operator", "innocent", "nightly", "hostile"
PROBE = "probe"
"""The key that asks whether models answer again."""
LOADERS = ("day", "evening", "night")
STOP_SECONDS = 60.0
LOOK_SECONDS = 0.1
SAID_BYTES = 4000

_MORE = """
[[model]]
name = "{embedder}"
path = {path}
max_context = 512
dtype = "float32"
task = "embed"
verify = true
[journal]
path = {journal}
max_size = "64MiB"
[batches]
directory = {batches}
concurrency = 4
"""
_SPILL = """images = {images}
[devices.kv_spill]
directory = {kv}
size = "64MiB"
[policy]"""
_ADMIN = '[policy]\nuse = ["appliance"]\n'


def secret(name: str) -> str:
    return f"sk-{name}"


def key(name: str) -> dict[str, str]:
    """The header with which a request has the key of this name."""
    return {"Authorization": f"Bearer {secret(name)}"}


@dataclass(frozen=True)
class Setting:
    """Where everything of a daemon is."""

    config: Path
    keys: Path
    state: Path
    log: Path
    address: tuple[str, int]


def set_up(folder: Path, checkpoints: Path, state: Path) -> Setting:
    """Write a configuration and keys: two instances, two front ends, and little room, so that
    models switch and KV goes to disk. All that the daemon writes is in `state`."""
    host, port = "127.0.0.1", free_port()
    text = write_config(
        checkpoints, MODELS, bind=f"{host}:{port}", memory="48MiB", host_cache="88MiB"
    ).read_text()
    text = text.replace(
        "[api]\n", '[api]\nprocesses = 2\nkeys = "keys.json"\nopen_metrics = true\ndrain = "2s"\n'
    )
    places = {name: json.dumps(str(state / name)) for name in ("images", "kv", "batches")}
    text = text.replace("[policy]", _SPILL.format(**places), 1)
    text = with_tool_parser(text, "hermes").replace("\ndtype", "\nverify = true\ndtype")
    # A copy: what is packed of a checkpoint is kept for one model.
    embedder = shutil.copytree(checkpoints / MODELS[-1], folder / EMBEDDER)
    text += _MORE.format(
        embedder=EMBEDDER,
        path=json.dumps(str(embedder)),
        journal=json.dumps(str(state / "journal.jsonl")),
        **places,
    )
    config = folder / "appliance.toml"
    config.write_text(text)
    drop_ins = folder / "appliance.toml.d"
    drop_ins.mkdir()
    (drop_ins / "50-admin.toml").write_text(_ADMIN)
    keys = folder / "keys.json"
    for name in (OPERATOR, INNOCENT, BATCHES, HOSTILE, PROBE, *LOADERS):
        scopes = (Scope.ADMIN,) if name == OPERATOR else (Scope.INFER,)
        sha256 = digest(secret(name))
        KeyFile(keys).add(Key(name=name, sha256=sha256, created_seconds=0.0, scopes=scopes))
    return Setting(config, keys, state, folder / "daemon.log", (host, port))


class DidNotStart(Exception):
    """The daemon ended before it was ready; the end of what it wrote."""


@dataclass(frozen=True)
class Restart:
    """Seconds since the signal that ended a daemon."""

    ready_seconds: float
    """Until all instances and a front end of the next one were ready."""
    served_seconds: float
    """Until each model had answered: its weights are read again. Clients wait as long."""


class Daemon:
    """One after the other. `up` is set while one serves and nothing but chance ends it."""

    def __init__(self, setting: Setting, disk: Disk) -> None:
        self.setting = setting
        self.disk = disk
        self.clock = ClockFile(setting.config.with_name("clock"))
        self.up = asyncio.Event()
        self.life = asyncio.Lock()
        """Of what ends a daemon, or may not happen while one starts."""
        self.restarts: list[Restart] = []
        self.complaints: list[str] = []
        self._ready = 0.0
        """When the last one was ready, by the monotonic clock."""
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: Watch | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def url(self) -> str:
        host, port = self.setting.address
        return f"http://{host}:{port}"

    @property
    def watch(self) -> Watch:
        """Of the daemon of now."""
        assert self._watch is not None
        return self._watch

    async def start(self) -> None:
        """Start one; return when each model has answered. Raises `DidNotStart`."""
        command = [sys.executable, "-P", str(Path(moved_clock.__file__)), str(self.clock.path)]
        command += ["serve", "--config", str(self.setting.config)]
        with self.setting.log.open("ab") as log:
            begins = log.tell()
            self._process = subprocess.Popen(  # noqa: ASYNC220 - that takes no time
                command, stdout=log, stderr=subprocess.STDOUT
            )
        self._watch = Watch(self.pid, self.url, self.setting.state / "journal.jsonl")
        deadline = time.monotonic() + START_SECONDS

        async def until(done: Callable[[], Awaitable[bool]]) -> None:
            assert self._process is not None
            while not await done():
                if self._process.poll() is not None or time.monotonic() > deadline:
                    with self.setting.log.open("rb") as log:
                        log.seek(begins)
                        raise DidNotStart(log.read()[-SAID_BYTES:].decode(errors="replace"))
                await asyncio.sleep(LOOK_SECONDS)

        await until(self.ready)
        self._watch.note()
        self._ready = time.monotonic()
        for model in MODELS:
            await until(partial(self._answers, model))
        self.up.set()

    async def end(self, number: signal.Signals) -> None:
        """Send the signal, and wait for the end; processes that outlive it are complaints."""
        self.up.clear()
        assert self._process is not None
        process, watch = self._process, self.watch
        watch.note()
        process.send_signal(number)
        try:
            await asyncio.to_thread(process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.complaints.append(f"the daemon did not end within {STOP_SECONDS:.0f} s")
            process.kill()
            await asyncio.to_thread(process.wait)
        left = await asyncio.to_thread(watch.left_behind)
        self.complaints += watch.complaints
        self.complaints += [f"{thing} outlives a daemon" for thing in left]

    def kill(self) -> None:
        """End it at once, whatever it does. Without effect if none runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    async def ready(self) -> bool:
        """Whether all instances are up, and a front end is ready."""
        with suppress(Closed, OSError, ValueError, KeyError):
            async with asyncio.timeout(STOP_SECONDS):
                _, status = await self.ask("GET", "/api/status")
                answered, _ = await self.ask("GET", "/readyz")
                up = all(one["state"] == "up" for one in status["instances"])
                return up and answered == 200
        return False

    async def _answers(self, model: str) -> bool:
        """Whether a token comes of it."""
        message = {"role": "user", "content": "Hello"}
        body = {"model": model, "messages": [message], "max_tokens": 1}
        with suppress(Closed, OSError, ValueError):
            status, _ = await self.ask("POST", "/v1/chat/completions", body, of=PROBE)
            return status == 200
        return False

    async def workers(self) -> list[int]:
        """Process ids of the workers that are up. Raises `Closed` and `OSError`."""
        _, status = await self.ask("GET", "/api/status")
        instances = status.get("instances", ())
        return [one["pid"] for one in instances if one["state"] == "up" and one["pid"]]

    async def ask(
        self, method: str, path: str, body: object = None, *, of: str = OPERATOR
    ) -> tuple[int, Any]:
        """Status and answer to a request with a key. Raises `Closed` and `OSError`."""
        return await ask_json(*self.setting.address, method, path, body, headers=key(of))

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A restart, whose times are noted."""
        began = time.monotonic()
        yield
        served = time.monotonic() - began
        self.restarts.append(Restart(round(self._ready - began, 2), round(served, 2)))
