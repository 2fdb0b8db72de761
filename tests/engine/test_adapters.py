"""LoRA adapters: the tokens of plain vLLM with the same adapter, whatever else is in the batch."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest

from appliance.checkpoints.adapters import TRIED, AdapterPlace, AdapterRoom, adapter_version
from appliance.checkpoints.drafts import Speculation
from appliance.checkpoints.families import UnsupportedModel
from appliance.config.schema import Adapter, Devices, Model
from appliance.config.sizing import least, read_model
from appliance.engines.protocol import Verdict
from appliance.engines.vllm.lora.products import BASE, AdapterProducts
from appliance.engines.vllm.weights.recipe import Origin
from appliance.errors import CheckpointError
from appliance.memory.weight_cache.image_file import image_name
from appliance.units import Bytes, Memory
from tests.engine.house import (
    EOS,
    POOL_SLABS,
    SLAB,
    VOCAB,
    House,
    PlainAnswers,
    Sampling,
    make_house,
    save_tokenizer,
    sequence,
)
from tests.engine.player import prompts
from tests.engine.quantizing import (
    awq_config,
    gptq_config,
    quantize,
    skip_uncomputed,
    w4a16_config,
)
from tests.engine.test_quantized import label, quantized
from tests.lora import ATTENTION, make_adapter

GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
SLABS = 40
CONTEXT = 1024
DEVICES = Devices(kind="cpu", memory_bytes=Memory(POOL_SLABS * SLAB), slab_bytes=Bytes(SLAB))
MISTRAL = "mistral-gqa"
SERVED = {
    "LlamaForCausalLM": "llama-mha",
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": "qwen2-gqa",
    "Qwen3ForCausalLM": "qwen3-128",
}
HALF = "llama-bf16"
LLAMA = SERVED["LlamaForCausalLM"]


def three(folder: Path, base: str) -> tuple[AdapterPlace, ...]:
    """Adapters that differ in what they change, in ranks, in types and in how they are scaled."""
    return (
        AdapterPlace("all", make_adapter(folder / "all", base, seed=1), 0),
        AdapterPlace(
            "some",
            make_adapter(
                folder / "some",
                base,
                rank=3,
                targets=("q_proj", "down_proj"),
                dtype="bfloat16",
                seed=2,
                use_rslora=True,
            ),
            1,
        ),
        AdapterPlace(
            "patterns",
            make_adapter(
                folder / "patterns",
                base,
                rank=16,
                targets=ATTENTION,
                seed=3,
                ranks={"o_proj": 5},
                alpha_pattern={"layers.1.self_attn.q_proj": 3},
            ),
            2,
        ),
    )


def configured(
    name: str, path: str, dtype: Any, adapters: Sequence[AdapterPlace], max_loras: int = 0
) -> Model:
    return Model(
        name=name,
        path=path,
        dtype=dtype,
        max_context=CONTEXT,
        adapters=tuple(Adapter(name=one.name, path=one.path) for one in adapters),
        max_loras=max_loras,
    )


def ask(adapters: Sequence[AdapterPlace]) -> list[tuple[tuple[int, ...], AdapterPlace | None]]:
    """The same prompts of the base and of every adapter, of one after the other."""
    return [(prompt, one) for prompt in prompts(LLAMA) for one in (None, *adapters)]


def add(engine: Any, name: str, prompt: tuple[int, ...], adapter: str | None) -> None:
    named = adapter and LoRARequest(f"{engine.model}:{adapter}", 1, "/nowhere")
    engine.add(sequence(engine.model, name, prompt, GREEDY, lora_request=named))


def plain(
    answer: PlainAnswers, path: str, dtype: str, adapters: Sequence[AdapterPlace]
) -> list[list[int]]:
    """Prompts of one adapter at a time, and of the base without any: where a batch has both, vLLM's
    code for CPUs computes the base's tokens with the last adapter."""
    asked = ask(adapters)
    found: dict[int, list[int]] = {}
    for adapter in (None, *adapters):
        mine = [number for number, (_, place) in enumerate(asked) if place == adapter]
        lora = {} if adapter is None else {"enable_lora": True, "max_lora_rank": 16}
        named = adapter and (adapter.name, 1 + adapters.index(adapter), adapter.path)
        told = answer(
            path,
            dtype,
            [asked[number][0] for number in mine],
            [GREEDY] * len(mine),
            adapters=[named] * len(mine) if named else (),
            skip_tokenizer_init=True,
            **lora,
        )
        found |= {number: one["sequences"][0] for number, one in zip(mine, told, strict=True)}
    return [found[number] for number in range(len(asked))]


class Batch:
    """Requests of a base and its adapters, of which nothing but the host tier survives a turn."""

    def __init__(self, house: House, engine: Any, adapters: Sequence[AdapterPlace]) -> None:
        self.house, self.engine = house, engine
        self.outputs: dict[str, list[int]] = {}
        self.places: dict[str, Any] = {}
        self.live: list[str] = []
        for number, (prompt, adapter) in enumerate(ask(adapters)):
            self.begin(f"{engine.model}/{number}", prompt, adapter)

    def begin(self, name: str, prompt: tuple[int, ...], adapter: AdapterPlace | None) -> None:
        add(self.engine, name, prompt, adapter.name if adapter else None)
        self.outputs[name] = []
        tokens = len(prompt) + GREEDY["max_tokens"]
        self.places[name] = self.house.swap_places(self.engine, tokens)
        self.live.append(name)

    def turn(self, steps: int) -> None:
        """Weights and KV in, a few steps, everything out."""
        self.engine.begin_load().wait()
        for name in self.live:
            if self.outputs[name]:
                self.engine.swap_in(name, self.places[name], SLABS)
            else:
                self.take(self.engine.prefill(name, SLABS))
        for _ in range(steps):
            self.take(self.engine.step(self.live, SLABS))
        for name in self.live:
            self.house.swap_out(self.engine, name, self.places[name])
        assert self.engine.trim(0).slabs == 0
        self.engine.evict_weights()

    def take(self, produced: Any) -> None:
        for one in produced:
            self.outputs[one.request].append(one.token)
            if one.finished:
                self.live.remove(one.request)

    def answers(self) -> list[list[int]]:
        while self.live:
            self.turn(4)
        return list(self.outputs.values())


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> str:
    import transformers

    folder = tmp_path_factory.mktemp("mistral")
    config = transformers.MistralConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=None,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=EOS,
        initializer_range=0.2,
    )
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def test_all_architectures_are_tried() -> None:
    assert SERVED.keys() == TRIED


@pytest.mark.parametrize("name", [*SERVED.values(), HALF])
def test_outputs_equal_plain_vllm(
    tmp_path: Path,
    checkpoints: dict[str, str],
    mistral: str,
    plain_answers: PlainAnswers,
    name: str,
) -> None:
    """Of three adapters and their base in one batch, with everything evicted every few tokens."""
    dtype = "bfloat16" if name == HALF else "float32"
    path = {**checkpoints, MISTRAL: mistral}[name]
    adapters = three(tmp_path, path)
    house = make_house()

    engine = house.build(name, path, dtype=dtype, adapters=adapters)
    known = least(read_model(configured(name, path, dtype, adapters), DEVICES), CONTEXT, DEVICES)
    assert known.weights <= engine.weight_slabs <= known.weights + 1
    found = Batch(house, engine, adapters).answers()

    assert found == plain(plain_answers, path, dtype, adapters)
    by_adapter = [found[number::4] for number in range(4)]
    assert all(one != other for one in by_adapter[1:] for other in by_adapter[:1])
    engine.begin_load().wait()
    assert engine.verify() is Verdict.OK


METHODS = [gptq_config(32), awq_config(32), w4a16_config(32, symmetric=False)]
QUANTIZED = [(name, METHODS[n % len(METHODS)]) for n, name in enumerate(SERVED.values())]
"""Each architecture with one kind of quantized weights."""


@pytest.mark.parametrize(
    ("name", "config"), [pytest.param(n, c, id=f"{n}-{label(c)}") for n, c in QUANTIZED]
)
def test_adapters_of_quantized_weights_answer_as_plain_vllm(
    tmp_path: Path,
    checkpoints: dict[str, str],
    mistral: str,
    plain_answers: PlainAnswers,
    name: str,
    config: dict[str, Any],
) -> None:
    skip_uncomputed(config)
    stored = {**checkpoints, MISTRAL: mistral}[name]
    adapters = three(tmp_path, stored)
    path = str(shutil.copytree(stored, tmp_path / "quantized"))
    quantize(path, config, "float16")
    house = make_house()

    engine = house.build(name, path, dtype="float16", adapters=adapters)
    known = least(
        read_model(configured(name, path, "float16", adapters), DEVICES), CONTEXT, DEVICES
    )
    assert known.weights <= engine.weight_slabs <= known.weights + 1
    assert quantized(engine)
    found = Batch(house, engine, adapters).answers()

    assert found == plain(plain_answers, path, "float16", adapters)
    by_adapter = [found[number::4] for number in range(4)]
    assert all(one != other for one in by_adapter[1:] for other in by_adapter[:1])
    engine.begin_load().wait()
    assert engine.verify() is Verdict.OK


def test_adapters_come_and_go_while_others_run(
    tmp_path: Path, checkpoints: dict[str, str], plain_answers: PlainAnswers
) -> None:
    """One comes while requests of another one and of the base are on the device, and one to the
    place of one that went, while nothing is: no output is other than plain vLLM's."""
    base = checkpoints[LLAMA]
    every, some, patterns = three(tmp_path, base)
    later = AdapterPlace(patterns.name, patterns.path, every.slot)
    house = make_house()
    engine = house.build(LLAMA, base, adapters=[every], adapter_room=AdapterRoom(2, 16))
    room = configured(LLAMA, base, "float32", [every], max_loras=2)
    known = least(read_model(room, DEVICES), CONTEXT, DEVICES)
    assert known.weights <= engine.weight_slabs <= known.weights + 1
    asked = ask((every, some, later))
    names = {(prompt, one): f"r{number}" for number, (prompt, one) in enumerate(asked)}

    def begin(batch: Batch, adapter: AdapterPlace | None) -> None:
        for prompt in prompts(LLAMA):
            batch.begin(names[prompt, adapter], prompt, adapter)

    batch = Batch(house, engine, ())  # of the base, first of all
    begin(batch, every)
    engine.begin_load().wait()
    for name in batch.live:
        batch.take(engine.prefill(name, SLABS))
    batch.take(engine.step(batch.live, SLABS))
    engine.put_adapters((every, some), (some.slot,), image=True)  # all of it is on the device
    assert engine.verify() is Verdict.OK
    begin(batch, some)
    for name in batch.live[-len(prompts(LLAMA)) :]:
        batch.take(engine.prefill(name, SLABS))
    batch.take(engine.step(batch.live, SLABS))
    for name in batch.live:
        house.swap_out(engine, name, batch.places[name])
    assert engine.trim(0).slabs == 0
    engine.evict_weights()
    batch.answers()
    engine.put_adapters((later, some), (later.slot,), image=True)  # nothing of it is
    begin(batch, later)
    batch.answers()
    with pytest.raises(ValueError, match="has no adapter llama-mha:all"):
        add(engine, "gone", (5, 6), "all")

    expected = plain(plain_answers, base, "float32", (every, some, later))
    base_names = [f"{LLAMA}/{number}" for number in range(len(prompts(LLAMA)))]
    found = [
        batch.outputs[base_names.pop(0) if one is None else names[prompt, one]]
        for prompt, one in asked
    ]
    assert found == expected
    engine.begin_load().wait()
    assert engine.verify() is Verdict.OK


def test_an_adapter_is_what_it_was_when_its_files_change(
    tmp_path: Path, checkpoints: dict[str, str]
) -> None:
    """Until it is put anew, as others come and go. Files that changed in between are refused."""
    base = checkpoints[LLAMA]
    every, some = three(tmp_path, base)[:2]
    folder, house = Path(every.path), make_house()
    every = AdapterPlace(every.name, every.path, 0, adapter_version(folder))
    engine = house.build(LLAMA, base, adapters=[every], adapter_room=AdapterRoom(2, 16))

    def answer(batch: Batch, name: str) -> list[list[int]]:
        names = [f"{name}{number}" for number in range(len(prompts(LLAMA)))]
        for one, prompt in zip(names, prompts(LLAMA), strict=True):
            batch.begin(one, prompt, every)
        batch.answers()
        return [batch.outputs[one] for one in names]

    batch = Batch(house, engine, ())
    before = answer(batch, "before")
    shutil.rmtree(folder)
    make_adapter(folder, base, seed=7)
    engine.begin_load().wait()
    engine.put_adapters((every, some), (some.slot,), image=True)
    assert engine.verify() is Verdict.OK
    assert answer(batch, "again") == before
    with pytest.raises(CheckpointError, match="was changed while it was served"):
        engine.put_adapters((every, some), (every.slot,), image=True)

    now = AdapterPlace(every.name, every.path, 0, adapter_version(folder))
    engine.put_adapters((now, some), (now.slot,), image=True)
    fresh = house.build("fresh", base, dtype="float32", adapters=[now])
    found = answer(batch, "after")
    assert found != before
    assert found == answer(Batch(house, fresh, ()), "fresh")
    shutil.rmtree(folder)
    engine.put_adapters((now,), (some.slot,), image=True)
    assert answer(batch, "gone") == found


def test_places_are_for_ranks_up_to_theirs(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    """A larger one is refused before anything is written, as is any where there is no room."""
    base = checkpoints[LLAMA]
    (every,) = three(tmp_path, base)[:1]
    large = AdapterPlace("large", make_adapter(tmp_path / "large", base, rank=17), 1)
    house = make_house()
    engine = house.build(LLAMA, base, adapters=[every], adapter_room=AdapterRoom(2, 16))
    engine.begin_load().wait()
    with pytest.raises(CheckpointError, match=r"has rank 17, more than max_lora_rank \(16\)"):
        engine.put_adapters((every, large), (1,), image=True)
    assert engine.verify() is Verdict.OK

    fixed = house.build("fixed", base, dtype="float32", adapters=[every])
    with pytest.raises(CheckpointError, match="max_loras is 0"):
        fixed.put_adapters((every,), (0,), image=True)


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, str]
) -> tuple[House, Any]:
    """Two adapters of a Llama."""
    adapters = three(tmp_path_factory.mktemp("adapters"), checkpoints[LLAMA])[:2]
    house = make_house()
    return house, house.build(LLAMA, checkpoints[LLAMA], adapters=adapters)


def test_prefixes_are_shared_within_an_adapter_only(served: tuple[House, Any]) -> None:
    """A prompt that was computed with one adapter, or none, is not known with another."""
    _, engine = served
    prompt = tuple(range(3, 99))
    engine.begin_load().wait()
    for adapter in (None, "all", "some"):
        name = adapter or "base"
        add(engine, name, prompt, adapter)
        engine.begin_prefill(name, SLABS)
        assert engine.tokens_left(name) == len(prompt), "nothing of it is cached"
        while not engine.step((), SLABS, (name,), CONTEXT):
            pass
    add(engine, "again", prompt, "some")
    engine.begin_prefill("again", SLABS)

    assert engine.tokens_left("again") == len(prompt) - 64

    for name in ("base", "all", "some", "again"):
        engine.forget(name)
    engine.evict_weights()


def test_a_request_names_an_adapter_of_the_model(served: tuple[House, Any]) -> None:
    """Whatever else it says of it: a path of the client's is never looked at."""
    _, engine = served

    with pytest.raises(ValueError, match="llama-mha has no adapter llama-mha:other"):
        add(engine, "unknown", (5, 6), "other")

    assert not engine.knows("unknown")


def test_a_model_with_adapters_has_no_drafts(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    adapters = three(tmp_path, checkpoints[LLAMA])
    with pytest.raises(UnsupportedModel, match="not tried with LoRA adapters"):
        make_house().build(
            LLAMA, checkpoints[LLAMA], adapters=adapters, speculation=Speculation(4, 2, 5)
        )


def test_adapters_are_verified(served: tuple[House, Any]) -> None:
    """They lie in the master image, and one bit of one is seen."""
    house, engine = served
    layout = engine._placed.weights.layout
    offset = next(
        start
        for tensor, start in zip(layout.tensors, layout.offsets, strict=True)
        if tensor.name == "model.layers.1.mlp.down_proj.lora_b_stacked_0"
    )
    engine.begin_load().wait()
    assert engine.verify() is Verdict.OK

    slab, start = divmod(offset + 3, SLAB)
    byte = house.host.view(house.images[LLAMA][slab] + start, 1)
    byte[0] ^= 1
    assert engine.verify() is Verdict.DIFFERS
    byte[0] ^= 1

    engine.evict_weights()


def test_a_replaced_file_is_not_read(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    path = make_adapter(tmp_path / "one", checkpoints[LLAMA])
    house = make_house()
    engine = house.build(LLAMA, checkpoints[LLAMA], adapters=[AdapterPlace("one", path, 0)])
    Path(path, "adapter_model.safetensors").write_bytes(b"something else")

    with pytest.raises(CheckpointError, match="adapter_model"):
        engine.store_weights(house.images[LLAMA], fill=True)


def test_images_with_other_adapters_are_kept_apart() -> None:
    """Models of one checkpoint do not replace each other's; nor do those with other room."""
    adapters: list[list[str]] = [[], ["/a"], ["/b"], ["/a", "/b"]]

    rooms = (None, AdapterRoom(2, 16), AdapterRoom(3, 16), AdapterRoom(2, 8))

    names = {image_name("/m", "float32", 0, 1, paths, r) for paths in adapters for r in rooms}

    assert len(names) == len(adapters) * len(rooms)


def test_kept_images_of_other_models_stay_valid() -> None:
    """They are known by the text of what they are made from, as it was before adapters."""
    plain = Origin(0, 8, torch.float32)

    assert repr(plain) == "Origin(file=0, offset=8, dtype=torch.float32, decays=False)"
    assert repr(plain._replace(factor=2.0)) != repr(plain)


@pytest.mark.parametrize(
    "tokens_of", [[40, 0, 0], [9, 3, 0, 1], [2] * 8, [1, 5, 17, 2, 9, 0, 3], [3] + [600] * 4]
)
def test_products(tokens_of: list[int]) -> None:
    """Of tokens of several adapters, the first being none, in any order; an output that no adapter
    changes lies between two that they do."""
    dice = torch.Generator().manual_seed(1)
    slots = [adapter - 1 for adapter, count in enumerate(tokens_of) for _ in range(count)]
    slots = [slots[i] for i in torch.randperm(len(slots), generator=dice).tolist()]
    adapters, sizes = len(tokens_of), (6, 4, 10)
    a = [torch.randn(adapters, 1, r, 8, generator=dice) for r in (3, 0, 5)]
    b = [
        torch.randn(adapters, 1, size, r, generator=dice)
        for size, r in zip(sizes, (3, 0, 5), strict=True)
    ]
    x, base = (torch.randn(len(slots), width, generator=dice) for width in (8, 20))
    products, y = AdapterProducts(adapters), base.clone()

    products.begin(slots)
    products.add_lora_linear(y, x, a, b, 1.0, sizes)

    for row, slot in enumerate(slots):
        added = [b[i][slot, 0] @ (a[i][slot, 0] @ x[row]) for i in range(3)]
        expected = base[row] + (torch.cat(added) if slot != BASE else 0)
        torch.testing.assert_close(y[row], expected)
