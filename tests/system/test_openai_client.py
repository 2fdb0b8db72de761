"""The official client against the real daemon: what an application sees."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch
from openai.types.chat import ChatCompletion

from tests.patience import PATIENCE_SECONDS
from tests.system.conftest import EMBEDDER, THINKER, Appliance, until

CHATS = "/v1/chat/completions"
GENERATING = ("llama-a", "llama-b", "llama-c", "qwen2-a", "qwen2-b", "qwen3-a")
HELLO: Any = [{"role": "user", "content": "Hello, river"}]


def test_models(client: openai.OpenAI) -> None:
    """Every configured model is listed, the cold ones too."""
    names = {model.id for model in client.models.list()}

    assert names == {*GENERATING, THINKER, EMBEDDER}
    assert client.models.retrieve("qwen3-a").owned_by == "appliance"


def test_chat_streamed_or_not_says_the_same(client: openai.OpenAI) -> None:
    """A chat gives one text, whole or in pieces, and counts its tokens."""
    whole = client.chat.completions.create(
        model="qwen3-a", messages=HELLO, max_tokens=24, temperature=0
    )
    chunks = list(
        client.chat.completions.create(
            model="qwen3-a",
            messages=HELLO,
            max_completion_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    text = whole.choices[0].message.content
    assert text
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert whole.usage is not None
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 24
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_completions(client: openai.OpenAI) -> None:
    """A plain completion continues its prompt; several choices differ by their seeds only."""
    first = client.completions.create(
        model="llama-a", prompt="The bridge", max_tokens=12, n=3, seed=7, temperature=1.0
    )
    again = client.completions.create(
        model="llama-a", prompt="The bridge", max_tokens=12, seed=8, temperature=1.0
    )

    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 3
    assert again.choices[0].text == texts[1]


def test_a_batch_says_the_same(client: openai.OpenAI) -> None:
    """Six lines for six models: what each is answered is what HTTP answers."""
    bodies: list[Any] = [
        {"model": model, "messages": HELLO, "max_tokens": 8, "temperature": 0}
        for model in GENERATING
    ]
    batch = over(client, begun(client, bodies))
    answers = lines_of(client, batch.output_file_id)

    assert batch.status == "completed", batch
    assert [answer["custom_id"] for answer in answers] == list(map(str, range(len(bodies))))
    for body, answer in zip(bodies, answers, strict=True):
        direct = client.chat.completions.create(**body)
        batched = ChatCompletion.model_validate(answer["response"]["body"])
        assert (batched.choices, batched.usage) == (direct.choices, direct.usage)


def test_a_line_that_is_wrong_has_its_error(client: openai.OpenAI) -> None:
    """In a file of its own, as HTTP would tell it; the others are answered."""
    good: Any = {"model": "llama-a", "messages": HELLO, "max_tokens": 2}
    batch = over(client, begun(client, [good, good | {"max_tokens": 0}]))
    (answer,) = lines_of(client, batch.output_file_id)
    (error,) = lines_of(client, batch.error_file_id)

    assert (answer["custom_id"], answer["response"]["status_code"]) == ("0", 200)
    assert (error["custom_id"], error["response"]["status_code"]) == ("1", 400)
    assert error["response"]["body"]["error"]["param"] == "max_tokens"


def test_a_batch_that_is_cancelled(appliance: Appliance, client: openai.OpenAI) -> None:
    """What ran is ended, at once; every line is told so."""
    endless: Any = {"model": "llama-c", "messages": HELLO, "max_tokens": 900, "ignore_eos": True}
    batch = begun(client, [endless] * 3)
    until(lambda: appliance.busy("llama-c"))
    client.batches.cancel(batch)
    done = over(client, batch)

    assert (done.status, done.output_file_id) == ("cancelled", None)
    codes = [line["error"]["code"] for line in lines_of(client, done.error_file_id)]
    assert codes == ["batch_cancelled"] * 3
    until(lambda: not appliance.busy("llama-c"))


def begun(client: openai.OpenAI, bodies: list[Any]) -> str:
    """The id of a batch of chats."""
    lines = [
        {"custom_id": str(number), "method": "POST", "url": CHATS, "body": body}
        for number, body in enumerate(bodies)
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=CHATS, completion_window="24h")
    return made.id


def over(client: openai.OpenAI, batch: str) -> Batch:
    ended = ("completed", "failed", "cancelled", "expired")
    until(lambda: client.batches.retrieve(batch).status in ended)
    return client.batches.retrieve(batch)


def lines_of(client: openai.OpenAI, file: str | None) -> list[Any]:
    assert file is not None
    return [json.loads(line) for line in client.files.content(file).iter_lines()]


def test_logprobs(client: openai.OpenAI) -> None:
    """Greedy sampling takes the most likely token, and says how likely it was."""
    answer = client.chat.completions.create(
        model="qwen2-b",
        messages=HELLO,
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )

    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(top.logprob for top in token.top_logprobs) <= 0


def test_stop_string(client: openai.OpenAI) -> None:
    """Text ends before a stop string, though tokens cut across it, and the model stops."""
    whole = client.completions.create(
        model="llama-c", prompt="Once", max_tokens=40, temperature=0
    ).choices[0]
    stop = whole.text[9:13]

    cut = client.completions.create(
        model="llama-c", prompt="Once", max_tokens=40, temperature=0, stop=[stop]
    ).choices[0]

    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"


def test_penalties_change_the_answer(client: openai.OpenAI) -> None:
    """A repetition penalty below one draws the answer back to the tokens of the prompt."""

    def text(**options: object) -> str:
        return (
            client.completions.create(
                model="qwen2-a", prompt="a b a b a b", max_tokens=40, temperature=0, **options
            )
            .choices[0]
            .text
        )

    assert text() == text()
    drawn_back = text(extra_body={"repetition_penalty": 0.2})
    assert drawn_back != text()


def test_unknown_model(client: openai.OpenAI) -> None:
    """404, with the code that programs look for."""
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=HELLO)

    assert caught.value.code == "model_not_found"


def test_prompt_too_long(client: openai.OpenAI) -> None:
    """400, in vLLM's words, which programs look for."""
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024"):
        client.completions.create(model="llama-a", prompt=[5] * 1025, max_tokens=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "hot"), ("max_tokens", 0), ("stop", [1]), ("tools", [{"type": "function"}])],
)
def test_bad_values_are_named(client: openai.OpenAI, field: str, value: object) -> None:
    """400, naming the field at fault; nothing is ignored."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="llama-a", messages=HELLO, extra_body={field: value})

    assert caught.value.param is not None
    assert field in caught.value.param.split(".")


def test_hanging_up_cancels(appliance: Appliance, client: openai.OpenAI) -> None:
    """A client that leaves takes its request with it, streaming or waiting for the whole."""
    until(lambda: not appliance.busy("llama-b"))
    before = appliance.cancelled("llama-b")
    body: Any = {"model": "llama-b", "messages": HELLO, "max_tokens": 900}
    endless = {"ignore_eos": True}
    with client.chat.completions.create(**body, stream=True, extra_body=endless) as stream:
        next(iter(stream))
    until(lambda: appliance.cancelled("llama-b") >= before + 1)
    with _asked(appliance, body | endless):
        until(lambda: appliance.busy("llama-b"))
    until(lambda: appliance.cancelled("llama-b") >= before + 2)

    assert not appliance.busy("llama-b")


def test_hanging_up_while_the_model_is_cold(appliance: Appliance, checkpoints: Path) -> None:
    """A client that leaves while its model is being built takes its request with it, too: whatever
    is built by then, its front half or its engine."""
    before = appliance.cancelled("cold")
    with httpx.Client(base_url=appliance.url, timeout=PATIENCE_SECONDS) as operator:
        new = {"name": "cold", "path": str(checkpoints / "qwen2-a"), "max_context": 256}
        operator.post("/api/models", json=new).raise_for_status()
        endless: Any = {"messages": HELLO, "max_tokens": 200, "ignore_eos": True}
        with _asked(appliance, {"model": "cold", **endless}):
            until(lambda: appliance.busy("cold"))
        until(lambda: appliance.cancelled("cold") >= before + 1)
        operator.delete("/api/models/cold").raise_for_status()
        until(lambda: operator.get("/api/models/cold").status_code == 404)


@contextmanager
def _asked(appliance: Appliance, body: dict[str, object]) -> Iterator[None]:
    """A connection that has sent a request; leaving hangs up."""
    content = json.dumps(body).encode()
    host, port = appliance.config.api.bind.host, appliance.config.api.bind.port
    with socket.create_connection((host, port)) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(content), content)
        )
        yield


def test_probes_and_metrics(appliance: Appliance, client: openai.OpenAI) -> None:
    """Probes answer; metrics have what dashboards need."""
    client.completions.create(model="llama-a", prompt="x", max_tokens=2)

    assert httpx.get(f"{appliance.url}/livez", timeout=PATIENCE_SECONDS).status_code == 200
    assert httpx.get(f"{appliance.url}/readyz", timeout=PATIENCE_SECONDS).status_code == 200
    text = httpx.get(f"{appliance.url}/metrics", timeout=PATIENCE_SECONDS).text
    for sample in (
        'appliance_switches_total{instance="0",model="llama-a",reason="prefill"} ',
        'appliance_preemptions_total{model="llama-a"} ',
        'appliance_kv_swapped_bytes_total{direction="out",model="llama-a"} ',
        'appliance_pool_bytes{instance="0",owner="weights:llama-a"} ',
        'appliance_pool_bytes{instance="0",owner="free"} ',
        'appliance_pool_high_water_bytes{instance="0"} ',
        'vllm:time_to_first_token_seconds_count{model_name="llama-a"} ',
    ):
        assert sample in text


def test_command_line(appliance: Appliance) -> None:
    """`list`, `ps` and `run` talk to the daemon."""

    def appliance_cli(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "appliance", *arguments, "--url", appliance.url],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_SECONDS,
        )
        return done.stdout

    listed = json.loads(appliance_cli("list", "--json"))
    assert {model["id"] for model in listed} >= {"llama-a", "qwen3-a"}
    status = json.loads(appliance_cli("ps", "--json"))
    assert [instance["state"] for instance in status["instances"]] == ["up"]
    said = appliance_cli("run", "llama-a", "Hello", "--max-tokens", "8", "--temperature", "0")
    assert said.strip()
