"""Values of a body that media are found in: fields that are not decoded yet, and data URLs."""

from __future__ import annotations

from typing import Any

import msgspec


def decoded(raw: object) -> Any:
    """A field's value; None if it is not there or cannot be read, which vLLM says."""
    if not isinstance(raw, msgspec.Raw):
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def base64_in(url: str) -> str | None:
    """What a data URL has in base64; None if it has none."""
    head, comma, data = url.partition(",")
    return data if comma and head.lower().endswith(";base64") else None
