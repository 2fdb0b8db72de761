"""Valid requests to every endpoint, which are then spoilt."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from litestar import Litestar

from appliance.service.front_paths import FRONT_PATHS
from tests.fuzz.target import ADAPTER, ADDED, MODELS, PULLED, RESPONSE
from tests.unit.doubles.front_end import ENDLESS

_CHAT: Final = [{"role": "user", "content": "hello"}]

FILE, BATCH, MESSAGE_BATCH = "file-0", "batch_0", "msgbatch_1"
"""Stand for the ids of a file, a batch and a message batch that there are."""
ORGANIZATION = "acme"

JSON, FORM = "application/json", "multipart/form-data; boundary=b"
LINE: Final = json.dumps(
    {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODELS[0], "messages": _CHAT},
    }
)
"""A request of a batch."""
UPLOAD: Final = (
    '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    '--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    f"{LINE}\n\r\n--b--\r\n"
).encode()
_BATCH: Final = {
    "input_file_id": FILE,
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}


def message_batch() -> dict[str, Any]:
    """A message batch of one request."""
    params = {"model": MODELS[0], "max_tokens": 4, "messages": _CHAT}
    return {"requests": [{"custom_id": "1", "params": params}]}


BODIES: Final[dict[tuple[str, str], list[Any]]] = {
    ("POST", "/api/show"): [{}],
    ("POST", "/v1/batches"): [_BATCH, {**_BATCH, "metadata": {"a": "b"}}],
    ("POST", "/v1/messages/batches"): [message_batch()],
    ("POST", "/api/models"): [
        {"name": ADDED, "path": "tiny", "max_context": 64, "slo": {"ttft": "2s"}, "pin": True}
    ],
    ("POST", "/api/models/{target:path}"): [{}, {"name": "polite", "path": ADAPTER}],
    ("POST", "/v1/load_lora_adapter"): [
        {"lora_name": "legal", "lora_path": ADAPTER, "base_model_name": MODELS[0]},
        {"lora_name": f"{MODELS[0]}:legal", "lora_path": ADAPTER, "load_inplace": True},
    ],
    ("POST", "/v1/unload_lora_adapter"): [{"lora_name": "legal", "lora_int_id": 1}],
    ("POST", "/api/pull"): [
        {"model": PULLED, "stream": False}, {"model": PULLED}, {"model": "nowhere/new"},
        {"model": PULLED, "from": "http://127.0.0.1:9", "add": False, "stream": False},
    ],
    ("DELETE", "/api/delete"): [{}, {"model": ADDED}],
    ("PUT", "/api/policies"): [
        {"use": ["serverlessllm"]},
        {"use": ["aegaeon"], "decisions": {}, "parameters": {}},
    ],
    ("POST", "/api/keys"): [
        {"name": ADDED},
        {"name": ADDED, "scopes": ["infer", "admin"], "models": [MODELS[0]], "classes": ["batch"],
         "slo": True, "expires": "30d", "requests_per_minute": 60, "tokens_per_minute": 9,
         "concurrency": 4},
    ],
    ("PUT", "/api/keys/{name:str}/organization"): [
        {"organization": ORGANIZATION}, {"organization": None}
    ],
    ("PUT", "/api/organizations/{name:str}"): [
        {}, {"requests_per_minute": 10**6, "tokens_per_minute": 10**8, "concurrency": 32},
    ],
    ("PUT", "/api/log-level"): [{"level": "info"}],
    ("POST", "/api/instances/{name:str}/quarantine"): [{}, {"reason": "its fan is loud"}],
    ("PUT", "/api/models/{target:path}"): [{"max_queue": 5}, {"slo": {"ttft": "2s", "tbt": "1s"}}],
}  # fmt: skip
"""Where no model is named, it is put in."""

_ENDS: Final = {
    ("POST", "/api/models/{target:path}"): (
        *("/load", "/evict", "/drain", "/resume", "/pin", "/unpin", "/adapters", "/nothing"),
    ),
    ("DELETE", "/api/models/{name:path}"): ("", "/adapters/polite"),
    ("GET", "/api/models/{name:path}"): ("", "/files", "/files/config.json"),
    ("PUT", "/api/models/{target:path}"): ("/limits",),
}
"""What a path ends with, behind the name of a model."""

_NAMES: Final = {
    "/api/requests": "chatcmpl-1",
    "/api/instances": "0",
    "/api/keys": ADDED,
    "/api/organizations": ORGANIZATION,
    "/api/policies": "serverlessllm",
    "/api/blobs": "sha256:00",
    "/v1/files": FILE,
    "/v1/batches": BATCH,
    "/v1/messages/batches": MESSAGE_BATCH,
    "/v1/responses": RESPONSE,
}
_NO_MODEL: Final = (
    *("/api/policies", "/api/log-level", "/api/models", "/api/config", "/api/verify"),
    *("/api/instances", "/api/host", "/api/keys"),
    "/api/organizations",
    "/v1/batches",
    "/v1/messages/batches",
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)


class Seed(NamedTuple):
    """A request that is in order."""

    method: str
    path: str
    body: bytes
    """JSON, or a form, or nothing."""

    @property
    def content_type(self) -> str:
        return FORM if self.body.startswith(b"--b") else JSON


def seeds(app: Litestar) -> list[Seed]:
    """Requests to all routes of an application, with every method they have, and to front ends."""
    body = json.dumps({"model": MODELS[0], "messages": _CHAT}).encode()
    front = [Seed("POST", path, body) for path in sorted(FRONT_PATHS - {ENDLESS})]
    return front + [
        Seed(method, path, body)
        for route in app.routes
        for method in sorted(route.methods)  # type: ignore[union-attr]
        for path in _paths(method, route.path)
        for body in _bodies(method, route.path)
    ]


def _paths(method: str, template: str) -> Iterator[str]:
    ends = _ENDS.get((method, template), ("",))
    kind = template.partition("/{")[0]
    names = [_NAMES[kind]] if kind in _NAMES else MODELS
    for name in (*names, ADDED) if (method, kind) == ("DELETE", "/api/models") else names:
        for end in ends:
            yield re.sub(r"/?{\w+:\w+}", f"/{name}", template) + end
        if "{" not in template:
            return


def _bodies(method: str, template: str) -> Iterator[bytes]:
    if method in ("GET", "HEAD", "OPTIONS", "DELETE") and (method, template) not in BODIES:
        yield b""
        return
    if template == "/v1/files":
        yield UPLOAD
        return
    named: dict[str, Any] = {} if template.startswith(_NO_MODEL) else {"model": MODELS[1]}
    for body in BODIES.get((method, template), [{}]):
        yield json.dumps(named | body).encode()
