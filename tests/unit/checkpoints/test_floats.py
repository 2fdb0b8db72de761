"""Weights in floats of 8 bits: which are let through, with what reason others are refused, and
their size."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.checkpoints.families import UnsupportedModel, check_family
from appliance.checkpoints.model_config import read_model_config
from appliance.checkpoints.quantized.quantization import forget
from appliance.config.schema import Devices, Model
from appliance.config.sizing import read_model
from appliance.units import Bytes, Memory
from tests.engine.quantizing import float_quantized_config, fp8_config

Make = Callable[..., Path]
Tensors = dict[str, tuple[str, list[int]]]

BLOCKS, MATRIX = fp8_config((128, 128)), fp8_config(None)
ROWS = float_quantized_config("channel")
OUT, IN = 200, 300
W, S = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight_scale"
SIZES = {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "F32": 4, "BF16": 2}


def store(path: Path, tensors: Tensors) -> Path:
    """Numpy has no floats of 8 bits: the file is written by hand, with zeros."""
    header, end = {}, 0
    for name, (kind, shape) in tensors.items():
        nbytes = SIZES[kind]
        for size in shape:
            nbytes *= size
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    file = path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return path


def of_blocks(shape: list[int]) -> Tensors:
    return {W: ("F8_E4M3", [OUT, IN]), f"{S}_inv": ("F32", shape)}


def of_all(shape: list[int]) -> Tensors:
    return {W: ("F8_E4M3", [OUT, IN]), S: ("F32", shape)}


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        (BLOCKS, of_blocks([2, 3])),
        (MATRIX, of_all([])),
        (MATRIX, {**of_all([1]), S.replace("weight", "input"): ("F32", [])}),
        (fp8_config(None, activation_scheme="static"), of_all([OUT, 1])),
        (float_quantized_config("channel"), of_all([OUT, 1])),
        (float_quantized_config("tensor"), of_all([1])),
        (float_quantized_config("block", block_structure=[128, 128]), of_all([2, 3])),
    ],
)
def test_sizes_are_those_of_the_products(
    fake_checkpoint: Make, config: dict[str, Any], tensors: Tensors
) -> None:
    """In any type, also float32; factors are not kept."""
    path = store(fake_checkpoint(quantization_config=config), tensors)

    two, four = read_checkpoint("a", path, "bfloat16"), read_checkpoint("a", path, "float32")

    assert (two.weight_bytes, four.weight_bytes) == (2 * OUT * IN, 4 * OUT * IN)
    assert two.parameters == OUT * IN


def test_a_head_that_is_not_served_is_not_counted(
    fake_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its numbers, nor that they become wider."""
    monkeypatch.setattr("appliance.checkpoints.checkpoint.packs", lambda dtype: False)
    head: Tensors = {"lm_head.weight": ("F8_E4M3", [OUT, IN]), "lm_head.weight_scale": ("F32", [1])}
    tied = fake_checkpoint("a", quantization_config=MATRIX, tie_word_embeddings=True)
    own = fake_checkpoint("b", quantization_config=MATRIX, tie_word_embeddings=False)

    sizes = [
        read_checkpoint("a", store(path, {**of_all([1]), **head}), "bfloat16").weight_bytes
        for path in (tied, own)
    ]

    assert sizes == [2 * OUT * IN, 4 * OUT * IN]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**BLOCKS, "activation_scheme": "none"}, "activation_scheme is 'none'"),
        ({**BLOCKS, "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({**BLOCKS, "weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\]"),
        ({**BLOCKS, "weight_block_size": [128, 2048]}, "weight_block_size"),
        ({**BLOCKS, "weight_block_size": [128.0, 128]}, "weight_block_size"),
        ({**BLOCKS, "fmt": "e5m2"}, r"quantization_config\.fmt is 'e5m2'"),
        ({**BLOCKS, "scale_fmt": "ue8m0"}, r"quantization_config\.scale_fmt is 'ue8m0'"),
        ({**BLOCKS, "store_dtype": "mxfp4"}, "store_dtype is there"),
        ({**ROWS, "kv_cache_scheme": {"num_bits": 8}}, r"quantization_config\.kv_cache_scheme"),
        ({**ROWS, "config_groups": {}}, "config_groups has 0 groups"),
        (float_quantized_config("group"), "strategy is 'group' with block_structure None"),
        (float_quantized_config("block"), "strategy is 'block' with block_structure None"),
        (float_quantized_config("block", block_structure=[0, 1]), r"structure is \[0, 1\]"),
        (float_quantized_config("channel", num_bits=4), r"weights\.num_bits is 4, not 8"),
        (float_quantized_config("channel", symmetric=False), "symmetric is False, not True"),
    ],
)
def test_what_is_not(fake_checkpoint: Make, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        check_family(read_model_config(fake_checkpoint(quantization_config=config)))

    assert caught.value.remedy.startswith("take the model's checkpoint with weights in bfloat16")


@pytest.mark.parametrize(
    ("config", "tensors", "reason"),
    [
        (BLOCKS, of_blocks([3, 3]), "has no factors of the shape"),
        (BLOCKS, of_all([1]), "has no factors of the shape"),
        (MATRIX, of_all([2]), "has no factors of the shape"),
        (MATRIX, {W: ("F8_E4M3", [OUT, IN])}, "has no factors of the shape"),
        (BLOCKS, {W: ("F8_E4M3", [2, OUT, IN])}, r"a tensor \[2, 200, 300\] of F8_E4M3, and no"),
        (BLOCKS, {W: ("F8_E5M2", [OUT, IN])}, "of F8_E5M2, and no weight"),
        (MATRIX, {**of_all([1]), "model.layers.0.attn.k_scale": ("F32", [])}, "KV cache"),
        (MATRIX, {W: ("I8", [OUT, IN]), S: ("F32", [1])}, "is of I8, and not quantized as"),
    ],
)
def test_tensors_that_are_not_taken(
    fake_checkpoint: Make, config: dict[str, Any], tensors: Tensors, reason: str
) -> None:
    path = store(fake_checkpoint(quantization_config=config), tensors)

    with pytest.raises(UnsupportedModel, match=reason):
        read_checkpoint("tiny", path)


@pytest.mark.parametrize(
    ("kind", "ranks", "reason"),
    [("cuda", 1, r"\(fp8\), which was only tried on the CPU"), ("cpu", 2, "several ranks")],
)
def test_where_they_are_not_served(
    fake_checkpoint: Make, kind: Any, ranks: int, reason: str
) -> None:
    path = store(fake_checkpoint(quantization_config=BLOCKS), of_blocks([2, 3]))
    devices = Devices(
        kind=kind,
        tensor_parallel=ranks,
        memory_bytes=Memory(8 << 20),
        slab_bytes=Bytes(2 << 20),
    )

    with pytest.raises(UnsupportedModel, match=reason):
        read_model(Model(name="a", path=str(path), dtype="bfloat16", max_context=64), devices)


class OfText(SimpleNamespace):
    """A configuration as transformers has it, of a language model alone."""

    def get_text_config(self) -> OfText:
        return self


def test_vllm_does_not_see_them() -> None:
    """But what else is quantized."""
    config = OfText(quantization_config=BLOCKS, compression_config=ROWS)
    fours = OfText(quantization_config={"quant_method": "mxfp4"})
    other = OfText(quantization_config={"quant_method": "awq"})

    forget(config)
    forget(fours)
    forget(other)
    forget(OfText())

    assert not vars(config)
    assert not vars(fours)
    assert other.quantization_config == {"quant_method": "awq"}
