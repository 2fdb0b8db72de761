"""The endpoints of an admin who adds models to the catalogue, and removes them, for good."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from litestar import Request, delete, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, FromQuery
from litestar.response.base import ASGIResponse

from appliance.access.auth import current
from appliance.api.admin.config import SloChange
from appliance.http.bodies import parse
from appliance.http.errors import BadRequest
from appliance.http.json import json_answer
from appliance.service.interface import ModelNotFound, Watch
from appliance.service.settings import Settings

ADAPTERS: Final = "/adapters/"
"""Between the names of a model and one of its adapters, in the path of what is deleted."""

_Unset = msgspec.UnsetType
_Count = Annotated[int, msgspec.Meta(ge=1)]


class NewAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """A table ``[[model.adapter]]``; the body of ``POST /api/models/NAME/adapters``."""

    name: str
    path: str


class NewModel(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The body of ``POST /api/models``: a table ``[[model]]``. Paths are the daemon's."""

    name: str
    path: str
    aliases: list[str] | _Unset = msgspec.UNSET
    max_context: _Count | Literal["auto"] | _Unset = msgspec.UNSET
    """As long as the model reads, or as has room, if it is left out or "auto"."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | _Unset = msgspec.UNSET
    slo: SloChange | _Unset = msgspec.UNSET
    batch_slo: SloChange | _Unset = msgspec.UNSET
    max_batch: _Count | Literal["auto"] | _Unset = msgspec.UNSET
    max_sequences: _Count | _Unset = msgspec.UNSET
    tool_parser: str | _Unset = msgspec.UNSET
    reasoning_parser: str | _Unset = msgspec.UNSET
    max_logprobs: int | _Unset = msgspec.UNSET
    return_tokens_as_token_ids: bool | _Unset = msgspec.UNSET
    adapter: list[NewAdapter] | _Unset = msgspec.UNSET
    max_loras: int | _Unset = msgspec.UNSET
    max_lora_rank: int | _Unset = msgspec.UNSET
    pooler_config: dict[str, str | int | float | bool] | _Unset = msgspec.UNSET
    embedding_task: str | _Unset = msgspec.UNSET
    speculate: dict[str, str | int] | _Unset = msgspec.UNSET
    task: str | _Unset = msgspec.UNSET
    images: int | _Unset = msgspec.UNSET
    sounds: int | _Unset = msgspec.UNSET
    groups: list[str] | _Unset = msgspec.UNSET
    """Groups of instances that may serve it; all of them if it is left out."""
    instances: list[int] | _Unset = msgspec.UNSET
    """Numbers of those instances, in place of `groups`."""
    load: bool | _Unset = msgspec.UNSET
    max_queue: _Count | _Unset = msgspec.UNSET
    pin: bool | _Unset = msgspec.UNSET
    verify: bool | _Unset = msgspec.UNSET


def catalogue_routes(service: Watch, settings: Settings) -> list[HTTPRouteHandler]:
    """A model is added when it is answered; it may be some time until one is gone."""

    @post("/api/models", status_code=200, operation_id="addModel")
    async def add(request: Request[Any, Any, Any]) -> ASGIResponse:
        model = parse(await request.body(), NewModel)
        if not current.get().allows(model.name):
            raise ModelNotFound(model.name)  # a key of other models would not know it
        name = await settings.add_model(msgspec.to_builtins(model))
        return json_answer(service.model_activity(name))

    @delete("/api/models/{name:path}", status_code=200, operation_id="removeModel")
    async def remove(
        name: FromPath[str], force: FromQuery[bool] = False, files: FromQuery[bool] = False
    ) -> ASGIResponse:
        name = name.removeprefix("/")
        base, _, adapter = name.rpartition(ADAPTERS)
        if base and not _is_model(name):
            if files:
                raise BadRequest(
                    "files of adapters are not deleted: leave files out, and delete them yourself",
                    "files",
                )
            service.model_activity(base)  # the key may not know it
            return json_answer(await settings.remove_adapter(base, adapter, force=force))
        service.model_activity(name)
        return json_answer(await settings.remove_model(name, force=force, files=files))

    def _is_model(name: str) -> bool:
        """Names of models may have slashes, and say anything between them."""
        return any(model.model == name for model in service.activity().models)

    return [add, remove]
