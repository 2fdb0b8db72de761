"""Which configuration a command reads: the one that it is given, or the first that there is."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from appliance.config.loader import load_config
from appliance.config.schema import Config
from appliance.errors import ConfigError

VARIABLE: Final = "APPLIANCE_CONFIG"
PLACES: Final = (Path("etc/appliance.toml"), Path("/etc/appliance/appliance.toml"))
"""Where it is looked for if no path is given: in a working copy, then what is installed."""
_DEFAULT: Final = ", else ".join((f"${VARIABLE}", *map(str, PLACES)))
_FILE: Final = click.Path(dir_okay=False, path_type=Path)


def default_config() -> Path:
    """What ``$APPLIANCE_CONFIG`` names, or the first of `PLACES` where a file is; the first of all
    if there is none, which is then missed by its name."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return next((place for place in PLACES if place.is_file()), PLACES[0])


def config_file(command: Callable[..., Any]) -> Callable[..., Any]:
    """The configuration as an argument or as ``--config``, given to the command as `path`."""

    @functools.wraps(command)
    def either(file: Path | None, config: Path | None, **others: Any) -> Any:
        if file is not None and config is not None:
            raise click.UsageError("give FILE or --config FILE, not both")
        return command(path=file or config or default_config(), **others)

    argument = click.argument("file", type=_FILE, required=False)
    option = click.option("--config", type=_FILE, help=config_help())
    return argument(option(either))


def load_or_exit(path: Path, *, now: bool = False) -> Config:
    """The configuration; when there is none, every problem is printed and the status is 2."""
    try:
        return load_config(path, now=now)
    except ConfigError as error:
        for problem in error.problems:
            click.echo(str(problem), err=True)
        sys.exit(2)


def config_help() -> str:
    """What ``--config`` is, where FILE may be an argument, too."""
    return f"The same as FILE. [default: {_DEFAULT}]"


def config_option(name: str, about: str | None = None) -> Callable[..., Any]:
    """``--config``, given to the command as the path `name`."""
    return click.option(
        "--config", name, type=_FILE, default=default_config, show_default=_DEFAULT, help=about,
    )  # fmt: skip
