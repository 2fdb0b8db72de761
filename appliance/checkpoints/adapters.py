"""LoRA adapters of a checkpoint, as PEFT saves them: what their headers say, and whether it fits.

    adapter_config.json         r, lora_alpha, target_modules, ...
    adapter_model.safetensors   NAME.lora_A.weight [r, in], NAME.lora_B.weight [out, r]

NAME is a linear layer of the base, whose weight is [out, in]. With an adapter it computes
``W x + scale B A x``.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from appliance.checkpoints.model_config import ONE_RANK, ModelConfig
from appliance.checkpoints.quantized import quantization
from appliance.checkpoints.safetensors import (
    TensorEntry,
    WeightFile,
    io_errors,
    read_header,
    weight_files,
)
from appliance.errors import CheckpointError
from appliance.vocabulary import Task

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
ADAPTER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SEPARATOR: Final = ":"
"""Between the name of a model and that of its adapter, in what clients call the two together."""

MAX_RANK: Final = 256
MAX_ADAPTERS: Final = 128
"""Of one base. All of them are part of its weights."""
_MAX_CONFIG_BYTES: Final = 1 << 20

TRIED: Final = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
"""Architectures that `tests/engine/test_adapters.py` serves with adapters."""

_PREFIX: Final = "base_model.model."
_PART: Final = re.compile(r"^(.+)\.lora_([AB])\.weight$")
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
_EMBEDDINGS: Final = frozenset({"embed_tokens", "lm_head"})
_LITERAL: Final = re.compile(r"^[A-Za-z0-9_.]+$")
"""A key of a pattern that means itself. PEFT takes regular expressions, whose cost has no bound."""

_PLAIN_INITS: Final = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
"""Ways to begin a training that leave the base as it is."""
_REFUSED: Final = {
    "use_dora": "DoRA",
    "lora_bias": "biases (lora_bias)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "layer_replication": "layer_replication",
    "use_bdlora": "block-diagonal LoRA (use_bdlora)",
    "use_qalora": "QALoRA (use_qalora)",
    "modules_to_save": "modules_to_save",
    "trainable_token_indices": "trainable_token_indices",
    "target_parameters": "target_parameters",
}
"""Keys that change what an adapter computes; vLLM does not support the first six, or not for
models that generate."""


class AdapterPlace(msgspec.Struct, frozen=True):
    """A configured adapter: its name, without that of its base, and its folder."""

    name: str
    path: str
    slot: int
    """Which of its base's places it is in, from 0."""
    version: str = ""
    """What its files have to be (`adapter_version`); any, if that is empty."""


class AdapterRoom(msgspec.Struct, frozen=True):
    """What a base has for adapters that come while it serves: `slots` places in every linear
    layer, each for a rank up to `rank`."""

    slots: int
    rank: int


class UnsupportedAdapter(CheckpointError):
    """An adapter that cannot be served on its base; the message names both and says why."""

    remedy = "take another adapter, or leave it out"


class LowRank(NamedTuple):
    """What an adapter adds to one layer: ``scale`` times ``b`` [out, rank] ``a`` [rank, in]."""

    a: TensorEntry
    b: TensorEntry
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits its base; `layers` are by the names of the base's layers."""

    place: AdapterPlace
    file: WeightFile
    layers: Mapping[str, LowRank]
    version: str

    @property
    def identity(self) -> str:
        """Its path and what tells its files from others that lay there, or will."""
        return f"{self.place.path}@{self.version}"


class LayerShape(NamedTuple):
    """What a layer has for each adapter: A [rank, columns] and B [rows, rank]."""

    rank: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class AdapterStacks:
    """Where a base's adapters lie: `slots` places in each of the layers that have any."""

    slots: int
    layers: Mapping[str, LayerShape]

    @classmethod
    def plan(
        cls, adapters: Sequence[Adapter], config: ModelConfig, room: AdapterRoom | None
    ) -> AdapterStacks:
        """With `room`, what it says, whatever the adapters are; without, what they need, each of
        them a place of the largest rank that one has in a layer.

        Raises `UnsupportedAdapter` for one that has no place in the room, `CheckpointError`.
        """
        slots = room.slots if room is not None else len(adapters)
        taken = {adapter.place.slot for adapter in adapters}
        assert len(taken) == len(adapters), f"adapters share places: {taken}"
        assert taken <= set(range(slots)), f"there are {slots} places, not {taken}"
        if room is None:
            return cls(slots, _needed(adapters))
        linear = {
            name.removesuffix(".weight"): shape
            for name, shape in _shapes(config).items()
            if _is_linear(name, shape)
        }
        for adapter in adapters:
            for name, low in adapter.layers.items():
                if low.rank > room.rank:
                    raise UnsupportedAdapter(
                        f"{adapter.file.path}: {name} has rank {low.rank}, more than max_lora_rank "
                        f"({room.rank}) of the base"
                    )
        return cls(
            slots,
            {name: LayerShape(room.rank, *shape) for name, shape in linear.items()},
        )

    def nbytes(self, element_bytes: int) -> int:
        """What they take next to the base's weights."""
        elements = sum(rank * (rows + columns) for rank, rows, columns in self.layers.values())
        return self.slots * elements * element_bytes


NO_STACKS: Final = AdapterStacks(0, {})


def full_name(base: str, adapter: str) -> str:
    """What clients call a model with an adapter."""
    return f"{base}{SEPARATOR}{adapter}"


def read_adapters(
    places: Sequence[AdapterPlace],
    config: ModelConfig,
    task: Task = Task.GENERATE,
    ranks: int = 1,
    *,
    cuda: bool = False,
) -> tuple[Adapter, ...]:
    """Read the adapters of a base and check them against it; none, if there are no `places`.

    Raises `UnsupportedAdapter` for one that does not fit or is not supported, and `CheckpointError`
    for files that cannot be read.
    """
    if not places:
        return ()
    check_base(config, task=task, ranks=ranks, cuda=cuda)
    shapes = _shapes(config)
    return tuple(_read(place, shapes) for place in places)


def adapter_version(folder: Path) -> str:
    """What tells the files of an adapter from others that lay there, or will. Raises
    `UnsupportedAdapter`, `CheckpointError`."""
    _, digest = _read_config(folder)
    return _version(read_header(folder / ADAPTER_WEIGHTS), digest)


def check_adapter_config(folder: Path) -> None:
    """Raise `UnsupportedAdapter` for an adapter whose configuration is not supported."""
    _Settings(folder, _read_config(folder)[0])


def check_base(config: ModelConfig, *, task: Task, ranks: int, cuda: bool) -> None:
    """Raise `UnsupportedAdapter` for a base that is not served with adapters."""
    if config.architecture not in TRIED:
        why = f"adapters of {config.architecture} are not served: no test computes them; those of "
        why += ", ".join(sorted(TRIED)) + " are"
    elif quantization.rounds_activations(config):
        why = "adapters of weights and activations in 8 bits are not served: vLLM has none of them"
    elif quantization.needs_several_tensors(config):
        why = "adapters of weights that are multiplied as they are read are not served: no test "
        why += "computes them"
    elif task is not Task.GENERATE:
        why = "adapters are served for models that generate text, not for those that pool"
    elif ranks > 1:
        why = f"adapters are not served by several ranks yet; {ONE_RANK}"
    elif cuda:
        why = "adapters are served on the CPU only by this version"
    else:
        return
    raise UnsupportedAdapter(f"{config.path}: {why}")


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of the weights of a base, by the layer's name."""
    tensors = [tensor for file in weight_files(config.path) for tensor in read_header(file).tensors]
    return quantization.linear_shapes(config, tensors)


def _needed(adapters: Iterable[Adapter]) -> dict[str, LayerShape]:
    """The layers that any of the adapters changes, with the largest rank of each."""
    layers: dict[str, LayerShape] = {}
    for adapter in adapters:
        for name, low in adapter.layers.items():
            rank = max(layers[name].rank if name in layers else 0, low.rank)
            layers[name] = LayerShape(rank, low.b.shape[0], low.a.shape[1])
    return layers


def _is_linear(layer: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and layer.rpartition(".")[2] not in _EMBEDDINGS


def _read(place: AdapterPlace, shapes: Mapping[str, tuple[int, ...]]) -> Adapter:
    folder = Path(place.path)
    found_config, digest = _read_config(folder)
    settings = _Settings(folder, found_config)
    file = folder / ADAPTER_WEIGHTS
    if not file.exists():
        raise UnsupportedAdapter(f"{folder} has no {ADAPTER_WEIGHTS}; save it as safetensors")
    try:
        header = read_header(file)
    except CheckpointError as error:
        raise UnsupportedAdapter(str(error)) from error
    version = _version(header, digest)
    if place.version not in ("", version):
        raise CheckpointError(
            f"{folder} was changed while it was served: load the adapter again (load_inplace), or "
            "remove it and add it again"
        )
    layers = _pairs(file, header, settings, shapes)
    return Adapter(place, header, layers, version)


def _version(file: WeightFile, config_digest: str) -> str:
    """The configuration is part of it: it says how the weights are scaled."""
    return f"{file.inode}.{file.mtime_ns}.{config_digest}"


def _pairs(
    file: Path, header: WeightFile, settings: _Settings, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, LowRank]:
    """What the file has for each layer."""
    parts: dict[str, dict[str, TensorEntry]] = {}
    for tensor in header.tensors:
        found = _PART.match(tensor.name.removeprefix(_PREFIX))
        if found is None:
            raise UnsupportedAdapter(
                f"{file}: {tensor.name} is no lora_A or lora_B of a linear layer, and nothing else "
                "is supported"
            )
        pair = parts.setdefault(found[1], {})
        if found[2] in pair:
            raise UnsupportedAdapter(f"{file} has {found[1]}.lora_{found[2]} twice")
        pair[found[2]] = tensor
    if not parts:
        raise UnsupportedAdapter(f"{file} has no tensors")
    layers = {}
    for name, pair in parts.items():
        if len(pair) != 2:
            raise UnsupportedAdapter(f"{file}: {name} has lora_{next(iter(pair))} alone")
        rank, scale = settings.rank_and_scale(name)
        low = LowRank(pair["A"], pair["B"], scale)
        _check_layer(file, name, low, rank, shapes.get(name))
        layers[name] = low
    return layers


def _check_layer(
    file: Path, name: str, low: LowRank, rank: int, base: tuple[int, ...] | None
) -> None:
    if base is None or not _is_linear(name, base):
        raise UnsupportedAdapter(f"{file}: {name} is no linear layer of the base")
    wanted = ((rank, base[1]), (base[0], rank))
    if (low.a.shape, low.b.shape) != wanted:
        raise UnsupportedAdapter(
            f"{file}: {name} has lora_A {list(low.a.shape)} and lora_B {list(low.b.shape)}; rank "
            f"{rank} of a layer {list(base)} wants {list(wanted[0])} and {list(wanted[1])}"
        )
    if not {low.a.dtype, low.b.dtype} <= _FLOATS:
        raise UnsupportedAdapter(f"{file}: {name} is of type {low.a.dtype} and {low.b.dtype}")


def _read_config(folder: Path) -> tuple[dict[str, Any], str]:
    """What it says, and a digest of its bytes."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise UnsupportedAdapter(f"{folder} has no {ADAPTER_CONFIG}")
    with io_errors(path):
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise UnsupportedAdapter(f"{path} is larger than {_MAX_CONFIG_BYTES} bytes")
        text = path.read_bytes()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnsupportedAdapter(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UnsupportedAdapter(f"{path} is not a JSON object")
    return found, hashlib.sha256(text).hexdigest()[:16]


class _Settings:
    """What ``adapter_config.json`` says. Raises `UnsupportedAdapter` for what is not supported."""

    def __init__(self, folder: Path, found: dict[str, Any]) -> None:
        self._path = folder / ADAPTER_CONFIG
        if (kind := found.get("peft_type", "LORA")) != "LORA":
            raise UnsupportedAdapter(f"{self._path}: peft_type is {kind}, not LORA")
        for key, what in _REFUSED.items():
            if found.get(key):
                raise UnsupportedAdapter(f"{self._path}: {what} is not supported")
        if (bias := found.get("bias", "none")) != "none":
            raise UnsupportedAdapter(f"{self._path}: bias = {bias!r} is not supported")
        start = found.get("init_lora_weights", True)
        if isinstance(start, str) and start.lower() not in _PLAIN_INITS:
            raise UnsupportedAdapter(
                f"{self._path}: init_lora_weights = {start!r} changes the base's weights; convert "
                "it to a plain adapter with PEFT's path_initial_model_for_weight_conversion"
            )
        self._rooted = bool(found.get("use_rslora"))
        self._rank = self._checked_rank("r", found.get("r"))
        self._alpha = self._checked_alpha("lora_alpha", found.get("lora_alpha"))
        self._ranks = {
            key: self._checked_rank(f"rank_pattern.{key}", value)
            for key, value in self._pattern(found, "rank_pattern")
        }
        self._alphas = {
            key: self._checked_alpha(f"alpha_pattern.{key}", value)
            for key, value in self._pattern(found, "alpha_pattern")
        }

    def rank_and_scale(self, layer: str) -> tuple[int, float]:
        """Of one layer: as PEFT's and vLLM's, patterns first."""
        rank = _matching(self._ranks, layer, self._rank)
        alpha = _matching(self._alphas, layer, self._alpha)
        return rank, alpha / (math.sqrt(rank) if self._rooted else rank)

    def _pattern(self, found: dict[str, Any], key: str) -> Iterable[tuple[str, Any]]:
        pattern = found.get(key) or {}
        if not isinstance(pattern, dict):
            raise UnsupportedAdapter(f"{self._path}: {key} is no table")
        for name in pattern:
            if not _LITERAL.match(name):
                raise UnsupportedAdapter(
                    f"{self._path}: {key} has the regular expression {name!r}; only names of "
                    "layers, or ends of them, are supported"
                )
        return pattern.items()

    def _checked_rank(self, key: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
            raise UnsupportedAdapter(
                f"{self._path}: {key} is {value!r}; ranks from 1 to {MAX_RANK} are supported"
            )
        return value

    def _checked_alpha(self, key: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UnsupportedAdapter(f"{self._path}: {key} is {value!r}, no number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise UnsupportedAdapter(f"{self._path}: {key} is no finite number")
        return value


def _matching(pattern: Mapping[str, Any], layer: str, default: Any) -> Any:
    """The value of the first key that is the layer's name, or an end of it behind a dot."""
    for key, value in pattern.items():
        if f".{layer}".endswith(f".{key}"):
            return value
    return default
