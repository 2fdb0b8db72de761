"""Checkpoints in directories: which are found, what they are called, and what is left out."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.checkpoints import delete
from appliance.checkpoints.discovery.find import NotFound, find_models
from appliance.checkpoints.discovery.names import spelled
from appliance.checkpoints.pull import NAME, pull
from appliance.checkpoints.sources import HUB
from tests.conftest import write_checkpoint

REVISION: Final = "0123456789abcdef"


def make(root: Path, *files: str) -> Path:
    """Empty files, each in its folders."""
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def names(*directories: Path, **named: Path) -> list[str]:
    return [model.name for model in find_models(directories, named).models]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["b/config.json", "a/model.safetensors"], {"a": "a", "b": "b"}),
        (["org/m/config.json", "org/n/config.json"], {"org/m": "org/m", "org/n": "org/n"}),
        (["x/y/z/config.json"], {}),
        ([".hidden/config.json", ".m.part/config.json", "notes.txt", "docs/readme.md"], {}),
        (["Qwen3-0.6B/config.json"], {"Qwen3-0.6B": "Qwen3-0.6B"}),
        (["my model (v2)/config.json"], {"my-model-v2": "my model (v2)"}),
        (["größe/config.json", "_x/config.json"], {"x": "_x", "gr-e": "größe"}),
        (
            [f"models--org--m/snapshots/{REVISION}/config.json"],
            {"org/m": f"models--org--m/snapshots/{REVISION}"},
        ),
        (
            [f"hub/models--gpt2/snapshots/{REVISION}/config.json"],
            {"gpt2": f"hub/models--gpt2/snapshots/{REVISION}"},
        ),
        (["models--org--m/refs/main", "models--org--m/snapshots/.keep"], {}),
        (["org--m/config.json", "org--m/.origin"], {"org/m": "org--m"}),
        (["org--m/config.json"], {"org--m": "org--m"}),
        (["m/config.json", "m/1_Pooling/config.json"], {"m": "m"}),
    ],
)
def test_what_is_found(tmp_path: Path, files: list[str], expected: dict[str, str]) -> None:
    """By name, with the place of each."""
    root = make(tmp_path / "models", *files)

    found = find_models([root])

    assert {one.name: str(one.path.relative_to(root)) for one in found.models} == expected
    assert found.left_out == ()


def test_a_directory_that_is_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is served under its own name, however it is given: also through a link, as the working
    directory, or as a snapshot of a hub's cache."""
    root = make(tmp_path, "llama/config.json", f"models--org--m/snapshots/{REVISION}/config.json")
    (root / "alias").symlink_to(root / "llama")
    monkeypatch.chdir(root / "llama")

    assert names(root / "llama") == ["llama"]
    assert names(Path()) == ["llama"]
    assert names(root / "alias") == ["alias"]
    assert names(root / "models--org--m") == ["org/m"]
    assert names(root / "models--org--m" / "snapshots" / REVISION) == ["org/m"]


def test_of_several_snapshots_the_one_of_main(tmp_path: Path) -> None:
    """Else the newest."""
    folder = make(tmp_path / "models--m", "snapshots/a/config.json", "snapshots/b/config.json")
    os.utime(folder / "snapshots" / "b", (1, 1))

    def found() -> str:
        (model,) = find_models([tmp_path]).models
        return model.path.name

    assert found() == "a"
    (folder / "refs").mkdir()
    for text, expected in (("b\n", "b"), ("gone", "a"), ("../..", "a"), ("", "a")):
        (folder / "refs" / "main").write_text(text)
        assert found() == expected, text


def test_what_was_pulled_has_the_name_that_it_was_pulled_by(tmp_path: Path) -> None:
    """The folder that a pull fills can be served as any other."""
    source = write_checkpoint(tmp_path / "source")
    pulled = pull(str(source), tmp_path / "models", "org/tiny", tell=lambda _: None)

    (found,) = find_models([tmp_path / "models"]).models

    assert found == (pulled.name, pulled.path)


UNREADABLE: Final = "x" * 300
"""No file system has such a name: looking there fails, for any user."""


def test_what_cannot_be_read_hides_no_others(tmp_path: Path) -> None:
    """A link that leads nowhere readable is left out if it may be a directory of models, and is
    nothing in a checkpoint."""
    root = make(tmp_path / "models", "good/config.json")
    (root / "good" / "notes").symlink_to(UNREADABLE)
    (root / "link").symlink_to(UNREADABLE)

    found = find_models([root])

    assert [one.name for one in found.models] == ["good"]
    assert [str(one) for one in found.left_out] == [
        f"not served: {root}/link: cannot be read (File name too long); make it readable"
    ]


@pytest.mark.parametrize("named", [False, True])
def test_a_directory_that_cannot_be_read(tmp_path: Path, named: bool) -> None:
    """It was given: that is an error."""
    place = tmp_path / UNREADABLE
    with pytest.raises(NotFound, match=r"cannot be read \(File name too long\); make it"):
        find_models([] if named else [place], {"m": place} if named else {})


def test_a_named_directory_that_is_no_text(tmp_path: Path) -> None:
    """A configuration could not name it."""
    folder = Path(str(tmp_path) + "/m\udcff")
    folder.mkdir()

    with pytest.raises(NotFound, match=r"m\\udcff: its path is not UTF-8; rename it$"):
        find_models([], {"m": folder})


def test_what_is_to_be_deleted_is_not_found(tmp_path: Path) -> None:
    """`appliance rm` marked it, and the daemon ended before it was gone."""
    make(tmp_path, "a/config.json", "b/config.json")
    delete.intend(tmp_path / "a")

    assert names(tmp_path) == ["b"]


@pytest.mark.parametrize(
    ("files", "line"),
    [
        (
            ["tiny.gguf"],
            "{0}/tiny.gguf: GGUF is not supported; convert or pull safetensors",
        ),
        (
            ["tiny/q4.gguf"],
            "{0}/tiny/q4.gguf: GGUF is not supported; convert or pull safetensors",
        ),
        (
            ["legal/adapter_config.json", "legal/adapter_model.safetensors"],
            "{0}/legal: is a LoRA adapter, not a model; add it to its model with `appliance pull "
            "{0}/legal --adapter-of MODEL`",
        ),
        (
            ["模型/config.json"],
            "{0}/模型: its name has no letter or digit of ASCII; name it: --model NAME={0}/模型",
        ),
    ],
)
def test_what_is_left_out(tmp_path: Path, files: list[str], line: str) -> None:
    """A line each, with what to do; the others are served."""
    root = make(tmp_path / "models", "good/config.json", *files)

    found = find_models([root])

    assert [str(one) for one in found.left_out] == [f"not served: {line.format(root)}"]
    assert [model.name for model in found.models] == ["good"]


def test_several_files_of_a_format_that_is_not_read(tmp_path: Path) -> None:
    """Each is named, in order; what is next to them is found."""
    make(tmp_path, "b.gguf", "a.gguf", "good/config.json")

    found = find_models([tmp_path])

    assert [one.path.name for one in found.left_out] == ["a.gguf", "b.gguf"]
    assert len(found.models) == 1


def test_a_name_of_two_checkpoints(tmp_path: Path) -> None:
    """Is an error that says how to give one of them another name, which helps."""
    one = make(tmp_path / "one", "m/config.json")
    two = make(tmp_path / "two", "m/config.json")

    with pytest.raises(NotFound) as clash:
        find_models([one, two])

    assert str(clash.value) == (
        f"m is the name of {one}/m and of {two}/m; give one of them another name: "
        f"--model NAME={two}/m"
    )
    assert sorted(names(one, two, other=two / "m")) == ["m", "other"]
    make(two, "n/config.json")
    found = find_models([one, two], leave_out_clashes=True)
    assert [model.name for model in found.models] == ["n"]
    assert [(left.path, left.clash) for left in found.left_out] == [
        (one / "m", "m"),
        (two / "m", "m"),
    ]


def test_a_checkpoint_that_is_given_twice_is_served_once(tmp_path: Path) -> None:
    """Also if another path leads to it."""
    root = make(tmp_path, "models/m/config.json")
    (root / "link").symlink_to(root / "models")

    assert names(root / "models", root / "models" / "m", root / "link") == ["m"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("none", "none is not a directory; give a directory with checkpoints in it"),
        ("file.txt", "file.txt is not a directory; give a directory with checkpoints in it"),
        ("m.gguf", "m.gguf: GGUF is not supported; convert or pull safetensors"),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_what_is_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, message: str, named: bool
) -> None:
    """Is an error, whether it has a name or not."""
    monkeypatch.chdir(make(tmp_path, "file.txt", "m.gguf"))

    with pytest.raises(NotFound) as wrong:
        find_models([] if named else [Path(given)], {"x": Path(given)} if named else {})

    assert str(wrong.value) == message


def test_a_home_directory_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that does not know of `~` passes it on."""
    monkeypatch.setenv("HOME", str(make(tmp_path, "models/m/config.json")))

    assert names(Path("~/models")) == ["m"]


@given(st.text(max_size=30))
def test_any_text_becomes_a_name_or_none(text: str) -> None:
    """What may be a name stays as it is."""
    name = spelled(text)

    assert name == "" or NAME.fullmatch(name)
    assert (name == "") == (re.search("[A-Za-z0-9]", text) is None)
    if NAME.fullmatch(text):
        assert name == text


@given(st.from_regex(HUB, fullmatch=True))
def test_names_of_a_hub_stay(text: str) -> None:
    """So that what was pulled by one is found by it."""
    name = text.partition("@")[0]
    if NAME.fullmatch(name):
        assert spelled(name) == name
