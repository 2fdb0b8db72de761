"""Weights in NVFP4: which are let through, with what reason others are refused, and their size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.checkpoints.families import UnsupportedModel, check_family
from appliance.checkpoints.model_config import read_model_config
from appliance.config.schema import Devices, Model
from appliance.config.sizing import read_model
from appliance.units import Bytes, Memory
from tests.engine.quantizing import modelopt_config, nvfp4_config
from tests.unit.checkpoints.test_floats import store

Make = Callable[..., Path]
Tensors = dict[str, tuple[str, list[int]]]

W = "model.layers.0.mlp.down_proj"
OUT, IN = 64, 96
MODELOPT, COMPRESSED = modelopt_config(), nvfp4_config()
LAYER: Tensors = {
    f"{W}.weight": ("U8", [OUT, IN // 2]),
    f"{W}.weight_scale": ("F8_E4M3", [OUT, IN // 16]),
    f"{W}.weight_scale_2": ("F32", []),
    f"{W}.input_scale": ("F32", []),
    "model.layers.0.self_attn.k_proj.k_scale": ("F32", []),
}
PACKED: Tensors = {
    f"{W}.weight_packed": ("U8", [OUT, IN // 2]),
    f"{W}.weight_scale": ("F8_E4M3", [OUT, IN // 16]),
    f"{W}.weight_global_scale": ("F32", [1]),
    f"{W}.input_global_scale": ("F32", [1]),
}


def group(**changes: Any) -> dict[str, Any]:
    """What ModelOpt says, with other weights."""
    (whole,) = MODELOPT["config_groups"].values()
    groups = {"group_0": {**whole, "weights": {**whole["weights"], **changes}}}
    return {**MODELOPT, "config_groups": groups}


def stored(**changes: Any) -> dict[str, Any]:
    """What compressed-tensors says, with other weights."""
    ((name, whole),) = COMPRESSED["config_groups"].items()
    groups = {name: {**whole, "weights": {**whole["weights"], **changes}}}
    return {**COMPRESSED, "config_groups": groups}


def nested(**changes: Any) -> dict[str, Any]:
    """What ModelOpt says in a file of its own, where config.json says it."""
    apart = modelopt_config(apart=True)
    return {**apart, "quantization": {**apart["quantization"], **changes}}


@pytest.mark.parametrize(
    ("config", "tensors"), [(MODELOPT, LAYER), (nested(), LAYER), (COMPRESSED, PACKED)]
)
def test_sizes_are_those_of_the_products(
    fake_checkpoint: Make, config: dict[str, Any], tensors: Tensors
) -> None:
    """In any type, also float32; factors are not kept."""
    path = store(fake_checkpoint(quantization_config=config), tensors)

    two, four = read_checkpoint("a", path, "bfloat16"), read_checkpoint("a", path, "float32")

    assert (two.weight_bytes, four.weight_bytes) == (2 * OUT * IN, 4 * OUT * IN)
    assert two.parameters == OUT * IN
    assert two.multiplied == config.get("quant_method", "modelopt")


def test_a_file_apart_says_the_same(fake_checkpoint: Make) -> None:
    """Of ModelOpt before 0.31. Where config.json says something itself, that holds."""
    path = store(fake_checkpoint("a"), LAYER)
    other = store(fake_checkpoint("b", quantization_config={"quant_method": "fp8"}), LAYER)
    for folder in (path, other):
        (folder / "hf_quant_config.json").write_text(json.dumps(modelopt_config(apart=True)))

    assert read_checkpoint("a", path, "bfloat16").multiplied == "modelopt"
    with pytest.raises(UnsupportedModel, match="activation_scheme is None"):
        read_checkpoint("b", other)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 100_000,
        "[]",
        '{"quantization": []}',
        json.dumps({"quantization": {"quant_algo": "FP8"}}),
        json.dumps(modelopt_config(apart=True)) + " " * (1 << 20),
    ],
    ids=["broken", "deep", "list", "no table", "fp8", "long"],
)
def test_files_apart_that_say_something_else(fake_checkpoint: Make, text: str) -> None:
    path = store(fake_checkpoint(), LAYER)
    (path / "hf_quant_config.json").write_text(text)

    with pytest.raises(UnsupportedModel, match=r"quantized \(hf_quant_config.json\)"):
        read_checkpoint("a", path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**MODELOPT, "quant_algo": "FP8"}, r"quantized \(modelopt\)"),
        ({**MODELOPT, "quant_algo": ["NVFP4"]}, r"quantized \(modelopt\)"),
        ({**MODELOPT, "group_size": 32}, "group_size is 32, not 16"),
        ({**MODELOPT, "kv_cache_scheme": {"type": "float", "num_bits": 4}}, "kv_cache_scheme is"),
        ({**MODELOPT, "kv_cache_scheme": "FP8"}, "kv_cache_scheme is FP8, not floats of 8 bits"),
        ({**MODELOPT, "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo is 'NVFP4', not 'FP8'"),
        ({**MODELOPT, "config_groups": [1]}, "config_groups is no table"),
        ({**MODELOPT, "config_groups": {"a": 1}}, r"config_groups\.a\.weights is no table"),
        ({**MODELOPT, "ignore": "lm_head"}, "ignore is no list of names"),
        (group(num_bits=8), r"group_0\.weights\.num_bits is 8, not 4"),
        (group(type="int"), r"group_0\.weights\.type is 'int', not 'float'"),
        (group(dynamic=True), r"group_0\.weights are not symmetric, or dynamic"),
        (nested(kv_cache_quant_algo="NVFP4"), "kv_cache_quant_algo is 'NVFP4', not 'FP8'"),
        (nested(group_size=32), "group_size is 32, not 16"),
        (
            {**nested(kv_cache_quant_algo="NVFP4"), "quant_method": "modelopt"},
            "kv_cache_quant_algo is 'NVFP4', not 'FP8'",
        ),
        (stored(actorder="group"), r"weights\.actorder is 'group', which is not computed"),
        (stored(scale_dtype="torch.uint8"), r"weights\.scale_dtype is 'torch.uint8'"),
        (stored(strategy="block"), r"weights\.strategy is 'block'"),
        (stored(invented=1), r"weights\.invented is not known"),
        ({**COMPRESSED, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is there"),
        ({**COMPRESSED, "format": "mxfp4-pack-quantized"}, "compressed-tensors: "),
    ],
)
def test_what_is_not(fake_checkpoint: Make, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        check_family(read_model_config(fake_checkpoint(quantization_config=config)))


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("olmoe", "OlmoeForCausalLM"), ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration")],
)
def test_families_that_no_test_serves_so(
    fake_checkpoint: Make, kind: str, architecture: str
) -> None:
    path = fake_checkpoint(
        architectures=[architecture], model_type=kind, quantization_config=MODELOPT
    )

    with pytest.raises(UnsupportedModel, match=rf"no test serves {architecture} .* \(modelopt\)"):
        check_family(read_model_config(path))


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        (MODELOPT, {f"{W}.weight_scale": ("BF16", [OUT, 6])}, "weight has no factors of"),
        (
            MODELOPT,
            {f"{W}.weight_scale": ("F8_E4M3", [OUT, 3])},
            "weight has no factors of the shape",
        ),
        (MODELOPT, {f"{W}.weight_scale_2": ("F32", [2])}, "weight has no factors of the sh"),
        (MODELOPT, {f"{W}.weight": ("U8", [2, OUT, 48])}, "weight has no factors of the sha"),
        (MODELOPT, {f"{W}.weight": ("U8", [OUT, 0])}, "weight has no factors of the shape"),
        (MODELOPT, {f"{W}.pre_quant_scale": ("BF16", [IN])}, "pre_quant_scale is there"),
        (MODELOPT, {"lm_head.bias": ("U8", [OUT])}, "lm_head.bias is of U8, and not"),
        (
            MODELOPT,
            {"lm_head.weight": ("F8_E4M3", [OUT, 8])},
            "lm_head.weight is of F8_E4M3, and not",
        ),
        (COMPRESSED, {"model.layers.0.self_attn.k_scale": ("F32", [])}, "a quantized KV ca"),
        (COMPRESSED, {f"{W}.weight": ("BF16", [OUT, IN])}, r"down_proj\.weight, too"),
        (COMPRESSED, {f"{W}.weight_global_scale": ("BF16", [1])}, "no factors of the shape"),
    ],
)
def test_tensors_that_are_not_taken(
    fake_checkpoint: Make, config: dict[str, Any], changes: Tensors, reason: str
) -> None:
    tensors = LAYER if config is MODELOPT else PACKED
    path = store(fake_checkpoint(quantization_config=config), tensors)
    read_checkpoint("tiny", path)
    store(path, tensors | changes)

    with pytest.raises(UnsupportedModel, match=reason):
        read_checkpoint("tiny", path)


@pytest.mark.parametrize(
    ("kind", "ranks", "reason"),
    [("cuda", 1, r"\(modelopt\), which was only tried on the CPU"), ("cpu", 2, "several ranks")],
)
def test_where_they_are_not_served(
    fake_checkpoint: Make, kind: Any, ranks: int, reason: str
) -> None:
    path = store(fake_checkpoint(quantization_config=MODELOPT), LAYER)
    devices = Devices(
        kind=kind,
        tensor_parallel=ranks,
        memory_bytes=Memory(8 << 20),
        slab_bytes=Bytes(2 << 20),
    )

    with pytest.raises(UnsupportedModel, match=reason):
        read_model(Model(name="a", path=str(path), dtype="bfloat16", max_context=64), devices)
