"""Weights in MXFP4: which are let through, with what reason others are refused, and their size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.checkpoints.families import UnsupportedModel, check_family
from appliance.checkpoints.model_config import read_model_config
from appliance.config.checks import warnings
from appliance.config.loader import load_config
from appliance.config.schema import Devices, Model
from appliance.config.sizing import read_model
from appliance.units import Bytes, Memory
from tests.engine.quantizing import mxfp4_config

Make = Callable[..., Path]
Tensors = dict[str, tuple[type[np.generic], tuple[int, ...]]]

W = "model.layers.0.mlp.experts.down_proj"
EXPERTS, OUT, IN = 4, 64, 96
BLOCKS = (EXPERTS, OUT, IN // 32, 16)
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 32,
    "quantization_config": mxfp4_config(),
}


def store(path: Path, tensors: Tensors) -> Path:
    made = {name: np.zeros(shape, kind) for name, (kind, shape) in tensors.items()}
    save_file(made, path / "model.safetensors")
    return path


def stored(**changes: Any) -> Tensors:
    """A tensor of blocks with its scales, and a bias."""
    whole = {"blocks": BLOCKS, "scales": BLOCKS[:-1], **changes}
    tensors: Tensors = {f"{W}_{own}": (np.uint8, shape) for own, shape in whole.items() if shape}
    return {**tensors, f"{W}_bias": (np.float16, (EXPERTS, OUT))}


def test_sizes_are_those_of_the_products(fake_checkpoint: Make) -> None:
    """In any type, also float32; scales are not kept."""
    path = store(fake_checkpoint(**GPT_OSS), stored())

    two, four = read_checkpoint("a", path, "bfloat16"), read_checkpoint("a", path, "float32")

    elements = EXPERTS * OUT * (IN + 1)
    assert (two.weight_bytes, four.weight_bytes) == (2 * elements, 4 * elements)
    assert two.parameters == elements
    assert two.multiplied == "mxfp4"


def test_a_check_of_the_configuration_says_so(fake_checkpoint: Make, tmp_path: Path) -> None:
    store(fake_checkpoint("tiny", **GPT_OSS), stored())
    file = tmp_path / "appliance.toml"
    file.write_text(
        '[devices]\nkind = "cpu"\nmemory = "64MiB"\nslab = "2MiB"\n'
        '[[model]]\nname = "a"\npath = "tiny"\nmax_context = 64\ndtype = "bfloat16"\n'
    )

    (warning,) = warnings(load_config(file))

    assert warning == (
        "model.a: its weights are stored in mxfp4, and take the memory of the type that it is "
        "computed in"
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"quantization_config": {**mxfp4_config(), "block_size": 16}},
            "quantization_config.block_size is not known",
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
            r"no test serves LlamaForCausalLM .* \(mxfp4\)",
        ),
    ],
)
def test_what_is_not(fake_checkpoint: Make, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        check_family(read_model_config(fake_checkpoint(**GPT_OSS | changes)))


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (stored(scales=None), "blocks is no tensor of blocks with as many scales"),
        (stored(blocks=None), "scales is there without .*_blocks"),
        (stored(scales=(EXPERTS, OUT, 2)), "blocks is no tensor of blocks with as many"),
        (stored(blocks=(EXPERTS, OUT, 3, 8)), "blocks is no tensor of blocks with as many"),
        (stored(blocks=BLOCKS[1:], scales=BLOCKS[1:-1]), "blocks is no tensor of blocks"),
        (stored(blocks=(0, *BLOCKS[1:]), scales=(0, *BLOCKS[1:-1])), "no tensor of blocks"),
        ({**stored(), W: (np.float16, (1,))}, "down_proj_blocks is there, and .*down_proj, too"),
        ({**stored(), "lm_head.weight": (np.int8, (2, 2))}, "lm_head.weight is of I8, and not"),
        ({f"model.norm_{own}": (np.uint8, BLOCKS) for own in ("blocks",)}, "is of no experts"),
    ],
)
def test_tensors_that_are_not_taken(fake_checkpoint: Make, tensors: Tensors, reason: str) -> None:
    path = store(fake_checkpoint(**GPT_OSS), tensors)

    with pytest.raises(UnsupportedModel, match=reason):
        read_checkpoint("tiny", path)


@pytest.mark.parametrize(
    ("kind", "ranks", "reason"),
    [("cuda", 1, r"\(mxfp4\), which was only tried on the CPU"), ("cpu", 2, "several ranks")],
)
def test_where_they_are_not_served(
    fake_checkpoint: Make, kind: Any, ranks: int, reason: str
) -> None:
    path = store(fake_checkpoint(**GPT_OSS), stored())
    devices = Devices(
        kind=kind,
        tensor_parallel=ranks,
        memory_bytes=Memory(8 << 20),
        slab_bytes=Bytes(2 << 20),
    )

    with pytest.raises(UnsupportedModel, match=reason):
        read_model(Model(name="a", path=str(path), dtype="bfloat16", max_context=64), devices)
