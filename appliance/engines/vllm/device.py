"""What an engine asks of the device it computes on: the seam between the CPU build and CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from appliance.checkpoints.kv_layers import is_compressed
from appliance.checkpoints.model_config import ModelConfig
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

    def settle(self) -> None:
        """Return when nothing that was given to the device to compute is under way: what it
        touches may be unmapped."""

    def generator(self, seed: int, tokens_drawn: int, vocabulary: int) -> torch.Generator:
        """What a request draws from after `tokens_drawn` tokens of so many, with vLLM's sampler of
        the device. Raises `ValueError` for a seed that is beyond 64 bits."""
        ...

    def retired(self, null_blocks: Sequence[int]) -> None:
        """An engine has given back its addresses. The `null_blocks` were the slots of its KV cache
        in which vLLM's null block lies."""


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

    def settle(self) -> None:
        """Compute is over when its call returns."""

    def generator(self, seed: int, tokens_drawn: int, vocabulary: int) -> torch.Generator:
        """vLLM's CPU sampler draws one integer for each token, as here."""
        generator = seeded("cpu", seed)
        for _ in range(tokens_drawn):
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        return generator

    def retired(self, null_blocks: Sequence[int]) -> None:
        """The null block has no memory."""


def attention(config: ModelConfig, device: Device) -> AttentionBackendEnum | None:
    """What vLLM attends with; None leaves it to vLLM. For MLA on a CPU with AMX it would take one
    that rearranges weights after they are loaded."""
    on_cpu = device.host_memory
    return AttentionBackendEnum.CPU_MLA if on_cpu and is_compressed(config) else None


def seeded(device: str, seed: int) -> torch.Generator:
    """A generator before its first draw. Raises `ValueError` for a seed that is beyond 64 bits."""
    generator = torch.Generator(device=device)
    try:
        generator.manual_seed(seed)
    except (RuntimeError, OverflowError) as error:
        raise ValueError(f"seed {seed} is beyond 64 bits") from error
    return generator
