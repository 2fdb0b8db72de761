"""What processes of plain vLLM on a CPU import, with its `worker_extension_cls`, to compute layers
as the appliance does where vLLM is wrong: workers of several ranks are processes of their own."""

from __future__ import annotations

from typing import Final

from appliance.engines.vllm.layers.heads import mend_biased_heads
from appliance.engines.vllm.layers.per_layer import mend_per_layer_embeddings
from appliance.engines.vllm.layers.rotary import mend_rotary_embeddings
from appliance.engines.vllm.layers.routing import mend_expert_routing

mend_per_layer_embeddings()
mend_rotary_embeddings()
mend_expert_routing()
mend_biased_heads()


class Mended:
    """Adds nothing to a worker: it is there to be imported."""


EXTENSION: Final = f"{Mended.__module__}.{Mended.__qualname__}"
"""Its name, for `worker_extension_cls`."""
