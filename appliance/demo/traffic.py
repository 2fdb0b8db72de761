"""A burst of concurrent streaming chats against a running daemon, timed as a client sees it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx

from appliance.client import event_lines_async

_OPENINGS = (
    "Tell me about",
    "What would happen without",
    "Write a short story about",
    "Explain to a child",
    "Compare yesterday with",
    "List three reasons for",
    "Why do people like",
    "Describe slowly",
)
_SUBJECTS = ("the sea", "old bridges", "glass", "winter mornings", "maps", "a river at night")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request of the burst."""

    model: str
    prompt: str
    max_tokens: int
    ignore_eos: bool = False


@dataclass(slots=True)
class TimedAnswer:
    """What came of a chat. Times are seconds."""

    chat: ChatRequest
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    ttft_seconds: float = 0.0
    gaps_seconds: list[float] = field(default_factory=list)
    """Between a token and the next."""
    error: str | None = None


def burst(models: Sequence[str], per_model: int) -> list[ChatRequest]:
    """`per_model` chats for each model, interleaved, of 16 to 200 tokens; always the same ones."""
    chats = []
    for round_number in range(per_model):
        for index, model in enumerate(models):
            number = round_number * len(models) + index
            opening = _OPENINGS[number % len(_OPENINGS)]
            subject = _SUBJECTS[(number * 5 + round_number) % len(_SUBJECTS)]
            chats.append(
                ChatRequest(model, f"{opening} {subject}. {number}", 16 + number * 37 % 185)
            )
    return chats


async def send(
    url: str, chats: Sequence[ChatRequest], on_token: Callable[[TimedAnswer], None]
) -> list[TimedAnswer]:
    """All chats at once, greedy; returns when every one has ended. `on_token` hears each chunk."""
    limits = httpx.Limits(max_connections=None)
    timeout = httpx.Timeout(None, connect=30)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout) as client:
        return list(await asyncio.gather(*(_one(client, chat, on_token) for chat in chats)))


async def _one(
    client: httpx.AsyncClient, chat: ChatRequest, on_token: Callable[[TimedAnswer], None]
) -> TimedAnswer:
    answer = TimedAnswer(chat)
    body = {
        "model": chat.model,
        "messages": [{"role": "user", "content": chat.prompt}],
        "max_tokens": chat.max_tokens,
        "temperature": 0,
        "ignore_eos": chat.ignore_eos,
        "stream": True,
        "return_token_ids": True,
    }
    began = newest = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if not response.is_success:
            answer.error = (await response.aread()).decode(errors="replace")
            return answer
        async for line in event_lines_async(response.aiter_bytes()):
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = event["error"]["message"]
                return answer
            now = time.perf_counter()
            for choice in event["choices"]:
                ids = choice.get("token_ids") or ()
                if ids and not answer.tokens:
                    answer.ttft_seconds = now - began
                elif ids:
                    answer.gaps_seconds.append(now - newest)
                    answer.gaps_seconds += [0.0] * (len(ids) - 1)
                if ids:
                    newest = now
                answer.tokens += ids
                answer.finish = choice["finish_reason"] or answer.finish
            on_token(answer)
    return answer
