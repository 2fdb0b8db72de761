"""Bodies of chat requests that cost far more than they look like, or try to."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from tests.hostile.guides import AMBIGUOUS, chain_of_rules

MOST_BODY_BYTES = 8 << 20
"""`api.max_body` as it ships."""
CHAT = "/v1/chat/completions"


def chat(model: str, content: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": model, "messages": messages, **fields}).encode()


def long_prompt(model: str) -> bytes:
    """As large as may be."""
    room = MOST_BODY_BYTES - len(chat(model, ""))
    return chat(model, "river " * (room // 6))


def truncated_prompt(model: str) -> bytes:
    """As large as may be, of which the last tokens are kept."""
    fields = {"truncate_prompt_tokens": 8, "max_tokens": 1}
    room = MOST_BODY_BYTES - len(chat(model, "", **fields))
    return chat(model, "river " * (room // 6), **fields)


def many_tools(model: str, tools: int) -> bytes:
    tool = {"type": "function", "function": {"name": "a"}}
    body = json.loads(chat(model, "seas", max_tokens=1)) | {"tools": [tool] * tools}
    return json.dumps(body, separators=(",", ":")).encode()


def many_messages(model: str, messages: int) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": ""}] * messages}
    return json.dumps(body, separators=(",", ":")).encode()


def many_sequences(model: str, sequences: int, tokens: int) -> Iterator[bytes]:
    """One request for many answers, each time with another prompt."""
    for number in itertools.count():
        yield chat(model, f"{number} seas", n=sequences, max_tokens=tokens, ignore_eos=True)


def many_stop_tokens(model: str, tokens: int) -> bytes:
    """Tokens to end at, for each of many answers."""
    return chat(model, "seas", n=64, max_tokens=1, stop_token_ids=list(range(tokens)))


def chains_of_rules(model: str, rules: int) -> Iterator[bytes]:
    """Grammars that end what compiles them, each another one."""
    for number in itertools.count():
        guide = {"grammar": chain_of_rules(rules + number)}
        yield chat(model, "seas", max_tokens=4, structured_outputs=guide)


def ambiguous_grammars(model: str, tokens: int) -> Iterator[bytes]:
    """Grammars that take longer with each token, each another one."""
    length = {"min_tokens": tokens, "max_tokens": tokens}
    for number in itertools.count():
        grammar = AMBIGUOUS + "\n" * number
        yield chat(model, "seas", **length, structured_outputs={"grammar": grammar})
