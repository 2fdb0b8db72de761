"""The adapters of an engine: which one a request asks for, and what vLLM's runner does with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.lora.layers import LoRAMapping
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from appliance.checkpoints.adapters import Adapter, full_name
from appliance.engines.vllm.lora.products import AdapterProducts


class FixedAdapters:
    """Replaces the manager of adapters of vLLM's runner: all are in place for good."""

    def __init__(self, products: AdapterProducts) -> None:
        self._products = products

    def set_active_adapters(self, requests: set[LoRARequest], mapping: LoRAMapping) -> None:
        """The next step has tokens of these adapters: numbered from 1 in vLLM, where 0 is none."""
        self._products.begin([number - 1 for number in mapping.index_mapping])

    def supports_tower_connector_lora(self) -> bool:
        """Whether encoders of images have adapters, too."""
        return False


class AdapterTable:
    """The adapters of a model, by what clients call them with it."""

    def __init__(self, model: str, adapters: Sequence[Adapter], runner: GPUModelRunner) -> None:
        """From now on the `runner` of the model, in whose weights they are, computes with them."""
        self._model = model
        if adapters:
            runner.lora_manager = FixedAdapters(runner.get_model().lora_manager)
        self._known = {
            full_name(model, adapter.place.name): LoRARequest(
                lora_name=adapter.place.name, lora_int_id=number, lora_path=adapter.place.path
            )
            for number, adapter in enumerate(adapters, 1)
        }

    def asked(self, request: EngineCoreRequest) -> LoRARequest | None:
        """The adapter that a request names; nothing else of what it says about it is looked at.
        Raises `ValueError` for one that the model has not."""
        if request.lora_request is None:
            return None
        name = request.lora_request.lora_name
        known = self._known.get(name)
        if known is None:
            raise ValueError(f"{self._model} has no adapter {name}")
        return known


def lora_arguments(adapters: Sequence[Adapter]) -> dict[str, Any]:
    """Arguments of vLLM's engine. The tensors that vLLM makes itself are as small as it can make
    them: `stack_adapters` replaces them."""
    if not adapters:
        return {}
    targets = {name.rpartition(".")[2] for adapter in adapters for name in adapter.layers}
    return {
        "enable_lora": True,
        "max_loras": len(adapters),
        "max_lora_rank": 1,
        "lora_target_modules": sorted(targets),
    }
