"""Which pictures there are, by the names of their files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.pictures.badges import badges
from tests.pictures.capacity import capacity
from tests.pictures.policy.files import figures
from tests.pictures.terminals import dashboard_picture

FOLDER: Final = Path(__file__).parents[2] / "docs" / "images"


async def pictures() -> dict[str, str]:
    """All of them, as they are made of what is committed now."""
    return {
        "dashboard.svg": await dashboard_picture(),
        "results.svg": capacity(),
        **{f"{name}.svg": drawn for name, drawn in badges().items()},
        **figures(),
    }
