"""Codex and Claude Code: whole turns of both, over plain HTTP, as these tools send them.

The tools themselves insist on their makers' models and are not run here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.clients.conftest import BOOKED, SCHEMA, SMALL, WORDY, Appliance, Stay
from tests.parrot import ANSWER

CODEX: Any = {
    "model": SMALL,
    "instructions": "You are a coding agent running in a terminal. " * 40,
    "tools": [
        {"type": "function", "name": "book", "description": "Book.", "strict": False,
         "parameters": SCHEMA},
        {"type": "custom", "name": "apply_patch", "description": "Edit files.",
         "format": {"type": "text"}},
        {"type": "web_search"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "medium"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "store": False,
    "stream": True,
}  # fmt: skip
ASKED: Any = {
    "type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]
}  # fmt: skip
CLAUDE_CODE: Any = {
    "model": SMALL,
    "max_tokens": 20000,
    "system": [
        {"type": "text", "text": "You are a coding agent. " * 40,
         "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
        ]},
    ],
    "tools": [
        {"name": "book", "description": "Book.", "input_schema": SCHEMA},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "user_1_account__session_2"},
    "stream": True,
}  # fmt: skip
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "authorization": "Bearer unused",
}


@pytest.fixture
def client(appliance: Appliance) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=appliance.url, timeout=600) as made:
        yield made


def events(client: httpx.Client, path: str, body: Any) -> list[Any]:
    """The data of an answer's events; each names its type twice, as both tools expect."""
    with client.stream("POST", path, json=body, headers=HEADERS) as answer:
        text = answer.read().decode()
        assert answer.status_code == 200, text
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "x-appliance-ignored" in answer.headers
    found = []
    for block in filter(None, text.split("\n\n")):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if not lines:
            continue  # a comment: the times that the answer took
        name, data = lines
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_codex(client: httpx.Client) -> None:
    """Two calls, finished one by one; sent back with their results, an answer."""
    called = events(client, "/v1/responses", CODEX | {"input": [ASKED]})
    items = [told["item"] for told in called if told["type"] == "response.output_item.done"]
    calls = [item for item in items if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
        for call in calls
    ]
    ended = events(client, "/v1/responses", CODEX | {"input": [ASKED, *items, *results]})
    said = [told["delta"] for told in ended if told["type"] == "response.output_text.delta"]

    assert [Stay.model_validate_json(call["arguments"]) for call in calls] == BOOKED
    assert called[0]["type"] == "response.created"
    assert called[-1]["type"] == ended[-1]["type"] == "response.completed"
    assert ended[-1]["response"]["usage"]["output_tokens"]
    assert "".join(said) == ANSWER


def test_claude_code(client: httpx.Client) -> None:
    """Its turn: tokens counted, two calls, an answer behind their results."""
    counted = client.post(
        "/v1/messages/count_tokens?beta=true",
        json={name: CLAUDE_CODE[name] for name in ("model", "system", "messages", "tools")},
        headers=HEADERS,
    )
    called = events(client, "/v1/messages?beta=true", CLAUDE_CODE)
    starts = [told["content_block"] for told in called if told["type"] == "content_block_start"]
    calls = [block for block in starts if block["type"] == "tool_use"]
    arguments: dict[int, str] = {}
    for told in called:
        if told["type"] == "content_block_delta" and told["delta"]["type"] == "input_json_delta":
            index = told["index"]
            arguments[index] = arguments.get(index, "") + told["delta"]["partial_json"]
    inputs = [json.loads(text) for text in arguments.values()]
    said = [call | {"input": given} for call, given in zip(calls, inputs, strict=True)]
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": "done"} for call in calls
    ]
    chat = [
        *CLAUDE_CODE["messages"],
        {"role": "assistant", "content": said},
        {"role": "user", "content": results},
    ]
    ended = events(client, "/v1/messages?beta=true", CLAUDE_CODE | {"messages": chat})
    texts = [
        told["delta"].get("text", "") for told in ended if told["type"] == "content_block_delta"
    ]

    assert counted.status_code == 200, counted.text
    assert counted.json()["input_tokens"] == called[0]["message"]["usage"]["input_tokens"]
    assert [Stay.model_validate(given) for given in inputs] == BOOKED
    assert (called[0]["type"], called[-1]["type"]) == ("message_start", "message_stop")
    assert "".join(texts) == ANSWER


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages?beta=true"])
def test_errors(client: httpx.Client, path: str) -> None:
    body = (CLAUDE_CODE if "messages" in path else CODEX | {"input": [ASKED]}) | {"model": "gpt-9"}
    answer = client.post(path, json=body, headers=HEADERS)

    assert answer.status_code == 404
    assert "gpt-9" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages?beta=true"])
def test_cancel(appliance: Appliance, client: httpx.Client, path: str) -> None:
    """Escape is pressed in the midst of an answer."""
    body: Any = CODEX | {"input": [ASKED]}
    if "messages" in path:
        body = CLAUDE_CODE | {"max_tokens": 500, "system": "Be brief."}
    body |= {"model": WORDY, "tools": [], "instructions": "Be brief."}
    with appliance.cancels():
        with client.stream("POST", path, json=body, headers=HEADERS) as answer:
            for line in answer.iter_lines():
                if "delta" in line:
                    break
