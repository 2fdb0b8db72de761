"""What the figures of the policy are drawn with: one width, one palette for light and one for dark.

A figure has a card of its own behind it, so it is readable on any page; its colours follow the
reader's system.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from tests.pictures.svg import SANS, box, drawing, words

WIDTH: Final = 760
MARGIN: Final = 18
RIGHT: Final = WIDTH - 32
"""Room is left for half of the last number of an axis."""

LIGHT: Final[Mapping[str, str]] = {
    "card": "#fbfbf8",
    "edge": "#d0d7de",
    "ink": "#24292f",
    "faint": "#57606a",
    "a": "#0550ae",
    "b": "#8a4b00",
    "c": "#116329",
    "d": "#6639ba",
    "load": "#d5dae0",
    "late": "#b3202a",
}
DARK: Final[Mapping[str, str]] = {
    "card": "#12171e",
    "edge": "#3d444d",
    "ink": "#e6edf3",
    "faint": "#a5afba",
    "a": "#79c0ff",
    "b": "#e3b341",
    "c": "#6fdd8b",
    "d": "#d2a8ff",
    "load": "#39424d",
    "late": "#ff8b84",
}
SERIES: Final = ("a", "b", "c", "d")
"""Colours of models and of what is compared."""


def colours(palette: Mapping[str, str]) -> str:
    """The rules of CSS that a palette decides."""
    series = [
        rule
        for name in (*SERIES, "late")
        for rule in (
            f".{name} {{ fill: {palette[name]}; }}",
            f".line-{name} {{ stroke: {palette[name]}; }}",
        )
    ]
    return "\n".join([
        f"text {{ fill: {palette['ink']}; }}",
        f".small {{ fill: {palette['faint']}; }}",
        f".on {{ fill: {palette['card']}; }}",
        f".card {{ fill: {palette['card']}; stroke: {palette['edge']}; }}",
        f".load {{ fill: {palette['load']}; }}",
        f".line-ink {{ stroke: {palette['ink']}; }}",
        f".axis {{ stroke: {palette['faint']}; }}",
        f".grid {{ stroke: {palette['edge']}; }}",
        *series,
    ])  # fmt: skip


STYLE: Final = f"""
text {{ font: 13px {SANS}; }}
.head {{ font-size: 15px; font-weight: 600; }}
.small {{ font-size: 12px; }}
.mid {{ text-anchor: middle; }}
.end {{ text-anchor: end; }}
line, polyline {{ fill: none; stroke-width: 1.5; }}
.thick {{ stroke-width: 2.5; }}
.dash {{ stroke-dasharray: 5 4; }}
.axis, .grid {{ stroke-width: 1; }}
.pale {{ fill-opacity: 0.28; }}
{colours(LIGHT)}
@media (prefers-color-scheme: dark) {{
{colours(DARK)}
}}
"""


class Scale(NamedTuple):
    """From values to places on the drawing."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


class Bar(NamedTuple):
    """A stretch of a lane."""

    began: float
    ended: float
    kind: str
    text: str = ""


def figure(title: str, height: float, parts: Iterable[str]) -> str:
    """A whole file, with its title as the first line."""
    card = box(0.5, 0.5, WIDTH - 1, height - 1, "card", 8)
    return drawing(WIDTH, height, title, STYLE, [card, say(MARGIN, 27, title, "head"), *parts])


def say(x: float, y: float, text: str, kind: str = "") -> str:
    """A line of text."""
    return words(round(x, 1), round(y, 1), text, kind)


def block(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A rectangle that is wide enough to be seen."""
    return box(round(x, 1), round(y, 1), max(width, 1.0), round(height, 1), kind)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def path(points: Iterable[tuple[float, float]], kind: str) -> str:
    """Lines from point to point."""
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{kind}" points="{joined}"/>'


def dot(x: float, y: float, kind: str) -> str:
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'


def arrow(x: float, top: float, bottom: float, kind: str) -> str:
    """A triangle that points down to a moment."""
    points = f"{x - 5:.1f},{top:.1f} {x + 5:.1f},{top:.1f} {x:.1f},{bottom:.1f}"
    return f'<polygon class="{kind}" points="{points}"/>'


def span(x1: float, x2: float, y: float, kind: str) -> list[str]:
    """A length, with a tick at each end."""
    ends = [line(x, y - 4, x, y + 4, kind) for x in (x1, x2)]
    return [line(x1, y, x2, y, kind), *ends]


def seconds_axis(scale: Scale, y: float, every: float, unit: str = "s") -> Iterator[str]:
    """A line of time, with a number at each so many seconds."""
    yield line(scale.start, y, scale.end, y, "axis")
    count = round((scale.high - scale.low) / every + 1e-9)
    for number in range(count + 1):
        at = scale.low + number * every
        yield line(scale(at), y, scale(at), y + 4, "axis")
        yield say(scale(at), y + 17, f"{at:g} {unit}", "small mid")


def lane(label: str, y: float, height: float, bars: Iterable[Bar], scale: Scale) -> Iterator[str]:
    """What happened one after the other, with a label left of it. Bars say what they are where
    that has room."""
    yield say(MARGIN, y + height / 2 + 4.5, label)
    for bar in bars:
        began, ended = max(bar.began, scale.low), min(bar.ended, scale.high)
        if began >= ended:
            continue
        x, width = scale(began), scale(ended) - scale(began)
        yield block(x, y, width - 0.8, height, bar.kind)
        if bar.text and width > 7.5 * len(bar.text) + 4:
            ink = "mid" if bar.kind == "load" or "pale" in bar.kind else "on mid"
            yield say(x + width / 2, y + height / 2 + 4.5, bar.text, ink)


def legend(x: float, y: float, entries: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Squares of colours with what they mean, one after the other."""
    for kind, text in entries:
        if kind.startswith("line-"):
            yield line(x, y - 4.5, x + 18, y - 4.5, kind)
            x += 7
        else:
            yield block(x, y - 10, 11, 11, kind)
        yield say(x + 17, y, text, "small")
        x += 17 + 6.3 * len(text) + 20
