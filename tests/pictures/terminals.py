"""The dashboard on the recorded demo: its overview, and its timeline below."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tests.pictures.svg import MONOSPACE, SANS, drawing
from tests.unit.tui.bench import NOW, Told, command, dashboard
from tui.recording import read_recording

SESSION: Final = Path(__file__).parents[1] / "unit" / "tui" / "sessions" / "demo.jsonl"
VIEWS: Final = {"overview": (120, 33), "timeline": (120, 13)}
"""Each with the columns and lines of its terminal."""

_GAP: Final = 16
_FONTS: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_COMMENT: Final = re.compile(r"<!--.*?-->\s*", re.DOTALL)
_OUTER: Final = re.compile(r'<svg class="rich-terminal" viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>')


async def dashboard_picture() -> str:
    """Both views in one drawing, whose fonts are those of the reader's machine."""
    parts, width, y = [], 0.0, 0.0
    for view, size in VIEWS.items():
        shown = await _terminal(view, size)
        outer = _OUTER.search(shown)
        assert outer is not None, "the application draws in another form"
        wide, high = float(outer[1]), float(outer[2])
        inner = shown[outer.end() :].strip()
        parts.append(f'<svg y="{y:g}" width="{wide:g}" height="{high:g}">\n{inner}')
        width, y = max(width, wide), y + high + _GAP
    title = "The dashboard: overview and timeline of six models in memory for two"
    return drawing(width, y - _GAP, title, "text { white-space: pre }", parts)


async def _terminal(view: str, size: tuple[int, int]) -> str:
    """One view of the recording's last moment."""
    session = Told(*(one._replace(at=NOW) for one in read_recording(SESSION)), live=False)
    async with dashboard(session, size=size) as app:
        await command(app, view)
        drawn = app.export_screenshot(title="appliance top", simplify=True)
    for pattern in (_FONTS, _COMMENT):
        drawn = pattern.sub("", drawn)
    drawn = drawn.replace("Fira Code, monospace", MONOSPACE)
    return drawn.replace("font-family: arial;", f"font-family: {SANS};")
