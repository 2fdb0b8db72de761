"""Folders of the user that runs a program, by the rules of the XDG base directories."""

from __future__ import annotations

import os
from pathlib import Path

from appliance.errors import ApplianceError


def state_folder() -> Path:
    """Where the user's own daemons have their logs and sockets. Raises `ApplianceError`."""
    return base_folder("XDG_STATE_HOME", ".local/state") / "appliance"


def base_folder(variable: str, usual: str) -> Path:
    """The folder that a variable names, else `usual` in the home directory. A variable with a path
    that is not absolute counts for nothing. Raises `ApplianceError` without a home directory."""
    given = Path(os.environ.get(variable, ""))
    if given.is_absolute():
        return given
    try:
        return Path.home() / usual
    except RuntimeError:
        raise ApplianceError(f"this user has no home directory; set ${variable}") from None
