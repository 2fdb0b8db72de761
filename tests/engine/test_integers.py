"""Models with experts in integers of 4 bits or in W8A8, and models in 8 bits of GPTQ: each is that
of a checkpoint with the products."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from appliance.checkpoints.families import base_architecture
from appliance.checkpoints.quantized.quantization import EIGHT_BITS_TRIED, EXPERTS_TRIED
from appliance.config.schema import Model
from appliance.config.sizing import least, read_model
from appliance.engines.vllm.weights.integers import IntegersOrigin, Place
from appliance.errors import CheckpointError
from tests.configs import CONFIGS
from tests.engine.house import PlainAnswers, make_house
from tests.engine.quantizing import (
    awq_config,
    gptq_config,
    make_plain,
    multiply,
    quantize,
    w4a16_config,
    w8a8_config,
)
from tests.engine.test_families import FAMILIES
from tests.engine.test_microscaled import plain_experts
from tests.engine.test_quantized import (
    CONTEXT,
    DEVICES,
    answers,
    image,
    label,
    packed_now,
    plain,
    start,
)

__all__ = ["plain_experts"]

SERVED = {
    architecture: name
    for name in FAMILIES
    if (architecture := base_architecture(CONFIGS[name]["architectures"][0]))
    in EXPERTS_TRIED | EIGHT_BITS_TRIED
}
MIXTRAL = "MixtralForCausalLM"
ROUTERS = {"ignore": ["lm_head", "re:.*gate$"]}
"""They are not quantized."""
METHODS = [
    gptq_config(32),
    awq_config(32),
    w4a16_config(32) | ROUTERS,
    w4a16_config(32, symmetric=False) | ROUTERS,
    gptq_config(-1),
]
W8A8 = w8a8_config() | ROUTERS
EIGHT = gptq_config(32, bits=8)
CASES = [
    *((MIXTRAL, config) for config in METHODS),
    *((architecture, W8A8) for architecture in sorted(EXPERTS_TRIED)),
    *(
        (architecture, METHODS[n % 3])
        for n, architecture in enumerate(sorted(EXPERTS_TRIED - {MIXTRAL}))
    ),
    *((architecture, EIGHT) for architecture in sorted(EIGHT_BITS_TRIED)),
]
"""One with each method, and the others with one in turn, and all with W8A8."""

Both = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def plain_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small checkpoints that are not quantized."""
    folder = tmp_path_factory.mktemp("plain")
    make_plain(folder, SERVED.values())
    return folder


@pytest.fixture
def both(tmp_path: Path, plain_checkpoints: Path) -> Both:
    """Makes a quantized checkpoint, and one of its products."""

    def both(name: str, config: dict[str, Any]) -> tuple[str, str]:
        stored, products = (
            str(shutil.copytree(plain_checkpoints / name, tmp_path / own / name)) for own in "ab"
        )
        quantize(stored, config, "float16")
        multiply(stored, products)
        return stored, products

    return both


@pytest.mark.parametrize(
    ("architecture", "config"), [pytest.param(a, c, id=f"{a}-{label(c)}") for a, c in CASES]
)
def test_images_are_those_of_the_products(
    both: Both, architecture: str, config: dict[str, Any]
) -> None:
    """Byte for byte, and of the size that is known before the model is built."""
    name = SERVED[architecture]
    paths = both(name, config)
    models = [Model(name=name, path=p, dtype="bfloat16", max_context=CONTEXT) for p in paths]
    known = least(read_model(models[0], DEVICES), CONTEXT, DEVICES)
    houses = make_house(), make_house()

    engine, _ = (
        house.build(name, path, dtype="bfloat16") for house, path in zip(houses, paths, strict=True)
    )

    assert image(houses[0], name) == image(houses[1], name)
    assert known.weights <= engine.weight_slabs <= known.weights + 1
    engine.retire()


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        pytest.param(a, c, id=f"{a}-{label(c)}")
        for a, c in [
            *((MIXTRAL, config) for config in [*METHODS[:3], W8A8]),
            ("Qwen3MoeForCausalLM", W8A8),
            ("Qwen2ForCausalLM", EIGHT),
        ]
    ],
)
def test_outputs_equal_plain_vllm_with_the_products(
    both: Both, plain_experts: PlainAnswers, architecture: str, config: dict[str, Any]
) -> None:
    """With weights reloaded and KV swapped between every three tokens."""
    name = SERVED[architecture]
    stored, products = both(name, config)
    house = make_house()
    house.build(name, stored, dtype="float32")

    found = answers(house, name)

    assert found == plain(plain_experts, products, name, "float32")
    assert len(set(found[-1])) > 2, "it says the same token again and again"


@pytest.mark.parametrize(
    ("architecture", "config", "why"),
    [
        (MIXTRAL, METHODS[0], "No WNA16 MoE backend"),
        (MIXTRAL, W8A8, "No Int8 MoE backend"),
        ("LlamaForCausalLM", EIGHT, "does not support weight_bits = uint8b128"),
    ],
)
def test_vllm_has_no_kernel_for_them_here(
    both: Both,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    config: dict[str, Any],
    why: str,
) -> None:
    """What vLLM itself says of such a checkpoint on a CPU; of experts, on one without AMX."""
    if architecture == MIXTRAL and torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has AMX")
    monkeypatch.setattr("appliance.checkpoints.quantized.quantization.forget", lambda config: None)
    name = SERVED[architecture]
    stored, _ = both(name, config)

    with pytest.raises((NotImplementedError, ValueError), match=why):
        make_house().build(name, stored, dtype="bfloat16")


def test_small_pieces(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which each is a few outputs of a layer, they have the same bytes."""
    from appliance.engines.vllm.weights import loading

    name = SERVED[MIXTRAL]
    for config in [*METHODS[1:4:2], W8A8]:
        stored, products = both(name, config)
        houses = make_house(), make_house()
        houses[0].build(name, products, dtype="bfloat16")
        with monkeypatch.context() as patched:
            patched.setattr(loading, "PIECE_BYTES", 4096)
            houses[1].build(name, stored, dtype="bfloat16")

        assert image(houses[0], name) == image(houses[1], name)
        shutil.rmtree(Path(stored).parent)
        shutil.rmtree(Path(products).parent)


def test_products_are_kept(both: Both, tmp_path: Path) -> None:
    """The second start reads the first one's image."""
    name = SERVED[MIXTRAL]
    stored, products = both(name, W8A8)

    houses = [start(stored, tmp_path / "images", name) for _ in range(2)]

    assert [packed_now(house, name) for house in houses] == [True, False]
    plain = make_house()
    plain.build(name, products, dtype="bfloat16")
    expected = image(plain, name)
    assert [image(house, name) for house in houses] == [expected, expected]


@pytest.mark.parametrize(
    "method", ["gptq", "gptq 8", "awq", "compressed-tensors", "compressed-tensors 8"]
)
@pytest.mark.parametrize(("first", "count"), [(0, 1024), (3, 1), (31, 2), (64, 32), (300, 700)])
def test_any_part_of_a_weight(method: str, first: int, count: int) -> None:
    """Pieces begin anywhere in a row, and in a word."""
    dice = torch.Generator().manual_seed(0)
    rows, columns, groups = 16, 64, 2
    layouts: dict[str, list[tuple[int, int] | None]] = {
        "gptq": [(columns // 8, rows), (groups, rows), None],
        "gptq 8": [(columns // 4, rows), (groups, rows), None],
        "awq": [(columns, rows // 8), (groups, rows), (groups, rows // 8)],
        "compressed-tensors": [(rows, columns // 8), (rows, groups), (rows // 8, groups)],
        "compressed-tensors 8": [(rows, columns), (rows, 1), None],
    }
    shapes = layouts[method]
    method, _, eight = method.partition(" ")
    single = bool(eight) and method != "gptq"
    kinds = (torch.int8 if single else torch.int32, torch.float16, torch.int32)
    files = [
        torch.randint(-(2**31), 2**31, shape or (0,), generator=dice).to(kind)
        if kind is not torch.float16
        else torch.rand(shape or (0,), generator=dice).to(kind)
        for shape, kind in zip(shapes, kinds, strict=True)
    ]
    places = [
        shape and Place(n, 0, tensor.nbytes, shape, tensor.dtype)
        for n, (shape, tensor) in enumerate(zip(shapes, files, strict=True))
    ]
    words, scales, zeros = places
    assert words
    assert scales
    each = {"": 8, "8": 1 if single else 4}[eight]
    origin = IntegersOrigin("a", method, (rows, columns), words, scales, zeros, each)

    def read(use: str, file: int, offset: int, nbytes: int) -> torch.Tensor:
        read_bytes.append(nbytes)
        return files[file].flatten().view(torch.uint8)[offset : offset + nbytes]

    read_bytes: list[int] = []
    whole = origin.numbers(0, rows * columns, read)

    read_bytes.clear()
    assert torch.equal(origin.numbers(first, count, read), whole[first : first + count])
    assert len(set(whole.tolist())) > 100
    assert sum(read_bytes) == sum([nbytes for _, _, nbytes in origin.ranges(first, count)])
    if single:
        needed = -(-(first + count) // columns) - first // columns
        assert sum(read_bytes) == needed * (columns + 2)


@pytest.mark.parametrize(("scale", "dtype"), [(6e4, "float16"), (float("nan"), "bfloat16")])
def test_products_that_are_no_numbers(both: Both, scale: float, dtype: Any) -> None:
    """The load says of which tensor they are."""
    stored, _ = both(SERVED[MIXTRAL], METHODS[0])
    (file,) = Path(stored).glob("*.safetensors")
    tensors = load_file(file)
    name = sorted(name for name in tensors if name.endswith(".scales"))[0]
    tensors[name][:] = scale
    tensors[name.replace(".scales", ".qweight")][:] = -1
    save_file(tensors, file, metadata={"format": "pt"})

    layer = name.removesuffix(".scales")
    with pytest.raises(CheckpointError, match=f"{layer}.weight has a weight .* {dtype}"):
        make_house().build(SERVED[MIXTRAL], stored, dtype=dtype)


def test_all_that_is_said_to_be_tried_is() -> None:
    assert set(SERVED) == EXPERTS_TRIED | EIGHT_BITS_TRIED
