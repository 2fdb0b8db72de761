"""The adapters of an engine: which one a request asks for, and what vLLM's runner does with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.lora.layers import LoRAMapping
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from appliance.checkpoints.adapters import (
    Adapter,
    AdapterPlace,
    AdapterRoom,
    AdapterStacks,
    check_base,
    full_name,
    read_adapters,
)
from appliance.checkpoints.model_config import ModelConfig
from appliance.engines.vllm.device import Device
from appliance.engines.vllm.lora.products import AdapterProducts
from appliance.errors import CheckpointError
from appliance.vocabulary import Task


@dataclass(frozen=True, slots=True)
class BaseAdapters:
    """The adapters that a base is built with, and the places it has for them and for others."""

    base: ModelConfig
    room: AdapterRoom | None
    adapters: tuple[Adapter, ...]
    stacks: AdapterStacks

    @classmethod
    def read(
        cls,
        base: ModelConfig,
        places: Sequence[AdapterPlace],
        room: AdapterRoom | None,
        task: Task,
        ranks: int,
        device: Device,
    ) -> BaseAdapters:
        """Raises `CheckpointError`, also for a base that is not served with adapters."""
        cuda = not device.host_memory
        if room is not None:
            check_base(base, task=task, ranks=ranks, cuda=cuda)
        adapters = read_adapters(places, base, task, ranks, cuda=cuda)
        return cls(base, room, adapters, AdapterStacks.plan(adapters, base, room))

    def others(
        self, places: Sequence[AdapterPlace], known: Sequence[Adapter]
    ) -> tuple[Adapter, ...]:
        """Those that the base is to have instead: the `known` ones as they are, the rest as it is
        read. Raises `CheckpointError`."""
        if self.room is None:
            raise CheckpointError(
                f"{self.base.path} has no room for other adapters: max_loras is 0"
            )
        kept = {adapter.place: adapter for adapter in known}
        unread = [place for place in places if place not in kept]
        found = kept | {adapter.place: adapter for adapter in read_adapters(unread, self.base)}
        adapters = tuple(found[place] for place in places)
        AdapterStacks.plan(adapters, self.base, self.room)
        return adapters


class FixedAdapters:
    """Replaces the manager of adapters of vLLM's runner: all are in their places."""

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

    def __init__(self, model: str, adapters: BaseAdapters, runner: GPUModelRunner) -> None:
        """From now on the `runner` of the model, in whose weights they are, computes with them."""
        self._model = model
        self._base = adapters
        self._known: dict[str, LoRARequest] = {}
        self._adapters: tuple[Adapter, ...] = ()
        if adapters.stacks.slots:
            runner.lora_manager = FixedAdapters(runner.get_model().lora_manager)
        self.change(adapters.adapters)

    def read(self, places: Sequence[AdapterPlace], slots: Collection[int]) -> tuple[Adapter, ...]:
        """Those that the model is to have instead. Those outside of `slots` stay what they are in
        its weights, whatever lies at their paths by now. Raises `CheckpointError`."""
        known = [adapter for adapter in self._adapters if adapter.place.slot not in slots]
        return self._base.others(places, known)

    def change(self, adapters: Sequence[Adapter]) -> None:
        """These are there from now on. Blocks of KV are known by the path, too, so that none is
        shared with an adapter that has had the same one."""
        self._adapters = tuple(adapters)
        self._known = {
            full_name(self._model, adapter.place.name): LoRARequest(
                lora_name=adapter.place.name,
                lora_int_id=1 + adapter.place.slot,
                lora_path=adapter.identity,
            )
            for adapter in adapters
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


def lora_arguments(stacks: AdapterStacks) -> dict[str, Any]:
    """Arguments of vLLM's engine. The tensors that vLLM makes itself are as small as it can make
    them: `stack_adapters` replaces them."""
    if not stacks.slots:
        return {}
    targets = {name.rpartition(".")[2] for name in stacks.layers}
    return {
        "enable_lora": True,
        "max_loras": stacks.slots,
        "max_lora_rank": 1,
        "lora_target_modules": sorted(targets),
    }
