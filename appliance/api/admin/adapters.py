"""vLLM's endpoints that load a LoRA adapter while its base serves, and unload it: its bodies, and
its statuses and messages where vLLM has some. They change what is served for good, so a key needs
the scope `admin`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from appliance.checkpoints.adapters import SEPARATOR
from appliance.http.bodies import parse
from appliance.http.errors import ApiError, BadRequest
from appliance.service.interface import ModelExists, Watch
from appliance.service.settings import Settings


class LoadAdapter(msgspec.Struct, kw_only=True):
    """The body of ``POST /v1/load_lora_adapter``. `base_model_name` is needed where several models
    have room for adapters, unless `lora_name` is ``MODEL:ADAPTER``."""

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    base_model_name: str | None = None


class UnloadAdapter(msgspec.Struct, kw_only=True):
    """The body of ``POST /v1/unload_lora_adapter``. vLLM looks at the name alone, too."""

    lora_name: str = ""
    lora_int_id: int | None = None
    base_model_name: str | None = None


def adapter_routes(service: Watch, settings: Settings) -> list[HTTPRouteHandler]:
    """What one endpoint has loaded, `POST /api/models/NAME/adapters` could have, too."""

    @post("/v1/load_lora_adapter", status_code=200, operation_id="loadLoraAdapter")
    async def load(request: Request[Any, Any, Any]) -> ASGIResponse:
        asked = parse(await request.body(), LoadAdapter)
        if not asked.lora_name or not asked.lora_path:
            raise BadRequest("Both 'lora_name' and 'lora_path' must be provided.", "lora_name")
        if asked.is_3d_lora_weight:
            raise BadRequest("is_3d_lora_weight: such adapters are not served", "is_3d_lora_weight")
        if asked.lora_name in _bases(service):
            raise BadRequest(
                f"The lora adapter '{asked.lora_name}' conflicts with a served base model.",
                "lora_name",
            )
        base, name = _named(service, asked.lora_name, asked.base_model_name)
        path = Path(asked.lora_path)
        if path.is_absolute() and not await asyncio.to_thread(path.is_dir):
            raise ApiError(
                404,
                f"Loading lora {asked.lora_name} failed: No adapter found for {asked.lora_path}",
                param="lora_path",
            )
        try:
            await settings.add_adapter(base, name, asked.lora_path, replace=asked.load_inplace)
        except ModelExists as error:
            if asked.load_inplace:
                raise
            raise BadRequest(
                f"The lora adapter '{asked.lora_name}' has already been loaded. If you want to "
                "load the adapter in place, set 'load_inplace' to True.",
                "lora_name",
            ) from error
        return _said(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    @post("/v1/unload_lora_adapter", status_code=200, operation_id="unloadLoraAdapter")
    async def unload(request: Request[Any, Any, Any]) -> ASGIResponse:
        asked = parse(await request.body(), UnloadAdapter)
        if not asked.lora_name:
            raise BadRequest(
                "'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name"
            )
        base, name = _loaded(service, asked.lora_name, asked.base_model_name)
        await settings.remove_adapter(base, name, force=False)
        return _said(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    return [load, unload]


def _bases(service: Watch) -> dict[str, tuple[str, ...]]:
    """The models that may be asked for, with what they are called with each of their adapters."""
    return {
        model.model: model.facts.adapters
        for model in service.activity().models
        if model.facts is not None
    }


def _named(service: Watch, name: str, base: str | None) -> tuple[str, str]:
    """The model that an adapter is to be loaded for, and the adapter's own name."""
    bases = _bases(service)
    of, colon, own = name.rpartition(SEPARATOR)
    if colon and of in bases and base in (None, of):
        return of, own
    if base is not None:
        return base, name
    roomy = [
        model.model
        for model in service.activity().models
        if model.facts is not None and model.facts.max_lora_rank
    ]
    if len(roomy) == 1:
        return roomy[0], name
    if roomy:
        models = ", ".join(roomy)
        message = f"several models have room for adapters ({models}): name one in base_model_name"
    else:
        message = "no model has room for adapters: set max_loras of one, and restart"
    raise BadRequest(message, "base_model_name")


def _loaded(service: Watch, name: str, base: str | None) -> tuple[str, str]:
    """The model and the own name of an adapter that is there."""
    bases = _bases(service)
    found = [
        (model, full.removeprefix(f"{model}{SEPARATOR}"))
        for model, adapters in bases.items()
        for full in adapters
        if base in (None, model) and name in (full, full.removeprefix(f"{model}{SEPARATOR}"))
    ]
    if not found:
        raise ApiError(
            404,
            f"The lora adapter '{name}' cannot be found.",
            param="lora_name",
            code="model_not_found",
        )
    if len(found) > 1:
        models = ", ".join(model for model, _ in found)
        raise BadRequest(
            f"several models have an adapter '{name}' ({models}): name one in base_model_name",
            "base_model_name",
        )
    return found[0]


def _said(text: str) -> ASGIResponse:
    return ASGIResponse(body=text.encode(), media_type="text/plain")
