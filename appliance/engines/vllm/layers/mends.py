"""All that the appliance mends of vLLM's layers, for processes that compute with them: workers, and
those of plain vLLM that outputs are compared with (docs/models.md). Call before the first model is
built. Idempotent.

What only has another form for weights in the arena is no mend, and is not here (`layer_scalars`).
"""

from __future__ import annotations

from appliance.engines.vllm.layers.heads import mend_biased_heads
from appliance.engines.vllm.layers.per_layer import mend_per_layer_embeddings
from appliance.engines.vllm.layers.shared_rotary import keep_rotary_embeddings_apart
from appliance.engines.vllm.layers.suppressed_tokens import suppress_tokens


def mend_layers() -> None:
    """What is wrong on every device."""
    mend_biased_heads()
    mend_per_layer_embeddings()
    keep_rotary_embeddings_apart()
    suppress_tokens()


def mend_cpu_layers() -> None:
    """What is wrong, slow or missing on the CPU as well."""
    # These import what vLLM has for CPUs: not for the worker of a GPU.
    from appliance.engines.vllm.layers.nomic import mend_nomic_experts
    from appliance.engines.vllm.layers.overrides import register_overrides_once
    from appliance.engines.vllm.layers.padded_values import pad_values
    from appliance.engines.vllm.layers.rotary import mend_rotary_embeddings
    from appliance.engines.vllm.layers.routing import mend_expert_routing

    mend_layers()
    mend_expert_routing()
    mend_nomic_experts()
    mend_rotary_embeddings()
    pad_values()
    register_overrides_once()
