"""Weights in floats of 8 bits: the model is that of a checkpoint which has the products."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.checkpoints.families import base_architecture
from appliance.checkpoints.quantized.quantization import FLOATS_TRIED
from appliance.config.schema import Model
from appliance.config.sizing import least, read_model
from appliance.engines.vllm.weights.multiplied import FactorsOrigin
from tests.configs import CONFIGS
from tests.engine.house import PlainAnswers, make_house
from tests.engine.quantizing import float_quantized_config, to_floats
from tests.engine.test_families import FAMILIES
from tests.engine.test_quantized import (
    CONTEXT,
    DEVICES,
    answers,
    image,
    packed_now,
    plain,
    start,
)

SERVED = {
    architecture: name
    for name in FAMILIES
    if (architecture := base_architecture(CONFIGS[name]["architectures"][0])) in FLOATS_TRIED
}
LLAMA = SERVED["LlamaForCausalLM"]
BLOCK = (48, 32)
"""No divisor of all sizes: the last blocks are cut off."""


@pytest.fixture(scope="module")
def plain_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small checkpoints that are not quantized."""
    folder = tmp_path_factory.mktemp("plain")
    command = [sys.executable, "-m", "tests.engine.quantizing", str(folder)]
    subprocess.run([*command, *SERVED.values()], check=True, capture_output=True)
    return folder


def both(
    folder: Path,
    plain_checkpoints: Path,
    name: str,
    block: tuple[int, int] | None,
    config: dict[str, Any] | None = None,
) -> tuple[str, str]:
    """A checkpoint of floats of 8 bits, and one of their products."""
    paths = [str(shutil.copytree(plain_checkpoints / name, folder / own / name)) for own in "ab"]
    to_floats(paths[0], paths[1], block, config)
    return paths[0], paths[1]


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *((architecture, "bfloat16") for architecture in sorted(FLOATS_TRIED)),
        ("LlamaForCausalLM", "float16"),
        ("LlamaForCausalLM", "float32"),
    ],
)
def test_images_are_those_of_the_products(
    tmp_path: Path, plain_checkpoints: Path, architecture: str, dtype: Any
) -> None:
    """Byte for byte, and of the size that is known before the model is built."""
    name = SERVED[architecture]
    paths = both(tmp_path, plain_checkpoints, name, BLOCK)
    models = [Model(name=name, path=path, dtype=dtype, max_context=CONTEXT) for path in paths]
    known, other = (least(read_model(model, DEVICES), CONTEXT, DEVICES) for model in models)
    houses = make_house(), make_house()

    engine, _ = (
        house.build(name, path, dtype=dtype) for house, path in zip(houses, paths, strict=True)
    )

    assert image(houses[0], name) == image(houses[1], name)
    assert known == other
    assert known.weights <= engine.weight_slabs <= known.weights + 1


@pytest.mark.parametrize(
    ("block", "config"),
    [
        (BLOCK, None),
        (None, None),
        (None, float_quantized_config("channel")),
        (BLOCK, float_quantized_config("block", block_structure=list(BLOCK))),
    ],
    ids=["block", "matrix", "compressed-row", "compressed-block"],
)
def test_outputs_equal_plain_vllm_with_the_products(
    tmp_path: Path,
    plain_checkpoints: Path,
    plain_answers: PlainAnswers,
    block: tuple[int, int] | None,
    config: dict[str, Any] | None,
) -> None:
    """With weights reloaded and KV swapped between every three tokens."""
    stored, multiplied = both(tmp_path, plain_checkpoints, LLAMA, block, config)
    house = make_house()
    house.build(LLAMA, stored, dtype="bfloat16")

    found = answers(house, LLAMA)

    assert found == plain(plain_answers, multiplied, LLAMA, "bfloat16")


@pytest.mark.parametrize(("first", "count"), [(0, 70), (3, 1), (9, 11), (13, 50), (69, 1)])
def test_any_part_of_a_weight(first: int, count: int) -> None:
    """Images are made piece by piece, and pieces begin anywhere in a row."""
    weight = torch.randn(7, 10, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    factors = torch.arange(1.0, 10.0)
    origin = FactorsOrigin(0, 0, "F32", (3, 3), (3, 4), 1000, 10)
    spread = factors.view(3, 3).repeat_interleave(3, 0).repeat_interleave(4, 1)[:7, :10]
    expected = (weight.float() * spread).flatten()[first : first + count]

    part = weight.flatten()[first : first + count]
    needed = slice(*origin.needed(1000 + first, count))

    assert torch.equal(origin.multiply(part, 1000 + first, factors[needed]), expected)
    assert needed.stop - needed.start <= 3 * (count // 30 + 2)


def test_products_are_kept_where_nothing_is_packed(
    tmp_path: Path, plain_checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second start reads the first one's. In pieces of one row or a few, of which each reads
    the factors of its own blocks, they have the bytes of a checkpoint that has the products."""
    from appliance.engines.vllm.weights import loading

    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(loading, "PIECE_BYTES", 4096)
    stored, multiplied = both(tmp_path, plain_checkpoints, LLAMA, BLOCK)

    houses = [start(stored, tmp_path / "images") for _ in range(2)]

    assert [packed_now(house) for house in houses] == [True, False]
    products = make_house()
    products.build(LLAMA, multiplied, dtype="bfloat16")
    expected = image(products, LLAMA)
    assert [image(house, LLAMA) for house in houses] == [expected, expected]


def test_digests_tell_factors_apart_and_stay_without() -> None:
    """Kept images are known by what recipes are written as: by another version of the arithmetic,
    too, and as before where there are no factors."""
    from appliance.engines.vllm.weights.recipe import Origin

    factors = FactorsOrigin(0, 0, "F32", (3, 3), (3, 4), 1000, 10)
    plain = Origin(1, 2, torch.float32)
    others = [plain._replace(factors=factors), plain._replace(factors=factors._replace(version=0))]

    assert repr(plain) == "Origin(file=1, offset=2, dtype=torch.float32, decays=False)"
    assert len({repr(origin) for origin in (plain, *others)}) == 3
