"""Tensors that a checkpoint is taken to have, and which are computed from several of its own.

experts.gate_up_proj_blocks, experts.gate_up_proj_scales  ->  experts.gate_up_proj
q_proj.qweight, q_proj.qzeros, q_proj.scales              ->  q_proj.weight
q_proj.weight, q_proj.weight_scale, q_proj.weight_scale_2 ->  q_proj.weight
fc1.parametrizations.weight.original, ...0.lora_A and _B  ->  fc1.weight
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from appliance.checkpoints.architectures import task_adapters
from appliance.checkpoints.model_config import read_model_config
from appliance.checkpoints.quantized import floats, integers, microscaled, nvfp4, quantization
from appliance.checkpoints.safetensors import TensorEntry, WeightFile
from appliance.engines.vllm.weights import adapted
from appliance.engines.vllm.weights import nvfp4 as nvfp4_products
from appliance.engines.vllm.weights.adapted import AdaptedOrigin
from appliance.engines.vllm.weights.integers import DTYPE, IntegersOrigin, origin_of
from appliance.engines.vllm.weights.microscaled import PRODUCTS, MicroscaledOrigin
from appliance.engines.vllm.weights.nvfp4 import Nvfp4Origin
from appliance.errors import CheckpointError


class Product(NamedTuple):
    """Such a tensor: its name, shape and type, in the order in which its origin makes it.
    `transposed`: as the checkpoint would have it, the last two dimensions change places."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: MicroscaledOrigin | Nvfp4Origin | IntegersOrigin | AdaptedOrigin
    transposed: bool


def find_products(
    files: Sequence[WeightFile], embedding_task: str = ""
) -> dict[str, Product | None]:
    """The products that the checkpoint of these files is taken to have, by the name of the tensor
    in whose place each is; None for tensors that are not to be seen. Empty where weights are not
    multiplied as they are read, or have their factors apart (`multiplied`). Of a checkpoint with
    adapters of tasks, `embedding_task` says which one is added.

    Raises `CheckpointError` for a tensor that lacks what it is multiplied with, and `TaskRefused`.
    """
    known = {tensor.name: tensor for file in files for tensor in file.tensors}
    if any(task_adapters.is_adapter(name) for name in known):
        return _adapted(files, known, embedding_task)
    if all(tensor.dtype in _PLAIN for tensor in known.values()):
        return {}
    config = read_model_config(files[0].path.parent)
    found = quantization.multiplied(config)
    if found is None or floats.is_of(found):
        return {}
    numbers = {tensor.name: n for n, file in enumerate(files) for tensor in file.tensors}
    products: dict[str, Product | None] = {}
    for name, tensor in known.items():
        if nvfp4.is_of(found):
            made, hidden = _of_nvfp4(tensor, known, numbers), nvfp4.is_unused(tensor)
        elif microscaled.is_of(found):
            made, hidden = _microscaled(tensor, known, numbers), microscaled.is_unused(tensor)
        else:
            made, hidden = (
                _of_integers(found, tensor, known, numbers),
                integers.is_unused(found, name),
            )
        if hidden or made is not None:
            products[name] = made
    return products


_PLAIN = ("F64", "F32", "F16", "BF16")


def _adapted(
    files: Sequence[WeightFile], known: dict[str, TensorEntry], asked: str
) -> dict[str, Product | None]:
    config = read_model_config(files[0].path.parent)
    if wrong := task_adapters.why_not_tensors(config, [*known.values()]):
        raise CheckpointError(f"{config.path}: {wrong}")
    if not (task := task_adapters.served_task(config, asked)):
        return {}
    number = task_adapters.tasks(config).index(task)
    factor = task_adapters.factor(config)
    numbers = {tensor.name: n for n, file in enumerate(files) for tensor in file.tensors}
    products: dict[str, Product | None] = dict.fromkeys(
        name for name in known if task_adapters.is_adapter(name)
    )
    for matrix in task_adapters.matrices(known.values()):
        rows, columns = matrix.original.shape
        origin = adapted.origin_of(matrix, number, factor, numbers)
        made = Product(matrix.name, (rows, columns), adapted.dtype_of(matrix), origin, False)
        products[matrix.original.name] = made
    return products


def _microscaled(
    tensor: TensorEntry, known: dict[str, TensorEntry], files: dict[str, int]
) -> Product | None:
    if not tensor.name.endswith(microscaled.BLOCKS):
        return None
    if (scales := microscaled.scales_of(tensor, known)) is None:
        raise CheckpointError(f"{tensor.name} has no scales of its shape")
    name = tensor.name.removesuffix(microscaled.BLOCKS)
    origin = MicroscaledOrigin(
        name, files[tensor.name], tensor.offset, files[scales.name], scales.offset
    )
    return Product(name, microscaled.shape_of(tensor), PRODUCTS, origin, True)


def _of_nvfp4(
    tensor: TensorEntry, known: dict[str, TensorEntry], files: dict[str, int]
) -> Product | None:
    if not nvfp4.is_packed(tensor):
        return None
    if (layer := nvfp4.layer(tensor, known)) is None:
        raise CheckpointError(f"{tensor.name} lacks its factors")
    origin = nvfp4_products.origin_of(layer, files)
    return Product(layer.name, layer.shape, nvfp4_products.PRODUCTS, origin, False)


def _of_integers(
    found: dict[str, Any],
    tensor: TensorEntry,
    known: dict[str, TensorEntry],
    files: dict[str, int],
) -> Product | None:
    if not integers.has_words(found, tensor):
        return None
    if (layer := integers.layer(found, tensor, known)) is None:
        raise CheckpointError(f"{tensor.name} lacks its scales or zeros")
    origin = origin_of(quantization.method_of(found), layer, files)
    return Product(layer.name, layer.shape, DTYPE, origin, False)
