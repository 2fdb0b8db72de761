"""A short time of fuzzing (`make fuzz` is the long one): by the OpenAPI document, and by bytes."""

from __future__ import annotations

import asyncio
import re

import httpx
import msgspec
import pytest

from appliance.api.app import create_app
from appliance.service.front_paths import is_front_path
from tests.fuzz import by_bytes, by_document
from tests.fuzz.corpus import (
    BATCH,
    BODIES,
    FILE,
    FORM,
    MESSAGE_BATCH,
    UPLOAD,
    message_batch,
    seeds,
)
from tests.fuzz.documented import Answer, answers, is_undocumented
from tests.fuzz.running import running
from tests.fuzz.target import ADDED, ANYTHING, Held
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.daemon import PID
from tests.unit.doubles.fake_service import FakeService


@pytest.mark.thorough
def test_the_document_is_true() -> None:
    """Whatever schemathesis asks is answered as the document says, and leaves nothing behind."""
    with running(keys=True, ending=True) as target:
        outcome = by_document.run(target, seed=1, examples=5, phases="fuzzing")

        assert outcome.failures == 0, outcome.report
        assert outcome.cases > 2 * outcome.operations > 80, outcome.report
        assert by_document.rest(target).requests == 0
        assert target.complaints() == ""


async def test_the_examples_of_the_document_are_answered() -> None:
    """All that it shows for the core, one behind the other: what one makes the next ones need. A
    key belongs to an organization, so keys come last."""
    names = {"/api/instances": "0", "/api/keys": "ci", "/api/organizations": "acme"}
    with running(keys=True) as target:
        async with httpx.AsyncClient(
            base_url=target.url,
            headers={"Authorization": f"Bearer {ANYTHING}"},
            timeout=PATIENCE_SECONDS,
        ) as client:
            paths = (await client.get("/api/openapi.json")).json()["paths"]
            file = ""
            for path, item in sorted(paths.items(), key=lambda one: "/api/keys" in one[0]):
                for method in item:
                    if "requestBody" not in item[method] or is_front_path(path):
                        continue
                    ((kind, shown),) = item[method]["requestBody"]["content"].items()
                    sent = shown["example"]
                    if kind == "multipart/form-data":
                        form = {"purpose": (None, sent["purpose"]), "file": ("a", sent["file"])}
                        answer = await client.request(method, path, files=form)
                        file = answer.json()["id"]
                    else:
                        if "input_file_id" in sent:
                            sent["input_file_id"] = file
                        name = names.get(path.partition("/{name}")[0], "small")
                        at = path.replace("{name}", name)
                        answer = await client.request(method, at, json=sent)
                    assert answer.is_success, f"{method} {path}: {answer.text}"


@pytest.mark.thorough
@pytest.mark.parametrize("keys", [False, True])
async def test_spoilt_requests(keys: bool) -> None:
    """None is a server's error, and nothing stays: no request, connection, task or descriptor."""
    with running(keys=keys) as target:
        outcome = await by_bytes.fuzz(target, seed=1, cases=200, warm_cases=60, keys=keys)

        assert outcome.findings == []
        assert target.complaints() == ""
        assert outcome.statuses[200] > 10
        assert outcome.statuses[400] > 25
        first, *_, last = outcome.samples
        assert (last.requests, last.connections) == (0, 0)
        assert (last.tasks, last.descriptors) == (first.tasks, first.descriptors)


@pytest.mark.thorough
async def test_a_target_serves_behind_a_quarantine_that_is_over_at_once() -> None:
    """Its worker dies all the same, and the next one loads a model. Both are asked in one breath,
    again and again, as the worker may be quicker."""
    line = "POST /api/instances/0/{} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{{}}"
    with running() as target:
        async with httpx.AsyncClient(base_url=target.url, timeout=PATIENCE_SECONDS) as client:
            for lives in range(1, 11):
                both = [await asyncio.open_connection("127.0.0.1", target.port) for _ in range(2)]
                for (_, writer), verb in zip(both, ("quarantine", "release"), strict=True):
                    writer.write(line.format(verb).encode())
                for reader, writer in both:
                    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
                    writer.close()
                    await writer.wait_closed()
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while await _instance(client) != ("up", PID + lives):
                        pass
                    await client.post("/api/models/small/load")
                    while (await client.get("/api/models/small")).json()["state"] != "loaded":
                        pass


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", [{"max_tokens": 1 << 70}, {"max_tokens": {}}, {"model": 3}])
async def test_a_target_answers_a_line_that_no_front_end_takes(wrong: dict[str, object]) -> None:
    """A batch of it ends, and the double of a front end is still there for the next."""
    asked = message_batch()
    asked["requests"][0]["params"] |= wrong
    with running() as target:
        async with httpx.AsyncClient(base_url=target.url, timeout=PATIENCE_SECONDS) as client:
            for sent in (asked, message_batch()):
                batch = (await client.post("/v1/messages/batches", json=sent)).json()["id"]
                path = f"/v1/messages/batches/{batch}"
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while (await client.get(path)).json()["processing_status"] != "ended":
                        pass
        assert target.complaints() == ""


async def _instance(client: httpx.AsyncClient) -> tuple[str, int | None]:
    """Its state and process."""
    shown = (await client.get("/api/instances/0")).json()
    return shown["state"], shown.get("pid")


async def test_an_endpoint_that_hangs_is_found() -> None:
    """Who listens long enough, and hears nothing, tells so."""

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(TimeoutError):
            await by_bytes.beginning(port, b"GET / HTTP/1.1\r\n\r\n", 0.05)


def test_a_server_error_that_is_not_documented_is_found() -> None:
    """By its code, by the message of a dialect that has none, or by its status alone if the answer
    was cut off; a defect is none that may happen."""

    def found(status: int, body: bytes | None) -> bool:
        return is_undocumented(Answer(status, body))

    assert not found(503, b'{"error":{"message":"wait","code":"overloaded"}}')
    assert not found(503, b'{"error":"the model small is being drained"}')
    assert not found(503, b'{"ok":false,"reasons":["no worker is up"]}')
    assert not found(404, b"")
    assert not found(503, None)
    assert found(504, None)
    assert found(503, b'{"error":{"message":"wait","code":"storage_failed"}}')
    assert found(503, b'{"error":{"message":"wait","code":"unheard_of"}}')
    assert found(503, b'{"error":"of a kind that no page has"}')
    assert found(503, b"<html>")
    assert found(500, b'{"error":{"message":"internal error","code":"internal_error"}}')


def test_answers_are_read_one_behind_the_other() -> None:
    """Their bodies only if all of them came."""
    first = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}"
    got = first + b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + first[:-1]

    assert list(answers(got)) == [Answer(503, b"{}"), Answer(200, None), Answer(503, None)]


@pytest.mark.thorough
async def test_every_endpoint_is_reached() -> None:
    """Whole, the requests that are to be spoilt are granted, each route and method at least once:
    no part of the API, operators' part included, is fuzzed behind a refusal alone."""
    app = create_app(FakeService(), settings=object())  # type: ignore[arg-type]
    asked = [one for one in seeds(app) if not is_front_path(one.path)]
    # What changes and makes things goes first, and what deletes them last. A key that is to belong
    # to an organization has to be there.
    turns = {"PUT": 0, "POST": 1, "DELETE": 3}
    assigned = "/organization"
    asked.sort(
        key=lambda one: (2 if one.path.endswith(assigned) else turns.get(one.method, 2), one.path)
    )
    granted: set[tuple[str, str]] = set()
    with running(keys=True) as target:
        async with httpx.AsyncClient(
            base_url=target.url,
            headers={"Authorization": f"Bearer {ANYTHING}"},
            timeout=PATIENCE_SECONDS,
        ) as client:
            ids: dict[str, str] = {}
            for one in asked:
                text = f"{one.path}{one.body!r}"
                if FILE in text or BATCH in text or MESSAGE_BATCH in text:
                    ids = await _made(client, live=one.path.endswith("/cancel"))
                path, body = one.path, one.body
                for stands, id in ids.items():
                    path = path.replace(stands, id)
                    body = body.replace(stands.encode(), id.encode())
                if one.method == "DELETE" and ADDED in text:  # by two routes
                    await client.post("/api/models", json=BODIES["POST", "/api/models"][0])
                headers = {"Content-Type": one.content_type}
                async with client.stream(one.method, path, content=body, headers=headers) as answer:
                    if answer.is_success:
                        granted.add((one.method, one.path))

    missed = []
    for route in app.routes:
        shape = re.compile(re.sub(r"/{\w+:\w+}", "/.+", route.path))
        for method in route.methods:  # type: ignore[union-attr]
            if not any(method == one and shape.fullmatch(path) for one, path in granted):
                missed.append(f"{method} {route.path}")
    assert [one for one in missed if not _NEVER_GRANTED.search(one)] == []


_NEVER_GRANTED = re.compile("/api/(push|create|copy|blobs|requests/)")
"""Ollama's are refused by design; no request of the target lives long enough to be
named."""


async def _made(client: httpx.AsyncClient, *, live: bool) -> dict[str, str]:
    """A file and two batches, by what stands for their ids; the batches are under way, as their
    model is drained, or over."""
    await client.post(f"/api/models/small/{'drain' if live else 'resume'}")
    kept = await client.post("/v1/files", content=UPLOAD, headers={"Content-Type": FORM})
    file = kept.json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/chat/completions"}
    batch = await client.post("/v1/batches", json={**asked, "completion_window": "24h"})
    messages = await client.post("/v1/messages/batches", json=message_batch())
    ids = {FILE: file, BATCH: batch.json()["id"], MESSAGE_BATCH: messages.json()["id"]}
    async with asyncio.timeout(PATIENCE_SECONDS):
        for path, word, over in (
            (f"/v1/batches/{ids[BATCH]}", "status", "completed"),
            (f"/v1/messages/batches/{ids[MESSAGE_BATCH]}", "processing_status", "ended"),
        ):
            while not live and (await client.get(path)).json()[word] != over:
                pass
    return ids


def test_what_stays_behind_is_found() -> None:
    """Another task or descriptor at the end; what there is less of is none."""
    warm = Held(port=1, requests=0, connections=0, tasks={"a": 1}, descriptors=9, rss_bytes=0)

    assert by_bytes.grown([warm, warm]) == ""
    assert by_bytes.grown([warm, msgspec.structs.replace(warm, tasks={}, descriptors=8)]) == ""
    for more in ({"tasks": {"a": 2}}, {"tasks": {"a": 1, "b": 1}}, {"descriptors": 10}):
        assert by_bytes.grown([warm, msgspec.structs.replace(warm, **more)])


def test_every_endpoint_is_spoilt() -> None:
    """All routes are asked, with each of their methods, and front ends are."""
    app = create_app(FakeService(), settings=object())  # type: ignore[arg-type]
    asked = {(seed.method, seed.path) for seed in seeds(app)}

    for route in app.routes:
        shape = re.compile(re.sub(r"/{\w+:\w+}", "/.+", route.path))
        for method in route.methods:  # type: ignore[union-attr]
            assert any(method == one and shape.fullmatch(path) for one, path in asked), route.path
    assert ("POST", "/v1/chat/completions") in asked
