"""Links of our documents lead to files and headings that exist, and the README lists every page."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.prose import ROOT

DOCS = ROOT / "docs"
PLACES = ("docs", "benchmarks", "packaging", "tests")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(one for place in PLACES for one in (ROOT / place).rglob("*.md"))]
)
LINK = re.compile(
    r"\]\(<?([^()\s>]+)>?(?:\s+\"[^\"]*\")?\)|^\[[^\]]+\]: +(\S+)|(?:href|src)=\"([^\"]+)\"", re.M
)
HEADING = re.compile(r"^#+ (.*?)#*$", re.MULTILINE)
NAMED = re.compile(r'<a (?:id|name)="([^"]+)">')
CODE = re.compile(r"^ *(```+).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
QUOTED = re.compile(r"(`+)[^`\n](?:.*?[^`])?\1(?!`)")


@cache
def text_of(page: Path) -> str:
    """Without the blocks of code, whose lines may look like headings and links."""
    return CODE.sub("", page.read_text(encoding="utf-8"))


@cache
def headings(page: Path) -> Counter[str]:
    """The fragments of its headings, as Git hosts derive them, and how many headings have each."""
    titles = (
        re.sub(r"\]\([^()]*\)", "", title.lower()) for title in HEADING.findall(text_of(page))
    )
    words = (re.sub(r"[^\w\- ]", "", title) for title in titles)
    return Counter(word.strip().replace(" ", "-") for word in words)


@cache
def names(page: Path) -> Counter[str]:
    """The fragments that it names itself."""
    return Counter(NAMED.findall(text_of(page)))


def links(page: Path) -> list[tuple[Path, str]]:
    """The file and the fragment of each link within the repository."""
    found = []
    for link in ("".join(one) for one in LINK.findall(QUOTED.sub("", text_of(page)))):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, fragment = link.partition("#")
        found.append(((page.parent / path).resolve() if path else page, fragment))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """To files, to folders that have a page, and to the only heading or name of a fragment."""
    for target, fragment in links(page):
        link = f"{page.name} links to {target.relative_to(ROOT)}#{fragment}"
        assert (target / "README.md" if target.is_dir() else target).is_file(), link
        if fragment:
            assert target.suffix == ".md", f"{link}, and only pages have headings"
            assert headings(target)[fragment] + names(target)[fragment] == 1, link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_of_anchors_are_unique(page: Path) -> None:
    """Also among its headings: the browser goes to the first."""
    assert [name for name, count in names(page).items() if count + headings(page)[name] > 1] == []


def test_the_readme_lists_every_page() -> None:
    """Each page of docs/ itself; those of its folders are listed by the folders' own indices."""
    listed = {target for target, _ in links(ROOT / "README.md")}
    pages = set(DOCS.glob("*.md"))

    assert sorted(page.name for page in pages - listed) == []
