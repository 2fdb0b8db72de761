"""The endpoints that list models, for the clients of OpenAI and of Anthropic."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from litestar import Request, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from appliance.http.json import json_answer
from appliance.service.interface import Inference, ModelCard, ModelNotFound

LATEST: Final = ":latest"
"""Ollama's clients know every model by this tag, and some ask for it here."""


def model_routes(service: Inference) -> list[HTTPRouteHandler]:
    """A client of Anthropic's, which sends ``anthropic-version``, is answered in its words."""

    @get("/v1/models", operation_id="listModels")
    async def models(request: Request[Any, Any, Any]) -> ASGIResponse:
        cards = service.models()
        if _is_anthropic(request):
            return json_answer(_anthropic_list(cards))
        return json_answer(_ModelList(data=[_model(card) for card in cards]))

    @get("/v1/models/{name:path}", operation_id="retrieveModel")
    async def model(request: Request[Any, Any, Any], name: FromPath[str]) -> ASGIResponse:
        card = _find(service, name.removeprefix("/"))
        return json_answer(_anthropic(card) if _is_anthropic(request) else _model(card))

    return [models, model]


def _find(service: Inference, name: str) -> ModelCard:
    """Raises `ModelNotFound`, which names what was asked for."""
    try:
        return service.model(name)
    except ModelNotFound:
        if not name.endswith(LATEST):
            raise
    try:
        card = service.model(name.removesuffix(LATEST))
    except ModelNotFound:
        raise ModelNotFound(name) from None
    if card.base:  # a name with an adapter is exact
        raise ModelNotFound(name)
    return card


class _Model(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str
    root: str
    parent: str | None = None
    """The last two are vLLM's."""
    max_model_len: int
    """vLLM's name for it."""
    state: str
    task: str
    """What it is for: ``generate``, ``embed`` or ``score``."""


class _ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[_Model]


def _model(card: ModelCard) -> _Model:
    return _Model(
        id=card.id,
        created=card.created,
        owned_by=card.owned_by,
        root=card.named,
        parent=card.base or None,
        max_model_len=card.max_context_tokens,
        state=card.state,
        task=card.task.value,
    )


class _AnthropicModel(msgspec.Struct, kw_only=True):
    type: str = "model"
    id: str
    display_name: str
    created_at: str
    """RFC 3339."""


class _AnthropicList(msgspec.Struct, kw_only=True):
    data: list[_AnthropicModel]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


def _is_anthropic(request: Request[Any, Any, Any]) -> bool:
    return "anthropic-version" in request.headers


def _anthropic(card: ModelCard) -> _AnthropicModel:
    created = datetime.fromtimestamp(card.created, UTC)
    return _AnthropicModel(
        id=card.id, display_name=card.id, created_at=created.isoformat().replace("+00:00", "Z")
    )


def _anthropic_list(cards: list[ModelCard]) -> _AnthropicList:
    data = [_anthropic(card) for card in cards]
    return _AnthropicList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
    )
