"""What clients hear, in any dialect, whole or streamed: choices of text and tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

CANCELLED = "an operator cancelled the request"
"""What all dialects say to whose request was cancelled."""

_FINISHES = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "completed": "stop",
    "incomplete": "length",
}
"""The other dialects' words in OpenAI's."""


@dataclass
class Said:
    """One choice."""

    text: str = ""
    ids: list[int] | None = None
    """None where the dialect tells no tokens."""
    finish: str | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments of the tools that it called."""

    def begins(self, other: Said) -> bool:
        """Whether `other` may become of this when more comes."""
        return other.text.startswith(self.text) and (
            self.ids is None or other.ids is None or other.ids[: len(self.ids)] == self.ids
        )

    def is_like(self, other: Said) -> bool:
        """Whether both say the same, tokens included where both tell them."""
        same = (self.text, self.finish, self.calls) == (other.text, other.finish, other.calls)
        return same and (self.ids is None or other.ids is None or self.ids == other.ids)


def name_of(error: dict[str, Any]) -> str | None:
    """What a program tells an error by: its code, or its type where the code is the status."""
    code = error.get("code")
    return code if isinstance(code, str) else error.get("type")


class Heard:
    """An answer, while it comes."""

    def __init__(self) -> None:
        self.id: str | None = None
        self.choices: dict[int, Said] = {}
        self.vectors: list[list[float]] = []
        self.done = False
        self.error: str | None = None
        self.error_name: str | None = None
        """What a program tells it by; Ollama's errors have a text only."""
        self.pieces = 0
        self._rest = b""

    def whole(self, data: bytes) -> None:
        """An answer that is not streamed came."""
        self.event(json.loads(data))
        self.done = self.error is None

    def stream(self, data: bytes) -> None:
        """More of a stream came: events, or lines of JSON."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            told = line.strip().removeprefix(b"data: ")
            if told == b"[DONE]":
                self.done = True
            elif told.startswith(b"{"):
                self.pieces += 1
                self.event(json.loads(told))

    def event(self, told: dict[str, Any]) -> None:
        """One event, or the whole answer."""
        kind = told.get("type") or told.get("object") or ""
        if "error" in told and told["error"] is not None:
            error = told["error"]
            self.error = error if isinstance(error, str) else error["message"]
            if not isinstance(error, str):
                self.error_name = name_of(error)
        elif kind == "list":
            self.vectors = [item["embedding"] for item in told["data"]]
            self.done = True
        elif "choices" in told:
            self._openai(told)
        elif kind.startswith("response"):
            self._response(told)
        elif "done" in told:
            self._ollama(told)
        elif "embeddings" in told:
            self.vectors, self.done = told["embeddings"], True
        else:
            self._anthropic(kind, told)

    def _said(self, index: int = 0) -> Said:
        return self.choices.setdefault(index, Said())

    def _openai(self, told: dict[str, Any]) -> None:
        self.id = told["id"]
        for choice in told["choices"]:
            said = self._said(choice["index"])
            new = choice.get("delta") or choice.get("message") or choice
            said.text += new.get("content") or new.get("text") or ""
            said.finish = choice["finish_reason"] or said.finish
            for call in new.get("tool_calls") or ():
                self._call(said, call)
            if (ids := choice.get("token_ids")) is not None:
                said.ids = [*(said.ids or ()), *ids]

    def _call(self, said: Said, call: dict[str, Any]) -> None:
        function = call["function"]
        if function.get("name"):
            said.calls.append((function["name"], ""))
        name, arguments = said.calls[-1]
        said.calls[-1] = (name, arguments + function.get("arguments", ""))

    def _response(self, told: dict[str, Any]) -> None:
        kind = told.get("type", "response")
        whole = told.get("response", told)
        if kind.endswith("output_text.delta"):
            self._said().text += told["delta"]
        elif kind in ("response.completed", "response.incomplete", "response"):
            said = self._said()
            text = "".join(part["text"] for item in whole["output"] for part in item["content"])
            if kind != "response" and said.text != text:
                raise ValueError(f"the pieces of {whole['id']} are not what it ends with")
            said.text, said.finish = text, _FINISHES[whole["status"]]
            self.id, self.done = whole["id"], True
        elif kind == "response.failed":
            self.error = whole["error"]["message"]
        elif kind == "response.created":
            self.id = whole["id"]

    def _ollama(self, told: dict[str, Any]) -> None:
        said = self._said()
        said.text += told["message"]["content"] if "message" in told else told["response"]
        if told["done"]:
            self.done, said.finish = True, told["done_reason"]

    def _anthropic(self, kind: str, told: dict[str, Any]) -> None:
        said = self._said()
        if kind == "message_start":
            self.id = told["message"]["id"]
        elif kind == "content_block_delta":
            said.text += told["delta"]["text"]
        elif kind == "message_delta":
            said.finish = _FINISHES[told["delta"]["stop_reason"]]
        elif kind == "message_stop":
            self.done = True
        elif kind == "message":
            self.id, self.done = told["id"], True
            said.text = "".join(block["text"] for block in told["content"])
            said.finish = _FINISHES[told["stop_reason"]]
