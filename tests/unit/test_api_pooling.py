"""Embeddings, scores and rankings as clients of OpenAI, vLLM and Ollama meet them."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import ollama
import openai
import pytest

from appliance.api.app import create_app
from appliance.api.pooled import UNDER_WAY, cosine
from appliance.api.service import GenerationFailed, RequestTimes
from appliance.engines.protocol import Pooling
from appliance.purpose import Purpose
from appliance.tokens import Tokenizer
from appliance.vocabulary import FinishReason, RequestClass, Task
from tests.patience import PATIENCE_SECONDS

from .fake_service import FakeGeneration, FakeService, byte_level_encoder, small_tokenizer
from .serving import openai_client, served, unserved

HELLO: Any = [{"role": "user", "content": "hello"}]


def answer(generation: FakeGeneration) -> None:
    """What generates says a word; a vector is the length of its prompt, and one."""
    if generation.request.pooling is None:
        generation.say("hello")
    elif generation.request.model == "scorer":
        generation.pool([1 / len(generation.request.prompt)])
    else:
        generation.pool([len(generation.request.prompt), 1.0])
    generation.times = RequestTimes(queue_seconds=0.25, prefill_seconds=0.5)


@pytest.fixture
def service() -> FakeService:
    made = FakeService(answer)
    made.learn("embedder", Purpose(task=Task.EMBED, dimensions=2))
    made.learn("matryoshka", Purpose(task=Task.EMBED, dimensions=64, cuts=()))
    made.learn("scorer", Purpose(task=Task.SCORE))
    return made


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(create_app(service)) as client:
        yield client


@pytest.fixture
async def http(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    async with unserved(create_app(service)) as client:
        yield client


@pytest.fixture
async def llama(service: FakeService) -> AsyncIterator[ollama.AsyncClient]:
    async with served(create_app(service)) as port:
        yield ollama.AsyncClient(f"http://127.0.0.1:{port}")


def tokens(text: str) -> int:
    return len(small_tokenizer().encode(text))


# --- OpenAI --------------------------------------------------------------------------------------


async def test_embeddings(client: openai.AsyncOpenAI, service: FakeService) -> None:
    """OpenAI's own client has a vector for each text, in their order, and the tokens counted."""
    texts = ["hello world", "the quick brown fox", "one"]

    made = await client.embeddings.create(model="embedder", input=texts)

    assert [one.embedding for one in made.data] == [[tokens(text), 1.0] for text in texts]
    assert [one.index for one in made.data] == [0, 1, 2]
    assert made.usage.prompt_tokens == made.usage.total_tokens == sum(map(tokens, texts))
    asked = [generation.request for generation in service.submitted]
    assert [one.prompt for one in asked] == [small_tokenizer().encode(text) for text in texts]
    assert {one.pooling for one in asked} == {Pooling()}
    assert {one.sampling.max_tokens for one in asked} == {0}
    assert len({one.id for one in asked}) == 3


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("hello", None), ([5, 6, 7], [(5, 6, 7)]), ([[5, 6], [7]], [(5, 6), (7,)])],
)
async def test_forms_of_input(
    client: openai.AsyncOpenAI, service: FakeService, given: Any, prompts: Any
) -> None:
    """A text, token ids, or lists of them; what is encoded in base64 are the same numbers."""
    made = await client.embeddings.create(model="embedder", input=given, encoding_format="float")
    encoded = await client.embeddings.with_raw_response.create(
        model="embedder", input=given, encoding_format="base64"
    )

    wanted = prompts or [small_tokenizer().encode(given)]
    assert [generation.request.prompt for generation in service.submitted] == wanted * 2
    assert [one.embedding for one in made.data] == [[len(prompt), 1.0] for prompt in wanted]
    raw = [base64.b64decode(one["embedding"]) for one in json.loads(encoded.text)["data"]]
    assert [list(struct.unpack("<2f", one)) for one in raw] == [one.embedding for one in made.data]
    assert encoded.headers["server-timing"].startswith("queue;dur=250.0")


async def test_how_vectors_are_made_is_passed_on(
    client: openai.AsyncOpenAI, service: FakeService
) -> None:
    """Dimensions where vectors can be cut, vLLM's activation, and the class of the request."""
    await client.embeddings.create(
        model="matryoshka",
        input="hello",
        dimensions=16,
        extra_body={"use_activation": False, "service_tier": "flex"},
    )

    (generation,) = service.submitted
    assert generation.request.pooling == Pooling(dimensions=16, use_activation=False)
    assert generation.request.request_class is RequestClass.BATCH


@pytest.mark.parametrize(
    ("body", "field", "why"),
    [
        ({"model": "small", "input": "a"}, "model", "does not support Embeddings API"),
        ({"model": "scorer", "input": "a"}, "model", "does not support Embeddings API"),
        ({"input": "a", "dimensions": 1}, "dimensions", "cannot be cut"),
        ({"model": "matryoshka", "input": "a", "dimensions": 65}, "dimensions", "1 to 64"),
        ({"input": ""}, "input", "without tokens"),
        ({"input": []}, "input", "length >= 1"),
        ({"input": ["a", 1]}, "input", "cannot be mixed"),
        ({"input": [4000]}, "input", "not in the vocabulary"),
        ({"input": [5] * 201}, "input", "maximum context length is 200"),
        ({"input": ["a"] * 2049}, "input", "more than 2048"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({}, "input", "a value is required"),
    ],
)
async def test_what_cannot_be_embedded_is_refused(
    http: httpx.AsyncClient, service: FakeService, body: dict[str, Any], field: str, why: str
) -> None:
    """By the field at fault, before anything is submitted."""
    refused = await http.post("/v1/embeddings", json={"model": "embedder", **body})

    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, field)
    assert why in error["message"]
    assert error["message"].startswith(field)
    assert service.submitted == []


async def test_models_that_do_not_generate_are_told(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient, service: FakeService
) -> None:
    """Every endpoint that generates names them; the lists say what they are for."""
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5}),
        ("/api/chat", {"messages": HELLO}),
        ("/api/generate", {"prompt": "hello"}),
    ):
        refused = await http.post(path, json={"model": "embedder", **body})
        assert refused.status_code == 400, path
        assert "does not support" in refused.text
    assert service.submitted == []
    listed = {card.id: card.to_dict()["task"] for card in (await client.models.list()).data}
    assert (listed["small"], listed["embedder"], listed["scorer"]) == ("generate", "embed", "score")


# --- many texts ----------------------------------------------------------------------------------


async def test_not_all_at_once(client: openai.AsyncOpenAI, service: FakeService) -> None:
    """Only so many of one answer are under way; the next begins when one is over."""
    service.script = None
    making = asyncio.create_task(client.embeddings.create(model="embedder", input=["a"] * 40))
    begun = [await service.arrivals.get() for _ in range(UNDER_WAY)]
    assert service.arrivals.empty()
    begun[7].pool([7.0])
    begun.append(await service.arrivals.get())
    for number, generation in enumerate(begun):
        if number != 7:
            generation.pool([float(number)])
    for number in range(len(begun), 40):
        (await service.arrivals.get()).pool([float(number)])

    made = await making

    assert [one.embedding for one in made.data] == [[float(number)] for number in range(40)]


async def test_a_full_queue_is_waited_for(client: openai.AsyncOpenAI, service: FakeService) -> None:
    """While texts of the same answer are under way; none at all is 429."""
    service.script, service.room = None, 2
    making = asyncio.create_task(client.embeddings.create(model="embedder", input=["a"] * 3))
    for generation in [await service.arrivals.get() for _ in range(2)]:
        service.room += 1
        generation.pool([1.0])
    (await service.arrivals.get()).pool([1.0])
    assert len((await making).data) == 3

    service.room = 0
    with pytest.raises(openai.RateLimitError):
        await client.embeddings.create(model="embedder", input="a")


async def test_one_that_fails_ends_all(client: openai.AsyncOpenAI, service: FakeService) -> None:
    """The others are given up; the client hears why."""
    service.script = None
    making = asyncio.create_task(client.embeddings.create(model="embedder", input=["a", "b"]))
    first, second = [await service.arrivals.get() for _ in range(2)]
    first.fail(GenerationFailed("model_failed", "no such weights", 503))

    with pytest.raises(openai.InternalServerError, match="no such weights"):
        await making
    assert second.reason is FinishReason.CANCELLED


async def test_a_model_that_leaves_meanwhile(
    client: openai.AsyncOpenAI, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that have not begun never will, and it is told why there is no such model."""
    service.script = None
    making = asyncio.create_task(client.embeddings.create(model="embedder", input=["a"] * 40))
    first, *others = [await service.arrivals.get() for _ in range(UNDER_WAY)]
    del service._cards["embedder"]
    monkeypatch.setattr(service, "submit", lambda request: service.model("embedder"))
    first.pool([1.0])

    with pytest.raises(openai.NotFoundError, match="embedder was removed") as told:
        await making
    assert told.value.code == "model_removed"
    assert all(other.reason is FinishReason.CANCELLED for other in others)
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="embedder", input=["a"])


async def test_a_client_that_leaves_takes_its_texts_along(
    client: openai.AsyncOpenAI, service: FakeService
) -> None:
    """Nothing is computed for nobody."""
    service.script = None
    making = asyncio.create_task(client.embeddings.create(model="embedder", input=["a", "b"]))
    begun = [await service.arrivals.get() for _ in range(2)]
    making.cancel()

    for generation in begun:
        await asyncio.wait_for(generation.cancelled.wait(), PATIENCE_SECONDS)


async def test_one_that_is_cancelled_is_told(
    client: openai.AsyncOpenAI, service: FakeService
) -> None:
    """A request that ends without a vector is an error, not an empty one."""
    service.script = lambda generation: generation.cancel(FinishReason.CANCELLED)

    with pytest.raises(openai.InternalServerError, match="cancelled"):
        await client.embeddings.create(model="embedder", input="a")


# --- scores --------------------------------------------------------------------------------------


async def test_scores_of_pairs(http: httpx.AsyncClient, service: FakeService) -> None:
    """A model that scores reads two texts as one prompt; one text goes with each of others."""
    body = {"model": "scorer", "text_1": "hello", "text_2": ["world", "one two three"]}

    answer = (await http.post("/v1/score", json=body)).json()

    pairs = [small_tokenizer().encode_pairs("hello")(text) for text in body["text_2"]]
    assert [generation.request.prompt for generation in service.submitted] == pairs
    assert [one["score"] for one in answer["data"]] == pytest.approx([1 / len(p) for p in pairs])
    assert answer["usage"]["prompt_tokens"] == sum(map(len, pairs))


async def test_scores_by_angles(http: httpx.AsyncClient, service: FakeService) -> None:
    """Of a model that embeds, each text is a prompt; lists go text by text."""
    first, second = ["hello", "one"], ["the lazy dog", "hello"]

    answer = (
        await http.post("/score", json={"model": "embedder", "text_1": first, "text_2": second})
    ).json()

    assert len(service.submitted) == 4
    wanted = [
        cosine((tokens(a), 1.0), (tokens(b), 1.0)) for a, b in zip(first, second, strict=True)
    ]
    assert [one["score"] for one in answer["data"]] == pytest.approx(wanted)


def test_cosine() -> None:
    """1 in the same direction, 0 across, -1 against; nothing has no direction."""
    assert cosine((1.0, 2.0), (2.0, 4.0)) == pytest.approx(1)
    assert cosine((1.0, 0.0), (0.0, 3.0)) == 0
    assert cosine((1.0, 1.0), (-2.0, -2.0)) == pytest.approx(-1)
    assert cosine((0.0, 0.0), (1.0, 1.0)) == 0


class WatchedTokenizer(Tokenizer):
    """Knows in which threads it encoded pairs, and what with."""

    def __init__(self) -> None:
        super().__init__(byte_level_encoder())
        self.threads: list[int] = []
        self.firsts: list[str] = []

    def encode_pairs(self, first: str) -> Callable[[str], tuple[int, ...]]:
        self.firsts.append(first)
        pair = super().encode_pairs(first)

        def watched(second: str) -> tuple[int, ...]:
            self.threads.append(threading.get_ident())
            return pair(second)

        return watched


async def test_one_text_with_many_others(http: httpx.AsyncClient, service: FakeService) -> None:
    """It is encoded once, and put together with each, which the event loop does not wait for."""
    service.text = tokenizer = WatchedTokenizer()
    query = "hello " * 30

    await http.post("/v1/rerank", json={"model": "scorer", "query": query, "documents": ["a"]})
    assert tokenizer.threads == [threading.get_ident()]
    documents = ["a"] * 100
    answer = await http.post(
        "/v1/rerank", json={"model": "scorer", "query": query, "documents": documents}
    )

    assert answer.status_code == 200
    assert len(tokenizer.threads) == 101
    assert tokenizer.firsts == [query, query]  # one for each request
    assert threading.get_ident() not in tokenizer.threads[1:]


async def test_nothing_is_encoded_behind_what_is_too_long(
    http: httpx.AsyncClient, service: FakeService
) -> None:
    """One pair is enough to refuse a query that is too long for the model by itself."""
    service.text = tokenizer = WatchedTokenizer()
    body = {"model": "scorer", "query": "hello " * 200, "documents": ["a"] * 1000}

    refused = (await http.post("/v1/rerank", json=body)).json()["error"]

    assert (refused["param"], refused["code"]) == ("query", "context_length_exceeded")
    assert len(tokenizer.threads) == 1


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_ranking(http: httpx.AsyncClient, path: str) -> None:
    """The best first, of texts and of objects, as many as wanted, with or without their texts."""
    body = {
        "model": "scorer",
        "query": "hello",
        "documents": ["the quick brown fox", {"text": "a"}, "one two"],
    }

    ranked = (await http.post(path, json=body)).json()["results"]
    best = (await http.post(path, json={**body, "top_n": 1, "return_documents": False})).json()

    assert [one["index"] for one in ranked] == [1, 2, 0]
    assert [one["document"]["text"] for one in ranked] == ["a", "one two", "the quick brown fox"]
    scores = [one["relevance_score"] for one in ranked]
    assert scores == sorted(scores, reverse=True)
    assert best["results"] == [{"index": 1, "relevance_score": scores[0]}]


async def test_texts_without_marks_between_them(
    http: httpx.AsyncClient, service: FakeService
) -> None:
    """A model that was taught so reads one text behind the other."""
    service.learn("plain", Purpose(task=Task.SCORE, separated=False))
    service.script = lambda generation: generation.pool([0.5])

    await http.post("/v1/score", json={"model": "plain", "text_1": "hello ", "text_2": "world"})

    assert service.submitted[0].request.prompt == small_tokenizer().encode("hello world")


@pytest.mark.parametrize(
    ("path", "body", "field", "why"),
    [
        ("/v1/score", {"model": "small", "text_1": "a", "text_2": "b"}, "model", "Score API"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1", "as many as text_2"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "length >= 1"),
        ("/v1/score", {"text_1": "a", "text_2": "hello " * 200}, "text_2", "context length"),
        ("/v1/score", {"text_1": "hello " * 200, "text_2": "a"}, "text_1", "context length"),
        ("/v1/rerank", {"query": "a", "documents": [{"image": "b"}]}, "documents", "image"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", ">= 0"),
        (
            "/v1/rerank",
            {"model": "embedder", "query": "a", "documents": ["b"], "use_activation": True},
            "use_activation",
            "angle",
        ),
    ],
)
async def test_what_cannot_be_scored_is_refused(
    http: httpx.AsyncClient,
    service: FakeService,
    path: str,
    body: dict[str, Any],
    field: str,
    why: str,
) -> None:
    """By the field at fault."""
    refused = await http.post(path, json={"model": "scorer", **body})

    error = refused.json()["error"]
    assert refused.status_code == 400
    assert error["param"].startswith(field)
    assert why in error["message"]
    assert service.submitted == []


# --- Ollama --------------------------------------------------------------------------------------


async def test_ollama_embed(llama: ollama.AsyncClient, service: FakeService) -> None:
    """Ollama's own client: texts, counts and durations; vectors have length 1."""
    made = await llama.embed("embedder:latest", ["hello", "one two"])

    assert made.embeddings == [[tokens("hello"), 1.0], [tokens("one two"), 1.0]]
    assert made.model == "embedder:latest"
    assert made.prompt_eval_count == tokens("hello") + tokens("one two")
    assert made.load_duration == 250_000_000
    assert made.total_duration is not None
    assert {generation.request.pooling for generation in service.submitted} == {
        Pooling(use_activation=True)
    }


async def test_ollama_cuts_what_is_too_long(
    llama: ollama.AsyncClient, service: FakeService
) -> None:
    """Its beginning is embedded, as much as fits; unless that is not wanted."""
    text = "hello world, one two " * 100

    await llama.embed("embedder", text, options={"num_ctx": 100}, keep_alive="5m")
    with pytest.raises(ollama.ResponseError, match="maximum context length is 200"):
        await llama.embed("embedder", text, truncate=False)

    (generation,) = service.submitted
    prompt = generation.request.prompt
    assert 195 <= len(prompt) <= 200
    assert text.startswith(small_tokenizer().decode(prompt))


async def test_ollamas_older_endpoint(llama: ollama.AsyncClient, service: FakeService) -> None:
    """One vector, as the model has it."""
    made = await llama.embeddings("embedder", "hello")

    assert list(made.embedding) == [tokens("hello"), 1.0]
    assert service.submitted[0].request.pooling == Pooling()


async def test_ollama_without_a_text(http: httpx.AsyncClient, service: FakeService) -> None:
    """It only asks for the model to be loaded: nothing is computed."""
    for body in ({}, {"input": ""}, {"input": []}):
        made = await http.post("/api/embed", json={"model": "embedder", **body})
        assert (made.status_code, made.json()["embeddings"]) == (200, [])
    made = await http.post("/api/embeddings", json={"model": "embedder"})
    assert made.json() == {"embedding": []}
    assert service.submitted == []


async def test_ollama_shows_what_a_model_is_for(llama: ollama.AsyncClient) -> None:
    """In its own words."""
    assert (await llama.show("embedder")).capabilities == ["embedding"]
    assert (await llama.show("scorer")).capabilities == []


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"model": "none"}, "model 'none' not found"),
        ({"model": "small"}, "does not support Embeddings API"),
        ({"dimensions": 1}, "cannot be cut"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"options": {"num_ctx": 500}}, "num_ctx"),
        ({"truncation": True}, "truncation"),
    ],
)
async def test_ollamas_refusals(http: httpx.AsyncClient, body: dict[str, Any], why: str) -> None:
    """In its dialect."""
    refused = await http.post("/api/embed", json={"model": "embedder", "input": "a", **body})

    assert refused.status_code in (400, 404)
    assert why in refused.json()["error"]
