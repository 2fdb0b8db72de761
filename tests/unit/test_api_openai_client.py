"""The official client drives the API: what it sends is understood, what it gets it can read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest

from appliance.api.app import create_app
from appliance.api.service import GenerationFailed
from appliance.vocabulary import FinishReason, RequestClass

from .fake_service import FakeGeneration, FakeService, small_tokenizer
from .serving import openai_client, served

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def service() -> FakeService:
    return FakeService(lambda generation: generation.say("hello world, one two"))


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(create_app(service)) as client:
        yield client


def stopping(generation: FakeGeneration) -> None:
    """Say a word, then the token that says stop."""
    generation.say("hello", None)
    generation.feed([0], FinishReason.STOP)


@pytest.mark.parametrize(
    ("tier", "kind"),
    [("flex", RequestClass.BATCH), ("auto", RequestClass.INTERACTIVE)],
)
async def test_the_flexible_tier_is_batch_work(
    client: openai.AsyncOpenAI, service: FakeService, tier: Any, kind: RequestClass
) -> None:
    """Who asks for it by OpenAI's word can wait: in chats, and in plain completions too."""
    await client.chat.completions.create(model="small", messages=HELLO, service_tier=tier)
    await client.completions.create(
        model="small", prompt="hello", extra_body={"service_tier": tier}
    )

    assert [generation.request.request_class for generation in service.submitted] == [kind, kind]


async def test_chat(client: openai.AsyncOpenAI, service: FakeService) -> None:
    """A chat is rendered by the template, answered, and its tokens counted."""
    service.script = stopping
    answer = await client.chat.completions.create(
        model="small",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        ],
        max_completion_tokens=9,
    )

    (generation,) = service.submitted
    prompt = small_tokenizer().decode(generation.request.prompt)
    assert prompt == "<|system|>be brief<|user|>hello<|assistant|>"
    assert generation.request.sampling.max_tokens == 9
    assert generation.request.id == answer.id
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "small")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "hello")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    spoken = len(small_tokenizer().encode("hello"))
    assert answer.usage.prompt_tokens == len(generation.request.prompt)
    assert answer.usage.completion_tokens == spoken + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + spoken + 1


async def test_an_answer_can_be_sent_back(client: openai.AsyncOpenAI, service: FakeService) -> None:
    """The message of an answer is accepted as part of the next request."""
    first = await client.chat.completions.create(model="small", messages=HELLO)
    message: Any = first.choices[0].message
    await client.chat.completions.create(model="small", messages=[*HELLO, message, *HELLO])

    prompt = small_tokenizer().decode(service.submitted[1].request.prompt)
    assert "<|assistant|>hello world, one two<|user|>" in prompt


async def test_chat_streamed_with_usage(client: openai.AsyncOpenAI) -> None:
    """Role first, text in pieces, the finish reason last, then a chunk with the usage alone."""
    stream = await client.chat.completions.create(
        model="org/small", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    *answers, last = chunks
    deltas = [chunk.choices[0].delta for chunk in answers]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "hello world, one two"
    reasons = [chunk.choices[0].finish_reason for chunk in answers]
    assert reasons == [None] * (len(answers) - 1) + ["length"]
    assert {chunk.id for chunk in chunks} == {last.id}
    assert all(chunk.usage is None for chunk in answers)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(small_tokenizer().encode("hello world, one two"))


async def test_a_completion_streamed_with_usage(
    client: openai.AsyncOpenAI, service: FakeService
) -> None:
    """Characters are whole, however many tokens they have; every token is counted."""
    service.script = lambda generation: generation.say("one 🙂🙂")
    stream = await client.completions.create(
        model="small", prompt="hello", stream=True, stream_options={"include_usage": True}
    )
    *answers, last = [chunk async for chunk in stream]

    assert "".join(chunk.choices[0].text for chunk in answers) == "one 🙂🙂"
    assert answers[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(small_tokenizer().encode("one 🙂🙂"))


async def test_half_a_character_is_no_chunk(
    client: openai.AsyncOpenAI, service: FakeService
) -> None:
    """A token that adds no text yet sends nothing; the character is sent when it is whole."""
    service.script = None
    stream = await client.completions.create(model="small", prompt="hello", stream=True)
    *half, rest = small_tokenizer().encode("🙂")
    generation = await service.arrivals.get()
    generation.feed(half)
    await generation.drained.wait()
    generation.feed([rest], FinishReason.LENGTH)

    assert [chunk.choices[0].text async for chunk in stream] == ["🙂"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer(
    client: openai.AsyncOpenAI, service: FakeService, stream: bool
) -> None:
    """A stop string that spans tokens is cut off, and the appliance is told to stop."""
    service.script = lambda generation: generation.say("one two three and on", None)
    answer = await client.completions.create(
        model="small", prompt="count", stop=["o th", "zzz"], stream=stream
    )
    if isinstance(answer, openai.AsyncStream):
        chunks = [chunk async for chunk in answer]
    else:
        chunks = [answer]

    assert "".join(chunk.choices[0].text for chunk in chunks) == "one tw"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert service.submitted[0].reason == FinishReason.STOP


async def test_chat_logprobs(client: openai.AsyncOpenAI) -> None:
    """Every token comes with its bytes, its log probability and the top ones asked for."""
    answer = await client.chat.completions.create(
        model="small", messages=HELLO, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs

    assert logprobs is not None
    assert logprobs.content is not None
    raw = b"".join(bytes(token.bytes or ()) for token in logprobs.content)
    assert raw == b"hello world, one two"
    assert all(token.logprob == -9999.0 for token in logprobs.content)
    assert [[top.logprob for top in token.top_logprobs] for token in logprobs.content] == [
        [-1.0, -2.0]
    ] * len(logprobs.content)


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs(client: openai.AsyncOpenAI, stream: bool) -> None:
    """Tokens, their log probabilities, the top ones and where each begins, in parallel lists."""
    answer = await client.completions.create(
        model="small", prompt="hello", logprobs=1, stream=stream
    )
    if isinstance(answer, openai.AsyncStream):
        parts = [chunk.choices[0].logprobs async for chunk in answer]
    else:
        parts = [answer.choices[0].logprobs]

    tokens = [token for part in parts if part for token in part.tokens or ()]
    offsets = [offset for part in parts if part for offset in part.text_offset or ()]
    tops = [top for part in parts if part for top in part.top_logprobs or ()]
    assert "".join(tokens) == "hello world, one two"
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
    first = small_tokenizer().piece(1)[0]
    assert tops == [{first: -1.0, token: -9999.0} for token in tokens]


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices(
    client: openai.AsyncOpenAI, service: FakeService, stream: bool
) -> None:
    """`n` choices have seeds of their own and come back under their index."""
    words = iter(["one", "two", "three"])
    service.script = lambda generation: generation.say(next(words))
    answer = await client.chat.completions.create(
        model="small", messages=HELLO, n=3, seed=7, stream=stream
    )
    texts = ["", "", ""]
    if isinstance(answer, openai.AsyncStream):
        async for chunk in answer:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        for choice in answer.choices:
            texts[choice.index] += choice.message.content or ""

    assert texts == ["one", "two", "three"]
    requests = [generation.request for generation in service.submitted]
    assert [request.sampling.seed for request in requests] == [7, 8, 9]
    assert len({request.id for request in requests}) == 3


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        (list(small_tokenizer().encode("one")), ["one"]),
        ([list(small_tokenizer().encode(text)) for text in ("one", "two")], ["one", "two"]),
    ],
)
async def test_the_four_forms_of_a_prompt(
    client: openai.AsyncOpenAI, service: FakeService, prompt: object, prompts: list[str]
) -> None:
    """A text, texts, token ids, or lists of them: one choice for each prompt."""
    answer = await client.completions.create(model="small", prompt=prompt)  # type: ignore[call-overload]

    submitted = [generation.request.prompt for generation in service.submitted]
    assert [small_tokenizer().decode(ids) for ids in submitted] == prompts
    assert [choice.index for choice in answer.choices] == list(range(len(prompts)))
    assert answer.usage.prompt_tokens == sum(len(ids) for ids in submitted)


async def test_sampling_fields_arrive(client: openai.AsyncOpenAI, service: FakeService) -> None:
    """Every field that shapes the sampling reaches the appliance as it was given."""
    await client.completions.create(
        model="small",
        prompt="hello",
        temperature=0.5,
        top_p=0.25,
        seed=3,
        max_tokens=11,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": -100},
        extra_body={
            "top_k": 4,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [8],
        },
    )
    sampling = service.submitted[0].request.sampling

    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 4)
    assert (sampling.min_p, sampling.seed, sampling.max_tokens) == (0.125, 3, 11)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.5, {5: -100})
    assert (sampling.min_tokens, sampling.ignore_eos) == (2, True)
    assert (sampling.stop_token_ids, sampling.logprobs) == ((8,), None)


async def test_what_is_left_of_the_context_is_the_default_length(
    client: openai.AsyncOpenAI, service: FakeService
) -> None:
    """Without a limit an answer may fill the context."""
    await client.chat.completions.create(model="small", messages=HELLO)
    request = service.submitted[0].request

    assert len(request.prompt) + request.sampling.max_tokens == 200


async def test_models(client: openai.AsyncOpenAI) -> None:
    """All models are listed, and found one by one, also those with a slash in their name."""
    listed = await client.models.list()
    found = await client.models.retrieve("org/small")

    assert [model.id for model in listed.data] == ["small", "org/small"]
    assert (found.id, found.object, found.owned_by) == ("org/small", "model", "appliance")


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.chat.completions.create(model="none", messages=HELLO),
        lambda client: client.completions.create(model="none", prompt="a"),
        lambda client: client.models.retrieve("no/such"),
    ],
)
async def test_an_unknown_model(
    client: openai.AsyncOpenAI, ask: Callable[[openai.AsyncOpenAI], object]
) -> None:
    """A model that is not in the catalogue is `model_not_found`."""
    with pytest.raises(openai.NotFoundError) as caught:
        await ask(client)  # type: ignore[misc]

    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_a_full_queue(client: openai.AsyncOpenAI, service: FakeService) -> None:
    """A request that finds no room is told when to come back, and leaves nothing behind."""
    service.room = 1
    service.script = None
    with pytest.raises(openai.RateLimitError) as caught:
        await client.chat.completions.create(model="small", messages=HELLO, n=2)

    assert caught.value.response.headers["retry-after"] == "2"
    assert caught.value.code == "queue_full"
    assert service.submitted[0].reason == FinishReason.CANCELLED


async def test_a_failure_is_an_error_with_its_code(
    client: openai.AsyncOpenAI, service: FakeService
) -> None:
    """What the appliance gave up has the status and the code that it chose."""
    service.script = lambda generation: generation.fail(GenerationFailed("no_way", "sorry", 503))
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(model="small", messages=HELLO)

    assert (caught.value.status_code, caught.value.code) == (503, "no_way")


async def test_a_failure_in_a_stream_is_its_last_event(
    client: openai.AsyncOpenAI, service: FakeService
) -> None:
    """Text that came before the failure is delivered; then the client raises."""

    def failing(generation: FakeGeneration) -> None:
        generation.feed(small_tokenizer().encode("one"))
        generation.fail(GenerationFailed("no_way", "sorry"))

    service.script = failing
    stream = await client.chat.completions.create(model="small", messages=HELLO, stream=True)
    texts = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
    with pytest.raises(openai.APIError, match="sorry"):
        await anext(stream)

    assert texts == ["", "one"]


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (lambda generation: generation.cancel(FinishReason.CANCELLED), "cancelled"),
        (lambda generation: generation.feed([5], FinishReason.CANCELLED), "cancelled"),
        (lambda generation: generation.feed([5], FinishReason.ERROR), "generation_failed"),
    ],
)
async def test_an_end_that_is_none_is_a_failure(
    client: openai.AsyncOpenAI,
    service: FakeService,
    script: Callable[[FakeGeneration], None],
    code: str,
) -> None:
    """A request given up on the appliance's side is not passed off as complete."""
    service.script = script
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(model="small", messages=HELLO)

    assert caught.value.code == code


async def test_missing_logprobs_are_a_failure(
    client: openai.AsyncOpenAI, service: FakeService
) -> None:
    """Log probabilities that were asked for and not computed are not left out silently."""
    service.script = lambda generation: generation.feed_bare([5], FinishReason.LENGTH)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(model="small", prompt="hello", logprobs=0)

    assert caught.value.code == "logprobs_missing"


async def test_the_synchronous_client(service: FakeService) -> None:
    """The synchronous client is served as well, from a thread."""

    def ask(port: int) -> str:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            stream = client.chat.completions.create(model="small", messages=HELLO, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    async with served(create_app(service)) as port:
        assert await asyncio.to_thread(ask, port) == "hello world, one two"


async def test_token_ids(client: openai.AsyncOpenAI, service: FakeService) -> None:
    """vLLM's `return_token_ids`: every token of the answer, streamed or not, in both dialects."""
    asked: Any = {"model": "small", "extra_body": {"return_token_ids": True}}
    chat = await client.chat.completions.create(messages=HELLO, **asked)
    plain = await client.completions.create(prompt="hello", **asked)
    stream = await client.chat.completions.create(messages=HELLO, stream=True, **asked)
    streamed = [t async for c in stream for t in getattr(c.choices[0], "token_ids", None) or ()]

    spoken = list(small_tokenizer().encode("hello world, one two"))
    said: Any = (chat.choices[0], plain.choices[0])
    assert [choice.token_ids for choice in said] == [spoken, spoken]
    assert streamed == spoken


async def test_a_plain_completion_is_short_unless_asked(
    client: openai.AsyncOpenAI, service: FakeService
) -> None:
    """As with OpenAI: 16 tokens if nothing is said."""
    await client.completions.create(model="small", prompt="hello")

    assert service.submitted[0].request.sampling.max_tokens == 16
