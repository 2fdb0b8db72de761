"""A body for every operation of the OpenAPI document that takes one; tests send them all.

Models are called as on the pages of docs/: ``small`` generates, ``embedder`` embeds, ``scorer``
scores, ``whisper`` makes text of sound.
"""

from __future__ import annotations

from typing import Any, Final

_CHAT: Final = [{"role": "user", "content": "What flows through Rome?"}]
_LINE: Final = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/completions", '
    '"body": {"model": "small", "prompt": "The Tiber"}}\n'
)
_SCORE: Final = {
    "model": "embedder",
    "text_1": "What flows through Rome?",
    "text_2": ["Nothing.", "The Tiber."],
}
_RANK: Final = {
    "model": "embedder",
    "query": "What flows through Rome?",
    "documents": ["Nothing.", "The Tiber."],
    "top_n": 1,
}
_SOUND_PATHS: Final = ("/v1/audio/transcriptions", "/v1/audio/translations")
_SOUND: Final = {"model": "whisper", "file": "said.wav", "language": "en"}
_RESPONSE: Final = {"model": "small", "input": "What flows through Rome?"}

EXAMPLES: Final[dict[tuple[str, str], dict[str, Any]]] = {
    ("post", "/v1/chat/completions"): {"model": "small", "messages": _CHAT, "max_tokens": 50},
    ("post", "/v1/chat/completions/batch"): {
        "model": "small",
        "messages": [_CHAT, _CHAT],
        "max_tokens": 50,
    },
    ("post", "/v1/chat/completions/render"): {"model": "small", "messages": _CHAT},
    ("post", "/v1/completions"): {"model": "small", "prompt": "The Tiber", "max_tokens": 5},
    ("post", "/v1/completions/render"): {"model": "small", "prompt": "The Tiber"},
    ("post", "/v1/responses"): _RESPONSE,
    ("post", "/v1/responses/input_tokens"): _RESPONSE,
    ("post", "/v1/responses/render"): _RESPONSE,
    ("post", "/v1/embeddings"): {"model": "embedder", "input": ["Nothing.", "The Tiber."]},
    ("post", "/v2/embed"): {"model": "embedder", "texts": ["The Tiber."]},
    **dict.fromkeys([("post", path) for path in _SOUND_PATHS], _SOUND),
    ("post", "/pooling"): {"model": "embedder", "input": "The Tiber."},
    ("post", "/classify"): {"model": "scorer", "input": "The Tiber."},
    **dict.fromkeys([("post", "/v1/score"), ("post", "/score")], _SCORE),
    **dict.fromkeys([("post", path) for path in ("/v1/rerank", "/rerank", "/v2/rerank")], _RANK),
    ("post", "/v1/files"): {"purpose": "batch", "file": _LINE},
    ("post", "/v1/batches"): {
        "input_file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    },
    ("post", "/tokenize"): {"model": "small", "prompt": "The Tiber"},
    ("post", "/invocations"): {"model": "small", "prompt": "The Tiber", "max_tokens": 4},
    ("post", "/detokenize"): {"model": "small", "tokens": [5, 6, 7]},
    ("post", "/v1/messages"): {"model": "small", "max_tokens": 50, "messages": _CHAT},
    ("post", "/v1/messages/batches"): {
        "requests": [
            {
                "custom_id": "1",
                "params": {"model": "small", "max_tokens": 50, "messages": _CHAT},
            }
        ]
    },
    ("post", "/v1/messages/count_tokens"): {"model": "small", "messages": _CHAT},
    ("post", "/v1/messages/render"): {"model": "small", "max_tokens": 50, "messages": _CHAT},
    ("post", "/api/chat"): {"model": "small", "messages": _CHAT, "stream": False},
    ("post", "/api/generate"): {"model": "small", "prompt": "Go on.", "stream": False},
    ("post", "/api/show"): {"model": "small"},
    ("post", "/api/embed"): {"model": "embedder", "input": ["Nothing.", "The Tiber."]},
    ("post", "/api/embeddings"): {"model": "embedder", "prompt": "The Tiber."},
    ("post", "/api/pull"): {"model": "downloads/new", "stream": False},
    ("delete", "/api/delete"): {"model": "new"},
    ("post", "/api/models"): {"name": "mine", "path": "downloads/new", "max_context": 128},
    ("post", "/api/models/{name}/adapters"): {"name": "legal", "path": "adapter"},
    ("post", "/v1/load_lora_adapter"): {"lora_name": "polite", "lora_path": "adapter"},
    ("post", "/v1/unload_lora_adapter"): {"lora_name": "polite"},
    ("post", "/api/instances/{name}/quarantine"): {"reason": "its fan is loud"},
    ("put", "/api/models/{name}/limits"): {"slo": {"ttft": "5s", "tbt": "100ms"}, "max_queue": 20},
    ("post", "/api/keys"): {
        "name": "ci",
        "models": ["small"],
        "expires": "30d",
        "requests_per_minute": 60,
    },
    ("put", "/api/keys/{name}/organization"): {"organization": "acme"},
    ("put", "/api/organizations/{name}"): {"tokens_per_minute": 20_000, "concurrency": 8},
    ("put", "/api/policies"): {"use": ["serverlessllm"]},
    ("put", "/api/log-level"): {"level": "info"},
}
"""By method and path."""
