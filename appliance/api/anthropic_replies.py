"""What clients are answered in Anthropic's dialect: a message, whole or as typed events."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from appliance.api.errors import ApiError
from appliance.api.errorshapes import anthropic_error
from appliance.api.replies import Piece, Usage, comment
from appliance.api.tools import called_object
from appliance.toolcalls import CallPiece

_StopReason: TypeAlias = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class _Usage(msgspec.Struct, kw_only=True):
    input_tokens: int
    cache_creation_input_tokens: None = None
    cache_read_input_tokens: None = None
    output_tokens: int


class _Text(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class _Thinking(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""
    """Nothing is signed here."""


class _ToolUse(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


_Block: TypeAlias = _Text | _Thinking | _ToolUse


class _Message(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    content: Sequence[_Block]
    model: str
    stop_reason: _StopReason | None = None
    stop_sequence: str | None = None
    usage: _Usage


class _MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: _Message


class _BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: _Block


class _TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class _ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class _InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


_Delta: TypeAlias = _TextDelta | _ThinkingDelta | _InputDelta


class _BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: _Delta


class _BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class _Stop(msgspec.Struct):
    stop_reason: _StopReason
    stop_sequence: str | None


class _MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: _Stop
    usage: _Usage


class MessagesDialect:
    """``/v1/messages``: one choice, of blocks: thoughts, text, and calls of tools.

    `prompt_tokens` is told when a stream begins. With `cut` the end of the context is nearer than
    the client's limit. `request` is the request's id, for errors.
    """

    media_type = "text/event-stream"
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, id: str, model: str, prompt_tokens: int, cut: bool, request: str) -> None:
        self._id = id
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._full: _StopReason = "model_context_window_exceeded" if cut else "max_tokens"
        self._request = request
        self._stop = _Stop("end_turn", None)
        self._blocks = 0
        """Blocks of the stream that were begun."""
        self._kind: type[_Block] | None = None
        """Of the block that is open."""
        self._called = False

    def beginning(self) -> bytes:
        usage = _Usage(input_tokens=self._prompt_tokens, output_tokens=0)
        message = _Message(id=self._id, content=[], model=self._model, usage=usage)
        return _event("message_start", _MessageStart(message)) + self.keep_alive

    def opening(self, index: int) -> bytes:
        return b""  # blocks open with what they hold

    def chunk(self, piece: Piece) -> bytes:
        events = []
        calls = deque(piece.calls)
        while calls and calls[0].id is None:  # more of the call that is open comes before the text
            events.append(self._more(_InputDelta(calls.popleft().arguments)))
        if piece.reasoning:
            if self._kind is not _Thinking:
                events.append(self._open(_Thinking(thinking="")))
            events.append(self._more(_ThinkingDelta(piece.reasoning)))
        if piece.text:
            if self._kind is not _Text:
                events.append(self._open(_Text(text="")))
            events.append(self._more(_TextDelta(piece.text)))
        for call in calls:
            if call.id is not None:
                self._called = True
                events.append(self._open(_ToolUse(id=call.id, name=call.name or "", input={})))
            if call.arguments:
                events.append(self._more(_InputDelta(call.arguments)))
        if piece.finish is not None:
            self._stop = self._stopped(piece, self._called)
            if not self._blocks:
                events.append(self._open(_Text(text="")))
            events.append(self._close())
        return b"".join(events)

    def ending(self, usage: Usage) -> bytes:
        end = _event("message_delta", _MessageDelta(self._stop, _counted(usage)))
        return end + b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    def remark(self, text: str) -> bytes:
        return comment(text)

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + anthropic_error(error, self._request) + b"\n\n"

    def body(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        (piece,) = choices
        stop = self._stopped(piece, bool(piece.calls))
        blocks: list[_Block] = []
        if piece.reasoning:
            blocks.append(_Thinking(thinking=piece.reasoning))
        if piece.text:
            blocks.append(_Text(text=piece.text))
        blocks += [_used(call, piece.finish == "length") for call in piece.calls]
        return _json.encode(
            _Message(
                id=self._id,
                content=blocks or [_Text(text="")],
                model=self._model,
                stop_reason=stop.stop_reason,
                stop_sequence=stop.stop_sequence,
                usage=_counted(usage),
            )
        )

    def _open(self, block: _Block) -> bytes:
        """Begin a block, behind the one before."""
        closed = b"" if self._kind is None else self._close()
        self._kind = type(block)
        self._blocks += 1
        return closed + _event("content_block_start", _BlockStart(self._blocks - 1, block))

    def _more(self, delta: _Delta) -> bytes:
        return _event("content_block_delta", _BlockDelta(self._blocks - 1, delta))

    def _close(self) -> bytes:
        self._kind = None
        return _event("content_block_stop", _BlockStop(self._blocks - 1))

    def _stopped(self, piece: Piece, called: bool) -> _Stop:
        if piece.finish == "length":
            return _Stop(self._full, None)
        if piece.stop is not None:
            return _Stop("stop_sequence", piece.stop)
        return _Stop("tool_use" if called else "end_turn", None)


def _used(call: CallPiece, cut: bool) -> _ToolUse:
    """A whole call; of one that was cut off, all but its input. Raises `GenerationFailed` if the
    model wrote no object."""
    asked = called_object(call.arguments, cut) or {}
    return _ToolUse(id=call.id or "", name=call.name or "", input=asked)


def _counted(usage: Usage) -> _Usage:
    return _Usage(input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens)


def _event(name: str, data: msgspec.Struct) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _json.encode(data))


_json = msgspec.json.Encoder()
