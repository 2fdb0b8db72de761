"""Files of a box's models for other boxes: who gets which, in parts, and never anything else."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import io
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from msgspec.structs import replace

from appliance.access.auth import Access
from appliance.access.keys import Key, KeyFile, KeyRing, Scope, digest
from appliance.api.admin import model_files
from appliance.api.app import create_app
from appliance.checkpoints.peers.offer import Digests, OfferedFile
from appliance.daemon.served_model import ServedModel
from appliance.service.remote_models import RemoteModel, RemoteModels
from appliance.vocabulary import ModelSpec
from tests.unit.doubles.cluster import shape
from tests.unit.doubles.daemon import Box, setup_of
from tests.unit.doubles.instance import ModelDouble
from tests.unit.doubles.serving import served, unserved

SCOPES = {
    "operator": {"scopes": (Scope.ADMIN,)},
    "chats": {"scopes": (Scope.INFER,)},
    "graphs": {"scopes": (Scope.OBSERVE,)},
    "of-b": {"scopes": (Scope.ADMIN,), "models": ("b",)},
}
OPERATOR = {"x-api-key": "sk-operator"}


class FiledBox(Box):
    """Its models have files."""

    path = ""

    def served(self, spec: ModelSpec) -> ServedModel:
        made = super().served(spec)
        return replace(made, worker=replace(made.worker, path=self.path))


@pytest.fixture
def checkpoint(fake_checkpoint: Callable[..., Path]) -> Path:
    """With files that are offered, and some that are not."""
    path = fake_checkpoint("tiny")
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text("{}")
    for name in ("pytorch_model.bin", "modeling.py", ".hidden.json", "..json"):
        (path / name).write_text("secret")
    return path


@pytest.fixture
def access(tmp_path: Path) -> Access:
    file = KeyFile(tmp_path / "keys.json")
    for name, fields in SCOPES.items():
        key: Any = {"name": name, "sha256": digest(f"sk-{name}"), "created_seconds": 0.0}
        file.add(Key(**key, **fields))
    return Access(KeyRing(file.path), wall_clock=time.time)


@pytest.fixture
async def port(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, access: Access
) -> AsyncIterator[int]:
    """Of a box with keys, and with the models org/a and b."""
    monkeypatch.setattr(FiledBox, "path", str(checkpoint))
    models = {name: ModelDouble(4, shape()) for name in ("org/a", "b")}
    box = FiledBox(monkeypatch, models, setup_of(models))
    box.start()
    async with served(create_app(box.daemon, access=access)) as port:
        yield port
    box.daemon.host.close()
    assert box.take_failures() == []


@pytest.fixture
async def client(port: int) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=OPERATOR) as client:
        yield client


OFFERED = {"1_Pooling/config.json", "config.json", "model.safetensors", "tokenizer.json"}


async def test_files_are_listed_with_their_digests(
    client: httpx.AsyncClient, checkpoint: Path
) -> None:
    """Those that a pull takes; a name may have slashes."""
    answer = await client.get("/api/models/org/a/files")

    assert answer.status_code == 200
    listed = answer.json()
    assert (listed["model"], listed["complete"]) == ("org/a", True)
    assert {file["path"] for file in listed["files"]} == OFFERED
    for file in listed["files"]:
        content = (checkpoint / file["path"]).read_bytes()
        assert file["sha256"] == hashlib.sha256(content).hexdigest()
        assert file["bytes"] == len(content)
        assert file["modified"] == int((checkpoint / file["path"]).stat().st_mtime)


async def test_a_file_comes_whole_or_in_part(client: httpx.AsyncClient, checkpoint: Path) -> None:
    content = (checkpoint / "model.safetensors").read_bytes()
    url, size = "/api/models/b/files/model.safetensors", len(content)
    whole = await client.get(url)
    assert (whole.status_code, whole.content) == (200, content)
    assert whole.headers["accept-ranges"] == "bytes"

    for asked, part in (("bytes=5-", range(5, size)), ("bytes=0-0", range(1)),
                        (f"bytes=9-{size + 5}", range(9, size))):  # fmt: skip
        answer = await client.get(url, headers={"Range": asked})
        assert (answer.status_code, answer.content) == (206, content[part.start : part.stop])
        said = f"bytes {part.start}-{part.stop - 1}/{size}"
        assert answer.headers["content-range"] == said

    behind = await client.get(url, headers={"Range": f"bytes={size}-"})
    assert (behind.status_code, behind.headers["content-range"]) == (416, f"bytes */{size}")
    for asked in ("bytes=5-4", "bytes=-5", "bytes=0-1,3-4", "lines=1-2", "bytes=x-", "bytes=٣-"):
        header = {"Range": asked.encode()}
        assert (await client.get(url, headers=header)).status_code == 200  # type: ignore[arg-type]
    once = {"Range": "bytes=5-", "If-Range": '"then"'}
    assert (await client.get(url, headers=once)).content == content


def raw(port: int, path: str) -> tuple[int, bytes]:
    """What is answered to a path that no library has made tidy."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", path, headers=OPERATOR)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


@pytest.mark.parametrize(
    "path",
    [
        *("../keys.json", "%2e%2e/keys.json", "..%2fkeys.json", "./config.json"),
        *("1_Pooling/../config.json", "1_Pooling/%2e%2e/%2e%2e/keys.json", "//etc/passwd"),
        *("/etc/passwd", "%2fetc%2fpasswd", "config.json%00", "1_Pooling"),
        *("pytorch_model.bin", "modeling.py", ".hidden.json", "..json", "..\\keys.json"),
        *("CONFIG.JSON", "config.json%20", "b/files/config.json"),
    ],
)
async def test_no_path_leads_out(port: int, path: str) -> None:
    """A file is found by its name in the list, and by nothing else."""
    status, body = await asyncio.to_thread(raw, port, f"/api/models/b/files/{path}")

    assert status == 404
    assert b"secret" not in body
    assert b"root:" not in body


@pytest.mark.parametrize("linked", ["model.safetensors", "1_Pooling/config.json"])
async def test_a_link_that_leads_out_is_not_followed(
    client: httpx.AsyncClient, checkpoint: Path, tmp_path: Path, linked: str
) -> None:
    """It is named, with what to do. One that stays inside is a file like others."""
    (checkpoint / "vocab.json").symlink_to("tokenizer.json")
    inside = await client.get("/api/models/b/files/vocab.json")
    assert (inside.status_code, inside.content) == (200, b"{}")

    file = checkpoint / linked
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    for path in ("/api/models/b/files", f"/api/models/b/files/{linked}"):
        answer = await client.get(path)
        assert answer.status_code == 409
        error = answer.json()["error"]
        assert error["code"] == "files_not_offered"
        assert f"{linked} is a link that leads out of the checkpoint's folder" in error["message"]


async def test_a_folder_that_is_a_link_is_not_looked_into(
    client: httpx.AsyncClient, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.json").write_text("secret")
    (checkpoint / "linked").symlink_to(tmp_path / "elsewhere")
    listed = (await client.get("/api/models/b/files")).json()

    assert {file["path"] for file in listed["files"]} == OFFERED
    assert (await client.get("/api/models/b/files/linked/x.json")).status_code == 404


@pytest.mark.parametrize("path", ["/api/models/org/a/files", "/api/models/org/a/files/config.json"])
async def test_only_keys_that_an_admin_gave_the_scope(client: httpx.AsyncClient, path: str) -> None:
    """And of these, none whose models are others."""
    statuses = {}
    for name in (*SCOPES, "unknown", ""):
        answer = await client.get(path, headers={"x-api-key": f"sk-{name}"})
        statuses[name] = answer.status_code
    del client.headers["x-api-key"]
    statuses["none"] = (await client.get(path)).status_code

    assert statuses == {
        "operator": 200, "chats": 403, "graphs": 403, "of-b": 404, "unknown": 401, "": 401,
        "none": 401,
    }  # fmt: skip


async def test_unknown_models_and_methods(client: httpx.AsyncClient) -> None:
    for name in ("c", "files", "c/files/files"):
        answer = await client.get(f"/api/models/{name}/files")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert (await client.post("/api/models/b/files")).status_code == 404
    assert (await client.get("/api/models/b/filesystem")).status_code == 404


async def test_models_that_lie_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their files are not here."""
    models = {"b": ModelDouble(4, shape())}
    box = FiledBox(monkeypatch, models, setup_of(models))
    box.start()
    remote = RemoteModel(name="far", address="http://192.0.2.9/v1", called="x", max_context=9,
                         created=1)  # fmt: skip
    box.daemon.remotes = RemoteModels((remote,))
    async with unserved(create_app(box.daemon)) as client:
        answer = await client.get("/api/models/far/files/config.json")
    box.daemon.host.close()

    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "remote_model")


async def test_a_list_waits_so_long_for_digests(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has what is known by then, others are answered meanwhile, and no file is read twice."""
    gate, read = threading.Event(), []
    find = Digests.find

    def slow(self: Digests, files: Iterable[OfferedFile]) -> None:
        gate.wait()
        read.append(threading.current_thread() is threading.main_thread())
        find(self, files)

    monkeypatch.setattr(Digests, "find", slow)
    monkeypatch.setattr(model_files, "DIGEST_SECONDS", 0.0)
    early = (await client.get("/api/models/b/files")).json()
    assert not early["complete"]
    assert {file["sha256"] for file in early["files"]} == {None}
    content = await client.get("/api/models/b/files/config.json")
    assert content.status_code == 200

    monkeypatch.setattr(model_files, "DIGEST_SECONDS", 60.0)
    gate.set()
    late = (await client.get("/api/models/b/files")).json()
    again = (await client.get("/api/models/org/a/files")).json()
    assert late["complete"]
    assert again["files"] == late["files"]
    assert read == [False]


async def test_a_changed_file_has_another_digest(
    client: httpx.AsyncClient, checkpoint: Path
) -> None:
    first = (await client.get("/api/models/b/files")).json()
    (checkpoint / "tokenizer.json").write_text("[]")
    second = (await client.get("/api/models/b/files")).json()

    changed = [
        new["path"] for old, new in zip(first["files"], second["files"], strict=True)
        if old["sha256"] != new["sha256"]
    ]  # fmt: skip
    assert changed == ["tokenizer.json"]


async def test_digests_of_sha256sums_are_taken(client: httpx.AsyncClient, checkpoint: Path) -> None:
    """As they stand there: a file that was damaged since is noticed by the box that pulls it."""
    sums = f"{'a' * 64}  model.safetensors\n"
    (checkpoint / "SHA256SUMS").write_text(sums)
    files = (await client.get("/api/models/b/files")).json()["files"]

    assert {file["path"]: file["sha256"] for file in files}["model.safetensors"] == "a" * 64


async def test_so_many_files_are_sent_at_once(
    client: httpx.AsyncClient, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More are refused with the time to try again, and a client that leaves makes room."""
    monkeypatch.setattr(model_files, "MAX_TRANSFERS", 1)
    with (checkpoint / "more.safetensors").open("wb") as file:
        file.truncate(256 << 20)  # more than what is on its way
    url = "/api/models/b/files/more.safetensors"
    async with client.stream("GET", url) as unread:
        assert unread.status_code == 200
        busy = await client.get(url)
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "2")
        assert busy.json()["error"]["code"] == "transfers_full"
        assert (await client.get("/api/models/b")).status_code == 200

    small = "/api/models/b/files/config.json"
    while (after := await client.get(small)).status_code == 503:
        pass  # the box has yet to notice
    assert after.status_code == 200


async def test_a_full_box_looks_at_no_files(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused costs it nothing, whatever was asked for."""
    listings: list[Path] = []
    offered = model_files.offered

    def counted(folder: Path) -> dict[str, OfferedFile]:
        listings.append(folder)
        return offered(folder)

    monkeypatch.setattr(model_files, "offered", counted)
    monkeypatch.setattr(model_files, "MAX_TRANSFERS", 0)
    for path in ("config.json", "nothing.json"):
        refused = await client.get(f"/api/models/b/files/{path}")
        assert refused.json()["error"]["code"] == "transfers_full"
    assert listings == []
    monkeypatch.setattr(model_files, "MAX_TRANSFERS", 1)
    for status, path in ((404, "nothing.json"), (200, "config.json"), (200, "config.json")):
        assert (await client.get(f"/api/models/b/files/{path}")).status_code == status
    assert len(listings) == 3


class Slow(io.FileIO):
    """A file on a disk that answers when `gate` is set."""

    def __init__(self, path: Path, closed: Callable[[], None]) -> None:
        super().__init__(path)
        self.begun, self.gate = threading.Event(), threading.Event()
        self.says_closed = closed

    def read(self, size: int | None = -1, /) -> Any:
        self.begun.set()
        self.gate.wait()
        return super().read(-1 if size is None else size)

    def close(self) -> None:
        super().close()
        self.says_closed()


async def test_a_file_is_closed_when_nothing_reads_it(checkpoint: Path) -> None:
    """Not when the client hangs up: a thread would go on with the descriptor of another file."""
    closed = asyncio.Event()
    file = Slow(checkpoint / "config.json", closed.set)
    models = model_files.OfferedModels(cast(Any, None))
    sent = model_files._Sent(models, cast(Any, file), None, 100)

    async def receive() -> Any:
        await asyncio.to_thread(file.begun.wait)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        assert message["type"] == "http.response.start"

    await sent(cast(Any, {"type": "http"}), receive, send)
    assert not file.closed
    assert models._sending == 1
    file.gate.set()
    await closed.wait()
    assert models._sending == 0


async def test_a_key_of_other_models_reaches_none(client: httpx.AsyncClient) -> None:
    """It neither sees what a model does nor changes it, nor has one added."""
    limited = {"x-api-key": "sk-of-b"}
    for method, path in (("GET", ""), ("POST", "/drain"), ("POST", "/evict"), ("POST", "/load")):
        answer = await client.request(method, f"/api/models/org/a{path}", headers=limited)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert (await client.get("/api/models/b", headers=limited)).json()["model"] == "b"
    assert not (await client.get("/api/models/org/a")).json()["draining"]
    assert (await client.post("/api/models/b/drain", headers=limited)).json()["draining"]
