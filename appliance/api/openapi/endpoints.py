"""What the OpenAPI document says of the endpoints that apps use, and of the probes.

Of those that the core answers (models, files, batches, stored responses) requests are the very
types that bodies are decoded into; of answers only the fields that are always there are described:
the dialects' own documentation has the others. What front ends answer is described by a file
of this package, which `appliance.frontend.openapi` writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from importlib import resources
from typing import Any, Final, Literal

import msgspec

from appliance.api.batch.files import MAX_FILES
from appliance.api.batch.message_routes import MAX_BATCHES as MAX_MESSAGE_BATCHES
from appliance.api.batch.message_routes import CustomId
from appliance.api.batch.routes import MAX_BATCHES, BatchRequest
from appliance.api.ollama.catalog import OllamaShow
from appliance.api.ollama.pull import OllamaDelete, OllamaPull
from appliance.api.openapi.examples import EXAMPLES
from appliance.http.errors import ErrorBody
from appliance.service.interface import Readiness

_LINES: Final = "application/x-ndjson"
_TEXT: Final = "text/plain"
ANYWHERE: Final = (400, 401, 403)
"""A header that cannot be read, no valid key, a key that does not allow it."""
BODY_STALLS: Final = 408
_READ: Final = (400, 404, 413, 429)


class BatchFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of ``POST /v1/files``; `file` is JSON by lines."""

    purpose: Literal["batch"]
    file: str


class MessageParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request of a message batch: what ``/v1/messages`` takes, but for `stream`."""

    custom_id: CustomId
    params: dict[str, Any]


class MessageBatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/messages/batches``."""

    requests: list[MessageParams]


class MessagesErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, in Anthropic's words."""

    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error answer of Anthropic's."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class OllamaError(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error answer of Ollama's."""

    error: str


@dataclass(frozen=True)
class Endpoint:
    """What an app can ask. `fields` are those of the JSON object that is the answer; `stream` is
    what comes instead of it if that is asked for, or always if there are no fields."""

    method: str
    path: str
    about: str
    fields: tuple[str, ...]
    body: type | None = None
    stream: str | None = None
    refusals: tuple[int, ...] = ()
    error: type = ErrorBody
    open: bool = False
    """Whether it needs no key."""
    form: bool = False
    """Whether the body is a form, not JSON."""
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """What the query may say, and the schema of each."""


ENDPOINTS: Final = (
    Endpoint(
        "post", "/v1/files", "Keep a file of requests.", ("id", "object", "bytes", "filename"),
        BatchFile, None, (400, 404, 413, 507), form=True,
    ),
    Endpoint(
        "get", "/v1/files", "List the files.", ("object", "data", "has_more"), refusals=(404,),
        query={
            "purpose": {"type": "string"},
            "order": {"enum": ["asc", "desc"]},
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_FILES},
            "after": {"type": "string"},
        },
    ),
    Endpoint("get", "/v1/files/{id}", "One file.", ("id", "object"), refusals=(404,)),
    Endpoint(
        "get", "/v1/files/{id}/content", "What is in a file.", (), stream="application/jsonl",
        refusals=(404,),
    ),
    Endpoint(
        "delete", "/v1/files/{id}", "Delete a file.", ("id", "deleted"), refusals=(404, 409, 507)
    ),
    Endpoint(
        "post", "/v1/batches", "Have a file of requests answered.",
        ("id", "object", "endpoint", "status"), BatchRequest, None, (400, 404, 413, 429, 507),
    ),
    Endpoint(
        "get", "/v1/batches", "List the batches.", ("object", "data", "has_more"), refusals=(404,),
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_BATCHES},
            "after": {"type": "string"},
        },
    ),
    Endpoint("get", "/v1/batches/{id}", "One batch.", ("id", "status"), refusals=(404,)),
    Endpoint(
        "post", "/v1/batches/{id}/cancel", "End a batch.", ("id", "status"),
        refusals=(404, 409, 507),
    ),
    Endpoint(
        "get", "/v1/responses/{id}", "A stored response.", ("id", "object", "status", "output"),
        stream="text/event-stream", refusals=(400, 404),
        query={
            "stream": {"anyOf": [{"type": "boolean"}, {"enum": [0, 1]}]},
            "starting_after": {"type": "integer", "minimum": 0},
        },
    ),
    Endpoint(
        "delete", "/v1/responses/{id}", "Delete a stored response.", ("id", "deleted"),
        refusals=(404,),
    ),
    Endpoint(
        "post", "/v1/responses/{id}/cancel", "End a response that is made in the background.",
        ("id", "object", "status"), refusals=(400, 404),
    ),
    Endpoint(
        "post", "/v1/messages/batches", "Have many messages answered.",
        ("id", "type", "processing_status"), MessageBatchRequest, None,
        (400, 404, 413, 429, 507), MessagesError,
    ),
    Endpoint(
        "get", "/v1/messages/batches", "List the message batches.", ("data", "has_more"),
        refusals=(404,), error=MessagesError,
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_MESSAGE_BATCHES},
            "after_id": {"type": "string"},
            "before_id": {"type": "string"},
        },
    ),
    Endpoint(
        "get", "/v1/messages/batches/{id}", "One message batch.", ("id", "processing_status"),
        refusals=(404,), error=MessagesError,
    ),
    Endpoint(
        "post", "/v1/messages/batches/{id}/cancel", "End a message batch.",
        ("id", "processing_status"), refusals=(404, 409, 507), error=MessagesError,
    ),
    Endpoint(
        "delete", "/v1/messages/batches/{id}", "Delete a message batch and its results.",
        ("id", "type"), refusals=(404, 409, 507), error=MessagesError,
    ),
    Endpoint(
        "get", "/v1/messages/batches/{id}/results", "What came of each message.", (),
        stream="application/x-jsonl", refusals=(404,), error=MessagesError,
    ),
    Endpoint("get", "/v1/models", "List the models.", ("object", "data")),
    Endpoint(
        "get", "/v1/models/{name}", "One model.", ("id", "object", "created"), refusals=(404,)
    ),
    Endpoint(
        "post", "/api/show", "One model.", ("details", "model_info", "capabilities"),
        OllamaShow, None, _READ, OllamaError,
    ),
    Endpoint(
        "post", "/api/pull", "Fetch a model and serve it; an operator's.", ("status",),
        OllamaPull, _LINES, (400, 404, 409, 413, 422), OllamaError,
    ),
    Endpoint(
        "delete", "/api/delete", "Remove a model; an operator's.", (),
        OllamaDelete, _TEXT, (400, 404, 409, 413, 422), OllamaError,
    ),
    Endpoint("get", "/", "What Ollama's clients look for.", (), stream=_TEXT, open=True),
    Endpoint("head", "/", "What Ollama's clients look for.", (), open=True),
    Endpoint("get", "/api/tags", "List the models.", ("models",), error=OllamaError),
    Endpoint("head", "/api/tags", "Whether models can be listed.", ()),
    Endpoint("get", "/api/ps", "List the models on devices.", ("models",), error=OllamaError),
    Endpoint("get", "/api/version", "Which version this is.", ("version",), open=True),
    Endpoint("head", "/api/version", "Whether this is it.", (), open=True),
    Endpoint("get", "/version", "Which version this is.", ("version",), open=True),
    Endpoint("get", "/livez", "Whether the process answers.", ("status",), open=True),
    Endpoint(
        "get", "/readyz", "Whether requests make progress.", ("ok", "reasons", "degraded"),
        refusals=(503,), error=Readiness, open=True,
    ),
    Endpoint(
        "get", "/health", "Whether the process answers, and what is out of order.",
        ("status", "reasons"), open=True,
    ),
    Endpoint("get", "/metrics", "Metrics for Prometheus.", (), stream=_TEXT),
)  # fmt: skip
"""Those of models, files, batches and stored responses, and those that probes ask."""


class FrontPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the document says of front ends' endpoints, and the schemas that they refer to."""

    paths: dict[str, dict[str, Any]]
    schemas: dict[str, Any]


@cache
def front_part() -> FrontPart:
    """As it was generated."""
    written = resources.files("appliance.api.openapi").joinpath("inference.json").read_bytes()
    return msgspec.json.decode(written, type=FrontPart)


def kinds() -> list[type]:
    """The types of all bodies."""
    bodies = [one.body for one in ENDPOINTS if one.body is not None]
    return [*bodies, MessagesError, OllamaError, Readiness]


def paths(schema_of: dict[type, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The core's endpoints by path and method, given the schemas of `kinds()`."""
    found: dict[str, dict[str, Any]] = {}
    for one in ENDPOINTS:
        found.setdefault(one.path, {})[one.method] = _operation(one, schema_of)
    return found


def _operation(one: Endpoint, schema_of: dict[type, dict[str, Any]]) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", one.path).strip("_") or "root"
    refusals = one.refusals if one.open else sorted({*one.refusals, *ANYWHERE})
    if one.body is not None:
        refusals = sorted({*refusals, BODY_STALLS})
    answers: dict[str, Any] = {"200": {"description": "Done.", "content": _content(one)}}
    for status in refusals:
        answers[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": schema_of[one.error]}},
        }
    if one.method == "head":
        answers = {status: {"description": said["description"]} for status, said in answers.items()}
    described: dict[str, Any] = {
        "operationId": f"{one.method}_{name}",
        "summary": one.about,
        "responses": answers,
    }
    if one.open:
        described["security"] = []
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", one.path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": schema} for name, schema in one.query.items()
    ]
    if parameters:
        described["parameters"] = parameters
    if one.body is not None:
        kind = "multipart/form-data" if one.form else "application/json"
        sent = {"schema": schema_of[one.body], "example": EXAMPLES[one.method, one.path]}
        described["requestBody"] = {"required": True, "content": {kind: sent}}
    return described


def _content(one: Endpoint) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if one.fields:
        schema = {"type": "object", "required": list(one.fields)}
        content["application/json"] = {"schema": schema}
    if one.stream is not None:
        content[one.stream] = {"schema": {"description": "Text, as it comes."}}
    return content
