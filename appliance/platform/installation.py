"""What installs a part that is missing: a command of the Debian package, or an extra of pip's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

ENGINE_COMMAND: Final = "appliance-engine"
"""Of the Debian package, in its environment."""
_ENGINES: Final = ("cpu", "gpu")
"""The extras that the command installs."""


def is_debian_package() -> bool:
    """Whether this runs in the environment of the Debian package."""
    return Path(sys.prefix, "bin", ENGINE_COMMAND).exists()


def remedy_for(extra: str) -> str:
    """What to do, in the words of a message, for what an extra of the Python package brings."""
    if not is_debian_package():
        return f'install the extra "{extra}" of this package'
    if extra in _ENGINES:
        return f"run `{ENGINE_COMMAND} install {extra}` as root"
    return f'use the Python package with its extra "{extra}": the Debian package does not have it'
