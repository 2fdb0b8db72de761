"""Live requests over HTTP and on the command line, in front of a daemon over worker doubles."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest

from appliance.api.app import create_app
from appliance.cli.requests import print_requests
from appliance.service.front_frames import BodyActivity
from appliance.service.interface import GenerationFailed, RequestNotFound
from appliance.vocabulary import RequestClass
from tests.unit.doubles.daemon import Box, setup_of, small
from tests.unit.doubles.serving import Call, commanded, unserved


@pytest.fixture
async def box(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Box]:
    """A box whose worker is up, with a request that decodes and one behind it."""
    models = small("ab")
    box = Box(monkeypatch, models, setup_of(models, policy="serverlessllm"))
    box.start()
    box.ask("chat-1", "a", output=50)
    box.work_until(lambda: box.world.lives["chat-1"].produced == 3)
    box.ask("chat-2", "b", kind=RequestClass.BATCH)
    yield box
    box.daemon.host.close()
    assert box.take_failures() == []


@pytest.fixture
async def client(box: Box) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a network."""
    async with unserved(create_app(box.daemon)) as client:
        yield client


@pytest.fixture
async def call(box: Box) -> AsyncIterator[Call]:
    """Runs `appliance` against the daemon."""
    async with commanded(create_app(box.daemon)) as call:
        yield call


async def test_requests_are_listed(box: Box, client: httpx.AsyncClient) -> None:
    """The oldest first; what is computed has no reason to wait."""
    box.now += 2.0

    first, second = (await client.get("/api/requests")).json()["requests"]

    assert first["id"] == "chat-1"
    assert (first["model"], first["request_class"], first["phase"]) == (
        "a",
        "interactive",
        "running",
    )
    assert (first["prompt_tokens"], first["output_tokens"], first["max_tokens"]) == (20, 3, 50)
    assert (first["instance"], first["kv"], first["reason"]) == (0, "device", None)
    assert first["age_seconds"] > 2.0
    assert (second["id"], second["request_class"], second["phase"]) == (
        "chat-2",
        "batch",
        "queued",
    )
    assert (second["reason"]["code"], second["reason"]["behind"]) == ("other_model", "a")


async def test_one_request_is_shown(client: httpx.AsyncClient) -> None:
    """By its id; one that is not live is not found."""
    found = await client.get("/api/requests/chat-2")
    missing = await client.get("/api/requests/chat-3")

    assert (found.status_code, found.json()["id"]) == (200, "chat-2")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")


async def test_a_request_is_cancelled(box: Box, client: httpx.AsyncClient) -> None:
    """Its client gets what there is and then an error; its memory is free, others go on."""
    stream = box.clients["chat-1"]
    box.world.lives["chat-1"].outcome = "cancelled"

    answer = await client.delete("/api/requests/chat-1")
    again = await client.delete("/api/requests/chat-1")
    box.settle()

    assert (answer.status_code, answer.json()["cancelled"]["output_tokens"]) == (200, 3)
    assert again.status_code == 404
    with pytest.raises(GenerationFailed, match="an operator cancelled") as caught:
        async for _ in stream:
            pass
    assert (caught.value.code, caught.value.status) == ("cancelled", 499)
    assert box.samples("appliance_requests_total") == {
        "model=a,outcome=cancelled": 1,
        "model=b,outcome=length": 1,
    }
    with pytest.raises(RequestNotFound):
        box.daemon.cancel_request("chat-1")


async def test_requests_on_the_command_line(call: Call) -> None:
    """A table for people, the whole for programs."""
    table = await call("requests")
    whole = await call("requests", "--json")

    words = [line.split() for line in table.stdout.splitlines()]
    assert words[0][:3] == ["ID", "MODEL", "CLASS"]
    assert words[1][:4] == ["chat-1", "a", "interactive", "running"]
    assert words[2][-1] == "other_model"
    assert [row["id"] for row in json.loads(whole.stdout)] == ["chat-1", "chat-2"]


async def test_bodies_on_the_command_line(box: Box) -> None:
    """Those that still come in are summed up, as what they ask is not known yet."""
    coming = [
        BodyActivity(path="/v1/embeddings", key=key, received_bytes=700, age_seconds=1.0)
        for key in ("bob", "alice", None)
    ]
    async with commanded(create_app(box.daemon, bodies=lambda: coming)) as call:
        told = await call("requests")
    last = "3 bodies are still coming in (alice, bob, no key): 2100 bytes so far"
    assert told.stdout.splitlines()[-1] == last


async def test_why_a_request_waits(call: Call) -> None:
    """One sentence; what is computed waits for nothing; what is not live is an error."""
    waits, runs = await call("why", "chat-2"), await call("why", "chat-1")
    missing, whole = await call("why", "chat-3"), await call("why", "chat-2", "--json")

    assert "it waits (other_model): a decodes on instance 0" in waits.stdout
    assert runs.stdout.splitlines()[-1] == "it is computed now"
    assert (missing.exit_code, missing.stderr) == (1, "error: no request 'chat-3' is live\n")
    assert json.loads(whole.stdout)["reason"]["code"] == "other_model"


async def test_cancel_on_the_command_line(box: Box, call: Call) -> None:
    """It says what it ended."""
    box.world.lives["chat-1"].outcome = "cancelled"

    result = await call("cancel", "chat-1")

    assert result.stdout == "cancelled chat-1 after 3 tokens\n"
    assert "chat-1" not in box.daemon.machine.requests
    assert (await call("cancel", "chat-1")).exit_code == 1


def test_the_list_says_until_when_a_request_is_held(capsys: pytest.CaptureFixture[str]) -> None:
    """Its reason is for `appliance why`."""
    row: dict[str, object] = {
        "id": "r1",
        "model": "a",
        "request_class": "batch",
        "phase": "unplaced",
    }
    row |= {"age_seconds": 1.0, "output_tokens": 0, "instance": None}
    message = "held until 22:00:00 by the policy: batch work begins at night"

    print_requests([row | {"reason": {"code": "held", "message": message}}])

    assert capsys.readouterr().out.splitlines()[1].endswith("  held until 22:00:00")
