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
    that is not absolute counts for nothing. Raises `ApplianceError` without a home
    directory, and for a path that is not UTF-8."""
    folder = Path(os.environ.get(variable, ""))
    if not folder.is_absolute():
        try:
            folder = Path.home() / usual
        except RuntimeError:
            raise ApplianceError(f"this user has no home directory; set ${variable}") from None
    try:
        str(folder).encode()
    except UnicodeEncodeError:  # a configuration could not name it
        raise ApplianceError(
            f"the path {str(folder)!a} is not UTF-8; set ${variable} to another"
        ) from None
    return folder
