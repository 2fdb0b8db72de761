"""What is read of LoRA adapters: those that fit, what they take, and why others are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from appliance.checkpoints.adapters import (
    AdapterPlace,
    AdapterRoom,
    AdapterStacks,
    UnsupportedAdapter,
    adapter_version,
    read_adapters,
)
from appliance.checkpoints.model_config import read_model_config
from appliance.cli.main import cli
from appliance.config.loader import load_config
from appliance.config.sizing import adapter_places, read_model
from appliance.errors import CheckpointError, ConfigError
from appliance.vocabulary import Task
from tests.engine.quantizing import (
    awq_config,
    gptq_config,
    modelopt_config,
    w4a16_config,
    w8a8_config,
)

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
BASE = {Q: (16, 8), DOWN: (8, 24), "lm_head": (32, 8), "model.embed_tokens": (32, 8)}
"""[out, in] of the base's layers."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base(tmp_path / "base")


def make_base(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 32,
        "max_position_embeddings": 64,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in BASE.items()}
    weights["model.norm.weight"] = np.zeros(8, np.float32)
    save_file(weights, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def make(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    name: str = "one",
    slot: int = 0,
    **said: Any,
) -> AdapterPlace:
    """An adapter with tensors of these shapes, by name."""
    path = folder / name
    path.mkdir()
    arrays = {tensor: np.zeros(shape, np.float32) for tensor, shape in shapes.items()}
    save_file(arrays, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **said}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return AdapterPlace(name, str(path), slot)


def pair(layer: str, rank: int = 4) -> dict[str, tuple[int, ...]]:
    rows, columns = BASE[layer]
    names = (f"base_model.model.{layer}.lora_{part}.weight" for part in "AB")
    return dict(zip(names, ((rank, columns), (rows, rank)), strict=True))


def test_what_an_adapter_says(tmp_path: Path, base: Path) -> None:
    """Each layer has its rank, and is scaled as PEFT does: patterns are ends of names."""
    places = [
        make(tmp_path, pair(Q), "plain"),
        make(
            tmp_path,
            {**pair(Q), **pair(DOWN, 16)},
            "patterns",
            slot=1,
            rank_pattern={"down_proj": 16},
            alpha_pattern={"mlp.down_proj": 2, "wn_proj": 5},
            use_rslora=True,
        ),
    ]

    plain, patterns = read_adapters(places, read_model_config(base))

    assert {name: (one.rank, one.scale) for name, one in plain.layers.items()} == {Q: (4, 2.0)}
    assert {name: (one.rank, one.scale) for name, one in patterns.layers.items()} == {
        Q: (4, 4.0),
        DOWN: (16, 0.5),
    }
    # Both have a place in both layers, of the larger rank.
    stacks = AdapterStacks.plan([plain, patterns], read_model_config(base), None)
    assert stacks.nbytes(2) == 2 * 2 * (4 * (16 + 8) + 16 * (8 + 24))


def test_room_is_what_the_base_says(tmp_path: Path, base: Path) -> None:
    """So many places in every linear layer, of the largest rank, whatever adapters there are."""
    config = read_model_config(base)
    place = make(tmp_path, pair(Q), "plain", slot=2)
    (plain,) = read_adapters([place], config)
    stacks = AdapterStacks.plan([plain], config, AdapterRoom(3, 8))

    assert stacks.nbytes(2) == 2 * 3 * 8 * ((16 + 8) + (8 + 24))
    assert stacks == AdapterStacks.plan([], config, AdapterRoom(3, 8))
    with pytest.raises(UnsupportedAdapter, match=r"rank 4, more than max_lora_rank \(3\)"):
        AdapterStacks.plan([plain], config, AdapterRoom(3, 3))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"r": 257}, "r is 257; ranks from 1 to 256"),
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is True"),
        ({"r": None}, "r is None"),
        ({"lora_alpha": "8"}, "lora_alpha is '8', no number"),
        ({"lora_alpha": float("inf")}, "no finite number"),
        ({"lora_alpha": 10**400}, "no finite number"),
        ({"rank_pattern": {"q_proj": 300}}, "rank_pattern.q_proj is 300"),
        ({"rank_pattern": {".*q_proj": 3}}, "regular expression"),
        ({"alpha_pattern": [3]}, "alpha_pattern is no table"),
        ({"peft_type": "IA3"}, "peft_type is IA3"),
        ({"use_dora": True}, "DoRA is not supported"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ],
)
def test_what_an_adapter_may_not_say(
    tmp_path: Path, base: Path, said: dict[str, Any], why: str
) -> None:
    place = make(tmp_path, pair(Q), **said)

    with pytest.raises(UnsupportedAdapter) as caught:
        read_adapters([place], read_model_config(base))

    assert why in str(caught.value)
    assert "adapter_config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ({}, "has no tensors"),
        ({f"{Q}.lora_A.weight": (4, 8)}, "has lora_A alone"),
        ({**pair(Q), f"{Q}.lora_A.weight": (4, 8)}, f"has {Q}.lora_A twice"),
        ({**pair(Q), f"{Q}.lora_magnitude_vector": (16,)}, "is no lora_A or lora_B"),
        (pair("lm_head"), "lm_head is no linear layer"),
        (pair("model.embed_tokens"), "embed_tokens is no linear layer"),
        ({"a.lora_A.weight": (4, 8), "a.lora_B.weight": (8, 4)}, "a is no linear layer"),
        (pair(Q, 8), "rank 4 of a layer [16, 8] wants [4, 8] and [16, 4]"),
        ({f"{Q}.lora_A.weight": (4, 9), f"{Q}.lora_B.weight": (16, 4)}, "wants [4, 8]"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, base: Path, shapes: dict[str, tuple[int, ...]], why: str
) -> None:
    place = make(tmp_path, shapes)

    with pytest.raises(UnsupportedAdapter) as caught:
        read_adapters([place], read_model_config(base))

    assert why in str(caught.value)


def test_files_that_are_not_there_or_damaged(tmp_path: Path, base: Path) -> None:
    """No other format is read."""
    place = make(tmp_path, pair(Q))
    weights = Path(place.path, "adapter_model.safetensors")
    settings = Path(place.path, "adapter_config.json")
    config = read_model_config(base)
    for file, content, why in (
        (weights, b"\x80\x02", "is truncated"),
        (settings, b"{", "is not JSON"),
        (settings, b"[]", "is not a JSON object"),
        (settings, b" " * (1 << 21), "is larger than"),
    ):
        kept = file.read_bytes()
        file.write_bytes(content)
        with pytest.raises(UnsupportedAdapter, match=why):
            read_adapters([place], config)
        file.write_bytes(kept)
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(UnsupportedAdapter, match="save it as safetensors"):
        read_adapters([place], config)
    settings.unlink()
    with pytest.raises(UnsupportedAdapter, match=r"has no adapter_config\.json"):
        read_adapters([place], config)


@pytest.mark.parametrize(
    ("quantization", "own", "words"),
    [
        (gptq_config(32), "qweight", (1, 24)),
        (awq_config(32), "qweight", (8, 3)),
        (w4a16_config(32), "weight_packed", (24, 1)),
    ],
)
def test_layers_of_quantized_bases_have_the_shapes_of_their_weights(
    tmp_path: Path, quantization: dict[str, Any], own: str, words: tuple[int, int]
) -> None:
    """Of 24 rows and 8 columns, of which eight numbers are in a word."""
    path = make_base(tmp_path / "base", quantization_config=quantization)
    save_file({f"{DOWN}.{own}": np.zeros(words, np.int32)}, path / "model.safetensors")
    shapes = {"A": (4, 8), "B": (24, 4)}
    tensors = {f"base_model.model.{DOWN}.lora_{part}.weight": s for part, s in shapes.items()}

    (adapter,) = read_adapters([make(tmp_path, tensors)], read_model_config(path))

    assert adapter.layers[DOWN].b.shape == (24, 4)


@pytest.mark.parametrize(
    ("changes", "served", "why"),
    [
        ({"architectures": ["OPTForCausalLM"]}, {}, "adapters of OPTForCausalLM"),
        ({"quantization_config": w8a8_config()}, {}, "activations in 8 bits"),
        ({"quantization_config": gptq_config(32, bits=8)}, {}, "adapters of weights that are"),
        ({"quantization_config": modelopt_config()}, {}, "adapters of weights that are"),
        ({}, {"task": Task.EMBED}, "that pool"),
        ({}, {"ranks": 2}, "several ranks"),
        ({}, {"cuda": True}, "on the CPU only"),
    ],
)
def test_bases_that_are_served_without_adapters(
    tmp_path: Path, changes: dict[str, Any], served: dict[str, Any], why: str
) -> None:
    base = read_model_config(make_base(tmp_path / "base", **changes))
    assert read_adapters([], base, **served) == ()

    with pytest.raises(UnsupportedAdapter, match=why):
        read_adapters([make(tmp_path, pair(Q))], base, **served)


CONFIG = """\
[devices]
kind = "cpu"
memory = "4MiB"
slab = "64KiB"
host_cache = "16MiB"

[[model]]
name = "llama"
path = "base"
max_context = 64
dtype = "float32"
{adapters}
[[model]]
name = "llama:small"
path = "base"
max_context = 64
"""


def adapter(name: str, path: str = "one") -> str:
    return f'[[model.adapter]]\nname = "{name}"\npath = "{path}"\n'


def configure(folder: Path, *adapters: str) -> Path:
    file = folder / "appliance.toml"
    file.write_text(CONFIG.format(adapters="".join(adapters)))
    return file


def test_adapters_of_a_configuration(tmp_path: Path, base: Path) -> None:
    """Their paths are relative to the file, and their bytes are their base's."""
    place = make(tmp_path, pair(Q))

    config = load_config(configure(tmp_path, adapter("legal"), adapter("polite")))

    llama, other = config.models
    assert adapter_places(llama) == tuple(
        AdapterPlace(name, place.path, slot) for slot, name in enumerate(("legal", "polite"))
    )
    without, plain = read_model(other, config.devices), read_model(llama, config.devices)
    told = CliRunner().invoke(cli, ["config", "check", str(tmp_path / "appliance.toml"), "--json"])
    assert [one["adapters"] for one in json.loads(told.stdout)] == [
        ["llama:legal", "llama:polite"],
        [],
    ]
    assert without.dtype == "bfloat16"
    assert plain.weight_bytes == 2 * without.weight_bytes + 2 * 4 * (16 + 8) * 4


@pytest.mark.parametrize(
    ("adapters", "key", "line", "why"),
    [
        ([adapter("a b")], "model[0].adapter[0].name", 13, "match"),
        ([adapter("latest")], "model[0].adapter[0].name", 13, "Ollama's name for llama itself"),
        ([adapter("small")], "model[0].adapter[0].name", 13, "llama:small is the name of a model"),
        ([adapter("x"), adapter("x")], "model[0].adapter[1].name", 16, "of another adapter"),
        ([adapter("x", "none")], "model[0].adapter", 12, "none has no adapter_config.json"),
        (["adapter = 3\n"], "model[0].adapter", 12, "expected tables"),
        (["[[model.adapter]]\nname = 'x'\n"], "model[0].adapter[0].path", 12, "is missing"),
        ([adapter(f"a{i}") for i in range(129)], "model[0].adapter", 12, "more than 128"),
        (
            ['speculate = { method = "ngram" }\n', adapter("x")],
            "model[0].speculate",
            12,
            "drafts were not tried with LoRA adapters",
        ),
    ],
)
def test_what_a_configuration_may_not_say(
    tmp_path: Path, base: Path, adapters: list[str], key: str, line: int, why: str
) -> None:
    make(tmp_path, pair(Q))

    with pytest.raises(ConfigError) as caught:
        load_config(configure(tmp_path, *adapters))

    (problem,) = caught.value.problems
    assert (problem.key, problem.line) == (key, line)
    assert why in problem.wrong


def test_an_adapter_is_its_weights_and_its_configuration(tmp_path: Path, base: Path) -> None:
    """What is known of one that was scaled otherwise, or had other weights, is not believed."""
    config = read_model_config(base)
    place = make(tmp_path, pair(Q))
    folder = Path(place.path)
    weights, settings = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    found = []

    def known() -> AdapterPlace:
        (adapter,) = read_adapters([place], config)
        found.append(adapter.identity)
        return AdapterPlace(place.name, place.path, 0, adapter_version(folder))

    first = known()
    assert read_adapters([first], config)[0].identity == found[0]
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "lora_alpha": 64}))
    scaled = known()
    weights.rename(tmp_path / "old")
    weights.write_bytes((tmp_path / "old").read_bytes())
    known()

    assert len(set(found)) == 3
    for stale in (first, scaled):
        with pytest.raises(CheckpointError, match=r"was changed while it was served"):
            read_adapters([stale], config)
