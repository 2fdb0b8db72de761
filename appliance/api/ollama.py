"""Ollama's endpoints. A request is put into OpenAI's words and planned like one of those."""

from __future__ import annotations

import contextlib
import hashlib
import time
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from litestar import Request, post, route
from litestar.enums import HttpMethod
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

import appliance
from appliance.api.choices import Choices
from appliance.api.errors import ApiError, BadRequest
from appliance.api.jsonanswers import json_answer
from appliance.api.ollama_replies import Endpoint, OllamaDialect, placed, timestamp
from appliance.api.ollama_requests import FIELDS, OllamaChat, OllamaGenerate, OllamaShow
from appliance.api.plan import plan_chat, plan_completion
from appliance.api.schemas import ChatRequest, parse
from appliance.api.service import Activity, ModelCard, ModelNotFound, Service
from appliance.api.stream import answer
from appliance.api.tools import check_reasons
from appliance.vocabulary import ModelName, Task

_LATEST = ":latest"
"""The tag that a name without one stands for."""

_FOREVER = timedelta(microseconds=(2**63 - 1) // 1000)
"""The longest duration that Ollama knows; how it tells of a model that is not unloaded."""

_LOADED = frozenset({"loading", "loaded"})
"""Residencies on the device."""

_LEVELS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Ollama's words for the types that weights are computed in."""

_CAPABILITIES = {Task.GENERATE: ["completion"], Task.EMBED: ["embedding"], Task.SCORE: []}
"""Ollama's words; it has none for scores."""

_GET_OR_HEAD = [HttpMethod.GET, HttpMethod.HEAD]


def ollama_routes(
    service: Service, keep_alive_seconds: float, *, fixed: bool
) -> list[HTTPRouteHandler]:
    """Ollama's endpoints; those that are not supported say so. With a `fixed` catalogue those that
    change it are of them, else they are elsewhere."""
    return [
        *_generation_routes(service, keep_alive_seconds),
        *_model_routes(service),
        *_refusals(fixed),
    ]


def _generation_routes(service: Service, keep_alive_seconds: float) -> list[HTTPRouteHandler]:
    @post("/api/chat", status_code=200, operation_id="ollamaChat")
    async def chat(request: Request[Any, Any, Any]) -> ASGIResponse:
        started = time.monotonic()
        asked = parse(await request.body(), OllamaChat)
        return await generate(request, asked, "chat", started)

    @post("/api/generate", status_code=200, operation_id="ollamaGenerate")
    async def completion(request: Request[Any, Any, Any]) -> ASGIResponse:
        started = time.monotonic()
        asked = parse(await request.body(), OllamaGenerate)
        return await generate(request, asked, "generate", started)

    async def generate(
        request: Request[Any, Any, Any],
        asked: OllamaChat | OllamaGenerate,
        endpoint: Endpoint,
        started: float,
    ) -> ASGIResponse:
        """`started` is when the request came, on the monotonic clock, in seconds."""
        asked.check()
        card = find(service, asked.model)
        if asked.loads:
            said = placed(asked.model, endpoint, "unload" if asked.unloads else "load")
            return json_answer(msgspec.Raw(said))
        if asked.think:
            check_reasons("think", card)
        translated = asked.openai(card)
        name = f"{endpoint}-{uuid.uuid4().hex}"
        try:
            if isinstance(translated, ChatRequest):
                plan = await plan_chat(translated, service, name, fit=True)
            else:
                plan = await plan_completion(translated, service, name, fit=True)
        except BadRequest as error:
            raise error.renamed(FIELDS) from error
        choices = Choices.submit(plan, service)
        read_seconds = time.monotonic() - started
        return await answer(
            request.receive,
            choices,
            OllamaDialect(asked.model, endpoint, read_seconds, choices.times),
            stream=plan.stream,
            keep_alive_seconds=keep_alive_seconds,
        )

    return [chat, completion]


def _model_routes(service: Service) -> list[HTTPRouteHandler]:
    @route("/", http_method=_GET_OR_HEAD, operation_id="ollamaHeartbeat")
    async def heartbeat() -> ASGIResponse:
        # What Ollama's clients look for before they ask anything.
        return ASGIResponse(body=b"Ollama is running", media_type="text/plain")

    @route("/api/version", http_method=_GET_OR_HEAD, operation_id="ollamaVersion")
    async def version() -> ASGIResponse:
        return json_answer({"version": appliance.__version__})

    @route("/api/tags", http_method=_GET_OR_HEAD, operation_id="ollamaTags")
    async def tags() -> ASGIResponse:
        return json_answer({"models": [_tag(card) for card in service.models()]})

    @route("/api/ps", http_method=[HttpMethod.GET], operation_id="ollamaPs")
    async def ps() -> ASGIResponse:
        copies = _copies(service.activity())
        expires = timestamp(datetime.now(UTC) + _FOREVER)
        return json_answer(
            {
                "models": [
                    _tag(card)
                    | {
                        "size": copies[card.id] * card.weight_bytes,
                        "size_vram": copies[card.id] * card.weight_bytes,
                        "expires_at": expires,
                        "context_length": card.max_context_tokens,
                    }
                    for card in service.models()
                    if card.id in copies
                ]
            }
        )

    @post("/api/show", status_code=200, operation_id="ollamaShow")
    async def show(request: Request[Any, Any, Any]) -> ASGIResponse:
        asked = parse(await request.body(), OllamaShow)
        name = asked.model or asked.name
        if not name:
            raise BadRequest("model: a value is required", "model", "missing_field")
        card = find(service, name)
        family = _family(card)
        return json_answer(
            {
                "details": _details(card),
                "model_info": {
                    "general.architecture": family,
                    f"{family}.context_length": card.max_context_tokens,
                },
                "capabilities": _capabilities(card),
                "modified_at": _modified(card),
            }
        )

    return [heartbeat, version, tags, ps, show]


_KEPT = "models are catalogued in the appliance's configuration"
_REFUSED_IF_FIXED = {"/api/pull": _KEPT, "/api/delete": _KEPT}
_REFUSED = {
    "/api/push": _KEPT,
    "/api/create": _KEPT,
    "/api/copy": _KEPT,
    "/api/blobs/{digest:str}": _KEPT,
}
"""What Ollama has and we have not, and why."""


def _refusals(fixed: bool) -> list[HTTPRouteHandler]:
    refused = _REFUSED | (_REFUSED_IF_FIXED if fixed else {})
    return [_refusal(path, why) for path, why in refused.items()]


def _refusal(path: str, why: str) -> HTTPRouteHandler:
    methods = [HttpMethod.GET, HttpMethod.HEAD, HttpMethod.POST, HttpMethod.DELETE]

    @route(path, http_method=methods, include_in_schema=False)
    async def refuse() -> ASGIResponse:
        raise ApiError(404, f"{path.partition('/{')[0]} is not supported: {why}")

    return refuse


def find(service: Service, name: str) -> ModelCard:
    """The model of this name, or of what it is without the tag that Ollama adds to every name."""
    for known in dict.fromkeys((name, name.removesuffix(_LATEST))):
        with contextlib.suppress(ModelNotFound):
            return service.model(known)
    raise ApiError(404, f"model '{name}' not found", param="model", code="model_not_found")


def _copies(activity: Activity) -> dict[ModelName, int]:
    """On how many instances a model's weights are, or on their way there, if on any."""
    counted = {
        model.model: sum(place in _LOADED for place in model.residency.values())
        for model in activity.models
    }
    return {model: copies for model, copies in counted.items() if copies}


def _tag(card: ModelCard) -> dict[str, object]:
    tagged = card.id if ":" in card.id.rpartition("/")[2] else card.id + _LATEST
    # Ollama's identifies the files of a model; ours changes when they do.
    identity = f"{card.id} {card.created} {card.weight_bytes}"
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _modified(card),
        "size": card.weight_bytes,
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        "details": _details(card),
    }


def _details(card: ModelCard) -> dict[str, object]:
    family = _family(card)
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": _LEVELS.get(card.dtype, card.dtype),
    }


def _capabilities(card: ModelCard) -> list[str]:
    found = {"tools": card.tool_parser, "thinking": card.reasoning_parser}
    parsed = (name for name, parser in found.items() if parser is not None)
    return [*_CAPABILITIES[card.purpose.task], *parsed]


def _family(card: ModelCard) -> str:
    """``LlamaForCausalLM`` is of the family ``llama``."""
    return card.architecture.partition("For")[0].lower()


def _modified(card: ModelCard) -> str:
    return timestamp(datetime.fromtimestamp(card.created, UTC))
