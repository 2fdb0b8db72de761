"""Makes torchvision importable in this process, which vLLM's models that read images import.

The published build registers its operators from a library that only a torch for CUDA can load.
Python code in it declares how two of them behave without data, and so fails to be imported. No
model that is served here calls them: it is enough that they are declared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final, TypeVar

from appliance.platform.torchvision import is_installed, private_folder

T = TypeVar("T")

_OPERATORS: Final = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_kept: list[object] = []
"""Declarations end with the object that made them."""


def provide_torchvision() -> bool:
    """Have `import torchvision` work from here on; call before anything imports transformers or
    vLLM, which look for it once. Returns whether it is there now.

    Does nothing where it is installed among other packages. Raises `RuntimeError` if transformers
    is imported already and has not found it.
    """
    if is_installed():
        return True
    folder = private_folder()
    if folder is None:
        return False
    if "transformers" in sys.modules:
        raise RuntimeError("transformers is imported already, and knows of no torchvision")
    import torch

    if torch.version.cuda is None:
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for operator in _OPERATORS:
            library.define(operator)  # type: ignore[no-untyped-call]
        _kept.append(library)
    sys.path.append(str(folder))  # last: nothing else in it hides what is installed
    return True


def inspect_here() -> None:
    """Have vLLM look at the class of a model in this process: one that it starts for it would not
    find torchvision. What it remembers of the class in its cache is read and written as before."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = _run_here


def _run_here(fn: Callable[[], T]) -> T:
    return fn()
