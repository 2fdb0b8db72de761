"""LlamaIndex' models of two dialects, and its embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ollama
import openai
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike

from tests.clients.conftest import (
    BOOKED,
    EMBEDDER,
    SMALL,
    VECTOR_SIZE,
    WORDY,
    Appliance,
    Stay,
)  # fmt: skip
from tests.docblocks import code_blocks
from tests.parrot import ANSWER

HELLO = [ChatMessage(role="user", content="Hello")]
DIALECTS = ("openai", "ollama")


@pytest.fixture
def llm(appliance: Appliance, request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """Makes a model of the dialect."""

    def made(model: str) -> Any:
        if request.param == "ollama":
            return Ollama(model=model, base_url=appliance.url, request_timeout=600)
        return OpenAILike(
            model=model, api_base=appliance.v1, api_key="unused", context_window=2048,
            is_chat_model=True, is_function_calling_model=True, max_retries=0, timeout=60,
            max_tokens=1000, temperature=1,
            should_use_structured_outputs=True,
        )  # fmt: skip

    return made


def test_recipe(recipe: Callable[..., str], run: Callable[..., str]) -> None:
    asked = "\nprint(llm.complete('Hello'), len(embedding.get_text_embedding('Hello')))"
    said = run("python", "-c", recipe(code_blocks("docs/recipes/llamaindex.md", "python")) + asked)
    assert f"{ANSWER} {VECTOR_SIZE}" in said


@pytest.mark.parametrize("llm", DIALECTS, indirect=True)
def test_chat(llm: Callable[[str], Any]) -> None:
    whole = llm(SMALL).chat(HELLO)
    parts = list(llm(SMALL).stream_chat(HELLO))

    assert whole.message.content == parts[-1].message.content == ANSWER


@pytest.mark.parametrize("llm", DIALECTS, indirect=True)
def test_parallel_tools(llm: Callable[[str], Any]) -> None:
    def book(city: str, nights: int) -> str:
        """Book a stay."""
        return f"{nights} nights in {city}"

    model, tool = llm(SMALL), FunctionTool.from_defaults(book)
    asked: Any = {"user_msg": "Hello", "allow_parallel_tool_calls": True}
    whole = model.chat_with_tools([tool], **asked)
    *_, last = model.stream_chat_with_tools([tool], **asked)

    for answer in (whole, last):
        calls = model.get_tool_calls_from_response(answer)
        assert [Stay.model_validate(call.tool_kwargs) for call in calls] == BOOKED


@pytest.mark.parametrize("llm", DIALECTS, indirect=True)
def test_structured_output(llm: Callable[[str], Any]) -> None:
    assert isinstance(llm(SMALL).as_structured_llm(Stay).chat(HELLO).raw, Stay)


def test_embeddings(appliance: Appliance) -> None:
    embedding = OpenAILikeEmbedding(
        model_name=EMBEDDER, api_base=appliance.v1, api_key="unused", max_retries=0
    )

    vectors = embedding.get_text_embedding_batch(["Hello", "river"])
    assert [len(vector) for vector in vectors] == [VECTOR_SIZE] * 2


@pytest.mark.parametrize("llm", DIALECTS, indirect=True)
def test_errors(llm: Callable[[str], Any]) -> None:
    with pytest.raises((openai.NotFoundError, ollama.ResponseError)) as caught:
        llm("gpt-9").chat(HELLO)

    assert caught.value.status_code == 404


@pytest.mark.parametrize("llm", DIALECTS, indirect=True)
def test_cancel(appliance: Appliance, llm: Callable[[str], Any]) -> None:
    with appliance.cancels():
        stream = llm(WORDY).stream_chat(HELLO)
        next(part for part in stream if part.delta)
        stream.close()
