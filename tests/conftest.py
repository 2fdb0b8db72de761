"""What tests of all kinds share: a checkpoint directory that costs nothing."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from safetensors.numpy import save_file

# How long an example takes is the machine's business, and no test's.
settings.register_profile("appliance", deadline=None)
settings.load_profile("appliance")

TESTS = Path(__file__).parent
SAMPLED = ("engine", "frontend")
NOWHERE = Path("/nonexistent")

CHECKPOINT_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
}


def pytest_configure() -> None:
    """What is imported and collected stays to the end: the garbage collector need not look through
    it time and again, which takes a fifth of an import of vLLM and longer than most tests.

    Not when this file is imported, which other programs do, too: nothing turns it on again there.
    """
    gc.disable()
    # A machine whose ceilings were measured would expect other switches than tests do.
    os.environ.pop("STATE_DIRECTORY", None)
    os.environ["XDG_STATE_HOME"] = os.environ["XDG_DATA_HOME"] = str(NOWHERE)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage is collected from here on, among what is made afterwards."""
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where each case has an engine or a front end, the first one stands for all: the others of a
    test with more than two cases are thorough (docs/decisions/0128-two-tiers-of-tests.md)."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in SAMPLED:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        for item in same[1:] if len(same) > 2 else ():
            item.add_marker(pytest.mark.thorough)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-snapshots",
        action="store_true",
        help="write what the dashboard looks like now as what it has to look like",
    )


@pytest.fixture(scope="session", autouse=True)
def _no_state_directory() -> Iterator[None]:
    """Nor those of the packaged service, which a test's user may be allowed to write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("appliance.memory.ceilings.stored.SYSTEM_DIRECTORY", NOWHERE)
        yield


@pytest.fixture(autouse=True)
def _no_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test meets the admin socket of a daemon that happens to run here."""
    for name in ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _levels_of_logs() -> Iterator[None]:
    """What a test sets, others do not meet: commands and requests change what is logged."""
    loggers = [logging.getLogger(name) for name in (None, "appliance", "httpx")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def write_checkpoint(path: Path, **changes: Any) -> Path:
    """A checkpoint with 1 MiB of float32 weights at `path`; keywords change its config."""
    path.mkdir()
    config = {k: v for k, v in (CHECKPOINT_CONFIG | changes).items() if v is not None}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "tokenizer.json").write_text("{}", encoding="utf-8")
    save_file({"weight": np.zeros((512, 512), np.float32)}, path / "model.safetensors")
    return path


@pytest.fixture
def fake_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Makes a checkpoint with 1 MiB of float32 weights; keywords change its config."""

    def make(name: str = "tiny", **changes: Any) -> Path:
        return write_checkpoint(tmp_path / name, **changes)

    return make
