"""What goes wrong around a daemon: memory that is too small, files that change, a full disk.

One daemon lives through all of it, in the order of this file. Its models are copies of one
checkpoint. The host cache has room for the master image of one of them, so that all others are read
from their files whenever they are loaded.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.config.loader import load_config
from appliance.config.schema import Config
from appliance.demo.checkpoints import write_config
from appliance.demo.run import free_port, metrics_by_model, running_daemon
from appliance.demo.traffic import ChatRequest, TimedAnswer, send
from tests.patience import PATIENCE_SECONDS, until

ORIGINAL = "qwen2-a"
CACHED, PLAIN = "cached", "plain"
SUMS, HEADER = "wrong-sums", "broken-header"
TRUNCATED, REPLACED = "truncated", "replaced"
# In the order in which engines are built; the last one's header breaks before its turn comes.
MODELS = (CACHED, PLAIN, SUMS, TRUNCATED, REPLACED, HEADER)

SLAB = 32 << 10
CONTEXT = 320
BLOCK_TOKENS, BLOCK_BYTES = 32, 4 * (32 << 10)
POOL_BLOCKS, HOST_BLOCKS = 12, 28
"""Blocks that have room beside one model's weights, and beside the one image."""
ROUNDS_TO_FILL = 50


@dataclass(frozen=True)
class Box:
    """The daemon, its files, and what plain vLLM says to chats with the original model."""

    url: str
    pid: int
    folder: Path
    config: Config
    expected: dict[ChatRequest, list[int]]

    def weights(self, model: str) -> Path:
        return self.folder / model / "model.safetensors"

    @property
    def log(self) -> str:
        return (self.folder / "daemon.log").read_text(errors="replace")

    def ask(self, chats: list[ChatRequest]) -> list[TimedAnswer]:
        return asyncio.run(send(self.url, chats, lambda _: None))

    def serves(self, model: str) -> bool:
        """Whether the model answers, token for token."""
        chat = min(self.expected, key=lambda chat: chat.max_tokens)
        (answer,) = self.ask([replace(chat, model=model)])
        return answer.error is None and answer.tokens == self.expected[chat]

    def refusal(self, model: str) -> dict[str, str]:
        """The error that a request for the model is answered with."""
        body = {"model": model, "messages": [{"role": "user", "content": "?"}], "max_tokens": 8}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=PATIENCE_SECONDS)
        assert answer.status_code == 500
        error: dict[str, str] = answer.json()["error"]
        return error

    def phases(self) -> list[str]:
        """Where requests are on their way."""
        answer = httpx.get(f"{self.url}/api/requests", timeout=PATIENCE_SECONDS).raise_for_status()
        return [request["phase"] for request in answer.json()["requests"]]

    def state(self, model: str) -> str:
        status = (
            httpx.get(f"{self.url}/api/status", timeout=PATIENCE_SECONDS).raise_for_status().json()
        )
        (state,) = (m["state"] for m in status["models"] if m["model"] == model)
        return str(state)


@pytest.fixture(scope="module")
def box(
    checkpoints: Path,
    expected: dict[ChatRequest, list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Box]:
    """The daemon; one header is broken when it has checked its files and not built that engine."""
    folder = tmp_path_factory.mktemp("faults")
    for model in MODELS:
        shutil.copytree(checkpoints / ORIGINAL, folder / model)
    (folder / SUMS / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    listing = hashlib.sha256((folder / PLAIN / "model.safetensors").read_bytes()).hexdigest()
    (folder / PLAIN / "SHA256SUMS").write_text(f"{listing}  model.safetensors\n")
    file = _write_config(folder)
    config = load_config(file)
    mine = {c: t for c, t in expected.items() if c.model == ORIGINAL}
    box = Box(f"http://{config.api.bind}", 0, folder, config, mine)
    with ThreadPoolExecutor(1) as beside:
        breaking = beside.submit(_break_header, box)
        with running_daemon(file, config) as (_, pid):
            breaking.result()
            until(lambda: all(box.state(model) not in ("absent", "building") for model in MODELS))
            yield replace(box, pid=pid)


def _break_header(box: Box) -> None:
    """As soon as the daemon answers: it has checked its files then, and its worker imports vLLM and
    builds five engines before this one."""

    def is_up() -> bool:
        with suppress(httpx.TransportError):
            assert box.state(HEADER) == "absent", "its engine is built already"
            return True
        return False

    until(is_up)
    _overwrite(box.weights(HEADER), 8, b"\0" * 16)


def _write_config(folder: Path) -> Path:
    weights = read_checkpoint(ORIGINAL, folder / CACHED, "float32").weight_bytes
    image = -(-weights // SLAB) * SLAB
    text = write_config(
        folder,
        MODELS,
        bind=f"127.0.0.1:{free_port()}",
        instances=1,
        memory=f"{(image + POOL_BLOCKS * BLOCK_BYTES) >> 10}KiB",
        slab=f"{SLAB >> 10}KiB",
        host_cache=f"{(image + HOST_BLOCKS * BLOCK_BYTES) >> 10}KiB",
        max_context=CONTEXT,
        policy="aegaeon",  # it switches in every round, whichever model could wait
    ).read_text()
    for model, key in ((CACHED, "pin"), (SUMS, "verify"), (PLAIN, "verify")):
        line = f'name = "{model}"\n'
        assert line in text
        text = text.replace(line, f"{line}{key} = true\n")
    file = folder / "appliance.toml"
    file.write_text(f"{text}\n[journal]\npath = 'journal'\n")
    return file


def test_memory_for_a_part_of_the_requests(box: Box) -> None:
    """More and longer requests than pool or host cache hold: those without room wait, those that
    run make room for each other, and all of them end, with the right tokens."""
    chats = [replace(c, model=m) for c in box.expected for m in (CACHED, PLAIN)] * 2
    blocks = sum(-(-chat.max_tokens // BLOCK_TOKENS) for chat in chats)
    assert blocks > 2 * HOST_BLOCKS > 4 * POOL_BLOCKS

    answers = box.ask(chats)

    assert [answer.error for answer in answers] == [None] * len(chats)
    originals = [replace(chat, model=ORIGINAL) for chat in chats]
    assert [answer.tokens for answer in answers] == [box.expected[chat] for chat in originals]
    first_end = min(a.ttft_seconds + sum(a.gaps_seconds) for a in answers)
    assert max(a.ttft_seconds for a in answers) > first_end, "some had to wait for others to end"
    metrics = metrics_by_model(box.url)
    for model in (CACHED, PLAIN):
        assert metrics["appliance_kv_swapped_bytes_total", model] > 0, "the pool was too small"
        assert metrics["appliance_prefills_total", model] == len(chats) / 2, "nothing is recomputed"


def test_a_client_that_does_not_read(box: Box) -> None:
    """Makes room for others, which are served, and gets the rest of the same answer later."""
    body = {"model": PLAIN, "prompt": "It was a long winter", "max_tokens": 250, "logprobs": 5}
    body |= {"temperature": 0, "ignore_eos": True}
    whole = httpx.post(f"{box.url}/v1/completions", json=body, timeout=PATIENCE_SECONDS).json()
    url = httpx.URL(box.url)
    with socket.socket() as plug:
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plug.settimeout(PATIENCE_SECONDS)
        plug.connect((url.host, url.port))
        asked = json.dumps(body | {"stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(asked)}\r\n"
        head += "Content-Type: application/json\r\n"
        plug.sendall(f"{head}Host: localhost\r\n\r\n".encode() + asked)
        assert plug.recv(12).endswith(b" 200")
        until(lambda: box.phases() == ["paused"])
        assert box.serves(CACHED)
        with plug.makefile("rb") as answer:
            events = [line[6:] for line in answer if line.startswith(b"data: {")]

    said = "".join(choice["text"] for e in events for choice in json.loads(e)["choices"])
    assert said == whole["choices"][0]["text"]


def test_wrong_checksum(box: Box) -> None:
    """A file that is not the one in SHA256SUMS is a named error of that model, if it is to be
    verified; one that is passes."""
    error = box.refusal(SUMS)

    assert error["code"] == "model_failed"
    assert str(box.weights(SUMS)) in error["message"]
    assert "SHA-256" in error["message"]
    assert box.serves(PLAIN)


def test_corrupt_header(box: Box) -> None:
    """A header that broke since the configuration was checked is a named error of that model."""
    error = box.refusal(HEADER)

    assert error["code"] == "model_failed"
    assert str(box.weights(HEADER)) in error["message"]
    assert "corrupt" in error["message"]
    assert box.serves(PLAIN)


def test_truncated_file(box: Box) -> None:
    """A file that became shorter since its engine was built is a named error of that model."""
    with box.weights(TRUNCATED).open("r+b") as file:
        file.truncate(1 << 20)

    error = box.refusal(TRUNCATED)

    assert error["code"] == "model_failed"
    assert f"{box.weights(TRUNCATED)} is truncated" in error["message"]
    assert box.refusal(TRUNCATED) == error
    assert box.serves(PLAIN)


def test_replaced_file_that_is_read_again(box: Box) -> None:
    """A model without an image works until its file is another one; then that is the error."""
    assert box.serves(REPLACED)
    assert box.serves(PLAIN), "which takes the place of the weights"
    _replace(box.weights(REPLACED))

    error = box.refusal(REPLACED)

    assert error["code"] == "model_failed"
    assert f"{box.weights(REPLACED)} was replaced" in error["message"]
    assert box.serves(PLAIN)


def test_replaced_file_with_an_image(box: Box) -> None:
    """A model whose image is in the host cache goes on as it was, whatever its file is by now."""
    assert box.serves(PLAIN), "which takes the place of the weights"
    _replace(box.weights(CACHED))

    assert box.serves(CACHED)
    assert box.serves(PLAIN)
    assert box.serves(CACHED)


def test_full_disk(box: Box) -> None:
    """When the journal cannot grow any more, that is said once, and the service goes on."""
    sizes = [(box.folder / name).stat().st_size for name in ("journal", "daemon.log")]
    room = max(sizes) + (64 << 10)
    resource.prlimit(box.pid, resource.RLIMIT_FSIZE, (room, room))

    chats = [replace(chat, model=CACHED) for chat in box.expected]
    for _ in range(ROUNDS_TO_FILL):
        assert all(answer.error is None for answer in box.ask(chats))
        if "the journal ends here" in box.log:
            break
    assert (box.folder / "journal").stat().st_size == room

    assert box.serves(PLAIN)
    assert box.serves(CACHED)
    assert box.log.count("the journal ends here") == 1
    ready = httpx.get(f"{box.url}/readyz", timeout=PATIENCE_SECONDS)
    assert ready.status_code == 200


def _overwrite(file: Path, place: int, content: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(place)
        stream.write(content)


def _replace(file: Path) -> None:
    """Put another file of the same size in its place."""
    other = file.with_suffix(".new")
    other.write_bytes(os.urandom(file.stat().st_size))
    other.replace(file)
