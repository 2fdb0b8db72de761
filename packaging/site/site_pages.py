"""Which files of the repository the documents' site has, and where in it each is.

The site has the pages of ``docs/`` and of the repository's root, and what they lead to: other
pages, sources, pictures. So no link of a page is dead on it. Paths are relative to the repository,
with slashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import unquote, urlsplit

HISTORY: Final = ("docs/decisions/", "CHANGELOG.md")
"""Pages of what was, rather than of what is."""

OTHERS: Final = "repository"
"""The folder of the site for files that are outside of ``docs/``."""

_CODE: Final = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_LINK: Final = re.compile(r"\]\(([^()\s]+)\)")
_PICTURES: Final = frozenset({".svg", ".png"})
_FONTS: Final = re.compile(r"@font-face\s*\{[^}]*\}")


def links(page: Path) -> Iterator[str]:
    """What the links and pictures of a Markdown page lead to, without addresses of other hosts."""
    for link in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        parts = urlsplit(link)
        if parts.path and not parts.scheme and not parts.netloc:
            yield unquote(parts.path)


def files(root: Path) -> list[str]:
    """All files of the site, sorted. A link to a folder leads to its ``README.md``."""
    found: set[Path] = set()
    waiting = [path.resolve() for path in (*root.glob("*.md"), *(root / "docs").rglob("*.md"))]
    while waiting:
        path = waiting.pop()
        if path in found or not path.is_relative_to(root.resolve()) or not path.is_file():
            continue
        found.add(path)
        if path.suffix == ".md":
            for link in links(path):
                target = (path.parent / link).resolve()
                waiting.append(target / "README.md" if target.is_dir() else target)
    return sorted(path.relative_to(root.resolve()).as_posix() for path in found)


def folders(pages: list[str]) -> dict[str, str]:
    """The page of each folder that has one: what a link to the folder leads to."""
    return {str(PurePosixPath(page).parent): page for page in pages if page.endswith("/README.md")}


def place(file: str) -> str:
    """Where in the site a file is: pages as HTML, sources as text that a browser shows."""
    path = PurePosixPath(file)
    path = path.relative_to("docs") if path.parts[0] == "docs" else OTHERS / path
    if path.suffix == ".md":
        name = "index" if path.name == "README.md" and path.parts[0] != OTHERS else path.stem
        return str(path.with_name(f"{name}.html"))
    return str(path) if path.suffix in _PICTURES else f"{path}.txt"


def without_fonts(picture: str) -> str:
    """An SVG without the fonts that it would have a browser fetch from another host."""
    return _FONTS.sub("", picture)
