"""Ollama's client: chats, generation, embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ollama
import pytest

from tests.clients.conftest import (
    BOOKED,
    EMBEDDER,
    SCHEMA,
    SMALL,
    VECTOR_SIZE,
    WORDY,
    Appliance,
    Stay,
)  # fmt: skip
from tests.docblocks import code_blocks
from tests.parrot import ANSWER, THOUGHT

HELLO: Any = [{"role": "user", "content": "Hello, river"}]
TOOL: Any = {"type": "function", "function": {"name": "book", "parameters": SCHEMA}}


@pytest.fixture
def client(appliance: Appliance) -> Iterator[ollama.Client]:
    with ollama.Client(appliance.url) as made:
        yield made


def test_recipe(recipe: Callable[..., str], run: Callable[..., str]) -> None:
    assert ANSWER in run("python", "-c", recipe(code_blocks("docs/recipes/ollama.md", "python")))


def test_chat(client: ollama.Client) -> None:
    """Whole or streamed, chatted or generated: one text, one count of tokens."""
    whole = client.chat(SMALL, HELLO, think=True)
    lines = list(client.chat(f"{SMALL}:latest", HELLO, think=True, stream=True))
    generated = client.generate(SMALL, "Hello, river", think=True)

    assert (whole.message.thinking, whole.message.content) == (THOUGHT, ANSWER)
    assert "".join(line.message.content or "" for line in lines) == ANSWER
    assert generated.response == ANSWER
    assert lines[-1].done_reason == "stop"
    assert whole.eval_count == lines[-1].eval_count == generated.eval_count
    assert "tools" in (client.show(SMALL).capabilities or ())


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tools(client: ollama.Client, stream: bool) -> None:
    said = client.chat(SMALL, HELLO, tools=[TOOL], stream=stream)
    messages = [line.message for line in said] if stream else [said.message]
    calls = [call for message in messages for call in message.tool_calls or ()]
    results = [{"role": "tool", "tool_name": "book", "content": "done"}] * 2
    end = client.chat(SMALL, [*HELLO, {"role": "assistant", "tool_calls": calls}, *results])

    assert [Stay.model_validate(call.function.arguments) for call in calls] == BOOKED
    assert end.message.content == ANSWER


def test_structured_output(client: ollama.Client) -> None:
    answer = client.chat(SMALL, HELLO, format=SCHEMA, options={"num_predict": 1000})

    Stay.model_validate_json(answer.message.content or "")


def test_embeddings(client: ollama.Client) -> None:
    answer = client.embed(EMBEDDER, ["Hello", "river"])
    (old,) = [client.embeddings(EMBEDDER, "Hello").embedding]

    assert [len(vector) for vector in answer.embeddings] == [VECTOR_SIZE] * 2
    assert len(old) == VECTOR_SIZE


def test_errors(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as unknown:
        client.chat("llama9", HELLO)
    with pytest.raises(ollama.ResponseError) as bad:
        client.chat(SMALL, HELLO, options={"num_predict": "many"})

    assert (unknown.value.status_code, bad.value.status_code) == (404, 400)
    assert "not found" in unknown.value.error


def test_habits(client: ollama.Client) -> None:
    """What Ollama accepts: a context longer than the model's, its own defaults."""
    options = {"num_ctx": 131072, "repeat_last_n": 64, "repeat_penalty": 1.1, "temperature": 0}

    assert client.chat(SMALL, HELLO, options=options, keep_alive="5m").message.content


def test_cancel(appliance: Appliance, client: ollama.Client) -> None:
    with appliance.cancels():
        stream = client.chat(WORDY, HELLO, stream=True)
        next(stream)
        stream.close()
