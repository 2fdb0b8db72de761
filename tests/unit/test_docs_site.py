"""The documents' site has every page once, in four groups, and its tools find what is wrong.

`make docs` builds it; that fetches MkDocs, so no test does.
"""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.prose import ROOT

CONFIGURATION: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
DECISION = re.compile(r"docs/decisions/0\d{3}-.*\.md")


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the site, for an import."""
    monkeypatch.syspath_prepend(str(ROOT / "packaging" / "site"))


@pytest.fixture
def pages(tools: None) -> ModuleType:
    return importlib.import_module("site_pages")


@pytest.fixture
def dialect(tools: None) -> ModuleType:
    return importlib.import_module("site_markdown")


@pytest.fixture
def check(tools: None) -> ModuleType:
    return importlib.import_module("site_check")


def entries(part: Any) -> Iterator[str]:
    """The pages of a part of the navigation, in its order."""
    if isinstance(part, str):
        yield part
    else:
        for one in part.values() if isinstance(part, dict) else part:
            yield from entries(one)


# --- which pages there are ----------------------------------------------------------------------


def test_every_page_is_in_the_navigation_once() -> None:
    """Those of `docs/`, without single decisions, which their index lists; all of them exist."""
    listed = Counter(entries(CONFIGURATION["nav"]))
    paths = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}

    assert [page for page, count in listed.items() if count > 1] == []
    assert sorted(page for page in paths - set(listed) if not DECISION.fullmatch(page)) == []
    assert sorted(page for page in listed if not (ROOT / page).is_file()) == []


def test_the_navigation_has_four_groups() -> None:
    groups = [name for part in CONFIGURATION["nav"] for name in part]

    assert groups == ["Start", "Tutorial", "How-to", "Reference", "Explanation"]
    assert CONFIGURATION["nav"][0]["Start"] == "docs/index.md"


def test_the_start_page_leads_to_every_page(pages: ModuleType) -> None:
    """Pages of the folders of `docs/` are listed by the folders' own indices."""
    start = ROOT / "docs" / "index.md"
    listed = {(start.parent / link).resolve() for link in pages.links(start)}

    assert sorted(set((ROOT / "docs").glob("*.md")) - listed - {start}) == []


@pytest.mark.parametrize("folder", ["decisions", "policies", "recipes"])
def test_an_index_leads_to_the_pages_of_its_folder(pages: ModuleType, folder: str) -> None:
    index = ROOT / "docs" / folder / "README.md"
    listed = {(index.parent / link).resolve() for link in pages.links(index)}

    assert sorted(set(index.parent.glob("*.md")) - listed - {index}) == []


def test_warnings_end_the_build_and_fonts_are_the_readers() -> None:
    assert CONFIGURATION["strict"] is True
    assert CONFIGURATION["theme"]["font"] is False
    levels = [level for part in CONFIGURATION["validation"].values() for level in part.values()]
    assert set(levels) == {"warn"}


# --- where files are ----------------------------------------------------------------------------


def test_the_site_has_what_its_pages_lead_to(pages: ModuleType, tmp_path: Path) -> None:
    """Pages, sources and pictures in the repository; not what is only quoted."""
    written = {
        "README.md": "[all](docs) [gone](gone.md) [away](https://example.org/x.md)",
        "docs/README.md": "[a](a.md#part) [out](../../outside.md)",
        "docs/a.md": "![p](../p.svg) [m](../more/m.md)\n```\n[q](../q.py)\n```\n`[q](../q.py)`",
        "more/m.md": "[source](s.py) [back](../docs/a.md) [spaces](two%20words.txt)",
        **dict.fromkeys(("p.svg", "more/s.py", "q.py", "more/two words.txt"), ""),
        "../outside.md": "",
    }
    root = tmp_path / "repository"
    for name, text in written.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    found = pages.files(root)

    assert found == [
        *("README.md", "docs/README.md", "docs/a.md"),
        *("more/m.md", "more/s.py", "more/two words.txt", "p.svg"),
    ]
    assert pages.folders(found) == {"docs": "docs/README.md"}


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("docs/index.md", "index.html"),
        ("docs/recipes/openai.md", "recipes/openai.html"),
        ("docs/recipes/README.md", "recipes/index.html"),
        ("README.md", "repository/README.html"),
        ("benchmarks/RESULTS.md", "repository/benchmarks/RESULTS.html"),
        ("appliance/plugins/qlm.py", "repository/appliance/plugins/qlm.py.txt"),
        ("tests/unit/tui/snapshots/one.svg", "repository/tests/unit/tui/snapshots/one.svg"),
    ],
)
def test_places_of_files(pages: ModuleType, file: str, place: str) -> None:
    """A page is HTML, a source is text that a browser shows, a picture stays what it is."""
    assert pages.place(file) == place


def test_no_two_files_have_one_place(pages: ModuleType) -> None:
    places = Counter(map(pages.place, pages.files(ROOT)))

    assert [place for place, count in places.items() if count > 1] == []


def test_pictures_fetch_no_fonts(pages: ModuleType) -> None:
    """A terminal's picture names a font of another host, and is drawn without it as well."""
    picture = (ROOT / "tests/unit/tui/snapshots/demo-overview.svg").read_text(encoding="utf-8")

    assert "@font-face" in picture
    assert "url(" not in re.sub(r"url\(#[^)]*\)", "", pages.without_fonts(picture))


# --- the Markdown of MkDocs ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("Text:\n- a\n- b", "Text:\n\n- a\n- b"),
        ("Text:\n1. a\n2. b", "Text:\n\n1. a\n2. b"),
        ("It takes\n23. That is much.", "It takes\n23. That is much."),
        ("- a\n  goes on\n- b", "- a\n    goes on\n- b"),
        ("- a\ngoes on\n\nText.", "- a\n    goes on\n\nText."),
        ("- a\n  - b\n    - c\n- d", "- a\n    - b\n        - c\n- d"),
        ("1. a\n\n   Text.\n2. b", "1. a\n\n    Text.\n\n2. b"),
        ("- a\n  ```\n  - x\n    y\n  ```\n- b", "- a\n    ```\n    - x\n      y\n    ```\n- b"),
        ("```\nText:\n- a\n```", "```\nText:\n- a\n```"),
        ("    code\n    - a", "    code\n    - a"),
        ("- a\n\n      code\n\nText.", "- a\n\n        code\n\nText."),
        ("| `a\\|b` | c\\|d |", "| `a|b` | c\\|d |"),
        ("`a\\|b`", "`a\\|b`"),
    ],
)
def test_lists_and_tables_in_the_dialect_of_mkdocs(
    dialect: ModuleType, written: str, wanted: str
) -> None:
    assert dialect.for_mkdocs(written) == f"{wanted}\n"


# --- what is wrong with a site ------------------------------------------------------------------

INDEX = '<a href="a.html#part">a</a> <img src="p.svg"> <a href="https://example.org">away</a>'
PAGE = '<h2 id="part">Part</h2><a href="#part">here</a><a href="./index.html">start</a>'


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Two pages, a picture and a search that knows the pages."""
    for name, text in {
        "index.html": INDEX,
        "a.html": PAGE,
        "404.html": '<link rel="stylesheet" href="/s.css">',
        "p.svg": "<svg/>",
        "s.css": "a { background: url(p.svg), url(data:image/png;base64,AA) }",
        "search/search_index.js": "",
        "search/search_index.json": json.dumps(
            {"docs": [{"location": one} for one in ("", "a.html", "a.html#part")]}
        ),
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_site_without_faults(check: ModuleType, site: Path) -> None:
    assert list(check.problems(site)) == []


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("a.html", '<script src="https://h/x.js">', "loads https://h/x.js from another host"),
        ("a.html", '<script src="//h/x.js">', "loads //h/x.js from another host"),
        ("a.html", '<link href="https://h/f">', "loads https://h/f from another host"),
        ("a.html", '<img srcset="p.svg 1x, http://h/p 2x">', "loads http://h/p from another host"),
        ("a.html", "<style>@import 'http://h/f'</style>", "loads http://h/f from another host"),
        ("a.html", '<p style="background:url(http://h/p)">', "loads http://h/p from another host"),
        ("s.css", "@font-face { src: url('http://h/f') }", "loads http://h/f from another host"),
        ("p.svg", "<style>a{src:url(//h/f)}</style>", "loads //h/f from another host"),
        ("a.html", '<img src="gone.svg">', "loads gone.svg, which is not there"),
        ("a.html", '<a href="gone.html">', "links to gone.html, which is not there"),
        ("a.html", '<a href="../other">', "links to ../other, which is not there"),
        ("a.html", '<a href="#x">', "links to #x, and that page has no such heading"),
        ("b.html", "", "the search does not know it"),
        ("a.html", '<pre class="mermaid">', "has diagrams, and the theme would fetch what draws"),
    ],
)
def test_what_is_wrong_with_a_site_is_found(
    check: ModuleType, site: Path, file: str, text: str, problem: str
) -> None:
    before = (site / file).read_text() if (site / file).exists() else ""
    (site / file).write_text(before + text)

    (found,) = check.problems(site)

    assert found.startswith(f"{file}: {problem}")


def test_a_search_that_needs_a_server_is_found(check: ModuleType, site: Path) -> None:
    (site / "search/search_index.js").unlink()

    assert list(check.problems(site)) == ["search: only works with a web server"]
