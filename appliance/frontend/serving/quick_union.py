"""Texts and tokens to embed are not tried as messages one by one.

vLLM tries to read `input` of `/v1/embeddings` as text, as tokens, and as messages. To find out of
each number that it is no message took 30 us: 8 MiB of tokens held a front end up for a minute.
"""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.pooling.embed import protocol

_is_chat_messages = protocol._is_chat_messages


def tell_messages_apart() -> None:
    """Have what is no list of messages refused as such at once from now on."""
    protocol._is_chat_messages = _as_messages


def _as_messages(value: Any) -> bool:
    """Whether they are messages. Raises `ValueError` if they are not, which ends that attempt."""
    if not _is_chat_messages(value):
        raise ValueError("a list of messages is expected")
    return True
