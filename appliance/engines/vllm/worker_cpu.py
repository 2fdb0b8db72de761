"""vLLM's CPU worker, with weights and KV cache in the arena instead of in memory of its own.

Not to be imported for a GPU: vLLM's CPU modules put dummies in the place of CUDA's streams.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from appliance.engines.vllm.layers.mends import mend_cpu_layers
from appliance.engines.vllm.worker import InArena

mend_cpu_layers()


class ArenaWorker(InArena, CPUWorker):  # type: ignore[misc]
    """The worker of an engine on the CPU."""
