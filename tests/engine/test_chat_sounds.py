"""Chats with sound answer as plain vLLM answers them, whatever happens to weights and KV."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.multimodal.inputs import MultiModalKwargsItem

from appliance.checkpoints.architectures.chat_sounds import READS_SOUND
from appliance.checkpoints.model_config import read_model_config
from appliance.config.schema import Model
from appliance.config.sizing import least, read_model
from appliance.engines.vllm.device import HostDevice
from appliance.engines.vllm.sound.arguments import sound_args
from tests.configs import CONFIGS
from tests.engine.conftest import plain_process
from tests.engine.house import PlainAnswers, make_house
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
from tests.engine.with_voxtral import HEARD as HEARD_BY_VOXTRAL
from tests.engine.with_voxtral import VOXTRAL, make_voxtral

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


class Family(NamedTuple):
    """Of models that read sound in chats."""

    make: Callable[[Path], str]
    heard: tuple[int, ...]
    """What stands for a sound in a prompt."""


FAMILIES: Final = {
    QWEN2_AUDIO: Family(make_hearer, HEARD),
    VOXTRAL: Family(make_voxtral, HEARD_BY_VOXTRAL),
}


def asked(heard: tuple[int, ...] = HEARD) -> list[SoundChat]:
    """A text, a sound in the middle, two sounds, the tokens of the second one again with another
    sound, and a sound as long as there are."""
    text = [tuple(30 + i * 7 % 200 for i in range(n)) for n in (5, 40, 70)]
    one, other, third = Sound(300, 70, 2.0), Sound(800, 20, 3.3), Sound(150, 400, 2.0)
    return [
        SoundChat(text[0]),
        SoundChat((*text[1], *heard, *text[0]), (one,)),
        SoundChat((*heard, *text[2], *heard, *text[0]), (one, other)),
        SoundChat((*text[1], *heard, *text[0]), (third,)),
        SoundChat((*text[0], *heard, *text[0]), (Sound(500, 9, 30.0),)),
    ]


@pytest.mark.parametrize(
    ("name", "dtype"),
    # Voxtral's processor rounds samples to the type that is computed in.
    [(QWEN2_AUDIO, "float32"), (VOXTRAL, "float32"), (VOXTRAL, "bfloat16")],
)
def test_outputs_equal_plain_vllm(
    tmp_path: Path, plain: PlainAnswers, name: str, dtype: str
) -> None:
    """Weights are loaded under a step with sounds, KV is swapped between every three tokens, and
    all is lost once, behind some output and in the midst of a sound."""
    path = FAMILIES[name].make(tmp_path)
    model = Model(name=name, path=path, dtype=dtype, max_context=CONTEXT, sounds=MOST)
    known = least(read_model(model, DEVICES), CONTEXT, DEVICES)
    houses = [make_house(POOL), make_house(POOL)]
    for house in houses:
        engine = house.build(name, path, dtype=dtype, prompt_sounds=MOST)
    assert known.weights <= engine.weight_slabs <= known.weights + 1
    assert known.kv == engine.kv.slabs(engine.kv.most_blocks(CONTEXT))
    preparer = ChatPreparer(path, MOST, dtype)
    prompts = asked(FAMILIES[name].heard)
    requests = Requests(houses[0], name, [preparer.prepare(*prompt) for prompt in prompts])

    requests.turn(again=False)
    requests.turn(again=True)
    late = f"{name}/late"
    requests.begin(late, f"{name}/2")
    requests.move(houses[1])
    requests.turn(again=False)
    while requests.live:
        requests.turn(again=True)

    answers = plain(path, dtype, prompts, [GREEDY] * len(prompts), **WHOLE)
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
    assert {CONFIGS[name]["architectures"][0] for name in FAMILIES} == READS_SOUND


class Hearer(NamedTuple):
    """A model that reads sound, loaded, and what prepares its prompts."""

    name: str
    engine: Any
    preparer: ChatPreparer

    @property
    def heard(self) -> tuple[int, ...]:
        return FAMILIES[self.name].heard


def test_voxtrals_names_of_two_versions(tmp_path: Path) -> None:
    """Of transformers: newer ones write one part more, and leave one out."""
    old, new = Path(make_voxtral(tmp_path)), tmp_path / "new"
    shutil.copytree(old, new)
    _name_as_newer(new)
    prompt = ChatPreparer(str(old), MOST).prepare(*asked(HEARD_BY_VOXTRAL)[1])
    outputs = []
    for path in (old, new):
        house = make_house(POOL)
        engine = house.build(path.name, str(path), dtype="float32", prompt_sounds=MOST)
        engine.begin_load().wait()
        outputs.append(finish(engine, [prompt], CONTEXT))
        house.idle()
        engine.retire()
    assert outputs[0] == outputs[1]


def _name_as_newer(path: Path) -> None:
    file = path / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        written = name.replace("language_model.model.", "model.language_model.")
        written = written.replace("language_model.lm_head.", "lm_head.")
        if name.startswith(("audio_tower.", "multi_modal_projector.")):
            written = f"model.{name}"
        tensors[written] = tensor
    save_file(tensors, file)
    index = {"weight_map": dict.fromkeys(tensors, file.name)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module", params=FAMILIES)
def hearer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hearer]:
    name: str = request.param
    path = FAMILIES[name].make(tmp_path_factory.mktemp("hearer"))
    house = make_house(POOL)
    engine = house.build(name, path, dtype="float32", prompt_sounds=MOST)
    engine.begin_load().wait()
    yield Hearer(name, engine, ChatPreparer(path, MOST + 1))
    house.idle()
    engine.retire()


def test_chunks_end_within_sounds(hearer: Hearer) -> None:
    """Prompts that are computed beside each other may have the same sound."""
    engine = hearer.engine
    prompts = [hearer.preparer.prepare(*prompt) for prompt in asked(hearer.heard)[:4]]
    alone = [output for prompt in prompts for output in finish(engine, [prompt], CONTEXT)]
    assert finish(engine, prompts, 7) == alone
    assert finish(engine, prompts, 50) == alone


def test_a_sound_is_encoded_once(hearer: Hearer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind other texts, also after weights were evicted; and again with another salt."""
    engine = hearer.engine
    encoded = []
    model = engine._runner.get_model()
    encode = model.embed_multimodal

    def counting(**tensors: Any) -> Any:
        (sounds, *_) = tensors.values()
        encoded.append(len(sounds))
        return encode(**tensors)

    monkeypatch.setattr(model, "embed_multimodal", counting)
    sound = (Sound(222, 33, 2.5),)
    for number, salt in enumerate(("a", "a", "b")):
        prompt = hearer.preparer.prepare((40 + number, *hearer.heard, 7, 8), sound)
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


Spoilt = dict[str, tuple[Callable[[Prepared], Prepared], str]]

_OF_QWEN2_AUDIO: Final[Spoilt] = {
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
}
_OF_VOXTRAL: Final[Spoilt] = {
    "short": (
        lambda p: _less(p, "audio_arrays", lambda t: t[1:]),
        r"sound 0: audio_arrays are \[479999\] of torch.float32, not \[480000\]",
    ),
    # vLLM would take them for one sound of twice as many tokens.
    "two": (
        lambda p: _less(p, "audio_arrays", lambda t: torch.cat((t, t))),
        r"sound 0: audio_arrays are \[960000\]",
    ),
    "empty": (lambda p: _less(p, "audio_arrays", lambda t: t[:0]), r"audio_arrays are \[0\]"),
    "numbers": (
        lambda p: _less(p, "audio_arrays", lambda t: t.int()),
        "sound 0: audio_arrays are .* of torch.int32",
    ),
    "batch": (
        lambda p: _less(p, "audio_arrays", lambda t: t[None]),
        r"sound 0: audio_arrays are \[1, 480000\]",
    ),
}
_OF_ALL: Final[Spoilt] = {
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
SPOILT: Final = {QWEN2_AUDIO: _OF_QWEN2_AUDIO | _OF_ALL, VOXTRAL: _OF_VOXTRAL | _OF_ALL}
"""What is wrong with the sounds of a prompt, and what is said of it."""


def test_sounds_that_do_not_fit_are_refused(hearer: Hearer) -> None:
    prompt = hearer.preparer.prepare((5, *hearer.heard, 6), (Sound(300, 70, 2.0),))
    for what, (spoil, wrong) in SPOILT[hearer.name].items():
        with pytest.raises(ValueError, match=wrong):
            add(hearer.engine, what, spoil(prompt))
        assert not hearer.engine.knows(what), what


@pytest.mark.parametrize("name", FAMILIES)
def test_text_alone_needs_no_sounds(tmp_path: Path, name: str) -> None:
    """With `sounds` 0, what reads them is not built, and a sound is refused."""
    path, heard = FAMILIES[name].make(tmp_path), FAMILIES[name].heard
    house = make_house(POOL)
    engine = house.build(name, path, dtype="float32")
    whole = house.build("whole", path, dtype="float32", prompt_sounds=MOST)
    assert engine.weight_slabs < whole.weight_slabs
    engine.begin_load().wait()
    prompt = ChatPreparer(path, MOST).prepare((5, *heard, 6), (Sound(300, 70, 2.0),))
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
