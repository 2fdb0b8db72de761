"""Ollama's endpoints for text and vectors, answered by vLLM's serving objects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import msgspec
from litestar import Litestar, Request, Response, post
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse
from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMClientError

from appliance.frontend import calls
from appliance.frontend.ollama.errors import TOO_LONG, OllamaError, as_ollama_error
from appliance.frontend.ollama.fitting import continued, is_too_long, shortened
from appliance.frontend.ollama.replies import Endpoint, Reply, events, understood
from appliance.frontend.ollama.requests import (
    ChatBody,
    EmbedBody,
    EmbeddingsBody,
    FittedChat,
    FittedCompletion,
    GenerateBody,
    decoded,
)
from appliance.frontend.serving.model_fronts import ModelFront, ModelFronts, UnknownModel
from appliance.http.streaming import AS_IT_COMES, Streamed, unless_hung_up
from appliance.service.front_frames import FrontModel
from appliance.vocabulary import Task

_Request: TypeAlias = Request[Any, Any, Any]

_BLANK: Final = b" "
"""Keeps a stream alive: white space before the next line, which no reader of JSON sees."""


def ollama_application(fronts: ModelFronts, *, strict: bool, keep_alive_seconds: float) -> Litestar:
    """What a front end answers of Ollama's endpoints.

    `strict` refuses options that Ollama does not know. While a stream has nothing to say, it is
    kept alive every `keep_alive_seconds`. Bodies are read, and bounded, before.
    """
    return Litestar(
        route_handlers=[
            *_generation_routes(fronts, strict, keep_alive_seconds),
            *_embedding_routes(fronts, strict),
        ],
        exception_handlers={HTTPException: _refused, Exception: _refused},
        request_max_body_size=None,
        logging_config=None,
        openapi_config=None,
    )


def _generation_routes(
    fronts: ModelFronts, strict: bool, keep_alive_seconds: float
) -> list[HTTPRouteHandler]:
    @post("/api/chat", status_code=200)
    async def chat(request: _Request) -> ASGIResponse:
        return await answered(request, ChatBody, "chat")

    @post("/api/generate", status_code=200)
    async def generate(request: _Request) -> ASGIResponse:
        return await answered(request, GenerateBody, "generate")

    async def answered(
        request: _Request, kind: type[ChatBody] | type[GenerateBody], endpoint: Endpoint
    ) -> ASGIResponse:
        started = time.monotonic()
        asked: ChatBody | GenerateBody = decoded(await request.body(), kind, strict=strict)
        model = _found(fronts, asked.model)
        name = asked.model or model.name
        if model.task is not Task.GENERATE:
            raise OllamaError(400, f'"{name}" does not support {endpoint}')
        if asked.loads and asked.unloads:
            return _json(Reply(name, endpoint, started).placed("unload"))
        front = await fronts.get(model)
        if asked.loads:
            return _json(Reply(name, endpoint, started).placed("load"))
        reply = Reply(name, endpoint, started, _timing)
        said = await unless_hung_up(request.receive, _submitted(asked, front, model))
        if not asked.streams:
            return _json(reply.whole(understood(said)))
        lines = kept_alive(_lines(said, reply), keep_alive_seconds)
        return Streamed(lines, "application/x-ndjson", AS_IT_COMES)

    return [chat, generate]


def _embedding_routes(fronts: ModelFronts, strict: bool) -> list[HTTPRouteHandler]:
    @post("/api/embed", status_code=200)
    async def embed(request: _Request) -> ASGIResponse:
        started = time.monotonic()
        asked = decoded(await request.body(), EmbedBody, strict=strict)
        front = await embedder(asked)
        submitted = time.monotonic()
        pooled = _Pooled()
        if asked.texts:
            work = _pooled(asked.request(front.model), front)
            pooled = await unless_hung_up(request.receive, work)
        answer = {
            "model": asked.model or front.model.name,
            "embeddings": [vector.embedding for vector in pooled.data],
            "total_duration": round((time.monotonic() - started) * 1e9),
            "load_duration": round((submitted - started) * 1e9),
            "prompt_eval_count": pooled.usage.prompt_tokens,
        }
        return _json(msgspec.json.encode(answer))

    @post("/api/embeddings", status_code=200)
    async def embeddings(request: _Request) -> ASGIResponse:
        asked = decoded(await request.body(), EmbeddingsBody, strict=strict)
        front = await embedder(asked)
        if not asked.prompt:
            return _json(b'{"embedding":[]}')
        work = _pooled(asked.request(front.model), front)
        pooled = await unless_hung_up(request.receive, work)
        return _json(msgspec.json.encode({"embedding": pooled.data[0].embedding}))

    async def embedder(asked: EmbedBody | EmbeddingsBody) -> ModelFront:
        model = _found(fronts, asked.model)
        if model.task is not Task.EMBED:
            raise OllamaError(501, "this model does not support embeddings")
        return await fronts.get(model)

    return [embed, embeddings]


def _found(fronts: ModelFronts, asked: str | None) -> FrontModel:
    """The model of this name, if the call's key allows it. Raises `UnknownModel`."""
    model = fronts.resolve(asked or None)
    if not calls.current.get().allows(model.name):
        raise UnknownModel(asked or model.name)
    return model


def _timing() -> str | None:
    return calls.current.get().timing


# --- text ----------------------------------------------------------------------------------------


async def _submitted(asked: ChatBody | GenerateBody, front: ModelFront, model: FrontModel) -> Any:
    """vLLM's answer: a stream of events, or JSON. Raises `OllamaError` and what vLLM raises."""
    serving = front.state.openai_serving_chat
    renderer = front.state.online_renderer
    request = asked.request(model, serving.default_sampling_params)
    if isinstance(asked, GenerateBody) and asked.context:
        await continued(request, asked.context, renderer, truncates=asked.truncates)
    try:
        return await _said(request, front)
    except (VLLMClientError, ValueError) as error:
        if not is_too_long(error):
            raise
        # The prompt of an image is not cut: what is left might be none.
        if not asked.truncates or asked.sees or isinstance(request, FittedCompletion):
            raise OllamaError(400, TOO_LONG) from error
    return await _said(await shortened(request, renderer), front)


async def _said(request: FittedChat | FittedCompletion, front: ModelFront) -> Any:
    if isinstance(request, FittedChat):
        said = await front.state.openai_serving_chat.create_chat_completion(request, None)
    else:
        said = await front.state.openai_serving_completion.create_completion(request, None)
    if isinstance(said, ErrorResponse):
        if said.error.param == "suffix":
            raise OllamaError(400, f'"{front.model.name}" does not support insert')
        raise OllamaError(said.error.code, said.error.message)
    return said if request.stream else said.model_dump_json(exclude_none=True)


async def _lines(stream: AsyncGenerator[str, None], reply: Reply) -> AsyncGenerator[bytes, None]:
    """The answer line by line; a failure is the last one."""
    async with aclosing(stream):
        try:
            async for said in events(stream):
                if line := reply.line(said):
                    yield line
            yield reply.last()
        except Exception as error:  # the head is sent: the line is all that can tell of it
            yield as_ollama_error(error).body + b"\n"


async def kept_alive(
    lines: AsyncGenerator[bytes, None], every_seconds: float
) -> AsyncGenerator[bytes, None]:
    """`lines`, with white space whenever none came for so long."""
    async with aclosing(lines):
        coming = asyncio.ensure_future(anext(lines, None))
        try:
            while True:
                done, _ = await asyncio.wait({coming}, timeout=every_seconds)
                if not done:
                    yield _BLANK
                    continue
                line = coming.result()
                if line is None:
                    return
                yield line
                coming = asyncio.ensure_future(anext(lines, None))
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


# --- vectors -------------------------------------------------------------------------------------


class _Vector(msgspec.Struct):
    embedding: msgspec.Raw


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


class _Pooled(msgspec.Struct):
    """vLLM's answer; its numbers are passed on as they are written."""

    data: list[_Vector] = []
    usage: _Usage = msgspec.field(default_factory=_Usage)


_read_pooled: Final = msgspec.json.Decoder(_Pooled)


async def _pooled(request: EmbeddingCompletionRequest, front: ModelFront) -> _Pooled:
    try:
        answer = await front.state.serving_embedding(request, None)
    except (VLLMClientError, ValueError) as error:
        if is_too_long(error):
            raise OllamaError(400, TOO_LONG) from error
        raise
    return _read_pooled.decode(answer.body)


# --- answers -------------------------------------------------------------------------------------


def _refused(request: _Request, error: Exception) -> Response[bytes]:
    refused = as_ollama_error(error)
    return Response(refused.body, status_code=refused.status, media_type="application/json")


def _json(body: bytes) -> ASGIResponse:
    return ASGIResponse(body=body, media_type="application/json")
