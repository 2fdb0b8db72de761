"""Models of a running daemon over HTTP and on the command line, over worker doubles."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from appliance.api.app import create_app
from appliance.http.errors import as_api_error
from appliance.journal import Journal, read, replay
from appliance.service.interface import GenerationFailed, ModelQueueFull, ModelTerms
from appliance.vocabulary import (
    EvictModel,
    ModelEvictRequested,
    ModelFailed,
    ModelLoadRequested,
    PrefetchModel,
    RequestArrived,
    Slo,
)
from tests.unit.doubles.cluster import SLO
from tests.unit.doubles.daemon import Box, setup_of, small
from tests.unit.doubles.serving import Call, commanded, unserved


@pytest.fixture
async def box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Box]:
    """A box whose worker is up, one of whose models has a slash in its name; what happens is
    written down, and follows from what the machine was told."""
    models = {**small("a"), "org/b": small("b")["b"]}
    setup = setup_of(models, policy="serverlessllm")
    journal = Journal(tmp_path / "journal", setup)
    box = Box(monkeypatch, models, setup, journal=journal)
    box.start()
    yield box
    box.daemon.host.close()
    assert box.take_failures() == []
    journal.close()
    assert replay(tmp_path / "journal")[1] == []


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


async def test_models_are_shown(client: httpx.AsyncClient) -> None:
    """All of them, or one, with the terms it is served on."""
    models = (await client.get("/api/models")).json()["models"]
    one = (await client.get("/api/models/org/b")).json()

    assert [model["model"] for model in models] == ["a", "org/b"]
    assert one == models[1]
    assert one["terms"] == {
        "slo": {"ttft_seconds": 10.0, "tbt_seconds": 0.1, "gap_seconds": 0.0},
        "batch_slo": {"ttft_seconds": 3600.0, "tbt_seconds": 2.0, "gap_seconds": 0.0},
        "max_queue": 1024,
        "pinned": False,
        "aliases": [],
    }
    assert (one["draining"], one["load_requested"]) == (False, False)


async def test_a_model_is_loaded_and_evicted(box: Box, client: httpx.AsyncClient) -> None:
    """The answers say where it is; the worker is told."""
    loading = (await client.post("/api/models/org/b/load")).json()
    box.settle()
    loaded = (await client.post("/api/models/org/b/load")).json()
    evicted = (await client.post("/api/models/org/b/evict")).json()

    assert (loading["state"], loading["load_requested"]) == ("loading", True)
    assert (loaded["state"], loaded["load_requested"]) == ("loaded", False)
    assert evicted["state"] == "cold"
    assert [command.model for command in box.workers[0].heard(PrefetchModel)] == ["org/b"]
    assert [command.model for command in box.workers[0].heard(EvictModel)] == ["org/b"]


async def test_a_model_is_drained(box: Box, client: httpx.AsyncClient) -> None:
    """New requests are told to come again, with the header for it, until it is resumed."""
    stream = box.ask("r1", "a")
    drained = (await client.post("/api/models/a/drain")).json()

    with pytest.raises(GenerationFailed, match="being drained") as caught:
        box.ask("r2", "a")
    assert (caught.value.code, caught.value.status) == ("model_draining", 503)
    assert caught.value.retry_after_seconds == 1.0
    assert (drained["draining"], drained["running"]) == (True, 1)

    box.settle()
    assert [len(batch) async for batch in stream] == [5]
    resumed = (await client.post("/api/models/a/resume")).json()
    assert resumed["draining"] is False
    box.ask("r3", "a")
    box.settle()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nobody/load", "model 'nobody' does not exist"),
        ("nobody/evict", "model 'nobody' does not exist"),
        ("nobody/drain", "model 'nobody' does not exist"),
        ("a/lod", "ends with load, evict, drain or resume"),
        ("load", "ends with load"),
    ],
)
async def test_what_is_not_there_is_not_found(
    client: httpx.AsyncClient, path: str, message: str
) -> None:
    """Neither models nor verbs."""
    answer = await client.post(f"/api/models/{path}")

    assert answer.status_code == 404
    assert message in answer.json()["error"]["message"]


async def test_a_failed_model_is_not_loaded(box: Box, client: httpx.AsyncClient) -> None:
    """Whoever asks for it hears why."""
    box.workers[0].deliver(ModelFailed(instance=0, model="a", reason="its files are gone"))

    answer = await client.post("/api/models/a/load")

    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_failed")
    assert answer.json()["error"]["message"] == "its files are gone"


async def test_new_requests_get_new_promises(box: Box, tmp_path: Path) -> None:
    """Requests that are live keep the old ones; everything is in the journal."""
    terms = ModelTerms(
        slo=Slo(ttft_seconds=1.0, tbt_seconds=0.01), batch_slo=SLO, max_queue=2, pinned=True
    )
    box.ask("r1", "a", output=20)
    box.daemon.catalogue.change("a", terms)
    box.ask("r2", "a", output=20)

    assert box.daemon.machine.requests["r1"].spec.slo == SLO
    assert box.daemon.machine.requests["r2"].spec.slo == terms.slo
    assert box.daemon.model_activity("a").terms == terms
    box.daemon.load_model("a")
    box.daemon.evict_model("a")
    box.settle()
    journal = box.daemon._decisions._journal
    assert journal is not None
    journal.close()
    told = [entry.event for entry in read(tmp_path / "journal")[1]]
    assert {ModelLoadRequested(model="a"), ModelEvictRequested(model="a")} <= {
        event for event in told if isinstance(event, ModelLoadRequested | ModelEvictRequested)
    }
    assert sum(isinstance(event, RequestArrived) for event in told) == 2
    box.daemon._decisions._journal = None


async def test_each_model_has_a_queue(box: Box, client: httpx.AsyncClient) -> None:
    """One request more than its model may have is told to come again; others are not concerned."""
    terms = ModelTerms(slo=SLO, batch_slo=SLO, max_queue=1, pinned=False)
    box.daemon.catalogue.change("a", terms)
    box.ask("r1", "a")

    with pytest.raises(ModelQueueFull, match="the queue of a is full") as caught:
        box.ask("r2", "a")
    refused = as_api_error(caught.value)
    assert (refused.status, refused.headers) == (429, {"Retry-After": "1"})
    box.ask("r3", "org/b")

    box.settle()
    box.ask("r4", "a")
    box.settle()


async def test_models_on_the_command_line(box: Box, call: Call) -> None:
    """Each says what is the case afterwards."""
    coming = await call("load", "org/b")
    box.settle()
    there = await call("load", "org/b")
    drained, resumed = await call("drain", "a"), await call("resume", "a")
    left, whole = await call("stop", "org/b"), await call("stop", "a", "--json")
    missing = await call("stop", "nobody")

    assert coming.stdout == "org/b is on its way to a device\n"
    assert there.stdout == "org/b is on a device\n"
    assert drained.stdout == "a takes no new requests; 0 are live\n"
    assert resumed.stdout == "a takes requests\n"
    assert left.stdout == "org/b leaves its devices\n"
    assert json.loads(whole.stdout)["model"] == "a"
    assert (missing.exit_code, missing.stderr) == (1, "error: model 'nobody' does not exist\n")
