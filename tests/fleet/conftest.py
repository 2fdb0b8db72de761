"""Three boxes with overlapping catalogues, and a Ray cluster with a node for each and a head."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from appliance.demo.run import free_port
from appliance.fleet.ray_serve.application import APPLICATION, boxes_running, deploy
from appliance.fleet.ray_serve.settings import (
    BOX_NAME,
    BOX_RESOURCE,
    BOX_URL,
    FRONT_RESOURCE,
    FleetSettings,
)
from tests.fleet.boxes import MODELS, BoxProcess
from tests.patience import PATIENCE_SECONDS, until

CATALOGUES = {"a": MODELS[:4], "b": MODELS[2:], "c": MODELS[4:] + MODELS[:2]}
"""Each model is on two of three boxes."""
SMALL: dict[str, Any] = {
    "object_store_memory": 80 << 20,
    "include_dashboard": False,
    "num_cpus": 1,
}


@dataclass
class Fleet:
    """Boxes, nodes and the address of the front."""

    boxes: dict[str, BoxProcess]
    cluster: Any
    url: str
    nodes: dict[str, Any] = field(default_factory=dict)

    def add_node(self, name: str) -> None:
        self.nodes[name] = self.cluster.add_node(
            **SMALL,
            resources={BOX_RESOURCE: 1},
            env_vars={BOX_NAME: name, BOX_URL: self.boxes[name].url},
        )

    def kill_node(self, name: str) -> None:
        """As if its machine lost power: nothing of Ray on it ends in order, and all of it is gone
        when this returns. By themselves Ray's workers notice later, and answer meanwhile."""
        import psutil  # Ray's own: it is there once Ray is imported

        node = self.nodes.pop(name)
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        workers = raylet.children(recursive=True)
        self.cluster.remove_node(node, allow_graceful=False)
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        psutil.wait_procs(workers)

    def deploy(self, policy: str) -> None:
        """The application anew, and every box in it."""
        serve.delete(APPLICATION)
        deploy(FleetSettings(policy=policy))
        self.complete()

    def complete(self) -> None:
        """Wait until every box takes requests."""
        until(lambda: boxes_running() == len(self.nodes))
        until(lambda: self.known() == sorted(self.boxes))

    def known(self) -> list[str]:
        """Boxes that answer through the fleet and are not draining."""
        rows = httpx.get(f"{self.url}/api/fleet", timeout=60).json().get("boxes", [])
        return [row["box"] for row in rows if row["load"] and not row["load"]["draining"]]

    def loads(self) -> float:
        """Of weights, on all boxes so far."""
        return sum(box.loads() for box in self.boxes.values())

    def switches(self) -> float:
        """On all boxes so far."""
        return sum(box.switches() for box in self.boxes.values())

    def client(self, url: str = "") -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=url or self.url, timeout=PATIENCE_SECONDS, limits=limits)

    def holder(self, model: str) -> BoxProcess:
        """A box that has it."""
        return next(self.boxes[name] for name, has in CATALOGUES.items() if model in has)


@pytest.fixture(scope="session")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, BoxProcess]]:
    folder = tmp_path_factory.mktemp("boxes")
    made = {
        name: BoxProcess(name, free_port(), folder / name, models)
        for name, models in CATALOGUES.items()
    }
    try:
        for box in made.values():
            box.start()
        for box in made.values():
            box.ready()
        yield made
    finally:
        for box in made.values():
            box.end()


@pytest.fixture(scope="session")
def fleet(boxes: dict[str, BoxProcess]) -> Iterator[Fleet]:
    cluster = Cluster(
        initialize_head=True,
        head_node_args=SMALL | {"resources": {FRONT_RESOURCE: 1}},
    )
    port = free_port()
    made = Fleet(boxes, cluster, f"http://127.0.0.1:{port}")
    try:
        for name in boxes:
            made.add_node(name)
        ray.init(address=cluster.address, log_to_driver=False)
        http = {"host": "127.0.0.1", "port": port}
        serve.start(proxy_location="HeadOnly", http_options=http)
        deploy(FleetSettings())
        made.complete()
        yield made
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()
