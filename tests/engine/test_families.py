"""Each family of models that is said to be served answers as plain vLLM does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from appliance.checkpoints.checkpoint import CatalogEntry
from appliance.checkpoints.families import TRIED, UnsupportedModel, base_architecture
from appliance.checkpoints.language_models import MEDIA
from appliance.checkpoints.model_config import ModelType, known_models
from appliance.config.schema import Devices, Model
from appliance.config.sizing import least, read_model
from appliance.platform.cpus import computes_linear_attention
from appliance.units import Bytes, Memory
from tests.configs import CONFIGS, NOT_ON_CPU, REFUSED
from tests.engine.conftest import plain_process
from tests.engine.house import POOL_SLABS, SLAB, PlainAnswers, Sampling, make_house
from tests.engine.player import Player, continued, prompts
from tests.engine.shrunken import make_shrunken
from tests.engine.test_language_models import WITH_IMAGES

LENGTH = 16
SLABS = 48
CONTEXT = 1024
DEVICES = Devices(kind="cpu", memory_bytes=Memory(POOL_SLABS * SLAB), slab_bytes=Bytes(SLAB))
"""As large as the houses: groups of blocks are larger in a larger pool."""

FAMILIES = sorted(
    {
        (
            base_architecture(config["architectures"][0]),
            bool(config.get("sliding_window")),
            bool(config.get("new_decoder_architecture")),
            bool(config.get("alibi")),
        ): name
        for name, config in sorted(CONFIGS.items(), reverse=True)
        if name not in {**REFUSED, **NOT_ON_CPU}
        and "quantization_config" not in config
        and config["architectures"][0] not in MEDIA
        and config["architectures"][0].endswith(("CausalLM", "HeadModel"))
    }.values()
)
"""One model of each architecture, of each that has windows, and of Falcon's three forms;
`test_quantized` serves those whose weights are quantized."""
OTHERS = sorted(
    name
    for name, config in CONFIGS.items()
    if name not in {*REFUSED, *NOT_ON_CPU, *FAMILIES}
    and "quantization_config" not in config
    and config["architectures"][0] not in MEDIA
    and config["architectures"][0].endswith(("CausalLM", "HeadModel"))
)
"""Further models of these architectures."""
LINEAR = {name for name, config in CONFIGS.items() if "linear_key_head_dim" in config}
"""Their attention is computed in bfloat16, and on some CPUs only: after a loss, they go on as plain
vLLM does behind the same tokens."""

EXPERTS = "mixtral-8x7b-instruct-v0.1"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainAnswers]:
    """Of a process whose first model has experts: vLLM has no others in it after one without. Some
    models of text have code in common with those that read images."""
    path = make_shrunken(tmp_path_factory.mktemp("first"), EXPERTS, CONFIGS[EXPERTS])
    with plain_process(WITH_IMAGES) as answers:
        answers(path, "float32", [(3, 4, 5)], [Sampling(max_tokens=1)])
        yield answers


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_equal_plain_vllm(tmp_path: Path, plain: PlainAnswers, name: str) -> None:
    """With weights reloaded and KV swapped between every three tokens, and all lost once, as when a
    worker is killed; and it takes the memory that is known before it is built."""
    path = make_shrunken(tmp_path, name, CONFIGS[name])
    dtype = "bfloat16" if name in LINEAR else "float32"
    model = Model(name=name, path=path, dtype=dtype, max_context=CONTEXT)
    house = make_house()
    if name in LINEAR and not computes_linear_attention():
        with pytest.raises(UnsupportedModel, match="lacks the instructions"):
            read_model(model, DEVICES)
        return
    entry = read_model(model, DEVICES)
    engine = house.build(name, path, dtype=dtype)
    check_sizes(entry, engine)
    after_loss = make_house()
    after_loss.build(name, path, dtype=dtype)
    sampling = Sampling(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    asked = prompts(name)
    player = Player(house, name, sampling, asked)
    player.turn(3, SLABS)
    player.turn(3, SLABS)
    kept = [list(output) for output in player.outputs.values()]
    player.lose(after_loss)
    while player.live:
        player.turn(3, SLABS)
    ask = partial(greedy, plain, path, dtype)
    linear = name in LINEAR
    expected = continued(ask, asked, kept, LENGTH) if linear else ask(asked, LENGTH)
    outputs = [*player.outputs.values()]
    assert outputs == expected
    assert len(set(outputs[-1])) > 2, "it says the same token again and again"
    engine.retire()
    after_loss.engines[name].retire()


@pytest.mark.parametrize("name", ["granite-4.0-h-tiny", "mamba-codestral-7b-v0.1", "zamba2-7b"])
def test_states_of_a_model_in_bfloat16(tmp_path: Path, name: str) -> None:
    """Some CPUs keep them in float32, which takes longer blocks."""
    path = make_shrunken(tmp_path, name, CONFIGS[name])
    entry = read_model(Model(name=name, path=path, dtype="bfloat16", max_context=CONTEXT), DEVICES)

    engine = make_house().build(name, path, dtype="bfloat16")

    check_sizes(entry, engine)
    engine.retire()


def check_sizes(entry: CatalogEntry, engine: Any) -> None:
    """What was known of a model before is what its engine takes."""
    known = least(entry, CONTEXT, DEVICES)
    tables = entry.kv.tables(engine.kv.step_tokens, CONTEXT)
    assert (tables.tables, tables.windows) == (engine.kv.tables, engine.kv.windows)
    assert known.kv == engine.kv.slabs(engine.kv.prompt_blocks(CONTEXT))
    assert known.weights <= engine.weight_slabs <= known.weights + 1


def greedy(
    plain: PlainAnswers, path: str, dtype: str, asked: Sequence[tuple[int, ...]], tokens: int
) -> list[list[int]]:
    """What plain vLLM says behind each prompt."""
    sampling = [Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)] * len(asked)
    return [answer["sequences"][0] for answer in plain(path, dtype, asked, sampling)]


@pytest.mark.parametrize("name", OTHERS)
def test_all_that_are_served_can_be_built(tmp_path: Path, name: str) -> None:
    """In the memory that is known before."""
    path = make_shrunken(tmp_path, name, CONFIGS[name])
    model = Model(name=name, path=path, dtype="float32", max_context=CONTEXT)
    entry = read_model(model, DEVICES)

    engine = make_house().build(name, path, dtype="float32")

    check_sizes(entry, engine)
    engine.retire()


def test_kernels_that_cpus_lack() -> None:
    """For these, models are refused (`NO_CPU_KERNEL`). Should vLLM have one, its refusal can go."""
    import torch
    from vllm import _custom_ops
    from vllm.triton_utils import HAS_TRITON

    assert callable(_custom_ops.selective_scan_fwd), "vLLM calls it otherwise by now"
    assert not hasattr(torch.ops._C, "selective_scan_fwd")
    assert not HAS_TRITON


def test_names_of_architectures_and_types_are_those_of_vllm() -> None:
    """`make generate` writes them."""
    from transformers import CONFIG_MAPPING
    from vllm.config.model import iter_architecture_defaults
    from vllm.model_executor.models import registry

    from appliance.engines.vllm.configs.types import register_types
    from appliance.frontend.known_models import known_traits, known_type

    known = known_models()
    assert set(known.architectures) == set(registry.ModelRegistry.models)
    assert set(known.types) >= set(CONFIG_MAPPING)
    assert known.removed == registry._PREVIOUSLY_SUPPORTED_MODELS
    assert list(known.endings) == [ending for ending, _ in iter_architecture_defaults()]
    register_types()
    for model_type in ("gemma3", "gemma3_text", "gpt2", "llama", "mixtral", "phi4mm", "qwen3"):
        found = msgspec.convert(known_type(CONFIG_MAPPING[model_type]), ModelType)
        assert found == known.types[model_type]
    for name in ("Gemma3n", "NemotronParse", "Voxtral", "Whisper"):
        name += "ForConditionalGeneration"
        assert tuple(known_traits(name)) == known.architectures[name]


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("HunYuanVLForConditionalGeneration", {"images"}),  # with transformers' code
        ("KimiK25ForConditionalGeneration", {"images"}),  # in chunks
        ("MiniCPMO", {"images", "sound"}),  # images as the class below it does
        ("VibeVoiceAsrForConditionalGeneration", {"sound"}),
    ],
)
def test_what_a_model_reads_is_found_in_its_source(name: str, read: set[str]) -> None:
    from appliance.frontend.known_models import known_traits

    assert set(known_traits(name)) == {"media", *read}


def test_all_that_is_said_to_be_tried_is() -> None:
    assert {base_architecture(CONFIGS[name]["architectures"][0]) for name in FAMILIES} == TRIED
