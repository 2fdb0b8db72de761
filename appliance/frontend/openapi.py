"""What the OpenAPI document says of the endpoints that front ends answer.

The core describes itself and imports no vLLM, so this part is written to a file:

    python -m appliance.frontend.openapi > appliance/api/openapi/inference.json
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from appliance.api.openapi.examples import EXAMPLES
from appliance.frontend.app import INVOCATIONS, TOKENIZER_INFO, vllm_application
from appliance.frontend.fields import ollama_bodies, routes, table
from appliance.frontend.sound.forms import PATHS
from appliance.service.front_paths import is_front_path

REFERENCE: Final = "#/components/schemas/{name}"
_REFERENCE: Final = re.compile(r'"#/components/schemas/([^"]+)"')
_REFUSALS: Final = (400, 401, 403, 404, 408, 413, 429, 500, 503)
_EVENTS: Final = {"text/event-stream": {"schema": {"description": "Text, as it comes."}}}
_LINES: Final = {"application/x-ndjson": {"schema": {"description": "Text, as it comes."}}}
_STREAMS: Final = ("/chat/completions", "/completions", "/responses", "/messages")
_INVOKED: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings"),
    *("/classify", "/rerank", "/score", "/pooling"),
)
_TEXT: Final = {"type": "string"}
_ERROR: Final = "FrontError"
_ANTHROPIC_ERROR: Final = "FrontAnthropicError"
_OLLAMA_ERROR: Final = "FrontOllamaError"
_ERRORS: Final[dict[str, dict[str, Any]]] = {
    _ERROR: {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type"],
                "properties": {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "integer", "null"]},
                },
            }
        },
    },
    _ANTHROPIC_ERROR: {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": _TEXT, "message": _TEXT},
            },
            "request_id": _TEXT,
        },
    },
    _OLLAMA_ERROR: {"type": "object", "required": ["error"], "properties": {"error": _TEXT}},
}
_OLLAMA_ABOUT: Final = {
    "/api/chat": "Answer a chat.",
    "/api/generate": "Answer a prompt.",
    "/api/embed": "A vector for each text.",
    "/api/embeddings": "A vector for a text.",
}


def part() -> dict[str, Any]:
    """``paths`` and ``schemas``."""
    vllm_application()  # adds the route of TOKENIZER_INFO
    described = get_openapi(title="", version="", routes=list(_served()))
    paths: dict[str, dict[str, Any]] = described["paths"]
    paths[INVOCATIONS] = {"post": _invocations(paths)}
    paths[TOKENIZER_INFO]["get"]["parameters"] = [
        {"name": "model", "in": "query", "required": False, "schema": _TEXT}
    ]
    for path, item in paths.items():
        for method, operation in item.items():
            _adapt(path, method, operation)
    ollama_paths, ollama_schemas = _ollama()
    schemas = described["components"]["schemas"] | ollama_schemas | _ERRORS
    paths |= ollama_paths
    ours = _described_here() | ollama_schemas.keys() | _ERRORS.keys()
    schemas = {name: schemas[name] for name in ours & schemas.keys()}
    paths, schemas = _pruned(paths, schemas), _pruned(schemas, schemas, without=("description",))
    return {"paths": paths, "schemas": _used(paths, schemas)}


def _served() -> Iterator[Any]:
    for route in routes():
        if is_front_path(route.path):
            yield route


def _adapt(path: str, method: str, operation: dict[str, Any]) -> None:
    """What vLLM's document says of an operation, and what is different here."""
    operation["operationId"] = _operation_id(method, path)
    error = _ANTHROPIC_ERROR if path.startswith("/v1/messages") else _ERROR
    content = operation["responses"]["200"].setdefault("content", {})
    content.setdefault("application/json", {"schema": {}})
    content.pop("text/event-stream", None)
    if path in PATHS:
        content |= {"text/plain": {"schema": _TEXT}}
    if path.endswith(_STREAMS) or path in PATHS:
        content |= _EVENTS
    operation["responses"] = {"200": operation["responses"]["200"], **_refusals(error)}
    for parameter in operation.get("parameters", ()):
        parameter.pop("description", None)
    body: Any = operation.get("requestBody")
    if path in PATHS:  # vLLM's document does not say what its routes need
        (sent,) = body["content"].values()
        body["content"] = {"multipart/form-data": sent}
    if body is not None:
        (sent,) = body["content"].values()
        sent["example"] = EXAMPLES[method, path]


def _invocations(paths: dict[str, Any]) -> dict[str, Any]:
    """What takes the bodies of several other endpoints."""
    bodies = [paths[path]["post"]["requestBody"] for path in _INVOKED]
    schemas = [body["content"]["application/json"]["schema"] for body in bodies]
    return {
        "summary": f"What {', '.join(_INVOKED)} answer: the one that the body is for.",
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"anyOf": schemas}}},
        },
        "responses": {"200": {"description": "Done.", "content": dict(_EVENTS)}},
    }


def _ollama() -> tuple[dict[str, Any], dict[str, Any]]:
    bodies = ollama_bodies()
    schemas, components = msgspec.json.schema_components(
        list(bodies.values()), ref_template=REFERENCE
    )
    paths: dict[str, Any] = {}
    for path, schema in zip(bodies, schemas, strict=True):
        content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if "stream" in table()[path].known:
            content |= _LINES
        sent = {"schema": schema, "example": EXAMPLES["post", path]}
        paths[path] = {
            "post": {
                "summary": _OLLAMA_ABOUT[path],
                "operationId": _operation_id("post", path),
                "requestBody": {"required": True, "content": {"application/json": sent}},
                "responses": {
                    "200": {"description": "Done.", "content": content},
                    **_refusals(_OLLAMA_ERROR),
                },
            }
        }
    return paths, components


def _refusals(error: str) -> dict[str, Any]:
    schema = {"$ref": REFERENCE.format(name=error)}
    return {
        str(status): {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": schema}},
        }
        for status in _REFUSALS
    }


def _operation_id(method: str, path: str) -> str:
    name = re.sub(r"\W+", "_", path).strip("_")
    return f"{method}_{name}"


def _described_here() -> set[str]:
    """The names of vLLM's own models: what OpenAI's clients define is described by them."""
    waiting, found = [BaseModel], set[str]()
    while waiting:
        for kind in waiting.pop().__subclasses__():
            waiting.append(kind)
            if kind.__module__.startswith("vllm."):
                found.add(kind.__name__)
    return found


def _pruned(
    node: Any, schemas: Mapping[str, Any], *, without: tuple[str, ...] = (), named: bool = False
) -> Any:
    """`node` without titles, `without` other words, and without references to what is not in
    `schemas`. `named`: its keys are names of fields, and no words of JSON Schema."""
    if isinstance(node, list):
        kept = [_pruned(one, schemas, without=without) for one in node]
        return [one for i, one in enumerate(kept) if one not in kept[:i]]
    if not isinstance(node, dict):
        return node
    if "$ref" in node and not named:
        name = node["$ref"].rpartition("/")[2]
        if name in schemas:
            return node
        return {"description": f"OpenAI's {name.rpartition('__')[2].removesuffix('Param')}."}
    return {
        key: _pruned(value, schemas, without=without, named=key == "properties" and not named)
        for key, value in node.items()
        if named or key not in ("title", "discriminator", *without)
    }


def _used(paths: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """The schemas that `paths` lead to."""
    used: dict[str, Any] = {}
    waiting = _REFERENCE.findall(msgspec.json.encode(paths).decode())
    while waiting:
        name = waiting.pop()
        if name not in used:
            used[name] = schemas[name]
            waiting += _REFERENCE.findall(msgspec.json.encode(used[name]).decode())
    return dict(sorted(used.items()))


def generated() -> bytes:
    """The file."""
    return b"{%s}\n" % b",\n".join(
        b'"%s": {\n%s\n}' % (name.encode(), b",\n".join(_lines(entries)))
        for name, entries in part().items()
    )


def _lines(entries: Mapping[str, Any]) -> Iterator[bytes]:
    """One for each, so that changes can be read."""
    for name, described in sorted(entries.items()):
        line = msgspec.json.encode({name: described}, order="sorted")
        yield line[1:-1]


if __name__ == "__main__":
    sys.stdout.buffer.write(generated())
