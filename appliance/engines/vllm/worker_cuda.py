"""vLLM's GPU worker, with weights, KV cache and all else in the arena. See `device_cuda`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from appliance.engines.vllm.device_cuda import CudaDevice
from appliance.engines.vllm.kv.placement import current_placement
from appliance.engines.vllm.layers.mends import mend_layers
from appliance.engines.vllm.worker import InArena, UnsupportedKvCache

mend_layers()


class ArenaWorker(InArena, Worker):  # type: ignore[misc]
    """Builds a model whose weights have addresses, and captures its graphs there."""

    def _init_workspace_and_model_runner(self) -> None:
        """Keeps this engine's workspace: the next engine's takes its place in the process."""
        super()._init_workspace_and_model_runner()
        self._workspace = workspace.current_workspace_manager()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        device = _device()
        with device.loading():
            super().load_model(load_dummy_weights=load_dummy_weights)
            device.check_no_scratch(self.model_runner.get_model())

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Those in which a block is one extent."""
        names: list[str] = super().get_supported_kv_cache_layouts()
        fitting = [name for name in names if KVCacheLayout[name].is_block_outermost]
        # Of these, the ones that put the layers next: a layer's part of a block is one run.
        fitting = [name for name in fitting if KVCacheLayout[name].is_block_compact]
        if not fitting:
            raise UnsupportedKvCache(f"the attention backend lays KV out as {names} only")
        return fitting

    def compile_or_warm_up_model(self) -> CompilationTimes:
        placement = current_placement()
        if placement.tables:
            _device().keep_null_block(placement)
        most = self.vllm_config.scheduler_config.max_num_batched_tokens
        with _device().warming_up(placement.placed.weights.region):
            # vLLM's profile, which is skipped, would have had the workspace grow to what the
            # largest step takes; it is locked once graphs are captured.
            self.model_runner._dummy_run(most, skip_eplb=True, remove_lora=False)
            return super().compile_or_warm_up_model()

    def execute_model(self, *arguments: Any, **named: Any) -> Any:
        """In this engine's workspace: the graphs use the memory they were captured with."""
        workspace._manager = self._workspace
        return super().execute_model(*arguments, **named)

    def _get_cudagraph_capture_context(self) -> AbstractContextManager[None]:
        return _device().capturing()


def _device() -> CudaDevice:
    device = current_placement().device
    assert isinstance(device, CudaDevice), "this worker is for a GPU"
    return device
