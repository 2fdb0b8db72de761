"""Loading: from a checkpoint's files to an image of the weights, as a recipe says.

The image is cut in pieces, which several threads make in the order in which they lie in it:

    as stored             read to its place
    another type, strided read to a buffer, converted (and multiplied, if it is of floats of 8
                          bits, or of what products are made of, or added to the adapter of a
                          task), copied to its place
    packed                either of the two to a buffer, packed, copied to its place
    quantized             the same for all tensors of a layer, which are converted together

Files are read, not mapped: one that becomes shorter is an error then, and not the end of the
process.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
import vllm

from appliance.checkpoints.checksums import SUMS
from appliance.checkpoints.safetensors import WeightFile, io_errors, verify_sums
from appliance.engines.vllm.weights import packed
from appliance.engines.vllm.weights.convolutions import ConvolutionPacking
from appliance.engines.vllm.weights.experts import ExpertPacking
from appliance.engines.vllm.weights.packed import Packing
from appliance.engines.vllm.weights.recipe import DTYPES, Ingredients, LayerRecipe, Origin, Write
from appliance.errors import CheckpointError
from appliance.memory import mapping
from appliance.memory.transfers import Transfer, TransferKind
from appliance.memory.weight_cache.pipeline import make_pieces
from appliance.memory.weights import Image, WeightLayout

PIECE_BYTES: Final = 4 << 20
"""About what is converted at a time: it should stay in a cache."""
READ_BYTES: Final = 16 << 20
"""About what is read to its place at a time: every call has its price."""


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """`nbytes` bytes of the image, at `offset`: `elements` of `dtype`, or what they are packed to.

    `writes` start at the piece's own first element.
    """

    offset: int
    nbytes: int
    dtype: torch.dtype
    elements: int
    writes: tuple[Write, ...]
    packing: Packing | ExpertPacking | ConvolutionPacking | None

    @property
    def as_stored(self) -> bool:
        """Whether it can be read straight to its place."""
        return self.packing is None and all(_is_read(write, self.dtype) for write in self.writes)


@dataclass(frozen=True, slots=True)
class LayerPiece:
    """`nbytes` bytes of the image, at `offset`: all tensors of a quantized layer, of which each
    `starts` at its own offset in the image."""

    offset: int
    nbytes: int
    recipe: LayerRecipe
    starts: Mapping[str, int]

    @property
    def writes(self) -> tuple[Write, ...]:
        """Of all tensors that the layer is loaded into."""
        return tuple(write for _, stored in self.recipe.stored for write in stored.writes)


class CheckpointImage:
    """Writes the image of one engine from its checkpoint: an `appliance.memory.weights.Write`."""

    def __init__(
        self,
        files: Sequence[WeightFile],
        layout: WeightLayout,
        ingredients: Mapping[str, Ingredients],
        packings: Mapping[str, Packing],
        *,
        cpus: Collection[int],
        verify: bool,
    ) -> None:
        """`verify`: the first time, compare the files with their folder's checksums, if any."""
        self._files = tuple(files)
        self._layout = layout
        self._packings = packings
        self._cpus = cpus
        self._unverified: list[Path] = _folders(files) if verify else []
        self._pieces = list(_all_pieces(layout, ingredients, packings))

    @property
    def packs(self) -> bool:
        """Whether any weights are packed, converted or multiplied by factors; all others can be
        read about as fast from anywhere."""
        return any(
            isinstance(piece, LayerPiece)
            or piece.packing is not None
            or any(
                isinstance(write.origin, Origin) and (write.origin.factors or write.origin.product)
                for write in piece.writes
            )
            for piece in self._pieces
        )

    def remade(
        self, files: Sequence[WeightFile], ingredients: Mapping[str, Ingredients]
    ) -> CheckpointImage:
        """The same with other files for parts of it. Those that are new are taken as they are."""
        made = CheckpointImage(
            files, self._layout, ingredients, self._packings, cpus=self._cpus, verify=False
        )
        made._unverified = [folder for folder in self._unverified if folder in _folders(files)]
        return made

    def write(self, pieces: Sequence[WeightPiece], image: Image) -> None:
        """Write some pieces of the image alone, which multiply nothing by factors; files that they
        are not made of may be other ones by now. Raises `CheckpointError`."""
        nbytes = sum(piece.nbytes for piece in pieces)
        transfer = Transfer(TransferKind.WEIGHTS, "pieces", nbytes, time.monotonic())
        origins = [write.origin for piece in pieces for write in piece.writes]
        files = {origin.file for origin in origins if isinstance(origin, Origin)}
        self._make(pieces, transfer, image, sorted(files))

    def __call__(self, transfer: Transfer, image: Image) -> None:
        """Write the image; the transfer lands piece by piece, in order.

        Raises `CheckpointError` for files that cannot be read, or are not what they were, and
        `TransferCancelled`. No thread touches the image any more then.
        """
        while self._unverified:
            verify_sums(self._unverified[-1])
            self._unverified.pop()
        self._make(self._pieces, transfer, image, range(len(self._files)))

    def _make(
        self,
        pieces: Sequence[WeightPiece | LayerPiece],
        transfer: Transfer,
        image: Image,
        files: Iterable[int],
    ) -> None:
        """Of these files alone, by their numbers."""
        with ExitStack() as stack:
            descriptors = {
                number: stack.enter_context(self._files[number].open()) for number in files
            }

            def bench() -> _Bench:
                packed.compute_alone()
                return _Bench(self._files, descriptors, image)

            make_pieces(pieces, transfer, bench, self._cpus)


class _Bench:
    """What one thread works with: descriptors of the files, the image, and its buffers."""

    def __init__(
        self, files: Sequence[WeightFile], descriptors: Mapping[int, int], image: Image
    ) -> None:
        self._files = files
        self._descriptors = descriptors
        self._image = image
        self._buffers: dict[str, torch.Tensor] = {}
        self._held: dict[str, tuple[int, int, int]] = {}
        """What bytes of a file the buffer of a use has."""

    def announce(self, piece: WeightPiece | LayerPiece) -> None:
        """Have the system read ahead."""
        for write in piece.writes:
            if isinstance(write.origin, Origin):
                for file, offset, nbytes in _ranges(write.origin, write.span):
                    self._files[file].read_ahead(self._descriptors[file], offset, nbytes)

    def make(self, piece: WeightPiece | LayerPiece) -> None:
        if isinstance(piece, LayerPiece):
            self._convert(piece)
            return
        if piece.as_stored:
            for write in piece.writes:
                start = piece.offset + write.start * piece.dtype.itemsize
                self._read(write, self._image.views(start, write.elements * piece.dtype.itemsize))
            return
        plain = self._buffer("plain", piece.elements * piece.dtype.itemsize).view(piece.dtype)
        for write in piece.writes:
            self._assemble(write, plain)
        if piece.packing is None:
            self._image.put(piece.offset, plain.data_ptr(), piece.nbytes)
            return
        end = piece.offset

        def place(address: int, nbytes: int) -> None:
            nonlocal end
            self._image.put(end, address, nbytes)
            end += nbytes

        rows, each = plain.view(-1, *piece.packing.shape[1:]), piece.packing.piece_rows
        for first in range(0, len(rows), each):
            piece.packing.pack(rows[first : first + each], place)
        assert end == piece.offset + piece.nbytes, f"{end} is not the end of {piece}"

    def _convert(self, piece: LayerPiece) -> None:
        """Make all tensors of a quantized layer."""
        stored = {}
        for name, made_of in piece.recipe.stored:
            nbytes = made_of.elements * made_of.dtype.itemsize
            plain = self._buffer(f"stored {name}", nbytes).view(made_of.dtype)
            for write in made_of.writes:
                self._assemble(write, plain)
            stored[name] = plain.view(made_of.shape)

        def place(name: str, start: int, part: torch.Tensor) -> None:
            self._image.put(piece.starts[name] + start, part.data_ptr(), part.nbytes)

        piece.recipe.conversion.convert(stored, place)

    def _assemble(self, write: Write, plain: torch.Tensor) -> None:
        """Do one write of a piece in a buffer."""
        for part in _parts(write):
            if _is_read(part, plain.dtype):
                address = plain.data_ptr() + part.start * plain.element_size()
                self._read(part, [mapping.view(address, part.elements * plain.element_size())])
                continue
            for read in part.in_reads(READ_BYTES // plain.element_size()):
                self._assemble_part(read, plain)

    def _assemble_part(self, write: Write, plain: torch.Tensor) -> None:
        sizes = [axis.size for axis in write.axes]
        target = plain.as_strided(sizes, [axis.target for axis in write.axes], write.start)
        if not isinstance(write.origin, Origin):
            target.fill_(write.origin)
            return
        if (product := write.origin.product) is not None:
            first = write.origin.offset // write.origin.dtype.itemsize
            stored = product.numbers(first, write.span, self._read_bytes)
        else:
            raw = self._buffer("raw", write.span * write.origin.dtype.itemsize)
            self._read(write, [mapping.view(raw.data_ptr(), raw.nbytes)])
            stored = self._multiplied(raw.view(write.origin.dtype), write.origin)
        strides, start = [axis.source for axis in write.axes], stored.storage_offset()
        source = stored.as_strided(sizes, strides, int(start))
        target.copy_(-torch.exp(source.float()) if write.origin.decays else source)
        if write.origin.factor != 1.0:
            target.mul_(write.origin.factor)
        if product is not None:
            _check_finite(product.name, target)

    def _multiplied(self, stored: torch.Tensor, origin: Origin) -> torch.Tensor:
        """Numbers as they are read, multiplied by their factors, if they have any."""
        if origin.factors is None:
            return stored
        file, dtype = origin.factors.file, DTYPES[origin.factors.kind]
        first, end = origin.factors.needed(origin.offset, stored.numel())
        offset = origin.factors.offset + first * dtype.itemsize
        found = self._read_bytes("factors", file, offset, (end - first) * dtype.itemsize)
        return origin.factors.multiply(stored, origin.offset, found.view(dtype))

    def _read(self, write: Write, views: list[memoryview]) -> None:
        assert isinstance(write.origin, Origin), "a fill reads nothing"
        file = write.origin.file
        self._files[file].read_into(self._descriptors[file], views, write.origin.offset)

    def _read_bytes(self, use: str, file: int, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes of a file, in the buffer of that use: those of the call before it, perhaps."""
        found = self._buffer(use, nbytes)
        if self._held.get(use) == (file, offset, nbytes):
            return found
        self._held.pop(use, None)
        views = [mapping.view(found.data_ptr(), nbytes)]
        self._files[file].read_into(self._descriptors[file], views, offset)
        self._held[use] = file, offset, nbytes
        return found

    def _buffer(self, use: str, nbytes: int) -> torch.Tensor:
        """So many bytes to work in, the same for every piece."""
        buffer = self._buffers.get(use)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._buffers[use] = torch.empty(nbytes, dtype=torch.uint8)
        return buffer[:nbytes]


def made_from(
    files: Sequence[WeightFile],
    layout: WeightLayout,
    ingredients: Mapping[str, Ingredients],
    *,
    verify: bool,
) -> dict[str, object]:
    """Whatever decides the bytes of an image, in JSON's types: equal for equal images.

    With `verify`, also the folder's checksums. Raises `CheckpointError` if these cannot be
    read.
    """
    recipe = hashlib.sha256()
    for tensor in layout.tensors:
        recipe.update(repr((tensor.name, ingredients[tensor.name])).encode())
    checked = ""
    for sums in (folder / SUMS for folder in _folders(files) if verify):
        with io_errors(sums), contextlib.suppress(FileNotFoundError):
            checked += hashlib.sha256(sums.read_bytes()).hexdigest()
    return {
        "files": [[str(file.path), file.nbytes, file.mtime_ns, file.inode] for file in files],
        "sums": checked,
        "layout": layout.digest,
        "recipe": recipe.hexdigest(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "vllm": vllm.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def _folders(files: Sequence[WeightFile]) -> list[Path]:
    """Of the checkpoint first, then of what else has files, such as adapters."""
    return list(dict.fromkeys(file.path.parent for file in files))


def _ranges(origin: Origin, elements: int) -> Sequence[tuple[int, int, int]]:
    """Which bytes of which files so many neighbouring elements are made of."""
    if origin.product is not None:
        return origin.product.ranges(origin.offset // origin.dtype.itemsize, elements)
    return [(origin.file, origin.offset, elements * origin.dtype.itemsize)]


def _check_finite(name: str, made: torch.Tensor) -> None:
    """Raises `CheckpointError` if some products are no numbers of the type that they have now."""
    if all(math.isfinite(bound) for bound in torch.aminmax(made)):  # NaN is both, if there is one
        return
    dtype = str(made.dtype).removeprefix("torch.")
    remedy = 'take dtype = "bfloat16", or ' if made.dtype == torch.float16 else "take "
    raise CheckpointError(
        f"{name} has a weight that is no finite number of {dtype}, as its file has it; "
        f"{remedy}another copy of the checkpoint"
    )


def _parts(write: Write) -> Iterator[Write]:
    """The write; if it is of products, in parts of `PIECE_BYTES` of these, as a piece of packed
    experts is much larger."""
    origin = write.origin
    if not isinstance(origin, Origin) or origin.product is None or not write.plain:
        yield write
        return
    each = PIECE_BYTES // origin.dtype.itemsize
    for first in range(write.start, write.start + write.elements, each):
        if (part := write.cut(first, first + each)) is not None:
            yield part


def _is_read(write: Write, dtype: torch.dtype) -> bool:
    """Whether a write takes neighbouring bytes as they are."""
    origin = write.origin
    return (
        write.plain
        and isinstance(origin, Origin)
        and origin.dtype == dtype
        and not origin.decays
        and origin.factor == 1.0
        and origin.factors is None
        and origin.product is None
    )


def _all_pieces(
    layout: WeightLayout, ingredients: Mapping[str, Ingredients], packings: Mapping[str, Packing]
) -> Iterator[WeightPiece | LayerPiece]:
    """The pieces of an image, in order."""
    placed = zip(layout.tensors, layout.offsets, strict=True)
    for recipe, group in itertools.groupby(placed, lambda item: ingredients[item[0].name].layer):
        if recipe is None:
            for tensor, offset in group:
                yield from _pieces(ingredients[tensor.name], packings.get(tensor.name), offset)
            continue
        tensors = list(group)
        starts = {tensor.name.rpartition(".")[2]: offset for tensor, offset in tensors}
        missing = {form.name for form in recipe.conversion.kernel} - starts.keys()
        assert not missing, f"{missing} do not lie next to {tensors[0][0].name}"
        (_, first), (last, end) = tensors[0], tensors[-1]
        yield LayerPiece(first, end + last.nbytes - first, recipe, starts)


def _can_be_cut(made_of: Ingredients, elements: int) -> bool:
    """Whether its writes can be cut behind each multiple of so many elements."""
    return not any(
        (bound - write.start) % write.unit
        for bound in range(elements, made_of.elements, elements)
        for write in made_of.writes
        if write.start < bound < write.start + write.elements
    )


def _pieces(made_of: Ingredients, linear: Packing | None, offset: int) -> Iterator[WeightPiece]:
    """Cut a tensor whose image begins at `offset` by rows, if its writes can be cut there."""
    packing = linear or made_of.packing
    row = math.prod(made_of.shape[1:])
    rows, row_bytes = made_of.elements // row, row * made_of.dtype.itemsize
    if packing is None:
        as_stored = all(_is_read(write, made_of.dtype) for write in made_of.writes)
        wanted = READ_BYTES if as_stored else PIECE_BYTES
        nbytes, each = rows * row_bytes, max(1, wanted // row_bytes)
        step = each * row_bytes
    else:
        nbytes, each, step = packing.nbytes, packing.piece_rows, packing.piece_bytes
    if not _can_be_cut(made_of, each * row):
        units = {write.unit for write in made_of.writes if write.unit < write.elements}
        times = math.lcm(each * row, *units) // (each * row)
        fits = times * each * row_bytes <= READ_BYTES and _can_be_cut(made_of, times * each * row)
        each, step = (times * each, times * step) if fits else (rows, nbytes)
    for number, first in enumerate(range(0, made_of.elements, each * row)):
        elements = min(each * row, made_of.elements - first)
        cuts = (write.cut(first, first + elements) for write in made_of.writes)
        yield WeightPiece(
            offset=offset + number * step,
            nbytes=min(step, nbytes - number * step),
            dtype=made_of.dtype,
            elements=elements,
            writes=tuple(replace(cut, start=cut.start - first) for cut in cuts if cut is not None),
            packing=packing,
        )
