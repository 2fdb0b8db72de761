"""The table of boxes."""

from __future__ import annotations

import asyncio

import pytest
from click.testing import CliRunner

from appliance.api.app import create_app
from appliance.cli.main import cli
from appliance.errors import FleetError
from appliance.fleet.box_addresses import Reach, read_boxes
from appliance.fleet.endpoints import Polled
from appliance.fleet.status import COLUMNS, all_take, rows
from tests.unit.doubles.fake_service import FakeService
from tests.unit.doubles.serving import served

BOXES = read_boxes(("one=http://192.0.2.1", "two=http://192.0.2.2"), Reach.NETWORK)
LOAD = (
    b'{"catalogue": ["m", "n"], "resident": ["n", "m"], "coming": [], "waiting": 3, "running": 1,'
    b' "queue_age_seconds": 0.26, "pool_free_bytes": 1048576, "attainment": 0.981}'
)


def polled(
    ready: int = 200, load: int = 200, body: bytes = LOAD[:-1] + b', "draining": false}'
) -> Polled:
    return Polled(ready, load, body)


def test_each_box_has_a_line() -> None:
    answers = {"one": polled(), "two": None}
    lines = rows(BOXES, answers)

    assert lines[0] == ("one", "takes requests", "m n", "", "3", "1", "0.3 s", "1MiB", "98%")
    assert lines[1][:2] == ("two", "no answer")
    assert {len(line) for line in lines} == {len(COLUMNS)}
    assert not all_take(BOXES, answers)
    assert all_take(BOXES, {"one": polled(), "two": polled()})


def test_a_box_that_takes_none_says_why() -> None:
    draining = LOAD[:-1] + b', "draining": true}'
    lines = rows(BOXES, {"one": polled(body=draining), "two": polled(503)})
    assert [line[1] for line in lines] == ["draining", "not ready"]
    assert lines[0][4] == "3"
    lines = rows(BOXES, {"one": polled(load=404, body=b""), "two": polled()})
    assert lines[0] == ("one", "/api/load is 404", *[""] * 7)


def test_a_key_that_opens_nothing_is_an_error() -> None:
    with pytest.raises(FleetError, match="scope observe"):
        rows(BOXES, {"one": polled(load=403), "two": None})


async def test_the_command_asks_boxes() -> None:
    """It ends with status 1 if one of them takes no requests."""
    async with served(create_app(FakeService())) as port:
        here = ["fleet", "status", "--box", f"here=http://127.0.0.1:{port}"]
        well = await asyncio.to_thread(CliRunner().invoke, cli, here)
        gone = await asyncio.to_thread(
            CliRunner().invoke, cli, [*here, "--box", "gone=http://127.0.0.1:9"]
        )

    assert (well.exit_code, gone.exit_code) == (0, 1)
    assert "takes requests" in well.stdout
    assert "no answer" in gone.stdout
