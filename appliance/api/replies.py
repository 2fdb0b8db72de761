"""What clients are answered: OpenAI's response bodies and stream chunks, for chats and completions.

A `Dialect` turns pieces of choices into bytes; it keeps no state besides the constant fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

Finish: TypeAlias = Literal["stop", "length"]


class LoggedToken(msgspec.Struct, frozen=True):
    """A token with its log probability. `offset`: characters of the tokens before it."""

    text: str
    raw: bytes
    logprob: float
    top: Sequence[LoggedToken] = ()
    offset: int = 0


class Piece(msgspec.Struct):
    """New text of one choice, or all of it. `logged` (log probabilities) and `ids` (of its tokens)
    are None when they are not asked for."""

    index: int
    text: str
    logged: list[LoggedToken] | None = None
    finish: Finish | None = None
    ids: list[int] | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of an answer, all its choices together; each prompt is counted once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Dialect(Protocol):
    """How an endpoint words its answers. All methods return JSON."""

    def opening(self, index: int) -> bytes | None:
        """A chunk before the first piece of a choice, if the dialect has one."""

    def chunk(self, piece: Piece) -> bytes: ...

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def body(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """The whole answer, not streamed."""


# --- chat ----------------------------------------------------------------------------------------


class _ChatLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[_ChatLogprob] | UnsetType = UNSET


class _ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[_ChatLogprob]


class _ChatText(msgspec.Struct, kw_only=True):
    """A message, or what is new in one."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


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


class ChatDialect:
    """``/v1/chat/completions``."""

    def __init__(self, id: str, created: int, model: str, include_usage: bool) -> None:
        self._head = (id, created, model)
        # With usage asked for, OpenAI puts a null one into every chunk but the last.
        self._no_usage = None if include_usage else UNSET

    def opening(self, index: int) -> bytes:
        delta = _ChatText(role="assistant", content="")
        return self._chunk([_ChatChoice(index=index, delta=delta)], self._no_usage)

    def chunk(self, piece: Piece) -> bytes:
        choice = _ChatChoice(
            index=piece.index,
            delta=_ChatText(content=piece.text) if piece.text else _ChatText(),
            logprobs=_chat_logprobs(piece),
            finish_reason=piece.finish,
            token_ids=UNSET if piece.ids is None else piece.ids,
        )
        return self._chunk([choice], self._no_usage)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._chunk([], usage)

    def body(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        answers = [
            _ChatChoice(
                index=piece.index,
                message=_ChatText(role="assistant", content=piece.text),
                logprobs=_chat_logprobs(piece),
                finish_reason=piece.finish,
                token_ids=UNSET if piece.ids is None else piece.ids,
            )
            for piece in choices
        ]
        return self._encode("chat.completion", answers, usage)

    def _chunk(self, choices: list[_ChatChoice], usage: Usage | UnsetType | None) -> bytes:
        return self._encode("chat.completion.chunk", choices, usage)

    def _encode(
        self, kind: str, choices: list[_ChatChoice], usage: Usage | UnsetType | None
    ) -> bytes:
        id, created, model = self._head
        return _json.encode(
            _Completion(
                id=id, object=kind, created=created, model=model, choices=choices, usage=usage
            )
        )


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


class CompletionDialect:
    """``/v1/completions``."""

    def __init__(self, id: str, created: int, model: str, include_usage: bool) -> None:
        self._head = (id, created, model)
        self._no_usage = None if include_usage else UNSET

    def opening(self, index: int) -> None:
        return None

    def chunk(self, piece: Piece) -> bytes:
        return self._encode([piece], self._no_usage)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._encode([], usage)

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
