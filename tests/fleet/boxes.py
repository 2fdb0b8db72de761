"""A box of a fleet: a daemon of its own, as a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from appliance.demo.run import metrics_by_model
from tests.patience import PATIENCE_SECONDS, until

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("APPLIANCE_PYTHON", ROOT / ".venv/bin/python"))
"""The environment with the engine."""
MODELS = ("llama-a", "llama-b", "llama-c", "qwen2-a", "qwen2-b", "qwen3-a")


@dataclass
class BoxProcess:
    """A daemon, and what started it. With `keys`, a file, it wants a key for all but metrics. With
    `short_turns` its models take turns of a fraction of a second."""

    name: str
    port: int
    folder: Path
    models: Sequence[str]
    keys: Path | None = None
    short_turns: bool = False
    process: subprocess.Popen[str] | None = None
    pid: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Begin; `ready` waits for it."""
        self.folder.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [
                *(PYTHON, "-m", "tests.fleet.daemon", self.folder.parent / f"models-{self.name}"),
                *(self.folder, str(self.port), *self.models),
                *(() if self.keys is None else ("--keys", self.keys)),
                *(("--short-turns",) if self.short_turns else ()),
            ],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ready(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        said = self.process.stdout.readline().strip()
        assert said, f"the daemon of box {self.name} did not start"
        self.pid = int(said)

    def drain(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Gone when this returns: a process takes connections until the kernel has ended it."""
        os.kill(self.pid, signal.SIGKILL)
        until(lambda: not self.listens())

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def end(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait(PATIENCE_SECONDS)

    def switches(self) -> float:
        """How often another model began to compute so far, also of those on the device."""
        rows = metrics_by_model(self.url)
        return sum(n for (name, _), n in rows.items() if name == "appliance_switches_total")

    def loads(self) -> float:
        """How often a model's weights came to the device so far: there is no line before that."""
        series = 'appliance_transfer_seconds_count{kind="weights"} '
        text = httpx.get(f"{self.url}/metrics", timeout=60).raise_for_status().text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(series))

    def ended(self, model: str) -> float:
        """Requests for a model that have ended."""
        return metrics_by_model(self.url).get(("appliance_requests_total", model), 0.0)
