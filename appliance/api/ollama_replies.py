"""What clients are answered in Ollama's dialect: one JSON object, or one a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from appliance.api.errors import ApiError
from appliance.api.errorshapes import ollama_error
from appliance.api.replies import Finish, Piece, Usage
from appliance.api.service import RequestTimes
from appliance.api.tools import called_object
from appliance.toolcalls import CallPiece

Endpoint: TypeAlias = Literal["chat", "generate"]


class _TokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class _Logprob(_TokenLogprob, kw_only=True):
    top_logprobs: list[_TokenLogprob] | UnsetType = UNSET


class _Function(msgspec.Struct, kw_only=True):
    index: int
    name: str
    arguments: dict[str, Any]


class _ToolCall(msgspec.Struct, kw_only=True):
    id: str
    function: _Function


class _Message(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[_ToolCall] | UnsetType = UNSET


class _Answer(msgspec.Struct, kw_only=True):
    """A line, or the whole answer. Durations are nanoseconds."""

    model: str
    created_at: str
    message: _Message | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    done: bool = False
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[_Logprob] | UnsetType = UNSET


class OllamaDialect:
    """One of both endpoints: one choice, as lines of JSON; the last has the metrics.

    `read_seconds` is what the request took before it was submitted; `times` tells of the rest.
    """

    media_type = "application/x-ndjson"
    keep_alive = b" "
    """White space before the next line: no reader of JSON sees it, and no line is added."""

    def __init__(
        self,
        model: str,
        endpoint: Endpoint,
        read_seconds: float,
        times: Callable[[], RequestTimes | None],
    ) -> None:
        self._head = (model, endpoint)
        self._read_seconds = read_seconds
        self._times = times
        self._finish: Finish = "stop"
        self._call: CallPiece | None = None
        """The call that the model is writing: clients get it when it is whole."""

    def beginning(self) -> bytes:
        return b""

    def opening(self, index: int) -> bytes:
        return b""

    def chunk(self, piece: Piece) -> bytes:
        self._finish = piece.finish or self._finish
        piece.calls = self._whole(piece.calls, piece.finish)
        if not (piece.text or piece.logged or piece.reasoning or piece.calls):
            return b""
        return _json.encode(_answer(*self._head, piece)) + b"\n"

    def ending(self, usage: Usage) -> bytes:
        last = Piece(0, "", finish=self._finish)
        return self.body([last], usage) + b"\n"

    def remark(self, text: str) -> bytes:
        return b""  # lines of JSON have no room for one

    def failure(self, error: ApiError) -> bytes:
        return ollama_error(error) + b"\n"

    def body(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        (piece,) = choices
        answer = _answer(*self._head, piece)
        answer.done = True
        answer.done_reason = "length" if piece.finish == "length" else "stop"
        times = self._times() or RequestTimes()
        loading = self._read_seconds + times.queue_seconds + times.load_seconds
        answer.load_duration = _nanoseconds(loading)
        answer.prompt_eval_duration = _nanoseconds(times.prefill_seconds)
        answer.eval_duration = _nanoseconds(times.decode_seconds + times.preempted_seconds)
        answer.total_duration = (
            answer.load_duration + answer.prompt_eval_duration + answer.eval_duration
        )
        answer.prompt_eval_count = usage.prompt_tokens
        answer.eval_count = usage.completion_tokens
        return _json.encode(answer)

    def _whole(self, pieces: Sequence[CallPiece], finish: Finish | None) -> list[CallPiece]:
        """Calls of which nothing more will come."""
        whole: list[CallPiece] = []
        for piece in pieces:
            if self._call is not None and piece.id is None:
                arguments = self._call.arguments + piece.arguments
                self._call = msgspec.structs.replace(self._call, arguments=arguments)
                continue
            if self._call is not None:
                whole.append(self._call)
            self._call = piece
        if finish is not None and self._call is not None:
            whole.append(self._call)
            self._call = None
        return whole


def placed(model: str, endpoint: Endpoint, reason: Literal["load", "unload"]) -> bytes:
    """The answer to a request without a prompt, which only concerns where the model is."""
    answer = _answer(model, endpoint, Piece(0, ""))
    answer.done, answer.done_reason = True, reason
    return _json.encode(answer)


def _answer(model: str, endpoint: Endpoint, piece: Piece) -> _Answer:
    chat = endpoint == "chat"
    return _Answer(
        model=model,
        created_at=timestamp(datetime.now(UTC)),
        message=_message(piece) if chat else UNSET,
        response=UNSET if chat else piece.text,
        thinking=UNSET if chat else piece.reasoning or UNSET,
        logprobs=_logprobs(piece) if piece.logged else UNSET,
    )


def _message(piece: Piece) -> _Message:
    """Raises `GenerationFailed` if the model called a tool with what is no object. A call that was
    cut off is none."""
    cut = piece.finish == "length"
    calls = [
        _ToolCall(
            id=call.id or "",
            function=_Function(index=call.index, name=call.name or "", arguments=arguments),
        )
        for call in piece.calls
        if (arguments := called_object(call.arguments, cut)) is not None
    ]
    return _Message(
        content=piece.text, thinking=piece.reasoning or UNSET, tool_calls=calls or UNSET
    )


def timestamp(moment: datetime) -> str:
    """RFC 3339 in UTC, as Ollama writes it."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _logprobs(piece: Piece) -> list[_Logprob]:
    return [
        _Logprob(
            token=token.text,
            logprob=token.logprob,
            bytes=list(token.raw),
            top_logprobs=[
                _TokenLogprob(token=top.text, logprob=top.logprob, bytes=list(top.raw))
                for top in token.top
            ]
            or UNSET,
        )
        for token in piece.logged or ()
    ]


_json = msgspec.json.Encoder()
