"""Folders of the user that runs a command, by the rules of the XDG base directories."""

from __future__ import annotations

import os
from pathlib import Path

from appliance.checkpoints.discovery.find import is_text
from appliance.errors import ApplianceError


def models_folder() -> Path:
    """Where models are that were pulled without a configuration. Raises `ApplianceError`."""
    return _base("XDG_DATA_HOME", ".local/share") / "appliance" / "models"


def state_folder() -> Path:
    """Where the logs of the user's own daemons are. Raises `ApplianceError`."""
    return _base("XDG_STATE_HOME", ".local/state") / "appliance"


def _base(variable: str, usual: str) -> Path:
    """A variable with a path that is not absolute counts for nothing."""
    folder = Path(os.environ.get(variable, ""))
    if not folder.is_absolute():
        try:
            folder = Path.home() / usual
        except RuntimeError:
            raise ApplianceError(f"this user has no home directory; set ${variable}") from None
    if not is_text(str(folder)):  # a configuration could not name it
        raise ApplianceError(f"the path {str(folder)!a} is not UTF-8; set ${variable} to another")
    return folder
