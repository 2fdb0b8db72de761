"""Checkpoints that read images, with quantized language models: by what names their layers are
looked for, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from safetensors.numpy import save_file

from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.checkpoints.families import UnsupportedModel
from tests.engine.quantizing import (
    awq_config,
    float_quantized_config,
    gptq_config,
    w4a16_config,
)

Make = Callable[..., Path]

ROWS: Final = 64
TOWER: Final = "visual.blocks.0.attn.qkv"
LAYER: Final = "layers.0.mlp.down_proj"
OLD, NEW = ("", "model."), ("model.", "model.language_model.")
"""What names of the tower and of the language model begin with: those before transformers 4.52 of
Qwen's, and those since."""
PLAIN: Final = np.zeros((ROWS, ROWS), np.float16)
W4A16: Final = w4a16_config(32)


def stored(layer: str, config: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a quantized layer."""
    words, groups = ROWS // 8, ROWS // 32
    scales = np.zeros((groups, ROWS), np.float16)
    if config["quant_method"] == "compressed-tensors":
        return {
            f"{layer}.weight_packed": np.zeros((ROWS, words), np.int32),
            f"{layer}.weight_scale": np.ascontiguousarray(scales.T),
        }
    gptq = config["quant_method"] == "gptq"
    return {
        f"{layer}.qweight": np.zeros((words, ROWS) if gptq else (ROWS, words), np.int32),
        f"{layer}.qzeros": np.zeros((groups, words), np.int32),
        f"{layer}.scales": scales,
    }


def reader(
    make: Make, begins: tuple[str, str], config: dict[str, Any], *, plain_layer: bool = False
) -> Path:
    """A Qwen2.5-VL with a tower, a layer that is quantized, and one that may be plain."""
    text = json.loads((make("text") / "config.json").read_text())
    path = make(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        model_type="qwen2_5_vl",
        text_config=text | {"model_type": "qwen2_5_vl_text"},
        quantization_config=config,
    )
    tower, language = begins
    tensors = {f"{tower}{TOWER}.weight": PLAIN, "lm_head.weight": PLAIN}
    tensors |= stored(f"{language}{LAYER.replace('0', '1')}", config)
    layer = f"{language}{LAYER}"
    tensors |= {f"{layer}.weight": PLAIN} if plain_layer else stored(layer, config)
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("begins", [OLD, NEW])
@pytest.mark.parametrize(
    "config",
    [
        gptq_config(32),
        gptq_config(32, modules_in_block_to_quantize=[["mlp.down_proj"]]),
        awq_config(32),
        awq_config(32, modules_to_not_convert=["visual"]),
        {**W4A16, "ignore": ["lm_head", "re:.*visual.*"]},
        float_quantized_config("tensor"),
    ],
)
def test_a_language_model_may_be_quantized(
    fake_checkpoint: Make, begins: tuple[str, str], config: dict[str, Any]
) -> None:
    path = reader(fake_checkpoint, begins, config)
    if config.get("format") == "float-quantized":
        save_file({f"{begins[0]}{TOWER}.weight": PLAIN, "lm_head.weight": PLAIN}, path / FILE)

    alone, whole = (read_checkpoint("reader", path, images=images) for images in (0, 2))

    assert whole.parameters - alone.parameters == ROWS * ROWS
    assert whole.weight_bytes - alone.weight_bytes == 2 * ROWS * ROWS


FILE: Final = "model.safetensors"


@pytest.mark.parametrize("begins", [OLD, NEW])
def test_names_are_those_in_the_files(fake_checkpoint: Make, begins: tuple[str, str]) -> None:
    """Of layers that are plain; vLLM calls them otherwise."""
    tower, language = begins
    config = {**W4A16, "ignore": ["lm_head", f"{tower}{TOWER}", f"{language}{LAYER}"]}
    path = reader(fake_checkpoint, begins, config, plain_layer=True)
    read_checkpoint("reader", path)
    read_checkpoint("reader", path, images=1)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (W4A16, f"{TOWER} reads images, and quantization_config does not say that it is plain"),
        ({**W4A16, "ignore": ["model.visual"]}, "does not say that it is plain"),
        (awq_config(32, modules_to_not_convert=["model.visual"]), "does not say that it is plain"),
        (gptq_config(32, modules_in_block_to_quantize=["attn.qkv"]), "does not say that it is"),
        (
            {**W4A16, "ignore": ["re:.*visual.*", "re:model.layers.0.*"]},
            f"does not match model.{LAYER} in the whole model",
        ),
    ],
)
def test_what_vllm_does_not_build_whole_is_refused_with_images(
    fake_checkpoint: Make, config: dict[str, Any], reason: str
) -> None:
    path = reader(fake_checkpoint, NEW, config, plain_layer="whole" in reason)
    read_checkpoint("reader", path)

    with pytest.raises(UnsupportedModel, match=reason) as caught:
        read_checkpoint("reader", path, images=1)

    assert caught.value.remedy.startswith("use images = 0")


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (gptq_config(32), {"ignore": ["re:(.*a)+(.*a)+$", "re:("]}),
        (awq_config(32), {"ignore": ["re:(.*a)+(.*a)+$"], "dynamic": {"-:(": {}}}),
        ({**W4A16, "ignore": ["re:.*visual.*", "lm_head"]}, {"dynamic": {"-:(.*a)+(": {}}}),
    ],
)
def test_patterns_of_other_methods_are_not_matched(
    fake_checkpoint: Make, config: dict[str, Any], key: dict[str, Any]
) -> None:
    """vLLM does not read them. They are not checked either, and may be no patterns, or take for
    ever."""
    read_checkpoint("reader", reader(fake_checkpoint, NEW, config | key), images=1)


def test_towers_are_not_quantized(fake_checkpoint: Make) -> None:
    config = gptq_config(32)
    path = reader(fake_checkpoint, NEW, config)
    tensors = stored(f"model.{TOWER}", config) | stored(f"model.language_model.{LAYER}", config)
    save_file({"lm_head.weight": PLAIN, **tensors}, path / FILE)
    read_checkpoint("reader", path)

    with pytest.raises(UnsupportedModel, match=r"qkv\.q.* reads images and is quantized \(I32\)"):
        read_checkpoint("reader", path, images=1)
