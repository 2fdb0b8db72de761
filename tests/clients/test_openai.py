"""OpenAI's client: chats, responses, embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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

HELLO: Any = [{"role": "user", "content": "Hello, river"}]
FUNCTION = {"name": "book", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
STRICT: Any = {"type": "function", "function": FUNCTION | {"strict": True}}
RESPONSES_TOOL: Any = {"type": "function", "strict": False} | FUNCTION


@pytest.fixture
def client(appliance: Appliance) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=appliance.v1, api_key="unused", max_retries=0) as made:
        yield made


def test_recipe(recipe: Callable[..., str], run: Callable[..., str]) -> None:
    assert ANSWER in run("python", "-c", recipe(code_blocks("docs/recipes/openai.md", "python")))


def test_chat(client: openai.OpenAI) -> None:
    """Whole or streamed: one text, one usage."""
    whole = client.chat.completions.create(model=SMALL, messages=HELLO)
    *chunks, last = client.chat.completions.create(
        model=SMALL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )

    assert whole.choices[0].message.content == ANSWER
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tools(client: openai.OpenAI, stream: bool) -> None:
    """Two calls in one answer, unless one is asked for; with results there is an answer."""
    asked: Any = {"model": SMALL, "messages": HELLO, "tools": [TOOL]}

    def said(**fields: Any) -> Any:
        if not stream:
            return client.chat.completions.create(**asked | fields).choices[0]
        with client.chat.completions.stream(**asked | fields) as events:
            return events.get_final_completion().choices[0]

    both, one = said(), said(parallel_tool_calls=False)
    calls = both.message.tool_calls
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls]
    end = said(messages=[*HELLO, both.message, *results])

    assert both.finish_reason == "tool_calls"
    assert [Stay.model_validate_json(call.function.arguments) for call in calls] == BOOKED
    assert len({call.id for call in calls}) == 2
    assert len(one.message.tool_calls) == 1
    assert end.message.content == ANSWER


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "book"}}])
def test_tools_that_must_be_called(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    asked: Any = {"model": WORDY, "messages": HELLO, "tools": [STRICT], "tool_choice": choice}
    asked |= {"max_tokens": 1000, "seed": 1, "parallel_tool_calls": False}
    if stream:
        with client.chat.completions.stream(**asked) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**asked).choices[0].message

    (call,) = message.tool_calls or ()
    assert call.function.name == "book"
    Stay.model_validate_json(call.function.arguments)


@pytest.mark.parametrize("model", [SMALL, WORDY])
def test_structured_output(client: openai.OpenAI, model: str) -> None:
    chat = client.chat.completions.parse(
        model=model, messages=HELLO, response_format=Stay, max_tokens=1000
    )
    response = client.responses.parse(
        model=model, input="Hello", text_format=Stay, max_output_tokens=1000
    )

    assert isinstance(chat.choices[0].message.parsed, Stay)
    assert isinstance(response.output_parsed, Stay)


def test_responses(client: openai.OpenAI) -> None:
    """Events in their order; calls and their results; what came before is remembered."""
    whole = client.responses.create(model=SMALL, input="Hello")
    events = list(client.responses.create(model=SMALL, input="Hello", stream=True))
    kinds = [event.type for event in events]
    called = client.responses.create(model=SMALL, input="Hello", tools=[RESPONSES_TOOL])
    calls: Any = [item for item in called.output if item.type == "function_call"]
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        for call in calls
    ]
    end = client.responses.create(
        model=SMALL, input=results, tools=[RESPONSES_TOOL], previous_response_id=called.id
    )

    assert whole.output_text == ANSWER
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == ANSWER
    last: Any = events[-1]
    assert last.response.usage == whole.usage
    assert [Stay.model_validate_json(call.arguments) for call in calls] == BOOKED
    assert end.output_text == ANSWER


def test_embeddings(client: openai.OpenAI) -> None:
    """In base64, which the client asks for by itself, or as numbers."""
    packed = client.embeddings.create(model=EMBEDDER, input=["Hello", "river"])
    plain = client.embeddings.create(model=EMBEDDER, input=["Hello"], encoding_format="float")

    assert [len(vector.embedding) for vector in packed.data] == [VECTOR_SIZE] * 2
    assert plain.data[0].embedding == pytest.approx(packed.data[0].embedding, abs=1e-5)
    assert packed.usage.prompt_tokens


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=SMALL, messages=HELLO, max_tokens=0)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.chat.completions.create(
            model=WORDY, messages=[{"role": "user", "content": "river " * 4000}]
        )

    assert unknown.value.code == "model_not_found"
    assert bad.value.param == "max_tokens"


def test_cancel(appliance: Appliance, client: openai.OpenAI) -> None:
    with appliance.cancels():
        with client.chat.completions.create(model=WORDY, messages=HELLO, stream=True) as stream:
            next(iter(stream))
    with appliance.cancels():
        with client.responses.create(model=WORDY, input="Hello", stream=True) as events:
            for event in events:
                if event.type == "response.output_text.delta":
                    break


async def test_asynchronous(appliance: Appliance) -> None:
    """The other client of the package, with a stream that is left."""
    async with openai.AsyncOpenAI(base_url=appliance.v1, api_key="unused") as client:
        whole = await client.chat.completions.create(model=SMALL, messages=HELLO)
        with appliance.cancels():
            stream = await client.chat.completions.create(model=WORDY, messages=HELLO, stream=True)
            async for _ in stream:
                break
            await stream.close()

    assert whole.choices[0].message.content == ANSWER
