"""Where torchvision is, which models that read images need; nothing is imported here.

Its published builds are for CUDA and cannot be imported next to a torch for the CPU, and vLLM
imports it as soon as it is there. So `make install` puts it into a folder of the environment that
Python does not look into, and `appliance.engines.vllm.images.libraries` makes it importable.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Final

LIBRARY: Final = "torchvision"
FOLDER: Final = "image-libraries"
"""In the environment, next to ``lib``, or in a folder that Python looks into for packages."""
VARIABLE: Final = "APPLIANCE_IMAGE_LIBRARIES"
"""Another folder, in the environment variable of this name."""


def private_folder() -> Path | None:
    """The folder that holds torchvision apart from other packages, if there is one."""
    folders = [Path(place) / FOLDER for place in (sys.prefix, *sys.path) if place]
    if given := os.environ.get(VARIABLE):
        folders = [Path(given)]
    there = (folder for folder in folders if (folder / LIBRARY / "__init__.py").is_file())
    return next(there, None)


def is_installed() -> bool:
    """Whether it is where Python looks for packages, as it is in an environment for GPUs."""
    return importlib.util.find_spec(LIBRARY) is not None


def is_there() -> bool:
    """Whether models that read images can be served from this environment."""
    return private_folder() is not None or is_installed()
