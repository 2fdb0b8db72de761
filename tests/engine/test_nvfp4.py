"""Weights in NVFP4: the model is that of a checkpoint which has the products."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from appliance.checkpoints.families import base_architecture
from appliance.checkpoints.quantized.quantization import NVFP4_TRIED
from appliance.config.schema import Model
from appliance.config.sizing import least, read_model
from appliance.engines.vllm.weights.nvfp4 import Nvfp4Origin, multiply
from appliance.errors import CheckpointError
from tests.configs import CONFIGS
from tests.engine.house import PlainAnswers, make_house
from tests.engine.quantizing import make_plain, modelopt_config, nvfp4_config, to_nvfp4
from tests.engine.test_families import FAMILIES
from tests.engine.test_microscaled import plain_experts
from tests.engine.test_quantized import (
    CONTEXT,
    DEVICES,
    answers,
    image,
    packed_now,
    plain,
    start,
)

__all__ = ["plain_experts"]

SERVED = {
    architecture: name
    for name in FAMILIES
    if (architecture := base_architecture(CONFIGS[name]["architectures"][0])) in NVFP4_TRIED
}
LLAMA = SERVED["LlamaForCausalLM"]
QWEN = SERVED["Qwen3MoeForCausalLM"]
MODELOPT, APART, COMPRESSED = modelopt_config(), modelopt_config(apart=True), nvfp4_config()
EXPERTS = {**MODELOPT, "ignore": ["lm_head", "*self_attn*", "*mlp.gate"]}
"""Of which attention is not quantized, as in checkpoints of DeepSeek."""
SAID = {"modelopt": MODELOPT, "apart": APART, "compressed": COMPRESSED, "experts": EXPERTS}

Both = Callable[[str, dict[str, Any]], tuple[str, str]]


@pytest.fixture(scope="module")
def plain_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small checkpoints that are not quantized."""
    folder = tmp_path_factory.mktemp("plain")
    make_plain(folder, SERVED.values())
    return folder


@pytest.fixture
def both(tmp_path: Path, plain_checkpoints: Path) -> Both:
    """Makes a checkpoint in NVFP4, and one of its products."""

    def both(name: str, config: dict[str, Any]) -> tuple[str, str]:
        paths = [str(shutil.copytree(plain_checkpoints / name, tmp_path / n / name)) for n in "ab"]
        to_nvfp4(paths[0], paths[1], config)
        return paths[0], paths[1]

    return both


@pytest.mark.parametrize(
    ("architecture", "said", "dtype"),
    [
        *((architecture, "modelopt", "bfloat16") for architecture in sorted(NVFP4_TRIED)),
        ("DeepseekV3ForCausalLM", "apart", "bfloat16"),
        ("DeepseekV3ForCausalLM", "experts", "bfloat16"),
        ("LlamaForCausalLM", "compressed", "bfloat16"),
        ("Qwen3MoeForCausalLM", "compressed", "float32"),
        ("LlamaForCausalLM", "apart", "float16"),
    ],
)
def test_images_are_those_of_the_products(
    both: Both, architecture: str, said: str, dtype: Any
) -> None:
    """Byte for byte as vLLM's emulation makes them, and of the size that is known before the model
    is built."""
    name = SERVED[architecture]
    paths = both(name, SAID[said])
    models = [Model(name=name, path=path, dtype=dtype, max_context=CONTEXT) for path in paths]
    known, other = (least(read_model(model, DEVICES), CONTEXT, DEVICES) for model in models)
    houses = make_house(), make_house()

    engine, _ = (
        house.build(name, path, dtype=dtype) for house, path in zip(houses, paths, strict=True)
    )

    assert image(houses[0], name) == image(houses[1], name)
    assert known == other
    assert known.weights <= engine.weight_slabs <= known.weights + 1


@pytest.mark.parametrize(("name", "said"), [(QWEN, "modelopt"), (LLAMA, "compressed")])
def test_outputs_equal_plain_vllm_with_the_products(
    both: Both, plain_experts: PlainAnswers, name: str, said: str
) -> None:
    """With weights reloaded and KV swapped between every three tokens."""
    stored, products = both(name, SAID[said])
    house = make_house()
    house.build(name, stored, dtype="float32")

    found = answers(house, name)

    assert found == plain(plain_experts, products, name, "float32")
    assert len(set(found[-1])) > 2, "it says the same token again and again"


def test_products_are_kept(both: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start reads the first one's image; made in small pieces, it has the same bytes."""
    from appliance.engines.vllm.weights import loading

    stored, products = both(QWEN, COMPRESSED)
    with monkeypatch.context() as patched:
        patched.setattr(loading, "PIECE_BYTES", 5000)
        houses = [start(stored, tmp_path / "images", QWEN) for _ in range(2)]

    assert [packed_now(house, QWEN) for house in houses] == [True, False]
    plain = make_house()
    plain.build(QWEN, products, dtype="bfloat16")
    expected = image(plain, QWEN)
    assert [image(house, QWEN) for house in houses] == [expected, expected]


@pytest.mark.parametrize(
    ("name", "said", "why"),
    [
        (LLAMA, "modelopt", "Failed to find a kernel .* NVFP4 linear layer"),
        (LLAMA, "compressed", "Failed to find a kernel .* NVFP4 linear layer"),
        (QWEN, "experts", "No NvFp4 MoE backend"),
    ],
)
def test_vllm_has_no_kernel_for_them_on_cpus(
    both: Both, monkeypatch: pytest.MonkeyPatch, name: str, said: str, why: str
) -> None:
    """What vLLM itself says of such a checkpoint, dense and with experts. Once it has a kernel,
    this fails."""
    monkeypatch.setattr("appliance.checkpoints.quantized.quantization.forget", lambda config: None)
    stored, _ = both(name, SAID[said])

    with pytest.raises((NotImplementedError, ValueError), match=why):
        make_house().build(name, stored, dtype="bfloat16")


def test_every_byte_with_every_factor() -> None:
    """Exactly the value times the factor, where the factor of all is a power of two."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    values = torch.cat([values, -values])
    byte = torch.arange(256)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], 1).flatten()

    for bits in range(256):
        factor = torch.tensor([bits], dtype=torch.uint8)
        found = multiply(byte.to(torch.uint8), factor.repeat(32), torch.tensor(0.25)).double()

        exact = pairs * factor.view(torch.float8_e4m3fn).double() * 0.25
        assert torch.equal(found.nan_to_num(7.0), exact.nan_to_num(7.0))
        assert bool(found.isnan().any()) == (bits in (127, 255))


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize(("first", "count"), [(0, 160), (3, 1), (15, 2), (32, 16), (20, 140)])
def test_any_part_of_a_weight(first: int, count: int, divides: bool) -> None:
    """Images are made piece by piece, and pieces begin anywhere in a block."""
    dice = torch.Generator().manual_seed(0)
    pairs = torch.randint(0, 256, (80,), generator=dice, dtype=torch.uint8)
    factors = torch.randint(0, 120, (10,), generator=dice, dtype=torch.uint8)
    scale = torch.tensor([0.3])
    nothing = torch.zeros(8, dtype=torch.uint8)
    files = [torch.cat([nothing, one.view(torch.uint8)]) for one in (pairs, factors, scale)]
    origin = Nvfp4Origin("w", (0, 8), (1, 8), (2, 8), divides)
    reads = []

    def read(use: str, file: int, offset: int, nbytes: int) -> torch.Tensor:
        reads.append(nbytes)
        return files[file][offset : offset + nbytes]

    found = origin.numbers(first, count, read)

    whole = multiply(pairs, factors, 1.0 / scale if divides else scale)
    assert torch.equal(found, whole[first : first + count])
    assert sum(reads) <= 9 * (count // 16 + 2) + 4


def test_weights_that_are_no_numbers(both: Both) -> None:
    """The load says which tensor has them."""
    stored, _ = both(LLAMA, MODELOPT)
    file = Path(stored) / "model.safetensors"
    tensors = load_file(file)
    name = sorted(name for name in tensors if name.endswith("down_proj.weight_scale"))[0]
    tensors[name].view(torch.uint8)[0, 0] = 127
    save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match=f"{name.removesuffix('_scale')} has a weight"):
        make_house().build(LLAMA, stored, dtype="bfloat16")


def test_all_that_is_said_to_be_tried_is() -> None:
    assert set(SERVED) == NVFP4_TRIED
