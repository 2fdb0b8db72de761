"""What a checkpoint is called that no configuration names: as its directory is.

    DIR/llama-a                                llama-a
    DIR/ORG/MODEL                              ORG/MODEL
    DIR/models--ORG--MODEL/snapshots/REVISION  ORG/MODEL     (huggingface_hub's cache)
    DIR/ORG--MODEL, with .origin               ORG/MODEL     (`appliance pull`)

Letters keep their case, as in the names of pulled models. Any run of other characters than a name
may have becomes one "-".
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from appliance.checkpoints.pull import NAME, ORIGIN

HUB_FOLDER: Final = "models--"
"""How folders of models begin in the cache of `huggingface_hub`."""
SNAPSHOTS: Final = "snapshots"

_FOREIGN: Final = re.compile(r"[^A-Za-z0-9._:/-]+")
_NO_FIRST: Final = "._:/-"
"""Characters that a name may have, but not begin with."""


def spelled(text: str) -> str:
    """The nearest name that a model may have; "" if no letter or digit is left."""
    if NAME.fullmatch(text):
        return text
    return _FOREIGN.sub("-", text).lstrip(_NO_FIRST).rstrip("-")


def name_of(folder: Path, below: str = "") -> str:
    """The name of the checkpoint in `folder`, which was found in the directory `below`, if that is
    not the one that was given; "" if it has none."""
    if (repository := hub_folder(folder)) is not None:
        return spelled(_with_slashes(repository.name.removeprefix(HUB_FOLDER)))
    if (folder / ORIGIN).is_file():
        return spelled(_with_slashes(folder.name))
    return spelled(f"{below}/{folder.name}" if below else folder.name)


def hub_folder(folder: Path) -> Path | None:
    """The folder of a model in huggingface_hub's cache that `folder` is, or is a snapshot of."""
    if folder.name.startswith(HUB_FOLDER) and (folder / SNAPSHOTS).is_dir():
        return folder
    if folder.parent.name == SNAPSHOTS and folder.parent.parent.name.startswith(HUB_FOLDER):
        return folder.parent.parent
    return None


def _with_slashes(name: str) -> str:
    """Folders cannot have slashes in their names: two hyphens are written instead."""
    return name.replace("--", "/")
