"""Conversations for chat templates: each shape that clients send, and random ones from a seed."""

from __future__ import annotations

import random
from typing import Any, Final

TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Look the weather up.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
_CALL: Final[dict[str, Any]] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bonn", "days": 2}'},
}


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


_ASKED: Final = _user("Hello, river")
_TURNS: Final = [_ASKED, {"role": "assistant", "content": "Hello."}, _user("And the sea?")]

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "one message": {"messages": [_ASKED]},
    "turns": {"messages": _TURNS},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, *_TURNS]},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, _ASKED]},
    "parts": {"messages": [_user([_text("Hello,"), _text(" river")])]},
    "strings and parts": {"messages": [*_TURNS[:2], _user([_text("And"), _text("?")])]},
    "empty": {"messages": [_user("")]},
    "names": {"messages": [_ASKED | {"name": "anna"}]},
    "unicode": {"messages": [_user("naïve 雪 🏔️ e\u0301 \u202e \x00 \r\n\t")]},
    "spelt special tokens": {"messages": [_user("<|eos|> <|user|> </s> <im>")]},
    "template code": {"messages": [_user("{{ bos_token }} {% for x in y %}")]},
    "no generation prompt": {"messages": _TURNS, "add_generation_prompt": False},
    "a message to go on with": {
        "messages": [_ASKED, {"role": "assistant", "content": "It is"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "tools": {"messages": [_ASKED], "tools": [TOOL], "tool_choice": "none"},
    "calls and results": {
        "messages": [
            _ASKED,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ],
        "tools": [TOOL],
        "tool_choice": "none",
    },
    "no thoughts": {"messages": [_ASKED], "chat_template_kwargs": {"enable_thinking": False}},
    "effort": {"messages": [_ASKED], "reasoning_effort": "low"},
    "documents": {"messages": [_ASKED], "documents": [{"title": "t", "text": "x"}]},
    "long": {"messages": [_user("a river and a bridge. " * 40)]},
}
"""Fields of a chat, by what is special about them."""

_WORDS: Final = (
    *("river", "the", "a", "bridge", "of", "glass", "Über", "雪", "\n", "  ", "don't", "42"),
    *("<|eos|>", "{{ x }}", "</think>", "🏔️", "https", "\t", "Ω", '"', "\\n", "e\u0301"),
)


def random_chat(dice: random.Random) -> dict[str, Any]:
    """Some turns of random words, with a system message, parts, calls and tools now and then."""
    messages: list[dict[str, Any]] = []
    if dice.random() < 0.3:
        messages.append({"role": "system", "content": _words(dice)})
    for _ in range(dice.randrange(3)):
        messages += [_user(_content(dice)), {"role": "assistant", "content": _words(dice)}]
        if dice.random() < 0.2:
            messages[-1] = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
            messages.append({"role": "tool", "tool_call_id": "call_1", "content": _words(dice)})
    messages.append(_user(_content(dice)))
    chat: dict[str, Any] = {"messages": messages}
    if dice.random() < 0.2:
        chat |= {"tools": [TOOL], "tool_choice": "none"}
    if dice.random() < 0.2:
        chat["chat_template_kwargs"] = {"enable_thinking": dice.random() < 0.5}
    return chat


def _content(dice: random.Random) -> Any:
    if dice.random() < 0.3:
        return [_text(_words(dice)) for _ in range(dice.randrange(1, 4))]
    return _words(dice)


def _words(dice: random.Random) -> str:
    return " ".join(dice.choice(_WORDS) for _ in range(dice.randrange(1, 12)))
