"""Ollama's ``/api/embed`` and, older, ``/api/embeddings``."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse
from litestar.types import Receive
from msgspec import Meta

from appliance.api.jsonanswers import json_answer
from appliance.api.ollama import find
from appliance.api.ollama_requests import Options, check_keep_alive
from appliance.api.plan import off_loop
from appliance.api.pooled import (
    MAX_INPUTS,
    Pooled,
    check_dimensions,
    check_lengths,
    numbers,
    pool,
    pooled_answer,
    requests_for,
)
from appliance.api.schemas import parse
from appliance.api.service import ModelCard, RequestTimes, Service
from appliance.api.tasks import check_task
from appliance.engines.protocol import Pooling
from appliance.tokens import Tokenizer
from appliance.vocabulary import Task


class _Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    options: Options | None = None
    keep_alive: str | float | None = None

    def check(self, card: ModelCard) -> None:
        """Raise `BadRequest` for what cannot be had from the model."""
        check_keep_alive(self.keep_alive)
        (self.options or Options()).fields(card.max_context_tokens)
        check_task(card, [Task.EMBED], "Embeddings")


class OllamaEmbed(_Request, kw_only=True):
    """``POST /api/embed``."""

    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)] = ""
    truncate: bool | None = None
    """Unless it is false, of a text that is too long the beginning is taken."""
    dimensions: Annotated[int, Meta(ge=0)] | None = None

    @property
    def texts(self) -> list[str]:
        """None, if the model is only to be loaded."""
        return ([self.input] if self.input else []) if isinstance(self.input, str) else self.input


class OllamaEmbeddings(_Request, kw_only=True):
    """``POST /api/embeddings``."""

    prompt: str = ""


def ollama_embedding_routes(service: Service) -> list[HTTPRouteHandler]:
    """Both endpoints."""

    @post("/api/embed", status_code=200, operation_id="ollamaEmbed")
    async def embed(request: Request[Any, Any, Any]) -> ASGIResponse:
        started = time.monotonic()
        asked = parse(await request.body(), OllamaEmbed)
        card = find(service, asked.model)
        asked.check(card)
        check_dimensions(card, asked.dimensions or None)
        # Ollama's vectors have length 1, whatever the model has.
        pooling = Pooling(dimensions=asked.dimensions or None, use_activation=True)
        pooled = await embedded(
            request.receive, card, asked.texts, pooling, truncate=asked.truncate is not False
        )
        times = pooled.times or RequestTimes()
        answer = {
            "model": asked.model,
            "total_duration": round((time.monotonic() - started) * 1e9),
            "load_duration": round((times.queue_seconds + times.load_seconds) * 1e9),
            "prompt_eval_count": pooled.prompt_tokens,
        }
        return await pooled_answer(
            lambda: answer | {"embeddings": [numbers(vector) for vector in pooled.vectors]}, pooled
        )

    @post("/api/embeddings", status_code=200, operation_id="ollamaEmbeddings")
    async def embeddings(request: Request[Any, Any, Any]) -> ASGIResponse:
        asked = parse(await request.body(), OllamaEmbeddings)
        card = find(service, asked.model)
        asked.check(card)
        if not asked.prompt:
            return json_answer({"embedding": []})
        pooled = await embedded(request.receive, card, [asked.prompt], Pooling(), truncate=True)
        return await pooled_answer(lambda: {"embedding": numbers(pooled.vectors[0])}, pooled)

    async def embedded(
        receive: Receive,
        card: ModelCard,
        texts: Sequence[str],
        pooling: Pooling,
        *,
        truncate: bool,
    ) -> Pooled:
        tokenizer = service.tokenizer(card.id)
        most = card.max_context_tokens if truncate else None
        prompts = await off_loop(sum(map(len, texts)), lambda: _encode(texts, tokenizer, most))
        check_lengths(card, prompts, "input")
        requests = requests_for(card, prompts, pooling, f"embd-{uuid.uuid4().hex}")
        return await pool(receive, requests, service)

    return [embed, embeddings]


def _encode(texts: Sequence[str], tokenizer: Tokenizer, most: int | None) -> list[tuple[int, ...]]:
    """Token ids of each text, of no more of it than makes `most` tokens."""
    if most is None:
        return [tokenizer.encode(text) for text in texts]
    return [tokenizer.encode_beginning(text, most) for text in texts]
