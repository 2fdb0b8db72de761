"""The file of boxes that take requests: who is in it, and what is said of the others."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from appliance.api.app import create_app
from appliance.cli.main import cli
from appliance.errors import FleetError
from appliance.fleet.box_addresses import Reach, read_boxes
from appliance.fleet.endpoints import ENGINE, MISSES, Endpoints, Polled
from tests.unit.doubles.fake_service import FakeService
from tests.unit.doubles.serving import served

yaml: Any = importlib.import_module("yaml")  # it has no types
LLM_D = Path(__file__).parents[3] / "packaging" / "llm-d"
TAKES = Polled(200, 200, b'{"draining": false, "waiting": 3}')
TWO = ("one=http://192.0.2.1:11500", "two=http://192.0.2.2")


def packaged(name: str) -> Any:
    return yaml.safe_load((LLM_D / name).read_text(encoding="utf-8"))


def rows(state: Endpoints) -> list[Any]:
    return list(json.loads(state.document())["endpoints"])


def test_boxes_that_take_requests_are_in_the_file() -> None:
    """With what the picker wants to know of each: an address, a port as a string, and our label."""
    state = Endpoints(read_boxes(TWO, Reach.PICKER))
    lines = state.polled({"one": TAKES, "two": TAKES})

    assert lines == ["one takes requests", "two takes requests"]
    assert rows(state) == [
        {"name": "one", "address": "192.0.2.1", "port": "11500", "labels": ENGINE},
        {"name": "two", "address": "192.0.2.2", "port": "11500", "labels": ENGINE},
    ]
    shape = {name: type(value) for name, value in rows(state)[0].items()}
    for row in packaged("endpoints.yaml")["endpoints"]:
        assert {name: type(value) for name, value in row.items()} == shape


@pytest.mark.parametrize(
    ("polled", "reason"),
    [
        (Polled(200, 200, b'{"draining": true}'), "draining"),
        (Polled(503, 200, TAKES.load), "not ready"),
        (Polled(200, 404, b""), "/api/load is 404"),
        (Polled(200, 200, b"<html>"), "its answer is not the appliance's"),
    ],
)
def test_a_box_that_takes_none_is_out_at_once(polled: Polled, reason: str) -> None:
    """And in again when it answers well."""
    state = Endpoints(read_boxes(TWO, Reach.PICKER))
    state.polled({"one": TAKES, "two": TAKES})

    assert state.polled({"one": TAKES, "two": polled}) == [f"two gets no requests: {reason}"]
    assert [row["name"] for row in rows(state)] == ["one"]
    assert state.polled({"one": TAKES, "two": TAKES}) == ["two takes requests"]
    assert len(rows(state)) == 2


def test_a_dead_box_is_out_after_some_rounds() -> None:
    """One lost answer takes none out; a box that never answered was never in."""
    state = Endpoints(read_boxes(TWO, Reach.PICKER))
    assert state.polled({"one": TAKES, "two": None})[1] == "two gets no requests: no answer"

    for _ in range(MISSES - 1):
        assert state.polled({"one": None, "two": None}) == []
        assert len(rows(state)) == 1
    assert state.polled({"one": None, "two": None}) == ["one gets no requests: no answer"]
    assert rows(state) == []


def test_a_key_that_does_not_open_it_is_an_error() -> None:
    """Not a box that is out: the operator has to do something."""
    state = Endpoints(read_boxes(TWO, Reach.PICKER))
    with pytest.raises(FleetError, match=r"two: /api/load is 403: set .* scope observe"):
        state.polled({"one": TAKES, "two": Polled(200, 403, b"")})


async def test_the_command_asks_boxes(tmp_path: Path) -> None:
    """It writes the file over the old one, readable for others, and names who is out."""
    file = tmp_path / "endpoints.yaml"
    file.write_text("old", encoding="utf-8")
    async with served(create_app(FakeService())) as port:
        boxes = ["--box", f"here=http://127.0.0.1:{port}", "--box", "gone=http://127.0.0.1:9"]
        arguments = ["fleet", "endpoints", str(file), *boxes, "--once"]
        result = await asyncio.to_thread(CliRunner().invoke, cli, arguments)

    assert result.exit_code == 0, result.output
    assert "gone gets no requests: no answer" in result.stderr
    (row,) = yaml.safe_load(file.read_text(encoding="utf-8"))["endpoints"]
    assert (row["name"], row["port"]) == ("here", str(port))
    assert file.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in file.parent.glob("*")] == ["endpoints.yaml"]


def test_the_packaged_picker_and_proxy_fit_together() -> None:
    """Every reference of the picker's configuration names a plugin, metrics come each second, and
    Envoy talks to the clusters that it has."""
    picker, proxy = packaged("epp.yaml"), packaged("envoy.yaml")
    plugins = {plugin["name"]: plugin for plugin in picker["plugins"]}
    layer = picker["dataLayer"]
    used = [row["pluginRef"] for row in picker["schedulingProfiles"][0]["plugins"]]
    used += [layer["discovery"]["pluginRef"]]
    for source in layer["sources"]:
        used += [source["pluginRef"], *(row["pluginRef"] for row in source["extractors"])]
    assert {*used, "profile"} == plugins.keys()
    assert plugins["metrics"]["parameters"]["interval"] == "1s"
    assert layer["injectDefaults"] is False, "it would read vLLM's metrics, too, every 50 ms"
    extractor = plugins["extractor"]["parameters"]
    assert extractor["defaultEngine"] == extractor["engineConfigs"][0]["name"] == "appliance"
    assert plugins["boxes"]["parameters"]["watchFile"] is True

    static = proxy["static_resources"]
    clusters = {cluster["name"]: cluster for cluster in static["clusters"]}
    manager = static["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    processor = manager["http_filters"][0]["typed_config"]["grpc_service"]["envoy_grpc"]
    assert {routes[0]["route"]["cluster"], processor["cluster_name"]} == clusters.keys()
    for name, cluster in clusters.items():
        (most,) = cluster["circuit_breakers"]["thresholds"]
        assert min(most.values()) >= 100_000, f"{name}: Envoy would refuse the 1,025th request"
    header = clusters["boxes"]["original_dst_lb_config"]["http_header_name"]
    assert header == "x-gateway-destination-endpoint"
