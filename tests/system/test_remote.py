"""A model too big for a box: another appliance serves it, and this one passes requests on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from appliance.access.keys import KeyFile, NewKey, Scope, make_key
from appliance.config.loader import load_config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.run import free_port, running_daemon
from tests.patience import PATIENCE_SECONDS
from tests.system.conftest import until

MESSAGES: Any = [{"role": "user", "content": "Tell me of the river."}]
BOTH = (Scope.INFER, Scope.ADMIN)


def keys_in(path: Path, *names: str) -> dict[str, str]:
    """Their secrets, by name."""
    secrets = {}
    for name in names:
        made, secrets[name] = make_key(NewKey(name=name, scopes=BOTH), time.time())
        KeyFile(path).add(made)
    return secrets


def configured(folder: Path, model: str, more: str) -> Path:
    make_checkpoints(folder, [model])
    file = write_config(folder, [model], instances=1, bind=f"127.0.0.1:{free_port()}")
    text = file.read_text().replace("[api]\n", '[api]\nkeys = "keys.json"\n')
    text = text.replace('admin_socket = ""', 'admin_socket = "admin.sock"')
    file.write_text(f'{text}\n[usage]\ndirectory = "usage"\n{more}\n')
    return file


class Pair(NamedTuple):
    """Two boxes: `near` passes on to `far`, of which it is one key."""

    near: openai.OpenAI
    far: openai.OpenAI
    far_pid: int
    near_url: str
    far_url: str
    near_key: str
    far_key: str


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    far_folder, folder = tmp_path_factory.mktemp("far"), tmp_path_factory.mktemp("near")
    far_keys = keys_in(far_folder / "keys.json", "near-box", "direct")
    near_keys = keys_in(folder / "keys.json", "alice")
    far_file = configured(far_folder, "qwen3-a", "")
    with running_daemon(far_file, load_config(far_file)) as (far_url, far_pid):
        secret = folder / "far.key"
        secret.write_text(far_keys["near-box"] + "\n")
        secret.chmod(0o600)
        remote = (
            f'[[model]]\nname = "big"\nremote = "{far_url}"\nremote_model = "qwen3-a"\n'
            'remote_key_file = "far.key"\nmax_context = 1024\naliases = ["gpt-4o"]\n'
        )
        file = configured(folder, "llama-a", remote)
        with (
            running_daemon(file, load_config(file)) as (url, _),
            openai.OpenAI(base_url=f"{url}/v1", api_key=near_keys["alice"], max_retries=0) as near,
            openai.OpenAI(
                base_url=f"{far_url}/v1", api_key=far_keys["direct"], max_retries=0
            ) as far,
        ):
            yield Pair(near, far, far_pid, url, far_url, near_keys["alice"], far_keys["direct"])


def ask(pair: Pair, path: str, url: str = "") -> Any:
    of_far = url == pair.far_url
    headers = {"x-api-key": pair.far_key if of_far else pair.near_key}
    answer = httpx.get(f"{url or pair.near_url}{path}", headers=headers, timeout=PATIENCE_SECONDS)
    return answer.raise_for_status().json()


def test_it_is_listed_and_takes_nothing_of_the_box(pair: Pair) -> None:
    """By its own name and its alias, in every list; it is never resident."""
    assert {"llama-a", "big", "gpt-4o"} == {model.id for model in pair.near.models.list()}
    card = pair.near.models.retrieve("big")
    assert (card.owned_by, card.to_dict()["state"], card.to_dict()["max_model_len"]) == (
        "remote", "remote", 1024
    )  # fmt: skip
    tags = {row["name"] for row in ask(pair, "/api/tags")["models"]}
    assert {"big:latest", "gpt-4o:latest"} <= tags
    (mine,) = [row for row in ask(pair, "/api/models")["models"] if row["model"] == "big"]
    assert mine["state"] == "remote"
    assert ask(pair, "/api/models/big") == mine
    load = ask(pair, "/api/load")
    assert {"big", "gpt-4o"} <= set(load["catalogue"])
    assert not {"big", "gpt-4o"} & {*load["resident"], *load["coming"], *load["host"]}
    for verb in ("load", "evict", "drain", "pin"):
        refused = httpx.post(
            f"{pair.near_url}/api/models/big/{verb}", headers={"x-api-key": pair.near_key}
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "remote_model")
    refused = httpx.delete(f"{pair.near_url}/api/models/big", headers={"x-api-key": pair.near_key})
    assert refused.status_code == 409


def test_answers_are_those_of_the_other_box(pair: Pair) -> None:
    """Whole and streamed, chats, completions and responses: the same text, and the same usage."""
    given: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    there = pair.far.chat.completions.create(model="qwen3-a", **given)
    here = pair.near.chat.completions.create(model="big", **given)
    stream = pair.near.chat.completions.create(
        model="gpt-4o", stream=True, stream_options={"include_usage": True}, **given
    )
    chunks = list(stream)
    assert there.choices[0].message.content
    assert here.choices[0].message == there.choices[0].message
    assert here.usage is not None
    assert there.usage is not None
    assert here.usage.total_tokens == there.usage.total_tokens
    said = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert said == there.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == there.usage.total_tokens
    assert (here.model, {one.model for one in chunks}) == ("big", {"gpt-4o"})

    prompt: dict[str, Any] = {"prompt": ["The river", "A bird"], "max_tokens": 9, "temperature": 0}
    both = [
        client.completions.create(model=model, **prompt)
        for client, model in ((pair.far, "qwen3-a"), (pair.near, "big"))
    ]
    assert [one.text for one in both[0].choices] == [one.text for one in both[1].choices]

    asked: dict[str, Any] = {"input": "Hello, river", "max_output_tokens": 9, "temperature": 0}
    responses = [
        client.responses.create(model=model, **asked)
        for client, model in ((pair.far, "qwen3-a"), (pair.near, "big"))
    ]
    assert responses[0].output_text == responses[1].output_text
    assert responses[1].model == "big"


def test_both_ledgers_agree(pair: Pair) -> None:
    """What our keys used of it here is what this box used there, to the token."""
    pair.near.chat.completions.create(model="big", messages=MESSAGES, max_tokens=5)
    here = ask(pair, "/api/usage?by=key,model")["rows"]
    there = ask(pair, "/api/usage?by=key,model", pair.far_url)["rows"]

    (mine,) = [row for row in here if row["model"] == "big"]
    (its,) = [row for row in there if row["key"] == "near-box"]
    assert mine["key"] == "alice"
    names = ("requests", "input_tokens", "output_tokens")
    assert [mine[name] for name in names] == [its[name] for name in names]
    assert mine["output_tokens"] > 0
    assert mine["gpu_seconds"] == 0


def test_it_is_for_openais_clients(pair: Pair) -> None:
    """Others are told so."""
    body = {"model": "big", "messages": MESSAGES, "max_tokens": 5}
    for path in ("/v1/messages", "/api/chat"):
        answer = httpx.post(
            f"{pair.near_url}{path}", json=body, headers={"x-api-key": pair.near_key}
        )
        assert answer.status_code == 400
        assert "another server" in answer.text


def test_a_dead_server_leaves_the_rest_as_it_was(pair: Pair) -> None:
    """Last: the other box is ended. Its model is 503, this box is ready and answers its own."""
    os.kill(pair.far_pid, signal.SIGTERM)

    def away() -> bool:
        try:
            pair.near.chat.completions.create(model="big", messages=MESSAGES, max_tokens=5)
        except openai.InternalServerError as error:
            return error.status_code == 503 and error.code == "remote_unavailable"
        return False

    until(away)
    assert ask(pair, "/readyz")["ok"]
    own = pair.near.chat.completions.create(model="llama-a", messages=MESSAGES, max_tokens=5)
    assert own.choices[0].message.content
