"""The same questions in all dialects, as they go over the wire, and the text of what comes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

OPENINGS = ("Tell me about", "Compare", "Why do people like", "Describe slowly", "Explain")
SUBJECTS = ("the sea", "old bridges", "glass", "winter mornings", "maps", "a river at night")
Body = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """One request: to which model, in which dialect."""

    dialect: str
    model: str
    prompt: str
    tokens: int


@dataclass
class Outcome:
    """What came of it: a text, or an error that says what happened; and which box it was."""

    question: Question
    text: str | None = None
    error: str = ""
    box: str = ""
    begun_at: float = 0.0


@dataclass(frozen=True)
class Dialect:
    """How a question is asked, and where the text is in an answer or in each event of a stream."""

    path: str
    body: Callable[[Question], Body]
    text: Callable[[Any], str]
    lines: bool = False
    streamed: bool = False


def _messages(question: Question) -> list[Body]:
    return [{"role": "user", "content": question.prompt}]


def _chat(stream: bool) -> Callable[[Question], Body]:
    return lambda q: {
        **{"model": q.model, "messages": _messages(q), "max_tokens": q.tokens},
        **{"temperature": 0, "stream": stream},
    }


def _responses(stream: bool) -> Callable[[Question], Body]:
    return lambda q: {
        **{"model": q.model, "input": q.prompt, "max_output_tokens": q.tokens},
        **{"temperature": 0, "stream": stream, "store": False},
    }


def _completion(question: Question) -> Body:
    return {
        **{"model": question.model, "prompt": question.prompt, "max_tokens": question.tokens},
        **{"temperature": 0, "stream": True},
    }


def _ollama(chat: bool, stream: bool) -> Callable[[Question], Body]:
    def body(q: Question) -> Body:
        said: Body = {"messages": _messages(q)} if chat else {"prompt": q.prompt}
        options = {"temperature": 0, "num_predict": q.tokens}
        return {"model": f"{q.model}:latest", "stream": stream, "options": options} | said

    return body


def _delta(event: Any) -> str:
    choices = event.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""


def _part(event: Any) -> str:
    return event["delta"] if event.get("type") == "response.output_text.delta" else ""


def _block(event: Any) -> str:
    return event["delta"].get("text", "") if event.get("type") == "content_block_delta" else ""


def _output(answer: Any) -> str:
    parts = [part for item in answer["output"] for part in item.get("content") or []]
    return "".join(part.get("text", "") for part in parts)


DIALECTS: dict[str, Dialect] = {
    "chat": Dialect(
        "/v1/chat/completions", _chat(False), lambda a: a["choices"][0]["message"]["content"] or ""
    ),
    "chat, streamed": Dialect("/v1/chat/completions", _chat(True), _delta, streamed=True),
    "completions, streamed": Dialect(
        "/v1/completions",
        _completion,
        lambda e: (e.get("choices") or [{}])[0].get("text") or "",
        streamed=True,
    ),
    "responses": Dialect("/v1/responses", _responses(False), _output),
    "responses, streamed": Dialect("/v1/responses", _responses(True), _part, streamed=True),
    "messages": Dialect(
        "/v1/messages", _chat(False), lambda a: "".join(b.get("text", "") for b in a["content"])
    ),
    "messages, streamed": Dialect("/v1/messages", _chat(True), _block, streamed=True),
    "ollama chat": Dialect("/api/chat", _ollama(True, False), lambda a: a["message"]["content"]),
    "ollama chat, streamed": Dialect(
        "/api/chat", _ollama(True, True), lambda e: e["message"]["content"], True, True
    ),
    "ollama generate, streamed": Dialect(
        "/api/generate", _ollama(False, True), lambda e: e["response"], True, True
    ),
}


def questions(models: Sequence[str], count: int, salt: int = 0, longer: int = 1) -> list[Question]:
    """So many, of all models and dialects; always the same ones. Answers are `longer` times as
    long."""
    names = list(DIALECTS)
    return [
        Question(
            dialect=names[(number + number // len(names)) % len(names)],
            model=models[(number * 7 + salt) % len(models)],
            prompt=f"{OPENINGS[number % 5]} {SUBJECTS[number * 5 % 6]}. {number * 31 + salt}",
            tokens=longer * (8 + number * 37 % 41),
        )
        for number in range(count)
    ]


async def ask(client: httpx.AsyncClient, question: Question) -> Outcome:
    """Never raises for what a box or the fleet does wrong: that is the outcome."""
    dialect, outcome = DIALECTS[question.dialect], Outcome(question)
    pieces: list[str] = []
    try:
        async with client.stream(
            "POST", dialect.path, json=dialect.body(question), headers={"x-slo": "ttft=10s"}
        ) as answer:
            outcome.box = answer.headers.get("x-appliance-box", "")
            if answer.status_code != 200 or not dialect.streamed:
                body = await answer.aread()
                if answer.status_code != 200:
                    outcome.error = f"{answer.status_code}: {body.decode()}"
                    return outcome
                outcome.text = dialect.text(json.loads(body))
                return outcome
            async for line in answer.aiter_lines():
                said = line if dialect.lines else line.removeprefix("data: ")
                if not said or said == "[DONE]" or (said == line and not dialect.lines):
                    continue
                event = json.loads(said)
                if event.get("error"):
                    outcome.error = f"in the stream: {said}"
                    return outcome
                pieces.append(dialect.text(event))
    except httpx.HTTPError as error:
        outcome.error = f"cut off: {type(error).__name__}: {error}"
        return outcome
    outcome.text = "".join(pieces)
    return outcome
