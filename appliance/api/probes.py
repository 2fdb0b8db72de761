"""The endpoints that probes, scrapers and operators ask: health, metrics and status."""

from __future__ import annotations

from litestar import get, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

import appliance
from appliance.http.json import json_answer
from appliance.service.interface import Service


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

    @get("/api/load", operation_id="load")
    async def load() -> ASGIResponse:
        return json_answer(service.load(), headers={"Cache-Control": "no-store"})

    @get("/api/status", operation_id="status")
    async def status() -> ASGIResponse:
        return json_answer(service.activity())

    @post("/api/verify", status_code=200, operation_id="verify")
    async def verify() -> ASGIResponse:
        return json_answer({"instances": await service.verify()})

    return [live, health, ready, version, metrics, load, status, verify]
