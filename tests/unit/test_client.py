"""Lines of server-sent events, wherever the bytes they come in are cut."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from appliance.client import event_lines, event_lines_async

STREAM = ": keep-alive\n\ndata: ä\u2028b\u2029c\x85d\x0be\rf\n\nbegun".encode()
LINES = [": keep-alive", "", "data: ä\u2028b\u2029c\x85d\x0be\rf", ""]
"""What has no end is no line."""


@pytest.mark.parametrize("size", [1, 2, 7, len(STREAM)])
async def test_only_a_line_feed_ends_a_line(size: int) -> None:
    """Whatever else ends lines for Unicode; a character may come in two pieces."""
    pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]

    async def come() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    assert list(event_lines(pieces)) == LINES
    assert [line async for line in event_lines_async(come())] == LINES


def test_what_is_not_utf_8_is_replaced() -> None:
    """It ends nothing."""
    assert list(event_lines([b"data: \xff\n"])) == ["data: \ufffd"]
