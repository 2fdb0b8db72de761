"""LangChain's chat models of three dialects, and its embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import ollama
import openai
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.clients.conftest import BOOKED, EMBEDDER, SMALL, VECTOR_SIZE, WORDY, Appliance, Stay
from tests.docblocks import code_blocks
from tests.parrot import ANSWER

OF_OPENAI = code_blocks("docs/recipes/langchain.md", "python", containing="ChatOpenAI")
OF_OTHERS = code_blocks("docs/recipes/langchain.md", "python", containing="ChatAnthropic")
DIALECTS = ("openai", "responses", "anthropic", "ollama")


@pytest.fixture
def chat(appliance: Appliance, request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """Makes a chat model of the dialect."""

    def made(model: str) -> Any:
        asked: Any = {"model": model, "api_key": "unused", "max_retries": 0}
        if request.param == "ollama":
            return ChatOllama(model=model, base_url=appliance.url)
        if request.param == "anthropic":
            return ChatAnthropic(**asked, base_url=appliance.url, max_tokens=1500)
        answers = request.param == "responses"
        return ChatOpenAI(
            **asked, base_url=appliance.v1, use_responses_api=answers, stream_usage=True
        )

    return made


def text_of(message: Any) -> str:
    return str(message.text)


def test_recipe(recipe: Callable[..., str], run: Callable[..., str]) -> None:
    asked = "\nprint(chat.invoke('Hello').text, len(embeddings.embed_query('Hello')))"
    assert f"{ANSWER} {VECTOR_SIZE}" in run("python", "-c", recipe(OF_OPENAI) + asked)


def test_recipe_of_other_dialects(recipe: Callable[..., str], run: Callable[..., str]) -> None:
    asked = "\nprint(claude.invoke('Hello').text, ollama.invoke('Hello').text)"
    assert f"{ANSWER} {ANSWER}" in run("python", "-c", recipe(OF_OTHERS) + asked)


@pytest.mark.parametrize("chat", DIALECTS, indirect=True)
def test_chat(chat: Callable[[str], Any]) -> None:
    """Whole or streamed: one text, one usage."""
    whole = chat(SMALL).invoke("Hello")
    *parts, last = chat(SMALL).stream("Hello")
    streamed = sum(parts[1:], start=parts[0]) + last

    assert text_of(whole) == text_of(streamed) == ANSWER
    assert whole.usage_metadata["output_tokens"]
    assert streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


@pytest.mark.parametrize("chat", DIALECTS, indirect=True)
def test_parallel_tools(chat: Callable[[str], Any]) -> None:
    """Two calls, whole or streamed; with their results there is an answer."""

    def book(city: str, nights: int) -> str:
        """Book a stay."""
        return f"{nights} nights in {city}"

    model = chat(SMALL).bind_tools([book])
    hello = HumanMessage("Hello")
    whole = model.invoke([hello])
    *parts, last = model.stream([hello])
    streamed = sum(parts[1:], start=parts[0]) + last
    results = [ToolMessage("done", tool_call_id=call["id"]) for call in whole.tool_calls]
    end = model.invoke([hello, whole, *results])

    for message in (whole, streamed):
        assert [Stay.model_validate(call["args"]) for call in message.tool_calls] == BOOKED
    assert text_of(end) == ANSWER


@pytest.mark.parametrize("chat", DIALECTS, indirect=True)
def test_structured_output(chat: Callable[[str], Any]) -> None:
    assert isinstance(
        chat(SMALL).with_structured_output(Stay, method="json_schema").invoke("Hello"), Stay
    )


@pytest.mark.parametrize("chat", ["openai", "responses"], indirect=True)
def test_a_tool_as_structured_output(chat: Callable[[str], Any]) -> None:
    """The other way, which makes the model call a tool that has the schema. Without `strict`, which
    LangChain sends to OpenAI only, a tool's arguments are any JSON, as in vLLM."""
    model = chat(WORDY).with_structured_output(Stay, method="function_calling", strict=True)

    assert isinstance(model.invoke("Hello"), Stay)


def test_embeddings(appliance: Appliance) -> None:
    asked: Any = {"model": EMBEDDER, "base_url": appliance.v1, "api_key": "unused"}
    texts = ["Hello", "river"]
    plain = OpenAIEmbeddings(**asked, check_embedding_ctx_length=False).embed_documents(texts)
    llama = OllamaEmbeddings(model=EMBEDDER, base_url=appliance.url).embed_documents(texts)

    for one, other in zip(plain, llama, strict=True):
        assert len(one) == VECTOR_SIZE
        assert other == pytest.approx(one, abs=1e-5)


@pytest.mark.parametrize("chat", DIALECTS, indirect=True)
def test_errors(chat: Callable[[str], Any]) -> None:
    errors = (openai.NotFoundError, anthropic.NotFoundError, ollama.ResponseError)
    with pytest.raises(errors) as caught:
        chat("gpt-9").invoke("Hello")

    assert caught.value.status_code == 404


@pytest.mark.parametrize("chat", DIALECTS, indirect=True)
def test_cancel(appliance: Appliance, chat: Callable[[str], Any]) -> None:
    with appliance.cancels():
        stream = chat(WORDY).stream("Hello")
        next(part for part in stream if part.text)
        stream.close()
