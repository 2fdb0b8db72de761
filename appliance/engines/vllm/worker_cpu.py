"""vLLM's CPU worker, with weights and KV cache in the arena instead of in memory of its own.

Not to be imported for a GPU: vLLM's CPU modules put dummies in the place of CUDA's streams.
"""

from __future__ import annotations

from typing import Final

from vllm.v1.worker.cpu_worker import CPUWorker

from appliance.engines.vllm.layers import nomic, overrides, routing
from appliance.engines.vllm.layers.mends import mend_cpu_layers
from appliance.engines.vllm.seams import Signatures, check_signatures
from appliance.engines.vllm.worker import InArena

SIGNATURES: Final[Signatures] = (
    (nomic.of_vllm, ("hidden_states",)),
    (overrides.of_vllm, ()),
    (routing.of_vllm, ("hidden_states", "router_logits", "indices_type")),
)
"""What is relied on besides those of `appliance.engines.vllm.seams`."""

check_signatures(SIGNATURES)
mend_cpu_layers()


class ArenaWorker(InArena, CPUWorker):  # type: ignore[misc]
    """The worker of an engine on the CPU."""
