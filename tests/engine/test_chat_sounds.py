"""Chats with sound answer as plain vLLM answers them, whatever happens to weights and KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from vllm.multimodal.inputs import MultiModalKwargsItem

from appliance.checkpoints.architectures.chat_sounds import READS_SOUND
from appliance.checkpoints.model_config import read_model_config
from appliance.config.schema import Model
from appliance.config.sizing import least, read_model
from appliance.engines.vllm.device import HostDevice
from appliance.engines.vllm.sound.arguments import sound_args
from tests.configs import CONFIGS
from tests.engine.conftest import plain_process
from tests.engine.house import House, PlainAnswers, make_house
from tests.engine.media_requests import (
    DEVICES,
    GREEDY,
    POOL,
    SLABS,
    Requests,
    add,
    assert_nothing_kept,
    finish,
)
from tests.engine.with_images import Prepared
from tests.engine.with_sound import (
    HEARD,
    PLAIN_CHATS,
    QWEN2_AUDIO,
    ChatPreparer,
    Sound,
    SoundChat,
    make_hearer,
)

CONTEXT, MOST = 1024, 2
WHOLE: Final = {
    "limit_mm_per_prompt": {"audio": MOST},
    # Less to warm up with.
    **{"skip_mm_profiling": True, "max_num_batched_tokens": 1024, "max_num_seqs": 4},
}
"""Arguments of plain vLLM."""


@pytest.fixture(scope="module")
def plain() -> Iterator[PlainAnswers]:
    with plain_process(PLAIN_CHATS) as answers:
        yield answers


def asked() -> list[SoundChat]:
    """A text, a sound in the middle, two sounds, the tokens of the second one again with another
    sound, and a sound as long as there are."""
    text = [tuple(30 + i * 7 % 200 for i in range(n)) for n in (5, 40, 70)]
    one, other, third = Sound(300, 70, 2.0), Sound(800, 20, 3.3), Sound(150, 400, 2.0)
    return [
        SoundChat(text[0]),
        SoundChat((*text[1], *HEARD, *text[0]), (one,)),
        SoundChat((*HEARD, *text[2], *HEARD, *text[0]), (one, other)),
        SoundChat((*text[1], *HEARD, *text[0]), (third,)),
        SoundChat((*text[0], *HEARD, *text[0]), (Sound(500, 9, 30.0),)),
    ]


def test_outputs_equal_plain_vllm(tmp_path: Path, plain: PlainAnswers) -> None:
    """Weights are loaded under a step with sounds, KV is swapped between every three tokens, and
    all is lost once, behind some output and in the midst of a sound."""
    name = QWEN2_AUDIO
    path = make_hearer(tmp_path)
    model = Model(name=name, path=path, dtype="float32", max_context=CONTEXT, sounds=MOST)
    known = least(read_model(model, DEVICES), CONTEXT, DEVICES)
    houses = [make_house(POOL), make_house(POOL)]
    for house in houses:
        engine = house.build(name, path, dtype="float32", prompt_sounds=MOST)
    assert known.weights <= engine.weight_slabs <= known.weights + 1
    assert known.kv == engine.kv.slabs(engine.kv.most_blocks(CONTEXT))
    preparer = ChatPreparer(path, MOST)
    prompts = asked()
    requests = Requests(houses[0], name, [preparer.prepare(*prompt) for prompt in prompts])

    requests.turn(again=False)
    requests.turn(again=True)
    late = f"{name}/late"
    requests.begin(late, f"{name}/2")
    requests.move(houses[1])
    requests.turn(again=False)
    while requests.live:
        requests.turn(again=True)

    answers = plain(path, "float32", prompts, [GREEDY] * len(prompts), **WHOLE)
    assert [one.tokens for one in requests.prompts.values()][:-1] == [
        tuple(answer["prompt"]) for answer in answers
    ]
    said = [answer["sequences"][0] for answer in answers]
    assert requests.outputs.pop(late) == said[2]
    assert list(requests.outputs.values()) == said
    assert requests.outputs[f"{name}/1"] != requests.outputs[f"{name}/3"], "it hears nothing"
    for house in houses:
        house.idle()
        house.engines[name].retire()


def test_all_that_is_said_to_be_served_is() -> None:
    assert {CONFIGS[QWEN2_AUDIO]["architectures"][0]} == READS_SOUND


@pytest.fixture(scope="module")
def hearer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, Any, ChatPreparer]]:
    """A model that reads sound, loaded, and what prepares its prompts."""
    path = make_hearer(tmp_path_factory.mktemp("hearer"))
    house = make_house(POOL)
    engine = house.build(QWEN2_AUDIO, path, dtype="float32", prompt_sounds=MOST)
    engine.begin_load().wait()
    yield house, engine, ChatPreparer(path, MOST + 1)
    house.idle()
    engine.retire()


def test_chunks_end_within_sounds(hearer: tuple[House, Any, ChatPreparer]) -> None:
    """Prompts that are computed beside each other may have the same sound."""
    _, engine, preparer = hearer
    prompts = [preparer.prepare(*prompt) for prompt in asked()[:4]]
    alone = [output for prompt in prompts for output in finish(engine, [prompt], CONTEXT)]
    assert finish(engine, prompts, 7) == alone
    assert finish(engine, prompts, 50) == alone


def test_a_sound_is_encoded_once(
    hearer: tuple[House, Any, ChatPreparer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind other texts, also after weights were evicted; and again with another salt."""
    _, engine, preparer = hearer
    encoded = []
    model = engine._runner.get_model()
    encode = model.embed_multimodal

    def counting(**tensors: Any) -> Any:
        encoded.append(len(tensors["input_features"]))
        return encode(**tensors)

    monkeypatch.setattr(model, "embed_multimodal", counting)
    sound = (Sound(222, 33, 2.5),)
    for number, salt in enumerate(("a", "a", "b")):
        prompt = preparer.prepare((40 + number, *HEARD, 7, 8), sound)
        add(engine, "one", prompt, salt)
        engine.prefill("one", SLABS)
        engine.forget("one")
        engine.evict_weights()
        engine.begin_load().wait()
    assert encoded == [1, 1]
    engine.trim(0)
    assert_nothing_kept(engine)


def _less(prompt: Prepared, key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Prepared:
    (feature,) = prompt.features
    element = feature.data[key]
    changed = MultiModalKwargsItem(
        {**feature.data, key: type(element)(data=change(element.data), field=element.field)}
    )
    return prompt._replace(
        features=[type(feature)(changed, "audio", "x", feature.mm_position, "x")]
    )


SPOILT: Final[dict[str, tuple[Callable[[Prepared], Prepared], str]]] = {
    "bins": (
        lambda p: _less(p, "input_features", lambda t: t[1:]),
        r"sound 0: input_features are \[127, 3000\]",
    ),
    "numbers": (
        lambda p: _less(p, "input_features", lambda t: t.int()),
        "sound 0: input_features are .* of torch.int32",
    ),
    "mask": (
        lambda p: _less(p, "feature_attention_mask", lambda t: t.flip(0)),
        "sound 0: feature_attention_mask is not ones, and zeros",
    ),
    "silent": (
        lambda p: _less(p, "feature_attention_mask", torch.zeros_like),
        "sound 0: 0 columns are too short",
    ),
    "longer": (
        lambda p: _less(p, "feature_attention_mask", torch.ones_like),
        "sound 0: it has 750 embeddings for 50 tokens",
    ),
    "image": (
        lambda p: p._replace(
            features=[
                type(f)(f.data, "image", f.identifier, f.mm_position, f.mm_hash) for f in p.features
            ]
        ),
        "sound 0: 'image' is not what the model reads: sounds",
    ),
    "many": (
        lambda p: p._replace(features=p.features * 3),
        "3 sounds in a prompt, more than the 2 of `sounds`",
    ),
}


@pytest.mark.parametrize("what", SPOILT)
def test_sounds_that_do_not_fit_are_refused(
    hearer: tuple[House, Any, ChatPreparer], what: str
) -> None:
    _, engine, preparer = hearer
    prompt = preparer.prepare((5, *HEARD, 6), (Sound(300, 70, 2.0),))
    spoil, wrong = SPOILT[what]
    with pytest.raises(ValueError, match=wrong):
        add(engine, what, spoil(prompt))
    assert not engine.knows(what)


def test_text_alone_needs_no_sounds(tmp_path: Path, plain: PlainAnswers) -> None:
    """With `sounds` 0, what reads them is not built, and a sound is refused."""
    path = make_hearer(tmp_path)
    house = make_house(POOL)
    engine = house.build(QWEN2_AUDIO, path, dtype="float32")
    whole = house.build("whole", path, dtype="float32", prompt_sounds=MOST)
    assert engine.weight_slabs < whole.weight_slabs
    engine.begin_load().wait()
    prompt = ChatPreparer(path, MOST).prepare((5, *HEARD, 6), (Sound(300, 70, 2.0),))
    with pytest.raises(ValueError, match="served for text only: its `sounds` is 0"):
        add(engine, "part", prompt)
    for one in (engine, whole):
        one.retire()


@pytest.mark.parametrize(
    ("ranks", "device", "wrong"),
    [
        (2, HostDevice(), "sounds are not served by several ranks"),
        (1, SimpleNamespace(host_memory=False), "sounds are not served on GPUs"),
    ],
)
def test_where_it_is_not_served(tmp_path: Path, ranks: int, device: Any, wrong: str) -> None:
    checkpoint = read_model_config(Path(make_hearer(tmp_path)))
    with pytest.raises(ValueError, match=wrong):
        sound_args(checkpoint, ranks, device, MOST)
