"""SVG as text: rectangles and lines of text, with fonts of the reader's machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from xml.sax.saxutils import escape

SANS: Final = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
MONOSPACE: Final = "ui-monospace, 'Cascadia Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def drawing(width: float, height: float, title: str, style: str, parts: Iterable[str]) -> str:
    """A whole file. `style` is CSS for the classes that the parts name."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
        f' width="{width:g}" height="{height:g}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{style.strip()}\n</style>",
        *parts,
        "</svg>\n",
    ])  # fmt: skip


def box(x: float, y: float, width: float, height: float, kind: str, radius: float = 0) -> str:
    """A rectangle of a class."""
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}"'
        f' rx="{radius:g}"/>'
    )


def words(x: float, y: float, text: str, kind: str) -> str:
    """A line of text of a class; `y` is its base line."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'
