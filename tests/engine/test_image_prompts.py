"""Prompts with images answer as plain vLLM answers them, whatever happens to weights and KV."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import pytest
import torch
from vllm.multimodal.inputs import MultiModalKwargsItem

from appliance.checkpoints.drafts import Speculation
from appliance.checkpoints.families import UnsupportedModel
from appliance.checkpoints.language_models import why_no_images
from appliance.checkpoints.model_config import read_model_config
from appliance.config.schema import Model
from appliance.config.sizing import least, read_model
from appliance.engines.protocol import KvExhausted
from appliance.engines.vllm.images.arguments import image_args
from appliance.engines.vllm.images.prompts import ImagePrompts
from appliance.engines.vllm.messages import decode_request
from appliance.engines.vllm.seams import SeamMoved
from tests.configs import CONFIGS
from tests.engine.conftest import plain_process
from tests.engine.house import House, PlainAnswers, Sampling, make_house, sequence
from tests.engine.media_requests import (
    DEVICES,
    GREEDY,
    LENGTH,
    POOL,
    SLABS,
    Requests,
    add,
    assert_nothing_kept,
    finish,
)
from tests.engine.shrunken import make_shrunken
from tests.engine.with_images import (
    GEMMA3,
    LLAMA4,
    LLAVA,
    MISTRAL3,
    NAMES,
    PLAIN,
    QWEN2,
    QWEN2_5,
    QWEN3,
    QWEN3_MOE,
    SIDE,
    ImagePrompt,
    Picture,
    Prepared,
    Preparer,
    image_tokens,
    make_with_images,
)

CONTEXT, MOST, BLOCK = 1024, 2, 32
EXPERTS: Final = "mixtral-8x7b-instruct-v0.1"
WHOLE: Final = {
    "limit_mm_per_prompt": {"image": MOST, "video": 0},
    # Less to warm up with.
    **{"skip_mm_profiling": True, "max_num_batched_tokens": 1024, "max_num_seqs": 4},
}
"""Arguments of plain vLLM."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainAnswers]:
    """Of a process whose first model has experts: vLLM has no others in it after one without."""
    path = make_shrunken(tmp_path_factory.mktemp("first"), EXPERTS, CONFIGS[EXPERTS])
    with plain_process(PLAIN) as answers:
        answers(path, "float32", [ImagePrompt((3, 4, 5))], [Sampling(max_tokens=1)])
        yield answers


def asked(name: str) -> list[ImagePrompt]:
    """A text, an image in the middle, two images, the tokens of the second one again with an image
    of other colours, and images in a prompt much longer than a window (Gemma's have one)."""
    image, start = image_tokens(name), 3 + sum(name.encode()) % 50
    text = [tuple(start + i * 7 % 200 for i in range(n)) for n in (5, 40, 70, 150)]
    one, other, third = Picture(1, 150, 120), Picture(2, 90, 200), Picture(3, 150, 120)
    return [
        ImagePrompt(text[0]),
        ImagePrompt((*text[1], *image, *text[0]), (one,)),
        ImagePrompt((*image, *text[2], *image, *text[0]), (one, other)),
        ImagePrompt((*text[1], *image, *text[0]), (third,)),
        ImagePrompt((*text[2], *image, *text[3], *image, *text[0]), (other, third)),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_outputs_equal_plain_vllm(tmp_path: Path, plain: PlainAnswers, name: str) -> None:
    """Weights are loaded under a step with images, KV is swapped between every three tokens, and
    all is lost once, behind some output and in the midst of an image."""
    path = make_with_images(tmp_path, name)
    model = Model(name=name, path=path, dtype="float32", max_context=CONTEXT, images=MOST)
    known = least(read_model(model, DEVICES), CONTEXT, DEVICES)
    houses = [make_house(POOL), make_house(POOL)]
    for house in houses:
        engine = house.build(name, path, dtype="float32", prompt_images=MOST)
    assert known.weights <= engine.weight_slabs <= known.weights + 1
    assert known.kv == engine.kv.slabs(engine.kv.most_blocks(CONTEXT))
    preparer = Preparer(path, MOST)
    prompts = asked(name)
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
    assert requests.outputs[f"{name}/1"] != requests.outputs[f"{name}/3"], "it looks at no image"
    windows = houses[0].engines[name].kv.windows
    assert bool(windows) == (name in (GEMMA3, LLAMA4))
    assert all(len(requests.prompts[f"{name}/4"].tokens) > 2 * BLOCK * most for most in windows)
    for house in houses:
        house.idle()
        house.engines[name].retire()


@pytest.fixture(scope="module")
def reader(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[House, Any, Preparer]]:
    """A model that reads images, loaded, and what prepares its prompts."""
    name = request.param
    path = make_with_images(tmp_path_factory.mktemp("reader"), name)
    house = make_house(POOL)
    engine = house.build(name, path, dtype="float32", prompt_images=MOST)
    engine.begin_load().wait()
    yield house, engine, Preparer(path, MOST + 1)
    house.idle()
    engine.retire()


WAYS: Final = (QWEN2, QWEN2_5, QWEN3, QWEN3_MOE, GEMMA3, MISTRAL3)
"""Ways of computing images: with one position or three, windows, notes for later layers, and tokens
between those of an image. What others do beside is to prepare and to encode images."""

EACH: Final = pytest.mark.parametrize("reader", WAYS, indirect=True)
QWEN: Final = pytest.mark.parametrize("reader", [QWEN2_5], indirect=True)
GEMMA: Final = pytest.mark.parametrize("reader", [GEMMA3], indirect=True)


@EACH
def test_chunks_end_within_images(reader: tuple[House, Any, Preparer]) -> None:
    """Prompts that are computed beside each other may have the same image."""
    _, engine, preparer = reader
    prompts = [preparer.prepare(*prompt) for prompt in asked(engine.model)]
    alone = [output for prompt in prompts for output in finish(engine, [prompt], CONTEXT)]
    assert finish(engine, prompts, 3) == alone
    assert finish(engine, prompts, 50) == alone


@EACH
def test_nothing_is_left_of_a_prompt_that_is_not_finished(
    reader: tuple[House, Any, Preparer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is forgotten in the midst of an image, or its step fails."""
    _, engine, preparer = reader
    text, image, *_ = (preparer.prepare(*prompt) for prompt in asked(engine.model))
    within = image.features[0].mm_position.offset + 3
    add(engine, "forgotten", image)
    engine.begin_prefill("forgotten", SLABS)
    engine.step((), SLABS, ["forgotten"], within)
    engine.trim(0)
    assert engine.kv_use().image_bytes
    engine.forget("forgotten")
    assert_nothing_kept(engine)
    engine.trim(0)

    add(engine, "failed", image)
    engine.begin_prefill("failed", SLABS)
    engine.step((), SLABS, ["failed"], within)
    with monkeypatch.context() as patch:
        patch.setattr(engine._core, "step", lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.step((), SLABS, ["failed"], 45)
    assert_nothing_kept(engine)
    (produced,) = engine.prefill("failed", SLABS)
    engine.forget("failed")
    assert produced.token == finish(engine, [image], CONTEXT)[0][0]
    assert finish(engine, [text], 4) == finish(engine, [text], CONTEXT)


@EACH
def test_a_failed_step_adds_nothing_to_the_next(
    reader: tuple[House, Any, Preparer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-VL adds what it saw to several layers."""
    _, engine, preparer = reader
    text, _, image, *_ = (preparer.prepare(*prompt) for prompt in asked(engine.model))
    expected = finish(engine, [text], CONTEXT)
    add(engine, "failed", image)
    with monkeypatch.context() as patch:
        language = engine._runner.get_model().get_language_model()
        patch.setattr(language.model, "forward", lambda *args, **kwargs: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.prefill("failed", SLABS)
    engine.forget("failed")
    assert finish(engine, [text], CONTEXT) == expected


@EACH
def test_images_are_not_shared_with_another_salt(reader: tuple[House, Any, Preparer]) -> None:
    """What the encoder made is kept once for prompts with one salt."""
    _, engine, preparer = reader
    image = preparer.prepare(*asked(engine.model)[1])
    behind = len(image.tokens) - image.features[0].mm_position.offset - 3
    kept = []
    for request, salt in (("one", "a"), ("same", "a"), ("other", "b"), ("none", None)):
        add(engine, request, image, salt)
        engine.begin_prefill(request, SLABS)
        engine.step((), SLABS, [request], engine.tokens_left(request) - behind)
        kept.append(engine.kv_use().image_bytes)
    one = engine.kv.image_blocks(image.features[0].mm_position.get_num_embeds())
    assert kept == [count * one * engine.kv.block_bytes for count in (1, 1, 2, 3)]
    for request in ("one", "same", "other", "none"):
        engine.forget(request)
    assert_nothing_kept(engine)
    engine.trim(0)


@QWEN
def test_images_are_not_shared_with_another_adapter(reader: tuple[House, Any, Preparer]) -> None:
    """Adapters are known by what they are: one that gets the name of another finds none of its
    images. Nor is a salt taken for a part of an adapter."""
    _, engine, preparer = reader
    tokens, features = preparer.prepare(*asked(engine.model)[1])
    spec = sequence(engine.model, "one", tokens, GREEDY, mm_features=features)
    request = decode_request(spec.body)
    owners = [("", ""), ("", "first"), ("", "second"), ("first", ""), ("a:b", "c"), ("c", "a:b")]
    names = [
        engine._images.take(request, spec, salt, adapter)[0].identifier for salt, adapter in owners
    ]
    assert len(set(names)) == len(owners)


def encodings(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images the encoder is given, each time that it runs from here on."""
    runs: list[int] = []
    model = engine._runner.get_model()
    encode = model.embed_multimodal

    def count(**images: Any) -> Any:
        made = encode(**images)
        runs.append(len(made))
        return made

    monkeypatch.setattr(model, "embed_multimodal", count)
    return runs


@EACH
def test_an_image_is_encoded_once_while_there_is_memory(
    reader: tuple[House, Any, Preparer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind another text, where the prefix cache does not have it. It goes with cold KV, before
    any KV that is used and before weights."""
    _, engine, preparer = reader
    _, prompt, _, other, _ = asked(engine.model)
    prepared = preparer.prepare(*prompt)
    moved_on = preparer.prepare((9, *prompt.tokens[1:]), prompt.pictures)
    expected = finish(engine, [moved_on], CONTEXT)
    runs = encodings(engine, monkeypatch)

    def once(request: str, one: Prepared) -> list[int]:
        add(engine, request, one)
        (produced,) = engine.prefill(request, SLABS)
        output = [produced.token]
        while len(output) < LENGTH:
            output += [token.token for token in engine.step([request], SLABS)]
        return output

    once("first", prepared)
    kept = engine.kv_use()
    assert kept.used_bytes == 0 < kept.image_bytes < kept.cold_bytes
    assert once("again", moved_on) == expected[0]
    assert runs == [1]
    engine.evict_weights()
    engine.begin_load().wait()
    once("third", preparer.prepare((8, *prompt.tokens[1:]), prompt.pictures))
    assert runs == [1]
    once("other", preparer.prepare(*other))
    assert runs == [1, 1]
    assert engine.trim(0).slabs == 0
    once("after", moved_on)
    assert runs == [1, 1, 1]
    assert_nothing_kept(engine)


@QWEN
def test_a_prompt_waits_for_room_for_its_images(reader: tuple[House, Any, Preparer]) -> None:
    """What is counted before is enough; with a block less nothing is kept of it."""
    _, engine, preparer = reader
    pool, slabs = engine._cache.pool, engine.kv.group_slabs
    prompt = preparer.prepare(*asked(QWEN2_5)[2])
    images = [one.mm_position.get_num_embeds() for one in prompt.features]
    needed = engine.kv.prompt_blocks(len(prompt.tokens), images)
    assert engine.kv.blocks(len(prompt.tokens)) < needed < engine.kv.most_blocks(CONTEXT)
    for filler in range(2):
        add(engine, f"{filler}", Prepared((7,) * BLOCK, []))
        engine.begin_prefill(f"{filler}", slabs)
        if not filler:
            more = pool.free - needed
            assert 0 < more * BLOCK < CONTEXT
            add(engine, "more", Prepared((7,) * (more * BLOCK), []))
            engine.begin_prefill("more", slabs)
            assert pool.free == needed
    add(engine, "images", prompt)
    with pytest.raises(KvExhausted):
        engine.begin_prefill("images", slabs)
    assert pool.free == needed - 1
    engine.forget("0")
    (produced,) = engine.prefill("images", slabs)
    for request in ("1", "more", "images"):
        engine.forget(request)
    assert_nothing_kept(engine)
    assert [produced.token] == finish(engine, [prompt], CONTEXT)[0][:1]


@QWEN
def test_images_make_way_for_kv(
    reader: tuple[House, Any, Preparer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other prompts, in as many slabs as there are: the coldest first."""
    _, engine, preparer = reader
    text, prompt, _, other, _ = asked(QWEN2_5)
    one, another = (preparer.prepare(*prompt) for prompt in (prompt, other))
    slabs = engine.kv.slabs(engine.kv.prompt_blocks(CONTEXT))
    for name, prepared in (("one", one), ("another", another)):
        add(engine, name, prepared)
        engine.prefill(name, slabs)
        engine.forget(name)
    both = engine.kv_use().image_bytes
    long = tuple(text.tokens[i % 5] for i in range(CONTEXT - LENGTH))
    add(engine, "long", Prepared(long, []))
    engine.prefill("long", slabs)
    assert engine.kv_use().image_bytes < both
    engine.forget("long")
    runs = encodings(engine, monkeypatch)
    first = finish(engine, [one], CONTEXT)
    assert runs == [1]
    assert finish(engine, [one], 7) == first


@QWEN
def test_room_is_for_the_images_that_come(reader: tuple[House, Any, Preparer]) -> None:
    _, engine, preparer = reader
    tokens, features = preparer.prepare(*asked(QWEN2_5)[1])
    spec = sequence(engine.model, "short", tokens, GREEDY, mm_features=features)
    with pytest.raises(ValueError, match=r"images of \(\d+,\) tokens, and room for \(\)"):
        engine.add(msgspec.structs.replace(spec, images=()))


@QWEN
def test_cached_blocks_are_those_of_the_same_image(reader: tuple[House, Any, Preparer]) -> None:
    """Other images are behind equal tokens."""
    _, engine, preparer = reader
    _, image, _, other, _ = (preparer.prepare(*prompt) for prompt in asked(QWEN2_5))
    assert image.tokens == other.tokens
    left = {}
    for request, prompt in (("first", image), ("again", image), ("other", other)):
        add(engine, request, prompt)
        engine.begin_prefill(request, SLABS)
        left[request] = engine.tokens_left(request)
        engine.step((), SLABS, [request], CONTEXT)
        engine.forget(request)
    before = image.features[0].mm_position.offset // BLOCK * BLOCK
    total = len(image.tokens)
    assert left == {
        "first": total,
        "again": total - (total - 1) // BLOCK * BLOCK,
        "other": total - before,
    }
    engine.trim(0)


def changed(feature: Any, **tensors: Any) -> Any:
    """The image with other tensors; None leaves one out."""
    data = MultiModalKwargsItem(feature.data)
    for name, tensor in tensors.items():
        if tensor is None:
            del data[name]
        else:
            data[name] = replace(data[name], data=tensor)
    return replace(feature, data=data)


def moved(feature: Any, **place: Any) -> Any:
    return replace(feature, mm_position=replace(feature.mm_position, **place))


@QWEN
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda one: [one, one, one], "3 images in a prompt, more than the 2 of `images`"),
        (lambda one: [one, one], "image 1: tokens .* are not its own"),
        (
            lambda one: [replace(one, modality="video")],
            "image 0: 'video' is not what the model reads",
        ),
        (lambda one: [replace(one, data=None)], "no data"),
        (lambda one: [replace(one, identifier="")], "no hash"),
        (lambda one: [moved(one, offset=-1)], "are not its own"),
        (lambda one: [moved(one, offset=1 << 40)], "are not its own"),
        (lambda one: [moved(one, length=0)], "are not its own"),
        (lambda one: [moved(one, length=one.mm_position.length - 1)], "embeddings for"),
        (lambda one: [moved(one, is_embed=torch.ones(3, dtype=torch.bool))], "mask"),
        (
            lambda one: [moved(one, is_embed=torch.zeros(one.mm_position.length) > 0)],
            "embeddings for 0 tokens",
        ),
        (lambda one: [changed(one, image_grid_thw=None)], "image_grid_thw is not a tensor"),
        (lambda one: [changed(one, image_grid_thw=torch.ones(3))], "not three numbers"),
        (lambda one: [changed(one, image_grid_thw=torch.tensor([2, 2, 2]))], "not of one image"),
        (lambda one: [changed(one, image_grid_thw=torch.tensor([1, 3, 4]))], "not of one image"),
        (
            lambda one: [changed(one, image_grid_thw=torch.tensor([1, 1 << 40, 2]))],
            "not of one image",
        ),
        (lambda one: [changed(one, pixel_values=torch.ones(2, 1176))], "pixel_values are"),
        (
            lambda one: [changed(one, pixel_values=one.data["pixel_values"].data.long())],
            "of torch.int64",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    reader: tuple[House, Any, Preparer], spoil: Callable[[Any], list[Any]], reason: str
) -> None:
    """Before anything of it is computed, so that no other request suffers from it."""
    assert_refused(reader, spoil, reason)


@GEMMA
@pytest.mark.parametrize(
    ("patches", "reason"),
    [
        (None, "num_patches is not a tensor"),
        (torch.tensor(0), "num_patches is 0"),
        (torch.tensor(-1), "num_patches is -1"),
        (torch.tensor(1 << 40), "num_patches is 1099511627776"),
        (torch.tensor(2), "pixel_values are"),
        (torch.tensor(1.0), "not a number"),
        (torch.tensor([1, 1]), "not a number"),
        (torch.tensor([[1]]), "not a number"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    reader: tuple[House, Any, Preparer], patches: torch.Tensor | None, reason: str
) -> None:
    assert_refused(reader, lambda one: [changed(one, num_patches=patches)], reason)


def assert_refused(
    reader: tuple[House, Any, Preparer], spoil: Callable[[Any], list[Any]], reason: str
) -> None:
    _, engine, preparer = reader
    tokens, (feature,) = preparer.prepare(*asked(engine.model)[1])
    with pytest.raises(ValueError, match=reason):
        add(engine, "spoilt", Prepared(tokens, spoil(feature)))
    assert not engine.knows("spoilt")
    assert "spoilt" not in engine._runner.requests


@QWEN
def test_models_of_text_refuse_images(
    reader: tuple[House, Any, Preparer], checkpoints: dict[str, str]
) -> None:
    house, _, preparer = reader
    with pytest.raises(ValueError, match="LlamaForCausalLM are not served, only text"):
        house.build("llama-mha", checkpoints["llama-mha"], prompt_images=1)
    path = preparer.path
    engine = house.build("text", path, dtype="float32")
    prompt = preparer.prepare(*asked(QWEN2_5)[1])
    with pytest.raises(ValueError, match="served for text only: its `images` is 0"):
        engine.add(sequence("text", "image", prompt.tokens, GREEDY, mm_features=prompt.features))


SQUARE = {"height": SIDE, "width": SIDE}


@pytest.mark.parametrize(
    ("settings", "sides"),
    [
        ({}, (SIDE, SIDE)),
        ({"crop_size": SIDE}, (SIDE, SIDE)),
        ({"size": {"shortest_edge": 2 * SIDE}}, (SIDE, SIDE)),
        ({"image_processor_type": "LlavaImageProcessor"}, (SIDE, SIDE)),
        ({"do_center_crop": False, "size": SQUARE}, (SIDE, SIDE)),
        ({"image_processor_type": "SiglipImageProcessor", "size": SQUARE}, (SIDE, SIDE)),
        ({"crop_size": SIDE // 2}, (SIDE // 2, SIDE // 2)),
        ({"crop_size": {"height": SIDE, "width": SIDE // 2}}, (SIDE, SIDE // 2)),
        ({"crop_size": ...}, (224, 224)),
        ({"crop_size": None}, None),
        ({"do_center_crop": False}, (SIDE, 70)),
        (
            {"do_center_crop": False, "size": {"height": SIDE // 2, "width": SIDE // 2}},
            (SIDE // 2, SIDE // 2),
        ),
    ],
    ids=str,
)
def test_llava_reads_images_of_one_size(
    tmp_path: Path, settings: dict[str, Any], sides: tuple[int, int] | None
) -> None:
    """What prepares images makes some of these `sides`, or fails; an engine would refuse each that
    is no square of the tower's, so `config check` refuses what makes another. `...` leaves out."""
    path = Path(make_with_images(tmp_path, LLAVA))
    file = path / "preprocessor_config.json"
    said = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({key: said[key] for key in said if said[key] is not ...}))
    prompt = (3, *image_tokens(LLAVA), 4)

    if sides is None:
        with pytest.raises(ValueError, match="Failed to apply LlavaProcessor"):
            Preparer(str(path), 1).prepare(prompt, (Picture(1, 150, 120),))
    else:
        _, (feature,) = Preparer(str(path), 1).prepare(prompt, (Picture(1, 150, 120),))
        assert tuple(feature.data["pixel_values"].data.shape) == (3, *sides)
    assert (why_no_images(read_model_config(path)) == "") == (sides == (SIDE, SIDE))


@QWEN
def test_what_was_not_tried_is_not_built(
    reader: tuple[House, Any, Preparer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`config check` refuses it before."""
    house, engine, preparer = reader
    chosen: dict[str, Any] = {"prompt_images": 1, "speculation": Speculation(4, 2, 5)}
    with pytest.raises(UnsupportedModel, match="drafts were not tried with images in prompts"):
        house.build("drafts", preparer.path, dtype="float32", **chosen)
    gpu: Any = SimpleNamespace(host_memory=False)
    with pytest.raises(ValueError, match="images are not served on GPUs"):
        image_args(1, read_model_config(Path(preparer.path)), 1, gpu)
    scheduler = engine._scheduler
    monkeypatch.setattr(scheduler.scheduler_config, "disable_chunked_mm_input", True)
    with pytest.raises(SeamMoved, match="shorten chunks that end within an image"):
        ImagePrompts(engine._core.vllm_config, scheduler, engine._runner, engine.kv)
