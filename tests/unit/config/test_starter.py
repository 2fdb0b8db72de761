"""Configurations that are written for checkpoints that were found."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.checkpoints.discovery.find import Found, FoundModel, NotFound, find_models
from appliance.config.auto import Room
from appliance.config.loader import load_config
from appliance.config.schema import Config, Devices
from appliance.config.starter import (
    BIND,
    Starter,
    Terms,
    commented_text,
    starter_text,
    write_starter,
)
from appliance.errors import ConfigError
from appliance.platform import machine_memory
from appliance.platform.machine_memory import MachineMemory
from appliance.units import Address
from tests.conftest import write_checkpoint

POINTER: Final = "version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 4937\n"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 24 GiB."""
    memory = MachineMemory(24 << 30, 20 << 30)
    monkeypatch.setattr(machine_memory, "read_memory", lambda: memory)


@pytest.fixture
def terms(tmp_path: Path) -> Terms:
    return Terms(Address("127.0.0.1:1234"), tmp_path / "pulled")


def starter(tmp_path: Path, terms: Terms, *directories: Path) -> Starter:
    return write_starter(tmp_path / "appliance.toml", find_models(directories), terms)


def test_all_that_can_be_served_is(tmp_path: Path, terms: Terms) -> None:
    """The file is what the configuration was read from."""
    models = tmp_path / "models"
    models.mkdir()
    for name in ("b", "a"):
        write_checkpoint(models / name)

    made = starter(tmp_path, terms, models)

    assert [(one.name, one.path) for one in made.config.models] == [
        ("a", str(models / "a")),
        ("b", str(models / "b")),
    ]
    assert made.config.api.bind == "127.0.0.1:1234"
    assert made.config.catalog.folder == str(tmp_path / "pulled")
    assert made.config == load_config(tmp_path / "appliance.toml")
    assert made.left_out == ()


def spoil(folder: Path, what: str) -> None:
    """Have a checkpoint be one that cannot be served."""
    weights = folder / "model.safetensors"
    match what:
        case "pickles":
            weights.rename(folder / "pytorch_model.bin")
        case "gguf":
            weights.rename(folder / "model.gguf")
        case "pointer":
            (folder / "config.json").write_text(POINTER)
        case "no weights":
            weights.unlink()
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("what", "changes", "line"),
    [
        (
            "pickles",
            {},
            "{0} has its weights as .bin files only, which may run code when they are read; "
            "convert them to safetensors, or pull a copy of the model in that format",
        ),
        ("gguf", {}, "{0}/model.gguf: GGUF is not supported; convert or pull safetensors"),
        (
            "pointer",
            {},
            "{0}/config.json is a git-LFS pointer, not the file itself; run `git lfs pull` in its "
            "directory",
        ),
        (
            "no weights",
            {},
            "{0} has no *.safetensors file; give the directory of a whole checkpoint in "
            "safetensors format",
        ),
        (
            "no tokenizer",
            {},
            "{0} has no tokenizer: none of tokenizer.json, tokenizer.model*, tekken.json, "
            "spiece.model, sentencepiece.bpe.model, vocab.json, vocab.txt; copy the model's there",
        ),
        (
            "unknown architecture",
            {"architectures": ["StrangeForCausalLM"], "model_type": "strange"},
            "{0}: config.json has model_type 'strange', so that it can only be read with code that "
            "comes with the checkpoint, which is never run; take a model of another family: "
            "docs/models.md lists those that are served",
        ),
    ],
)
def test_what_cannot_be_served_is_left_out(
    tmp_path: Path, terms: Terms, what: str, changes: dict[str, object], line: str
) -> None:
    """With the reason and the remedy that a configuration would be refused with."""
    models = tmp_path / "models"
    models.mkdir()
    write_checkpoint(models / "good")
    bad = write_checkpoint(models / "bad", **changes)
    spoil(bad, what)

    made = starter(tmp_path, terms, models)

    assert [str(one) for one in made.left_out] == [f"not served: {line.format(bad)}"]
    assert [one.name for one in made.config.models] == ["good"]


def test_the_cache_of_huggingface_hub_is_served(tmp_path: Path, terms: Terms) -> None:
    """Its files are links to those of all revisions."""
    cache = tmp_path / "hub"
    cache.mkdir()
    blobs = write_checkpoint(cache / "blobs")
    snapshot = cache / "models--org--tiny" / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (cache / "models--org--tiny" / "blobs").symlink_to(blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs", file.name))

    made = starter(tmp_path, terms, cache / "models--org--tiny")

    assert [(one.name, one.path) for one in made.config.models] == [("org/tiny", str(snapshot))]
    assert made.left_out == ()


def test_nothing_to_serve(tmp_path: Path, terms: Terms) -> None:
    """Is an error that has the lines of all that was left out, or says what was looked for."""
    models = tmp_path / "models"
    models.mkdir()
    with pytest.raises(NotFound) as nothing:
        starter(tmp_path, terms, models)
    found, last = str(nothing.value).splitlines()
    assert found.startswith(f"{models} has no checkpoint, a directory with config.json or ")
    assert f"`appliance pull ORG/MODEL --dir {models} --no-add`" in found
    assert last == "there is no model that can be served"
    spoil(write_checkpoint(models / "bad"), "gguf")
    (models / "more.gguf").touch()

    with pytest.raises(NotFound) as nothing:
        starter(tmp_path, terms, models)

    assert len(str(nothing.value).splitlines()) == 3


def test_a_model_that_is_too_large_is_left_out(tmp_path: Path, terms: Terms) -> None:
    """The others are served."""
    models = tmp_path / "models"
    models.mkdir()
    write_checkpoint(models / "small")
    large = write_checkpoint(models / "large")
    sparse(large, 64 << 30)

    made = starter(tmp_path, terms, models)

    assert [one.name for one in made.config.models] == ["small"]
    (line,) = map(str, made.left_out)
    assert line.startswith(f"not served: {large}: large needs 64GiB for its weights")


def test_a_large_model_takes_no_others_along(tmp_path: Path, terms: Terms) -> None:
    """A model that fits alone is served, though memory was first divided for a larger one."""
    models = tmp_path / "models"
    models.mkdir()
    cpu = Config(models=(), devices=Devices(kind="cpu"))
    room = Room.on_this_machine(cpu, None, now=False).host_bytes
    fitting = write_checkpoint(models / "fitting")
    large = write_checkpoint(
        models / "large", num_hidden_layers=512, num_key_value_heads=64, head_dim=128
    )  # a long KV cache, so that the pools are small when memory is divided in proportion
    sparse(fitting, room // 100 * 93)
    sparse(large, room)

    made = starter(tmp_path, terms, models)

    assert [one.name for one in made.config.models] == ["fitting"]
    assert [one.path for one in made.left_out] == [large]


def sparse(checkpoint: Path, nbytes: int) -> None:
    """Give a checkpoint weights of so many bytes of bfloat16 that take no room on the disk."""
    header = json.dumps(
        {"weight": {"dtype": "BF16", "shape": [nbytes // 2], "data_offsets": [0, nbytes]}}
    ).encode()
    with (checkpoint / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)


def test_what_is_wrong_besides_models_is_an_error(tmp_path: Path) -> None:
    """It is not taken for a model's."""
    write_checkpoint(tmp_path / "m")

    with pytest.raises(ConfigError, match=r"api\.bind"):
        starter(tmp_path, Terms(Address("0.0.0.0:1"), tmp_path), tmp_path / "m")


def test_with_comments_it_says_the_same(tmp_path: Path, terms: Terms) -> None:
    """And what the automatic sizes are here."""
    write_checkpoint(tmp_path / "m")
    made = starter(tmp_path, terms, tmp_path / "m")
    file = tmp_path / "commented.toml"

    text = commented_text(made, terms, str(file))
    file.write_text(text)
    read = load_config(file)

    assert read == made.config
    assert f"# Run it:   appliance serve {file}" in text.splitlines()
    assert "24GiB of memory, no NVIDIA GPU" in text.splitlines()[0]
    assert "# LlamaForCausalLM: 512KiB of weights in bfloat16, " in text


FOLDERS: Final = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=20
)


@given(FOLDERS)
def test_any_path_can_be_written(folder: str) -> None:
    """Whatever characters it has, it is read as it was."""
    path = Path("/srv", folder)
    text = starter_text([FoundModel("m", path)], Terms(BIND, path))

    read = tomllib.loads(text)

    assert read["model"] == [{"name": "m", "path": str(path)}]
    assert read["catalog"] == {"folder": str(path)}


def test_a_path_that_is_no_text_is_left_out(tmp_path: Path, terms: Terms) -> None:
    """A configuration could not name it."""
    folder = Path(str(tmp_path / "models") + "/m\udcff")
    folder.parent.mkdir()
    folder.mkdir()
    (folder / "config.json").touch()

    found = find_models([folder.parent])

    assert found == Found((), found.left_out, (folder.parent,))
    assert [str(one) for one in found.left_out] == [
        f"not served: {folder.parent}/m\\udcff: its path is not UTF-8; rename it"
    ]
