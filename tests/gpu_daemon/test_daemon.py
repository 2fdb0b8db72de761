"""A daemon with ``kind = "cuda"`` and one worker: statuses, accounting, changes while it runs.

What is asserted of answers holds on the pretend driver, whose tokens mean nothing, and on a GPU.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.config.loader import load_config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.recipes import KINDS
from appliance.demo.run import free_port, running_daemon
from appliance.errors import ConfigError
from tests.lora import make_adapter

DENSE, OTHER, EXPERTS, VECTORS = "llama-a", "qwen3-a", "mixtral-a", "vectors"
QUANTIZED = "qwen3-4bit-a"
NEVER_SECONDS = 300
"""A worker that starts, and kernels that are compiled for the first time."""


class Served:
    """The daemon, from outside."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder = folder
        self.client = httpx.Client(base_url=url, timeout=NEVER_SECONDS)

    def chat(self, model: str, tokens: int = 6, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hello there"}]
        asked = {"model": model, "messages": messages, "max_tokens": tokens, "ignore_eos": True}
        return self.client.post("/v1/chat/completions", json=asked | body)

    def instance(self) -> dict[str, Any]:
        (only,) = self.client.get("/api/status").raise_for_status().json()["instances"]
        return dict(only)

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + NEVER_SECONDS
        while not true():
            assert time.monotonic() < deadline, "it never became true"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    names = [DENSE, OTHER, EXPERTS]
    make_checkpoints(folder, names)
    file = write_config(
        folder,
        names,
        bind=f"127.0.0.1:{free_port()}",
        kind="cuda",
        instances=1,
        memory="1536MiB",
        runtime="1408MiB",
        slab="2MiB",
        host_cache="512MiB",
        dtype="bfloat16",
    )
    text = file.read_text()
    path = str(folder / OTHER)
    text += f'\n[[model]]\nname = "{VECTORS}"\npath = {path!r}\nmax_context = 512\n'
    text += 'dtype = "bfloat16"\ntask = "embed"\n'
    file.write_text(text)
    with running_daemon(file, load_config(file)) as (url, _):
        yield Served(url, folder)
    if kept := os.environ.get("OUT"):
        shutil.copy(folder / "daemon.log", Path(kept, "daemon-served.log"))


def test_adapters_are_refused(served: Served, tmp_path: Path) -> None:
    path = str(served.folder / DENSE)
    make_adapter(tmp_path / "tuned", path, seed=1)
    text = (served.folder / "appliance.toml").read_text()
    text += f'\n[[model]]\nname = "base"\npath = {path!r}\nmax_context = 512\ndtype = "bfloat16"\n'
    text += '[[model.adapter]]\nname = "tuned"\npath = "tuned"\n'
    (tmp_path / "appliance.toml").write_text(text)

    with pytest.raises(ConfigError, match="adapters are served on the CPU only"):
        load_config(tmp_path / "appliance.toml")


def test_quantized_weights_are_refused(served: Served, tmp_path: Path) -> None:
    (path,) = make_checkpoints(tmp_path, [QUANTIZED], KINDS)
    text = (served.folder / "appliance.toml").read_text()
    text += f'\n[[model]]\nname = "small"\npath = {str(path)!r}\nmax_context = 512\n'
    (tmp_path / "appliance.toml").write_text(text)

    with pytest.raises(ConfigError, match="its weights are quantized"):
        load_config(tmp_path / "appliance.toml")


@pytest.mark.parametrize("model", [DENSE, OTHER, EXPERTS])
def test_models_answer_in_turns(served: Served, model: str) -> None:
    for body in ({}, {"temperature": 0.8, "seed": 7}, {"temperature": 0.8, "top_p": 0.9}):
        answer = served.chat(model, **body)

        assert answer.status_code == httpx.codes.OK, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 6
        assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_a_stream_has_all_tokens(served: Served) -> None:
    answer = served.chat(DENSE, stream=True, stream_options={"include_usage": True})

    assert answer.status_code == httpx.codes.OK
    assert answer.text.rstrip().endswith("data: [DONE]")
    assert '"completion_tokens":6' in answer.text.replace(" ", "")


def test_a_guide_ends_no_worker(served: Served) -> None:
    """Its tokens fit on a GPU. On the pretend driver no mask is applied, so the request may end in
    an error; it is the request's, not the worker's."""
    pid = served.instance()["pid"]
    schema = {"name": "s", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}

    answer = served.chat(DENSE, response_format={"type": "json_schema", "json_schema": schema})

    assert answer.status_code < httpx.codes.BAD_GATEWAY, answer.text
    assert served.chat(DENSE).status_code == httpx.codes.OK
    assert served.instance()["pid"] == pid


def test_vectors(served: Served) -> None:
    answer = served.client.post("/v1/embeddings", json={"model": VECTORS, "input": ["a", "b c"]})

    assert answer.status_code == httpx.codes.OK, answer.text
    assert len(answer.json()["data"]) == 2


def test_what_is_wrong_is_refused(served: Served) -> None:
    assert served.chat("nothing").status_code == httpx.codes.NOT_FOUND
    assert served.chat(DENSE, tokens=5000).status_code == httpx.codes.BAD_REQUEST


def test_operators_evict_load_and_drain(served: Served) -> None:
    for verb in ("evict", "load", "drain"):
        done = served.client.post(f"/api/models/{OTHER}/{verb}")
        assert done.is_success, done.text
    refused = served.chat(OTHER)
    assert refused.json()["error"]["code"] == "model_draining"
    assert served.client.post(f"/api/models/{OTHER}/resume").is_success
    assert served.chat(OTHER).status_code == httpx.codes.OK


def test_models_come_and_go(served: Served) -> None:
    """What a model had is given back: as much of the pool is free as before, and nothing is under
    its name. The pool has room for all models, so that none of the others gives way."""
    file = served.folder / "appliance.toml"
    before = file.read_text()
    late = f'\n[[model]]\nname = "late"\npath = {str(served.folder / DENSE)!r}\n'
    late += 'max_context = 512\ndtype = "bfloat16"\n'
    free = served.instance()["pool_bytes"]["free"]
    for _ in range(2):
        file.write_text(before + late)
        assert served.client.post("/api/config/reload").is_success
        assert served.chat("late").status_code == httpx.codes.OK
        file.write_text(before)
        assert served.client.post("/api/config/reload").is_success
        served.until(lambda: served.chat("late").status_code == httpx.codes.NOT_FOUND)

        served.until(lambda: not any("late" in n for n in served.instance()["pool_bytes"]))
        assert served.instance()["pool_bytes"]["free"] == free
    assert served.chat(DENSE).status_code == httpx.codes.OK


def test_a_killed_worker_is_replaced(served: Served) -> None:
    pid = served.instance()["pid"]
    os.kill(pid, signal.SIGKILL)

    assert served.chat(DENSE).status_code == httpx.codes.OK
    assert served.instance()["pid"] != pid
