"""What the text of a model turned out to be: reasoning, content, and calls of tools."""

from __future__ import annotations

import msgspec


class CallPiece(msgspec.Struct, frozen=True):
    """What is new of a tool call: `id` and `name` come once, `arguments` (JSON) in pieces."""

    index: int
    id: str | None
    name: str | None
    arguments: str


class Heard(msgspec.Struct, frozen=True):
    """What a piece of text turned out to be."""

    content: str = ""
    calls: tuple[CallPiece, ...] = ()
    reasoning: str = ""
    reasoning_tokens: int = 0
    """Of the whole choice, as vLLM's parser counts them; told with its last piece."""
