"""JSON merge patches (RFC 7396): what has to be said so that one document becomes another."""

from __future__ import annotations

from typing import Any, TypeAlias

Document: TypeAlias = dict[str, Any]


def difference(before: Document, after: Document) -> Document:
    """The patch that makes `after` of `before`; empty if they are equal.

    Neither may hold nulls, which in a patch say that a member is gone: see `without_nulls`. Lists
    are replaced as a whole. O(both documents).
    """
    patch: Document = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        if value is old:
            continue
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := difference(old, value):
                patch[key] = inner
        elif value != old:
            patch[key] = value
    return patch


def without_nulls(document: Document) -> Document:
    """The same document, less the members that are null, however deep; lists are left as they
    are."""
    return {
        key: without_nulls(value) if isinstance(value, dict) else value
        for key, value in document.items()
        if value is not None
    }
