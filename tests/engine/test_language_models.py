"""Checkpoints that read images as well answer prompts of text as plain vLLM's models of them do,
of which the appliance builds the language models alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from appliance.checkpoints.checkpoint import tensor_bytes
from appliance.checkpoints.language_models import MEDIA
from appliance.checkpoints.model_config import read_model_config
from appliance.checkpoints.safetensors import read_header, weight_files
from appliance.config.schema import Devices, Model
from appliance.config.sizing import least, read_model
from appliance.units import Bytes, Memory
from tests.configs import CONFIGS, REFUSED
from tests.engine.conftest import plain_process
from tests.engine.house import POOL_SLABS, SLAB, PlainAnswers, Sampling, make_house
from tests.engine.player import Player, prompts
from tests.engine.shrunken import make_shrunken

CONTEXT, LENGTH, SLABS = 1024, 16, 48
DEVICES = Devices(kind="cpu", memory_bytes=Memory(POOL_SLABS * SLAB), slab_bytes=Bytes(SLAB))
EXPERTS: Final = "mixtral-8x7b-instruct-v0.1"
WITH_IMAGES: Final = "from tests.engine.image_libraries import stand_in; stand_in()\n"

NAMES = sorted(
    name
    for name, config in CONFIGS.items()
    if config["architectures"][0] in MEDIA
    and name not in REFUSED
    and "quantization_config" not in config
)
"""Those that are quantized are served by `test_quantized_readers`."""


ALONE: Final = frozenset({"gemma-3n-e4b-it"})
"""Plain vLLM cannot compute the whole model of these without images, and gives the answers of a
checkpoint of text. `test_rotary` compares such a one with transformers."""

GREEDY = Sampling(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainAnswers]:
    """Of a process whose first model has experts: vLLM has no others in it after one without."""
    path = make_shrunken(tmp_path_factory.mktemp("first"), EXPERTS, CONFIGS[EXPERTS])
    with plain_process(WITH_IMAGES) as answers:
        answers(path, "float32", [(3, 4, 5)], [Sampling(max_tokens=1)])
        yield answers


def texts_of(plain: PlainAnswers, path: str, asked: list[tuple[int, ...]]) -> list[list[int]]:
    """What plain vLLM's whole model says, of which the towers alone are not loaded."""
    options = {"skip_tokenizer_init": True, "language_model_only": True}
    answers = plain(path, "float32", asked, [GREEDY] * len(asked), **options)
    return [answer["sequences"][0] for answer in answers]


@pytest.mark.parametrize("name", NAMES)
def test_outputs_equal_plain_vllm(tmp_path: Path, plain: PlainAnswers, name: str) -> None:
    """Its positions of tokens included, which Qwen's models have three of. Weights are reloaded and
    KV is swapped between every three tokens, and all is lost once, as when a worker is killed;
    what reads images takes no memory."""
    path = make_shrunken(tmp_path, name, CONFIGS[name])
    model = Model(name=name, path=path, dtype="float32", max_context=CONTEXT)
    house = make_house()
    known = least(read_model(model, DEVICES), CONTEXT, DEVICES)
    engine = house.build(name, path, dtype="float32")
    assert known.kv == engine.kv.slabs(engine.kv.prompt_blocks(CONTEXT))
    assert known.weights <= engine.weight_slabs <= known.weights + 1
    after_loss = make_house()
    after_loss.build(name, path, dtype="float32")
    player = Player(house, name, GREEDY, prompts(name))

    player.turn(3, SLABS)
    player.turn(3, SLABS)
    player.lose(after_loss)
    while player.live:
        player.turn(3, SLABS)

    if name in ALONE:
        config = CONFIGS[name]
        text = {**config["text_config"], "architectures": [engine_architecture(config)]}
        path = make_shrunken(tmp_path / "alone", name, text)
    answers = texts_of(plain, path, prompts(name))
    assert list(player.outputs.values()) == answers
    longest = [*player.outputs.values()][-1]
    assert len(set(longest)) > 2, "it says the same token again and again"
    engine.retire()
    after_loss.engines[name].retire()


def engine_architecture(config: dict[str, Any]) -> str:
    """Of the language model of a checkpoint."""
    return MEDIA[config["architectures"][0]].languages[config["text_config"]["model_type"]]


@pytest.mark.parametrize("name", NAMES)
def test_files_have_what_reads_images(tmp_path: Path, name: str) -> None:
    """So much that it would show if it were loaded."""
    path = Path(make_shrunken(tmp_path, name, CONFIGS[name]))
    files = [read_header(file) for file in weight_files(path)]
    stored = tensor_bytes((tensor for file in files for tensor in file.tensors), "float32")
    model = Model(name=name, path=str(path), dtype="float32", max_context=CONTEXT)
    assert stored - read_model(model, DEVICES).parameters * 4 > 2 * SLAB


def test_all_that_is_said_to_be_tried_is(tmp_path: Path) -> None:
    tried = set()
    for name in NAMES:
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
        config = read_model_config(tmp_path)
        tried.add((config.architecture, config.model_type))
    assert tried == {(name, kind) for name, media in MEDIA.items() for kind in media.languages}
