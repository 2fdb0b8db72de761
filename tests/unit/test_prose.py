"""The check of our prose finds a planted word, and documents list all decisions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prose import ROOT, WORDS, findings


@pytest.mark.parametrize("word", WORDS)
def test_a_planted_word_is_found(word: str) -> None:
    text = f"Fine.\nHere {word.title()} waits for it.\n"
    (found,) = findings(Path("page.md"), text)
    assert found.startswith(f"page.md:2: '{word}':")


def test_parts_of_words_and_other_words_pass() -> None:
    assert not list(
        findings(Path("page.md"), "A describer subscribes; a notebook stood there, besides.")
    )


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    pages = sorted(path.name for path in folder.glob("0*.md"))
    assert [name for name in pages if f"({name})" not in index] == []
