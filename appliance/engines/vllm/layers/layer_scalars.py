"""The factor of each layer of Gemma 4, which vLLM loads into a buffer. Weights lie in the arena and
are loaded by recipes, both of which are of parameters: so it is made one.

No mend: plain vLLM computes the same from its buffer, and is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from vllm.model_executor.models.gemma4 import Gemma4DecoderLayer

_NAME: Final = "layer_scalar"
of_vllm: Final[Callable[..., None]] = Gemma4DecoderLayer.__init__


def make_layer_scalars_parameters() -> None:
    """Call before a model is built. Nothing is computed otherwise. Idempotent."""
    Gemma4DecoderLayer.__init__ = _init


def _init(self: Gemma4DecoderLayer, *args: Any, **kwargs: Any) -> None:
    of_vllm(self, *args, **kwargs)
    factor = getattr(self, _NAME)
    delattr(self, _NAME)
    self.register_parameter(_NAME, torch.nn.Parameter(factor, requires_grad=False))
