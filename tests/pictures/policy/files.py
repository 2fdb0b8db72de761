"""Which figures there are, by the names of their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tests.pictures.policy import deadlines, instances, placing, slow_links, turns

FIGURES: Final[Mapping[str, Callable[[], str]]] = {
    "slack": turns.slack,
    "homes": placing.homes,
    "next": deadlines.next_model,
    "short": turns.short_prompts,
    "pace": deadlines.pace,
    "way-back": turns.way_back,
    "shed": placing.shedding,
    "late": deadlines.renewal,
    "gap": turns.gaps,
    "quota": deadlines.quota,
    "prompts": placing.prompts,
    "loads": turns.loads,
    "costly": slow_links.costly,
    "dispatch": placing.dispatch,
    "separation": instances.separation,
    "parking": instances.parking,
}
"""In the order of the page."""


def figures() -> dict[str, str]:
    """All of them, drawn now."""
    return {f"appliance-{name}.svg": draw() for name, draw in FIGURES.items()}
