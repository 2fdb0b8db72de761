"""What to write instead of a word that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that was probably meant, or all there are."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"use {alternatives(known)}" if known else "remove it"


def alternatives(words: Iterable[object]) -> str:
    """ "a, b or c"."""
    *rest, last = [str(word) for word in words]
    return f"{', '.join(rest)} or {last}" if rest else last
