"""A GPU, as vLLM's CUDA build sees it: every byte that torch takes comes from our pool.

    weights         a region of the arena per engine; scrap under it while the engine is built
    kv_cache        a region of the arena per engine, one block one extent; the block that graphs
                    are padded with (vLLM's null block) has memory for good, counted as runtime
    all the rest    `RuntimeMemory`, through a memory pool of torch's that is in use from the start:
                    activations, workspaces, buffers of models, the memory of CUDA graphs

What torch takes while it captures graphs, but not for them, is torch's own, and is given back.
The CUDA context, kernels and what libraries take past torch lie outside, too.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from appliance.engines.vllm.seams import SeamMoved
from appliance.memory.arena import Arena, PoolExhausted, Region
from appliance.memory.cuda.driver import call, driver
from appliance.memory.cuda.scratch import Scratch
from appliance.memory.cuda.vmm import CudaVmm
from appliance.memory.runtime import RuntimeMemory
from appliance.memory.transfers import Transfer

PLACEHOLDER_BYTES: Final = 1 << 20
"""Parameters of at least so many bytes never get memory of torch's; smaller ones get it shortly."""

SIGNATURES: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    (Worker.get_supported_kv_cache_layouts, ()),
    (Worker.compile_or_warm_up_model, ()),
    (Worker._get_cudagraph_capture_context, ()),
    (Worker._init_workspace_and_model_runner, ()),
    (GPUModelRunner.initialize_kv_cache, ("kv_cache_config", "is_profiling")),
)

log = logging.getLogger("appliance.engines.vllm")

_Malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class CudaDevice:
    """Implements `appliance.engines.vllm.device.Device`. One per process, never taken down."""

    engine_args: Final[Mapping[str, Any]] = {
        "worker_cls": "appliance.engines.vllm.worker_cuda.ArenaWorker",
        "enforce_eager": False,
        # Graphs of decode steps, without a compiler: a prefill, which may overtake its weights'
        # copy, is eager anyway.
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        # The pool has the memory already, and vLLM wants to see so much of it free.
        "gpu_memory_utilization": 0.001,
    }
    block_outermost: Final = True
    graphs: Final = True
    host_memory: Final = False

    def __init__(self, vmm: CudaVmm, arena: Arena, runtime_slabs: int) -> None:
        """Torch's memory comes from the arena from now on, `runtime_slabs` slabs at most.

        Raises `SeamMoved` for another vLLM, or one that was not built for CUDA.
        """
        _check_seams()
        self.runtime = RuntimeMemory(arena, runtime_slabs)
        self._vmm = vmm
        self._index = vmm.context.device
        self._scratch = Scratch(self._index, vmm.slab_bytes)
        torch.cuda.set_device(self._index)
        # Not CUDA's default stream, on which no graph can be captured. vLLM goes on using it.
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(stream)
        vmm.compute_stream = stream.cuda_stream
        # Kept: torch has the bare addresses of the two functions.
        self._functions = (_Malloc(self._malloc), _Free(self._free))
        entries = [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self._functions]
        self._allocator = torch._C._cuda_customAllocator(*entries)
        self._pool = torch.cuda.MemPool(self._allocator)
        self._graphs = torch.cuda.MemPool(self._allocator)
        type(current_platform)._global_graph_pool = self._graphs.id
        self._using: AbstractContextManager[None] | None = None
        self._enter()

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        device = torch.device("cuda", self._index)
        storage: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        return empty.set_(storage, 0, (nbytes,), (1,))

    def wait(self, transfer: Transfer, nbytes: int | None = None) -> None:
        """The compute stream waits, this thread only until the copy is in line."""
        self._vmm.compute_waits(transfer, nbytes)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While vLLM builds a model: large empty tensors are scratch, and may not be kept."""
        try:
            with _OnScratch(self._scratch, self.bytes_at):
                yield
            torch.cuda.synchronize()
        finally:
            self._scratch.release()

    @contextmanager
    def warming_up(self, weights: Region, kv: Region, group: list[int]) -> Iterator[None]:
        """While vLLM runs a model for the first time, with no weights there.

        `group` are the slots of the KV cache in which vLLM's null block lies.
        """
        # Attention of a padded row, and of the first runs, reads the null block.
        self.runtime.charge(len(group))
        kv.map(group)
        with self._scratch.under(weights.address, weights.slots):
            yield
            torch.cuda.synchronize()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Within, torch's own memory is in use, so that graphs get theirs from their own pool:
        of two pools in use, torch takes from the first."""
        self._leave()
        try:
            yield
        finally:
            torch.cuda.empty_cache()
            self._enter()

    def check_no_scratch(self, model: torch.nn.Module) -> None:
        """Raise `SeamMoved` if a buffer of the model was made of scrap."""
        for name, buffer in model.named_buffers():
            if self._scratch.holds(buffer.data_ptr()):
                raise SeamMoved(f"the buffer {name} is made like a parameter; not supported")

    def _enter(self) -> None:
        self._using = torch.cuda.use_mem_pool(self._pool, self._index)
        self._using.__enter__()

    def _leave(self) -> None:
        assert self._using is not None, "the pool is not in use"
        self._using.__exit__(None, None, None)
        self._using = None

    def _malloc(self, nbytes: int, device: int, stream: int | None) -> int | None:
        """Called by torch, which reports None as out of memory."""
        try:
            with _relaxed():
                return self.runtime.take(nbytes)
        except (PoolExhausted, OSError) as error:
            log.error("torch gets no memory: %s", error)
            return None

    def _free(self, address: int, nbytes: int, device: int, stream: int | None) -> None:
        try:
            with _relaxed():
                call("cuCtxSynchronize")
                self.runtime.give(address)
        except (ValueError, OSError):
            log.exception("torch gives back what is not its own")


class _OnScratch(TorchFunctionMode):
    """Answers ``torch.empty`` on the GPU with scrap, if it is large: the parameters of a model."""

    def __init__(self, scrap: Scratch, bytes_at: Callable[[int, int], torch.Tensor]) -> None:
        super().__init__()
        self._scratch = scrap
        self._bytes_at = bytes_at

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.empty and torch.device(named.get("device") or "cpu").type == "cuda":
            like = func(*args, **(named | {"device": "meta"}))
            nbytes = math.prod(like.shape) * like.element_size()
            if nbytes >= PLACEHOLDER_BYTES:
                made = self._bytes_at(self._scratch.reserve(nbytes), nbytes).view(like.dtype)
                return made.view(like.shape).requires_grad_(like.requires_grad)
        return func(*args, **named)


@contextmanager
def _relaxed() -> Iterator[None]:
    """Within, this thread may map memory although a graph is being captured."""
    relaxed = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


def _check_seams() -> None:
    if not current_platform.is_cuda():
        raise SeamMoved(
            f"this vLLM runs on {current_platform.device_name}: install the extra 'gpu'"
        )
    for function, expected in SIGNATURES:
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        if tuple(names[: len(expected)]) != expected:
            raise SeamMoved(f"{function.__qualname__} takes {names}, not {expected}")
    if not hasattr(type(current_platform), "_global_graph_pool"):
        raise SeamMoved("vLLM's pool for CUDA graphs has moved")
