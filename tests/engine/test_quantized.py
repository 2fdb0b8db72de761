"""Quantized weights: the tokens of plain vLLM, and images that can be shared and kept."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.checkpoints.families import UnsupportedModel, base_architecture, check_family
from appliance.checkpoints.model_config import read_model_config
from appliance.checkpoints.quantized.quantization import TRIED
from appliance.config.schema import Devices, Model
from appliance.config.sizing import least, read_model
from appliance.engines.protocol import Verdict
from appliance.memory.weight_cache.image_writer import ImageWriter
from appliance.memory.weight_cache.images import ImageFolder
from appliance.units import Bytes, Memory
from appliance.vocabulary import Task
from tests.configs import CONFIGS
from tests.engine.house import POOL_SLABS, SLAB, House, PlainAnswers, Sampling, make_house
from tests.engine.player import Player, prompts
from tests.engine.quantizing import (
    awq_config,
    gptq_config,
    make_plain,
    quantize,
    skip_uncomputed,
    w4a16_config,
    w8a8_config,
)
from tests.engine.test_families import FAMILIES
from tests.engine.test_pooling import BASELINE, pool

Make = Callable[..., str]

CONTEXT = 1024
SLABS = 48
GREEDY = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
DEVICES = Devices(kind="cpu", memory_bytes=Memory(POOL_SLABS * SLAB), slab_bytes=Bytes(SLAB))

SERVED = {
    architecture: name
    for name in FAMILIES
    if (architecture := base_architecture(CONFIGS[name]["architectures"][0])) in TRIED
}
LLAMA = SERVED["LlamaForCausalLM"]
METHODS = [gptq_config(32), awq_config(32), w4a16_config(32, symmetric=False), w8a8_config()]
WORDS = (".qweight", ".weight_packed", ".weight")
CONVERTED = METHODS[:-1]
"""Those whose layers are converted as they are read; the others are read as they are."""
CASES = [
    (architecture, config)
    for n, architecture in enumerate(sorted(TRIED))
    for config in (CONVERTED[n % len(CONVERTED)], METHODS[-1])
]
"""Each architecture with one of the methods that share a kernel, in turn, and with 8 bits."""


def label(config: dict[str, Any]) -> str:
    if "config_groups" not in config:
        bits = "" if config["bits"] == 4 else f"{config['bits']}-"
        return f"{config['quant_method']}-{bits}{config['group_size']}"
    (group,) = config["config_groups"].values()
    weights = group["weights"]
    zeros = "" if weights["symmetric"] else "-zeros"
    return f"w{weights['num_bits']}-{weights.get('group_size')}{zeros}"


@pytest.fixture(scope="module")
def plain_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small checkpoints that are not quantized."""
    folder = tmp_path_factory.mktemp("plain")
    make_plain(folder, SERVED.values())
    return folder


@pytest.fixture
def make(tmp_path: Path, plain_checkpoints: Path) -> Make:
    """Makes a quantized checkpoint; its path. The test is skipped if plain vLLM does not compute
    with it on this CPU, and the test does."""

    def make(
        name: str, config: dict[str, Any], dtype: str = "bfloat16", *, computed: bool = True
    ) -> str:
        if computed:
            skip_uncomputed(config)
        path = str(shutil.copytree(plain_checkpoints / name, tmp_path / label(config) / name))
        quantize(path, config, dtype)
        return path

    return make


def answers(house: House, model: str) -> list[list[int]]:
    """With weights reloaded and KV swapped between every three tokens."""
    player = Player(house, model, GREEDY)
    while player.live:
        player.turn(3, SLABS)
    return list(player.outputs.values())


def plain(answer: PlainAnswers, path: str, model: str, dtype: str) -> list[list[int]]:
    asked = prompts(model)
    found = answer(path, dtype, asked, [GREEDY] * len(asked))
    return [one["sequences"][0] for one in found]


def serve_as_plain(answer: PlainAnswers, path: str, dtype: str) -> Any:
    """The engine of a Llama that answers as plain vLLM does."""
    house = make_house()
    engine = house.build(LLAMA, path, dtype=dtype)
    assert answers(house, LLAMA) == plain(answer, path, LLAMA, dtype)
    return engine


def image(house: House, model: str) -> list[tuple[str, bytes]]:
    """The bytes of each tensor of the master image, by name."""
    weights = house.engines[model]._placed.weights
    layout = weights.layout
    return [
        (tensor.name, b"".join(map(bytes, weights.master.views(offset, tensor.nbytes))))
        for tensor, offset in zip(layout.tensors, layout.offsets, strict=True)
    ]


def quantized(engine: Any) -> dict[str, int]:
    """Offsets of the tensors of quantized layers, by name: those that vLLM's kernel for 4-bit
    weights computes, and those of 8 bits."""
    layout = engine._placed.weights.layout
    return {
        tensor.name: offset
        for tensor, offset in zip(layout.tensors, layout.offsets, strict=True)
        if "CPUWNA16LinearKernel" in tensor.packing or tensor.dtype == "torch.int8"
    }


@pytest.mark.parametrize(
    ("architecture", "config"), [pytest.param(a, c, id=f"{a}-{label(c)}") for a, c in CASES]
)
def test_outputs_equal_plain_vllm(
    make: Make, plain_answers: PlainAnswers, architecture: str, config: dict[str, Any]
) -> None:
    """And a model takes the memory that is known before it is built."""
    name = SERVED[architecture]
    path = make(name, config)
    model = Model(name=name, path=path, dtype="bfloat16", max_context=CONTEXT)
    known = least(read_model(model, DEVICES), CONTEXT, DEVICES)
    house = make_house()

    engine = house.build(name, path, dtype="bfloat16")

    assert quantized(engine)
    assert known.kv == engine.kv.slabs(engine.kv.prompt_blocks(CONTEXT))
    assert known.weights <= engine.weight_slabs <= known.weights + 1
    found = answers(house, name)
    assert found == plain(plain_answers, path, name, "bfloat16")
    assert len(set(found[-1])) > 2, "it says the same token again and again"
    engine.retire()


@pytest.mark.parametrize(
    "config",
    [
        gptq_config(128),
        gptq_config(-1, desc_act=True),
        awq_config(128),
        awq_config(-1),
        w4a16_config(128, actorder="static"),
        w4a16_config(64, actorder="weight"),
        w4a16_config(-1),
        w8a8_config(),
    ],
    ids=label,
)
def test_groups_of_other_sizes(
    make: Make, plain_answers: PlainAnswers, config: dict[str, Any]
) -> None:
    """In float16. The linear layers take about a quarter of their bytes, or half of them."""
    engine = serve_as_plain(plain_answers, make(LLAMA, config, "float16"), "float16")

    sizes = {tensor.name: tensor.nbytes for tensor in engine._placed.weights.layout.tensors}
    linear = sum(sizes[name] for name in quantized(engine))
    words = sum(sizes[name] for name in quantized(engine) if name.endswith(WORDS))
    assert words <= linear <= 1.1 * words, f"{linear} bytes for {2 * words} weights"


@pytest.mark.parametrize("config", METHODS, ids=label)
def test_stored_in_one_type_and_computed_in_another(
    make: Make, plain_answers: PlainAnswers, config: dict[str, Any]
) -> None:
    """As most published files are: scales in float16."""
    engine = serve_as_plain(plain_answers, make(LLAMA, config, "float16"), "bfloat16")

    assert quantized(engine)


@pytest.mark.parametrize(
    "config",
    [
        gptq_config(32, dynamic={"-:.*down_proj": {}}),
        awq_config(32, modules_to_not_convert=["down_proj"]),
        {**w4a16_config(32), "ignore": ["lm_head", "re:.*down_proj$"]},
        {
            **w8a8_config(),
            "ignore": ["lm_head", *(f"model.layers.{n}.mlp.down_proj" for n in range(8))],
        },
    ],
    ids=label,
)
def test_some_layers_are_not_quantized(
    make: Make, plain_answers: PlainAnswers, config: dict[str, Any]
) -> None:
    """As the checkpoint says; these are packed like those of other models."""
    engine = serve_as_plain(plain_answers, make(LLAMA, config), "bfloat16")

    assert quantized(engine)
    assert not any("down_proj" in name for name in quantized(engine))


@pytest.mark.parametrize("config", CONVERTED, ids=label)
def test_slices_give_the_bytes_of_whole_layers(
    make: Make, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    """The layers of these checkpoints are so small that they are converted as a whole, unless a
    slice is smaller still."""
    from appliance.engines.vllm.weights import quantized as conversion

    path = make(LLAMA, config, computed=False)
    whole, sliced = make_house(), make_house()
    whole.build(LLAMA, path, dtype="bfloat16")
    processed = conversion._processed
    rounds: list[int] = []

    def counted(*arguments: Any) -> Any:
        rounds.append(1)
        return processed(*arguments)

    monkeypatch.setattr(conversion, "SLICE_BYTES", 4096)
    engine = sliced.build(LLAMA, path, dtype="bfloat16", image=whole.images[LLAMA])
    monkeypatch.setattr(conversion, "_processed", counted)
    engine.store_weights(sliced.images[LLAMA], fill=True)

    layers = {name.rpartition(".")[0] for name in quantized(engine)}
    assert len(rounds) > 3 * len(layers)
    assert image(sliced, LLAMA) == image(whole, LLAMA)


def start(path: str, folder: Path, name: str = LLAMA) -> House:
    """An engine as one start of the appliance has it, with its images in the folder."""
    from appliance.engines.vllm.engine import VllmEngine

    house = make_house()
    writer = ImageWriter(house.host)
    folder.mkdir(exist_ok=True)
    engine: Any = VllmEngine.build(
        name,
        path,
        dtype="bfloat16",
        max_context=CONTEXT,
        max_batch=16,
        arena=house.arena,
        host=house.host,
        swapper=house.swapper,
        images=ImageFolder(folder, 0, writer),
        verify=True,
    )
    house.engines[name] = engine
    house.images[name] = house.places(engine.host_slabs, SLAB)
    engine.store_weights(house.images[name], fill=True)
    writer.join()
    return house


def packed_now(house: House, name: str = LLAMA) -> bool:
    """Whether the image was made of the checkpoint, and not read as it was kept."""
    packed: bool = house.engines[name]._placed.kept.packed
    return packed


@pytest.mark.parametrize("config", METHODS, ids=label)
def test_an_image_is_kept(
    make: Make, tmp_path: Path, plain_answers: PlainAnswers, config: dict[str, Any]
) -> None:
    """The second start reads it; it has the bytes of the first one, and the right tokens."""
    path = make(LLAMA, config)
    images, packed = [], []
    for _ in range(2):
        house = start(path, tmp_path / "images")
        packed.append(packed_now(house))
        images.append(image(house, LLAMA))
        assert answers(house, LLAMA) == plain(plain_answers, path, LLAMA, "bfloat16")
        house.host.close()

    assert packed == [True, False]
    assert images[0] == images[1]


@pytest.mark.parametrize("config", METHODS, ids=label)
def test_two_instances_share_an_image(
    make: Make, plain_answers: PlainAnswers, config: dict[str, Any]
) -> None:
    path = make(LLAMA, config)
    one, other = make_house(), make_house()
    other.host = one.host
    first = one.build(LLAMA, path, dtype="bfloat16")
    other._next = 64 << 20

    second = other.build(LLAMA, path, dtype="bfloat16", image=one.images[LLAMA])

    assert second.layout_digest == first.layout_digest
    expected = plain(plain_answers, path, LLAMA, "bfloat16")
    assert answers(other, LLAMA) == answers(one, LLAMA) == expected


@pytest.mark.parametrize("config", METHODS, ids=label)
def test_without_an_image_they_are_converted_at_every_load(
    make: Make, plain_answers: PlainAnswers, config: dict[str, Any]
) -> None:
    path = make(LLAMA, config)
    house = make_house()
    house.build(LLAMA, path, dtype="bfloat16").store_weights((), fill=False)

    assert answers(house, LLAMA) == plain(plain_answers, path, LLAMA, "bfloat16")


def test_vectors_are_those_of_plain_vllm(make: Make) -> None:
    """A model that generates may embed, too; its vectors have length 1."""
    name = SERVED["Qwen3ForCausalLM"]
    paths = {label(config): make(name, config) for config in METHODS}
    pooler: dict[str, Any] = {}
    jobs = [(own, path, prompts(name), "embed", False, pooler) for own, path in paths.items()]
    told = subprocess.run(
        [sys.executable, "-c", BASELINE.replace("float32", "bfloat16")],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=True,
    )
    expected = json.loads(told.stdout)
    for own, path in paths.items():
        engine = make_house().build(name, path, dtype="bfloat16", task=Task.EMBED)
        engine.begin_load()

        found = [pool(engine, prompt) for prompt in prompts(name)]

        np.testing.assert_allclose(found, expected[own], atol=1e-3, err_msg=own)


def test_converted_bytes_are_verified(make: Make) -> None:
    """One bit of each of a layer's tensors is seen."""
    house = make_house()
    engine = house.build(LLAMA, make(LLAMA, awq_config(32), computed=False), dtype="bfloat16")
    engine.begin_load().wait()
    assert engine.verify() is Verdict.OK

    for offset in list(quantized(engine).values())[:3]:
        slab, start = divmod(offset + 5, SLAB)
        byte = house.host.view(house.images[LLAMA][slab] + start, 1)
        byte[0] ^= 1
        assert engine.verify() is Verdict.DIFFERS
        byte[0] ^= 1
    assert engine.verify() is Verdict.OK


@pytest.mark.parametrize(
    ("stored", "said", "reason"),
    [
        (gptq_config(32), {"sym": False}, "bits=4, sym=False"),
        (gptq_config(32), {"desc_act": True}, "desc_act=True"),
        (gptq_config(16), {}, "group_size = 16"),
        (awq_config(32), {"bits": 8}, "Unsupported num_bits = 8"),
    ],
)
def test_what_is_refused_cannot_be_built(
    make: Make, stored: dict[str, Any], said: dict[str, Any], reason: str
) -> None:
    """vLLM's reason is another one than that of the check."""
    path = make(LLAMA, stored, computed=False)
    settings = Path(path) / "config.json"
    read = json.loads(settings.read_text())
    settings.write_text(json.dumps({**read, "quantization_config": {**stored, **said}}))
    with pytest.raises(UnsupportedModel, match="quantized"):
        check_family(read_model_config(Path(path)))

    with pytest.raises((ValueError, NotImplementedError), match=reason):
        make_house().build(LLAMA, path, dtype="bfloat16")
