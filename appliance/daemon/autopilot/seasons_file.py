"""The file next to the journal in which the autopilot remembers hours of the week."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import msgspec

from appliance.daemon.autopilot.seasons import (
    CELLS,
    MOST_CHOICE_BYTES,
    MOST_CHOICES,
    Cell,
    set_by_hand,
)
from appliance.platform import durable
from appliance.service.policy_report import PolicyChoice
from appliance.vocabulary import Word

VERSION: Final = 2
MOST_BYTES: Final = CELLS * MOST_CHOICES * (MOST_CHOICE_BYTES + 1024)
"""Of the file: a choice, and its figures."""

log = logging.getLogger("appliance.daemon")


class SeasonsFile(Word, frozen=True):
    """What is in it."""

    version: int
    by_hand: str
    """What the configuration set by hand, as `set_by_hand` has it."""
    cells: tuple[Cell, ...] = ()


def seasons_path(journal: str) -> Path:
    """Where it is remembered, for a box with this journal. A file of its own: what was rolled back
    is not lost with it."""
    return Path(f"{journal}.autopilot-hours")


def read_seasons(path: Path, configured: PolicyChoice) -> tuple[tuple[Cell, ...], str]:
    """What was remembered, and why that cannot be used, which is so, too, if it was learned when
    the configuration set other decisions or parameters; both empty if there is no file."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        # First: a file of another version may have anything else otherwise.
        version = msgspec.json.decode(text, type=_Version).version
        if version != VERSION:
            return (), f"{path} has version {version}, and this daemon reads version {VERSION}"
        found = msgspec.json.decode(text, type=SeasonsFile)
    except FileNotFoundError:
        return (), ""
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return (), f"{path} cannot be used: {error}"
    cells = found.cells
    choices = (one.choice for cell in cells for one in cell.choices)
    if any(len(msgspec.json.encode(choice)) > MOST_CHOICE_BYTES for choice in choices):
        return (), f"{path} has a choice of more than {MOST_CHOICE_BYTES} bytes"
    if found.by_hand != set_by_hand(configured):
        return (), f"{path} is of a time when [policy] had other decisions or parameters"
    return cells, ""


def write_seasons(path: Path, cells: tuple[Cell, ...], configured: PolicyChoice) -> None:
    """Remember these alone, for such a configuration. What cannot be written is logged: it is known
    until a restart."""
    file = SeasonsFile(version=VERSION, by_hand=set_by_hand(configured), cells=cells)
    try:
        durable.replace(path, [msgspec.json.encode(file)])
        durable.sync(path.parent)
    except OSError as error:
        log.warning("what the autopilot knows of hours is not remembered: %s: %s", path, error)


class _Version(Word, frozen=True):
    version: int
