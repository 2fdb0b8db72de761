"""The engines of a worker, on the memory of the CPU or of a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.engines.protocol import Engine
from appliance.memory.arena import Arena
from appliance.memory.host_tier import HostTier
from appliance.memory.swapper import Swapper
from appliance.memory.weight_cache.image_writer import ImageWriter
from appliance.memory.weight_cache.images import ImageFolder
from appliance.platform.cpus import read_cpus
from appliance.platform.gpus import read_gpu_numbers, show_gpus
from appliance.platform.numa import stay_near
from appliance.worker import frames
from appliance.worker.rank_messages import Build, Seat

if TYPE_CHECKING:
    from appliance.engines.vllm.device import Device

SWITCH_SECONDS = 0.0005


def engines(
    configuration: frames.Configure, host: HostTier, seat: Seat
) -> tuple[Build, Arena, Swapper]:
    """The executor of this machine, for one rank. vLLM is imported here, unless the process was
    forked from one that had done so.

    Of several ranks, each waits here for the others.
    """
    on_cpu = configuration.device == "cpu"
    stay_near(read_cpus(seat.cpus), computes=on_cpu)
    if not on_cpu:
        return _engines_on_gpu(configuration, host, seat)
    from appliance.memory.vmm_host import HostVmm

    # Before the process is bound to its processors: copies may use all that it was given.
    arena = Arena(HostVmm(configuration.slabs, configuration.slab_bytes))
    swapper = Swapper(arena.vmm.stream)
    # A thread that copies needs the interpreter for a moment after every piece, and would wait for
    # the longest time that the main thread may keep it: ten times that of copying a piece.
    sys.setswitchinterval(SWITCH_SECONDS)
    import_engines(seat.cpus)
    from appliance.engines.vllm.device import HostDevice
    from appliance.engines.vllm.executor import join_group

    if seat.ranks > 1:
        join_group(seat.rank, seat.ranks, seat.store, crowded=seat.crowded)
    images = None
    if configuration.images:
        images = ImageFolder(Path(configuration.images), seat.rank, ImageWriter(host))
    device, encoded = HostDevice(), configuration.encoded
    return _builder(host, arena, swapper, device, seat.ranks, images, encoded), arena, swapper


def import_engines(cpus: str) -> None:
    """Import vLLM for engines on these processors. No computation is begun: the process may be
    forked, and what is forked may call this again for other processors."""
    from appliance.engines.vllm.environment import move_environment, prepare_environment

    if "vllm" in sys.modules:
        move_environment(cpus)
        return
    prepare_environment(cpus)
    _provide_image_libraries()
    from appliance.engines.vllm import engine, executor, worker_cpu  # noqa: F401


def _engines_on_gpu(
    configuration: frames.Configure, host: HostTier, seat: Seat
) -> tuple[Build, Arena, Swapper]:
    """The same on a GPU. Its pool holds what models take besides weights and KV, too."""
    from appliance.engines.vllm.environment import prepare_environment
    from appliance.memory.cuda.vmm import CudaVmm

    # Before the driver is loaded: it asks the environment which GPU is ours.
    gpu = read_gpu_numbers(configuration.device)[seat.rank]
    prepare_environment(seat.cpus, show_gpus([gpu]))
    _provide_image_libraries()
    slabs = configuration.slabs + configuration.runtime_slabs
    vmm = CudaVmm(0, slabs, configuration.slab_bytes)
    vmm.register(host.address(0, host.nbytes), host.nbytes)
    arena = Arena(vmm)
    swapper = Swapper(vmm.stream)
    sys.setswitchinterval(SWITCH_SECONDS)
    from appliance.engines.vllm.device_cuda import CudaDevice

    device = CudaDevice(vmm, arena, configuration.runtime_slabs)
    if seat.ranks > 1:
        from appliance.engines.vllm.executor import join_group

        # Now that torch's memory is the pool's, and its stream the one that engines compute on.
        join_group(seat.rank, seat.ranks, seat.store, crowded=seat.crowded)
    return _builder(host, arena, swapper, device, seat.ranks), arena, swapper


def _provide_image_libraries() -> None:
    """For models that read images: one may be added to a worker that has begun without any."""
    from appliance.engines.vllm.images.libraries import inspect_here, provide_torchvision

    if provide_torchvision():
        inspect_here()


def _builder(
    host: HostTier,
    arena: Arena,
    swapper: Swapper,
    device: Device,
    ranks: int,
    images: ImageFolder | None = None,
    encoded: bool = False,
) -> Build:
    from appliance.engines.vllm.engine import VllmEngine

    def build(model: frames.WorkerModel) -> Engine:
        return VllmEngine.build(
            model.name,
            model.path,
            dtype=model.dtype,
            max_context=model.max_context,
            max_batch=model.max_batch,
            arena=arena,
            host=host,
            swapper=swapper,
            verify=model.verify,
            ranks=ranks,
            device=device,
            images=images,
            task=model.task,
            reasoning_parser=model.reasoning_parser,
            max_logprobs=model.max_logprobs,
            pooler_config=model.pooler_config,
            prompt_images=model.images,
            prompt_sounds=model.sounds,
            adapters=model.adapters,
            adapter_room=model.adapter_room,
            speculation=model.speculation,
            encoded=encoded,
            embedding_task=model.embedding_task,
        )

    return build
