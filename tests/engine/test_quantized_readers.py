"""Checkpoints that read images, of which the language model is quantized: the tokens of plain vLLM,
with images and without."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from appliance.checkpoints.language_models import (
    MEDIA,
    language_layer,
    served_architecture,
)
from appliance.checkpoints.model_config import ModelConfig, read_model_config
from appliance.checkpoints.overrides import language_config
from appliance.checkpoints.quantized.quantization import TRIED
from appliance.config.schema import Model
from appliance.config.sizing import least, read_model
from tests.configs import CONFIGS
from tests.engine.conftest import plain_process
from tests.engine.house import House, PlainAnswers, make_house
from tests.engine.media_requests import DEVICES, GREEDY, POOL, SLABS, Requests
from tests.engine.player import Player, prompts
from tests.engine.quantizing import (
    awq_config,
    float_quantized_config,
    gptq_config,
    quantize,
    skip_uncomputed,
    to_floats,
    w4a16_config,
    w8a8_config,
)
from tests.engine.shrunken import make_shrunken
from tests.engine.test_image_prompts import CONTEXT, MOST, WHOLE, asked
from tests.engine.test_language_models import ALONE
from tests.engine.test_language_models import NAMES as EVERY
from tests.engine.test_quantized import label, quantized
from tests.engine.with_images import (
    GEMMA3,
    NAMES,
    PLAIN,
    QWEN2,
    QWEN2_5,
    QWEN3,
    ImagePrompt,
    Preparer,
    make_with_images,
)

DTYPE: Final = "bfloat16"
LEFT_OUT: Final = ["lm_head", "re:.*visual.*", "re:.*vision_tower.*", "re:.*multi_modal_.*"]
METHODS: Final = [
    gptq_config(32),
    awq_config(32),
    {**w4a16_config(32, symmetric=False), "ignore": LEFT_OUT},
    {**w8a8_config(), "ignore": LEFT_OUT},
]


MANY: Final = {QWEN2: 2, QWEN2_5: 2, QWEN3: 4, GEMMA3: 2}
"""Methods of a model, if there are several: others differ in what is not quantized."""


def language(config: dict[str, Any]) -> str:
    """The architecture of the language model."""
    return served_architecture(ModelConfig(Path(), config, config.get("text_config", config)))


CASES: Final = [
    pytest.param(name, METHODS[(n + m) % 4], id=f"{name}-{label(METHODS[(n + m) % 4])}")
    for n, name in enumerate(name for name in NAMES if language(CONFIGS[name]) in TRIED)
    for m in range(MANY.get(name, 1))
]
"""Each model that reads images with one or more of the methods, in turn."""
TEXT: Final = [
    pytest.param(name, METHODS[n % 4], id=f"{name}-{label(METHODS[n % 4])}")
    for n, name in enumerate(
        name for name in EVERY if name not in NAMES and language(CONFIGS[name]) in TRIED
    )
    if not MEDIA[CONFIGS[name]["architectures"][0]].adapted
]
"""Others, but for Phi-4-multimodal, which is refused if its weights are quantized."""


@pytest.fixture(scope="module")
def plain() -> Iterator[PlainAnswers]:
    with plain_process(PLAIN) as answers:
        yield answers


def sequences(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["sequences"][0] for answer in answers]


def answers_to_images(name: str, path: str, first: House, second: House) -> list[list[int]]:
    """What the whole model says, with weights loaded under steps with images, KV swapped between
    every three tokens, and all lost once. It takes the memory that is known before."""
    model = Model(name=name, path=path, dtype=DTYPE, max_context=CONTEXT, images=MOST)
    known = least(read_model(model, DEVICES), CONTEXT, DEVICES)
    for house in (first, second):
        engine = house.build(name, path, dtype=DTYPE, prompt_images=MOST)
    assert known.weights <= engine.weight_slabs <= known.weights + 1
    preparer = Preparer(path, MOST, DTYPE)
    requests = Requests(first, name, [preparer.prepare(*prompt) for prompt in asked(name)])
    requests.turn(again=False)
    requests.turn(again=True)
    requests.move(second)
    requests.turn(again=False)
    while requests.live:
        requests.turn(again=True)
    return list(requests.outputs.values())


def text_answers(name: str, path: str) -> list[list[int]]:
    """What the language model alone says, with weights reloaded and KV swapped between every three
    tokens. It takes the memory that is known before."""
    model = Model(name=name, path=path, dtype=DTYPE, max_context=CONTEXT)
    known = least(read_model(model, DEVICES), CONTEXT, DEVICES)
    house = make_house()
    engine = house.build(name, path, dtype=DTYPE)
    assert known.weights <= engine.weight_slabs <= known.weights + 1
    player = Player(house, name, GREEDY)
    while player.live:
        player.turn(3, SLABS)
    engine.retire()
    return list(player.outputs.values())


def plain_text(plain: PlainAnswers, path: str) -> list[list[int]]:
    """What plain vLLM says. It is given a checkpoint of the language model alone of those whose
    whole model it does not read, and of Qwen's, which rotate by three positions, which rounds
    otherwise in bfloat16."""
    options: dict[str, Any] = {"skip_tokenizer_init": True, "language_model_only": True}
    config = json.loads((Path(path) / "config.json").read_text())
    if "vl" in config["model_type"].split("_") or Path(path).name in ALONE:
        path, options = as_text(Path(path)), {"skip_tokenizer_init": True}
    asked = [ImagePrompt(prompt) for prompt in prompts(Path(path).name)]
    return sequences(plain(path, DTYPE, asked, [GREEDY] * len(asked), **options))


def as_text(path: Path) -> str:
    """A checkpoint of the language model in another one."""
    import transformers
    from safetensors.torch import load_file, save_file

    folder = path.parent / "text" / path.name
    folder.mkdir(parents=True)
    whole = transformers.AutoConfig.from_pretrained(path)
    (architecture,) = whole.architectures
    config = language_config(whole).to_dict()
    config["model_type"] = served_architecture(read_model_config(path)).split("For")[0].lower()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        language_layer(name, architecture): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
        if not MEDIA[architecture].towers & set(name.split("."))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(("name", "config"), CASES)
def test_outputs_equal_plain_vllm(
    tmp_path: Path, plain: PlainAnswers, name: str, config: dict[str, Any]
) -> None:
    skip_uncomputed(config)
    path = make_with_images(tmp_path, name)
    quantize(path, config, DTYPE)
    house = make_house(POOL)

    found = answers_to_images(name, path, house, make_house(POOL))

    assert quantized(house.engines[name])
    images = asked(name)
    assert found == sequences(plain(path, DTYPE, images, [GREEDY] * len(images), **WHOLE))
    assert text_answers(name, path) == plain_text(plain, path)


@pytest.mark.parametrize(
    ("name", "block", "config"),
    [(QWEN3, (48, 32), None), (QWEN2_5, None, float_quantized_config("channel"))],
)
def test_floats_of_8_bits_are_multiplied(
    tmp_path: Path,
    plain: PlainAnswers,
    name: str,
    block: tuple[int, int] | None,
    config: dict[str, Any] | None,
) -> None:
    """Answers are those of plain vLLM with a checkpoint that has the products."""
    path = make_with_images(tmp_path, name)
    products = str(shutil.copytree(path, tmp_path / "products" / name))
    to_floats(path, products, block, config)

    found = answers_to_images(name, path, make_house(POOL), make_house(POOL))

    images = asked(name)
    assert found == sequences(plain(products, DTYPE, images, [GREEDY] * len(images), **WHOLE))
    assert text_answers(name, path) == plain_text(plain, products)


@pytest.mark.parametrize(("name", "config"), TEXT)
def test_text_of_others_equals_plain_vllm(
    tmp_path: Path, plain: PlainAnswers, name: str, config: dict[str, Any]
) -> None:
    """Of those whose images are not served."""
    skip_uncomputed(config)
    path = make_shrunken(tmp_path, name, CONFIGS[name])
    quantize(path, config, DTYPE)
    assert text_answers(name, path) == plain_text(plain, path)
