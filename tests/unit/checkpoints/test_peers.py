"""Models from other boxes: real boxes on loopback ports, and lines that break, damage and lie."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress as Bars
from safetensors.numpy import save_file

from appliance.access.auth import Access
from appliance.access.keys import Key, KeyFile, KeyRing, Scope, digest
from appliance.api.admin import model_files
from appliance.api.app import create_app
from appliance.checkpoints.peers import source as peers
from appliance.checkpoints.peers.source import PeerSource
from appliance.checkpoints.pull import _part, pull_found
from appliance.checkpoints.sources import Progress
from appliance.cli.main import cli
from appliance.cli.start.pull import _Bars
from appliance.config.loader import load_config
from appliance.daemon import reload
from appliance.daemon.reload import LiveConfig
from appliance.errors import CheckpointError, PullError
from appliance.fleet import apply
from tests.unit.api.test_model_files import FiledBox
from tests.unit.doubles.daemon import setup_of, small
from tests.unit.doubles.serving import served

FILES = {"config.json", "model.safetensors", "tokenizer.json"}
WEIGHTS = "model.safetensors"
CONFIG = """\
[devices]
memory = "8MiB"
slab = "64KiB"
host_cache = "16MiB"

[policy]
use = ["serverlessllm"]

[catalog]
folder = "models"

[[model]]
name = "d"
path = "other"
max_context = 256
"""


@dataclass
class Wire:
    """What lies between two boxes: an ASGI application in front of another one."""

    app: Any
    breaks_after: int | None = None
    """Bytes of an answer with weights after which the connection ends."""
    flips: int | None = None
    """The byte of the weights that comes as another one."""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """Paths and ranges."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        ranged = dict(scope["headers"]).get(b"range")
        self.asked.append((scope["path"], ranged and ranged.decode()))
        if not scope["path"].endswith(WEIGHTS):
            await self.app(scope, receive, send)
            return
        begun = int(ranged.decode().removeprefix("bytes=").rstrip("-")) if ranged else 0
        sent = 0

        async def spoilt(message: Any) -> None:
            nonlocal sent
            body = bytearray(message.get("body", b""))
            at = -1 if self.flips is None else self.flips - begun - sent
            if 0 <= at < len(body):
                body[at] ^= 1
            if self.breaks_after is not None and sent + len(body) > self.breaks_after:
                part = bytes(body[: self.breaks_after - sent])
                await send({"type": "http.response.body", "body": part, "more_body": True})
                raise ConnectionError("the line is cut")
            sent += len(body)
            await send({**message, "body": bytes(body)} if body else message)

        await self.app(scope, receive, spoilt)

    def ranges(self) -> list[str | None]:
        """Asked of the weights."""
        return [ranged for path, ranged in self.asked if path.endswith(WEIGHTS)]


@pytest.fixture
def checkpoint(fake_checkpoint: Callable[..., Path]) -> Path:
    """Whose weights are no zeros."""
    path = fake_checkpoint("tiny")
    weight = np.arange(512 * 512, dtype=np.float32).reshape(512, 512)
    save_file({"weight": weight}, path / WEIGHTS)
    (path / "pytorch_model.bin").write_bytes(b"a pickle")
    return path


@pytest.fixture
async def wire(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoint: Path
) -> AsyncIterator[Wire]:
    """In front of a box with keys and the models a and b."""
    monkeypatch.setattr(FiledBox, "path", str(checkpoint))
    models = small("ab")
    box = FiledBox(monkeypatch, models, setup_of(models))
    box.start()
    file = KeyFile(tmp_path / "keys.json")
    for name, scope in (("operator", Scope.ADMIN), ("chats", Scope.INFER)):
        sha256 = digest(f"sk-{name}")
        file.add(Key(name=name, sha256=sha256, created_seconds=0.0, scopes=(scope,)))
    access = Access(KeyRing(file.path), wall_clock=time.time)
    yield Wire(create_app(box.daemon, access=access))
    box.daemon.host.close()
    assert box.take_failures() == []


@pytest.fixture
async def peer(wire: Wire) -> AsyncIterator[str]:
    async with served(wire) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models"


async def run(*arguments: object, key: str = "sk-operator") -> Result:
    environment = {"APPLIANCE_API_KEY": key}
    words = [str(argument) for argument in arguments]
    return await asyncio.to_thread(CliRunner().invoke, cli, words, env=environment)


async def pulled(peer: str, folder: Path, *more: str, key: str = "sk-operator") -> Result:
    asked = ("pull", "a", "--from", peer, "--dir", folder, "--no-add", *more)
    return await run(*asked, key=key)


def names(path: Path) -> set[str]:
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}


def entries(path: Path) -> list[str]:
    return [one.name for one in path.iterdir()] if path.exists() else []


def is_copy(path: Path, checkpoint: Path) -> bool:
    """Of what is offered, with the times of its files."""
    return names(path) == FILES | {".origin"} and all(
        (path / name).read_bytes() == (checkpoint / name).read_bytes()
        and int((path / name).stat().st_mtime) == int((checkpoint / name).stat().st_mtime)
        for name in FILES
    )


async def test_a_model_comes_from_another_box(
    peer: str, wire: Wire, folder: Path, checkpoint: Path
) -> None:
    """As a pull from anywhere comes; one that is there already is not fetched again."""
    result = await pulled(peer, folder)
    assert result.exit_code == 0, result.output
    assert "fetched model.safetensors (1.0MiB)" in result.output
    assert result.output.endswith(f"verifying\na is in {folder / 'a'}\n")
    assert is_copy(folder / "a", checkpoint)
    assert wire.ranges() == [None]
    origin = json.loads((folder / "a" / ".origin").read_text(encoding="utf-8"))
    assert (origin["peer"], origin["model"]) == (peer, "a")
    assert "sk-operator" not in (folder / "a" / ".origin").read_text(encoding="utf-8")

    again = await pulled(peer, folder, "--json")
    steps = [json.loads(line) for line in again.output.splitlines()]
    assert {step["status"] for step in steps} == {"present", "verifying", "success"}
    assert wire.ranges() == [None]
    renamed = await pulled(peer, folder, "--name", "org/mine")
    assert renamed.exit_code == 0, renamed.output
    assert is_copy(folder / "org--mine", checkpoint)


@dataclass
class Target:
    """A daemon that is to have models of the other box."""

    url: str
    config: Path
    settings: LiveConfig

    def may_pull_from(self, *peers: str, key_file: str = "") -> None:
        running = self.settings._running
        catalog = replace(running.catalog, peers=peers, peer_key_file=key_file)
        self.settings._running = replace(running, catalog=catalog)

    async def ask(self, **body: object) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            return await client.post("/api/pull", json={"model": "a", "stream": False} | body)


@pytest.fixture
async def target(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    wire: Wire,
    fake_checkpoint: Callable[..., Path],
) -> AsyncIterator[Target]:
    """Without keys, and with a folder for models."""
    there = tmp_path / "there"
    there.mkdir()
    fake_checkpoint("there/other")
    config = there / "appliance.toml"
    config.write_text(CONFIG, encoding="utf-8")
    models = small("d")
    box = FiledBox(monkeypatch, models, setup_of(models, policy="serverlessllm"))
    box.world.models.update(small("abd"))
    box.start()
    settings = LiveConfig(box.daemon, load_config(config), config)
    async with served(create_app(box.daemon, settings=settings)) as port:
        yield Target(f"http://127.0.0.1:{port}", config, settings)
    box.daemon.host.close()
    assert box.take_failures() == []


async def test_the_daemon_serves_it_then(peer: str, target: Target, checkpoint: Path) -> None:
    """Two daemons: the command puts the model of the first into the folder of the second, which
    serves it, also after a restart."""
    result = await run("pull", "a", "--from", peer, "--url", target.url)
    assert result.exit_code == 0, result.output
    async with httpx.AsyncClient(base_url=target.url) as client:
        assert (await client.get("/api/models/a")).json()["model"] == "a"
    assert is_copy(target.config.parent / "models" / "a", checkpoint)
    assert [model.name for model in load_config(target.config).models] == ["d", "a"]

    taken = await run("pull", "a", "--from", peer, "--url", target.url)
    assert "a model 'a' is in the catalogue already" in taken.stderr


async def test_a_daemon_pulls_from_boxes_that_its_configuration_names(
    peer: str, target: Target, wire: Wire, tmp_path: Path, checkpoint: Path
) -> None:
    """With the key of its file, and from no others, whatever a request says."""
    secret = tmp_path / "peer.key"
    secret.write_text("sk-operator\n")
    for named in ((), ("http://192.0.2.1:11500",), (f"{peer}0",)):
        target.may_pull_from(*named, key_file=str(secret))
        refused = await target.ask(**{"from": peer})
        assert refused.status_code == 422
        assert f"from: '{peer}' is no box that this one may pull from" in refused.json()["error"]
        assert "add it there and restart, or use `appliance pull --from`" in refused.text
    assert wire.asked == []

    target.may_pull_from(peer)
    keyless = await target.ask(**{"from": peer})
    assert "wants a key (401): set catalog.peer_key_file" in keyless.json()["error"]
    target.may_pull_from(peer, key_file=str(tmp_path / "gone.key"))
    unread = await target.ask(**{"from": peer})
    assert (unread.status_code, "catalog.peer_key_file: " in unread.text) == (422, True)

    secret.write_text("sk-chats")
    target.may_pull_from(peer, key_file=str(secret))
    refused = await target.ask(**{"from": peer})
    assert "the one in catalog.peer_key_file has to be one with" in refused.json()["error"]

    secret.write_text("sk-operator\n")
    target.may_pull_from(f"{peer}/", key_file=str(secret))
    fetched = await target.ask(**{"from": peer, "add": False})
    where = target.config.parent / "models" / "a"
    assert fetched.json() == {"status": "success", "path": str(where)}
    assert is_copy(where, checkpoint)
    assert [model.name for model in load_config(target.config).models] == ["d"]
    assert (await target.ask(model="b", **{"from": peer})).json() == {"status": "success"}
    assert [model.name for model in load_config(target.config).models] == ["d", "b"]


async def test_an_address_that_is_empty_is_refused(target: Target) -> None:
    """It would be a pull from a hub."""
    async with httpx.AsyncClient(base_url=target.url) as client:
        for stream in (False, True):
            body = {"model": "a", "from": "", "stream": stream}
            refused = await client.post("/api/pull", json=body)
            assert (refused.status_code, refused.json()["error"]) == (
                400,
                "from: give the address of a box, or leave it out",
            )


async def test_another_box_may_call_a_model_latest(target: Target) -> None:
    """Its name is asked for as it is; from elsewhere the word is left out, as Ollama adds it."""
    liar = Liar([told("pytorch_model.bin")])
    async with served(liar) as port:
        target.may_pull_from(f"http://127.0.0.1:{port}")
        await target.ask(model="d:latest", **{"from": f"http://127.0.0.1:{port}"})
    assert set(liar.asked) == {"/api/models/d:latest/files"}
    assert (await target.ask(model="d:latest")).json() == {"status": "success"}


async def test_the_event_loop_does_not_wait_for_a_source(
    peer: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is read, and the connection made and closed, in threads."""
    threads: list[bool] = []

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            threads.append(threading.current_thread() is threading.main_thread())
            return call(*arguments)

        return noting

    monkeypatch.setattr(reload, "peer_source", noted(reload.peer_source))
    for step in ("__enter__", "__exit__"):
        monkeypatch.setattr(PeerSource, step, noted(getattr(PeerSource, step)))
    target.may_pull_from(peer)
    wanting = (await target.ask(**{"from": peer})).json()["error"]
    assert wanting == f"{peer} wants a key (401): set catalog.peer_key_file"
    assert threads == [False, False, False]


async def test_no_proxy_gets_the_key(
    peer: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Liar()
    async with served(proxy) as port:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        result = await pulled(peer, folder)

    assert result.exit_code == 0, result.output
    assert proxy.asked == []


async def test_a_pull_that_broke_off_goes_on(
    peer: str, wire: Wire, folder: Path, checkpoint: Path
) -> None:
    """With the byte after the last one that came, and nothing is visible before it is whole."""
    wire.breaks_after = 300_000
    first = await pulled(peer, folder)
    assert first.exit_code == 1
    assert f"a of {peer} broke off (" in first.stderr
    assert "pull again to go on where it stopped" in first.stderr
    assert entries(folder) == [".a.part"]

    wire.breaks_after = 400_000
    assert (await pulled(peer, folder)).exit_code == 1
    wire.breaks_after = None
    last = await pulled(peer, folder, "--json")
    assert last.exit_code == 0, last.output
    assert wire.ranges() == [None, "bytes=300000-", "bytes=700000-"]
    steps = [json.loads(line) for line in last.output.splitlines()]
    assert [step["file"] for step in steps if step["status"] == "present"] == ["config.json"]
    assert is_copy(folder / "a", checkpoint)
    assert entries(folder) == ["a"]


@pytest.mark.parametrize("flipped", [5, 1_000_000])
async def test_a_byte_that_comes_damaged(
    peer: str, wire: Wire, folder: Path, checkpoint: Path, flipped: int
) -> None:
    """Is noticed before the model is there, and the file is fetched anew."""
    wire.flips = flipped
    damaged = await pulled(peer, folder)
    assert damaged.exit_code == 1
    assert f"model.safetensors of a of {peer} came damaged: its SHA-256" in damaged.stderr
    assert entries(folder) == [".a.part"]
    assert WEIGHTS not in names(folder / ".a.part")

    wire.flips = None
    assert (await pulled(peer, folder)).exit_code == 0
    assert wire.ranges() == [None, None]
    assert is_copy(folder / "a", checkpoint)


async def test_a_byte_that_is_damaged_here(
    peer: str, wire: Wire, folder: Path, checkpoint: Path
) -> None:
    """Of what came before the line broke."""
    wire.breaks_after = 300_000
    await pulled(peer, folder)
    (part,) = (folder / ".a.part" / ".peer").iterdir()
    content = bytearray(part.read_bytes())
    content[200_000] ^= 1
    part.write_bytes(content)
    wire.breaks_after = None

    assert "came damaged" in (await pulled(peer, folder)).stderr
    assert (await pulled(peer, folder)).exit_code == 0
    assert wire.ranges() == [None, "bytes=300000-", None]
    assert is_copy(folder / "a", checkpoint)


async def test_a_damaged_disk_there_is_noticed(peer: str, folder: Path, checkpoint: Path) -> None:
    """By the checksums that came with the model."""
    content = bytearray((checkpoint / WEIGHTS).read_bytes())
    sums = f"{hashlib.sha256(content).hexdigest()}  {WEIGHTS}\n"
    (checkpoint / "SHA256SUMS").write_text(sums)
    content[-1] ^= 1
    (checkpoint / WEIGHTS).write_bytes(content)

    result = await pulled(peer, folder)
    assert result.exit_code == 1
    assert "run `appliance doctor --verify` there" in result.stderr
    assert entries(folder) == [".a.part"]


async def test_a_model_that_changed_meanwhile_begins_anew(
    peer: str, wire: Wire, folder: Path, checkpoint: Path
) -> None:
    """No model is made of files of two."""
    wire.breaks_after = 300_000
    await pulled(peer, folder)
    save_file({"weight": np.ones((512, 512), np.float32)}, checkpoint / WEIGHTS)
    (checkpoint / "tokenizer.json").write_text('{"new": 1}')
    wire.breaks_after = None

    assert (await pulled(peer, folder)).exit_code == 0
    assert wire.ranges() == [None, None]
    assert is_copy(folder / "a", checkpoint)


async def test_it_waits_for_digests_and_for_its_turn(
    peer: str, folder: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A box that reads its files for the first time has no digests yet, and it may be busy."""
    monkeypatch.setattr(model_files, "DIGEST_SECONDS", 0.0)
    monkeypatch.setattr(peers, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(model_files, "MAX_TRANSFERS", 1)
    monkeypatch.setattr(model_files, "RETRY_SECONDS", 0)
    with (checkpoint / "more.safetensors").open("wb") as file:
        file.truncate(256 << 20)
    url = f"{peer}/api/models/b/files/more.safetensors"
    headers = {"x-api-key": "sk-operator"}
    async with httpx.AsyncClient(headers=headers) as client, client.stream("GET", url) as unread:
        assert unread.status_code == 200
        (checkpoint / "more.safetensors").unlink()
        pulling = asyncio.create_task(pulled(peer, folder))
        while not (await client.get(f"{peer}/api/models/a/files")).json()["complete"]:
            pass
        assert not pulling.done()

    result = await pulling
    assert result.exit_code == 0, result.output
    assert is_copy(folder / "a", checkpoint)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (
            "sk-chats",
            "refuses the key (403): the one in $APPLIANCE_API_KEY has to be one with the scope",
        ),
        ("sk-unknown", "refuses the key (401): the one in $APPLIANCE_API_KEY has"),
        ("", "wants a key (401): set $APPLIANCE_API_KEY"),
    ],
)
async def test_keys_that_may_not(peer: str, folder: Path, key: str, said: str) -> None:
    result = await pulled(peer, folder, key=key)

    assert result.exit_code == 1
    assert said in result.stderr
    assert not names(folder)


async def test_what_cannot_be_asked(peer: str, folder: Path) -> None:
    """Errors say what is wrong, and what to do."""
    unknown = await run("pull", "nothing", "--from", peer, "--dir", folder, "--no-add")
    assert f"{peer} does not give nothing (404): model 'nothing' does not exist" in unknown.stderr
    away = await pulled("http://127.0.0.1:9", folder)
    assert "see that the box runs and is reached" in away.stderr
    for address in ("ftp://box", "box:11500", "http://u:p@box", "http://", "http://box?x=1"):
        assert f"error: --from: {address!r} is no address" in (await pulled(address, folder)).stderr
    for name in ("a/../../health", "../a", "a/./b", "a/..", "", "a b", "a?x=1"):
        led = await run("pull", name, "--from", peer, "--dir", folder, "--no-add")
        assert f"{name!r} cannot be the name of a model of another box" in led.stderr
    with (
        PeerSource(peer, "a" * 70_000, "", key_from="the test") as lengthy,
        pytest.raises(PullError, match=r"broke off \(URL too long\)"),
    ):
        lengthy.listing()
    for option in (["--link"], ["--adapter-of", "a"]):
        both = await pulled(peer, folder, *option)
        assert (both.exit_code, f"leave {option[0]} out" in both.stderr) == (2, True)


@dataclass
class Liar:
    """Something that is no appliance, or a wicked one."""

    files: Sequence[dict[str, Any]] = ()
    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()
    full: list[tuple[str, str]] = field(default_factory=list)
    """Codes of refusals of a file, with the seconds to wait, before it comes."""
    asked: list[str] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.asked.append(scope["path"])
        body = self.body
        if scope["path"].endswith("/files") and self.files:
            body = json.dumps({"files": self.files}).encode()
        start = {"type": "http.response.start", "status": self.status, "headers": self.headers}
        if not scope["path"].endswith("/files") and self.full:
            code, after = self.full.pop(0)
            body = json.dumps({"error": {"code": code, "message": f"it is {code}"}}).encode()
            start |= {"status": 503, "headers": ((b"retry-after", after.encode()),)}
        await send(start)
        await send({"type": "http.response.body", "body": body})


def told(path: str, **fields: Any) -> dict[str, Any]:
    sha256 = hashlib.sha256(b"{}").hexdigest()
    return {"path": path, "bytes": 2, "modified": 1, "sha256": sha256} | fields


def wrong(message: object) -> Liar:
    return Liar(body=json.dumps({"error": {"message": message}}).encode(), status=404)


LIES: dict[str, tuple[Liar, str]] = {
    "out": (Liar([told("../x.json"), told(WEIGHTS)]), "'../x.json' leads out of it"),
    "root": (Liar([told("/etc/x.json"), told(WEIGHTS)]), "leads out of it"),
    "size": (Liar([told(WEIGHTS, bytes=-1)]), "a size or a time that no file has"),
    "time": (Liar([told(WEIGHTS, modified=1 << 70)]), "a size or a time that no file has"),
    "path": (Liar([told("x" * 4097), told(WEIGHTS)]), "has a name, a size or a time that no file"),
    "no text": (Liar(body=b'{"files": [{"path": "\xff"}]}'), "is no appliance that offers files"),
    "deep": (Liar(body=b'{"x":' + b"[" * 100_000), "is no appliance that offers files"),
    "twice": (Liar([told(WEIGHTS), told(WEIGHTS)]), "lists a file twice"),
    "pickle": (Liar([told("pytorch_model.bin")]), "is a pickle, which may run code"),
    "longer": (Liar([told(WEIGHTS)], b"{}{}"), "is longer than its 2 bytes"),
    "shorter": (Liar([told(WEIGHTS)], b"{"), "came damaged"),
    "large": (Liar([told(WEIGHTS, bytes=1 << 55)]), "are free on"),
    "no list": (Liar(body=b'{"models": []}'), "is no appliance that offers files"),
    "no end": (Liar(body=b" " * (17 << 20)), "answers with more than"),
    "html": (Liar(body=b"<html>", status=502), "(502): correct --from, or update"),
    "bytes": (Liar(body=b'{"error": "\xff"}', status=404), "(404): correct --from, or update"),
    "nested": (Liar(body=b"[" * 100_000, status=404), "(404): correct --from, or update"),
    "text": (Liar(body=b'{"error": "no"}', status=404), "(404): correct --from, or update"),
    "number": (wrong(7), "(404): correct --from, or update"),
    "escape": (wrong("\x1b[2J"), "(404): correct --from, or update"),
    "lengthy": (wrong("x" * 501), "(404): correct --from, or update"),
    "short": (wrong("x" * 500), f"(404): {'x' * 500}\n"),
    "away": (Liar(status=302, headers=((b"location", b"http://192.0.2.1/"),)), "(302): correct"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
async def test_what_another_box_says_is_not_believed(lie: str, folder: Path) -> None:
    """Nothing of it is visible, and nothing is written elsewhere."""
    liar, said = LIES[lie]
    async with served(liar) as port:
        result = await pulled(f"http://127.0.0.1:{port}", folder)

    assert result.exit_code == 1, result.output
    assert said in result.stderr
    assert entries(folder) in ([], [".a.part"])
    assert entries(folder.parent) in ([], ["models"])


async def test_digests_that_never_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pull ends, and keeps what it has."""
    monkeypatch.setattr(peers, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(peers, "PATIENCE_SECONDS", 0.01)
    async with served(Liar([told(WEIGHTS, sha256=None)], b"{}")) as port:
        result = await pulled(f"http://127.0.0.1:{port}", folder)

    assert "tells no SHA-256 of model.safetensors; pull again later" in result.stderr


def fetched(url: str, folder: Path) -> list[Progress]:
    """What a pull tells of, to its end; the file of a liar is no checkpoint."""
    told_of: list[Progress] = []
    with (
        PeerSource(url, "a", "", key_from="the test") as found,
        pytest.raises((PullError, CheckpointError)) as error,
    ):
        pull_found(found, found.address, folder, "a", link=False, tell=told_of.append)
    told_of.append(Progress(str(error.value)))
    return told_of


async def test_a_pull_that_waits_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its turn, and for a digest; else `fleet apply` would take it for dead."""
    monkeypatch.setattr(peers, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(peers, "TELL_SECONDS", 0.0)
    liar = Liar([told(WEIGHTS)], b"{}", full=[("transfers_full", "2")] * 3)
    async with served(liar) as port:
        turns = await asyncio.to_thread(fetched, f"http://127.0.0.1:{port}", folder)
    assert [one.status for one in turns].count("waiting") == 3
    assert Progress("waiting", WEIGHTS) in turns

    monkeypatch.setattr(peers, "PATIENCE_SECONDS", 0.01)
    async with served(Liar([told("a.json"), told(WEIGHTS, sha256=None)], b"{}")) as port:
        digests = await asyncio.to_thread(fetched, f"http://127.0.0.1:{port}", folder / "b")
    assert Progress("waiting", WEIGHTS) in digests
    assert "tells no SHA-256" in digests[-1].status


def test_a_terminal_is_told_once_that_a_pull_waits() -> None:
    shown = io.StringIO()
    with Bars(console=Console(file=shown)) as bars:
        tell = _Bars(bars)
        for _ in range(3):
            tell(Progress("waiting", WEIGHTS))
        tell(Progress("fetching", WEIGHTS, 1, 2))
        tell(Progress("waiting", WEIGHTS))
    assert shown.getvalue().count(f"waiting {WEIGHTS}") == 2


def test_apply_has_more_patience_than_a_pull() -> None:
    """Of the constants as they ship."""
    assert peers.TELL_SECONDS < peers.PATIENCE_SECONDS < apply.SILENCE_SECONDS


async def test_a_refusal_says_how_long_to_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within bounds; a box that refuses for another reason is not asked again."""
    waited: list[float] = []
    monkeypatch.setattr(peers._Wait, "__call__", lambda self, seconds: waited.append(seconds))
    full = [("transfers_full", after) for after in ("2", "0", "9999", "-1", "soon", "")]
    liar = Liar([told(WEIGHTS)], b"{}", full=[*full, ("draining", "1"), ("draining", "1")])
    async with served(liar) as port:
        url = f"http://127.0.0.1:{port}"
        last = (await asyncio.to_thread(fetched, url, folder))[-1].status
    assert waited == [2.0, 0.5, 10.0, 0.5, 0.5, 0.5]
    assert last == f"{url} does not give a (503): it is draining"


async def test_a_second_pull_of_a_name_is_told_to_wait(peer: str, folder: Path) -> None:
    with _part(folder / ".a.part"):
        result = await pulled(peer, folder)

    assert "wait until it is over, then pull again" in result.stderr


async def test_several_pulls_at_once(peer: str, folder: Path, checkpoint: Path) -> None:
    """More than the box sends files at once: some wait for their turn."""
    told_of: list[Progress] = []

    def fetch(name: str) -> None:
        with PeerSource(peer, "a", "sk-operator", key_from="the test") as found:
            pull_found(found, found.address, folder, name, link=False, tell=told_of.append)

    await asyncio.gather(*(asyncio.to_thread(fetch, f"n{number}") for number in range(6)))
    assert all(is_copy(folder / f"n{number}", checkpoint) for number in range(6))
