"""The folder of models of the user that runs a command."""

from __future__ import annotations

from pathlib import Path

from appliance.user_folders import base_folder


def models_folder() -> Path:
    """Where models are that were pulled without a configuration. Raises `ApplianceError`."""
    return base_folder("XDG_DATA_HOME", ".local/share") / "appliance" / "models"
