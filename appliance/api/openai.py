"""OpenAI's endpoints, and the ones operators and probes ask."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from litestar import Request, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

import appliance
from appliance.api.choices import Choices
from appliance.api.jsonanswers import json_answer
from appliance.api.plan import Plan, plan_chat, plan_completion
from appliance.api.replies import ChatDialect, CompletionDialect, Dialect
from appliance.api.schemas import ChatRequest, CompletionRequest, decode
from appliance.api.service import ModelCard, Service
from appliance.api.stream import answer


def generation_routes(service: Service, keep_alive_seconds: float) -> list[HTTPRouteHandler]:
    """The endpoints that generate text."""

    @post("/v1/chat/completions", status_code=200, operation_id="createChatCompletion")
    async def chat(request: Request[Any, Any, Any]) -> ASGIResponse:
        return await generate(request, *await prepare_chat(await request.body(), service))

    @post("/v1/completions", status_code=200, operation_id="createCompletion")
    async def completion(request: Request[Any, Any, Any]) -> ASGIResponse:
        return await generate(request, *await prepare_completion(await request.body(), service))

    async def generate(
        request: Request[Any, Any, Any], plan: Plan, dialect: Dialect
    ) -> ASGIResponse:
        choices = Choices.submit(plan, service)
        return await answer(
            request.receive,
            choices,
            dialect,
            stream=plan.stream,
            keep_alive_seconds=keep_alive_seconds,
        )

    return [chat, completion]


async def prepare_chat(body: bytes, service: Service) -> tuple[Plan, Dialect]:
    """What the body of a chat asks for, and how it is answered. Raises what `plan_chat` raises."""
    asked = decode(body, ChatRequest)
    completion_id = f"chatcmpl-{uuid.uuid4().hex}"
    plan = await plan_chat(asked, service, completion_id)
    return plan, ChatDialect(completion_id, int(time.time()), plan.model, plan.include_usage)


async def prepare_completion(body: bytes, service: Service) -> tuple[Plan, Dialect]:
    """The same for a plain completion. Raises what `plan_completion` raises."""
    asked = decode(body, CompletionRequest)
    completion_id = f"cmpl-{uuid.uuid4().hex}"
    plan = await plan_completion(asked, service, completion_id)
    return plan, CompletionDialect(completion_id, int(time.time()), plan.model, plan.include_usage)


def model_routes(service: Service) -> list[HTTPRouteHandler]:
    """The endpoints that list models."""

    @get("/v1/models", operation_id="listModels")
    async def models() -> ASGIResponse:
        return json_answer(_ModelList(data=[_model(card) for card in service.models()]))

    @get("/v1/models/{name:path}", operation_id="retrieveModel")
    async def model(name: FromPath[str]) -> ASGIResponse:
        return json_answer(_model(service.model(name.removeprefix("/"))))

    return [models, model]


def operator_routes(service: Service) -> list[HTTPRouteHandler]:
    """Probes, metrics and status, and what `appliance doctor` asks."""

    @get("/livez", operation_id="live")
    async def live() -> ASGIResponse:
        return json_answer({"status": "ok"})

    @get("/health", operation_id="health")
    async def health() -> ASGIResponse:
        degraded = service.readiness().degraded
        return json_answer({"status": "degraded" if degraded else "ok", "reasons": degraded})

    @get("/readyz", operation_id="ready")
    async def ready() -> ASGIResponse:
        readiness = service.readiness()
        return json_answer(readiness, 200 if readiness.ok else 503)

    @get("/version", operation_id="version")
    async def version() -> ASGIResponse:
        return json_answer({"version": appliance.__version__})

    @get("/metrics", operation_id="metrics")
    async def metrics() -> ASGIResponse:
        return ASGIResponse(body=service.metrics(), media_type="text/plain; version=0.0.4")

    @get("/api/status", operation_id="status")
    async def status() -> ASGIResponse:
        return json_answer(service.activity())

    @post("/api/verify", status_code=200, operation_id="verify")
    async def verify() -> ASGIResponse:
        return json_answer({"instances": await service.verify()})

    return [live, health, ready, version, metrics, status, verify]


class _Model(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str
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
        max_model_len=card.max_context_tokens,
        state=card.state,
        task=card.purpose.task.value,
    )
