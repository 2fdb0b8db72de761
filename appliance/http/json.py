"""Answers that are one JSON document."""

from __future__ import annotations

import msgspec
from litestar.response.base import ASGIResponse


def json_answer(
    body: object, status: int = 200, headers: dict[str, str] | None = None
) -> ASGIResponse:
    """`body` as JSON; what is JSON already is a `msgspec.Raw`."""
    return ASGIResponse(
        body=msgspec.json.encode(body),
        status_code=status,
        media_type="application/json",
        headers=headers,
    )
