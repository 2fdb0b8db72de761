"""A mixed box: an instance of two ranks beside a single one, and models that only one of them may
serve."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.config.loader import load_config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.run import free_port, reference, running_daemon
from appliance.demo.traffic import TimedAnswer, burst, send
from tests.system.conftest import Appliance

PAIRED = ["llama-a", "qwen3-a"]
SINGLE = ["qwen2-a"]
MODELS = [*PAIRED, *SINGLE]
GROUPS = """
[[devices.group]]
name = "pair"
tensor_parallel = 2

[[devices.group]]
name = "single"
"""
TOKENS_BEFORE_KILL = 12


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both instances' pools hold one or two of the models."""
    directory = tmp_path_factory.mktemp("groups")
    make_checkpoints(directory, MODELS)
    path = write_config(
        directory, MODELS, instances=1, memory="24MiB", bind=f"127.0.0.1:{free_port()}"
    )
    text = (
        path.read_text().replace("instances = 1\n", "").replace("[policy]", f"{GROUPS}\n[policy]")
    )
    for name in MODELS:
        group = "pair" if name in PAIRED else "single"
        text = text.replace(f'name = "{name}"\n', f'name = "{name}"\ngroups = ["{group}"]\n')
    path.write_text(text)
    return path


@pytest.fixture
def appliance(file: Path) -> Iterator[Appliance]:
    config = load_config(file)
    with running_daemon(file, config) as (url, pid):
        yield Appliance(url, pid, config, Path(config.journal.path))


def test_each_model_is_served_by_its_group(file: Path, appliance: Appliance) -> None:
    """With the tokens of plain vLLM on as many processes, also when the leader of the pair is
    killed in mid-stream; the other instance has no engine for its models, and goes on."""
    chats = burst(MODELS, 3)
    expected = reference(appliance.config, chats)
    killed: list[int] = []
    spared: list[int] = []

    def on_token(answer: TimedAnswer) -> None:
        if killed or answer.chat.model not in PAIRED or len(answer.tokens) < TOKENS_BEFORE_KILL:
            return
        pair, single = appliance.status()["instances"]
        spared.append(single["pid"])
        killed.append(pair["pid"])
        os.kill(pair["pid"], signal.SIGKILL)

    answers = asyncio.run(send(appliance.url, chats, on_token))

    assert [answer.error for answer in answers] == [None] * len(chats)
    assert {answer.chat: answer.tokens for answer in answers} == expected
    assert killed
    instances = appliance.status()["instances"]
    assert [(one["group"], one["ranks"]) for one in instances] == [("pair", 2), ("single", 1)]
    assert [instances[1]["pid"]] == spared, "the single instance's worker was never started again"
    for model in appliance.status()["models"]:
        assert set(model["residency"]) <= ({"0"} if model["model"] in PAIRED else {"1"})
