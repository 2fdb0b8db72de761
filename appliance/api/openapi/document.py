"""The OpenAPI document, made of the API's words (`msgspec` structs)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from http import HTTPStatus
from typing import Any, Final

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

import appliance
from appliance.access.keys import NewKey
from appliance.access.organizations import Limits
from appliance.api.admin.adapters import LoadAdapter, UnloadAdapter
from appliance.api.admin.catalog import NewAdapter, NewModel
from appliance.api.admin.config import LogLevel, ModelLimits
from appliance.api.admin.instances import QuarantineReason
from appliance.api.admin.keys import Keys, MadeKey, RevokedKey, ShownKey
from appliance.api.admin.model_files import ModelFiles
from appliance.api.admin.organizations import (
    KeyOrganization,
    Organizations,
    RemovedOrganization,
    ShownOrganization,
)
from appliance.api.admin.usage import FORMATS, Usage
from appliance.api.admin.watch import EVERY_SECONDS, LEAST_SECONDS, MOST_SECONDS
from appliance.api.openapi import endpoints as inference
from appliance.api.openapi.examples import EXAMPLES
from appliance.http.errors import ErrorBody
from appliance.http.json import json_answer
from appliance.service.front_frames import BodyActivity
from appliance.service.interface import (
    Activity,
    InstanceActivity,
    InstanceVerification,
    Load,
    ModelActivity,
    RequestActivity,
    Snapshot,
    SpanPage,
)
from appliance.service.policy_overview import PolicyReport
from appliance.service.policy_report import PolicyChoice
from appliance.service.settings import ConfigCheck, ConfigInForce, ConfigReload, Removal
from appliance.usage.report import DIMENSIONS
from appliance.vocabulary import SlabMap

REFERENCE: Final = "#/components/schemas/{name}"
CANNOT_BE_READ: Final = 400
CANNOT_BE_USED: Final = 422

_EVENTS: Final = {
    "description": "Events, each with an id, until the client leaves or the appliance ends.",
    "content": {"text/event-stream": {"schema": {"description": "Text, as it comes."}}},
}
_LINE: Final = {
    "description": "Done.",
    "content": {"text/plain": {"schema": {"type": "string"}}},
}
_FILE: Final = {
    "description": "Bytes of the file.",
    "content": {"application/octet-stream": {"schema": {"description": "Bytes, as they come."}}},
}
_RANGE: Final = {
    "Range": {
        "type": "string",
        "pattern": "^bytes=[0-9]{1,18}-([0-9]{1,18})?$",
        "description": "One part of the file; what is no such part means all of it.",
    }
}
_LAST_EVENT: Final = {
    "Last-Event-ID": {
        "type": "string",
        "pattern": "^[0-9]{1,19}$",
        "description": "The newest event that was seen: those after it follow.",
    }
}
_KEYS: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""How a key is presented, to an appliance that has keys."""


class Requests(msgspec.Struct, kw_only=True):
    """All live requests, the oldest first."""

    requests: list[RequestActivity]
    bodies: list[BodyActivity]


class Cancelled(msgspec.Struct, kw_only=True):
    """The request as it was when it was cancelled."""

    cancelled: RequestActivity


class Models(msgspec.Struct, kw_only=True):
    """All models, in the order of the catalogue."""

    models: list[ModelActivity]


class Instances(msgspec.Struct, kw_only=True):
    """All instances."""

    instances: list[InstanceActivity]


class Verifications(msgspec.Struct, kw_only=True):
    """Whether weights on devices are those of their master images."""

    instances: list[InstanceVerification]


class Document(msgspec.Struct, kw_only=True):
    """This document."""

    openapi: str
    info: dict[str, str]
    paths: dict[str, object]
    security: list[dict[str, list[str]]]
    components: dict[str, object]


@dataclass(frozen=True)
class Operation:
    """What can be asked: `answer` is what a success says, None if that is a stream of server-sent
    events; `refusals` are its other statuses."""

    method: str
    path: str
    about: str
    answer: type | None
    body: type | None = None
    refusals: tuple[int, ...] = ()
    success: int = 200
    """What a success is answered with."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Flags in the query, and what each means."""
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """What else the query may say, and the schema of each."""
    headers: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Headers of the request that mean something, and the schema of each."""
    text: bool = False
    """Whether a success is a line of text."""
    file: bool = False
    """Whether a success is a file, or a part of it (206)."""


def _unix_seconds(about: str) -> dict[str, Any]:
    """The schema of a time."""
    return {"type": "number", "minimum": 0, "description": f"{about} Unix seconds."}


OPERATIONS: Final = (
    Operation("get", "/api/status", "What instances and models do now.", Activity),
    Operation("get", "/api/load", "What a router asks each second.", Load),
    Operation("get", "/api/snapshot", "Everything at one time.", Snapshot),
    Operation("get", "/api/requests", "List the live requests.", Requests),
    Operation(
        "get", "/api/requests/{name}", "One request, and why it waits.", RequestActivity,
        refusals=(404,),
    ),
    Operation("delete", "/api/requests/{name}", "End a request.", Cancelled, refusals=(404,)),
    Operation("get", "/api/instances", "List the instances.", Instances),
    Operation("get", "/api/instances/{name}", "One instance.", InstanceActivity, refusals=(404,)),
    Operation(
        "post", "/api/instances/{name}/quarantine", "Take it out of service.", InstanceActivity,
        QuarantineReason, (CANNOT_BE_READ, 404),
    ),
    Operation(
        "post", "/api/instances/{name}/release", "Have it serve again.", InstanceActivity,
        refusals=(404,),
    ),
    Operation(
        "get", "/api/instances/{name}/slabs", "Which slab of its pool is whose.", SlabMap,
        refusals=(404, 503),
    ),
    Operation("get", "/api/host/slabs", "Which slab of the host cache is whose.", SlabMap),
    Operation("get", "/api/models", "List the models.", Models),
    Operation("get", "/api/models/{name}", "One model.", ModelActivity, refusals=(404,)),
    Operation(
        "get", "/api/models/{name}/files", "List a model's files, for other boxes.", ModelFiles,
        refusals=(404, 409),
    ),
    Operation(
        "get", "/api/models/{name}/files/{path}", "A file of a model, or a part of it.", None,
        refusals=(404, 409, 416, 503), headers=_RANGE, file=True,
    ),
    Operation(
        "post", "/api/models", "Add a model.", ModelActivity, NewModel,
        (CANNOT_BE_READ, 409, CANNOT_BE_USED),
    ),
    Operation(
        "delete", "/api/models/{name}", "Remove a model.", Removal,
        refusals=(CANNOT_BE_READ, 404, 409, CANNOT_BE_USED),
        options={
            "force": "End its requests, rather than wait for them.",
            "files": "Delete its files, if they lie in the folder of models.",
        },
    ),
    Operation(
        "post", "/api/models/{name}/adapters", "Add a LoRA adapter to a model.", ModelActivity,
        NewAdapter, (CANNOT_BE_READ, 404, 409, CANNOT_BE_USED),
    ),
    Operation(
        "delete", "/api/models/{name}/adapters/{adapter}", "Remove a LoRA adapter.", Removal,
        refusals=(CANNOT_BE_READ, 404, 409, CANNOT_BE_USED),
        options={"force": "End its requests, rather than wait for them."},
    ),
    Operation(
        "post", "/api/models/{name}/load", "Bring its weights to a device.", ModelActivity,
        refusals=(404, 409),
    ),
    Operation(
        "post", "/api/models/{name}/evict", "Have it leave its devices.", ModelActivity,
        refusals=(404,),
    ),
    Operation(
        "post", "/api/models/{name}/drain", "Refuse new requests for it.", ModelActivity,
        refusals=(404,),
    ),
    Operation(
        "post", "/api/models/{name}/resume", "Take requests for it again.", ModelActivity,
        refusals=(404,),
    ),
    Operation(
        "post", "/api/models/{name}/pin", "Keep its weights in the host cache.", ModelActivity,
        refusals=(404, 409, CANNOT_BE_USED),
    ),
    Operation(
        "post", "/api/models/{name}/unpin", "Let its weights leave the host cache.", ModelActivity,
        refusals=(404, 409, CANNOT_BE_USED),
    ),
    Operation(
        "put", "/api/models/{name}/limits", "Set its SLO targets and its queue.", ModelActivity,
        ModelLimits, (CANNOT_BE_READ, 404, 409, CANNOT_BE_USED),
    ),
    Operation("get", "/api/keys", "List the API keys.", Keys, refusals=(404,)),
    Operation("get", "/api/keys/{name}", "One API key.", ShownKey, refusals=(404,)),
    Operation(
        "post", "/api/keys", "Make an API key.", MadeKey, NewKey,
        (CANNOT_BE_READ, 404, 409, CANNOT_BE_USED), success=201,
    ),
    Operation(
        "delete", "/api/keys/{name}", "Revoke an API key.", RevokedKey, refusals=(404, 409),
    ),
    Operation(
        "put", "/api/keys/{name}/organization", "Have a key belong to an organization, or to none.",
        ShownKey, KeyOrganization, (CANNOT_BE_READ, 404, 409),
    ),
    Operation(
        "get", "/api/organizations", "List the organizations.", Organizations, refusals=(404,),
    ),
    Operation(
        "get", "/api/organizations/{name}", "One organization.", ShownOrganization,
        refusals=(404,),
    ),
    Operation(
        "put", "/api/organizations/{name}", "Give an organization its limits; it may be new.",
        ShownOrganization, Limits, (CANNOT_BE_READ, 404, 409),
    ),
    Operation(
        "delete", "/api/organizations/{name}", "Remove an organization without keys.",
        RemovedOrganization, refusals=(404, 409),
    ),
    Operation(
        "get", "/api/usage", "What keys used of which models.", Usage,
        refusals=(CANNOT_BE_READ, 404),
        query={
            "by": {
                "type": "string",
                "default": "key,model",
                "description": f"What to add up by, with commas: {', '.join(DIMENSIONS)}.",
            },
            "since": {"type": "string", "description": "First day (UTC): 2026-11-01, or 30d."},
            "until": {"type": "string", "description": "Last day, likewise."},
            "format": {"type": "string", "enum": list(FORMATS), "default": "json"},
        },
    ),
    Operation("get", "/api/policies", "Who decides, and who could.", PolicyReport),
    Operation(
        "put", "/api/policies", "Have other policies decide.", PolicyReport, PolicyChoice,
        (CANNOT_BE_READ, CANNOT_BE_USED),
    ),
    Operation(
        "post", "/api/policies/rollback", "Go back to the policies before.", PolicyReport,
        refusals=(409, CANNOT_BE_USED),
    ),
    Operation(
        "post", "/api/policies/{name}/enable", "Have a policy asked again.", PolicyReport,
        refusals=(404,),
    ),
    Operation("get", "/api/config", "The configuration in force.", ConfigInForce),
    Operation("post", "/api/config/check", "Compare it with the files.", ConfigCheck),
    Operation(
        "post", "/api/config/reload", "Apply what the files say.", ConfigReload,
        refusals=(CANNOT_BE_USED,),
    ),
    Operation("get", "/api/log-level", "How much is logged.", LogLevel),
    Operation(
        "put", "/api/log-level", "Log more, or less.", LogLevel, LogLevel, (CANNOT_BE_READ,)
    ),
    Operation("post", "/api/verify", "Compare weights with their images.", Verifications),
    Operation(
        "get", "/api/events", "Everything at one time, and what happens from then on.", None,
        headers=_LAST_EVENT,
    ),
    Operation(
        "get", "/api/timeline", "What instances computed and moved in the last half hour.",
        SpanPage,
        query={
            "since": _unix_seconds("What was over before is left out."),
            "until": _unix_seconds("What began after that is left out."),
            "before": {"type": "integer", "minimum": 0, "description": "As the last page has it."},
        },
        refusals=(CANNOT_BE_READ,),
    ),
    Operation(
        "get", "/api/watch", "The state, then what changes of it, and what happens.", None,
        query={
            "every": {
                "type": "number",
                "minimum": LEAST_SECONDS,
                "maximum": MOST_SECONDS,
                "default": EVERY_SECONDS,
                "description": "Seconds between two changes, at least.",
            }
        },
        headers=_LAST_EVENT,
    ),
    Operation(
        "post", "/v1/load_lora_adapter", "Add a LoRA adapter to a model, as vLLM does.", None,
        LoadAdapter, (CANNOT_BE_READ, 404, 409, CANNOT_BE_USED), text=True,
    ),
    Operation(
        "post", "/v1/unload_lora_adapter", "Remove a LoRA adapter, as vLLM does.", None,
        UnloadAdapter, (CANNOT_BE_READ, 404, 409, CANNOT_BE_USED), text=True,
    ),
    Operation("get", "/api/openapi.json", "This document.", Document),
    Operation("get", "/openapi.json", "This document, where vLLM has its own.", Document),
)  # fmt: skip
"""All that operators ask."""


@lru_cache
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    kinds: list[type] = [ErrorBody, *inference.kinds()]
    kinds += [kind for one in OPERATIONS for kind in (one.answer, one.body) if kind is not None]
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template=REFERENCE, schema_hook=_anything
    )
    schema_of = dict(zip(kinds, schemas, strict=True))
    front = inference.front_part()
    paths = {path: dict(item) for path, item in front.paths.items()}
    for path, item in inference.paths(schema_of).items():
        paths.setdefault(path, {}).update(item)
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method] = _operation(one, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "The appliance's API",
            "version": appliance.__version__,
            "description": "See docs/api.md, docs/admin.md and docs/policies.md.",
        },
        "paths": paths,
        "security": [{}, *({name: []} for name in _KEYS)],
        "components": {"schemas": front.schemas | components, "securitySchemes": _KEYS},
    }


def _operation(one: Operation, schema_of: dict[type, dict[str, Any]]) -> dict[str, Any]:
    verb = one.path.replace("/api/", "").replace("/{name}", "")
    verb = re.sub(r"\W", "_", verb)
    refusals = {*one.refusals, *inference.ANYWHERE}
    if one.body is not None:
        refusals.add(inference.BODY_STALLS)
    success = _EVENTS if one.answer is None else _json("Done.", schema_of[one.answer])
    if one.text or one.file:
        success = _LINE if one.text else _FILE
    described: dict[str, Any] = {
        "operationId": f"{one.method}_{verb}" + ("_one" if one.path.endswith("{name}") else ""),
        "summary": one.about,
        "responses": {
            str(one.success): success,
            **({"206": _FILE} if one.file else {}),
            **{
                str(status): _json(HTTPStatus(status).phrase, schema_of[ErrorBody])
                for status in sorted(refusals)
            },
        },
    }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", one.path)
    ]
    parameters += [
        {"name": name, "in": "query", "description": about, "schema": {"type": "boolean"}}
        for name, about in one.options.items()
    ]
    parameters += [
        {"name": name, "in": "query", "schema": schema} for name, schema in one.query.items()
    ]
    parameters += [
        {"name": name, "in": "header", "schema": schema} for name, schema in one.headers.items()
    ]
    if parameters:
        described["parameters"] = parameters
    if one.body is not None:
        sent = {"schema": schema_of[one.body], "example": EXAMPLES[one.method, one.path]}
        described["requestBody"] = {"required": True, "content": {"application/json": sent}}
    return described


def _json(about: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": about, "content": {"application/json": {"schema": schema}}}


def _anything(kind: type) -> dict[str, Any]:
    """Values of the configuration, and facts of events, may be anything."""
    if kind is not object:
        raise NotImplementedError
    return {"description": "Anything."}


def openapi_routes() -> list[HTTPRouteHandler]:
    """Where the document is."""

    @get(["/api/openapi.json", "/openapi.json"], operation_id="openapi")
    async def openapi() -> ASGIResponse:
        return json_answer(document())

    @get("/docs", operation_id="docs", include_in_schema=False)
    async def docs() -> ASGIResponse:
        return ASGIResponse(body=page(), media_type="text/html; charset=utf-8")

    return [openapi, docs]


@lru_cache
def page() -> bytes:
    """The endpoints as a page for people, which loads nothing."""
    rows = [
        f"<tr><td>{method.upper()}</td><td><code>{escape(path)}</code></td>"
        f"<td>{escape(operation['summary'])}</td></tr>"
        for path, item in sorted(document()["paths"].items())
        for method, operation in item.items()
    ]
    title = "The appliance's API"
    text = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<h1>{title}</h1><p>Their fields are in <a href="openapi.json">openapi.json</a>.</p>'
        f"<table>{''.join(rows)}</table></html>"
    )
    return text.encode()
