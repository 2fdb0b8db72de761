"""What tests of front ends share: checkpoints without weights, and one front end for all."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from appliance.demo.checkpoints import make_checkpoints
from appliance.service.front_frames import FrontModel
from appliance.vocabulary import Task
from tests.frontend.stand_in_core import FORKS, StandInCore, front_end

KEEP_ALIVE_SECONDS = 0.5


def pytest_sessionfinish() -> None:
    FORKS.stop()


def model_at(path: Path, name: str, task: Task = Task.GENERATE, **changes: Any) -> FrontModel:
    settings: dict[str, Any] = {
        "name": name,
        "path": str(path),
        "dtype": "float32",
        "max_context": 1024,
        "max_batch": 8,
        "task": task,
        "created": 1_700_000_000,
    }
    return FrontModel(**(settings | changes))


@pytest.fixture(scope="session")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"), ["llama-a"])[0]


@pytest.fixture(scope="session")
def models(generator: Path) -> tuple[FrontModel, ...]:
    """Three that generate, one that embeds, one that scores, one with two
    classes, and one that is damaged."""
    folder = generator.parent
    embedder = like(generator, folder / "embedder")
    scorer = like(
        generator,
        folder / "scorer",
        architectures=["LlamaForSequenceClassification"],
        num_labels=1,
    )
    classifier = like(
        generator,
        folder / "classifier",
        architectures=["LlamaForSequenceClassification"],
        num_labels=2,
        id2label={"0": "good", "1": "bad"},
    )
    damaged = like(generator, folder / "damaged")
    (damaged / "tokenizer.json").write_text("{", encoding="utf-8")
    return (
        model_at(generator, "talker"),
        model_at(generator, "tagged:7b"),
        model_at(generator, "other"),
        model_at(embedder, "embedder", Task.EMBED),
        model_at(scorer, "scorer", Task.SCORE),
        model_at(classifier, "classifier", Task.SCORE),
        model_at(damaged, "damaged"),
    )


def like(checkpoint: Path, path: Path, **changes: Any) -> Path:
    """Another checkpoint with the same tokenizer; front ends read no weights."""
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(checkpoint / name, path / name)
    config = json.loads((checkpoint / "config.json").read_bytes()) | changes
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared(models: tuple[FrontModel, ...]) -> AsyncIterator[StandInCore]:
    async with front_end(
        models,
        keep_alive_seconds=KEEP_ALIVE_SECONDS,
        max_body_bytes=1 << 20,
        origins=("https://pages.example",),
    ) as core:
        yield core


@pytest_asyncio.fixture(loop_scope="session")
async def core(shared: StandInCore) -> AsyncIterator[StandInCore]:
    """A stand-in core with a front end that serves; the script is a new one for each test, and
    what is left of the test before it is over."""
    shared.admitting.set()
    await shared.quiet()
    shared.script()
    shared.frames.clear()
    yield shared
    shared.go_on()
