"""Links of our documents lead to files and headings that exist, and the README lists every page."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.prose import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
NAMED = re.compile(r'<a id="([^"]+)">')
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


@cache
def text_of(page: Path) -> str:
    """Without the blocks of code, whose lines may look like headings and links."""
    return CODE.sub("", page.read_text(encoding="utf-8"))


@cache
def anchors(page: Path) -> frozenset[str]:
    """The fragments of its headings, as Git hosts derive them, and those that it names itself."""
    text = text_of(page)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return frozenset(word.strip().replace(" ", "-") for word in words).union(NAMED.findall(text))


def links(page: Path) -> list[tuple[Path, str]]:
    """The file and the fragment of each link within the repository."""
    found = []
    for link in LINK.findall(text_of(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, fragment = link.partition("#")
        found.append(((page.parent / path).resolve() if path else page, fragment))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, fragment in links(page):
        assert target.exists(), f"{page.name} links to {target.relative_to(ROOT)}"
        if fragment and target.suffix == ".md":
            assert fragment in anchors(target), f"{page.name} links to {target.name}#{fragment}"


def test_the_readme_lists_every_page() -> None:
    """Each page of docs/ itself; those of its folders are listed by the folders' own indices."""
    listed = {target for target, _ in links(ROOT / "README.md")}
    pages = set(DOCS.glob("*.md"))

    assert sorted(page.name for page in pages - listed) == []
