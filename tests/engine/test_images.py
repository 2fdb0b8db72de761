"""Packed weights from an image on disk: the same tokens, and packed anew when it is not right."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.memory.weight_cache.image_writer import ImageWriter
from appliance.memory.weight_cache.images import ImageFolder
from tests.engine.house import MODELS, Baseline, House, Sampling, make_house, sequence, tokens
from tests.engine.test_loading import fused, save, toy

MODEL = "qwen2-gqa"
PROMPT = tuple(range(20, 60))
GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="weights are packed on x86-64"
)


class Start:
    """An engine as one start of the appliance has it: in a house of its own."""

    def __init__(self, path: Path, folder: Path) -> None:
        from appliance.engines.vllm.engine import VllmEngine

        self.house: House = make_house()
        self.writer = ImageWriter(self.house.host)
        self.engine: Any = VllmEngine.build(
            MODEL,
            str(path),
            dtype=MODELS[MODEL][1],
            max_context=1024,
            max_batch=16,
            arena=self.house.arena,
            host=self.house.host,
            swapper=self.house.swapper,
            images=ImageFolder(folder, 0, self.writer),
            verify=True,
        )
        self.house.engines[MODEL] = self.engine

    def fill(self) -> bool:
        """Have a master image in the host tier; whether its weights were packed."""
        places = self.house.places(self.engine.host_slabs, self.house.arena.slab_bytes)
        self.house.images[MODEL] = places
        self.engine.store_weights(places, fill=True)
        self.writer.join()
        packed: bool = self.engine._placed.kept.packed
        return packed

    def answer(self) -> list[int]:
        """The first layers compute while the last ones come in."""
        self.engine.begin_load()
        self.engine.add(sequence(MODEL, "r", PROMPT, GREEDY))
        output = tokens(self.engine.prefill("r", 40))
        while self.engine.knows("r"):
            output += tokens(self.engine.step(["r"], 40))
        self.house.idle()
        return output


@pytest.fixture
def path(tmp_path: Path, checkpoints: dict[str, str]) -> Path:
    """A checkpoint that may be changed."""
    return Path(shutil.copytree(checkpoints[MODEL], tmp_path / MODEL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where images are kept."""
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


@pytest.fixture
def start(path: Path, folder: Path) -> Iterator[Callable[[], Start]]:
    """Starts the appliance; the first start, which leaves an image, is over."""
    starts: list[Start] = []

    def start() -> Start:
        starts.append(Start(path, folder))
        return starts[-1]

    assert start().fill()
    yield start
    for one in starts:
        one.house.host.close()


@pytest.fixture
def expected(plain_vllm: Baseline) -> list[int]:
    """What plain vLLM says to the prompt."""
    (output,) = plain_vllm(MODEL, [PROMPT], [GREEDY])
    return output


def test_a_second_start_reads_what_the_first_packed(
    start: Callable[[], Start], folder: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the host tier, or straight to the device; with the tokens of plain vLLM, and without
    making a single piece from the checkpoint."""
    from appliance.engines.vllm.weights.loading import CheckpointImage

    def refuse(*_: object) -> None:
        raise AssertionError("the weights were packed again")

    monkeypatch.setattr(CheckpointImage, "__call__", refuse)
    (image,) = folder.iterdir()
    written = image.stat().st_mtime_ns
    cached = start()
    assert not cached.fill()
    assert cached.answer() == expected
    assert start().answer() == expected
    assert image.stat().st_mtime_ns == written


def flip_a_byte(path: Path, image: Path) -> None:
    with image.open("r+b") as stream:
        stream.seek(-1000, os.SEEK_END)
        (byte,) = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


def truncate(path: Path, image: Path) -> None:
    os.truncate(image, image.stat().st_size // 2)


def touch_the_checkpoint(path: Path, image: Path) -> None:
    os.utime(path / "model.safetensors", ns=(1, 1))


CHANGES = [flip_a_byte, truncate, touch_the_checkpoint]


@pytest.mark.parametrize("change", CHANGES)
def test_an_image_that_is_not_right_is_made_again(
    start: Callable[[], Start],
    path: Path,
    folder: Path,
    expected: list[int],
    change: Callable[[Path, Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The answer is right, the log names the file, and the next start reads the new one."""
    (image,) = folder.iterdir()
    change(path, image)
    second = start()
    assert second.fill()
    assert f"packing anew, as {image} is not used" in caplog.text
    assert second.answer() == expected
    third = start()
    assert not third.fill()
    assert third.answer() == expected


@pytest.mark.parametrize("change", CHANGES)
def test_weights_without_a_master_image_survive_it_too(
    start: Callable[[], Start],
    path: Path,
    folder: Path,
    expected: list[int],
    change: Callable[[Path, Path], None],
) -> None:
    """Though the first layers may have computed when the damage shows."""
    (image,) = folder.iterdir()
    change(path, image)
    second = start()
    assert second.answer() == expected
    assert second.engine._placed.kept.packed
    assert not image.exists()


def test_what_decides_the_bytes_is_in_the_key(tmp_path: Path) -> None:
    """Files, types, recipes, and checksums where they are looked at; a new build alone is not."""
    from appliance.checkpoints.safetensors import read_header
    from appliance.engines.vllm.weights import parameters
    from appliance.engines.vllm.weights.loading import made_from
    from appliance.engines.vllm.weights.recipe import RecipeRecording

    file = tmp_path / "model.safetensors"
    save(file, {"even": (7, 5), "odd": (7, 5)}, "float32")

    def other_way_round(model: Any, name: str, tensor: Any) -> None:
        model.mixed.data[int(name == "even") :: 2].copy_(tensor)

    def key(
        load: Callable[..., None] = fused, dtype: str = "float32", *, verify: bool = False
    ) -> str:
        files = [read_header(file)]
        recording = RecipeRecording(files)
        model = toy({"mixed": (14, 5)}, load, dtype)
        recording.load(model)
        made_of = recording.ingredients(model)
        layout = parameters.plan(model, made_of, {})
        return json.dumps(made_from(files, layout, made_of, verify=verify))

    first = key()
    assert key() == first
    others = {key(other_way_round), key(dtype="bfloat16")}
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    assert key() == first
    others.add(key(verify=True))
    os.utime(file, ns=(1, 1))
    others.add(key())
    assert len(others | {first}) == 5


def test_weights_that_are_not_packed_are_not_kept(
    start: Callable[[], Start], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read as fast from the checkpoint; an image of another time is removed."""
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    plain = start()
    assert plain.engine._placed.kept is None
    assert list(folder.iterdir()) == []
