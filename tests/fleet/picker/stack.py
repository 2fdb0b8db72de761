"""The processes: boxes with one catalogue, `appliance fleet endpoints`, the picker and Envoy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from appliance.demo.run import free_port
from tests.fleet.boxes import ROOT, BoxProcess
from tests.patience import until

PACKAGED = ROOT / "packaging" / "llm-d"
CLI = (sys.executable, "-m", "appliance")


def keys_in(file: Path) -> tuple[str, str]:
    """A new file of keys, as docs/fleet.md has it: one of clients, and one that observes."""

    def create(*arguments: str) -> str:
        command = [*CLI, "key", "create", *arguments, "--file", str(file)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()

    return create("clients", "--slo"), create("picker", "--scope", "observe")


class Ports(NamedTuple):
    """What the picker and Envoy listen at."""

    front: int
    admin: int
    picker: int
    health: int
    metrics: int


def free_ports() -> Ports:
    """No two of them are the same, though none is in use yet."""
    found: set[int] = set()
    while len(found) < len(Ports._fields):
        found.add(free_port())
    return Ports(*found)


@dataclass
class Stack:
    """What runs, in a folder with the logs of all of it."""

    folder: Path
    envoy: Path
    epp: Path
    boxes: Sequence[BoxProcess]
    observer: str
    """The key with which `appliance fleet endpoints` asks."""
    ports: Ports = field(default_factory=free_ports)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports.front}"

    @property
    def endpoints(self) -> Path:
        return self.folder / "endpoints.yaml"

    def begin(self, name: str, *command: str | Path, **environment: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | environment, stdout=log, stderr=log
            )

    def finish(self, name: str) -> None:
        process = self.processes.pop(name)
        process.terminate()
        process.wait()

    def check(self) -> None:
        """Raise `RuntimeError` if something that was started has ended."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                log = self.folder / f"{name}.log"
                raise RuntimeError(f"{name} ended with status {process.returncode}; see {log}")

    def poll(self, more: Sequence[str]) -> None:
        """Follow the boxes, and `more` of them, given as `NAME=URL`."""
        boxes = [f"{box.name}={box.url}" for box in self.boxes] + list(more)
        options = [part for box in boxes for part in ("--box", box)]
        command = (*CLI, "fleet", "endpoints", self.endpoints, *options)
        self.begin("endpoints", *command, APPLIANCE_API_KEY=self.observer)
        until(lambda: len(self.listed()) == len(boxes))

    def listed(self) -> list[str]:
        """The boxes in the picker's file."""
        if not self.endpoints.exists():
            return []
        rows = json.loads(self.endpoints.read_text(encoding="utf-8"))["endpoints"]
        return [row["name"] for row in rows]

    def pick(self) -> None:
        """Start the picker as docs/fleet.md does, with ports that are free here."""
        text = (PACKAGED / "epp.yaml").read_text(encoding="utf-8")
        file = self.folder / "epp.yaml"
        file.write_text(text.replace("/etc/llm-d/endpoints.yaml", str(self.endpoints)), "utf-8")
        self.begin(
            "picker", self.epp, "--pool-name", "appliance", "--config-file", file,
            "--grpc-port", str(self.ports.picker), "--secure-serving=false", "--tracing=false",
            "--enable-pprof=false",
            "--grpc-health-port", str(self.ports.health),
            "--metrics-port", str(self.ports.metrics),
        )  # fmt: skip

    def front(self) -> None:
        """Start Envoy: the packaged file, but for its three ports."""
        text = (PACKAGED / "envoy.yaml").read_text(encoding="utf-8")
        ports = {
            "19000": self.ports.admin, "8080": self.ports.front, "9002": self.ports.picker,
        }  # fmt: skip
        for port, here in ports.items():
            assert f"port_value: {port}}}" in text
            text = text.replace(f"port_value: {port}}}", f"port_value: {here}}}")
        text = text.replace("address: 0.0.0.0", "address: 127.0.0.1")
        file = self.folder / "envoy.yaml"
        file.write_text(text, "utf-8")
        self.begin("envoy", self.envoy, "-c", file)


@contextmanager
def running(stack: Stack) -> Iterator[Stack]:
    """The boxes are up; the other parts are started in it, and all end with it."""
    try:
        for box in stack.boxes:
            box.start()
        for box in stack.boxes:
            box.ready()
        yield stack
    finally:
        for name in list(stack.processes):
            stack.finish(name)
        for box in stack.boxes:
            box.end()
