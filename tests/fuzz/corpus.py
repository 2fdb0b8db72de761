"""Valid requests to every endpoint, which are then spoilt."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from litestar import Litestar

from tests.fuzz.target import ADDED, EMBEDDER, MODELS, PULLED

_CHAT: Final = [{"role": "user", "content": "hello"}]
_TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}},
}
_SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}

FILE, BATCH = "file-0", "batch_0"
"""Stand for the ids of a file and of a batch that there are."""

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
_MATCH: Final = {"model": EMBEDDER, "text_1": "a", "text_2": ["b", "c"]}
_RANK: Final = {"model": EMBEDDER, "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}

BODIES: Final[dict[tuple[str, str], list[Any]]] = {
    ("POST", "/v1/chat/completions"): [
        {"messages": _CHAT},
        {"messages": _CHAT, "stream": True, "stream_options": {"include_usage": True}, "n": 2},
        {"messages": _CHAT, "logprobs": True, "top_logprobs": 3, "stop": ["*", "!!"], "seed": 7},
        {"messages": _CHAT, "tools": [_TOOL], "tool_choice": "auto", "stream": True},
        {"messages": _CHAT, "tools": [_TOOL], "tool_choice": "required"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
         "response_format": {"type": "json_schema", "json_schema": {"name": "x",
                                                                   "schema": _SCHEMA}}},
        {"messages": _CHAT, "logit_bias": {"5": 1.5}, "max_tokens": 9, "temperature": 0.5,
         "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
         "repetition_penalty": 1.1, "min_tokens": 1, "service_tier": "flex", "user": "me"},
        {"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "x"}]},
    ],
    ("POST", "/v1/completions"): [
        {"prompt": "hello"},
        {"prompt": ["a", "b"], "n": 2, "stream": True, "logprobs": 2},
        {"prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True},
        {"prompt": [[1], [2, 3]], "structured_outputs": {"regex": "a+"}},
    ],
    ("POST", "/v1/responses"): [
        {"input": "hello"},
        {"input": [{"role": "user", "content": "hello"}], "stream": True, "instructions": "be",
         "text": {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}}},
    ],
    ("POST", "/v1/messages"): [
        {"messages": _CHAT, "max_tokens": 5},
        {"messages": _CHAT, "max_tokens": 500, "stream": True, "system": "be", "top_k": 4,
         "stop_sequences": ["*"], "metadata": {"user_id": "me"}},
    ],
    ("POST", "/v1/messages/count_tokens"): [{"messages": _CHAT}],
    ("POST", "/api/chat"): [
        {"messages": _CHAT},
        {"messages": _CHAT, "stream": False, "keep_alive": "5m", "format": "json",
         "options": {"temperature": 0.1, "seed": 3, "num_predict": 4, "stop": ["*"]}},
    ],
    ("POST", "/api/generate"): [
        {"prompt": "hello"},
        {"prompt": "hello", "stream": False, "raw": True, "logprobs": True, "top_logprobs": 2},
        {},
    ],
    ("POST", "/api/show"): [{}],
    ("POST", "/v1/embeddings"): [
        {"model": EMBEDDER, "input": ["a", "b"]},
        {"model": EMBEDDER, "input": [[1], [2]], "encoding_format": "base64", "dimensions": 1},
    ],
    ("POST", "/api/embed"): [{"model": EMBEDDER, "input": ["a", "b"], "keep_alive": "5m"}],
    ("POST", "/api/embeddings"): [{"model": EMBEDDER, "prompt": "a"}],
    **{("POST", path): [_MATCH] for path in ("/v1/score", "/score")},
    **{("POST", path): [_RANK] for path in ("/v1/rerank", "/rerank", "/v2/rerank")},
    ("POST", "/v1/batches"): [_BATCH, {**_BATCH, "metadata": {"a": "b"}}],
    ("POST", "/tokenize"): [{"prompt": "hello"}, {"messages": _CHAT, "return_token_strs": True}],
    ("POST", "/detokenize"): [{"tokens": [1, 2, 3]}],
    ("POST", "/api/models"): [
        {"name": ADDED, "path": "tiny", "max_context": 64, "slo": {"ttft": "2s"}, "pin": True}
    ],
    ("POST", "/api/pull"): [
        {"model": PULLED, "stream": False}, {"model": PULLED}, {"model": "nowhere/new"}
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
    ("PUT", "/api/log-level"): [{"level": "info"}],
    ("POST", "/api/instances/{name:str}/quarantine"): [{}, {"reason": "its fan is loud"}],
    ("PUT", "/api/models/{target:path}"): [{"max_queue": 5}, {"slo": {"ttft": "2s", "tbt": "1s"}}],
}  # fmt: skip
"""Where no model is named, it is put in."""

_ENDS: Final = {
    ("POST", "/api/models/{target:path}"): (
        *("/load", "/evict", "/drain", "/resume", "/pin", "/unpin", "/nothing"),
    ),
    ("PUT", "/api/models/{target:path}"): ("/limits",),
}
"""What a path ends with, behind the name of a model."""

_NAMES: Final = {
    "/api/requests": "chatcmpl-1",
    "/api/instances": "0",
    "/api/keys": ADDED,
    "/api/policies": "serverlessllm",
    "/api/blobs": "sha256:00",
    "/v1/files": FILE,
    "/v1/batches": BATCH,
}
_NO_MODEL: Final = (
    *("/api/policies", "/api/log-level", "/api/models", "/api/config", "/api/verify"),
    *("/api/instances", "/api/host", "/api/keys"),
    "/v1/batches",
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
    """Requests to all routes of an application, with every method they have."""
    return [
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
