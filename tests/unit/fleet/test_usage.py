"""`appliance fleet usage`: sums over boxes, each a real server with a ledger of its own."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from appliance.access.auth import Access
from appliance.access.keys import Key, KeyFile, KeyRing, Scope, digest
from appliance.api.app import create_app
from appliance.cli.main import cli
from appliance.errors import FleetError
from appliance.fleet.usage import BoxRow, added_up, asked_by, fleet_dimensions, read_answer
from appliance.usage.entries import CUT, DAY_SECONDS
from appliance.usage.ledger import Ledger
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.fake_service import FakeService
from tests.unit.doubles.serving import served
from tests.unit.usage.test_books import NOW, entry
from tests.unit.usage.test_ledger import opened

SECRET = "sk-of-all-boxes"


async def filled(ledger: Ledger, *entries: Any) -> None:
    written = asyncio.Event()
    for one in entries[:-1]:
        ledger.record(one, lambda: None)
    ledger.record(entries[-1], written.set)
    await asyncio.wait_for(written.wait(), PATIENCE_SECONDS)


def box(ledger: Ledger | None, keys: Path) -> Any:
    access = Access(KeyRing(keys, read_only=True), wall_clock=lambda: NOW)
    return create_app(FakeService(), access=access, ledger=ledger)  # type: ignore[arg-type]


@pytest.fixture
async def boxes(tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """Two with ledgers, and the keys of one file: alice used both."""
    keys = tmp_path / "keys.json"
    KeyFile(keys).add(
        Key(name="op", sha256=digest(SECRET), created_seconds=0.0, scopes=(Scope.ADMIN,))
    )
    month_ago = NOW - 30 * DAY_SECONDS
    async with opened(tmp_path / "one") as one, opened(tmp_path / "two") as two:
        await filled(one, entry("a", 10), entry("b", 1, key="bob", outcome=CUT))
        await filled(two, entry("c", 5), entry("d", 100, model="large", ended=month_ago))
        async with (
            served(box(one, keys)) as first,
            served(box(two, keys)) as second,
            served(box(None, keys)) as without,
        ):
            ports = {"one": first, "two": second, "none": without}
            yield {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}


async def usage(urls: dict[str, str], *arguments: str, secret: str = SECRET) -> Result:
    """The command, which asks servers of this event loop."""
    named = [part for name, url in urls.items() for part in ("--box", f"{name}={url}")]
    environment = {"APPLIANCE_API_KEY": secret}
    command = ["fleet", "usage", *named, *arguments]
    return await asyncio.to_thread(CliRunner(env=environment).invoke, cli, command)


def both(boxes: dict[str, str]) -> dict[str, str]:
    return {name: boxes[name] for name in ("one", "two")}


async def test_rows_of_all_boxes_are_added_up(boxes: dict[str, str]) -> None:
    result = await usage(both(boxes), "--json")

    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    rows = [
        (row["key"], row["model"], row["requests"], row["input_tokens"]) for row in found["rows"]
    ]
    assert rows == [("alice", "large", 1, 100), ("alice", "small", 2, 15), ("bob", "small", 1, 1)]
    assert found["total"]["input_tokens"] == 116
    assert (found["boxes"], found["missing"]) == (["one", "two"], {})
    assert "box" not in found["rows"][0]


async def test_boxes_may_be_told_apart(boxes: dict[str, str]) -> None:
    """And the days chosen."""
    result = await usage(both(boxes), "--by", "box,key", "--since", "1d", "--csv")

    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [(row["box"], row["key"], row["input_tokens"]) for row in rows] == [
        ("one", "alice", "10"), ("one", "bob", "1"), ("two", "alice", "5")
    ]  # fmt: skip
    alone = await usage(both(boxes), "--by", "box", "--json")
    assert [row["input_tokens"] for row in json.loads(alone.stdout)["rows"]] == [11, 105]


async def test_a_table_for_people(boxes: dict[str, str]) -> None:
    result = await usage(both(boxes), "--by", "model")
    assert [line.split()[:3] for line in result.stdout.splitlines()] == [
        ["MODEL", "REQUESTS", "INPUT"], ["large", "1", "100"], ["small", "3", "16"],
        ["total", "4", "116"],
    ]  # fmt: skip


async def test_boxes_without_an_answer_are_named(boxes: dict[str, str]) -> None:
    """One that is down, one without a ledger: the others are added up, and the status is 1."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        away = f"http://127.0.0.1:{free.getsockname()[1]}"
    result = await usage({**boxes, "away": away}, "--json")

    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["total"]["input_tokens"] == 116
    assert sorted(found["missing"]) == ["away", "none"]
    assert "error: away is not in these sums: " in result.stderr
    assert "usage.directory" in found["missing"]["none"]


async def test_a_wrong_key_is_said_for_each_box(boxes: dict[str, str]) -> None:
    result = await usage(both(boxes), secret="sk-wrong")
    assert result.exit_code == 1
    assert result.stderr.count("the API key is not valid") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--by", "owner"), "none of box, key"),
        (("--by", "key,key"), "twice"),
        (("--box", "three=box.example"), "give http(s)://HOST:PORT, or unix:/PATH"),
        (("--box", "one=http://127.0.0.1:1"), "have the name one"),
        (("--csv", "--json"), "not both"),
    ],
)
async def test_what_cannot_be_asked(
    boxes: dict[str, str], arguments: tuple[str, ...], words: str
) -> None:
    result = await usage({"one": boxes["one"]}, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_sums_do_not_lose_what_is_small() -> None:
    """Nor does what is no answer count as nothing."""
    rows = [BoxRow(key="a", requests=1, gpu_seconds=0.000001) for _ in range(10)]
    found = added_up(("key",), {"one": rows, "two": rows})
    assert found.rows[0]["gpu_seconds"] == 0.00002
    assert added_up(("key",), {"one": []}).total is None
    assert asked_by(fleet_dimensions("box, day")) == ("day",)
    for body in (b"[]", b"<html>", b'{"rows": [{"requests": "many"}]}', b"\xff"):
        with pytest.raises(FleetError):
            read_answer(body)
