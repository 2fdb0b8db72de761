"""Lines of server-sent events, wherever the bytes they come in are cut."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from appliance.client import checked, event_lines, event_lines_async

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


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (
            401,
            "error: no key; put the key into $APPLIANCE_API_KEY, or make one for operators with"
            " `appliance key create NAME --scope admin`\n",
        ),
        (403, "error: no key\n"),
    ],
)
def test_a_missing_key_has_a_remedy(
    status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the daemon says is for clients in general; a command says where its key goes."""
    request = httpx.Request("GET", "http://127.0.0.1:1/api/status")
    answer = httpx.Response(status, json={"error": {"message": "no key"}}, request=request)

    with pytest.raises(SystemExit) as ended:
        checked(answer)

    assert ended.value.code == 1
    assert capsys.readouterr().err == said
