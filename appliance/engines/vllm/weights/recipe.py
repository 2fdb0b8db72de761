"""Recipes: which bytes of a checkpoint's files make which bytes of a model's parameters.

vLLM knows how q, k and v become one matrix, which rows a rank keeps, and what is padded. So it is
asked once, when an engine is built: it loads placeholders that have the shapes of the checkpoint's
tensors but no data, and every copy into a parameter is written down instead of being done. Narrowed
and transposed placeholders are views that say where they lie in their tensor:

    file                          placeholder (meta)                parameter (untouched memory)
    q_proj [4096, 4096] @ 1024    .narrow(0, 2048, 2048)  copy_ ->  qkv.narrow(0, 0, 2048)

    Write(origin=(file, 1024 + 2048 * 4096 * 2), axes=((8388608, 1, 1),), start=0)

Copies of placeholders in another order (Llama 4's q and k) are views, too, of which it is noted
where each begins. Zeros that vLLM makes (the bias of Whisper's keys) are written as such. One
computation is known, ``-exp(x)`` of each number (`Origin.decays`), and quantized layers are
converted as a whole (`LayerRecipe`). Tensors that are computed from several of the file's have
placeholders of their own, and vLLM does not see what they are made of (`Origin.product`). What
computes anything else with a placeholder, or with a parameter, cannot be written down, and is an
error that names it.
Afterwards a fill is nothing but reads (`appliance.engines.vllm.weights.loading`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models import adapters

from appliance.checkpoints.adapters import NO_STACKS, Adapter, AdapterStacks
from appliance.checkpoints.language_models import TRANSPOSED_EXPERTS
from appliance.checkpoints.quantized import floats
from appliance.checkpoints.safetensors import TensorEntry, WeightFile
from appliance.engines.vllm.weights.adapted import AdaptedOrigin
from appliance.engines.vllm.weights.convolutions import CONVOLUTION_PACK, ConvolutionPacking
from appliance.engines.vllm.weights.experts import PREPACK, ExpertPacking
from appliance.engines.vllm.weights.int8 import compute_as_stored
from appliance.engines.vllm.weights.integers import IntegersOrigin
from appliance.engines.vllm.weights.microscaled import MicroscaledOrigin
from appliance.engines.vllm.weights.mistral_names import keep_positions, named_as_vllm
from appliance.engines.vllm.weights.multiplied import FactorsOrigin, find
from appliance.engines.vllm.weights.nvfp4 import Nvfp4Origin
from appliance.engines.vllm.weights.products import Product, find_products
from appliance.engines.vllm.weights.quantized import LayerConversion, convert_layers
from appliance.errors import CheckpointError

LOAD_FORMAT: Final = "appliance"

DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


class UnsupportedCheckpoint(CheckpointError):
    """The checkpoint does not turn into the model's parameters by copying alone."""


class Origin(NamedTuple):
    """Where elements come from: `offset` bytes from the start of file number `file`."""

    file: int
    offset: int
    dtype: torch.dtype
    decays: bool = False
    """Whether each number `x` of the file becomes ``-exp(x)``: how layers with a state keep the
    rates at which it decays (Mamba's A)."""
    factors: FactorsOrigin | None = None
    """What each number of the file is multiplied by, if they are floats of 8 bits."""
    product: MicroscaledOrigin | Nvfp4Origin | IntegersOrigin | AdaptedOrigin | None = None
    """Of numbers that are made of several tensors: how. `offset` is then where they would lie if
    they were stored one behind the other, `dtype` their type."""
    factor: float = 1.0
    """What each number is multiplied with, once it has the parameter's type (LoRA's B)."""

    def __repr__(self) -> str:
        """Names no field that has its default and came later: kept images are known by this text
        (`loading.made_from`)."""
        said = [f"{name}={getattr(self, name)!r}" for name in ("file", "offset", "dtype", "decays")]
        for name in ("factors", "product"):
            if getattr(self, name) is not None:
                said.append(f"{name}={getattr(self, name)!r}")
        if self.factor != 1.0:
            said.append(f"factor={self.factor!r}")
        return f"Origin({', '.join(said)})"


class Axis(NamedTuple):
    """One dimension of a copy: how many elements, and the strides on both sides, in elements."""

    size: int
    source: int
    target: int


_MOST_PARTS: Final = 1024
"""Writes that one is divided into."""


@dataclass(frozen=True, slots=True)
class Write:
    """One strided copy (or fill, if the origin is a number) into a parameter's storage.

    `start` is the first element written; `axes` go from the outermost in the storage inwards.
    """

    origin: Origin | float
    axes: tuple[Axis, ...]
    start: int

    @property
    def elements(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @property
    def dense(self) -> bool:
        """Whether the elements written are neighbours."""
        inner = 1
        for axis in reversed(self.axes):
            if axis.target != inner:
                return False
            inner *= axis.size
        return True

    @property
    def plain(self) -> bool:
        """Whether they are neighbours in the file, too, in the same order."""
        return not self.axes or (len(self.axes) == 1 and self.axes[0][1:] == (1, 1))

    @property
    def span(self) -> int:
        """Elements of the file from the first to behind the last one read."""
        return sum((axis.size - 1) * axis.source for axis in self.axes) + 1

    @property
    def unit(self) -> int:
        """The write can be cut behind every multiple of so many elements written.

        Not within a transposed matrix: every part of it comes from all over the file.
        """
        if not self.axes or not self.dense:
            return self.elements
        outer, *inner = self.axes
        in_order = isinstance(self.origin, float) or all(a.source <= outer.source for a in inner)
        return outer.target if in_order else self.elements

    def parts(self) -> list[Write]:
        """The same as writes whose elements are neighbours, if a few are enough: such can be cut
        from each other. One for each expert, say, of which a tensor has half."""
        if self.dense or not 1 < self.axes[0].size <= _MOST_PARTS:
            return [self]
        outer, *inner = self.axes
        if not replace(self, axes=tuple(inner)).dense:
            return [self]
        moves = range(outer.size)
        return [self._along(outer, move, tuple(inner)) for move in moves]

    def in_reads(self, elements: int) -> list[Write]:
        """The same as writes that read about so many elements of the file each, or one stretch of
        neighbours: they may read across what others take."""
        if self.span <= elements:
            return [self]
        place, widest = max(enumerate(self.axes), key=lambda item: item[1].source)
        each = max(1, elements // max(1, widest.source))
        made = []
        for first in range(0, widest.size, each):
            axes = list(self.axes)
            axes[place] = widest._replace(size=min(each, widest.size - first))
            made.append(self._along(widest, first, tuple(axes)))
        return made

    def _along(self, axis: Axis, steps: int, axes: tuple[Axis, ...]) -> Write:
        """With other axes, so many steps further along one."""
        origin = self.origin
        if isinstance(origin, Origin):
            moved = steps * axis.source * origin.dtype.itemsize
            origin = origin._replace(offset=origin.offset + moved)
        return Write(origin, axes, self.start + steps * axis.target)

    def cut(self, start: int, stop: int) -> Write | None:
        """What it writes from element `start` to before `stop`, if anything.

        Both are multiples of `unit` from its own start, or outside of it.
        """
        first, last = max(start, self.start), min(stop, self.start + self.elements)
        if first >= last:
            return None
        if last - first == self.elements:
            return self
        outer, *inner = self.axes
        skipped, size = (first - self.start) // outer.target, (last - first) // outer.target
        origin = self.origin
        if isinstance(origin, Origin):
            moved = skipped * outer.source * origin.dtype.itemsize
            origin = origin._replace(offset=origin.offset + moved)
        return Write(origin, (outer._replace(size=size), *inner), first)


@dataclass(frozen=True, slots=True)
class Ingredients:
    """Everything that makes up the storage of one parameter: `elements` of `dtype`, packed
    afterwards if there is a packing. What is converted has no writes, but those of its layer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    writes: tuple[Write, ...]
    packing: ExpertPacking | ConvolutionPacking | None = None
    layer: LayerRecipe | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """A quantized layer: what it is loaded into, by name within the layer, and the conversion."""

    conversion: LayerConversion
    stored: tuple[tuple[str, Ingredients], ...]


class RecipeRecording:
    """What vLLM did with the placeholders of `files`; filled by the loader of one build."""

    def __init__(
        self,
        files: Sequence[WeightFile],
        dense_files: Sequence[WeightFile] = (),
        head_files: Sequence[WeightFile] = (),
        adapters: Sequence[Adapter] = (),
        stacks: AdapterStacks = NO_STACKS,
        embedding_task: str = "",
    ) -> None:
        """`dense_files` are those of dense layers behind the pooling, each in a folder;
        `head_files` those of a head that drafts, if it has a folder of its own. `stacks` are the
        places of adapters, if there are any. Of a checkpoint with adapters of tasks, that of
        `embedding_task` is added to its matrices."""
        self.adapters = adapters
        self.stacks = stacks
        self.adapter_files = len(files) + len(dense_files) + len(head_files)
        """The number of the first adapter's file; the others follow."""
        adapter_files = [adapter.file for adapter in adapters]
        self.files = (*files, *dense_files, *head_files, *adapter_files)
        self.recorder = _Recorder(find(files), find_products(files, embedding_task))
        self._models_files = len(files)
        self._dense_end = len(files) + len(dense_files)
        self._loaded = False
        """Whether the model is loaded: what comes then is its head."""
        self._dense: dict[str, torch.nn.Linear] = {}
        self._layers: dict[int, LayerRecipe] = {}
        """Of parameters that a layer's tensors are converted to."""
        self._noted: dict[int, Ingredients] = {}
        """Of parameters that vLLM does not load."""

    def expect_dense(self, layer: torch.nn.Linear, folder: str) -> None:
        """The weights of a dense layer are in a folder of the checkpoint. vLLM makes a layer for
        each way of pooling: they share."""
        first = self._dense.setdefault(folder, layer)
        layer.weight, layer.bias = first.weight, first.bias

    def note(self, parameter: torch.nn.Parameter, made_of: Ingredients) -> None:
        """A parameter that vLLM does not load is made of this."""
        self.recorder.keep(parameter)
        self._noted[_key(parameter)] = made_of

    def load(self, model: torch.nn.Module) -> None:
        """Have vLLM load placeholders into the model, whose parameters stay untouched.

        The second model of a build is the head that drafts tokens of the first. Raises
        `UnsupportedCheckpoint`, and what vLLM raises for a tensor that the model has no place for.
        """
        if self._loaded:
            self._load_head(model)
            return
        self._loaded = True
        if getattr(model, "secondary_weights", ()):
            raise UnsupportedCheckpoint(f"{type(model).__name__} wants weights from elsewhere, too")
        dense = self.files[self._models_files : self._dense_end]
        folders = [file.path.parent.name for file in dense]
        if list(self._dense) != folders:  # vLLM logs what it cannot make a layer of, and goes on
            raise UnsupportedCheckpoint(f"vLLM makes no dense layers of {', '.join(folders)}")
        if self._dense:  # vLLM keeps them where a model's parameters are not looked for
            layers = torch.nn.ModuleList(self._dense.values())
            model.pooler.add_module("dense_layers", layers)  # type: ignore[union-attr]
        self._record(model, self.files[: self._models_files])
        with self.recorder:
            self._load_dense()
        compute_as_stored(model)
        for name, layer in convert_layers(model):
            stored = tuple(
                (own, self._ingredients(f"{name}.{own}", parameter))
                for own, parameter in layer.stored.items()
            )
            recipe = LayerRecipe(layer.conversion, stored)
            for parameter in layer.kernel.values():
                self.recorder.keep(parameter)
                self._layers[_key(parameter)] = recipe

    def _load_head(self, head: torch.nn.Module) -> None:
        """It is in files of its own, or in those of the model."""
        first = self._dense_end
        own = self.files[first : self.adapter_files]
        if own:
            self._record(head, own, first)
        else:
            self._record(head, self.files[: self._models_files])

    def _record(self, model: torch.nn.Module, files: Sequence[WeightFile], first: int = 0) -> None:
        """Have vLLM load placeholders for files that are numbered from `first` on."""
        self.recorder.watch(model)
        with self.recorder:
            try:
                with self.recorder.loading():
                    placeholders = named_as_vllm(model, self.recorder.placeholders(files, first))
                    model.load_weights(placeholders)  # type: ignore[operator]
            except AssertionError as error:
                raise UnsupportedCheckpoint(
                    f"{self.recorder.current} does not fit {type(model).__name__}: {error}"
                ) from error

    def _load_dense(self) -> None:
        numbers = {
            file.path.parent.name: number
            for number, file in enumerate(self.files)
            if self._models_files <= number < self._dense_end
        }
        for folder, layer in self._dense.items():
            number = numbers[folder]
            file = self.files[number]
            for name, placeholder in self.recorder.placeholders([file], number):
                parameter = getattr(layer, name.rpartition(".")[2], None)
                if parameter is None or parameter.shape != placeholder.shape:
                    raise UnsupportedCheckpoint(
                        f"{self.recorder.current} does not fit the layer that config.json next to "
                        "it describes"
                    )
                parameter.data.copy_(placeholder)

    def ingredients(self, model: torch.nn.Module) -> Mapping[str, Ingredients]:
        """By the name of each parameter that holds anything, aliases included.

        Raises `UnsupportedCheckpoint` when a parameter is not what was loaded, or when an element
        of one was not written, or twice.
        """
        for name, module in model.named_modules():
            for value in (*vars(module).values(), *module.buffers(recurse=False)):
                if isinstance(value, torch.Tensor) and self.recorder.has_computed(value):
                    raise UnsupportedCheckpoint(
                        f"{name or 'the model'} keeps what vLLM computes with its weights"
                    )
        return {
            name: self._ingredients(name, parameter)
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter.numel()
        }

    def _ingredients(self, name: str, parameter: torch.nn.Parameter) -> Ingredients:
        key = _key(parameter)
        if (noted := self._noted.get(key)) is not None:
            _check_coverage(name, noted.elements, noted.writes)
            return noted
        if key in self._layers:
            return Ingredients(parameter.dtype, tuple(parameter.shape), (), layer=self._layers[key])
        key, packing = self.recorder.packings.get(key, (key, None))
        if key not in self.recorder.names:
            raise UnsupportedCheckpoint(
                f"vLLM rearranges {name} after loading it; such models are not supported"
            )
        writes = tuple(self.recorder.writes.get(key, ()))
        elements = parameter.untyped_storage().nbytes() // parameter.element_size()
        _check_coverage(name, elements, writes)
        whole = parameter.is_contiguous() and parameter.numel() == elements
        shape = tuple(parameter.shape) if whole else (elements,)
        return Ingredients(parameter.dtype, shape, writes, packing)


_current: ContextVar[RecipeRecording] = ContextVar("recording")


@contextmanager
def recording(
    files: Sequence[WeightFile],
    dense_files: Sequence[WeightFile] = (),
    head_files: Sequence[WeightFile] = (),
    adapters: Sequence[Adapter] = (),
    stacks: AdapterStacks = NO_STACKS,
    embedding_task: str = "",
) -> Iterator[RecipeRecording]:
    """The engine built in this context reads no weights: its recipe is recorded instead."""
    made = RecipeRecording(files, dense_files, head_files, adapters, stacks, embedding_task)
    token = _current.set(made)
    try:
        yield made
    finally:
        _current.reset(token)


_read_dense: Final = adapters._load_dense_weights


def _load_dense_weights(linear: torch.nn.Linear, folder: str, model_config: ModelConfig) -> bool:
    """Instead of vLLM's function that reads a dense layer: within `recording`, it is noted."""
    recorded = _current.get(None)
    if recorded is None:
        return bool(_read_dense(linear, folder, model_config))
    recorded.expect_dense(linear, folder)
    return True


adapters._load_dense_weights = _load_dense_weights


@register_model_loader(LOAD_FORMAT)
class RecordingLoader(BaseModelLoader):  # type: ignore[misc]
    """What vLLM calls to load weights. Only within `recording`; raises `LookupError` outside."""

    def download_model(self, model_config: ModelConfig) -> None:
        """The files are there."""

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        with ExitStack() as self._watched:
            model: torch.nn.Module = super().load_model(*args, **kwargs)
            return model

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        # vLLM would compare a head with the embedding to tie them again. There are no numbers yet.
        model_config.word_embeddings_untied_by_checkpoint = False
        if model_config.hf_config.model_type in TRANSPOSED_EXPERTS:
            for module in model.modules():
                if isinstance(module, RoutedExperts):
                    module.is_fused_checkpoint_transposed = True
        keep_positions(model)
        recorded = _current.get()
        recorded.load(model)
        # What vLLM does with the weights from here on is no copy from the checkpoint any more.
        self._watched.enter_context(recorded.recorder)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of torch; lets views pass, writes copies down, refuses the rest.

    Storages are known by their identity. Those that matter are kept, so that no other comes to have
    the same one.
    """

    def __init__(
        self, factors: Mapping[str, FactorsOrigin], products: Mapping[str, Product | None]
    ) -> None:
        """`factors`: of each tensor that has some; `products`: what is in the place of a tensor, if
        anything is."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = torch.nn.Module()
        self.names: dict[int, str] = {}
        self.writes: dict[int, list[Write]] = {}
        self.packings: dict[int, tuple[int, ExpertPacking | ConvolutionPacking]] = {}
        """Of parameters that hold another one's elements, packed: that one, and how."""
        self.current = "nothing"
        self._factors = factors
        self._products = products
        self._origins: dict[int, tuple[str, Origin]] = {}
        self._computed: dict[int, tuple[int, tuple[str, ...]]] = {}
        """Of results: the placeholder or parameter they are computed from, and by what steps."""
        self._arranged: dict[int, tuple[tuple[int, torch.Tensor], ...]] = {}
        """Of copies in another order: views of placeholders, and where each begins."""
        self._zeros: dict[int, torch.UntypedStorage] = {}
        """Tensors of zeros that vLLM made, to load them like those of files: Whisper's keys have no
        bias."""
        self._loading = False
        self._kept: list[torch.UntypedStorage] = []

    def watch(self, model: torch.nn.Module) -> None:
        """Nothing but copies may be written to this model's parameters from now on."""
        self._model = model
        for name, parameter in model.named_parameters():
            self._know(name, parameter)

    def _know(self, name: str, parameter: torch.Tensor) -> None:
        self.keep(parameter)
        self.names.setdefault(_key(parameter), name)

    def _is_found(self, target: torch.Tensor) -> bool:
        """Whether it is a parameter that vLLM made as it loaded (the bias of a head), or a buffer:
        one that is loaded (Apertus) becomes a parameter, and is placed as those are."""
        for name, module in self._model.named_modules():
            for own, value in (*module._parameters.items(), *module._buffers.items()):
                if value is None or _key(value) != _key(target):
                    continue
                if own in module._buffers:
                    del module._buffers[own]
                    module.register_parameter(own, torch.nn.Parameter(value, requires_grad=False))
                self._know(f"{name}.{own}", value)
                return True
        return False

    def keep(self, tensor: torch.Tensor) -> None:
        """No other storage has the identity of this one's from now on."""
        self._kept.append(tensor.untyped_storage())

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within, zeros that vLLM makes may be loaded."""
        self._loading = True
        try:
            yield
        finally:
            self._loading = False
            self._zeros.clear()

    def placeholders(
        self, files: Iterable[WeightFile], first: int = 0
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Of all tensors of files that are numbered from `first` on, and the tensors' names."""
        for number, file in enumerate(files, first):
            for entry in file.tensors:
                if self._factors and floats.is_unused(entry):
                    continue
                self.current = f"{entry.name} {list(entry.shape)} of {file.path}"
                if entry.name not in self._products:
                    yield entry.name, self._placeholder(number, entry)
                elif (product := self._products[entry.name]) is not None:
                    yield product.name, self._product(number, product)

    def _product(self, number: int, product: Product) -> torch.Tensor:
        placeholder = torch.empty(product.shape, dtype=product.dtype, device="meta")
        origin = Origin(number, 0, product.dtype, product=product.origin)
        self._expect(product.name, placeholder, origin)
        return placeholder.transpose(-2, -1) if product.transposed else placeholder

    def _placeholder(self, number: int, entry: TensorEntry) -> torch.Tensor:
        if entry.dtype not in DTYPES:
            raise UnsupportedCheckpoint(f"{self.current} is of type {entry.dtype}")
        dtype = DTYPES[entry.dtype]
        placeholder = torch.empty(entry.shape, dtype=dtype, device="meta")
        origin = Origin(number, entry.offset, dtype, factors=self._factors.get(entry.name))
        self._expect(entry.name, placeholder, origin)
        return placeholder

    def _expect(self, name: str, placeholder: torch.Tensor, origin: Origin) -> None:
        self._kept.append(placeholder.untyped_storage())
        self._origins[_key(placeholder)] = (name, origin)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            return self._copy(args[0], args[1])
        if func is torch.ops.aten.clone.default and _key(args[0]) in self._origins:
            # Of what is never written to, a view is as good. Pooling models are loaded from clones.
            return torch.ops.aten.alias.default(args[0])
        if func is torch.ops.aten._unsafe_view.default and _key(args[0]) in self._origins:
            return self._arrange(args[:1], args[1])
        if func is torch.ops.aten.cat.default and all(map(self._is_arranged, args[0])):
            return self._join(*args)
        if func.name() == f"_C::{PREPACK}":
            return self._pack(*args)
        if func.name() == f"_C::{CONVOLUTION_PACK}":
            return self._pack_convolution(*args)
        if func in _STEPS and self._is_known(args[0]) and _is_step(func, args[0], kwargs or {}):
            return self._compute(func, args[0])
        if func is torch.ops.aten.zeros.default and self._loading:
            return self._make_zeros(func(*args, **(kwargs or {})))
        if func in _FILLS and _key(args[0]) in self.names:
            return self._fill(args[0], float(args[1]) if len(args) > 1 else 0.0)
        if not _is_view(func) and func not in _LIKE:
            for tensor in tree_iter((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    self._refuse(func, tensor)
                    self._zeros.pop(_key(tensor), None)
        return func(*args, **(kwargs or {}))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if _key(source) in self._computed:
            return self._copy_computed(target, source)
        if _key(source) in self._arranged:
            return self._copy_arranged(target, source)
        known = self._origins.get(_key(source))
        if known is None:
            if _same(target, source):
                return target
            if _key(source) in self._zeros and _key(target) in self.names:
                return self._fill(target, 0.0)
            self._refuse("a copy", target)
            self._refuse("a copy", source)
            self._zeros.pop(_key(target), None)
            return target.copy_(source)
        name, origin = known
        if _key(target) not in self.names and not self._is_found(target):
            raise UnsupportedCheckpoint(f"vLLM keeps {name} outside of the model's parameters")
        if (origin.factors or origin.product) and source.dtype != origin.dtype:
            raise UnsupportedCheckpoint(f"vLLM reads {name} as {source.dtype}")
        first = origin.offset + int(source.storage_offset()) * source.element_size()
        origin = origin._replace(offset=first, dtype=source.dtype)
        self._note(target, source.expand(target.shape), origin)
        return target

    def _is_arranged(self, tensor: torch.Tensor) -> bool:
        """Whether it is of a placeholder, or all of a rearranged copy of some."""
        key = _key(tensor)
        return key in self._origins or (key in self._arranged and _is_whole(tensor))

    def _join(self, tensors: Sequence[torch.Tensor], dimension: int = 0) -> torch.Tensor:
        """A copy of tensors behind each other. Others than along the first dimension are none that
        models are loaded from."""
        if dimension % tensors[0].dim() or any(
            t.shape[1:] != tensors[0].shape[1:] for t in tensors
        ):
            self._refuse("a concatenation", tensors[0])
        parts = [p for t in tensors for _, p in self._arranged.get(_key(t), ((0, t),))]
        return self._arrange(parts, (sum(t.shape[0] for t in tensors), *tensors[0].shape[1:]))

    def _arrange(self, parts: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """A copy of views of placeholders, one behind the other, in the order of their elements. It
        has no data; what it is copied to is written from the views."""
        result = torch.empty(shape, dtype=parts[0].dtype, device="meta")
        self._kept.append(result.untyped_storage())
        ends = itertools.accumulate(part.numel() for part in parts)
        starts = [end - part.numel() for part, end in zip(parts, ends, strict=True)]
        self._arranged[_key(result)] = tuple(zip(starts, parts, strict=True))
        return result

    def _copy_arranged(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Of neighbours in a rearranged copy: whole rows of it, and of its parts."""
        if source.shape != target.shape or not source.is_contiguous() or not source.dim():
            self._refuse("a part of a rearranged copy", source)
        first, row = int(source.storage_offset()), source[:1].numel()
        for start, part in self._arranged[_key(source)]:
            low, high = max(start, first), min(start + part.numel(), first + source.numel())
            if low >= high:
                continue
            each = part[:1].numel()
            if (
                (low - first) % row
                or (high - first) % row
                or (low - start) % each
                or (high - start) % each
            ):
                self._refuse("a part of a rearranged row", part)
            rows = target[(low - first) // row : (high - first) // row]
            taken = part[(low - start) // each : (high - start) // each]
            self._copy(rows.view(taken.shape), taken)
        return target

    def has_computed(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is a result, which has no data."""
        return _key(tensor) in self._computed or _key(tensor) in self._arranged

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Whether it is a whole placeholder or parameter, or computed from one."""
        key = _key(tensor)
        return (key in self._origins or key in self.names or key in self._computed) and _is_whole(
            tensor
        )

    def _compute(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        """A result without data, of which it is known what it is computed from."""
        root, steps = self._computed.get(_key(tensor), (_key(tensor), ()))
        dtype = tensor.dtype if func is _CLONE else torch.float32
        result = torch.empty(tensor.shape, dtype=dtype, device="meta")
        self._kept.append(result.untyped_storage())
        self._computed[_key(result)] = (root, (*steps, _STEPS[func]))
        return result

    def _copy_computed(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        root, steps = self._computed[_key(source)]
        named = tuple(filter(None, steps))
        if named != _DECAYS and (named or root in self.names):
            self._refuse(" and ".join(named) or "float32 numbers", root)
        if root in self.names:
            if root != _key(target) or not (_is_whole(target) and _is_whole(source)):
                self._refuse("a part of it", root)
            self.writes[root] = [_decaying(write) for write in self.writes[root]]
            return target
        name, origin = self._origins[root]
        if _key(target) not in self.names:
            raise UnsupportedCheckpoint(f"vLLM keeps {name} outside of the model's parameters")
        if origin.factors or origin.product:
            raise UnsupportedCheckpoint(f"vLLM reads {name} as {source.dtype}")
        first = origin.offset + int(source.storage_offset()) * origin.dtype.itemsize
        origin = origin._replace(offset=first, decays=named == _DECAYS)
        self._note(target, source.expand(target.shape), origin)
        return target

    def _note(self, target: torch.Tensor, source: torch.Tensor, origin: Origin | float) -> None:
        axes = _axes(target.shape, source.stride(), target.stride())
        if target.numel():
            write = Write(origin, axes, int(target.storage_offset()))
            self.writes.setdefault(_key(target), []).extend(write.parts())

    def _make_zeros(self, made: torch.Tensor) -> torch.Tensor:
        self._zeros[_key(made)] = made.untyped_storage()
        return made

    def _fill(self, target: torch.Tensor, value: float) -> torch.Tensor:
        self._note(target, torch.empty((), device="meta").expand(target.shape), value)
        return target

    def _pack(self, weight: torch.Tensor, output: torch.Tensor, isa: str) -> None:
        if _key(weight) not in self.names or not weight.is_contiguous():
            raise UnsupportedCheckpoint("vLLM packs experts that are no parameter of their own")
        self._kept.append(output.untyped_storage())
        packing = ExpertPacking(tuple(weight.shape), weight.dtype, isa)
        self.packings[_key(output)] = (_key(weight), packing)

    def _pack_convolution(self, weight: torch.Tensor) -> torch.Tensor:
        root, steps = self._computed.get(_key(weight), (_key(weight), ()))
        if root not in self.names or not _is_whole(weight) or set(steps) - {"clone"}:
            raise UnsupportedCheckpoint("vLLM packs a convolution that is no parameter of its own")
        output = torch.empty(weight.shape, dtype=weight.dtype)
        self._kept.append(output.untyped_storage())
        packing = ConvolutionPacking(tuple(weight.shape), weight.dtype)
        self.packings[_key(output)] = (root, packing)
        return output

    def _refuse(self, func: object, tensor: torch.Tensor | int) -> None:
        """Raise if the tensor, or that of a key, is a placeholder or a parameter, or computed from
        one: none of them holds anything yet."""
        key = tensor if isinstance(tensor, int) else _key(tensor)
        key, _ = self._computed.get(key, (key, ()))
        if key in self._arranged:
            key = _key(self._arranged[key][0][1])
        if key in self._origins:
            name = self._origins[key][0]
            raise UnsupportedCheckpoint(f"vLLM computes {func} with {name} while loading it")
        if key in self.names:
            raise UnsupportedCheckpoint(
                f"vLLM computes {func} with the parameter {self.names[key]} while loading"
            )


_FILLS: Final = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
_CAST: Final = torch.ops.aten._to_copy.default
_CLONE: Final = torch.ops.aten.clone.default
_STEPS: Final = {
    _CAST: "",
    _CLONE: "clone",
    torch.ops.aten.exp.default: "exp",
    torch.ops.aten.neg.default: "neg",
}
"""Operations whose results are remembered; a change to float32 alone has no name."""
_DECAYS: Final = ("exp", "neg")
_LIKE: Final = (torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default)
"""These take a tensor for its shape and type alone."""


def _key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def _decaying(write: Write) -> Write:
    if not isinstance(write.origin, Origin) or write.origin.decays:
        raise UnsupportedCheckpoint("vLLM computes decay rates of what is no tensor of the files")
    return replace(write, origin=write.origin._replace(decays=True))


def _is_step(func: Any, tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether the result can be remembered: numbers are computed in float32."""
    if func is _CAST:
        return kwargs.get("dtype") is torch.float32
    return func is _CLONE or tensor.dtype is torch.float32


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether it is all of its storage, in order."""
    nbytes = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and nbytes == tensor.untyped_storage().nbytes()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same elements, so that copying one to the other does nothing."""
    return _key(one) == _key(other) and (
        (one.storage_offset(), one.shape, one.stride(), one.dtype)
        == (other.storage_offset(), other.shape, other.stride(), other.dtype)
    )


def _is_view(func: Any) -> bool:
    """Whether an operation only looks at its first argument's memory in another way."""
    returned = func._schema.returns
    return bool(returned) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in returned
    )


def _axes(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> tuple[Axis, ...]:
    """Dimensions from the outermost in the target inwards; what lies alike on both sides merged."""
    axes: list[Axis] = []
    dimensions = [Axis(*axis) for axis in zip(shape, source, target, strict=True) if axis[0] != 1]
    for axis in sorted(dimensions, key=lambda axis: axis.target):
        inner = axes[-1] if axes else None
        if (
            inner is not None
            and axis.source == inner.source * inner.size
            and axis.target == inner.target * inner.size
        ):
            axes[-1] = inner._replace(size=inner.size * axis.size)
        else:
            axes.append(axis)
    return tuple(reversed(axes))


def _check_coverage(name: str, elements: int, writes: Sequence[Write]) -> None:
    """Raise `UnsupportedCheckpoint` unless every element is written once."""
    if not writes:
        raise UnsupportedCheckpoint(f"the checkpoint has no tensor for {name}")
    if not _tile(elements, writes):
        raise UnsupportedCheckpoint(
            f"the checkpoint's tensors for {name} do not write each of its elements once"
        )


def _tile(elements: int, writes: Sequence[Write]) -> bool:
    """Whether the writes cover so many elements without gap or overlap."""
    if all(write.dense for write in writes):
        end = 0
        for write in sorted(writes, key=lambda write: write.start):
            if write.start != end:
                return False
            end += write.elements
        return end == elements
    times = np.zeros(elements, np.uint8)
    for write in writes:
        shape = [axis.size for axis in write.axes]
        strides = [axis.target for axis in write.axes]
        np.lib.stride_tricks.as_strided(times[write.start :], shape, strides)[...] += 1
    return bool((times == 1).all())
