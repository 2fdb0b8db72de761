"""A model too big for a box: another appliance serves it, and this one passes requests on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx
import ollama
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


def both(pair: Pair) -> Iterator[tuple[str, str, str]]:
    """Of each box its address, what it calls the model, and a key."""
    yield pair.far_url, "qwen3-a", pair.far_key
    yield pair.near_url, "big", pair.near_key


def test_anthropics_client_gets_what_the_other_box_would_say(pair: Pair) -> None:
    """That one answers in its own dialect, this one by translation: whole and streamed."""
    texts, tokens = [], []
    asked: Any = {"max_tokens": 24, "messages": MESSAGES, "system": "Be brief."}
    for url, model, key in both(pair):
        with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
            cold: Any = {"extra_body": {"temperature": 0}}
            whole = client.messages.create(model=model, **asked, **cold)
            with client.messages.stream(model=model, **asked, **cold) as stream:
                streamed = stream.get_final_message()
        assert whole.model == streamed.model == model
        texts += [one.content[0].to_dict()["text"] for one in (whole, streamed)]
        usages = (whole.usage, streamed.usage)
        tokens += [(usage.output_tokens, usage.input_tokens
                    + (usage.cache_read_input_tokens or 0)) for usage in usages]  # fmt: skip
        assert (whole.stop_reason, streamed.stop_reason) == ("max_tokens", "max_tokens")
    assert texts[0]
    assert len(set(texts)) == 1
    assert tokens == [tokens[0]] * 4


def test_ollamas_client_gets_what_the_other_box_would_say(pair: Pair) -> None:
    """Likewise: chats, prompts with a template, and raw ones."""
    found = []
    options: Any = {"temperature": 0, "num_predict": 12}
    for url, model, key in both(pair):
        client = ollama.Client(url, headers={"authorization": f"Bearer {key}"})
        chat = client.chat(model, MESSAGES, options=options)
        lines = list(client.chat(model, MESSAGES, options=options, stream=True))
        prompt = client.generate(model, "The river", system="Be brief.", options=options)
        raw = client.generate(model, "The river", raw=True, options=options)
        said = "".join(line.message.content or "" for line in lines)
        found.append(
            [chat.message.content, said, prompt.response, raw.response]
            + [one.eval_count for one in (chat, lines[-1], prompt, raw)]
            + [one.prompt_eval_count for one in (chat, lines[-1], prompt, raw)]
        )
    assert found[0] == found[1]
    assert all(found[0])


def test_each_model_is_counted(pair: Pair) -> None:
    """In the metrics, as in the ledger."""
    headers = {"x-api-key": pair.near_key}
    text = httpx.get(f"{pair.near_url}/metrics", headers=headers).raise_for_status().text
    rows = ask(pair, "/api/usage?by=model")["rows"]
    (mine,) = [row for row in rows if row["model"] == "big"]
    shown = dict(line.rsplit(" ", 1) for line in text.splitlines() if "appliance_remote" in line)
    assert float(shown['appliance_remote_requests_total{model="big"}']) > 0
    output = shown['appliance_remote_tokens_total{kind="output",model="big"}']
    assert float(output) == mine["output_tokens"]
    assert "gpt-4o" not in "".join(shown)


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
