"""Folders of the user that runs a command, by the rules of the XDG base directories."""

from __future__ import annotations

import os
from pathlib import Path

from appliance.errors import ApplianceError


def models_folder() -> Path:
    """Where models are that were pulled without a configuration. Raises `ApplianceError`."""
    return _base("XDG_DATA_HOME", ".local/share") / "appliance" / "models"


def state_folder() -> Path:
    """Where the logs of the user's own daemons are. Raises `ApplianceError`."""
    return _base("XDG_STATE_HOME", ".local/state") / "appliance"


def _base(variable: str, usual: str) -> Path:
    """A variable with a path that is not absolute counts for nothing."""
    given = Path(os.environ.get(variable, ""))
    if given.is_absolute():
        return given
    try:
        return Path.home() / usual
    except RuntimeError:
        raise ApplianceError(f"this user has no home directory; set ${variable}") from None
