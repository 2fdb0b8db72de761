"""vLLM's CPU worker, with weights and KV cache in the arena instead of in memory of its own.

Not to be imported for a GPU: vLLM's CPU modules put dummies in the place of CUDA's streams.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from appliance.engines.vllm.layers.heads import mend_biased_heads
from appliance.engines.vllm.layers.nomic import mend_nomic_experts
from appliance.engines.vllm.layers.rotary import mend_rotary_embeddings
from appliance.engines.vllm.layers.routing import mend_expert_routing
from appliance.engines.vllm.worker import InArena

mend_nomic_experts()
mend_rotary_embeddings()
mend_expert_routing()
mend_biased_heads()


class ArenaWorker(InArena, CPUWorker):  # type: ignore[misc]
    """The worker of an engine on the CPU."""
