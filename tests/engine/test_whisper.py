"""Whisper makes of sound what plain vLLM makes of it, whatever happens to weights and KV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from appliance.checkpoints.model_config import read_model_config
from appliance.config.schema import Devices, Model
from appliance.config.sizing import least, read_model
from appliance.engines.protocol import KvExhausted
from appliance.engines.vllm.device import HostDevice
from appliance.engines.vllm.sound.arguments import sound_args
from appliance.units import Bytes, Memory
from appliance.vocabulary import Task
from tests.engine.conftest import plain_process
from tests.engine.house import SLAB, House, Sampling, make_house, sequence
from tests.engine.player import Player
from tests.engine.with_sound import (
    PLAIN,
    Sound,
    SoundPreparer,
    SoundPrompt,
    make_with_sound,
)

NAME: Final = "whisper"
CONTEXT, LENGTH, SLABS, POOL = 160, 14, 48, 80
TOKENS, BINS = 1500, 128
GREEDY: Final = Sampling(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
PROMPTS: Final = (
    SoundPrompt((1, 5, 7, 9), Sound(200, 30, 3)),
    SoundPrompt((1, 5, 7, 9), Sound(900, 7, 20)),
    SoundPrompt((1, *range(11, 81)), Sound(200, 30, 3)),
)
"""Two with the same tokens, and two with the same sound; one begins a third block. All begin with
the token that vLLM's front half puts before others."""
DEVICES = Devices(kind="cpu", memory_bytes=Memory(POOL * SLAB), slab_bytes=Bytes(SLAB))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_with_sound(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def features(path: str) -> list[list[Any]]:
    """Of each prompt."""
    preparer = SoundPreparer(path)
    return [preparer.prepare(prompt.sound) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def houses(path: str) -> Iterator[list[House]]:
    """The model on two instances."""
    made = [make_house(POOL), make_house(POOL)]
    for house in made:
        house.build(NAME, path, dtype="float32", task=Task.TRANSCRIPTION, max_context=CONTEXT)
    yield made
    for house in made:
        house.forget_all()
        house.engines[NAME].retire()


@pytest.fixture(scope="module")
def expected(path: str) -> list[list[int]]:
    """What plain vLLM makes of the prompts, all at once."""
    with plain_process(PLAIN) as answers:
        told = answers(
            path,
            "float32",
            [*PROMPTS],
            [GREEDY] * len(PROMPTS),
            max_model_len=CONTEXT,
            limit_mm_per_prompt={"audio": 1},
            max_num_seqs=4,
            max_num_batched_tokens=2048,
            skip_mm_profiling=True,
        )
    return [answer["sequences"][0] for answer in told]


def test_outputs_equal_plain_vllm(
    houses: list[House], features: list[list[Any]], expected: list[list[int]]
) -> None:
    """Weights and KV leave the device every three tokens, and all is lost once."""
    player = Player(houses[0], NAME, GREEDY, [prompt.tokens for prompt in PROMPTS], features)
    player.turn(3, SLABS)
    player.turn(3, SLABS)
    player.lose(houses[1])
    while player.live:
        player.turn(3, SLABS)
    assert list(player.outputs.values()) == expected
    assert expected[0] != expected[1], "it hears nothing"
    for house in houses:
        house.idle()


def test_sizes_are_known_before_there_is_an_engine(houses: list[House], path: str) -> None:
    engine = houses[0].engines[NAME]
    model = Model(name=NAME, path=path, dtype="float32", max_context=CONTEXT)
    entry = read_model(model, DEVICES)
    known = least(entry, CONTEXT, DEVICES)
    assert known.weights <= engine.weight_slabs <= known.weights + 1
    assert known.kv == engine.kv.slabs(engine.kv.most_blocks(CONTEXT))
    tables = entry.kv.tables(engine.kv.block_tokens, CONTEXT)
    for tokens in (1, 31, 32, 33, CONTEXT):
        assert tables.blocks(tokens) == engine.kv.blocks(tokens) == 47 + -(-tokens // 32)
    assert tables.layers * tables.layer_block_bytes == engine.kv.block_bytes
    assert entry.state_bytes == TOKENS * entry.kv_bytes_per_token


def add(engine: Any, request: str, number: int, features: Sequence[list[Any]]) -> None:
    tokens = PROMPTS[number].tokens
    engine.add(sequence(NAME, request, tokens, GREEDY, mm_features=features[number]))


def test_prompts_begin_next_to_others_that_are_decoded(
    houses: list[House], features: list[list[Any]], expected: list[list[int]]
) -> None:
    """A step takes one prompt, and does so whole; weights land under the first."""
    house, engine = houses[0], houses[0].engines[NAME]
    engine.begin_load()
    outputs: dict[str, list[int]] = {str(number): [] for number in range(len(PROMPTS))}
    for number, request in enumerate(outputs):
        add(engine, request, number, features)
        engine.begin_prefill(request, SLABS)
    steps = []
    while any(len(output) < LENGTH for output in outputs.values()):
        live = [one for one, output in outputs.items() if 0 < len(output) < LENGTH]
        beginning = [one for one, output in outputs.items() if not output]
        produced = engine.step(live, SLABS, beginning, 2)
        steps.append(len(produced))
        for one in produced:
            outputs[one.request].append(one.token)
    assert steps[:4] == [1, 2, 3, 3]
    assert list(outputs.values()) == expected
    house.idle()


def test_a_failed_step_leaves_nothing(
    houses: list[House],
    features: list[list[Any]],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind the encoder, with a request next to it that decodes; nor does a prompt that is
    forgotten before it is computed."""
    house, engine = houses[0], houses[0].engines[NAME]
    engine.begin_load()
    for number in (0, 1):
        add(engine, str(number), number, features)
    engine.prefill("0", SLABS)
    engine.begin_prefill("1", SLABS)
    with monkeypatch.context() as patch:
        decoder = engine._runner.get_model().model.decoder
        patch.setattr(decoder, "forward", lambda *args, **kwargs: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.step(["0"], SLABS, ["1"], CONTEXT)
    assert not engine._runner.encoder_cache
    assert engine.trim(0).slabs == 0
    assert [one.token for one in engine.prefill("1", SLABS)] == expected[1][:1]
    assert [one.token for one in engine.prefill("0", SLABS)] == expected[0][1:2]
    add(engine, "2", 2, features)
    engine.begin_prefill("2", SLABS)
    for request in "012":
        engine.forget(request)
    house.idle()


def test_a_request_begins_only_with_room_for_its_sound(
    houses: list[House], features: list[list[Any]]
) -> None:
    house, engine = houses[0], houses[0].engines[NAME]
    engine.begin_load().wait()
    add(engine, "0", 0, features)
    enough = engine.kv.slabs(engine.kv.blocks(len(PROMPTS[0].tokens)))
    with pytest.raises(KvExhausted):
        engine.begin_prefill("0", enough - engine.kv.group_slabs)
    assert len(engine.prefill("0", enough)) == 1
    engine.forget("0")
    house.idle()


def spoilt(feature: Any, **changes: Any) -> Any:
    return replace(feature, **changes)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda one: [], "one sound, and not 0"),
        (lambda one: [one, one], "one sound, and not 2"),
        (lambda one: [spoilt(one, modality="image")], "'image' is not what it is called"),
        (lambda one: [spoilt(one, data=None)], "no data"),
        (lambda one: [spoilt(one, mm_position=PlaceholderRange(1, TOKENS))], "place"),
        (lambda one: [spoilt(one, mm_position=PlaceholderRange(0, 3))], "not all 1500"),
        (lambda one: [changed(one, torch.zeros(BINS, 2 * TOKENS - 2))], "not .128, 3000. of"),
        (lambda one: [changed(one, torch.zeros(BINS, 2 * TOKENS, dtype=torch.int64))], "int64"),
        (lambda one: [changed(one, [torch.zeros(BINS, 2 * TOKENS)])], "no tensor|not a tensor"),
    ],
)
def test_a_body_that_cannot_be_computed_is_refused(
    houses: list[House], features: list[list[Any]], change: Any, why: str
) -> None:
    """With nothing added. It would fail the step for all that are in it."""
    engine = houses[0].engines[NAME]
    with pytest.raises(ValueError, match=why):
        engine.add(sequence(NAME, "bad", (1, 2), GREEDY, mm_features=change(features[0][0])))
    assert not engine.knows("bad")


def changed(feature: MultiModalFeatureSpec, values: Any) -> MultiModalFeatureSpec:
    """With other values."""
    element = feature.data["input_features"]
    data = type(feature.data)({"input_features": replace(element, data=values)})
    return replace(feature, data=data)


def test_transformers_draws_the_same(
    path: str, features: list[list[Any]], expected: list[list[int]]
) -> None:
    """Plain vLLM could be wrong, too: each of its tokens is the most likely one, up to rounding."""
    import transformers

    model = transformers.WhisperForConditionalGeneration.from_pretrained(path).eval()
    for prompt, (feature,), output in zip(PROMPTS, features, expected, strict=True):
        tokens = torch.tensor([[*prompt.tokens, *output]])
        sound = feature.data["input_features"].data[None]
        with torch.inference_mode():
            logits = model(input_features=sound, decoder_input_ids=tokens).logits[0]
        drawn = logits[len(prompt.tokens) - 1 : -1]
        given = drawn.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert torch.all(drawn.max(1).values - given < 1e-3)


def test_other_devices_are_refused(path: str) -> None:
    class Gpu(HostDevice):
        host_memory = False  # type: ignore[misc]

    checkpoint = read_model_config(Path(path))
    with pytest.raises(ValueError, match="on the CPU only"):
        sound_args(checkpoint, 1, Gpu())
    with pytest.raises(ValueError, match="several ranks"):
        sound_args(checkpoint, 2, HostDevice())
