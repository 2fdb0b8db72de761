"""Ollama's official client drives the API: what it sends is understood, what it gets, readable."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import ollama
import pytest

from appliance.api.app import create_app
from appliance.api.service import GenerationFailed, RequestTimes
from appliance.engines.protocol import Guide, GuideKind
from appliance.vocabulary import FinishReason
from tests.patience import PATIENCE_SECONDS

from .fake_service import FakeGeneration, FakeService, small_tokenizer
from .serving import served

HELLO: Any = [{"role": "user", "content": "hello"}]
TEXT = "hello world, one two"
TIMES = RequestTimes(
    queue_seconds=0.5,
    load_seconds=0.25,
    prefill_seconds=0.125,
    decode_seconds=2.0,
    preempted_seconds=1.0,
)


@pytest.fixture
def service() -> FakeService:
    return FakeService(lambda generation: generation.say(TEXT))


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[ollama.AsyncClient]:
    async with (
        served(create_app(service)) as port,
        ollama.AsyncClient(f"http://127.0.0.1:{port}") as client,
    ):
        yield client


def stopping(generation: FakeGeneration) -> None:
    """Say a word, then the token that says stop."""
    generation.times = TIMES
    generation.say("hello", None)
    generation.feed([0], FinishReason.STOP)


def prompt(service: FakeService) -> str:
    return small_tokenizer().decode(service.submitted[-1].request.prompt)


async def test_a_chat(client: ollama.AsyncClient, service: FakeService) -> None:
    """A chat is rendered by the template, answered, counted and timed."""
    service.script = stopping
    answer = await client.chat(
        model="small",
        messages=[{"role": "system", "content": "be brief"}, *HELLO],
        options={"num_predict": 9},
        keep_alive="5m",
    )

    request = service.submitted[0].request
    assert prompt(service) == "<|system|>be brief<|user|>hello<|assistant|>"
    assert request.sampling.max_tokens == 9
    assert (answer.model, answer.done, answer.done_reason) == ("small", True, "stop")
    assert (answer.message.role, answer.message.content) == ("assistant", "hello")
    assert answer.prompt_eval_count == len(request.prompt)
    assert answer.eval_count == len(small_tokenizer().encode("hello")) + 1
    assert answer.load_duration is not None
    assert answer.load_duration > 750_000_000
    assert answer.prompt_eval_duration == 125_000_000
    assert answer.eval_duration == 3_000_000_000
    assert answer.total_duration == answer.load_duration + 3_125_000_000


async def test_an_answer_can_be_sent_back(client: ollama.AsyncClient, service: FakeService) -> None:
    """The message of an answer is accepted as part of the next request."""
    first = await client.chat(model="small", messages=HELLO)
    await client.chat(model="small", messages=[*HELLO, first.message, *HELLO])

    assert f"<|assistant|>{TEXT}<|user|>" in prompt(service)


async def test_a_streamed_chat(client: ollama.AsyncClient, service: FakeService) -> None:
    """Text in pieces that are not done, then one that is, with the metrics and no text."""
    service.script = lambda generation: generation.say("one 🙂🙂")
    stream = await client.chat(model="org/small", messages=HELLO, stream=True)
    *parts, last = [part async for part in stream]

    assert "".join(part.message.content or "" for part in parts) == "one 🙂🙂"
    assert {(part.done, part.done_reason, part.eval_count) for part in parts} == {
        (False, None, None)
    }
    assert (last.done, last.done_reason, last.message.content) == (True, "length", "")
    assert last.eval_count == len(small_tokenizer().encode("one 🙂🙂"))
    assert last.total_duration


async def test_generating(client: ollama.AsyncClient, service: FakeService) -> None:
    """A prompt is a chat of one message, behind a system message if there is one."""
    answer = await client.generate(model="small", prompt="hello", system="be brief")
    stream = await client.generate(model="small", prompt="hello", stream=True)
    texts = [part.response async for part in stream]

    first, second = (small_tokenizer().decode(g.request.prompt) for g in service.submitted)
    assert first == "<|system|>be brief<|user|>hello<|assistant|>"
    assert second == "<|user|>hello<|assistant|>"
    assert (answer.response, answer.done_reason) == (TEXT, "length")
    assert "".join(text or "" for text in texts) == TEXT


async def test_generating_raw(client: ollama.AsyncClient, service: FakeService) -> None:
    """A raw prompt goes to the model as it is, and may be continued to the end of the context."""
    await client.generate(model="small", prompt="hello", raw=True)

    request = service.submitted[0].request
    assert prompt(service) == "hello"
    assert len(request.prompt) + request.sampling.max_tokens == 200


async def test_options_arrive(client: ollama.AsyncClient, service: FakeService) -> None:
    """Every option that shapes the sampling reaches the appliance; those about loading do not."""
    service.script = lambda generation: generation.say("one two three", None)
    options = {"temperature": 0.5, "top_k": 4, "top_p": 0.25, "min_p": 0.125, "seed": 3}
    options |= {"num_predict": 11, "repeat_penalty": 1.5, "repeat_last_n": -1}
    options |= {"presence_penalty": 1.0, "frequency_penalty": -1.0, "typical_p": 1.0}
    loading = {"num_ctx": 200, "num_gpu": 1, "num_thread": 8, "use_mmap": True, "numa": False}
    unknown = {"mirostat": 2}
    answer = await client.chat(
        model="small",
        messages=HELLO,
        options=options | loading | unknown | {"stop": ["o th", "zzz"]},
    )
    sampling = service.submitted[0].request.sampling

    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 4, 0.25)
    assert (sampling.min_p, sampling.seed, sampling.max_tokens) == (0.125, 3, 11)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, 1)
    assert sampling.frequency_penalty == -1
    assert (answer.message.content, answer.done_reason) == ("one tw", "stop")


@pytest.mark.parametrize("raw", [False, True])
async def test_a_format_guides_the_answer(
    client: ollama.AsyncClient, service: FakeService, raw: bool
) -> None:
    """Any object of JSON, or what a schema allows, of templates and of raw prompts."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await client.generate(model="small", prompt="hello", raw=raw, format="json")
    await client.generate(model="small", prompt="hello", raw=raw, format=schema)
    anything, exact = (generation.request.sampling.guide for generation in service.submitted)

    assert anything == Guide(GuideKind.JSON_OBJECT)
    assert exact is not None
    assert (exact.kind, json.loads(exact.text)) == (GuideKind.JSON, schema)


async def test_without_options_ollamas_defaults_hold(
    client: ollama.AsyncClient, service: FakeService
) -> None:
    """Who says nothing gets what Ollama gives; negative numbers mean none."""
    await client.chat(model="small", messages=HELLO)
    off = {"top_k": -1, "seed": -1, "num_predict": -1}
    await client.chat(model="small", messages=HELLO, options=off)
    default, none = (generation.request.sampling for generation in service.submitted)

    assert (default.temperature, default.top_k, default.top_p) == (0.8, 40, 0.9)
    assert (default.repetition_penalty, default.seed) == (1.0, None)
    assert (none.top_k, none.seed) == (0, None)
    assert none.max_tokens == default.max_tokens == 200 - len(service.submitted[0].request.prompt)


async def test_a_limit_beyond_the_context_is_cut(
    client: ollama.AsyncClient, service: FakeService
) -> None:
    """More tokens than fit may be asked for."""
    await client.generate(model="small", prompt="hello", options={"num_predict": 5000})

    request = service.submitted[0].request
    assert len(request.prompt) + request.sampling.max_tokens == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(client: ollama.AsyncClient, stream: bool) -> None:
    """Every token comes with its log probability and the top ones asked for."""
    answer = await client.generate(
        model="small", prompt="hello", logprobs=True, top_logprobs=2, stream=stream
    )
    parts = [answer] if isinstance(answer, ollama.GenerateResponse) else [p async for p in answer]

    tokens = [token for part in parts for token in part.logprobs or ()]
    assert "".join(token.token for token in tokens) == TEXT
    tops = [[top.logprob for top in token.top_logprobs or ()] for token in tokens]
    assert tops == [[-1.0, -2.0]] * len(tokens)


@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [(None, "load"), ("5m", "load"), (-1, "load"), (0, "unload"), ("0s", "unload")],
)
async def test_a_request_without_a_prompt(
    client: ollama.AsyncClient, service: FakeService, keep_alive: Any, reason: str
) -> None:
    """It only concerns where the model is: answered at once, nothing is generated."""
    said = await client.generate(model="small", keep_alive=keep_alive)
    chatted = await client.chat(model="small", keep_alive=keep_alive)

    assert (said.done, said.done_reason, said.response) == (True, reason, "")
    assert (chatted.done, chatted.done_reason, chatted.message.content) == (True, reason, "")
    assert service.submitted == []


async def test_a_tag_is_added_and_understood(
    client: ollama.AsyncClient, service: FakeService
) -> None:
    """Names are listed with the tag that Ollama's have, which need not be given."""
    listed = (await client.list()).models
    answer = await client.chat(model="org/small:latest", messages=HELLO)

    assert [model.model for model in listed] == ["small:latest", "org/small:latest"]
    assert answer.model == "org/small:latest"
    assert service.submitted[0].request.model == "org/small"


async def test_models_are_described(client: ollama.AsyncClient) -> None:
    """What the checkpoint says of itself, in Ollama's fields."""
    (model, other) = (await client.list()).models
    shown = await client.show("small")

    assert model.size == 300
    assert model.digest is not None
    assert other.digest is not None
    assert len(model.digest) == 64
    assert model.digest != other.digest
    assert model.modified_at is not None
    assert model.modified_at.timestamp() == 1_700_000_000
    assert model.details is not None
    assert (model.details.family, model.details.quantization_level) == ("llama", "BF16")
    assert shown.details == model.details
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo == {"general.architecture": "llama", "llama.context_length": 200}


async def test_running_models(client: ollama.AsyncClient) -> None:
    """Those whose weights are in a pool, with their size; none has to leave by a time."""
    (running,) = (await client.ps()).models

    assert (running.model, running.size, running.size_vram) == ("small:latest", 300, 300)
    assert running.context_length == 200
    assert running.expires_at is not None
    assert running.expires_at.year > 2200


async def test_errors_are_ollamas(client: ollama.AsyncClient, service: FakeService) -> None:
    """A sentence under its status; what Ollama has and we have not is named."""
    with pytest.raises(ollama.ResponseError) as missing:
        await client.chat(model="none:latest", messages=HELLO)
    with pytest.raises(ollama.ResponseError) as unlisted:
        await client.show("none")
    with pytest.raises(ollama.ResponseError) as pulling:
        await client.pull("none")
    with pytest.raises(ollama.ResponseError) as embedding:
        await client.embed("small", "hello")
    service.room = 0
    with pytest.raises(ollama.ResponseError) as full:
        await client.chat(model="small", messages=HELLO)

    assert (missing.value.status_code, missing.value.error) == (
        404,
        "model 'none:latest' not found",
    )
    assert (unlisted.value.status_code, unlisted.value.error) == (404, "model 'none' not found")
    assert (pulling.value.status_code, embedding.value.status_code) == (404, 400)
    assert pulling.value.error.startswith("/api/pull is not supported: ")
    assert "does not support Embeddings API" in embedding.value.error
    assert full.value.status_code == 429


async def test_a_failure_in_a_stream_is_its_last_line(
    client: ollama.AsyncClient, service: FakeService
) -> None:
    """Text that came before the failure is delivered; then the client raises."""

    def failing(generation: FakeGeneration) -> None:
        generation.feed(small_tokenizer().encode("one"))
        generation.fail(GenerationFailed("no_way", "sorry"))

    service.script = failing
    stream = await client.chat(model="small", messages=HELLO, stream=True)
    first = await anext(stream)
    with pytest.raises(ollama.ResponseError, match="sorry"):
        await anext(stream)

    assert first.message.content == "one"


async def test_a_waiting_stream_is_kept_alive(service: FakeService) -> None:
    """Before the first token blanks go out, which the client does not see."""
    service.script = None
    async with served(create_app(service, keep_alive_seconds=0.01)) as port:
        async with ollama.AsyncClient(f"http://127.0.0.1:{port}") as client:
            stream = await client.chat(model="small", messages=HELLO, stream=True)
            reading = asyncio.ensure_future(anext(stream))
            (await service.arrivals.get()).say("one")
            first = await reading
        body = {"model": "small", "prompt": "hello"}
        async with (
            httpx.AsyncClient(timeout=PATIENCE_SECONDS) as raw,
            raw.stream("POST", f"http://127.0.0.1:{port}/api/generate", json=body) as answer,
        ):
            chunks = answer.aiter_bytes()
            blanks = [await anext(chunks) for _ in range(2)]

    assert first.message.content == "one"
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert {bytes(blank).strip() for blank in blanks} == {b""}


async def test_leaving_a_stream_cancels(client: ollama.AsyncClient, service: FakeService) -> None:
    """A client that has had enough takes its request with it."""
    service.script = lambda generation: generation.say("one", None)
    stream: Any = await client.chat(model="small", messages=HELLO, stream=True)
    assert (await anext(stream)).message.content == "one"
    await stream.aclose()
    await service.submitted[0].cancelled.wait()

    assert service.submitted[0].reason == FinishReason.CANCELLED
