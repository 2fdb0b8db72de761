"""The file next to the journal in which the autopilot remembers what it rolled back."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from appliance.platform import durable
from appliance.service.autopilot import Barred

MOST_BYTES = 1 << 20
"""Of the file; what is written is far smaller."""

log = logging.getLogger("appliance.daemon")


def barred_path(journal: str) -> Path:
    """Where it is remembered, for a box with this journal."""
    return Path(f"{journal}.autopilot")


def read_barred(path: Path) -> list[Barred]:
    """What was remembered; nothing if there is no file, or it cannot be used, which is logged."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MOST_BYTES), type=list[Barred])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("what the autopilot rolled back is forgotten: %s: %s", path, error)
        return []


def write_barred(path: Path, barred: tuple[Barred, ...]) -> None:
    """Remember these alone. What cannot be written is logged: it is known until a restart."""
    try:
        durable.replace(path, [msgspec.json.encode(barred)])
        durable.sync(path.parent)
    except OSError as error:
        log.warning("what the autopilot rolled back is not remembered: %s: %s", path, error)
