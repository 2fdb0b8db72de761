"""Tensor parallelism in processes that are there already: each is one rank, for all its models.

vLLM's own executors start a process per rank for every model. Here a process joins the group of
ranks once (`join_group`), before any model is built; `RankExecutor` then gives a model the one
worker of this rank. Every rank runs a scheduler and a sampler of its own, as under vLLM's external
launcher: logits are gathered on all ranks, so all draw the same token from them.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.cpu_communicator import (
    CpuCommunicator,
    _CPUSHMDistributed,
)
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from appliance.engines.vllm.seams import SeamMoved, check_seams

COLLECTIVE_SECONDS: Final = 120.0
"""How long a rank waits for the others: in gloo's collectives, and for all to be there."""

SHARED_MEMORY: Final = Path("/dev/shm")


class RankExecutor(UniProcExecutor):  # type: ignore[misc]
    """One worker, in this process, which is the rank that it joined the group as."""

    def _distributed_args(self) -> tuple[str, int, int]:
        """The group is there: vLLM finds it, and checks that it has the right size."""
        group = parallel_state.get_tp_group()
        return "env://", group.rank_in_group, group.local_rank


def join_group(rank: int, ranks: int, store: str, *, crowded: bool) -> None:
    """Make the process groups that all models of this process share; returns when all have joined.

    `store` is a file that the ranks have in common, of a name that none had before. Ranks exchange
    through NCCL on GPUs, of which each sees its own only; on CPUs through shared memory, in which
    they wait by spinning, or if they are `crowded`, on fewer processors than there are ranks,
    through gloo's sockets. On a GPU, its `CudaDevice` is made before. Raises `SeamMoved` for
    another vLLM, `RuntimeError` if a rank does not come.
    """
    check_seams()
    current_platform.import_kernels()
    on_gpu = current_platform.is_cuda()
    if on_gpu:
        # It registers the addresses that graphs reduce, by handles that memory of slabs does not
        # have. It would be made with the group, where an engine's arguments are not known.
        parallel_state.set_custom_all_reduce(False)
    elif crowded:
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    os.environ["VLLM_DIST_IDENT"] = Path(store).name
    parallel = ParallelConfig(
        tensor_parallel_size=ranks, distributed_executor_backend="external_launcher"
    )
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        parallel_state.init_distributed_environment(
            ranks,
            rank,
            f"file://{store}",
            0 if on_gpu else rank,
            current_platform.dist_backend,
            timedelta(seconds=COLLECTIVE_SECONDS),
        )
        parallel_state.ensure_model_parallel_initialized(ranks, 1)
    _forget_names(rank)


def ensure_expert_group(config: VllmConfig) -> None:
    """Have a group of ranks for experts, if the model has any and none is there: vLLM makes it with
    the other groups, for the first model of a process, and only if that one has experts."""
    there = parallel_state.model_parallel_is_initialized()
    if not there or parallel_state._EP is not None or not config.model_config.is_moe:
        return
    world = parallel_state.get_world_group()
    parallel_state._EP = parallel_state.init_model_parallel_group(
        [world.ranks],
        world.local_rank,
        torch.distributed.get_backend(world.device_group),
        group_name="ep",
        use_all2all=config.parallel_config.use_all2all,
    )


def _forget_names(rank: int) -> None:
    """Remove the names of the memory that the ranks share: all have it, and keep it while they
    live. A name would outlive a process that is killed."""
    group = parallel_state.get_tp_group()
    group.barrier()
    exchange = getattr(group.device_communicator, "dist_module", None)  # of CPUs only
    if isinstance(exchange, _CPUSHMDistributed):
        file = SHARED_MEMORY / f"{exchange.group_name}_{rank}"
        if not file.exists():
            raise SeamMoved(f"vLLM's shared memory is not {file}")
        file.unlink()
    if rank == 0 and group.mq_broadcaster is not None:
        group.mq_broadcaster.buffer.shared_memory.unlink()
