"""What a model takes at least, known before its engine is: what can never fit is refused with what
would fit, and nothing that an engine would serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.config.loader import load_config
from appliance.config.schema import Config
from appliance.config.sizing import least
from appliance.errors import ConfigError, Problem
from appliance.units import Bytes, no_less
from tests.unit.doubles.pretend_nvml import install

Make = Callable[..., Path]

MIB = 1 << 20
GIB = 1 << 30
HEAD = 128 * 64
"""Elements of an output head of the checkpoints here."""

TEXT = """\
[devices]
kind = "{kind}"
memory = "{memory}"
runtime = "1GiB"
slab = "64KiB"
host_cache = "64MiB"

[[model]]
name = "tiny"
path = "tiny"
max_context = {context}
dtype = "float32"
task = "{task}"
"""


def load(
    folder: Path, memory: str, context: int = 512, task: str = "generate", kind: str = "cpu"
) -> Config:
    path = folder / "appliance.toml"
    text = TEXT.format(memory=memory, context=context, task=task, kind=kind)
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def problem(folder: Path, memory: str, *more: Any) -> Problem:
    with pytest.raises(ConfigError) as caught:
        load(folder, memory, *more)
    (one,) = caught.value.problems
    return one


def sized(path: Path, tensors: Mapping[str, int]) -> Path:
    """The checkpoint with these tensors, of so many float32, in place of its own."""
    arrays = {name: np.zeros(size, np.float32) for name, size in tensors.items()}
    save_file(arrays, path / "model.safetensors")
    return path


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that packs weights of every type."""
    monkeypatch.setattr("appliance.checkpoints.checkpoint.packs", lambda dtype: True)


def test_the_remedies_help(tmp_path: Path, fake_checkpoint: Make) -> None:
    """With any one of them the model fits; with a little less it does not."""
    fake_checkpoint(max_position_embeddings=1 << 17)

    found = problem(tmp_path, "2MiB", 4000)

    assert found.key == "model[0]"
    assert found.wrong == (
        "tiny needs 1MiB for its weights and 2MiB for the KV cache of one request, in slabs of "
        "64KiB: more than devices.memory (2MiB) has"
    )
    assert found.remedy == (
        "set devices.memory to 3MiB or more, a smaller devices.slab, or max_context to 2048 or less"
    )
    load(tmp_path, "3MiB", 4000)
    load(tmp_path, "2MiB", 2048)
    problem(tmp_path, "3007KiB", 4000)
    problem(tmp_path, "2MiB", 2049)


@pytest.mark.parametrize(
    ("size", "told"),
    [(3 * GIB, "3GiB"), (3 * GIB // 2, "1.5GiB"), (GIB + 1, "1025MiB"), (2500, "2500B")],
)
def test_a_size_that_has_to_be_reached_is_rounded_up(size: int, told: str) -> None:
    """One that is rounded down would be refused as well; and it has to be one for the file."""
    assert no_less(size) == told
    assert Bytes.read(told) >= size


def test_what_is_advised_passes(tmp_path: Path, fake_checkpoint: Make) -> None:
    """Where groups of KV blocks, of which a model needs whole ones, are larger in the larger pool,
    too: what it needs in the present one, 196 slabs, would be refused as 198."""
    shape = {"hidden_size": 48, "num_attention_heads": 1, "num_key_value_heads": 1}
    sized(fake_checkpoint(**shape), {"weight": 3 * MIB})
    assert "needs 12MiB for its weights and 256KiB for" in problem(tmp_path, "1MiB", 256).wrong
    problem(tmp_path, "12544KiB", 256)

    advised = problem(tmp_path, "1MiB", 256).remedy.split()[3]

    assert advised == "12672KiB"
    load(tmp_path, advised, 256)


def test_a_shorter_context_is_no_remedy_for_weights(tmp_path: Path, fake_checkpoint: Make) -> None:
    """Where they leave no room at all, it is not named."""
    fake_checkpoint()

    assert "max_context" not in problem(tmp_path, "1MiB").remedy


def test_on_a_gpu_the_runtime_takes_its_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_checkpoint: Make
) -> None:
    """Of the memory, and of what is asked for."""
    install(monkeypatch, [16 * GIB])
    fake_checkpoint()

    found = problem(tmp_path, "1025MiB", 512, "generate", "cuda")

    assert "more than devices.memory (1.0GiB) has after devices.runtime (1GiB)" in found.wrong
    assert "set devices.memory to 1026MiB or more" in found.remedy
    load(tmp_path, "1026MiB", 512, kind="cuda")


@pytest.mark.parametrize(
    ("changes", "tensors", "asked", "floats"),
    [
        ({}, {"a": 100, "lm_head.weight": HEAD}, {}, 100 + HEAD),
        ({}, {"a": 100, "lm_head.weight": HEAD}, {"task": "embed"}, 100),
        ({}, {"a": 100, "output.weight": HEAD}, {"task": "embed"}, 100),
        ({"tie_word_embeddings": True}, {"a": 100}, {}, 100 + HEAD),
        ({"tie_word_embeddings": True}, {"a": 100}, {"cuda": True}, 100),
        ({"tie_word_embeddings": True}, {"a": 100}, {"task": "embed"}, 100),
        ({"tie_word_embeddings": True}, {"a": 100, "lm_head.weight": HEAD}, {}, 100 + HEAD),
        (
            {"tie_word_embeddings": True},
            {"a": 100, "lm_head.weight": HEAD},
            {"cuda": True},
            100,
        ),
        ({}, {"model.layers.1.w": 100, "model.layers.2.w": 30}, {}, 100),
        ({}, {"a": 100, "mtp.layers.0.w": 30, "model.mtp_layers.0.w": 30}, {}, 100),
        ({}, {"a": 100, "model.layers.0.self_attn.rotary_emb.inv_freq": 30}, {}, 100),
        ({}, {"a": 100, "model.layers.0.self_attn.rotary_emb.cos_cached": 30}, {}, 100),
        ({}, {"prompt.weight": 100, "attention.output.weight": 7}, {"task": "embed"}, 107),
    ],
)
@pytest.mark.usefixtures("packing")
def test_only_what_an_engine_keeps_is_counted(
    fake_checkpoint: Make,
    changes: dict[str, Any],
    tensors: dict[str, int],
    asked: dict[str, Any],
    floats: int,
) -> None:
    """No head where nothing is generated, a tied one twice where one of them is packed, and none
    of the layers that guess further tokens."""
    path = sized(fake_checkpoint(**changes), tensors)

    entry = read_checkpoint("tiny", path, "float32", **asked)

    assert entry.weight_bytes == 4 * floats
    assert entry.parameters == sum(tensors.values())


@pytest.mark.usefixtures("packing")
def test_a_model_without_a_head_may_just_fit(tmp_path: Path, fake_checkpoint: Make) -> None:
    """What it would take to generate does not matter to one that embeds."""
    sized(fake_checkpoint(tie_word_embeddings=True), {"a": MIB // 4})

    problem(tmp_path, "1280KiB", 512, "generate")
    config = load(tmp_path, "1280KiB", 512, "embed")

    entry = read_checkpoint("tiny", tmp_path / "tiny", "float32", "embed")
    found = least(entry, 512, config.devices)
    assert (found.slabs, config.devices.slabs) == (20, 20)
