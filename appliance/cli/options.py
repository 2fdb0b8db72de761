"""Which configuration a command reads: the one that it is given, or the first that there is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

VARIABLE: Final = "APPLIANCE_CONFIG"
PLACES: Final = (Path("etc/appliance.toml"), Path("/etc/appliance/appliance.toml"))
"""Where it is looked for if no path is given: in a working copy, then what is installed."""


def default_config() -> Path:
    """What ``$APPLIANCE_CONFIG`` names, or the first of `PLACES` where a file is; the first of all
    if there is none, which is then missed by its name."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return next((place for place in PLACES if place.is_file()), PLACES[0])


def config_option(name: str, about: str | None = None) -> Callable[..., Any]:
    """``--config``, given to the command as the path `name`."""
    return click.option(
        "--config", name, type=click.Path(dir_okay=False, path_type=Path), default=default_config,
        show_default=", else ".join((f"${VARIABLE}", *map(str, PLACES))), help=about,
    )  # fmt: skip
