"""Stands in for the libraries that vLLM's modules of models with images import, where these are not
installed: of a model whose text alone is computed, nothing in them is ever called."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_LIBRARY: Final = "torchvision"


class _Anything(type):
    """Of a class that has every attribute; each is such a class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {"__getattr__": lambda self, attribute: None})


class _StandIn(ModuleType):
    """Has whatever is imported from it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {"__getattr__": lambda self, attribute: None})


class _Finder:
    """Finds the library, and all modules of it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != _LIBRARY:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


def stand_in() -> None:
    """Have vLLM import its models with images in this process. Everything else knows before that
    the library is not there."""
    if importlib.util.find_spec(_LIBRARY) is not None:
        return
    from transformers.utils import is_torchvision_available
    from vllm.model_executor.models import registry

    assert not is_torchvision_available(), "what transformers says once, it says always"
    sys.meta_path.append(_Finder())  # type: ignore[arg-type]

    def run_here(fn: Callable[[], Any]) -> Any:
        return fn()  # a process of its own would lack the stand-in

    registry._run_in_subprocess = run_here


def main() -> None:
    """What `appliance.engines.vllm.reference` does, also for models with images."""
    from appliance.engines.vllm import reference

    prepare = reference.prepare_environment

    def prepare_and_stand_in(*where: str) -> None:
        prepare(*where)
        stand_in()

    reference.prepare_environment = prepare_and_stand_in
    reference.main()


if __name__ == "__main__":
    main()
