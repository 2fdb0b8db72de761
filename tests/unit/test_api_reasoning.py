"""Models that reason: what they think is told apart from what they say, in every dialect."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import ollama
import pytest

from appliance.api.app import create_app
from appliance.api.plan import plan_chat
from appliance.api.replies import Finish, Piece
from appliance.api.schemas import ChatRequest
from appliance.api.toolreader import ToolReader
from appliance.engines.protocol import Guide, GuideKind
from appliance.tokens import ChatTemplate, Tokenizer
from appliance.vocabulary import FinishReason

from .fake_service import FakeGeneration, FakeService, byte_level_encoder
from .serving import anthropic_client, openai_client, served, unserved

MODEL = "org/small"
HELLO: Any = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}"
    "{{ '(' ~ m.reasoning_content ~ ')' if m.reasoning_content }}:{{ m.content }};{% endfor %}"
    "{{ 'think!' if enable_thinking is not defined or enable_thinking else 'no thoughts!' }}"
)


def saying(text: str) -> Any:
    def script(generation: FakeGeneration) -> None:
        generation.say(text, None)
        generation.feed([0], FinishReason.STOP)

    return script


@pytest.fixture
def service() -> FakeService:
    service = FakeService(saying("(hm, so)hello"), reasons=True)
    service.text = Tokenizer(byte_level_encoder(), ChatTemplate(TEMPLATE, {}))
    return service


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    async with unserved(create_app(service)) as client:
        yield client


def prompt(service: FakeService) -> str:
    return service.text.decode(service.submitted[-1].request.prompt)


# --- OpenAI --------------------------------------------------------------------------------------


async def test_a_chat(service: FakeService) -> None:
    """vLLM's field of a message, and OpenAI's of the usage."""
    async with openai_client(create_app(service)) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, n=2)

    for choice in answer.choices:
        message: Any = choice.message
        assert (message.reasoning, message.content) == ("hm, so", "hello")
        assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2 * len("hm, so")
    assert [reader.ended > 0 for reader in service.interpretations] == [True]


async def test_a_streamed_chat(service: FakeService) -> None:
    """Reasoning comes in deltas before the content, and is counted at the end."""
    async with openai_client(create_app(service)) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = [chunk async for chunk in stream]

    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "hm, so"
    assert "".join(delta.content or "" for delta in deltas) == "hello"
    assert last.usage is not None
    assert last.usage.completion_tokens_details is not None
    assert last.usage.completion_tokens_details.reasoning_tokens == len("hm, so")


async def test_nothing_but_thoughts(client: httpx.AsyncClient, service: FakeService) -> None:
    """A message without content says null, as vLLM does."""
    service.script = lambda generation: generation.say("(hm", FinishReason.LENGTH)
    answer = await client.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO})

    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": None, "reasoning": "hm"}


async def test_what_is_read_at_the_end_is_whole(service: FakeService) -> None:
    """Of an answer that is not streamed all pieces are heard at once, in their order."""
    plan = await plan_chat(ChatRequest(model=MODEL, messages=[]), service, "chat")
    reader, letters = ToolReader(plan), "abc"
    for number, letter in enumerate(letters):
        finish: Finish | None = "stop" if letter == letters[-1] else None
        last = await reader.read(Piece(0, letter, ids=[number], finish=finish))

    assert last.text == letters
    assert service.interpretations[0].heard == [(0, letters, len(letters), True)]


async def test_who_does_not_reason_is_not_read(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    """The text of a model without a parser is its answer, and usage tells of no reasoning."""
    answer = await client.post("/v1/chat/completions", json={"model": "small", "messages": HELLO})

    assert answer.json()["choices"][0]["message"]["content"] == "(hm, so)hello"
    assert "completion_tokens_details" not in answer.json()["usage"]
    assert service.interpretations == []


async def test_the_template_is_told(client: httpx.AsyncClient, service: FakeService) -> None:
    """Further variables of the template, and reasoning of earlier turns under either name; the
    parser gets the variables, too."""
    body = {
        "model": MODEL,
        "messages": [
            *HELLO,
            {"role": "assistant", "content": "hi", "reasoning": "well"},
            {"role": "assistant", "content": "you", "reasoning_content": "hm"},
            *HELLO,
        ],
        "chat_template_kwargs": {"enable_thinking": False, "unknown": 1},
    }
    answer = await client.post("/v1/chat/completions", json=body)

    assert answer.status_code == 200, answer.text
    said = "user:hello;assistant(well):hi;assistant(hm):you;user:hello;no thoughts!"
    assert prompt(service) == said
    chat = service.interpretations[0].chat
    assert chat["chat_template_kwargs"] == body["chat_template_kwargs"]
    assert "tools" not in chat


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        (
            {"messages": [{"role": "user", "content": "x", "reasoning": "y"}]},
            "messages[0].reasoning",
        ),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
async def test_refusals(
    client: httpx.AsyncClient, service: FakeService, fields: dict[str, Any], param: str
) -> None:
    """By name."""
    body = {"model": MODEL, "messages": HELLO} | fields
    answer = await client.post("/v1/chat/completions", json=body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert service.submitted == []


async def test_a_guide_holds_behind_the_thoughts(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    """It is the one that the parser makes of the one asked for; one that is impossible is blamed
    on its field."""
    body = {"model": MODEL, "messages": HELLO, "response_format": {"type": "json_object"}}
    answer = await client.post("/v1/chat/completions", json=body)

    assert answer.status_code == 200, answer.text
    guide = service.submitted[0].request.sampling.guide
    assert guide == Guide(GuideKind.STRUCTURAL_TAG, "tag")
    refused = await client.post("/v1/chat/completions", json=body | {"min_tokens": 2})
    assert "response_format" in refused.json()["error"]["message"]


# --- Anthropic -----------------------------------------------------------------------------------


@pytest.fixture
async def claude(service: FakeService) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic_client(create_app(service)) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
async def test_blocks_of_thoughts(
    claude: anthropic.AsyncAnthropic, service: FakeService, stream: bool
) -> None:
    """A block of thoughts, then one of text; both may be sent back."""
    asked: Any = {"model": MODEL, "max_tokens": 1100, "messages": HELLO}
    asked |= {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    if stream:
        async with claude.messages.stream(**asked) as events:
            answer = await events.get_final_message()
    else:
        answer = await claude.messages.create(**asked)

    thought, text = answer.content
    assert thought.type == "thinking"
    assert text.type == "text"
    assert (thought.thinking, text.text, answer.stop_reason) == ("hm, so", "hello", "end_turn")
    history = [*HELLO, {"role": "assistant", "content": answer.content}, *HELLO]
    await claude.messages.create(**asked | {"messages": history})
    assert prompt(service) == "user:hello;assistant(hm, so):hello;user:hello;think!"


async def test_thoughts_that_are_not_wanted(
    claude: anthropic.AsyncAnthropic, service: FakeService
) -> None:
    """The template is told, also when tokens are counted."""
    asked: Any = {"model": MODEL, "messages": HELLO, "thinking": {"type": "disabled"}}
    answer = await claude.messages.create(**asked, max_tokens=50)
    counted = await claude.messages.count_tokens(**asked)

    assert prompt(service) == "user:hello;no thoughts!"
    assert counted.input_tokens == answer.usage.input_tokens


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "small", "thinking": {"type": "adaptive"}}, "no reasoning_parser"),
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "less than max_tokens"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ],
)
async def test_what_of_thinking_is_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], said: str
) -> None:
    """Who does not reason, a budget that cannot be, and what is not known here."""
    body = {"model": MODEL, "max_tokens": 2000, "messages": HELLO} | fields
    answer = await client.post("/v1/messages", json=body)

    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


# --- Ollama --------------------------------------------------------------------------------------


@pytest.fixture
async def llama(service: FakeService) -> AsyncIterator[ollama.AsyncClient]:
    async with (
        served(create_app(service)) as port,
        ollama.AsyncClient(f"http://127.0.0.1:{port}") as client,
    ):
        yield client


async def test_thinking(llama: ollama.AsyncClient, service: FakeService) -> None:
    """Beside the content of a message, or the response to a prompt, whole and streamed."""
    whole = await llama.chat(model=MODEL, messages=HELLO, think=True)
    parts = [p async for p in await llama.chat(model=MODEL, messages=HELLO, stream=True)]
    made = await llama.generate(model=MODEL, prompt="hello", think=False)
    shown = await llama.show(MODEL)

    assert (whole.message.thinking, whole.message.content) == ("hm, so", "hello")
    assert "".join(part.message.thinking or "" for part in parts) == "hm, so"
    assert "".join(part.message.content or "" for part in parts) == "hello"
    assert (made.thinking, made.response) == ("hm, so", "hello")
    assert prompt(service) == "user:hello;no thoughts!"
    assert shown.capabilities == ["completion", "tools", "thinking"]


async def test_thoughts_can_be_sent_back(llama: ollama.AsyncClient, service: FakeService) -> None:
    """The message of an answer is accepted as part of the next request."""
    first = await llama.chat(model=MODEL, messages=HELLO)
    await llama.chat(model=MODEL, messages=[*HELLO, first.message, *HELLO])

    assert prompt(service) == "user:hello;assistant(hm, so):hello;user:hello;think!"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat", {"model": "small", "think": True}),
        ("chat", {"think": "high"}),
        ("generate", {"think": True, "raw": True}),
        ("generate", {"think": "low"}),
    ],
)
async def test_thinking_that_is_refused(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any]
) -> None:
    """By a model that does not, in degrees, and of a prompt without a template."""
    content: dict[str, Any] = {"messages": HELLO} if path == "chat" else {"prompt": "x"}
    answer = await client.post(f"/api/{path}", json={"model": MODEL} | content | fields)

    assert answer.status_code == 400
    assert json.loads(answer.text)["error"].startswith("think: ")
