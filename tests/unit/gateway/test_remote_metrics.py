"""What is counted of models of other servers, as a scraper reads it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from appliance.observability.remote_metrics import RemoteError
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.openai_server import (
    STREAM_HEAD,
    chunk,
    event,
    openai_server,
    raw,
    saying,
    saying_then_nothing,
)
from tests.unit.gateway.test_forwards import FAULTS, House, ask, asked, until_free

PREFIX = "appliance_remote_"


@pytest_asyncio.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with openai_server() as server:
        house = House(tmp_path, server)
        house.key("a")
        yield house
        await house.sessions.forwards.aclose()
        await house.ledger.aclose()


def samples(house: House) -> dict[tuple[str, ...], float]:
    """By name, model and kind; without buckets, and when metrics were created."""
    return {
        (
            sample.name.removeprefix(PREFIX),
            *(sample.labels[name] for name in ("model", "kind") if name in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(house.metrics.exposition().decode())
        for sample in family.samples
        if sample.name.startswith(PREFIX)
        and not sample.name.endswith(("_bucket", "_created", "_sum"))
    }


def errors(house: House) -> dict[str, float]:
    found = samples(house).items()
    return {name[2]: value for name, value in found if name[0] == "errors_total"}


async def test_all_is_there_from_the_start_at_zero(house: House) -> None:
    """By the name in the configuration; the alias is no label."""
    house.front()
    assert samples(house) == {
        ("requests_total", "far"): 0,
        ("requests_running", "far"): 0,
        ("time_to_first_byte_seconds_count", "far"): 0,
        ("tokens_total", "far", "prompt"): 0,
        ("tokens_total", "far", "output"): 0,
    }


async def test_whole_answers_are_counted_with_the_tokens_of_the_server(house: House) -> None:
    """Streamed or not; asked for by the alias, they are the model's."""
    front = house.front()
    await asked(front, "sk-a")
    await asked(front, "sk-a", streams=True)
    await until_free(house)
    assert samples(house) == {
        ("requests_total", "far"): 2,
        ("requests_running", "far"): 0,
        ("time_to_first_byte_seconds_count", "far"): 2,
        ("tokens_total", "far", "prompt"): 14,
        ("tokens_total", "far", "output"): 6,
    }


KINDS = {
    "redirect": "redirect", "key": "key", "forbidden": "key", "name": "missing", "full": "full",
    "down": "full", "broken": "status", "no JSON": "answer", "HTML": "answer",
    "HTML refusal": "request", "no HTTP": "broken", "cut": "broken", "packed": "answer",
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
async def test_each_fault_of_a_server_has_its_kind(house: House, name: str) -> None:
    front = house.front()
    house.server.answering = saying(FAULTS[name][0])
    await asked(front, "sk-a")
    await until_free(house)
    assert errors(house) == {KINDS[name]: 1}
    assert samples(house)["requests_total", "far"] == 1
    assert samples(house)["tokens_total", "far", "output"] == 0


async def test_what_the_server_refuses_is_an_error_of_the_request(house: House) -> None:
    front = house.front()
    house.server.answering = saying(raw(400, b'{"error": {"message": "temperature: wrong"}}'))
    await asked(front, "sk-a")
    await until_free(house)
    assert errors(house) == {"request": 1}


async def test_a_server_that_is_away_or_silent(house: House) -> None:
    front = house.front(silence_seconds=0.05)
    house.server.answering = saying_then_nothing(b"")
    await asked(front, "sk-a")
    await until_free(house)
    assert errors(house) == {"silent": 1}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    front = house.front(address=f"http://127.0.0.1:{port}/v1")
    await asked(front, "sk-a")
    await until_free(house)
    assert errors(house) == {"unreachable": 1}
    assert samples(house)["time_to_first_byte_seconds_count", "far"] == 0


@pytest.mark.parametrize(
    ("tail", "kind"),
    [(b"", "broken"), (b"data: {broken\n\n", "answer"), (event({"error": {}}), "answer")],
)
async def test_a_stream_that_breaks_off_has_begun(house: House, tail: bytes, kind: str) -> None:
    """What came of it counts."""
    front = house.front()
    house.server.answering = saying(STREAM_HEAD + chunk("one", "their/model") + tail)
    await asked(front, "sk-a", streams=True)
    await until_free(house)
    assert errors(house) == {kind: 1}
    assert samples(house)["time_to_first_byte_seconds_count", "far"] == 1
    assert samples(house)["tokens_total", "far", "output"] == 1


async def test_a_limit_of_the_key_is_ours(house: House) -> None:
    """The server has not heard of it."""
    house.key("poor", concurrency=1)
    front = house.front()
    (piece,) = await asked(front, "sk-poor", choices=2)
    assert piece.refused is not None
    assert errors(house) == {"here": 1}
    assert house.server.asked == []


async def test_what_is_under_way_shows_until_its_client_leaves(house: House) -> None:
    front = house.front()
    house.server.answering = saying_then_nothing(STREAM_HEAD + chunk("one", "their/model"))
    call = front.call("sk-a")
    ask(front, call, streams=True)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.server.until_asked()
        assert samples(house)["requests_running", "far"] == 1
        front.leave(call)
        await until_free(house)
    assert samples(house)["requests_running", "far"] == 0
    assert errors(house) == {"left": 1}


async def test_labels_are_those_of_the_configuration(house: House) -> None:
    """A model that a reload takes away is gone, though requests of it end later; one that is not
    there was never counted."""
    front = house.front()
    gone = front.call("sk-a")
    house.server.answering = saying_then_nothing(STREAM_HEAD + chunk("one", "their/model"))
    ask(front, gone, streams=True)
    nowhere = front.call("sk-a")
    ask(front, nowhere, model="x" * 99)
    await front.answered(nowhere)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.server.until_asked()
    house.models.on_change = house.sessions.catalogue_changed
    house.models.change([msgspec.structs.replace(house.model, name="other")])
    assert {name[1] for name in samples(house)} == {"other"}
    front.leave(gone)
    await until_free(house)
    assert {name[1] for name in samples(house)} == {"other"}
    house.models.change([house.model])
    assert samples(house)["requests_total", "far"] == 0


def test_kinds_of_errors_are_documented() -> None:
    """Each has a row in the page that says what to do."""
    page = Path(__file__).parents[3].joinpath("docs", "fleet.md").read_text(encoding="utf-8")
    rows: Any = [line.split("|")[1].strip() for line in page.splitlines() if line[:1] == "|"]
    assert {f"`{kind.value}`" for kind in RemoteError} <= {
        word for row in rows for word in row.split(", ")
    }
