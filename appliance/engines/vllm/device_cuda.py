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

import contextlib
import ctypes
import gc
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.workspace import reset_workspace_manager

from appliance.engines.vllm.device import seeded
from appliance.engines.vllm.kv.placement import KvPlacement
from appliance.engines.vllm.seams import SeamMoved
from appliance.memory.arena import Arena, Region
from appliance.memory.cuda.allocator import RuntimeAllocator
from appliance.memory.cuda.driver import CudaError, call
from appliance.memory.cuda.scratch import Scratch
from appliance.memory.cuda.vmm import CudaVmm
from appliance.memory.runtime import RuntimeMemory
from appliance.memory.transfers import Transfer
from appliance.platform.installation import remedy_for

PLACEHOLDER_BYTES: Final = 1 << 20
"""Parameters of at least so many bytes never get memory of torch's; smaller ones get it shortly."""

SIGNATURES: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    (Worker.get_supported_kv_cache_layouts, ()),
    (Worker.compile_or_warm_up_model, ()),
    (Worker._get_cudagraph_capture_context, ()),
    (Worker._init_workspace_and_model_runner, ()),
    (Worker.execute_model, ("scheduler_output",)),
    (parallel_state.graph_capture, ("device",)),
    (parallel_state.GraphCaptureContext, ("stream",)),
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
        self._capture_stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._runtime_memory = RuntimeAllocator(
            self.runtime, capturing=torch.cuda.is_current_stream_capturing
        )
        # Kept: torch has the bare addresses of the two functions.
        self._functions = (_Malloc(self._malloc), _Free(self._free))
        entries = [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self._functions]
        self._allocator = torch._C._cuda_customAllocator(*entries)
        self._pool = torch.cuda.MemPool(self._allocator)
        self._graphs = torch.cuda.MemPool(self._allocator)
        type(current_platform)._global_graph_pool = self._graphs.id
        self._draws: dict[int, int] = {}
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

    def settle(self) -> None:
        # After an error that broke the context nothing computes any more.
        with contextlib.suppress(CudaError):
            call("cuStreamSynchronize", self._vmm.compute_stream)

    def generator(self, seed: int, tokens_drawn: int, vocabulary: int) -> torch.Generator:
        """vLLM draws a row of noise for each token, in whose state (Philox) only an offset moves,
        always by as much."""
        generator = seeded(f"cuda:{self._index}", seed)
        if tokens_drawn:
            generator.set_offset(tokens_drawn * self._draw(vocabulary))
        return generator

    def _draw(self, vocabulary: int) -> int:
        """By how much the offset moves for a token: measured once for a vocabulary."""
        if vocabulary not in self._draws:
            measured = seeded(f"cuda:{self._index}", 0)
            row = torch.empty(vocabulary, dtype=torch.float32, device=measured.device)
            row.exponential_(generator=measured)
            self._draws[vocabulary] = measured.get_offset()
        return self._draws[vocabulary]

    def retired(self, null_blocks: Sequence[int]) -> None:
        """Collects what was the engine's at once, on this thread: a tensor that another thread
        collects waits for torch's allocator, which may wait for the interpreter. vLLM has exempted
        its objects from collection."""
        self.runtime.discharge(len(null_blocks))
        reset_workspace_manager()  # the last engine's, which keeps its worker; all set their own
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        torch.cuda.empty_cache()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While vLLM builds a model: large empty tensors are scratch, and may not be kept."""
        try:
            with _OnScratch(self._scratch, self.bytes_at):
                yield
        finally:
            try:
                torch.cuda.synchronize()
            finally:
                self._scratch.release()

    def keep_null_block(self, placement: KvPlacement) -> None:
        """Have memory under vLLM's null block for the engine's life: attention of a padded row, and
        of the first runs, reads it. Raises `PoolExhausted`, `OSError`."""
        slots = placement.geometry.null_slots()
        self.runtime.keep(placement.region, slots)
        placement.null_block = slots

    @contextmanager
    def warming_up(self, weights: Region) -> Iterator[None]:
        """While vLLM runs a model for the first time, with no weights there."""
        with self._scratch.under(weights.address, weights.slots):
            try:
                yield
            finally:
                torch.cuda.synchronize()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Within, torch's own memory is in use, so that graphs get theirs from their own pool:
        of two pools in use, torch takes from the first. All engines capture on one stream: cuBLAS
        takes 32 MiB for each that it is used on, and keeps them."""
        on_any_stream = parallel_state.GraphCaptureContext
        self._leave()
        try:
            parallel_state.GraphCaptureContext = lambda _: on_any_stream(self._capture_stream)
            yield
            torch.cuda.empty_cache()
        finally:
            parallel_state.GraphCaptureContext = on_any_stream
            self._enter()
            self._runtime_memory.let_go()

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
        return self._runtime_memory.take(nbytes)

    def _free(self, address: int, nbytes: int, device: int, stream: int | None) -> None:
        self._runtime_memory.give(address)


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


def _check_seams() -> None:
    if not current_platform.is_cuda():
        raise SeamMoved(f"this vLLM runs on {current_platform.device_name}: {remedy_for('gpu')}")
    for function, expected in SIGNATURES:
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        if tuple(names[: len(expected)]) != expected:
            raise SeamMoved(f"{function.__qualname__} takes {names}, not {expected}")
    if not hasattr(type(current_platform), "_global_graph_pool"):
        raise SeamMoved("vLLM's pool for CUDA graphs has moved")
