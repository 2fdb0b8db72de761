"""Connections whose requests never become whole."""

from __future__ import annotations

from tests.hostile.bodies import CHAT, MOST_BODY_BYTES

HALF_SENT = (
    b"",
    b"GET /livez HTTP/1.1\r\nHost: x",
    b"POST /v1/completions HTTP/1.1\r\nHost: x",
)
"""Nothing at all; a head that does not end for the core, and one for a front end."""


def half_sent_body(secret: str) -> bytes:
    """A chat request of a key, but for the last byte of the largest body."""
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {secret}\r\ncontent-length: {MOST_BODY_BYTES}\r\n\r\n"
    )
    return head.encode() + b" " * (MOST_BODY_BYTES - 1)
