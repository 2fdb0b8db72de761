"""Gates: a forward pass that starts before its weights are there, and waits layer by layer.

The bytes of an image land in the order of the layers. For a step during a load, and only for that
one, every decoder layer, embedding and norm has a hook that waits, before it computes, for as many
bytes as end behind its own parameters. The logits, or the pooler, wait for all of them.

A layer as a whole has one gate: what is inside may read a weight without calling its module. What
reads images has none, and lies last: a step that may use it waits for all weights (`holding_all`).
A head that drafts tokens has none either, and lies behind it: it waits by itself, once the step
has its tokens (`drafts.heads`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final, NamedTuple

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from appliance.engines.vllm.device import Device
from appliance.engines.vllm.seams import SeamMoved
from appliance.engines.vllm.weights.parameters import drafts_tokens, layer_of, reads_images
from appliance.memory.transfers import Transfer
from appliance.memory.weights import DeviceWeights


class WeightGate(NamedTuple):
    """What waits, and for how many bytes of the image."""

    name: str
    module: torch.nn.Module
    end: int


_BEHIND: Final = frozenset({"pooler", "pooling", "classifier"})
"""Modules that only a pooler calls, if its way of pooling needs them: it waits for all weights."""


class Gates:
    """The gates of one model, whose parameters lie in the region of `weights`."""

    def __init__(self, model: torch.nn.Module, weights: DeviceWeights, device: Device) -> None:
        self._device = device
        ends: dict[str, int] = {}
        last = [
            (name, module)
            for name, module in model.named_modules()
            if (isinstance(module, LogitsProcessor) or name == "pooler") and not drafts_tokens(name)
        ]
        pools = any(name == "pooler" for name, _ in last)
        # Without a module to hold back, nothing can be: all must be there before the pass begins.
        self._ahead = 0 if last else weights.layout.nbytes
        text = 0
        for name, parameter in model.named_parameters(remove_duplicate=False):
            owner = name.rpartition(".")[0]
            module = model.get_submodule(owner)
            if not parameter.numel() or reads_images(model, name) or drafts_tokens(name):
                continue
            end = parameter.data_ptr() - weights.region.address
            end += parameter.numel() * parameter.element_size()
            text = max(text, end)
            if isinstance(module, ParallelLMHead):
                continue
            if pools and not _BEHIND.isdisjoint(owner.split(".")):
                continue
            gate = layer_of(model, name) or owner
            if gate == owner and any(True for _ in module.children()):
                # vLLM calls the model around the layers in a way that a hook does not see.
                self._ahead = max(self._ahead, end)
            else:
                ends[gate] = max(ends.get(gate, 0), end)
        self._gates = [
            WeightGate(name, model.get_submodule(name), end) for name, end in ends.items()
        ]
        self._gates += [WeightGate(name, module, text) for name, module in last]

    @contextmanager
    def holding(self, transfer: Transfer) -> Iterator[None]:
        """Within, a forward pass waits for its weights; nothing is in its way once all landed.

        Raises `TransferFailed` if they do not land, in the pass or before, and `SeamMoved` if a
        module did not come through its gate, and so may have computed with anything.
        """
        if transfer.done:
            transfer.wait()
            yield
            return
        self._device.wait(transfer, self._ahead)
        passed: set[str] = set()
        with ExitStack() as stack:
            for gate in self._gates:
                stack.enter_context(self._closed(gate, transfer, passed))
            yield
        transfer.wait(max((gate.end for gate in self._gates), default=self._ahead))
        if missed := {gate.name for gate in self._gates} - passed:
            raise SeamMoved(f"not called as modules, so not held back: {sorted(missed)}")

    @contextmanager
    def holding_all(self, transfer: Transfer) -> Iterator[None]:
        """The same for a pass that calls no module, as it runs as a graph, or that reads images:
        it waits for all."""
        if not transfer.done:
            self._device.wait(transfer)
        yield
        transfer.wait()

    @contextmanager
    def _closed(self, gate: WeightGate, transfer: Transfer, passed: set[str]) -> Iterator[None]:
        """Within, the module waits for its bytes before it computes."""

        def wait(module: torch.nn.Module, args: object) -> None:
            self._device.wait(transfer, gate.end)
            passed.add(gate.name)

        handle = gate.module.register_forward_pre_hook(wait)
        try:
            yield
        finally:
            handle.remove()
