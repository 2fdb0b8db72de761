"""What the daemon and its interpreter say to each other, in `wire`'s frames; see decision 23."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from appliance import wire
from appliance.engines.protocol import Guide
from appliance.toolcalls import Heard


class ParserUnusable(Exception):
    """The parser cannot be used with this model, or there is none of that name."""


class Parsers(msgspec.Struct, frozen=True):
    """vLLM's names of what reads a model's answers; None for what it has not."""

    tool: str | None = None
    reasoning: str | None = None


class Begin(msgspec.Struct, frozen=True, tag=True):
    """A chat that may call tools, or reason. `chat` is the request as vLLM takes it, JSON;
    `parsers` are those of its model. Each of its `choices` is read by itself."""

    number: int
    path: str
    parsers: Parsers
    chat: bytes
    prompt: tuple[int, ...]
    choices: int


class Hear(msgspec.Struct, frozen=True, tag=True):
    """More text of a choice, and the tokens that it came from; all of it, if the chat is not
    streamed."""

    number: int
    choice: int
    text: str
    tokens: tuple[int, ...]
    finished: bool


class Forget(msgspec.Struct, frozen=True, tag=True):
    """The chat is over."""

    number: int


class Begun(msgspec.Struct, frozen=True, tag=True):
    """What the chat's answers must follow, if anything, and whether their text has to hold special
    tokens. `refused`: the request asks for what cannot be; `fault`: the parser cannot be used."""

    number: int
    guide: Guide | None = None
    special_tokens: bool = False
    refused: str | None = None
    fault: str | None = None


class Understood(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Hear`; or the parser failed."""

    number: int
    heard: Heard
    failed: str | None = None


Down: TypeAlias = Begin | Hear | Forget
Up: TypeAlias = Begun | Understood


def decoder_of_questions() -> wire.Decoder[Down]:
    """For the interpreter."""
    return wire.Decoder(msgspec.msgpack.Decoder(Down))


def decoder_of_answers() -> wire.Decoder[Up]:
    """For the daemon."""
    return wire.Decoder(msgspec.msgpack.Decoder(Up))
