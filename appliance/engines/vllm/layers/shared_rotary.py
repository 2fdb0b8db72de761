"""Rotary embeddings that ERNIE 4.5 (dense) changes, although other models of the process have them.

vLLM makes one object for all layers and models whose embeddings have the same numbers, and has
ERNIE rotate neighbours by a flag of that object. A Llama that was built before or after it, with
the same numbers, then rotated its queries and keys as ERNIE does.

Processes of plain vLLM that outputs are compared with do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.models.ernie45 import Ernie4_5ForCausalLM

of_vllm: Final[Callable[..., None]] = Ernie4_5ForCausalLM.__init__
"""As vLLM has it."""


def keep_rotary_embeddings_apart() -> None:
    """Have ERNIE 4.5 built with embeddings of its own; call before a model is built. Idempotent."""
    Ernie4_5ForCausalLM.__init__ = _init


def _init(self: Ernie4_5ForCausalLM, **arguments: Any) -> None:
    shared = dict(_ROPE_DICT)
    _ROPE_DICT.clear()
    try:
        of_vllm(self, **arguments)
    finally:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(shared)
