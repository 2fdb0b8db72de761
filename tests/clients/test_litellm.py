"""LiteLLM, in a process or as a proxy."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
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
from tests.parrot import ANSWER
from tests.patience import PATIENCE_SECONDS

# Else it asks the internet for prices, again and again, when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

HELLO: Any = [{"role": "user", "content": "Hello"}]
TOOL: Any = {"type": "function", "function": {"name": "book", "parameters": SCHEMA}}
DIALECTS = ("openai", "hosted_vllm", "anthropic", "ollama_chat")


@pytest.fixture
def asked(appliance: Appliance, request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """The arguments that choose a model by a dialect."""
    base = appliance.v1 if request.param in ("openai", "hosted_vllm") else appliance.url

    def fields(model: str) -> dict[str, Any]:
        name = f"{request.param}/{model}"
        return {"model": name, "api_base": base, "api_key": "unused", "max_retries": 0}

    return fields


def test_recipe(recipe: Callable[..., str], run: Callable[..., str]) -> None:
    assert ANSWER in run("python", "-c", recipe(code_blocks("docs/recipes/litellm.md", "python")))


@pytest.mark.parametrize("asked", DIALECTS, indirect=True)
def test_chat(asked: Callable[[str], Any]) -> None:
    whole = litellm.completion(**asked(SMALL), messages=HELLO)
    parts = list(litellm.completion(**asked(SMALL), messages=HELLO, stream=True))

    assert whole.choices[0].message.content == ANSWER
    assert "".join(part.choices[0].delta.content or "" for part in parts) == ANSWER
    assert whole.usage.completion_tokens


LUMPED = pytest.mark.xfail(
    strict=True, reason="LiteLLM 1.106.2 leaves out the index that lines of a stream give a call"
)


@pytest.mark.parametrize(
    ("asked", "stream"),
    [
        *((dialect, False) for dialect in DIALECTS),
        *((dialect, True) for dialect in DIALECTS[:-1]),
        pytest.param(DIALECTS[-1], True, marks=LUMPED),
    ],
    indirect=["asked"],
)
def test_parallel_tools(asked: Callable[[str], Any], stream: bool) -> None:
    said = litellm.completion(**asked(SMALL), messages=HELLO, tools=[TOOL], stream=stream)
    whole = litellm.stream_chunk_builder(list(said)) if stream else said
    message = whole.choices[0].message
    calls = message.tool_calls
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls]
    chat = [*HELLO, message.model_dump(exclude_none=True), *results]
    end = litellm.completion(**asked(SMALL), messages=chat, tools=[TOOL])

    assert [Stay.model_validate_json(call.function.arguments) for call in calls] == BOOKED
    assert end.choices[0].message.content == ANSWER


@pytest.mark.parametrize("asked", ["openai", "hosted_vllm", "ollama_chat"], indirect=True)
def test_structured_output(asked: Callable[[str], Any]) -> None:
    said = litellm.completion(**asked(SMALL), messages=HELLO, response_format=Stay, max_tokens=1000)

    Stay.model_validate_json(said.choices[0].message.content)


@pytest.mark.parametrize("asked", ["openai", "hosted_vllm", "ollama"], indirect=True)
def test_embeddings(asked: Callable[[str], Any]) -> None:
    said = litellm.embedding(**asked(EMBEDDER), input=["Hello", "river"])

    assert [len(vector["embedding"]) for vector in said.data] == [VECTOR_SIZE] * 2


@pytest.mark.parametrize("asked", DIALECTS, indirect=True)
def test_errors(asked: Callable[[str], Any]) -> None:
    with pytest.raises((litellm.NotFoundError, litellm.APIConnectionError)) as caught:
        litellm.completion(**asked("gpt-9"), messages=HELLO)

    assert "gpt-9" in str(caught.value)


@pytest.mark.parametrize("asked", ["openai"], indirect=True)
def test_responses(asked: Callable[[str], Any]) -> None:
    said = litellm.responses(**asked(SMALL), input="Hello")
    kinds = [event.type for event in litellm.responses(**asked(SMALL), input="Hello", stream=True)]

    assert said.output_text == ANSWER
    assert kinds[-1] == "response.completed"


@pytest.mark.parametrize("asked", ["openai"], indirect=True)
def test_cancel(appliance: Appliance, asked: Callable[[str], Any]) -> None:
    with appliance.cancels():
        stream = litellm.completion(**asked(WORDY), messages=HELLO, stream=True)
        next(stream)
        stream.completion_stream.close()


@pytest.fixture(scope="module")
def proxy(
    appliance: Appliance, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """A client of LiteLLM's proxy, with the recipe's configuration and a model for vectors."""
    folder = tmp_path_factory.mktemp("proxy")
    (block,) = code_blocks("docs/recipes/litellm.md", "yaml")
    text = appliance.localized(block.text)
    head, models, settings = re.split(r"(?<=list:\n)|(?=general_settings)", text)
    others = "".join(models.replace(SMALL, name) for name in (EMBEDDER, WORDY))
    (folder / "config.yaml").write_text(head + models + others + settings)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                Path(sys.executable).with_name("litellm"), "--config", folder / "config.yaml",
                "--host", "127.0.0.1", "--port", str(port),
            ],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        _wait(f"http://127.0.0.1:{port}/health/liveliness", process, folder / "log")
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="sk-choose-one", max_retries=0
        ) as client:
            yield client
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url, timeout=10).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError(log.read_text()[-4000:])


def test_proxy(appliance: Appliance, proxy: openai.OpenAI) -> None:
    """Chats, streams, calls, schemas, vectors and errors pass through it."""
    whole = proxy.chat.completions.create(model=SMALL, messages=HELLO)
    chunks = list(proxy.chat.completions.create(model=SMALL, messages=HELLO, stream=True))
    called: Any = proxy.chat.completions.create(model=SMALL, messages=HELLO, tools=[TOOL])
    calls = called.choices[0].message.tool_calls
    parsed = proxy.chat.completions.parse(model=SMALL, messages=HELLO, response_format=Stay)
    vectors = proxy.embeddings.create(model=EMBEDDER, input=["Hello"])

    assert whole.choices[0].message.content == ANSWER
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == ANSWER
    assert [Stay.model_validate_json(call.function.arguments) for call in calls] == BOOKED
    assert isinstance(parsed.choices[0].message.parsed, Stay)
    assert len(vectors.data[0].embedding) == VECTOR_SIZE
    with pytest.raises(openai.BadRequestError):
        proxy.chat.completions.create(model=SMALL, messages=HELLO, max_tokens=0)


def test_proxy_cancels(appliance: Appliance, proxy: openai.OpenAI) -> None:
    """Whose client hangs up on it."""
    with appliance.cancels():
        with proxy.chat.completions.create(model=WORDY, messages=HELLO, stream=True) as stream:
            next(iter(stream))
