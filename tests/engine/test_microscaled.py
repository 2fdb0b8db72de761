"""Weights in MXFP4: the model is that of a checkpoint which has the products."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from appliance.checkpoints.quantized.quantization import MICROSCALED_TRIED
from appliance.config.schema import Model
from appliance.config.sizing import least, read_model
from appliance.engines.vllm.weights.microscaled import MicroscaledOrigin, multiply
from appliance.errors import CheckpointError
from tests.configs import CONFIGS
from tests.engine.conftest import plain_process
from tests.engine.house import PlainAnswers, make_house
from tests.engine.quantizing import to_microscaled
from tests.engine.test_quantized import CONTEXT, DEVICES, answers, image, plain

NAME = "gpt-oss-20b-bf16"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of a float of 4 bits, without its sign."""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A checkpoint in MXFP4, and one of its products."""
    folder = tmp_path_factory.mktemp("microscaled")
    command = [sys.executable, "-m", "tests.engine.quantizing", str(folder / "a"), NAME]
    subprocess.run(command, check=True, capture_output=True)
    paths = str(folder / "a" / NAME), str(folder / "b" / NAME)
    shutil.copytree(*paths)
    to_microscaled(*paths)
    return paths


@pytest.fixture(scope="module")
def plain_experts() -> Iterator[PlainAnswers]:
    """Of a process of its own: vLLM has no model with experts after one without."""
    with plain_process() as told:
        yield told


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_images_are_those_of_the_products(both: tuple[str, str], dtype: Any) -> None:
    """Byte for byte, packed or not, and of the size that is known before the model is built."""
    models = [Model(name=NAME, path=path, dtype=dtype, max_context=CONTEXT) for path in both]
    known, other = (least(read_model(model, DEVICES), CONTEXT, DEVICES) for model in models)
    houses = make_house(), make_house()

    engine, _ = (
        house.build(NAME, path, dtype=dtype) for house, path in zip(houses, both, strict=True)
    )

    assert image(houses[0], NAME) == image(houses[1], NAME)
    assert known == other
    assert known.weights <= engine.weight_slabs <= known.weights + 1


def test_pieces_that_begin_within_a_block(
    both: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the same bytes."""
    from appliance.engines.vllm.weights import loading

    houses = make_house(), make_house()
    houses[0].build(NAME, both[1], dtype="bfloat16")
    monkeypatch.setattr(loading, "PIECE_BYTES", 5000)
    houses[1].build(NAME, both[0], dtype="bfloat16")

    assert image(houses[0], NAME) == image(houses[1], NAME)


def test_outputs_equal_plain_vllm_with_the_products(
    both: tuple[str, str], plain_experts: PlainAnswers
) -> None:
    """With weights reloaded and KV swapped between every three tokens."""
    house = make_house()
    house.build(NAME, both[0], dtype="float32")

    found = answers(house, NAME)

    assert found == plain(plain_experts, both[1], NAME, "float32")
    assert len(set(found[-1])) > 2, "it says the same token again and again"


def test_vllm_has_no_kernel_for_them_here(
    both: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM itself says of such a checkpoint on a CPU without AMX."""
    if torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has AMX")
    monkeypatch.setattr("appliance.checkpoints.quantized.quantization.forget", lambda config: None)

    with pytest.raises(NotImplementedError, match="No MXFP4 MoE backend"):
        make_house().build(NAME, both[0], dtype="bfloat16")


def test_every_byte_with_every_scale() -> None:
    """Exactly the value times the power of two, or not finite: where the power is no number, and
    where the product is too large for bfloat16."""
    byte = np.arange(256)
    values = np.array([*VALUES, *(-value for value in VALUES)])
    pairs = np.stack([values[byte & 15], values[byte >> 4]], 1).flatten()
    blocks = torch.arange(256, dtype=torch.uint8)
    largest = float(torch.finfo(torch.bfloat16).max)

    for scale in range(256):
        found = multiply(blocks, torch.full((16,), scale, dtype=torch.uint8)).double().numpy()

        if scale == 255:
            assert np.isnan(found).all()
            continue
        exact = np.ldexp(pairs, scale - 127)
        fits = np.abs(exact) <= largest
        assert np.array_equal(found[fits], exact[fits])
        assert np.array_equal(np.signbit(found[fits]), np.signbit(exact[fits]))
        assert not np.isfinite(found[~fits]).any()
        assert fits.all() == (scale <= 252)


@pytest.mark.parametrize(("first", "count"), [(0, 320), (3, 1), (31, 2), (64, 32), (40, 280)])
def test_any_part_of_a_tensor(first: int, count: int) -> None:
    """Images are made piece by piece, and pieces begin anywhere in a block."""
    dice = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (160,), generator=dice, dtype=torch.uint8)
    scales = torch.randint(120, 130, (10,), generator=dice, dtype=torch.uint8)
    files = [torch.cat([torch.zeros(7, dtype=torch.uint8), tensor]) for tensor in (blocks, scales)]
    origin = MicroscaledOrigin("w", 0, 7, 1, 7)
    reads = []

    def read(use: str, file: int, offset: int, nbytes: int) -> torch.Tensor:
        reads.append(nbytes)
        return files[file][offset : offset + nbytes]

    found = origin.numbers(first, count, read)

    assert torch.equal(found, multiply(blocks, scales)[first : first + count])
    assert sum(reads) <= 17 * (count // 32 + 2)


@pytest.mark.parametrize("scale", [253, 255])
def test_weights_that_are_no_numbers(both: tuple[str, str], tmp_path: Path, scale: int) -> None:
    """The load says which tensor has them."""
    path = Path(shutil.copytree(both[0], tmp_path / "broken"))
    scales = load_file(path / "a-scales.safetensors")
    name = sorted(scales)[0]
    scales[name][0, 0, 0] = scale
    blocks = load_file(path / "blocks.safetensors")
    blocks[name.replace("scales", "blocks")][0, 0, 0] = 0x77
    save_file(scales, path / "a-scales.safetensors")
    save_file(blocks, path / "blocks.safetensors")

    with pytest.raises(CheckpointError, match=f"{name} has the scale {scale}"):
        make_house().build(NAME, str(path), dtype="bfloat16")


def test_products_that_are_too_large_for_the_type(both: tuple[str, str], tmp_path: Path) -> None:
    """Numbers of bfloat16 that float16 does not have: the load says of which tensor they are."""
    path = Path(shutil.copytree(both[0], tmp_path / "large"))
    scales = load_file(path / "a-scales.safetensors")
    blocks = load_file(path / "blocks.safetensors")
    name = sorted(scales)[0].removesuffix("_scales")
    scales[f"{name}_scales"][0, 0, 0] = 142
    blocks[f"{name}_blocks"][0, 0, 0] = 0x77
    save_file(scales, path / "a-scales.safetensors")
    save_file(blocks, path / "blocks.safetensors")

    make_house().build(NAME, str(path), dtype="bfloat16")
    with pytest.raises(CheckpointError, match=f"{name} has a weight .* float16"):
        make_house().build(NAME, str(path), dtype="float16")


def test_what_is_tried() -> None:
    assert {CONFIGS[NAME]["architectures"][0]} == MICROSCALED_TRIED
