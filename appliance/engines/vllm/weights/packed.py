"""Linear weights in oneDNN's packed form, in memory that is ours.

vLLM packs the weights of its CPU linear layers, too: batches run up to twice as fast. But its
packed copies are memory of oneDNN's own, which could never be unmapped. Here the packed bytes are
plain data, to be kept, copied and mapped like any other weight:

    plan          shape, type       ->  a `Packing`: how packed bytes lie, and how many there are
    Packing.pack  weight [out, in]  ->  its packed bytes
    view_at       an address        ->  a tensor over packed bytes: it multiplies, but owns nothing

The result of a product is bit for bit that of vLLM's own packed layers. The view is made through
the C interface that torch keeps for models compiled ahead of time.

oneDNN packs rows in blocks, one behind the other, so a weight can be packed some rows at a time,
while they are in the cache. And what it does to pairs of 16-bit numbers is what it does to 32-bit
ones, which takes a quarter of the time. Both are tried on every shape before they are relied on.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from appliance.engines.vllm.seams import SeamMoved
from appliance.engines.vllm.weights.tensors import bytes_at

TORCH: Final = "2.13.0"
PIECE_BYTES: Final = 4 << 20
"""About what is packed at a time."""
BLOCK_ROWS: Final = 64
"""Rows of a packed block; only tried, as any multiple of the true number would do."""

# Rows of input that oneDNN plans for: a decode batch. What it packs serves any other number.
PLANNED_ROWS: Final = 16

_DTYPES: Final = {
    torch.float32: "aoti_torch_dtype_float32",
    torch.bfloat16: "aoti_torch_dtype_bfloat16",
    torch.float16: "aoti_torch_dtype_float16",
}


@dataclass(frozen=True, slots=True)
class Packing:
    """How packed bytes are to be read: as a weight ``[out, in]``, in oneDNN's serialised words.

    A weight is packed `piece_rows` rows at a time; each piece but the last makes `piece_bytes`.
    `word` is the type as which its bits are moved.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    descriptor: bytes
    nbytes: int
    piece_rows: int
    piece_bytes: int
    word: torch.dtype

    @property
    def digest(self) -> str:
        """Equal for packed bytes that are read alike."""
        return hashlib.sha256(self.descriptor).hexdigest()

    def pack(self, weight: torch.Tensor, place: Callable[[int, int], None]) -> None:
        """Pack a weight, or whole pieces of one, and call `place` with the address of the packed
        bytes, which are gone when it returns, and their number. Raises `SeamMoved`."""
        with _reordered(weight.view(self.word)) as (data, _):
            place(data.data_ptr(), data.nbytes)


class PackedLinear:
    """What a vLLM layer calls as its `cpu_linear`: the product with a view of packed bytes."""

    __slots__ = ("_multiply", "address", "view")

    def __init__(self, address: int, packing: Packing) -> None:
        """Raises `SeamMoved` as `view_at` does."""
        self.address = address
        self.view = view_at(address, packing)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(
        self, x: torch.Tensor, weight: object, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x @ packed.T + bias``; `weight`, which vLLM hands along, is not looked at."""
        product: torch.Tensor = self._multiply(x, self.view, bias, "none", [], "")
        return product


def supports(dtype: torch.dtype) -> bool:
    """Whether weights of this type are packed on this machine; elsewhere they stay as they are.

    Packing is for x86-64, where it was measured, and for what the CPU has instructions for.
    Raises `SeamMoved` for another torch than the one that this was written for.
    """
    if platform.machine() != "x86_64":
        return False
    _library()
    if dtype == torch.float32:
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


@functools.cache
def plan(shape: tuple[int, int], dtype: torch.dtype) -> Packing:
    """How a weight of this shape and type is packed, whatever numbers it has.

    Packs one that is mostly zeros to find out, once per process. Raises `SeamMoved`.
    """
    rows, columns = shape
    row_bytes = columns * dtype.itemsize
    piece_rows = max(BLOCK_ROWS, PIECE_BYTES // row_bytes // BLOCK_ROWS * BLOCK_ROWS)
    word = torch.float32 if row_bytes % 4 == 0 else dtype
    weight = torch.zeros(shape, dtype=dtype)
    bits = weight.view(torch.uint8)
    pieces = -(-rows // piece_rows)
    dice = torch.Generator().manual_seed(0)
    for first in {0, (pieces - 1) * piece_rows}:
        bits[first : first + piece_rows].random_(generator=dice)
    with _reordered(weight) as (whole, descriptor):
        nbytes = whole.nbytes
        piece_bytes = -(-nbytes * piece_rows // (-(-rows // BLOCK_ROWS) * BLOCK_ROWS))
        packing = Packing(
            shape, dtype, descriptor, nbytes, piece_rows, min(piece_bytes, nbytes), word
        )
        if _packs_in_pieces(packing, weight, whole):
            return packing
    return replace(packing, piece_rows=rows, piece_bytes=nbytes, word=dtype)


def view_at(address: int, packing: Packing) -> torch.Tensor:
    """A tensor over packed bytes at a host address; the caller keeps them mapped.

    The bytes are not looked at, and need not be mapped, until something is multiplied. Raises
    `SeamMoved` if torch makes anything else than a view.
    """
    library = _library()
    out_features, in_features = packing.shape
    handle = ctypes.c_void_p()
    failed = library.aoti_torch_create_tensor_from_blob_v2(
        address,
        2,
        (ctypes.c_int64 * 2)(out_features, in_features),
        (ctypes.c_int64 * 2)(in_features, 1),
        0,
        getattr(library, _DTYPES[packing.dtype])(),
        library.aoti_torch_device_type_cpu(),
        0,
        ctypes.byref(handle),
        library.aoti_torch_layout__mkldnn(),
        packing.descriptor,
        len(packing.descriptor),
    )
    if failed or not handle.value:
        raise SeamMoved(f"torch makes no view of a packed weight {packing.shape}")
    view = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule(handle.value))
    if not view.is_mkldnn or _data_ptr(view) != address:
        raise SeamMoved(f"torch copied a packed weight instead of viewing it at {address:#x}")
    return view


def compute_alone() -> None:
    """From now on torch's operations in this thread run in it alone, with no threads of their own.

    For threads that share the CPUs among themselves. `torch.set_num_threads` is for the process.
    """
    torch.get_num_threads()  # the first question of a thread sets the number to the default
    ctypes.CDLL(str(_torch_library())).omp_set_num_threads(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within, oneDNN decides and computes for one thread, as the threads do that pack.

    How it packs a weight may depend on their number (it does where a CPU has no AVX-512), and
    instances with more or fewer processors share one image.
    """
    torch.get_num_threads()
    openmp = ctypes.CDLL(str(_torch_library()))
    threads = openmp.omp_get_max_threads()
    openmp.omp_set_num_threads(1)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(threads)


@contextmanager
def _reordered(weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, bytes]]:
    """The packed bytes of a weight, as long as the context lasts, and their descriptor."""
    _library()
    with _one_thread():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PLANNED_ROWS)
    if not packed.is_mkldnn:
        raise SeamMoved(f"torch packed a {weight.dtype} weight as {packed.layout}")
    descriptor = torch.ops.mkldnn._get_mkldnn_serialized_md(packed).numpy().tobytes()
    yield bytes_at(_data_ptr(packed), int(torch.ops.mkldnn._nbytes(packed))), descriptor


def _packs_in_pieces(packing: Packing, weight: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether the first and the last piece come out alike alone and in `whole`, and between them
    is nothing of theirs. All rows between are zero."""
    rows, size = packing.shape[0], packing.piece_bytes
    last = (rows - 1) // packing.piece_rows
    alike = []

    def compare(first: int, address: int, nbytes: int) -> None:
        found = whole[first : first + nbytes]
        alike.append(torch.equal(found, bytes_at(address, nbytes)))

    for piece in {0, last}:
        some = weight[piece * packing.piece_rows :][: packing.piece_rows]
        packing.pack(some, functools.partial(compare, piece * size))
    return all(alike) and not whole[size : last * size].any()


def _data_ptr(packed: torch.Tensor) -> int:
    return int(torch.ops.mkldnn.data_ptr(packed))


def _capsule(pointer: int) -> Any:
    """A pointer as torch's bindings take one."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(pointer, None, None)


def _torch_library() -> Path:
    return Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


@functools.cache
def _library() -> ctypes.CDLL:
    """Torch's C interface. Raises `SeamMoved` unless all that is used here is there."""
    if torch.__version__.partition("+")[0] != TORCH:
        raise SeamMoved(f"torch is {torch.__version__}, weights are packed for {TORCH}")
    library = ctypes.CDLL(str(_torch_library()))
    pointer, code, number = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    try:
        create = library.aoti_torch_create_tensor_from_blob_v2
        for name in (*_DTYPES.values(), "aoti_torch_device_type_cpu", "aoti_torch_layout__mkldnn"):
            getattr(library, name).restype = code
        for name in ("_linear_pointwise", "_reorder_linear_weight", "_get_mkldnn_serialized_md"):
            getattr(torch.ops.mkldnn, name)
        torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr  # noqa: B018
    except AttributeError as missing:
        raise SeamMoved(f"torch {TORCH} lacks a way to packed weights: {missing}") from missing
    # data, dimensions, sizes, strides, offset, dtype, device and its index, result, layout,
    # descriptor and its length
    create.argtypes = [pointer, number, pointer, pointer, number, code, code, code]
    create.argtypes += [pointer, code, ctypes.c_char_p, number]
    create.restype = code
    return library
