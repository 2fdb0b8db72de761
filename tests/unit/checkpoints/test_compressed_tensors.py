"""Weights of compressed-tensors: which are let through, with what reason others are refused, and
their size."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.checkpoints.families import UnsupportedModel, check_family
from appliance.checkpoints.model_config import read_model_config
from appliance.checkpoints.quantized.compressed_tensors import Ignored
from tests.engine.quantizing import w4a16_config, w8a8_config
from tests.unit.checkpoints.test_quantization import store

Make = Callable[..., Path]
Changes = dict[str, Any]

W4A16, W8A8 = w4a16_config(128), w8a8_config()
ASYMMETRIC = w4a16_config(128, symmetric=False)
OUT, IN = 64, 256
LAYER = "model.layers.0.mlp.down_proj"


def changed(config: Changes, part: str = "", **changes: Any) -> Changes:
    """The configuration with other settings: of all, of its group, or of a part of that."""
    if not part:
        return {**config, **changes}
    ((name, group),) = config["config_groups"].items()
    group = {**group, **changes} if part == "group" else {**group, part: {**group[part], **changes}}
    return {**config, "config_groups": {name: group}}


@pytest.mark.parametrize(
    "config",
    [
        W4A16,
        W8A8,
        w4a16_config(-1),
        w4a16_config(128, symmetric=False),
        w4a16_config(32, actorder="static"),
        w4a16_config(64, actorder="weight"),
        {**W8A8, "ignore": None, "kv_cache_scheme": {}, "sparsity_config": None},
        {**W8A8, "ignore": ["lm_head", r"re:.*gate\.proj$", "re:model.layers.0.*"]},
        changed(changed(W8A8, "group", format="int-quantized"), format="mixed-precision"),
    ],
)
def test_what_is_served(fake_checkpoint: Make, config: Changes) -> None:
    check_family(read_model_config(fake_checkpoint(quantization_config=config)))


def test_an_older_name_of_the_key(fake_checkpoint: Make) -> None:
    with pytest.raises(UnsupportedModel, match=r"quantization_config\.ignore is no list"):
        check_family(
            read_model_config(fake_checkpoint(compression_config={**W8A8, "ignore": "lm_head"}))
        )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (changed(W8A8, kv_cache_scheme={"num_bits": 8}), r"quantization_config\.kv_cache_scheme"),
        (changed(W8A8, transform_config={"a": 1}), r"quantization_config\.transform_config"),
        (changed(W8A8, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (changed(W8A8, sparsity_config={"format": "dense", "targets": ["Linear"]}), "sparsity"),
        (changed(W8A8, config_groups={}), "config_groups has 0 groups, not one"),
        (changed(W8A8, config_groups={"a": {}, "b": {}}), "config_groups has 2 groups, not one"),
        (changed(W8A8, config_groups={"a": []}), r"config_groups\.a is no table"),
        (changed(W8A8, "group", targets=["Linear", "Embedding"]), r"targets is not"),
        (changed(W8A8, "group", output_activations={"num_bits": 8}), "output_activations is there"),
        (changed(W8A8, "group", weights=None), "weights is no table"),
        (changed(W8A8, "group", input_activations=None), "input_activations is not there"),
        (changed(W4A16, "group", input_activations={"num_bits": 8}), "input_activations is there"),
        (changed(W8A8, "weights", num_bits=6), r"weights\.num_bits is 6, not 4 or 8"),
        (changed(W8A8, "weights", num_bits=8.0), r"weights\.num_bits is 8\.0"),
        (changed(W8A8, "weights", type="float"), r"weights\.type is 'float', .*AMX"),
        (changed(W8A8, "weights", type=None), r"weights\.type is None, not 'int'"),
        (changed(W8A8, "weights", symmetric=False), r"weights\.symmetric is False, not true"),
        (changed(W8A8, "weights", dynamic=True), r"weights\.dynamic is True, not false"),
        (changed(W8A8, "weights", strategy="tensor"), r"strategy is 'tensor' with group_size None"),
        (changed(W8A8, "weights", scale_dtype="torch.uint8"), r"weights\.scale_dtype"),
        (changed(W8A8, "weights", surprise=1), r"weights\.surprise is not known"),
        (changed(W8A8, "input_activations", strategy="tensor"), "strategy is 'tensor', not 'token"),
        (changed(W8A8, "input_activations", dynamic=False), r"input_activations\.dynamic is False"),
        (changed(W8A8, "input_activations", symmetric=False), r"input_activations\.symmetric"),
        (changed(W8A8, "input_activations", num_bits=4), "num_bits is 4, not 8"),
        (changed(W4A16, "weights", symmetric=None), r"weights\.symmetric is None, not true"),
        (changed(W4A16, "weights", group_size=16), "group_size is 16, not one of 32, 64, 128"),
        (changed(W4A16, "weights", group_size=128.0), r"group_size is 128\.0, not one of"),
        (changed(W4A16, "weights", actorder="group"), r"weights\.actorder is 'group'"),
        (changed(W4A16, "weights", actorder=True), r"weights\.actorder is True"),
        (changed(W4A16, format="marlin-24"), "format is 'marlin-24', not 'pack-quantized', for 4"),
        (changed(W8A8, format="pack-quantized"), "'pack-quantized', not 'int-quantized', for 8"),
        (changed(W8A8, ignore=[1]), "ignore is no list of names"),
        (changed(W8A8, ignore=["re:(a*)*b"]), r"ignore has the pattern 're:\(a\*\)\*b'"),
        (changed(W8A8, ignore=["re:.*a.*b.*c.*d"]), "ignore has the pattern"),
        (changed(W8A8, ignore=[f"re:l{n}" for n in range(65)]), "or 64 patterns"),
        (changed(W8A8, ignore=[f"l{n}" for n in range(5000)]), "more than 4096 names"),
    ],
)
def test_what_is_not(fake_checkpoint: Make, config: Changes, reason: str) -> None:
    """With the field, and a remedy."""
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        check_family(read_model_config(fake_checkpoint(quantization_config=config)))

    assert "its weights are quantized (compressed-tensors: quantization_config." in str(
        caught.value
    )
    assert caught.value.remedy.startswith("take the model's checkpoint with weights in bfloat16")


def w4a16_tensors(layer: str = LAYER, groups: int = 2) -> Changes:
    return {
        f"{layer}.weight_packed": ((OUT, IN // 8), np.int32),
        f"{layer}.weight_scale": ((OUT, groups), np.float16),
        f"{layer}.weight_shape": ((2,), np.int64),
    }


def w8a8_tensors(layer: str = LAYER) -> Changes:
    return {
        f"{layer}.weight": ((OUT, IN), np.int8),
        f"{layer}.weight_scale": ((OUT, 1), np.float16),
    }


ZEROS = {f"{LAYER}.weight_zero_point": ((OUT // 8, 2), np.int32)}


def test_sizes_are_those_of_what_is_read(fake_checkpoint: Make) -> None:
    """The factors of weights in 8 bits are in float32. The number of parameters counts weights, not
    the words that they are in."""
    four = store(fake_checkpoint("a", quantization_config=W4A16), w4a16_tensors())
    eight = store(fake_checkpoint("b", quantization_config=W8A8), w8a8_tensors())

    zeros = store(fake_checkpoint("c", quantization_config=ASYMMETRIC), w4a16_tensors() | ZEROS)

    read = [read_checkpoint("a", path) for path in (four, zeros, eight)]

    half, scales = OUT * IN // 2, OUT * 2 * 2
    expected = [half + scales, half + scales + OUT // 8 * 2 * 4, OUT * IN + OUT * 4]
    assert [one.weight_bytes for one in read] == expected
    assert {one.parameters for one in read} == {OUT * IN}


PLAIN = {f"{LAYER}.weight": ((OUT, IN), np.float16)}
IGNORED = changed(W8A8, ignore=[LAYER])
SMALL = {
    f"{LAYER}.weight_packed": ((48, IN // 8), np.int32),
    f"{LAYER}.weight_scale": ((48, 2), np.float16),
}


@pytest.mark.parametrize(
    ("config", "tensors", "reason"),
    [
        (W8A8, PLAIN, r"down_proj\.weight is no matrix of I8"),
        (W4A16, PLAIN, r"down_proj\.weight_packed is no matrix of I32"),
        (W4A16, w8a8_tensors(), r"weight_packed is no matrix of I32"),
        (W8A8, w4a16_tensors(), r"weight is no matrix of I8"),
        (W4A16, SMALL, r"is a weight \[48, 256\], which is no multiple of 32"),
        (W4A16, w4a16_tensors(groups=4), r"weight_scale is not there with the shape \[64, 2\]"),
        (w4a16_config(32), w4a16_tensors(), r"not there with the shape \[64, 8\]"),
        (
            W8A8,
            {**w8a8_tensors(), f"{LAYER}.weight_scale": ((OUT, 1), np.int32)},
            "weight_scale is not there",
        ),
        (IGNORED, w8a8_tensors(), r"is quantized, and quantization_config\.ignore has it"),
        (W8A8, {**w8a8_tensors(), f"{LAYER}.input_scale": ((1,), np.float32)}, "input_scale"),
        (W4A16, {**w4a16_tensors(), f"{LAYER}.weight_g_idx": ((IN,), np.int32)}, "weight_g_idx"),
        (
            changed(W8A8, ignore=[]),
            w8a8_tensors("lm_head"),
            "is of no decoder layer, such as the output head",
        ),
        (
            changed(W8A8, ignore=["model.layers.0.mlp.up_proj"]),
            {
                **w8a8_tensors("model.layers.0.mlp.gate_proj"),
                "model.layers.0.mlp.up_proj.weight": ((OUT, IN), np.float16),
            },
            "gate_proj is quantized, and model.layers.0.mlp.up_proj is not",
        ),
        (
            changed(W8A8, ignore=["re:.*qkv_proj"]),
            w8a8_tensors("model.layers.0.self_attn.q_proj"),
            r"q_proj is quantized, and quantization_config\.ignore has qkv_proj",
        ),
        (
            changed(W8A8, ignore=["model.layers.0.mlp.gate_up_proj"]),
            w8a8_tensors("model.layers.0.mlp.up_proj"),
            r"up_proj is quantized, and quantization_config\.ignore has gate_up_proj",
        ),
        (W8A8, {"lm_head.weight": ((OUT, IN), np.int8)}, "lm_head.weight is of I8, and not quant"),
        (IGNORED, {f"{LAYER}.weight": ((OUT, IN), np.int8)}, "weight is of I8, and not quantized"),
        (
            W8A8,
            {"model.layers.0.input_layernorm.weight": ((OUT,), np.int8)},
            "weight is of I8, and not quantized",
        ),
    ],
)
def test_tensors_that_are_not_taken(
    fake_checkpoint: Make, config: Changes, tensors: Changes, reason: str
) -> None:
    path = store(fake_checkpoint(quantization_config=config), tensors)

    with pytest.raises(UnsupportedModel, match=reason):
        read_checkpoint("tiny", path)


def test_patterns_match_what_regular_expressions_match() -> None:
    """But for the time that they take."""
    texts = ["", "a", "b", ".", "ab", r"\."]
    patterns = [
        f"{start}{'.*'.join(parts)}{end}"
        for count in (1, 2, 3)
        for parts in product(texts, repeat=count)
        for start, end in (("", ""), ("^", "$"))
    ]
    names = ["".join(letters) for count in range(5) for letters in product("ab.", repeat=count)]

    for pattern in patterns:
        ignored, expression = Ignored([f"re:{pattern}"]), re.compile(pattern)
        found = [name for name in names if name in ignored]
        assert found == [name for name in names if expression.match(name)], pattern


def test_layers_that_are_not_quantized(fake_checkpoint: Make) -> None:
    path = store(fake_checkpoint(quantization_config=IGNORED), PLAIN)

    assert read_checkpoint("tiny", path).weight_bytes == OUT * IN * 2
