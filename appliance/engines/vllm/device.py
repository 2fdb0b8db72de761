"""What an engine asks of the device it computes on: the seam between the CPU build and CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

import torch

from appliance.engines.vllm.weights import tensors
from appliance.memory.transfers import Transfer


class Device(Protocol):
    """One for all engines of a process."""

    @property
    def engine_args(self) -> Mapping[str, Any]:
        """vLLM's configuration: the worker, and whether steps run as CUDA graphs."""
        ...

    @property
    def block_outermost(self) -> bool:
        """Whether all layers of a KV block lie side by side; else all blocks of a layer do."""
        ...

    @property
    def graphs(self) -> bool:
        """Whether a step of one token for each request runs as a graph, past the modules' hooks."""
        ...

    @property
    def host_memory(self) -> bool:
        """Whether threads of the CPU can write to the device's addresses."""
        ...

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        """A ``uint8`` tensor over addresses of the device, mapped or not."""

    def wait(self, transfer: Transfer, nbytes: int | None = None) -> None:
        """What is computed from now on comes after these bytes of a transfer: the first `nbytes`,
        or all. Raises `TransferFailed` if it is known that they will not arrive."""


class HostDevice:
    """The CPU. Addresses are the process's own, and a wait blocks its thread."""

    engine_args: Final[Mapping[str, Any]] = {
        "worker_cls": "appliance.engines.vllm.worker_cpu.ArenaWorker",
        "enforce_eager": True,
    }
    block_outermost: Final = False
    graphs: Final = False
    host_memory: Final = True

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        return tensors.bytes_at(address, nbytes)

    def wait(self, transfer: Transfer, nbytes: int | None = None) -> None:
        transfer.wait(nbytes)
