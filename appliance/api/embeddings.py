"""OpenAI's ``POST /v1/embeddings``: a vector for each text."""

from __future__ import annotations

import base64
import time
import uuid
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse
from msgspec import Meta

from appliance.api.errors import BadRequest
from appliance.api.plan import encode_source, off_loop, sources_of
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
from appliance.api.service import Service, SubmitRequest
from appliance.api.tasks import check_task
from appliance.engines.protocol import Pooling
from appliance.tokens import Tokenizer
from appliance.vocabulary import Task

_Token: TypeAlias = Annotated[int, Meta(ge=0)]
_Tokens: TypeAlias = Annotated[list[_Token], Meta(min_length=1)]


class EmbeddingsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/embeddings``."""

    model: str
    input: str | Annotated[list[str | _Token | _Tokens], Meta(min_length=1)]
    """A text, its token ids, or a list of either."""
    encoding_format: Literal["float", "base64"] | None = None
    """``base64`` is of little-endian float32."""
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    use_activation: bool | None = None
    """vLLM's: whether vectors have length 1; left out, as the model has it."""
    service_tier: Literal["auto", "default", "flex"] | None = None
    user: str | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of an answer to which nothing was generated; each text is counted once."""

    prompt_tokens: int
    total_tokens: int


class _Embedding(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: tuple[float, ...] | str


class _Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[_Embedding]
    usage: Tokens


class EmbeddingsPlan(NamedTuple):
    """What is asked for: a request for each text, and the name of the answer."""

    asked: EmbeddingsRequest
    name: str
    requests: list[SubmitRequest]


def embedding_routes(service: Service) -> list[HTTPRouteHandler]:
    """``/v1/embeddings``."""

    @post("/v1/embeddings", status_code=200, operation_id="createEmbedding")
    async def embeddings(request: Request[Any, Any, Any]) -> ASGIResponse:
        plan = await plan_embeddings(await request.body(), service)
        pooled = await pool(request.receive, plan.requests, service)
        return await pooled_answer(lambda: embeddings_answer(plan, pooled), pooled)

    return [embeddings]


async def plan_embeddings(body: bytes, service: Service) -> EmbeddingsPlan:
    """What `body` asks for. Raises `BadRequest` and `ModelNotFound`."""
    asked = parse(body, EmbeddingsRequest)
    card, tokenizer = service.model(asked.model), service.tokenizer(asked.model)
    check_task(card, [Task.EMBED], "Embeddings")
    check_dimensions(card, asked.dimensions)
    prompts = await off_loop(len(body), lambda: _prompts(asked, tokenizer))
    check_lengths(card, prompts, "input")
    name = f"embd-{uuid.uuid4().hex}"
    pooling = Pooling(dimensions=asked.dimensions, use_activation=asked.use_activation)
    flex = asked.service_tier == "flex"
    return EmbeddingsPlan(asked, name, requests_for(card, prompts, pooling, name, flex=flex))


def _prompts(asked: EmbeddingsRequest, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Raises `BadRequest`."""
    try:
        sources = sources_of(asked.input)
        if len(sources) > MAX_INPUTS:
            raise BadRequest(f"prompt: {len(sources)} texts are more than {MAX_INPUTS}", "prompt")
        return [encode_source(source, tokenizer) for source in sources]
    except BadRequest as error:
        raise error.renamed({"prompt": "input"}) from error


def embeddings_answer(plan: EmbeddingsPlan, pooled: Pooled) -> object:
    """The body of the answer, to be encoded."""
    asked = plan.asked
    encoded = asked.encoding_format == "base64"
    return _Embeddings(
        id=plan.name,
        created=int(time.time()),
        model=asked.model,
        data=[
            _Embedding(
                index=index,
                embedding=base64.b64encode(vector).decode() if encoded else numbers(vector),
            )
            for index, vector in enumerate(pooled.vectors)
        ],
        usage=Tokens(prompt_tokens=pooled.prompt_tokens, total_tokens=pooled.prompt_tokens),
    )
