"""An appliance to be fuzzed, in its own process: the real core over workers that are doubles.

Its HTTP server is set up as `appliance.serve` does it, its configuration is in files, and answers
come as fast as they can. Front ends are doubles, too, without vLLM: one is a process that is handed
connections and answers whatever it is asked, another one computes the lines of batches. Models can
be fetched, added and removed, keys be made and revoked; only those that it begins with stay, so
that there is always a model to ask, and a key to ask it with. Every line on its standard input is
answered with a line of JSON on its standard output: what it holds then (`Held`). It ends with its
input, or with status 3 as soon as its daemon fails.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, chdir, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import msgspec
import pytest

from appliance.access.keys import Key, KeyFile, KeyRing, Scope, digest
from appliance.checkpoints.adapters import AdapterRoom
from appliance.config.loader import load_config
from appliance.config.schema import Config
from appliance.daemon.daemon import Daemon, Limits
from appliance.daemon.lifecycle import Server
from appliance.daemon.reload import LiveConfig
from appliance.errors import KeysError, NotSaved
from appliance.gateway.responses import StoredResponses
from appliance.gateway.supervisor import Supervisor
from appliance.serve import make_gateway, make_server
from appliance.service.event_log import Notice
from appliance.service.front_frames import Down, Hello, Run, Up
from appliance.service.interface import (
    Generation,
    InstanceVerification,
    Service,
    Sink,
    SubmitRequest,
)
from appliance.service.settings import Removal
from appliance.vocabulary import ModelName, Release, SlabMap, Task
from appliance.worker import frames
from tests.conftest import write_checkpoint
from tests.unit.checkpoints.test_adapters import Q, make_base, pair
from tests.unit.checkpoints.test_adapters import make as make_adapter
from tests.unit.doubles import front_end as front_end_double
from tests.unit.doubles.daemon import Box, WorkerDouble, setup_of, small
from tests.unit.doubles.fake_service import FakeService
from tests.unit.doubles.front import FrontDouble
from tests.unit.doubles.instance import Life, ModelDouble

MODELS = ("small", "org/small")
EMBEDDER = "embedder"
ADDED = "new"
PULLED = f"downloads/{ADDED}"
"""A model that can be fetched, and what it is called then."""
ADAPTER = "adapter"
"""A LoRA adapter that the first model can have."""
RESPONSE = "resp_0"
"""A stored response that everybody has; another one takes its place when it is deleted or ended."""
SECRETS = {Scope.INFER: "sk-fuzz-of-somebody", Scope.ADMIN: "sk-fuzz-of-an-operator"}
ANYTHING = "sk-fuzz-of-whoever-may-do-anything"
"""The key of who asks for all that there is."""

_LONGEST_ANSWER = 12
"""Tokens after which an answer ends of itself."""
_WATCHED_SECONDS = 0.02
"""After which a stream of events ends, where nothing may be without an end."""
_WORK_SECONDS = 0.001
"""How often it is looked for something to do."""
_FAILED = 3

_CONFIG = """\
[api]
max_body = "256KiB"
max_queue = 8
keep_alive = "1s"
{keys}

[devices]
memory = "8MiB"

[usage]
directory = "usage"

[batches]
directory = "batches"
max_file = "64KiB"
max_stored = "8MiB"

[catalog]
folder = "models"

[policy]
use = ["serverlessllm"]
"""
_MODEL = """
[[model]]
name = "{name}"
path = "{path}"
max_context = 256
max_loras = {places}
"""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What a process holds at one time."""

    port: int
    requests: int
    """That live in the appliance."""
    connections: int
    """Of the core and of the front end, and those that may be of either yet."""
    tasks: dict[str, int]
    """By the name of what they run."""
    descriptors: int
    rss_bytes: int


class Whole:
    """A daemon whose workers do what they are told; what they cannot do is made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, *, ending: bool) -> None:
        """When it is `ending`, so do its streams of events, before long. Files of its models are
        in the folder."""
        models = dict(zip((*MODELS, EMBEDDER), small("abc").values(), strict=True))
        monkeypatch.setattr("tests.unit.doubles.daemon.WorkerDouble", _Worker)
        self._box = Box(
            monkeypatch,
            _Known(models),
            setup_of(models),
            limits=Limits(queue=8, progress_seconds=60.0),
        )
        served = self._box.daemon.catalogue.served
        for name, model in served.items():
            path = str(folder / ("base" if name == MODELS[0] else "tiny"))
            worker = msgspec.structs.replace(model.worker, path=path)
            served[name] = msgspec.structs.replace(model, worker=worker)
        worker = msgspec.structs.replace(served[EMBEDDER].worker, task=Task.EMBED)
        served[EMBEDDER] = msgspec.structs.replace(served[EMBEDDER], worker=worker)
        worker = msgspec.structs.replace(served[MODELS[0]].worker, adapter_room=AdapterRoom(2, 16))
        served[MODELS[0]] = msgspec.structs.replace(served[MODELS[0]], worker=worker)
        self._box.daemon.on_failure = _fail
        self._box.start()
        self._ending = ending
        self._fake = FakeService()
        self._random = random.Random(1)
        self._began = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box.daemon, name)

    def submit(self, request: SubmitRequest, sink: Sink) -> Generation:
        most = request.max_tokens  # none if the prompt is pooled
        tokens = min(most, self._random.randint(1, _LONGEST_ANSWER))
        life = Life(request.model, len(request.prompt), tokens, most)
        self._box.world.lives[request.id] = life
        return self._box.daemon.submit(request, sink)

    async def events(self, after: int | None) -> AsyncIterator[list[Notice] | None]:
        async with aclosing(self._box.daemon.events(after)) as batches:  # type: ignore[type-var]
            bound = _WATCHED_SECONDS if self._ending else None
            with suppress(TimeoutError):
                while True:
                    batch = await asyncio.wait_for(anext(batches, []), bound)
                    yield batch
                    if batch == []:
                        return

    async def pool_map(self, number: int) -> SlabMap:
        return await self._fake.pool_map(number)

    async def verify(self) -> list[InstanceVerification]:
        return await self._fake.verify()

    async def work(self, front: _Front, stored: _Stored) -> None:
        """Do what there is to do, for ever."""
        box = self._box
        while True:
            box.now = max(box.now, time.monotonic() - self._began)
            for number, worker in box.workers.items():
                if cast(_Worker, worker).doomed:  # in quarantine; the fuzzing goes on
                    worker.die()
                    box.daemon.release_instance(number)
                    worker.greet()
            box.settle()
            stored.fill()
            if not box.daemon.requests():
                box.world.lives.clear()
                for worker in box.workers.values():
                    worker.sent.clear()
                front.forget()
            await asyncio.sleep(_WORK_SECONDS)

    @property
    def daemon(self) -> Daemon:
        return self._box.daemon


class _Known(dict[str, ModelDouble]):
    """Of any model more there is a double."""

    def __missing__(self, name: str) -> ModelDouble:
        (double,) = small("d").values()
        return self.setdefault(name, double)


class _Lasting(LiveConfig):
    """Keeps the models that it began with."""

    async def remove_model(self, name: ModelName, *, force: bool, files: bool) -> Removal:
        if name in (*MODELS, EMBEDDER):
            raise NotSaved(f"{name} has to stay")
        return await super().remove_model(name, force=force, files=files)


class _LastingKeys(KeyFile):
    """Keeps the keys that it began with: who asks has one of them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._first = {key.name for key in self.read()}

    def remove(self, name: str) -> Key:
        if name in self._first:
            raise KeysError(f"{name} has to stay")
        return super().remove(name)

    def assign(self, name: str, organization: str | None) -> Key:
        if name in self._first:
            raise KeysError(f"{name} belongs where it is")
        return super().assign(name, organization)


class _LastingRing(KeyRing):
    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self.file = _LastingKeys(path)


class _Worker(WorkerDouble):
    """Knows by itself that a request which it is to forget is over."""

    doomed = False
    """Whether it is to die. Let go before that, it dies all the same, as a real one does."""

    def hold(self) -> None:
        super().hold()
        self.doomed = True

    def die(self) -> None:
        super().die()
        self.doomed = False

    def send(self, message: frames.Down) -> None:
        if isinstance(message, Release) and self.world.lives[message.request].outcome is None:
            self.world.lives[message.request].outcome = "cancelled"
        super().send(message)


class _Line(msgspec.Struct):
    """What a front end checks of a line before it submits anything."""

    model: str
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)] = 8
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] = 1


class _Front(FrontDouble):
    """Answers lines of batches, also those that are no chat."""

    async def compute(self, call: int, path: str, body: dict[str, Any]) -> tuple[int, object]:
        try:
            msgspec.convert(body, type=_Line)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error
        return await super().compute(call, path, body)

    async def _answer(self, line: Run) -> None:
        try:
            await super()._answer(line)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self._ran(line, 400, {"error": {"message": repr(error), "code": 400}})

    def forget(self) -> None:
        """What was said about lines, if all are answered."""
        if not self._lines:
            self.sent.clear()
            for told in (self.tokens, self.details, self.ends, self.timings, self.refused):
                told.clear()


class _Stored:
    """Keeps a response for every owner that there is from the beginning, as a front end would."""

    def __init__(self, responses: StoredResponses, owners: Sequence[str], *, ending: bool) -> None:
        """When it is `ending`, the response is made already: a stream of it ends."""
        self._responses = responses
        self._owners = owners
        self._ending = ending

    def fill(self) -> None:
        """Those that are missing, and those that were ended."""
        for owner in self._owners:
            response = self._responses.find(owner, RESPONSE)
            if response is None or (response.is_finished and not self._ending):
                self._keep(owner)

    def _keep(self, owner: str) -> None:
        status = "completed" if self._ending else "in_progress"
        told = {"id": RESPONSE, "object": "response", "status": status, "output": []}
        response = self._responses.keep(owner, RESPONSE, msgspec.json.encode(told), b"[]")
        if not response.has_events:
            self._responses.add(response, b'event: response.created\ndata: {"type": "a"}\n\n')
        if not self._ending:
            response.cancel = lambda: self._responses.end(response, "cancelled")


class _Welcoming:
    """The session of the front end that is handed connections."""

    def __init__(self, send: Callable[[Down], None], _is_operator: Callable[[int], bool]) -> None:
        self._send = send

    def received(self, frame: Up, /) -> None:
        if isinstance(frame, Hello):
            self._send(front_end_double.WELCOME)

    def drained(self) -> None:
        """It has nothing but connections."""

    def lost(self) -> None:
        """The supervisor starts another one."""


def _fail(error: BaseException) -> NoReturn:
    sys.excepthook(type(error), error, error.__traceback__)
    os._exit(_FAILED)


def _configure(folder: Path, *, keys: bool) -> Config:
    for made in ("models", "downloads"):
        (folder / made).mkdir()
    for source in ("tiny", PULLED):
        write_checkpoint(folder / source, max_position_embeddings=256)
    path = folder / "appliance.toml"
    line = 'keys = "keys.json"' if keys else ""
    make_base(folder / "base", max_position_embeddings=256)
    make_adapter(folder, pair(Q), ADAPTER)
    models = _MODEL.format(name=MODELS[0], path="base", places=2)
    for name in (*MODELS[1:], EMBEDDER):
        models += _MODEL.format(name=name, path="tiny", places=0)
    path.write_text(_CONFIG.format(keys=line) + models, encoding="utf-8")
    if keys:
        holders: dict[str, tuple[Scope, ...]] = {ANYTHING: tuple(Scope)}
        holders |= {secret: (scope,) for scope, secret in SECRETS.items()}
        for secret, scopes in holders.items():
            KeyFile(folder / "keys.json").add(
                Key(
                    name="-".join(scopes),
                    sha256=digest(secret),
                    created_seconds=0.0,
                    scopes=scopes,
                    slo=True,
                    requests_per_minute=10**7,
                    tokens_per_minute=10**9,
                    concurrency=64,
                )
            )
    return load_config(path)


def _name(task: asyncio.Task[Any]) -> str:
    return str(getattr(task.get_coro(), "__qualname__", ""))


def _held(whole: Whole, server: Server, front_ends: Supervisor, port: int) -> Held:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return Held(
        port=port,
        requests=len(whole.daemon.requests()) + len(whole.daemon._requests.streams),
        connections=sum(
            (
                len(server.server_state.connections),
                server.acceptor.undecided,
                front_ends.connections,
            )
        ),
        tasks=dict(sorted(Counter(map(_name, asyncio.all_tasks())).items())),
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
    )


async def _serve(folder: Path, *, keys: bool, ending: bool) -> None:
    config = _configure(folder, keys=keys)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("appliance.serve.KeyRing", _LastingRing)
        whole = Whole(monkeypatch, folder, ending=ending)
        core = cast(Daemon, cast(Service, whole))
        gateway = make_gateway(core, config)
        whole.daemon.catalogue.on_change = gateway.sessions.catalogue_changed
        front_ends = Supervisor(1, _Welcoming, command=front_end_double.COMMAND)
        whole.daemon.front_ends_missing = front_ends.not_ready
        settings = _Lasting(whole.daemon, config, folder / "appliance.toml")
        server = make_server(core, config, settings, gateway=gateway, front_ends=front_ends)
        holders = (ANYTHING, *SECRETS.values()) if keys else ()
        owners = [digest(secret) for secret in holders] or [""]
        stored = _Stored(gateway.sessions.responses, owners, ending=ending)
        working = asyncio.create_task(whole.work(_Front(gateway.sessions), stored))
        working.add_done_callback(_check)
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
        )
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            serving = asyncio.create_task(server.serve([listener]))
            await server.listening.wait()
            front_ends.on_given_back = server.acceptor.take_back
            front_ends.start()
            while await lines.readline():
                held = _held(whole, server, front_ends, port)
                sys.stdout.buffer.write(msgspec.json.encode(held) + b"\n")
                sys.stdout.flush()
            await front_ends.stop(0)
            server.should_exit = True
            await serving
        working.cancel()


def _check(working: asyncio.Task[None]) -> None:
    if not working.cancelled() and (error := working.exception()) is not None:
        _fail(error)


def main() -> None:
    """Serve until there is no more input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", action="store_true", help="answer only those who have a key")
    parser.add_argument("--ending", action="store_true", help="end streams of events soon")
    asked = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # where models are pulled from
        asyncio.run(_serve(Path(folder), keys=asked.keys, ending=asked.ending))


if __name__ == "__main__":
    main()
