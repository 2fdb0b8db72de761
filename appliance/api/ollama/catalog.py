"""Ollama's endpoints that tell of models, and those that it has and the appliance has not.

Text and vectors are made in front ends (`appliance.frontend.ollama`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from litestar import Request, post, route
from litestar.enums import HttpMethod
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from appliance.api.ollama.files import Checkpoint, read_checkpoint
from appliance.api.ollama.pull import ollama_pull_routes
from appliance.http.bodies import parse
from appliance.http.errors import ApiError, BadRequest
from appliance.http.json import json_answer
from appliance.service.interface import Activity, ModelCard, ModelFacts, ModelNotFound, Service
from appliance.service.settings import Settings
from appliance.vocabulary import ModelName, Task

OLLAMA_VERSION: Final = "0.14.0"
"""The version of Ollama whose API this is. Clients refuse to talk to older ones than they know;
the appliance's own is at ``/version``."""

_LATEST: Final = ":latest"
"""The tag that a name without one means."""

_FOREVER: Final = timedelta(microseconds=(2**63 - 1) // 1000)
"""The longest duration that Ollama knows; how it tells of a model that is not unloaded."""

_LOADED: Final = frozenset({"loading", "loaded"})
"""Residencies on the device."""

_LEVELS: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Ollama's words for the types that weights are computed in."""

_CAPABILITIES: Final = {
    Task.GENERATE: ["completion"],
    Task.EMBED: ["embedding"],
    Task.SCORE: [],
    Task.TRANSCRIPTION: [],
}
"""Ollama's words; it has none for scores and transcriptions."""

_GET_OR_HEAD: Final = [HttpMethod.GET, HttpMethod.HEAD]

_KEPT: Final = "models are catalogued in the appliance's configuration"
_REFUSED: Final = ("/api/push", "/api/create", "/api/copy", "/api/blobs/{digest:str}")
"""What Ollama has and the appliance has not."""


class OllamaShow(msgspec.Struct, kw_only=True):
    """``POST /api/show``; `name` is the old name of `model`."""

    model: str | None = None
    name: str | None = None


def ollama_catalogue_routes(service: Service, settings: Settings | None) -> list[HTTPRouteHandler]:
    """All of Ollama's endpoints that the core answers. Without `settings` the catalogue is fixed:
    nothing is fetched or deleted."""

    @route("/", http_method=_GET_OR_HEAD, operation_id="ollamaHeartbeat")
    async def heartbeat() -> ASGIResponse:
        # What Ollama's clients look for before they ask anything.
        return ASGIResponse(body=b"Ollama is running", media_type="text/plain")

    @route("/api/version", http_method=_GET_OR_HEAD, operation_id="ollamaVersion")
    async def version() -> ASGIResponse:
        return json_answer({"version": OLLAMA_VERSION})

    @route("/api/tags", http_method=_GET_OR_HEAD, operation_id="ollamaTags")
    async def tags() -> ASGIResponse:
        facts = _facts(service.activity())
        return json_answer(
            {"models": [_tag(card, facts.get(card.model)) for card in service.models()]}
        )

    @route("/api/ps", http_method=[HttpMethod.GET], operation_id="ollamaPs")
    async def ps() -> ASGIResponse:
        activity = service.activity()
        copies, facts = _copies(activity), _facts(activity)
        expires = timestamp(datetime.now(UTC) + _FOREVER)
        return json_answer(
            {
                "models": [
                    _tag(card, facts.get(card.model))
                    | {
                        "size": copies[card.model] * card.weight_bytes,
                        "size_vram": copies[card.model] * card.weight_bytes,
                        "expires_at": expires,
                        "context_length": card.max_context_tokens,
                    }
                    for card in service.models()
                    if card.model in copies and not card.root
                ]
            }
        )

    @post("/api/show", status_code=200, operation_id="ollamaShow")
    async def show(request: Request[Any, Any, Any]) -> ASGIResponse:
        asked = parse(await request.body(), OllamaShow)
        name = asked.model or asked.name
        if not name:
            raise BadRequest("model: a value is required", "model", "missing_field")
        card = _find(service, name)
        facts = service.model_activity(card.model).facts
        path = None if facts is None else facts.path
        files = await asyncio.to_thread(read_checkpoint, path) if path else Checkpoint()
        return json_answer(_shown(card, facts, files))

    return [
        *(heartbeat, version, tags, ps, show),
        *ollama_pull_routes(service, settings),
        *([_refusal("/api/delete")] if settings is None else []),
        *(_refusal(path) for path in _REFUSED),
    ]


def _refusal(path: str) -> HTTPRouteHandler:
    methods = [HttpMethod.GET, HttpMethod.HEAD, HttpMethod.POST, HttpMethod.DELETE]

    @route(path, http_method=methods, include_in_schema=False)
    async def refuse() -> ASGIResponse:
        raise ApiError(404, f"{path.partition('/{')[0]} is not supported: {_KEPT}")

    return refuse


def _find(service: Service, name: str) -> ModelCard:
    """The model of this name, or of what it is without the tag that Ollama adds to every name."""
    for known in dict.fromkeys((name, name.removesuffix(_LATEST))):
        with contextlib.suppress(ModelNotFound):
            card = service.model(known)
            if known == name or not card.base:  # a name with an adapter is exact
                return card
    raise ApiError(404, f"model '{name}' not found", param="model", code="model_not_found")


def _copies(activity: Activity) -> dict[ModelName, int]:
    """On how many instances a model's weights are, or on their way there, if on any."""
    counted = {
        model.model: sum(place in _LOADED for place in model.residency.values())
        for model in activity.models
    }
    return {model: copies for model, copies in counted.items() if copies}


def _facts(activity: Activity) -> dict[ModelName, ModelFacts]:
    return {model.model: model.facts for model in activity.models if model.facts is not None}


def _tag(card: ModelCard, facts: ModelFacts | None) -> dict[str, object]:
    tagged = card.id if ":" in card.id.rpartition("/")[2] else card.id + _LATEST
    # Ollama's identifies the files of a model; ours changes when they do.
    identity = f"{card.id} {card.created} {card.weight_bytes}"
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _modified(card),
        "size": card.weight_bytes,
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        "details": _details(card, facts),
    }


def _shown(card: ModelCard, facts: ModelFacts | None, files: Checkpoint) -> dict[str, object]:
    family = _family(card)
    parameters = "\n".join(f"{name:<30} {value}" for name, value in files.sampling.items())
    return {
        "modelfile": _modelfile(card, files),
        "parameters": parameters,
        "template": files.template,
        "details": _details(card, facts),
        "model_info": {
            "general.architecture": family,
            "general.basename": card.id.rpartition("/")[2].partition(":")[0],
            **({} if facts is None else {"general.parameter_count": facts.parameters}),
            f"{family}.context_length": card.max_context_tokens,
            **{f"{family}.{name}": value for name, value in files.shape.items()},
        },
        "capabilities": _capabilities(card),
        "modified_at": _modified(card),
    }


def _modelfile(card: ModelCard, files: Checkpoint) -> str:
    """What would make this model in Ollama's words. Files are the operator's: no path is shown."""
    lines = [f"FROM {card.id}"]
    if files.template:
        lines.append(f'TEMPLATE """{files.template}"""')
    lines += [f"PARAMETER {name} {value}" for name, value in files.sampling.items()]
    return "\n".join(lines) + "\n"


def _details(card: ModelCard, facts: ModelFacts | None) -> dict[str, object]:
    family = _family(card)
    return {
        "parent_model": card.base or card.root,
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "" if facts is None else _number(facts.parameters),
        "quantization_level": _LEVELS.get(card.dtype, card.dtype),
    }


def _number(count: int) -> str:
    """``7.6B``, as Ollama writes how many parameters a model has."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f}".removesuffix(".0") + unit
    return str(count)


def _capabilities(card: ModelCard) -> list[str]:
    found = {"tools": card.tool_parser, "thinking": card.reasoning_parser}
    parsed = (name for name, parser in found.items() if parser is not None)
    vision = ["vision"] if card.images else []
    return [*_CAPABILITIES[card.task], *vision, *parsed]


def _family(card: ModelCard) -> str:
    """``LlamaForCausalLM`` is of the family ``llama``."""
    return card.architecture.partition("For")[0].lower()


def _modified(card: ModelCard) -> str:
    return timestamp(datetime.fromtimestamp(card.created, UTC))


def timestamp(moment: datetime) -> str:
    """RFC 3339 in UTC, as Ollama writes it."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
