"""vLLM looks at the class of a model in this process: a front end may start no other.

vLLM does so in a process of its own, which keeps CUDA out of a server's. A front end has no device.
What vLLM remembers of a class in its cache is read; a front end writes no files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vllm.model_executor.models import registry

T = TypeVar("T")


def inspect_here() -> None:
    """Have classes of models be inspected in this process from now on."""
    registry._run_in_subprocess = _run_here
    registry._LazyRegisteredModel._save_modelinfo_to_cache = _forget


def _run_here(fn: Callable[[], T]) -> T:
    return fn()


def _forget(model: object, info: object, digest: str) -> None:
    """A worker that inspects the class writes the cache."""
