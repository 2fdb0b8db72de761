"""``python -m tests.prose``: words that our prose does without, in code and documents.

They hide the subject of a sentence ("whoever asks" is a client, an instance or a thread), or are
home-made names of what has a common one. `make lint` runs this, which prints where each word is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PLACES: Final = ("appliance", "tui", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
WORDS: Final = {
    "whoever": "name the client, the request, the thread",
    "nobody": "name the client, the request, the thread",
    "somebody": "name the client, the request, the thread",
    "anybody": "name the client, the request, the thread",
    "told": "say what is reported, sent, shown or passed",
    "heard": "say what is received",
    "beside": "next to, besides, during, in the same step",
    "stands": "is, stays, means, replaces",
    "scribe": "batch writer",
    "foreman": "dispatcher",
}
_PATTERN: Final = re.compile(rf"\b({'|'.join([*WORDS, *map(str.title, WORDS)])})\b")

_QUOTED: Final = re.compile("(?<!`)`[^`]+`(?!`)")
"""Code, or an old message that a change log names."""


def findings(path: Path, text: str) -> Iterator[str]:
    """A line for each word of a file that is to be replaced, and what to write instead."""
    for number, line in enumerate(text.splitlines(), 1):
        for found in _PATTERN.finditer(_QUOTED.sub("", line)):
            word = found.group().lower()
            yield f"{path}:{number}: {word!r}: {WORDS[word]}"


def all_findings() -> Iterator[str]:
    """Of everything that people read."""
    for place in (ROOT / place for place in PLACES):
        files = [place] if place.is_file() else sorted(place.rglob("*"))
        for file in files:
            if file.suffix in {".py", ".md"}:
                yield from findings(file.relative_to(ROOT), file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    found = list(all_findings())
    sys.stderr.write("".join(f"{line}\n" for line in found))
    sys.exit(bool(found))
