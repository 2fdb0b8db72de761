"""Answers that are not streamed: the pieces of each choice become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from appliance.api.replies import LoggedToken, Piece
from appliance.api.stream import whole_answer
from appliance.toolcalls import CallPiece

LOGGED = LoggedToken("x", b"x", -1.0)


class Pieces:
    """Choices that come so; the dialect, too, which keeps what it is given."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = list(reversed(pieces))
        self.body_of: Sequence[Piece] = ()

    async def __aenter__(self) -> Pieces:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    @property
    def finished(self) -> bool:
        return not self._pieces

    async def pieces(self) -> list[Piece]:
        return [self._pieces.pop()]

    def usage(self) -> None:
        pass

    def body(self, choices: Sequence[Piece], usage: None) -> bytes:
        self.body_of = choices
        return b""


async def joined(pieces: Sequence[Piece]) -> Sequence[Piece]:
    given: Any = Pieces(pieces)
    await whole_answer(given, given)
    return given.body_of  # type: ignore[no-any-return]


async def test_pieces_of_choices_are_joined() -> None:
    """Each choice's by themselves, in their order; what nobody asked for stays None."""
    one, two = CallPiece(0, "id", "f", ""), CallPiece(0, None, None, "{}")

    whole = await joined(
        [
            Piece(1, "b"),
            Piece(0, "a", [LOGGED], ids=[1], calls=[one], reasoning="hm"),
            Piece(1, "", finish="length"),
            Piece(0, "c", [LOGGED], "stop", [2, 3], "!", [two], " so"),
        ]
    )

    assert whole == [
        Piece(0, "ac", [LOGGED] * 2, "stop", [1, 2, 3], "!", [one, two], "hm so"),
        Piece(1, "b", finish="length", calls=[]),
    ]
