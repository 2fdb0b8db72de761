"""The pictures in `docs/images` are what the sources make now, and load nothing from any host."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.pictures.__main__ import main
from tests.pictures.files import FOLDER, pictures

HOST = re.compile(r"(?<!xmlns=\")https?://(?!127\.0\.0\.1)[^\s\"<]+|@import|@font-face|url\((?!#)")


async def test_they_are_up_to_date() -> None:
    """`make generate` writes them. A chart that differs has new figures: set its date, too."""
    made = await pictures()

    assert {path.name for path in FOLDER.iterdir()} == set(made)
    for name, drawn in made.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == drawn, f"make generate writes {name}"


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_they_load_nothing(path: Path) -> None:
    """Well-formed, and without a font, a style or an image of another host."""
    text = path.read_text(encoding="utf-8")
    ElementTree.fromstring(text)

    assert HOST.findall(text) == []


def test_the_command_writes_them(tmp_path: Path) -> None:
    """All, to a folder that it makes."""
    main(tmp_path / "new")

    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        path.name for path in FOLDER.iterdir()
    }
