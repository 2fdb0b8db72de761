"""A daemon for all clients, what they ask it, and what it is seen to do."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel

from tests.docblocks import Block
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
SMALL, WORDY, EMBEDDER = "small", "wordy", "embedder"
VECTOR_SIZE = 256


class Stay(BaseModel):
    """A stay in a city."""

    city: Literal["Rome", "Bonn"]
    nights: Literal[1, 2, 3]


BOOKED = [Stay(city="Rome", nights=2), Stay(city="Bonn", nights=3)]
"""Calls of `book` in one answer of the model `small`, when it is asked with tools."""
SCHEMA: dict[str, Any] = Stay.model_json_schema()


@dataclass(frozen=True)
class Appliance:
    """A running daemon, from outside; its checkpoints are in `folder`."""

    url: str
    folder: Path

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @contextmanager
    def cancels(self, model: str = WORDY) -> Iterator[None]:
        """What is done within hangs up on one request of the model, which ends it."""
        before = self._cancelled(model)
        yield
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._cancelled(model) != before + 1:
            assert time.monotonic() < deadline, "the request was not cancelled"
            time.sleep(0.02)

    def busy(self, model: str) -> bool:
        """Whether a request of the model is computed."""
        told = httpx.get(f"{self.url}/api/status", timeout=60).json()["models"]
        return any(one["model"] == model and one["running"] for one in told)

    def _cancelled(self, model: str) -> int:
        series = rf'appliance_requests_total{{model="{model}",outcome="cancelled"}} (\d+)'
        found = re.search(series, httpx.get(f"{self.url}/metrics", timeout=60).text)
        return int(found[1]) if found else 0

    def localized(self, text: str) -> str:
        """An example of a recipe, for this daemon."""
        text = text.replace("127.0.0.1:11500", self.url.removeprefix("http://"))
        return text.replace("/srv/models", str(self.folder))


@pytest.fixture(scope="session")
def appliance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Appliance]:
    folder = tmp_path_factory.mktemp("daemon")
    daemon = subprocess.Popen(
        [ROOT / ".venv/bin/python", "-m", "tests.clients.daemon", folder],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert daemon.stdin is not None
    assert daemon.stdout is not None
    try:
        url = daemon.stdout.readline().strip()
        assert url, "the daemon did not start"
        yield Appliance(url, folder)
    finally:
        daemon.stdin.close()
        daemon.wait(PATIENCE_SECONDS)


@pytest.fixture
def recipe(appliance: Appliance) -> Callable[[list[Block]], str]:
    """The only one of blocks of docs/recipes, for this daemon."""

    def read(blocks: list[Block]) -> str:
        (block,) = blocks
        return appliance.localized(block.text)

    return read


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Runs a command, or a script for bash, in a folder of its own; returns what it wrote."""

    def ran(
        *command: str | Path, path: Path = Path(sys.executable).parent, **variables: str
    ) -> str:
        environment = {
            "PATH": f"{path}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        done = subprocess.run(
            command if len(command) > 1 else ["bash", "-euc", *command],
            cwd=tmp_path, env=environment | variables, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=PATIENCE_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout + done.stderr

    return ran
