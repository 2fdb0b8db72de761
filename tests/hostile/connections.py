"""Connections that ask for nothing, and stay."""

from __future__ import annotations

HALF_SENT = (
    b"",
    b"GET /livez HTTP/1.1\r\nHost: x",
    b"POST /v1/completions HTTP/1.1\r\nHost: x",
)
"""Nothing at all; a head that does not end for the core, and one for a front end."""
