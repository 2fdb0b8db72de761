"""The blocks of code of our documents, and those of them that tests take to run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from markdown_it import MarkdownIt

ROOT: Final = Path(__file__).parents[1]
_MARK: Final = "<!-- not run:"


class Block(NamedTuple):
    """A fenced block of code; `line` is that of its fence, from 1."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None
    """Why it is not run, as the comment before it says; none without such a comment."""
    indented: bool = False
    """Whether it has no fence."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Every document, by its path from the root of the repository."""
    folders = ("docs", "packaging", "benchmarks")
    paths = [
        *ROOT.glob("*.md"),
        *(path for name in folders for path in (ROOT / name).rglob("*.md")),
    ]
    return sorted(str(path.relative_to(ROOT)) for path in paths)


@cache
def blocks_of(page: str) -> tuple[Block, ...]:
    """All blocks of a page, in order."""
    return tuple(read_blocks(page, (ROOT / page).read_text(encoding="utf-8")))


def read_blocks(page: str, text: str) -> Iterator[Block]:
    """Those of a text, as blocks of this page."""
    tokens = MarkdownIt("commonmark").parse(text)
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type not in ("fence", "code_block"):
            continue
        assert token.map is not None
        above = before.content.strip() if before and before.type == "html_block" else ""
        reason = above.removeprefix(_MARK).removesuffix("-->").strip()
        yield Block(
            page,
            token.map[0] + 1,
            token.info.strip(),
            token.content,
            reason if above.startswith(_MARK) else None,
            indented=token.type == "code_block",
        )


def code_blocks(page: str, *languages: str, containing: str = "") -> list[Block]:
    """Those of a page that a test runs, or compares with what it makes.

    `taken` reads these calls in the sources of tests, so all arguments are literals.
    Raises `LookupError` if there is no such block.
    """
    found = [
        block
        for block in blocks_of(page)
        if block.language in languages and containing in block.text
    ]
    if not found:
        raise LookupError(f"{page} has no block of {' or '.join(languages)} with {containing!r}")
    return found


@cache
def taken() -> dict[str, str]:
    """The place of each block that a test takes, and the file of the test, or of the last one.

    A test that takes a block which is not there takes none, and fails by itself.
    """
    found = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for call in _calls(path):
            page, *languages = (ast.literal_eval(one) for one in call.args)
            options = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
            with suppress(LookupError):
                for block in code_blocks(page, *languages, **options):
                    found[block.place] = str(path.relative_to(ROOT))
    return found


def _calls(path: Path) -> Iterator[ast.Call]:
    """Calls of `code_blocks` in a source of tests."""
    text = path.read_text(encoding="utf-8")
    if f"{code_blocks.__name__}(" not in text or path == Path(__file__):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == code_blocks.__name__:
            yield node
