"""Checkpoints that read images or sound as well answer prompts of text as plain vLLM's models of
them do, of which the appliance builds the language models alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from safetensors.torch import load_file, save_file

from appliance.checkpoints.checkpoint import read_checkpoint, tensor_bytes
from appliance.checkpoints.families import UnsupportedModel
from appliance.checkpoints.language_models import MEDIA
from appliance.checkpoints.model_config import read_model_config
from appliance.checkpoints.safetensors import read_header, weight_files
from appliance.config.schema import Devices, Model
from appliance.config.sizing import least, read_model
from appliance.platform.cpus import computes_linear_attention
from appliance.units import Bytes, Memory
from tests.configs import CONFIGS, REFUSED
from tests.engine.conftest import plain_process
from tests.engine.house import POOL_SLABS, SLAB, PlainAnswers, Sampling, make_house
from tests.engine.player import Player, continued, prompts
from tests.engine.shrunken import make_shrunken

CONTEXT, LENGTH, SLABS = 1024, 16, 48
DEVICES = Devices(kind="cpu", memory_bytes=Memory(POOL_SLABS * SLAB), slab_bytes=Bytes(SLAB))
EXPERTS: Final = "mixtral-8x7b-instruct-v0.1"
WITH_IMAGES: Final = "from tests.engine.image_libraries import stand_in; stand_in()\n"
WITH_TYPES: Final = (
    "from appliance.engines.vllm.configs.types import register_types; register_types()\n"
)
"""Of which the type of Phi-4-multimodal is one: without it, vLLM reads no such file either."""

NAMES = sorted(
    name
    for name, config in CONFIGS.items()
    if config["architectures"][0] in MEDIA
    and name not in REFUSED
    and "quantization_config" not in config
)
"""Those that are quantized are served by `test_quantized_readers`."""


PHI_4: Final = "phi-4-multimodal-instruct"
ALONE: Final = frozenset({"gemma-3n-e4b-it", "voxtral-mini-3b-2507"})
"""Plain vLLM cannot compute the whole model of these without images, or from such files, and gives
the answers of a checkpoint of text. `test_transformers` compares Gemma's with transformers."""

LINEAR = {name for name in NAMES if "linear_key_head_dim" in CONFIGS[name].get("text_config", ())}
"""Their attention is computed in bfloat16, and on some CPUs only. There, to rotate by three
positions rounds otherwise than by one, so plain vLLM's whole model is given one as well. After a
loss, they go on as plain vLLM does behind the same tokens."""

GREEDY = Sampling(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainAnswers]:
    """Of a process whose first model has experts: vLLM has no others in it after one without."""
    path = make_shrunken(tmp_path_factory.mktemp("first"), EXPERTS, CONFIGS[EXPERTS])
    with plain_process(WITH_IMAGES + WITH_TYPES) as answers:
        answers(path, "float32", [(3, 4, 5)], [Sampling(max_tokens=1)])
        yield answers


def texts_of(
    plain: PlainAnswers, path: str, dtype: str, asked: Sequence[tuple[int, ...]], tokens: int
) -> list[list[int]]:
    """What plain vLLM's whole model says, of which the towers alone are not loaded."""
    options = {"skip_tokenizer_init": True, "language_model_only": True}
    sampling = [{**GREEDY, "max_tokens": tokens}] * len(asked)
    answers = plain(path, dtype, list(asked), sampling, **options)
    return [answer["sequences"][0] for answer in answers]


def with_one_position(path: Path) -> str:
    """The same checkpoint, whose tokens have one position each; its path."""
    folder = path.with_name(f"{path.name}-one-position")
    folder.mkdir()
    for file in path.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((path / "config.json").read_text())
    rope = config["text_config"]["rope_parameters"]
    del rope["mrope_section"], rope["mrope_interleaved"]
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_equal_plain_vllm(tmp_path: Path, plain: PlainAnswers, name: str) -> None:
    """Its positions of tokens included, which Qwen's models have three of. Weights are reloaded and
    KV is swapped between every three tokens, and all is lost once, as when a worker is killed;
    what reads images takes no memory."""
    path = make_shrunken(tmp_path, name, CONFIGS[name])
    dtype = "bfloat16" if name in LINEAR else "float32"
    model = Model(name=name, path=path, dtype=dtype, max_context=CONTEXT)
    house = make_house()
    if name in LINEAR and not computes_linear_attention():
        with pytest.raises(UnsupportedModel, match="lacks the instructions"):
            read_model(model, DEVICES)
        return
    known = least(read_model(model, DEVICES), CONTEXT, DEVICES)
    engine = house.build(name, path, dtype=dtype)
    assert known.kv == engine.kv.slabs(engine.kv.prompt_blocks(CONTEXT))
    assert known.weights <= engine.weight_slabs <= known.weights + 1
    after_loss = make_house()
    after_loss.build(name, path, dtype=dtype)
    asked = prompts(name)
    player = Player(house, name, GREEDY, asked)

    player.turn(3, SLABS)
    player.turn(3, SLABS)
    kept = [list(output) for output in player.outputs.values()]
    player.lose(after_loss)
    while player.live:
        player.turn(3, SLABS)

    if name in ALONE:
        config = CONFIGS[name]
        text = {**config["text_config"], "architectures": [engine_architecture(config)]}
        whole, path = path, make_shrunken(tmp_path / "alone", name, text)
        if "audio_config" in config and "vision_config" not in config:
            take_language_model(Path(whole), Path(path))
    if name in LINEAR:
        ask = partial(texts_of, plain, with_one_position(Path(path)), dtype)
        answers = continued(ask, asked, kept, LENGTH)
    else:
        answers = texts_of(plain, path, dtype, asked, LENGTH)
    assert list(player.outputs.values()) == answers
    longest = [*player.outputs.values()][-1]
    assert len(set(longest)) > 2, "it says the same token again and again"
    engine.retire()
    after_loss.engines[name].retire()


def take_language_model(whole: Path, alone: Path) -> None:
    """Give a checkpoint of text the weights that another one has for its language model."""
    begins = "language_model."
    tensors = load_file(whole / "model.safetensors")
    own = {k.removeprefix(begins): t for k, t in tensors.items() if k.startswith(begins)}
    assert own.keys() == load_file(alone / "model.safetensors").keys()
    save_file(own, alone / "model.safetensors", metadata={"format": "pt"})


def engine_architecture(config: dict[str, Any]) -> str:
    """Of the language model of a checkpoint."""
    return MEDIA[config["architectures"][0]].languages[config["text_config"]["model_type"]]


@pytest.mark.parametrize("name", NAMES)
def test_files_have_what_reads_images(tmp_path: Path, name: str) -> None:
    """So much that it would show if it were loaded."""
    path = Path(make_shrunken(tmp_path, name, CONFIGS[name]))
    files = [read_header(file) for file in weight_files(path)]
    stored = tensor_bytes((tensor for file in files for tensor in file.tensors), "float32")
    assert stored - read_checkpoint(name, path, "float32").parameters * 4 > 2 * SLAB


def test_what_prepares_images_of_phi_4_is_code_of_the_checkpoint(tmp_path: Path) -> None:
    """Why its images and sounds are refused. Once vLLM prepares them by itself, this fails."""
    from vllm.transformers_utils.processor import get_processor

    from appliance.engines.vllm.configs.types import register_types

    register_types()
    path = Path(make_shrunken(tmp_path, PHI_4, CONFIGS[PHI_4]))
    kinds = {"AutoProcessor": "Processor", "AutoImageProcessor": "ImageProcessor"}
    published = {
        "auto_map": {auto: f"processing_phi4mm.Phi4MM{kind}" for auto, kind in kinds.items()},
        "image_processor_type": "Phi4MMImageProcessor",
        "processor_class": "Phi4MMProcessor",
        "dynamic_hd": 36,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(published))

    with pytest.raises(RuntimeError, match="setting `trust_remote_code=True`"):
        get_processor(str(path), trust_remote_code=False)


def test_all_that_is_said_to_be_tried_is(tmp_path: Path) -> None:
    tried = set()
    for name in NAMES:
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
        config = read_model_config(tmp_path)
        tried.add((config.architecture, config.model_type))
    assert tried == {(name, kind) for name, media in MEDIA.items() for kind in media.languages}
