"""What a configuration of tensor-parallel instances may say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.checkpoints.model_config import read_model_config
from appliance.checkpoints.rank_shares import why_undivided
from appliance.config.loader import load_config
from appliance.errors import ConfigError, Problem

Make = Callable[..., Path]

TEXT = """\
[devices]
tensor_parallel = {ranks}
memory = "{memory}"
slab = "64KiB"
host_cache = "16MiB"

[[model]]
name = "tiny"
path = "tiny"
max_context = 1024
dtype = "float32"
"""


def load(directory: Path, ranks: object, memory: str = "8MiB") -> int:
    """The ranks of the configuration that is read."""
    path = directory / "appliance.toml"
    path.write_text(TEXT.format(ranks=ranks, memory=memory), encoding="utf-8")
    return load_config(path).devices.tensor_parallel


def problem(directory: Path, ranks: object, memory: str = "8MiB") -> Problem:
    with pytest.raises(ConfigError) as caught:
        load(directory, ranks, memory)
    (one,) = caught.value.problems
    return one


def test_an_instance_has_at_least_one_rank(tmp_path: Path, fake_checkpoint: Make) -> None:
    """The key is checked like any other."""
    fake_checkpoint()

    assert load(tmp_path, 1) == 1
    assert problem(tmp_path, 0).key == "devices.tensor_parallel"


def test_ranks_have_no_encoded_weights(tmp_path: Path, fake_checkpoint: Make) -> None:
    """Nor have those with images on disk, or places for adapters: each is refused, with what can be
    left out for it."""
    fake_checkpoint()
    path = tmp_path / "appliance.toml"
    for more in ("", "tensor_parallel = 2", 'images = "images"', "max_loras = 2"):
        text = TEXT.format(ranks=1, memory="8MiB")
        if more.startswith("max_loras"):
            text += f"{more}\n"
        else:
            text = text.replace("tensor_parallel = 1", more)
        path.write_text(text.replace("[devices]", '[devices]\nhost_cache_codec = "exp7"'))
        if not more:
            assert load_config(path).devices.host_cache_codec == "exp7"
            continue
        with pytest.raises(ConfigError) as caught:
            load_config(path, check_files=False)
        (found,) = caught.value.problems
        assert found.key == "devices.host_cache_codec"
        assert more.partition(" ")[0] in found.remedy


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "fits"),
    [(4, 4, 2, True), (4, 2, 4, True), (4, 1, 2, True), (3, 3, 2, False), (12, 6, 4, False)],
)
def test_heads_are_divided(
    tmp_path: Path, fake_checkpoint: Make, heads: int, kv_heads: int, ranks: int, fits: bool
) -> None:
    """Evenly; one for keys and values may be on several ranks, if it is so for all of them."""
    fake_checkpoint(num_attention_heads=heads, num_key_value_heads=kv_heads)

    if fits:
        assert load(tmp_path, ranks) == ranks
    else:
        found = problem(tmp_path, ranks)
        assert found.key == "model[0]"
        assert f"{heads} attention heads and {kv_heads} for keys and values" in found.wrong


@pytest.mark.parametrize(
    ("changed", "ranks", "wrong"),
    [
        ({"vocab_size": 250}, 3, "its vocabulary, padded to 256 rows, cannot be divided among 3"),
        ({"vocab_size": 250}, 4, ""),
        ({"intermediate_size": 130}, 4, "intermediate_size (130) cannot be divided among 4 ranks"),
        ({"intermediate_size": 130}, 2, ""),
        ({"moe_intermediate_size": 6}, 4, "moe_intermediate_size (6) cannot be divided"),
        ({"intermediate_size": [128, 130]}, 4, "intermediate_size (130) cannot be divided"),
        ({"mamba_ngroups": 2}, 4, "mamba_ngroups (2) cannot be divided among 4 ranks"),
        ({"mamba_ngroups": 1}, 4, ""),
        ({"vocab_size": 384, "type_vocab_size": 2}, 3, "its kinds of tokens, padded to 64 rows,"),
        ({"vocab_size": 384, "type_vocab_size": 2}, 4, ""),
    ],
)
def test_sizes_are_divided(
    tmp_path: Path, fake_checkpoint: Make, changed: dict[str, object], ranks: int, wrong: str
) -> None:
    """vLLM divides them without a rest, or builds nothing."""
    folder = fake_checkpoint()
    config = json.loads((folder / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(config))

    found = why_undivided(read_model_config(folder), ranks)
    assert wrong in found
    assert bool(found) == bool(wrong)


def test_what_cannot_be_divided_is_refused(tmp_path: Path, fake_checkpoint: Make) -> None:
    fake_checkpoint(num_attention_heads=3, num_key_value_heads=3)

    found = problem(tmp_path, 3)
    assert found.key == "model[0].path"
    assert "cannot be divided among 3 ranks" in found.wrong


def test_a_rank_holds_its_share(tmp_path: Path, fake_checkpoint: Make) -> None:
    """Memory is that of each rank, so two of them take what is too much for one."""
    fake_checkpoint()

    assert "more than devices.memory (1MiB)" in problem(tmp_path, 1, "1MiB").wrong
    assert load(tmp_path, 2, "1MiB") == 2
    assert "on each of 2 ranks" in problem(tmp_path, 2, "512KiB").wrong
