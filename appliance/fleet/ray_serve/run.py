"""`appliance fleet serve`: a node of the fleet, and on the head the application on all nodes."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import Final, NamedTuple, NoReturn

import click
import ray
from ray import serve

from appliance.client import fail
from appliance.fleet.ray_serve import application
from appliance.fleet.ray_serve.node import Node, end
from appliance.fleet.ray_serve.settings import BOX_RESOURCE, FRONT_RESOURCE, FleetSettings

_LOOK_SECONDS: Final = 2.0
_START_SECONDS: Final = 120.0


class Listen(NamedTuple):
    """Where clients find a node's front."""

    host: str
    port: int


def run(node: Node, key: str | None, settings: FleetSettings, listen: Listen) -> None:
    """Until a signal comes, or Ray ends."""
    process = node.start(key)
    try:
        signal.signal(signal.SIGTERM, _interrupt)
        if not node.join:
            _lead(process, f"{node.address or '127.0.0.1'}:{node.port}", settings, listen)
        process.wait()
    except KeyboardInterrupt:
        return
    finally:
        if process.poll() is None:
            end(process)
    fail(f"Ray ended with status {process.returncode}; its messages are above")


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _lead(
    process: subprocess.Popen[bytes], address: str, settings: FleetSettings, listen: Listen
) -> None:
    """Run the application on the nodes that there are, and follow them as they come and go."""
    _connect(process, address)
    serve.start(proxy_location="EveryNode", http_options={"host": listen.host, "port": listen.port})
    deployed = (-1, -1)
    while process.poll() is None:
        nodes = tuple(map(application.nodes_with, (BOX_RESOURCE, FRONT_RESOURCE)))
        if nodes != deployed:
            first = deployed == (-1, -1)
            deployed = application.deploy(settings) if first else application.scale()
            boxes, fronts = deployed
            click.echo(f"the fleet has {boxes} box(es), and {fronts} node(s) that listen")
        time.sleep(_LOOK_SECONDS)


def _connect(process: subprocess.Popen[bytes], address: str) -> None:
    """To the cluster whose head has just been started."""
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None:
        try:
            ray.init(address=address, log_to_driver=False)
            signal.signal(signal.SIGTERM, _interrupt)  # Ray has put its own handler there
            return
        except (ConnectionError, RuntimeError, ValueError):
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_SECONDS / 4)
