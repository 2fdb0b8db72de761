"""The demo's checkpoints are whole, varied, and the same on every run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.config.loader import load_config
from appliance.demo import checkpoints, recipes
from appliance.demo.checkpoints import checkpoint_digest, make_checkpoints, write_config
from appliance.demo.recipes import DEMO, KINDS, RECIPES, demo_models


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """All six, made once for this module; tests that damage one make their own."""
    return make_checkpoints(tmp_path_factory.mktemp("models"))


def test_there_are_six_models_with_different_kv_shapes(made: list[Path]) -> None:
    """Six models, no two KV shapes alike, three architectures, each of 12 to 30 MiB."""
    entries = [read_checkpoint(path.name, path, "float32") for path in made]

    assert len({(entry.layers, entry.kv_heads, entry.kv.token_bytes) for entry in entries}) == 6
    assert len({entry.architecture for entry in entries}) == 3
    assert all(12 << 20 < entry.weight_bytes < 30 << 20 for entry in entries)
    for entry, recipe in zip(entries, RECIPES, strict=True):
        kv_width = recipe.kv_heads * recipe.head_dim
        assert entry.kv_bytes_per_token == 2 * recipe.layers * kv_width * 4
        assert entry.name == recipe.name


def test_the_demonstration_shows_several_kinds(tmp_path: Path) -> None:
    """Six models: one has experts, one a window, one keeps states, one has 4 bits; their sizes are
    alike, so that two instances hold about a third of them."""
    paths = make_checkpoints(tmp_path, DEMO)
    entries = {path.name: read_checkpoint(path.name, path) for path in paths}

    assert len(entries) == 6
    assert {recipe.name for recipe in KINDS} < set(entries)
    written = tomllib.loads(write_config(tmp_path, DEMO).read_text())["model"]
    for model in written:
        entry = read_checkpoint(model["name"], tmp_path / model["name"], model["dtype"])
        assert 10 << 20 < entry.weight_bytes < 30 << 20
    assert [model["dtype"] for model in written].count("float32") == 5
    assert {name for name, entry in entries.items() if entry.state_bytes} == {"granite-h-a"}
    config = {path.name: json.loads((path / "config.json").read_text()) for path in paths}
    assert [name for name in DEMO if config[name].get("sliding_window")] == ["mistral-a"]
    assert [name for name in DEMO if config[name].get("num_local_experts")] == ["mixtral-a"]
    assert [name for name in DEMO if config[name].get("quantization_config")] == ["qwen3-4bit-a"]


def test_a_cpu_without_the_kernel_for_4_bits_serves_another() -> None:
    served = demo_models(four_bits=False)
    dtypes = {recipe.name: recipe.dtype for recipe in (*RECIPES, *KINDS)}

    assert demo_models(four_bits=True) == DEMO
    assert len(set(served)) == len(DEMO)
    assert {dtypes[name] for name in served} == {"float32"}


def test_same_bytes_on_every_run(made: list[Path], tmp_path: Path) -> None:
    """Made elsewhere, the checkpoints have the same digests, and no two models the same one."""
    again = make_checkpoints(tmp_path)
    digests = [checkpoint_digest(path) for path in made]

    assert [checkpoint_digest(path) for path in again] == digests
    assert len(set(digests)) == len(digests)


def test_whole_checkpoints_are_left_alone_and_others_made_anew(tmp_path: Path) -> None:
    """A second run writes nothing; a flipped byte, a lost file or a lost marker is repaired."""
    (path,) = make_checkpoints(tmp_path, ["qwen2-a"])
    digest, weights = checkpoint_digest(path), path / "model.safetensors"
    first = weights.stat()
    make_checkpoints(tmp_path, ["qwen2-a"])

    assert weights.stat() == first

    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    make_checkpoints(tmp_path, ["qwen2-a"])
    assert checkpoint_digest(path) == digest
    for lost in ("tokenizer.json", checkpoints.MARKER):
        (path / lost).unlink()
        make_checkpoints(tmp_path, ["qwen2-a"])
        assert checkpoint_digest(path) == digest
    assert [entry.name for entry in tmp_path.iterdir()] == ["qwen2-a"]


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    """A name without a recipe is an error that lists the names there are."""
    with pytest.raises(ValueError, match=r"no demo model gpt-5; there are llama-a, "):
        make_checkpoints(tmp_path, ["llama-a", "gpt-5"])
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_fills_the_vocabulary_and_keeps_any_text(made: list[Path]) -> None:
    """2048 tokens, special ones first, every byte sequence round-trips, prompts begin with BOS."""
    tokenizer = Tokenizer.from_file(str(made[0] / "tokenizer.json"))
    text = "The ferry is late. \U0001f6a2 def f(x):\n\treturn x"

    ids = tokenizer.encode(text).ids

    assert tokenizer.get_vocab_size() == recipes.VOCABULARY_SIZE
    assert ids[0] == checkpoints.BOS_ID
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode()) * 0.7
    for id_, token in enumerate(recipes.SPECIAL_TOKENS):
        assert tokenizer.token_to_id(token) == id_


def test_chat_template_uses_the_special_tokens(made: list[Path]) -> None:
    """A rendered conversation encodes each role and each end to one token."""
    config = json.loads((made[0] / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(made[0] / "tokenizer.json"))
    template = ImmutableSandboxedEnvironment().from_string(config["chat_template"])

    text = template.render(
        messages=[{"role": "system", "content": "Be"}, {"role": "user", "content": "kind"}],
        bos_token=config["bos_token"],
        eos_token=config["eos_token"],
        add_generation_prompt=True,
    )

    assert text == "<|bos|><|system|>Be<|eos|><|user|>kind<|eos|><|assistant|>"
    special = [id_ for id_ in tokenizer.encode(text, add_special_tokens=False).ids if id_ < 6]
    assert special == [0, 3, 1, 4, 1, 5]


def test_only_eos_of_the_special_tokens_can_win(made: list[Path]) -> None:
    """Greedy text never holds a role token: their rows of the output matrix are zero."""
    for path in made:
        head = load_file(path / "model.safetensors")["lm_head.weight"]
        zero = [id_ for id_ in range(8) if not head[id_].any()]

        assert zero == [0, 2, 3, 4, 5]


def test_written_configuration_is_valid(made: list[Path]) -> None:
    """The demo's configuration passes all checks, and its pool holds a third of the models."""
    config = load_config(write_config(made[0].parent, instances=3, policy="serverlessllm"))

    assert [model.name for model in config.models] == [path.name for path in made]
    assert (config.devices.instances, config.policy.use) == (3, ("serverlessllm",))
    total = sum(read_checkpoint(p.name, p, "float32").weight_bytes for p in made)
    assert total / 3 < config.devices.memory_bytes < total / 2
