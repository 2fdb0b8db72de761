"""What clients are answered: OpenAI's response bodies and stream events, for chats and completions.

A `Dialect` turns the pieces of one answer into bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from appliance.api.errors import ApiError
from appliance.api.errorshapes import openai_error
from appliance.toolcalls import CallPiece

Finish: TypeAlias = Literal["stop", "length", "tool_calls"]


class LoggedToken(msgspec.Struct, frozen=True):
    """A token with its log probability. `offset`: characters of the tokens before it."""

    text: str
    raw: bytes
    logprob: float
    top: Sequence[LoggedToken] = ()
    offset: int = 0


class Piece(msgspec.Struct):
    """New text of one choice, or all of it. `logged` (log probabilities) and `ids` (of its tokens)
    are None when they are not asked for; `stop` is the stop string that ended it, if one did;
    `calls` are what of its text called tools, `reasoning` what the model thought before."""

    index: int
    text: str
    logged: list[LoggedToken] | None = None
    finish: Finish | None = None
    ids: list[int] | None = None
    stop: str | None = None
    calls: Sequence[CallPiece] = ()
    reasoning: str = ""


class CompletionDetails(msgspec.Struct, frozen=True):
    """What tokens of answers went to, as far as it is known."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of an answer, all its choices together; each prompt is counted once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    """Of models that reason."""

    @property
    def reasoning_tokens(self) -> int:
        details = self.completion_tokens_details
        return 0 if details is UNSET else details.reasoning_tokens


class Dialect(Protocol):
    """How an endpoint words one answer: whole, or as the events of a stream, in their frames.

    Any event may be empty; what is empty is not sent.
    """

    media_type: str
    """Of a stream."""
    keep_alive: bytes
    """What a stream holds while there is nothing to say, and clients pass over."""

    def beginning(self) -> bytes:
        """What a stream begins with, before there is any token."""

    def opening(self, index: int) -> bytes:
        """What comes before the first piece of a choice."""

    def chunk(self, piece: Piece) -> bytes: ...

    def ending(self, usage: Usage) -> bytes:
        """What comes after the last piece of the last choice."""

    def remark(self, text: str) -> bytes:
        """A line for whoever reads the stream itself, which clients pass over."""

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that cannot be completed."""

    def body(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """The whole answer, not streamed: JSON."""


class OpenAiDialect(ABC):
    """What the streams of OpenAI's dialects share: server-sent events without names."""

    media_type = "text/event-stream"
    keep_alive = b": keep-alive\n\n"

    def __init__(self, id: str, created: int, model: str, include_usage: bool) -> None:
        self._head = (id, created, model)
        self._include_usage = include_usage
        # With usage asked for, OpenAI puts a null one into every chunk but the last.
        self._no_usage = None if include_usage else UNSET

    def beginning(self) -> bytes:
        return self.keep_alive

    def opening(self, index: int) -> bytes:
        return b""

    def ending(self, usage: Usage) -> bytes:
        told = self._usage_chunk(usage) if self._include_usage else b""
        return told + b"data: [DONE]\n\n"

    def remark(self, text: str) -> bytes:
        return comment(text)

    def failure(self, error: ApiError) -> bytes:
        return _event(openai_error(error))

    @abstractmethod
    def _usage_chunk(self, usage: Usage) -> bytes: ...


def comment(text: str) -> bytes:
    """A comment among server-sent events."""
    return f": {text}\n\n".encode()


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


# --- chat ----------------------------------------------------------------------------------------


class _ChatLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[_ChatLogprob] | UnsetType = UNSET


class _ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[_ChatLogprob]


class _Function(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class _ToolCall(msgspec.Struct, kw_only=True):
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: _Function


class _ChatText(msgspec.Struct, kw_only=True):
    """A message, or what is new in one."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    """vLLM's name for it."""
    tool_calls: list[_ToolCall] | UnsetType = UNSET


class _ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: _ChatText | UnsetType = UNSET
    delta: _ChatText | UnsetType = UNSET
    logprobs: _ChatLogprobs | None = None
    finish_reason: Finish | None = None
    token_ids: list[int] | UnsetType = UNSET


class _Completion(msgspec.Struct, kw_only=True):
    """The envelope that both dialects share."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[_ChatChoice] | Sequence[_TextChoice]
    usage: Usage | UnsetType | None = UNSET


class ChatDialect(OpenAiDialect):
    """``/v1/chat/completions``."""

    def opening(self, index: int) -> bytes:
        delta = _ChatText(role="assistant", content="")
        return self._chunk([_ChatChoice(index=index, delta=delta)], self._no_usage)

    def chunk(self, piece: Piece) -> bytes:
        choice = _ChatChoice(
            index=piece.index,
            delta=_ChatText(
                content=piece.text or UNSET,
                reasoning=piece.reasoning or UNSET,
                tool_calls=_deltas(piece.calls),
            ),
            logprobs=_chat_logprobs(piece),
            finish_reason=piece.finish,
            token_ids=UNSET if piece.ids is None else piece.ids,
        )
        return self._chunk([choice], self._no_usage)

    def _usage_chunk(self, usage: Usage) -> bytes:
        return self._chunk([], usage)

    def body(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        answers = [
            _ChatChoice(
                index=piece.index,
                message=_message(piece),
                logprobs=_chat_logprobs(piece),
                finish_reason=piece.finish,
                token_ids=UNSET if piece.ids is None else piece.ids,
            )
            for piece in choices
        ]
        return self._encode("chat.completion", answers, usage)

    def _chunk(self, choices: list[_ChatChoice], usage: Usage | UnsetType | None) -> bytes:
        return _event(self._encode("chat.completion.chunk", choices, usage))

    def _encode(
        self, kind: str, choices: list[_ChatChoice], usage: Usage | UnsetType | None
    ) -> bytes:
        id, created, model = self._head
        return _json.encode(
            _Completion(
                id=id, object=kind, created=created, model=model, choices=choices, usage=usage
            )
        )


def _message(piece: Piece) -> _ChatText:
    """A whole message; there is no empty content beside calls or reasoning."""
    calls = [
        _ToolCall(
            id=call.id or UNSET,
            type="function",
            function=_Function(name=call.name or "", arguments=call.arguments),
        )
        for call in piece.calls
    ]
    return _ChatText(
        role="assistant",
        content=piece.text or None if calls or piece.reasoning else piece.text,
        reasoning=piece.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _deltas(calls: Sequence[CallPiece]) -> list[_ToolCall] | UnsetType:
    """What is new of calls; `type` comes with the id."""
    return [
        _ToolCall(
            index=call.index,
            id=call.id or UNSET,
            type="function" if call.id else UNSET,
            function=_Function(name=call.name or UNSET, arguments=call.arguments),
        )
        for call in calls
    ] or UNSET


def _chat_logprobs(piece: Piece) -> _ChatLogprobs | None:
    if piece.logged is None:
        return None
    return _ChatLogprobs(
        content=[
            _ChatLogprob(
                token=token.text,
                logprob=token.logprob,
                bytes=list(token.raw),
                top_logprobs=[
                    _ChatLogprob(token=top.text, logprob=top.logprob, bytes=list(top.raw))
                    for top in token.top
                ],
            )
            for token in piece.logged
        ]
    )


# --- completions ---------------------------------------------------------------------------------


class _TextLogprobs(msgspec.Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class _TextChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: _TextLogprobs | None = None
    finish_reason: Finish | None = None
    token_ids: list[int] | UnsetType = UNSET


class CompletionDialect(OpenAiDialect):
    """``/v1/completions``."""

    def chunk(self, piece: Piece) -> bytes:
        return _event(self._encode([piece], self._no_usage))

    def _usage_chunk(self, usage: Usage) -> bytes:
        return _event(self._encode([], usage))

    def body(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        return self._encode(choices, usage)

    def _encode(self, pieces: Sequence[Piece], usage: Usage | UnsetType | None) -> bytes:
        choices = [
            _TextChoice(
                index=piece.index,
                text=piece.text,
                logprobs=_text_logprobs(piece),
                finish_reason=piece.finish,
                token_ids=UNSET if piece.ids is None else piece.ids,
            )
            for piece in pieces
        ]
        id, created, model = self._head
        return _json.encode(
            _Completion(
                id=id,
                object="text_completion",
                created=created,
                model=model,
                choices=choices,
                usage=usage,
            )
        )


def _text_logprobs(piece: Piece) -> _TextLogprobs | None:
    if piece.logged is None:
        return None
    return _TextLogprobs(
        tokens=[token.text for token in piece.logged],
        token_logprobs=[token.logprob for token in piece.logged],
        top_logprobs=[
            {top.text: top.logprob for top in (*token.top, token)} for token in piece.logged
        ],
        text_offset=[token.offset for token in piece.logged],
    )


_json = msgspec.json.Encoder()
