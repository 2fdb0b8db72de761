"""From safetensors to an engine's memory: recipes, fills, streams, layers that are waited for."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.checkpoints.safetensors import read_header
from appliance.config.schema import Devices
from appliance.config.sizing import least
from appliance.engines.protocol import Produced
from appliance.errors import CheckpointError
from appliance.memory import mapping
from appliance.memory.host_tier import HostTier
from appliance.memory.transfers import Transfer, TransferCancelled, TransferFailed, TransferKind
from appliance.memory.weight_cache.pipeline import process_cpus
from appliance.memory.weights import Image
from appliance.platform.cpus import computes_linear_attention
from appliance.units import Bytes, Memory
from tests.engine.house import MODELS, POOL_SLABS, SLAB, House, Sampling, make_house, sequence
from tests.patience import PATIENCE_SECONDS

PROMPT = tuple(range(20, 60))
GREEDY = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=5)


# --- recipes: toy models, whose loaders do what vLLM's do ----------------------------------------


def toy(shapes: dict[str, tuple[int, ...]], load: Callable[..., None], dtype: str) -> Any:
    """A module of parameters of these shapes; `load(module, name, tensor)` loads one."""
    import torch

    class Toy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in shapes.items():
                data = torch.full(shape, 77, dtype=getattr(torch, dtype))
                self.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))

        def load_weights(self, weights: Any) -> None:
            for name, tensor in weights:
                load(self, name, tensor)

    return Toy()


def fused(model: Any, name: str, tensor: Any) -> None:
    """q, k and v into one matrix; the second rank's columns of o; a transposed and a padded one;
    rows in another order, as Llama 4 and Falcon want them; and Llama 4's experts."""
    import torch

    if name in "qkv":
        model.qkv.data.narrow(0, "qkv".index(name) * 40, 40).copy_(tensor)
    elif name == "o":
        columns = model.o.shape[1]
        model.o.data.copy_(tensor.narrow(1, columns, columns))
    elif name == "t":
        model.t.data.copy_(tensor.t())
    elif name == "embed":
        model.embed[: len(tensor)].data.copy_(tensor)
        model.embed[len(tensor) :].data.fill_(0)
    elif name == "turned":
        model.turned.data.copy_(tensor.view(3, 4, 2, 7).transpose(1, 2).reshape(24, 7))
    elif name == "biases":
        model.biases.data.copy_(tensor.view(3, 4, 2).transpose(1, 2).reshape(24))
    elif name == "groups":  # of two heads of queries, one of keys and one of values
        groups = tensor.view(3, 4, 5, 6)
        parts = [groups[:, first:last].reshape(-1, 6) for first, last in ((0, 2), (2, 3), (3, 4))]
        joined, first = torch.cat(parts), 0
        for size in (30, 15, 15):
            model.groups.data.narrow(0, first, size).copy_(joined.narrow(0, first, size))
            first += size
    elif name == "experts":
        for number, half in enumerate(tensor.transpose(-1, -2).chunk(2, dim=-2)):
            model.experts.data.narrow(1, number * 5, 5).copy_(half)
    elif name == "scale":
        model.scale.data.copy_(tensor.expand(model.scale.shape))
    else:
        # Every other row: neighbours come from two tensors.
        model.mixed.data[int(name == "odd") :: 2].copy_(tensor)


FUSED = {
    "embed": (64, 24),
    "qkv": (120, 24),
    "o": (24, 20),
    "t": (30, 24),
    "turned": (24, 7),
    "biases": (24,),
    "groups": (60, 6),
    "experts": (4, 10, 8),
    "scale": (9,),
    "mixed": (14, 5),
}
STORED = {
    "embed": (50, 24),
    "q": (40, 24),
    "k": (40, 24),
    "v": (40, 24),
    "o": (24, 40),
    "t": (24, 30),
    "turned": (24, 7),
    "biases": (24,),
    "groups": (60, 6),
    "experts": (4, 8, 10),
    "scale": (1,),
    "even": (7, 5),
    "odd": (7, 5),
}


def save(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str) -> dict[str, Any]:
    import torch
    from safetensors.torch import save_file

    dice = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(shape, generator=dice).to(getattr(torch, dtype))
        for name, shape in shapes.items()
    }
    save_file(tensors, path)
    return tensors


def written(
    path: Path, model: Any, after: Callable[[Any], None] = lambda model: None
) -> tuple[Any, bytes]:
    """The layout that a toy gets, and its image, made from the file; `after` follows loading."""
    from appliance.engines.vllm.weights import parameters
    from appliance.engines.vllm.weights.loading import CheckpointImage
    from appliance.engines.vllm.weights.recipe import RecipeRecording

    files = [read_header(path)]
    recording = RecipeRecording(files)
    recording.load(model)
    with recording.recorder:
        after(model)
    made_of = recording.ingredients(model)
    layout = parameters.plan(model, made_of, {})
    write = CheckpointImage(files, layout, made_of, {}, cpus=process_cpus(), verify=False)
    slabs = layout.slabs(4096)
    tier = HostTier.create(slabs * 4096)
    try:
        tier.view(0, tier.nbytes)[:] = b"\xff" * tier.nbytes
        # In descending order, so that no slab continues another.
        image = Image([tier.address(slab * 4096, 4096) for slab in reversed(range(slabs))], 4096)
        transfer = Transfer(TransferKind.WEIGHTS, "toy", layout.nbytes, 0.0)
        write(transfer, image)
        assert transfer.landed == layout.nbytes
        return layout, b"".join(bytes(view) for view in image.views(0, layout.nbytes))
    finally:
        tier.close()


@pytest.mark.parametrize("piece_bytes", [64, 1000, 4 << 20])
@pytest.mark.parametrize(
    ("stored", "computed"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("float64", "float16"),
    ],
)
def test_a_recipe_writes_what_the_loader_would(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: str,
    computed: str,
    piece_bytes: int,
) -> None:
    """Fused, narrowed, transposed, padded, broadcast, interleaved, converted: the same bytes."""
    import torch

    from appliance.engines.vllm.weights import loading

    monkeypatch.setattr(loading, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(loading, "READ_BYTES", piece_bytes)
    file = tmp_path / "model.safetensors"
    tensors = save(file, STORED, stored)
    expected, model = toy(FUSED, fused, computed), toy(FUSED, fused, computed)
    expected.load_weights(tensors.items())

    layout, image = written(file, model)

    assert [tensor.name for tensor in layout.tensors] == list(FUSED)
    for tensor, offset in zip(layout.tensors, layout.offsets, strict=True):
        found = image[offset : offset + tensor.nbytes]
        wanted = getattr(expected, tensor.name).detach().contiguous().view(torch.uint8)
        assert found == wanted.numpy().tobytes(), tensor.name
    # And the parameters themselves were not touched.
    assert all((parameter == 77).all() for parameter in model.parameters())


def test_rearranged_rows_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole heads, and a transposed expert in parts: a buffer is never as large as a tensor."""
    from appliance.engines.vllm.weights import loading

    monkeypatch.setattr(loading, "PIECE_BYTES", 64)
    monkeypatch.setattr(loading, "READ_BYTES", 400)
    sizes: dict[str, list[int]] = {}
    buffer = loading._Bench._buffer

    def noted(bench: Any, use: str, nbytes: int) -> Any:
        sizes.setdefault(use, []).append(nbytes)
        return buffer(bench, use, nbytes)

    monkeypatch.setattr(loading._Bench, "_buffer", noted)
    names = ("turned", "experts")
    save(tmp_path / "model.safetensors", {name: STORED[name] for name in names}, "float32")

    written(tmp_path / "model.safetensors", toy({n: FUSED[n] for n in names}, fused, "float32"))

    head, expert = 8 * 7 * 4, 10 * 8 * 4
    assert set(sizes["plain"]) == {head, expert}
    assert max(sizes["raw"]) <= 400


def test_no_model_takes_less_than_is_known_before(
    house: House, checkpoints: dict[str, str]
) -> None:
    """What a configuration refuses for its size, no engine could have served; and there is hardly
    more to it than that."""
    devices = Devices(kind="cpu", memory_bytes=Memory(POOL_SLABS * SLAB), slab_bytes=Bytes(SLAB))
    for name, path in checkpoints.items():
        engine = house.engines[name]
        entry = read_checkpoint(name, Path(path), MODELS[name][1])

        known = least(entry, 1000, devices)

        assert known.kv == engine.kv.slabs(engine.kv.prompt_blocks(1000))
        assert known.weights <= engine.weight_slabs <= known.weights + 1
        assert entry.weight_bytes <= engine._placed.weights.layout.nbytes


def test_tied_parameters_are_stored_once(tmp_path: Path) -> None:
    """Two names of one storage, and one of them is in the file."""
    import torch

    def load(model: Any, name: str, tensor: Any) -> None:
        model.a.data.copy_(tensor)

    model = toy({"a": (8, 4), "b": (8, 4)}, load, "float32")
    model.b = model.a
    tensors = save(tmp_path / "model.safetensors", {"a": (8, 4)}, "float32")
    layout, image = written(tmp_path / "model.safetensors", model)
    assert [tensor.name for tensor in layout.tensors] == ["a"]
    assert image == tensors["a"].view(torch.uint8).numpy().tobytes()


def add_one(model: Any, name: str, tensor: Any) -> None:
    model.w.data.copy_(tensor + 1)


def look(model: Any, name: str, tensor: Any) -> None:
    if tensor.sum() > 0:
        model.w.data.copy_(tensor)


def scale_in_place(model: Any, name: str, tensor: Any) -> None:
    model.w.data.copy_(tensor)
    model.w.data.mul_(2)


def keep_aside(model: Any, name: str, tensor: Any) -> None:
    import torch

    torch.empty(tensor.shape).copy_(tensor)


def from_nowhere(model: Any, name: str, tensor: Any) -> None:
    import torch

    model.w.data.copy_(torch.ones(8, 4))


def changed_zeros(model: Any, name: str, tensor: Any) -> None:
    import torch

    model.w.data.copy_(torch.zeros(8, 4).add_(1))


def half(model: Any, name: str, tensor: Any) -> None:
    model.w.data[:4].copy_(tensor[:4])


def twice(model: Any, name: str, tensor: Any) -> None:
    model.w.data.copy_(tensor)
    model.w.data[:1].copy_(tensor[:1])


def interleaved_twice(model: Any, name: str, tensor: Any) -> None:
    model.w.data[:, ::2].copy_(tensor[:, ::2])
    model.w.data[:, ::2].copy_(tensor[:, 1::2])


def part_of_a_head(model: Any, name: str, tensor: Any) -> None:
    turned = tensor.view(2, 2, 2, 4).transpose(1, 2).reshape(8, 4)
    model.w.data[:2].copy_(turned[:2])


def columns_of_turned(model: Any, name: str, tensor: Any) -> None:
    turned = tensor.view(2, 2, 2, 4).transpose(1, 2).reshape(8, 4)
    model.w.data[:, :2].copy_(turned[:, :2])


def add_to_turned(model: Any, name: str, tensor: Any) -> None:
    model.w.data.copy_(tensor.view(2, 2, 2, 4).transpose(1, 2).reshape(8, 4) + 1)


def beside_each_other(model: Any, name: str, tensor: Any) -> None:
    import torch

    model.w.data.copy_(torch.cat([tensor[:, :2], tensor[:, 2:]], 1))


def not_at_all(model: Any, name: str, tensor: Any) -> None:
    pass


def wrong_shape(model: Any, name: str, tensor: Any) -> None:
    assert tensor.shape == (9, 9), "not this one"


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (add_one, r"aten\.add\.Tensor with stored while loading"),
        (look, r"aten\.sum\.default with stored"),
        (scale_in_place, r"aten\.mul_\.Tensor with the parameter w"),
        (keep_aside, "keeps stored outside"),
        (from_nowhere, "a copy with the parameter w"),
        (changed_zeros, "a copy with the parameter w"),
        (half, "for w do not write each of its elements once"),
        (twice, "for w do not write each of its elements once"),
        (interleaved_twice, "for w do not write each of its elements once"),
        (part_of_a_head, "a part of a rearranged row with stored"),
        (columns_of_turned, "a part of a rearranged copy with stored"),
        (add_to_turned, r"aten\.add\.Tensor with stored while loading"),
        (beside_each_other, "a concatenation with stored"),
        (not_at_all, "no tensor for w"),
        (wrong_shape, r"stored \[8, 4\] of .*model\.safetensors does not fit Toy: not this one"),
    ],
)
def test_what_is_not_copying_is_refused(
    tmp_path: Path, load: Callable[..., None], reason: str
) -> None:
    """The error names the tensor or the parameter, and the operation."""
    from appliance.engines.vllm.weights.recipe import UnsupportedCheckpoint

    save(tmp_path / "model.safetensors", {"stored": (8, 4)}, "float32")
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        written(tmp_path / "model.safetensors", toy({"w": (8, 4)}, load, "float32"))


def replace_it(model: Any) -> None:
    import torch

    model.w = torch.nn.Parameter(torch.zeros(8, 4))


def double_it(model: Any) -> None:
    model.w.data.mul_(2)


def keep_a_result(model: Any) -> None:
    model.kept = -model.w.data


def turn_it(model: Any) -> None:
    model.w.data = model.w.data.t().contiguous()


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (replace_it, "vLLM rearranges w"),
        (keep_a_result, "keeps what vLLM computes with its weights"),
        (double_it, r"aten\.mul_\.Tensor with the parameter w"),
        (turn_it, r"aten\.clone\.default with the parameter w"),
    ],
)
def test_a_parameter_changed_after_loading_is_refused(
    tmp_path: Path, after: Callable[[Any], None], reason: str
) -> None:
    """Its recipe would be that of another one: vLLM computes with some weights of some models."""
    from appliance.engines.vllm.weights.recipe import UnsupportedCheckpoint

    def load(model: Any, name: str, tensor: Any) -> None:
        model.w.data.copy_(tensor)

    save(tmp_path / "model.safetensors", {"w": (8, 4)}, "float32")
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        written(tmp_path / "model.safetensors", toy({"w": (8, 4)}, load, "float32"), after)


def test_zeros_that_vllm_makes_need_no_file(tmp_path: Path) -> None:
    """Whisper's keys have no bias in one, and are added one."""
    import torch

    def load(model: Any, name: str, tensor: Any) -> None:
        model.w.data[:8].copy_(tensor)
        model.w.data[8:].copy_(torch.zeros(8)[:4])

    tensors = save(tmp_path / "model.safetensors", {"w": (8, 4)}, "float32")
    _, image = written(tmp_path / "model.safetensors", toy({"w": (10, 4)}, load, "float32"))
    assert image == tensors["w"].view(torch.uint8).numpy().tobytes() + bytes(2 * 4 * 4)


def test_copying_a_parameter_to_itself_is_nothing(tmp_path: Path) -> None:
    """vLLM does that where another device would need padding."""
    import torch

    def load(model: Any, name: str, tensor: Any) -> None:
        model.w.data.copy_(tensor)

    def after(model: Any) -> None:
        model.w.data.copy_(model.w.data)

    tensors = save(tmp_path / "model.safetensors", {"w": (8, 4)}, "float32")
    _, image = written(tmp_path / "model.safetensors", toy({"w": (8, 4)}, load, "float32"), after)
    assert image == tensors["w"].view(torch.uint8).numpy().tobytes()


# --- engines: what is in the host tier, and when the files are read ------------------------------


def image_of(house: House, model: str) -> dict[str, bytes]:
    """The bytes of every stored tensor, from the host tier."""
    layout = house.engines[model]._placed.weights.layout
    raw = b"".join(bytes(house.host.view(place, SLAB)) for place in house.images[model])
    places = zip(layout.tensors, layout.offsets, strict=True)
    return {t.name: raw[offset : offset + t.nbytes] for t, offset in places}


def expected_image(engine: Any, path: str, dtype: str) -> dict[str, bytes]:
    """The same, made from the checkpoint's tensors in the plainest way."""
    import torch
    from safetensors.torch import load_file

    from appliance.engines.vllm.weights import packed

    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    stored = load_file(Path(path) / "model.safetensors")
    stored.setdefault("lm_head.weight", stored["model.embed_tokens.weight"])
    made = {}
    for name in (tensor.name for tensor in engine._placed.weights.layout.tensors):
        owner, _, kind = name.rpartition(".")
        before, _, last = owner.rpartition(".")
        names = [f"{before}.{part}.{kind}" for part in parts.get(last, ())] or [name]
        tensor = torch.cat([stored[one] for one in names]).to(getattr(torch, dtype))
        if name in engine._placed.packings:
            with packed._reordered(tensor) as (data, _):
                made[name] = data.numpy().tobytes()
        else:
            made[name] = tensor.view(torch.uint8).numpy().tobytes()
    return made


@pytest.mark.parametrize("model", MODELS)
def test_the_image_is_the_checkpoint(house: House, checkpoints: dict[str, str], model: str) -> None:
    """Every stored tensor, byte for byte, packed or not, tied head included."""
    expected = expected_image(house.engines[model], checkpoints[model], MODELS[model][1])
    assert image_of(house, model) == expected


@pytest.fixture
def own(
    tmp_path: Path, checkpoints: dict[str, str]
) -> Iterator[Callable[..., tuple[House, Any, Path]]]:
    """Builds an engine over a copy of a checkpoint, to be damaged, in a house of its own."""
    houses: list[House] = []

    def build(model: str, **options: Any) -> tuple[House, Any, Path]:
        from appliance.engines.vllm.engine import VllmEngine

        path = Path(shutil.copytree(checkpoints[model], tmp_path / model))
        house = make_house()
        houses.append(house)
        settings = {"dtype": MODELS[model][1], "max_context": 1024, "max_batch": 16, **options}
        engine = VllmEngine.build(
            model, str(path), arena=house.arena, host=house.host, swapper=house.swapper, **settings
        )
        house.engines[model] = engine
        house.images[model] = house.places(engine.host_slabs, SLAB)
        return house, engine, path / "model.safetensors"

    yield build
    for house in houses:
        house.idle()


@pytest.mark.parametrize(("model", "dtype"), [("llama-bf16", "float32"), ("qwen2-gqa", "bfloat16")])
def test_types_are_converted_as_they_are_read(own: Any, model: str, dtype: str) -> None:
    """A checkpoint served in another type than it is stored in; the tied head, too."""
    house, engine, file = own(model, dtype=dtype)
    engine.store_weights(house.images[model], fill=True)
    expected = expected_image(engine, str(file.parent), dtype)
    assert image_of(house, model) == expected


def test_a_head_with_the_embedding_counts(own: Any, checkpoints: dict[str, str]) -> None:
    """A config may call a head tied that the checkpoint has: then the checkpoint is right."""
    from safetensors.torch import load_file, save_file

    file = Path(checkpoints["qwen2-gqa"]) / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    house, engine, copied = own("qwen3-128")
    shutil.copytree(file.parent, copied.parent.with_name("untied"))
    untied = copied.parent.with_name("untied") / "model.safetensors"
    save_file(tensors, untied)

    from appliance.engines.vllm.engine import VllmEngine

    engine = VllmEngine.build(
        "untied", str(untied.parent), dtype="float32", max_context=256, max_batch=4,
        arena=house.arena, host=house.host, swapper=house.swapper,
    )  # fmt: skip
    house.engines["untied"] = engine
    house.images["untied"] = house.places(engine.host_slabs, SLAB)
    entry = read_checkpoint("untied", untied.parent, "float32")
    assert 0 <= engine._placed.weights.layout.nbytes - entry.weight_bytes < SLAB
    engine.store_weights(house.images["untied"], fill=True)
    expected = expected_image(engine, str(untied.parent), "float32")
    assert image_of(house, "untied") == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_packed_as_they_are_read(tmp_path: Path, dtype: str) -> None:
    """vLLM packs a mixture's experts after loading them; that is noted, and done with the reads."""
    import torch
    import vllm._custom_ops

    def load(model: Any, name: str, tensor: Any) -> None:
        expert, part = int(name[1]), slice(0, 32) if name[0] == "a" else slice(32, 64)
        model.experts.data[expert, part].copy_(tensor)

    def prepack(model: Any) -> None:
        packed = vllm._custom_ops.cpu_prepack_moe_weight(model.experts, "vec")
        model.experts = torch.nn.Parameter(packed, requires_grad=False)

    shapes = {f"{part}{expert}": (32, 96) for expert in range(5) for part in "ab"}
    tensors = save(tmp_path / "model.safetensors", shapes, dtype)
    expected = toy({"experts": (5, 64, 96)}, load, dtype)
    expected.load_weights(tensors.items())
    prepack(expected)

    model = toy({"experts": (5, 64, 96)}, load, dtype)
    layout, image = written(tmp_path / "model.safetensors", model, prepack)

    assert image == expected.experts.detach().view(torch.uint8).numpy().tobytes()
    assert layout.tensors[0].packing == "experts vec"


def exp_of_tensor(model: Any, name: str, tensor: Any) -> None:
    """As Mamba's first version does it."""
    import torch

    model.w.data.copy_((-torch.exp(tensor.float()))[2:6])


def exp_of_parameter(model: Any, name: str, tensor: Any) -> None:
    """As its second version does it."""
    import torch

    model.w.data.copy_(tensor[2:6])
    model.w.data.copy_(-torch.exp(model.w.float()))


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("load", [exp_of_tensor, exp_of_parameter])
def test_rates_of_decay_are_computed_as_they_are_read(
    tmp_path: Path, load: Callable[..., None], stored: str
) -> None:
    """The one computation that is noted: ``-exp(x)`` of each number."""
    import torch

    tensors = save(tmp_path / "model.safetensors", {"stored": (8, 4)}, stored)
    _, image = written(tmp_path / "model.safetensors", toy({"w": (4, 4)}, load, "float32"))
    expected = -torch.exp(tensors["stored"].float()[2:6])
    assert image == expected.contiguous().view(torch.uint8).numpy().tobytes()


def as_float32(model: Any, name: str, tensor: Any) -> None:
    """As MiniMax-M2 does it with the bias of its experts."""
    model.w.data.copy_(tensor.float()[2:6])


def made_while_loading(model: Any, name: str, tensor: Any) -> None:
    """As vLLM does it with the bias of Phi-2's head."""
    import torch

    del model.w
    model.w = torch.nn.Parameter(torch.empty(4, 4), requires_grad=False)
    model.w.data.copy_(tensor[2:6])


def into_a_buffer(model: Any, name: str, tensor: Any) -> None:
    """As vLLM does it with what Apertus computes its activation with."""
    import torch

    del model.w
    model.register_buffer("w", torch.empty(4, 4))
    model.w.copy_(tensor[2:6])


@pytest.mark.parametrize("load", [as_float32, made_while_loading, into_a_buffer])
def test_less_usual_copies_are_read(tmp_path: Path, load: Callable[..., None]) -> None:
    """Numbers of bfloat16, changed to float32 before or as they are copied."""
    import torch

    tensors = save(tmp_path / "model.safetensors", {"stored": (8, 4)}, "bfloat16")
    layout, image = written(tmp_path / "model.safetensors", toy({"w": (4, 4)}, load, "float32"))
    assert [tensor.name for tensor in layout.tensors] == ["w"]
    expected = tensors["stored"].float()[2:6]
    assert image == expected.contiguous().view(torch.uint8).numpy().tobytes()


def exp_only(model: Any, name: str, tensor: Any) -> None:
    import torch

    model.w.data.copy_(torch.exp(tensor.float()))


def exp_twice(model: Any, name: str, tensor: Any) -> None:
    import torch

    model.w.data.copy_(tensor)
    model.w.data.copy_(-torch.exp(model.w.float()))
    model.w.data.copy_(-torch.exp(model.w.float()))


def exp_of_a_part(model: Any, name: str, tensor: Any) -> None:
    import torch

    model.w.data.copy_(-torch.exp(tensor[:1].float()).expand(8, 4))


def exp_of_a_turned_one(model: Any, name: str, tensor: Any) -> None:
    import torch

    model.w.data.view(4, 8).copy_(-torch.exp(tensor.t().float()))


def exp_of_an_expanded_one(model: Any, name: str, tensor: Any) -> None:
    import torch

    model.w.data.copy_(-torch.exp(tensor[:1].expand(8, 4).float()))


def exp_moved(model: Any, name: str, tensor: Any) -> None:
    import torch

    model.w.data.copy_(tensor)
    model.w.data[:4].copy_((-torch.exp(model.w.float()))[4:])


@pytest.mark.parametrize(
    "load",
    [
        exp_only,
        exp_twice,
        exp_of_a_part,
        exp_of_a_turned_one,
        exp_of_an_expanded_one,
        exp_moved,
    ],
)
def test_no_other_computation_is_noted(tmp_path: Path, load: Callable[..., None]) -> None:
    from appliance.engines.vllm.weights.recipe import UnsupportedCheckpoint

    save(tmp_path / "model.safetensors", {"stored": (8, 4)}, "float32")
    with pytest.raises(UnsupportedCheckpoint, match=r"exp|decay rates|a part of it"):
        written(tmp_path / "model.safetensors", toy({"w": (8, 4)}, load, "float32"))


@pytest.mark.skipif(
    not computes_linear_attention(), reason="vLLM packs no convolution without avx512_bf16"
)
def test_convolutions_are_packed_as_they_are_read(tmp_path: Path) -> None:
    import torch
    import vllm._custom_ops

    def load(model: Any, name: str, tensor: Any) -> None:
        model.conv.data.copy_(tensor)

    def pack(model: Any) -> None:
        plain = model.conv.view(64, 4).contiguous().clone()
        model.conv.data = vllm._custom_ops.causal_conv1d_weight_pack(plain)

    tensors = save(tmp_path / "model.safetensors", {"conv": (64, 1, 4)}, "bfloat16")
    model = toy({"conv": (64, 1, 4)}, load, "bfloat16")
    layout, image = written(tmp_path / "model.safetensors", model, pack)

    expected = vllm._custom_ops.causal_conv1d_weight_pack(tensors["conv"].view(64, 4))
    assert image == expected.view(torch.uint8).numpy().tobytes()
    assert layout.tensors[0].packing == "convolution"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_pack_alike_alone_and_together(dtype: str) -> None:
    """So an expert can be packed as soon as it is read."""
    import torch
    import vllm._custom_ops

    from appliance.engines.vllm.weights.experts import ExpertPacking
    from appliance.engines.vllm.weights.tensors import bytes_at

    weight = torch.randn(5, 64, 128).to(getattr(torch, dtype))
    whole = vllm._custom_ops.cpu_prepack_moe_weight(weight, "vec").view(torch.uint8).flatten()
    packing = ExpertPacking(tuple(weight.shape), weight.dtype, "vec")
    pieces: list[Any] = []
    for expert in weight:
        packing.pack(expert, lambda a, n: pieces.append(bytes_at(a, n).clone()))
    assert torch.equal(torch.cat(pieces), whole)
    assert packing.nbytes == whole.nbytes == 5 * packing.piece_bytes


def test_a_build_reads_headers_only(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one tensor is read, neither by us nor by vLLM, before the weights are stored."""
    from appliance.checkpoints.safetensors import WeightFile

    reads: list[int] = []
    read_into = WeightFile.read_into

    def counted(self: Any, fd: int, buffers: Any, offset: int) -> None:
        reads.append(offset)
        read_into(self, fd, buffers, offset)

    monkeypatch.setattr(WeightFile, "read_into", counted)
    opened: list[str] = []
    import safetensors.torch
    import vllm.model_executor.model_loader.weight_utils as weight_utils

    def opening(*args: Any, **kwargs: Any) -> Any:
        opened.append(str(args))
        raise AssertionError("vLLM opens a file of weights")

    monkeypatch.setattr(weight_utils, "safe_open", opening)
    monkeypatch.setattr(safetensors.torch, "load_file", opening)
    house, engine, _ = own("llama-96")
    assert not reads
    assert not opened
    engine.store_weights(house.images["llama-96"], fill=True)
    assert reads


def outputs(engine: Any, *, name: str = "r") -> list[Produced]:
    """A greedy answer with its logprobs, which tell one bit of the weights from another."""
    engine.add(sequence(engine.model, name, PROMPT, GREEDY))
    produced = list(engine.prefill(name, 40))
    while engine.knows(name):
        produced += engine.step([name], 40)
    engine.trim(0)  # the next one finds nothing cached, and says so
    return produced


@pytest.fixture(scope="module")
def expected(_house: House) -> dict[str, list[Produced]]:
    """What each model answers when its weights are all there."""
    answers = {}
    for model, engine in _house.engines.items():
        engine.begin_load().wait()
        answers[model] = outputs(engine)
        engine.evict_weights()
    return answers


@pytest.mark.parametrize("model", MODELS)
def test_streamed_from_the_files(
    house: House, expected: dict[str, list[Produced]], model: str
) -> None:
    """Without an image, a load brings the same bytes; with one elsewhere, again the same."""
    engine = house.engines[model]
    engine.store_weights((), fill=False)
    engine.begin_load()
    assert outputs(engine) == expected[model]
    engine.evict_weights()
    house.images[model] = house.places(engine.host_slabs, SLAB)
    engine.store_weights(house.images[model], fill=True)
    engine.begin_load()
    assert outputs(engine) == expected[model]


# --- files that are not what they were -----------------------------------------------------------


def test_a_replaced_file_fails_the_load_and_nothing_else(
    own: Any, expected: dict[str, list[Produced]]
) -> None:
    """The step raises, the request can be forgotten, the engine evicted; put back, it serves."""
    _, engine, file = own("llama-96")
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    engine.store_weights((), fill=False)
    kept = file.rename(file.with_suffix(".kept"))
    shutil.copy(kept, file)

    engine.add(sequence("llama-96", "r", PROMPT, GREEDY))
    transfer = engine.begin_load()
    with pytest.raises(TransferFailed, match="replaced while it was served: restart") as caught:
        engine.prefill("r", 40)
    assert isinstance(caught.value.__cause__, CheckpointError)
    assert transfer.error is caught.value
    engine.forget("r")
    engine.evict_weights()
    with pytest.raises(CheckpointError, match="replaced while it was served"):
        engine.store_weights(own_places(engine), fill=True)

    kept.rename(file)
    os.utime(file, ns=times)
    engine.begin_load()
    assert outputs(engine) == expected["llama-96"]


def own_places(engine: Any) -> list[int]:
    return [slab * SLAB for slab in range(engine.host_slabs)]


def test_a_truncated_file_is_named(own: Any) -> None:
    """Before the engine is built, when its image is filled, and when it is streamed."""
    house, engine, file = own("llama-96")
    os.truncate(file, file.stat().st_size - 1000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        engine.store_weights(house.images["llama-96"], fill=True)
    with pytest.raises(TransferFailed, match=r"model\.safetensors is truncated"):
        engine.begin_load().wait()
    engine.evict_weights()

    from appliance.engines.vllm.engine import VllmEngine

    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        VllmEngine.build(
            "again", str(file.parent), dtype="float32", max_context=256, max_batch=4,
            arena=house.arena, host=house.host, swapper=house.swapper,
        )  # fmt: skip


def test_checksums_are_compared_once(own: Any) -> None:
    """The first fill reads the list; a wrong sum fails it, and a right one is not asked again."""
    house, engine, file = own("llama-96", verify=True)
    sums = file.parent / "SHA256SUMS"
    sums.write_text(f"{'0' * 64}  model.safetensors\n")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is corrupt: its SHA-256"):
        engine.store_weights(house.images["llama-96"], fill=True)
    sums.write_text(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  model.safetensors\n")
    engine.store_weights(house.images["llama-96"], fill=True)
    sums.write_text(f"{'0' * 64}  model.safetensors\n")
    engine.store_weights(house.images["llama-96"], fill=True)


def test_an_evicted_stream_stops_reading(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most the pieces under way are read to their end; the thread that waits gets the error."""
    _, engine, _ = own("llama-mha")
    engine.store_weights((), fill=False)
    reading, go_on = threading.Event(), threading.Event()
    preadv, reads = os.preadv, []

    def held(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            return preadv(fd, buffers, offset, flags)
        reads.append(offset)
        reading.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", held)
    transfer = engine.begin_load()
    assert reading.wait(PATIENCE_SECONDS)
    transfer.cancel()
    go_on.set()
    engine.evict_weights()
    assert len(reads) <= os.cpu_count() * 2
    with pytest.raises(TransferCancelled):
        transfer.wait()


# --- layers that are waited for ------------------------------------------------------------------


class Held:
    """Brings an engine's image to its region in portions, each when it is told to."""

    def __init__(self, content: bytes, ends: list[int]) -> None:
        self.told = [threading.Event() for _ in ends]
        self.error: Exception | None = None
        self._content = ctypes.create_string_buffer(content, len(content))
        self._ends = ends

    def __call__(self, transfer: Transfer, image: Image) -> None:
        start = 0
        for number, (end, told) in enumerate(zip(self._ends, self.told, strict=True)):
            assert told.wait(PATIENCE_SECONDS), "the loader was not told to go on"
            if self.error is not None and number == 2:
                raise self.error
            if transfer.cancelled:
                raise TransferCancelled("the test is over")
            image.put(start, ctypes.addressof(self._content) + start, end - start)
            transfer.land(end - start)
            start = end

    def release(self) -> None:
        for told in self.told:
            told.set()


def poison(house: House) -> None:
    """Fill every free slab with NaN: 0xFF in all floating point types."""
    region = house.arena.reserve("poison", house.arena.free)
    region.map(range(region.slots))
    mapping.view(region.address, region.slots * SLAB)[:] = b"\xff" * (region.slots * SLAB)
    region.release()


@pytest.fixture
def held(house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Held]]:
    """An engine over poisoned memory whose load brings a portion per gate."""
    model = "llama-mha"
    engine = house.engines[model]
    raw = b"".join(bytes(house.host.view(place, SLAB)) for place in house.images[model])
    ends = [gate.end for gate in engine._gates._gates]
    assert ends == sorted(ends)
    loader = Held(raw[: engine._placed.weights.layout.nbytes], ends)
    engine.store_weights((), fill=False)
    monkeypatch.setattr(engine._placed.weights, "_write", loader)
    poison(house)
    yield engine, loader
    loader.release()
    if engine.knows("r"):
        engine.forget("r")
    engine.evict_weights()
    engine.trim()
    engine.store_weights(house.images[model], fill=False)


def test_gates_are_in_the_order_of_the_pass(house: House) -> None:
    """Embedding, layers, norm, logits: what lands first is computed first."""
    for engine in house.engines.values():
        names = [gate.name for gate in engine._gates._gates]
        layers = [name for name in names if ".layers." in name]
        assert names == ["model.embed_tokens", *layers, "model.norm", "logits_processor"]
        assert len(layers) == engine._cache.pool.geometry.layers
        ends = [gate.end for gate in engine._gates._gates]
        assert ends == sorted(ends)
        assert ends[-1] == engine._placed.weights.layout.nbytes


def test_a_pass_overtakes_the_load_layer_by_layer(
    held: tuple[Any, Held], expected: dict[str, list[Produced]]
) -> None:
    """A module computes when its own bytes were let go, though those behind are not there yet."""
    engine, loader = held
    gates = engine._gates._gates
    log: list[tuple[str, int]] = []
    done = [threading.Event() for _ in gates]

    def computed(number: int) -> Callable[..., None]:
        def note(*args: object) -> None:
            if not done[number].is_set():
                log.append(("computed", number))
                done[number].set()

        return note

    handles = [
        gate.module.register_forward_hook(computed(number)) for number, gate in enumerate(gates)
    ]

    def tell() -> None:
        for number, told in enumerate(loader.told):
            # All before have computed: they did not wait for this one's bytes.
            if number and not done[number - 1].wait(PATIENCE_SECONDS):
                return
            log.append(("told", number))
            told.set()

    teller = threading.Thread(target=tell)
    transfer = engine.begin_load()
    teller.start()
    found = outputs(engine)
    teller.join(PATIENCE_SECONDS)
    for handle in handles:
        handle.remove()

    assert found == expected["llama-mha"]
    assert log == [(what, n) for n in range(len(gates)) for what in ("told", "computed")]
    transfer.wait()
    assert not any(gate.module._forward_pre_hooks for gate in gates)


def test_without_gates_poison_shows(
    held: tuple[Any, Held],
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, list[Produced]],
) -> None:
    """The poison of these tests is seen: a pass that does not wait computes with it."""
    from appliance.engines.vllm.gates import Gates

    engine, _ = held
    monkeypatch.setattr(Gates, "holding", lambda self, transfer: nullcontext())
    engine.begin_load()
    assert outputs(engine) != expected["llama-mha"]


def test_a_load_in_small_portions_changes_nothing(
    held: tuple[Any, Held], expected: dict[str, list[Produced]]
) -> None:
    """All told in advance, the pass runs into a load that is under way anywhere."""
    engine, loader = held
    loader.release()
    engine.begin_load()
    assert outputs(engine) == expected["llama-mha"]


def test_decoding_waits_as_well(
    held: tuple[Any, Held], house: House, expected: dict[str, list[Produced]]
) -> None:
    """A step on KV that came back before the weights did is held back like a prefill."""
    engine, loader = held
    engine.store_weights(house.images["llama-mha"], fill=False)
    engine.begin_load().wait()
    engine.add(sequence("llama-mha", "r", PROMPT, GREEDY))
    produced = list(engine.prefill("r", 40))
    engine.evict_weights()
    engine.store_weights((), fill=False)
    transfer = engine.begin_load()
    second = engine._gates._gates[1].module
    handle = second.register_forward_pre_hook(lambda *args: loader.release())
    loader.told[0].set()
    produced += engine.step(["r"], 40)
    handle.remove()
    transfer.wait()
    while engine.knows("r"):
        produced += engine.step(["r"], 40)
    assert produced == expected["llama-mha"]


def test_an_error_amid_a_pass(
    held: tuple[Any, Held], house: House, expected: dict[str, list[Produced]]
) -> None:
    """A pass that waits for a layer that never comes raises why; the engine's books are right."""
    engine, loader = held
    loader.error = CheckpointError("model.safetensors cannot be read: EIO")
    module = engine._gates._gates[2].module
    handle = module.register_forward_pre_hook(lambda *args: loader.release())
    loader.told[0].set()
    loader.told[1].set()
    engine.add(sequence("llama-mha", "r", PROMPT, GREEDY))
    engine.begin_load()
    with pytest.raises(TransferFailed, match="EIO") as caught:
        engine.prefill("r", 40)
    handle.remove()
    assert caught.value.__cause__ is loader.error
    with pytest.raises(TransferFailed, match="EIO"):
        engine.prefill("r", 40)

    engine.evict_weights()
    engine.store_weights(house.images["llama-mha"], fill=False)
    engine.begin_load()
    # Nothing is known as computed that is not: the request can be computed after all.
    assert engine.prefill("r", 40) == expected["llama-mha"][:1]
    engine.forget("r")
    engine.trim(0)
    assert outputs(engine) == expected["llama-mha"]


def test_a_module_that_is_not_called_is_noticed(house: House) -> None:
    """Weights that a pass reads past their gate may not have been there."""
    from appliance.engines.vllm.seams import SeamMoved

    engine = house.engines["llama-mha"]
    nbytes = engine._placed.weights.layout.nbytes
    transfer = Transfer(TransferKind.WEIGHTS, "all landed, not over", nbytes, 0.0)
    transfer.land(nbytes)
    with pytest.raises(SeamMoved, match=r"model\.norm"):
        with engine._gates.holding(transfer):
            pass  # a pass that calls no module at all
