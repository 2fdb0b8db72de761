"""What ``/v1/responses`` answers: thoughts, a message, calls of tools; whole or as typed events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from appliance.api.errors import ApiError
from appliance.api.replies import Piece, Usage, comment
from appliance.toolcalls import CallPiece

Status: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]
_Event: TypeAlias = tuple[str, dict[str, Any]]
"""Its type, and its fields but where it is and its number."""


class _Item(ABC):
    """An item of the output while its text comes in."""

    delta: ClassVar[str]
    """The type of the events that add to it."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.text = ""

    @abstractmethod
    def item(self, status: Status) -> dict[str, Any]:
        """As it stands."""

    def opened(self) -> list[_Event]:
        """What follows when it was added."""
        return []

    @abstractmethod
    def closed(self) -> list[_Event]:
        """What comes before it is done."""

    def added(self, text: str) -> _Event:
        self.text += text
        return self.delta, {"delta": text}


class _Parted(_Item):
    """An item of one part."""

    @abstractmethod
    def part(self, text: str) -> dict[str, Any]: ...

    def opened(self) -> list[_Event]:
        return [("response.content_part.added", {"content_index": 0, "part": self.part("")})]

    def added(self, text: str) -> _Event:
        kind, fields = super().added(text)
        return kind, {"content_index": 0, **fields}

    def closed(self) -> list[_Event]:
        done = self.delta.replace(".delta", ".done")
        return [
            (done, {"content_index": 0, "text": self.text}),
            ("response.content_part.done", {"content_index": 0, "part": self.part(self.text)}),
        ]


class _Message(_Parted):
    delta = "response.output_text.delta"

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def item(self, status: Status) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self.id,
            "status": status,
            "role": "assistant",
            "content": [] if status == "in_progress" else [self.part(self.text)],
        }

    def added(self, text: str) -> _Event:
        kind, fields = super().added(text)
        return kind, {**fields, "logprobs": []}

    def closed(self) -> list[_Event]:
        (kind, fields), last = super().closed()
        return [(kind, {**fields, "logprobs": []}), last]


class _Reasoning(_Parted):
    delta = "response.reasoning_text.delta"

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def item(self, status: Status) -> dict[str, Any]:
        return {
            "type": "reasoning",
            "id": self.id,
            "summary": [],
            "content": [] if status == "in_progress" else [self.part(self.text)],
            "status": status,
        }


class _Call(_Item):
    delta = "response.function_call_arguments.delta"

    def __init__(self, id: str, call: CallPiece) -> None:
        super().__init__(id)
        self._call_id, self._name = call.id or id, call.name or ""

    def item(self, status: Status) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": self.id,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
            "status": status,
        }

    def closed(self) -> list[_Event]:
        done = "response.function_call_arguments.done"
        return [(done, {"name": self._name, "arguments": self.text})]


class ResponseDialect:
    """Implements `appliance.api.replies.Dialect`. Events of a stream are numbered."""

    media_type = "text/event-stream"
    keep_alive = b": keep-alive\n\n"

    def __init__(self, name: str, created: int, model: str, echo: Mapping[str, Any]) -> None:
        """`name` is what the ids are made of, `echo` what every answer says of its request."""
        self._id, self._name = f"resp_{name}", name
        self._head = {"object": "response", "created_at": created, "model": model, **echo}
        self._events = 0
        self._items: list[_Item] = []
        self._done: list[dict[str, Any]] = []
        """Items of which nothing more will come."""
        self._finish: str | None = None

    def beginning(self) -> bytes:
        whole = self._response("in_progress", None)
        return self._event("response.created", response=whole) + self._event(
            "response.in_progress", response=whole
        )

    def opening(self, index: int) -> bytes:
        return b""  # items are added with what they hold

    def chunk(self, piece: Piece) -> bytes:
        events = []
        self._finish = self._finish or piece.finish
        calls = list(piece.calls)
        while calls and calls[0].id is None:  # more of the call that is open comes before the text
            events.append(self._more(calls.pop(0).arguments))
        if piece.reasoning:
            if not self._is_open(_Reasoning):
                events.append(self._open(_Reasoning(self._new_id("rs"))))
            events.append(self._more(piece.reasoning))
        if piece.text:
            if not self._is_open(_Message):
                events.append(self._open(_Message(self._new_id("msg"))))
            events.append(self._more(piece.text))
        for call in calls:
            if call.id is not None:
                events.append(self._open(_Call(self._new_id("fc"), call)))
            if call.arguments:
                events.append(self._more(call.arguments))
        if piece.finish is not None:
            if not self._items:
                events.append(self._open(_Message(self._new_id("msg"))))
            events.append(self._close(_status(piece.finish)))
        return b"".join(events)

    def ending(self, usage: Usage) -> bytes:
        status = _status(self._finish)
        return self._event(f"response.{status}", response=self._response(status, usage))

    def remark(self, text: str) -> bytes:
        return comment(text)

    def failure(self, error: ApiError) -> bytes:
        self._done = []
        whole = self._response("failed", None)
        whole["error"] = {"code": "server_error", "message": error.body.error.message}
        return self._event("response.failed", response=whole)

    def body(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        (piece,) = choices
        self.chunk(piece)  # whoever reads it whole gets the items that a stream would end with
        return msgspec.json.encode(self._response(_status(piece.finish), usage))

    def _new_id(self, kind: str) -> str:
        """Ids of the items are all different."""
        return f"{kind}_{self._name}" + (f"_{len(self._items)}" if self._items else "")

    def _is_open(self, kind: type[_Item]) -> bool:
        return len(self._done) < len(self._items) and isinstance(self._items[-1], kind)

    def _open(self, item: _Item) -> bytes:
        """Add an item, behind the one before."""
        closed = self._close("completed") if len(self._done) < len(self._items) else b""
        self._items.append(item)
        added = self._event(
            "response.output_item.added", **self._place(), item=item.item("in_progress")
        )
        return closed + added + self._told(item.opened())

    def _more(self, text: str) -> bytes:
        return self._told([self._items[-1].added(text)])

    def _close(self, status: Status) -> bytes:
        item = self._items[-1]
        told = self._told(item.closed())
        self._done.append(item.item(status))
        return told + self._event("response.output_item.done", **self._place(), item=self._done[-1])

    def _told(self, events: Sequence[_Event]) -> bytes:
        """Events about the item that is open."""
        place = {"item_id": self._items[-1].id, **self._place()} if self._items else {}
        return b"".join(self._event(kind, **place, **fields) for kind, fields in events)

    def _place(self) -> dict[str, int]:
        return {"output_index": len(self._items) - 1}

    def _response(self, status: Status, usage: Usage | None) -> dict[str, Any]:
        cut = status == "incomplete"
        return {
            "id": self._id,
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._done,
            "usage": None if usage is None else _usage(usage),
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = msgspec.json.encode({"type": kind, "sequence_number": self._events, **fields})
        self._events += 1
        return f"event: {kind}\ndata: ".encode() + data + b"\n\n"


def _status(finish: str | None) -> Literal["completed", "incomplete"]:
    return "incomplete" if finish == "length" else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
