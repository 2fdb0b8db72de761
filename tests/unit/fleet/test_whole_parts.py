"""Parts of a stream pass when they are whole, whatever pieces they come in."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.fleet import whole_parts
from appliance.fleet.whole_parts import EVENT_ENDS, LINE_ENDS, WholeParts

ENDS = st.sampled_from([LINE_ENDS, EVENT_ENDS])
PIECES = st.lists(
    st.sampled_from([b"", b" ", b"\n", b"\r\n", b"\r", b"x", b"xy ", b"a\nb", b"\n\n", b" \nx\n "])
)


def after_last_end(data: bytes, ends: tuple[bytes, ...]) -> bytes:
    return re.split(b"|".join(ends), data)[-1]


@given(ENDS, PIECES)
def test_whole_parts_and_white_space_pass_at_once_and_nothing_else(
    ends: tuple[bytes, ...], pieces: list[bytes]
) -> None:
    parts, came, passed = WholeParts(ends), b"", b""
    for piece in pieces:
        came += piece
        passed += parts.ready(piece)
        held = came[len(passed) :]
        assert came == passed + held
        assert not after_last_end(passed, ends).strip()
        assert held == b"" or (held.strip() and not any(end in held for end in ends))
        assert not parts.begun
    assert passed + parts.rest() == came
    assert parts.rest() == b""


@given(ENDS, PIECES)
def test_long_parts_pass_in_pieces(ends: tuple[bytes, ...], pieces: list[bytes]) -> None:
    """Then an error has to end the part that has begun."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_parts, "MOST_HELD_BYTES", 2)
        parts, came, passed = WholeParts(ends), b"", b""
        for piece in pieces:
            came += piece
            passed += parts.ready(piece)
            assert came.startswith(passed)
            assert len(came) - len(passed) <= 2
            if ends == LINE_ENDS:
                assert parts.begun == bool(after_last_end(passed, ends).strip())
        assert passed + parts.rest() == came
