"""Checks the built site: ``python packaging/site/site_check.py SITE`` prints what is wrong with it.

Nothing in it has a browser ask another host, no link within it is dead, and the search knows every
page. `make docs` runs this after MkDocs, which checks links of pages but not those of the theme.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

_LOADED: Final = {
    **dict.fromkeys(
        ("audio", "embed", "iframe", "img", "input", "script", "source", "video"), "src"
    ),
    **{"link": "href", "object": "data", "image": "href", "use": "href"},
}
"""Elements that a browser loads something for, and the attribute that says what."""

_IN_STYLES: Final = re.compile(r"url\(\s*[\"']?([^\"')]+)|@import\s+[\"']([^\"']+)")
_DRAWING: Final = "assets/mermaid.js"


class Page(HTMLParser):
    """What one page loads, what it links to, and the names in it that links may lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = set()
        self.has_diagrams = False
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if address := values.get(_LOADED.get(tag, "")):
            self.loaded.append(address)
        self.loaded += [one.split()[0] for one in values.get("srcset", "").split(",") if one]
        self.loaded += addresses_in_styles(values.get("style", ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        self.names |= {values[key] for key in ("id", "name") if key in values}
        self.has_diagrams |= "mermaid" in values.get("class", "").split()
        self._in_style = tag == "style"

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.loaded += addresses_in_styles(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False


def addresses_in_styles(text: str) -> list[str]:
    """What a style sheet loads: pictures, fonts, other sheets."""
    return [one or other for one, other in _IN_STYLES.findall(text)]


def problems(site: Path) -> Iterator[str]:
    """A line for each thing that is wrong."""
    site = site.resolve()
    pages = {
        path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
    }
    for name, page in pages.items():
        for address in page.loaded:
            yield from _problems_of_loaded(site, name, address)
        for link in page.links:
            yield from _problems_of_link(site, pages, name, link)
        if page.has_diagrams and not any(one.endswith(_DRAWING) for one in page.loaded):
            yield f"{name}: has diagrams, and the theme would fetch what draws them"
    for path in [*sorted(site.rglob("*.css")), *sorted(site.rglob("*.svg"))]:
        name = path.relative_to(site).as_posix()
        for address in addresses_in_styles(path.read_text(encoding="utf-8")):
            yield from _problems_of_loaded(site, name, address)
    yield from _problems_of_search(site, set(pages))


def _problems_of_loaded(site: Path, name: str, address: str) -> Iterator[str]:
    parts = urlsplit(address)
    if parts.netloc or parts.scheme not in ("", "data"):
        yield f"{name}: loads {address} from another host"
    elif parts.path and not parts.scheme and not _target(site, name, parts.path).is_file():
        yield f"{name}: loads {address}, which is not there"


def _problems_of_link(site: Path, pages: dict[str, Page], name: str, link: str) -> Iterator[str]:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return  # of another host: it is asked when a reader follows the link, not before
    target = _target(site, name, parts.path) if parts.path else site / name
    if not target.is_file():
        yield f"{name}: links to {link}, which is not there"
    elif parts.fragment and target.suffix == ".html":
        page = pages[target.relative_to(site).as_posix()]
        if unquote(parts.fragment) not in page.names:
            yield f"{name}: links to {link}, and that page has no such heading"


def _target(site: Path, name: str, path: str) -> Path:
    """The file that an address of a page leads to; that of a folder is its index."""
    start = site if path.startswith("/") else (site / name).parent
    found = (start / unquote(path).lstrip("/")).resolve()
    return found / "index.html" if found.is_dir() else found


def _problems_of_search(site: Path, pages: set[str]) -> Iterator[str]:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    known = {unquote(urlsplit(entry["location"]).path) or "index.html" for entry in index["docs"]}
    for name in sorted(pages - known - {"404.html"}):
        yield f"{name}: the search does not know it"
    if not (site / "search" / "search_index.js").is_file():
        yield "search: only works with a web server"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("site", type=Path)
    found = list(problems(parser.parse_args().site))
    sys.stderr.write("".join(f"{line}\n" for line in found))
    sys.exit(bool(found))
