"""Responses that the core stores: whose they are, how long, and what clients may do with them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.access.admission import Admission
from appliance.access.auth import Access
from appliance.access.keys import Key, KeyFile, KeyRing, digest
from appliance.api.app import create_app
from appliance.gateway.responses import EACH_BYTES, StoredResponses
from appliance.gateway.sessions import FrontSettings, Sessions
from appliance.service.front_frames import (
    MAX_STORED_BYTES,
    FindResponse,
    FoundResponse,
    KeepEvent,
    KeepResponse,
)
from tests.docblocks import code_blocks
from tests.unit.doubles.fake_service import FakeService
from tests.unit.doubles.front import FrontDouble

DONE = "completed"
SPELT_OUT = [
    block.text.split()
    for block in code_blocks("docs/openai-endpoints.md", "json", containing="/resp_1")
]


class Box:
    """A core with the keys ``sk-anna`` and ``sk-ben``, and a front end."""

    def __init__(self, path: Path) -> None:
        file = KeyFile(path)
        for name in ("anna", "ben"):
            file.add(Key(name=name, sha256=digest(f"sk-{name}"), created_seconds=0.0))
        self.service = FakeService()
        access = Access(KeyRing(path))
        admission = Admission(self.service, access)  # type: ignore[arg-type]
        settings = FrontSettings(keep_alive_seconds=5.0, max_body_bytes=1000)
        self.sessions = Sessions(self.service, access, admission, settings)  # type: ignore[arg-type]
        self.front = FrontDouble(self.sessions)
        self.app: Any = create_app(
            self.service,  # type: ignore[arg-type]
            access=access,
            admission=admission,
            responses=self.sessions.responses,
        )

    @asynccontextmanager
    async def client(self, secret: str = "sk-anna") -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        headers = {"authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://appliance", headers=headers
        ) as client:
            yield client

    def make(self, id: str = "resp_1", secret: str = "sk-anna", **fields: Any) -> int:
        """Have a front end store a response; its call, which is not over."""
        call = self.front.call(secret)
        self.keep(call, id, **fields)
        return call

    def keep(self, call: int, id: str = "resp_1", **fields: Any) -> None:
        status = fields.pop("status", DONE)
        self.front.say(
            KeepResponse(
                call=call,
                response=id,
                answer=answer_of(id, status, **fields),
                messages=b'["hello"]',
                background=status in ("queued", "in_progress"),
            )
        )

    def found(self, response: str, secret: str) -> FoundResponse:
        """What a front end is told that asks for a response in a call of a key."""
        call = self.front.call(secret)
        self.front.say(FindResponse(call, response))
        self.front.leave(call)
        return self.front.heard(FoundResponse)[-1]


def answer_of(id: str, status: str, **fields: Any) -> bytes:
    return json.dumps({"id": id, "object": "response", "status": status} | fields).encode()


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path / "keys.json")


async def test_a_response_is_there_after_its_front_end_died(box: Box) -> None:
    box.front.leave(box.make(output=[{"text": "Tiber"}]))
    box.front.die()
    async with box.client() as client:
        answer = await client.get("/v1/responses/resp_1")
        assert answer.status_code == 200
        assert answer.json()["output"] == [{"text": "Tiber"}]
    box.front = FrontDouble(box.sessions)
    assert box.found("resp_1", "sk-anna").messages == b'["hello"]'


async def test_a_response_is_its_keys_alone(box: Box) -> None:
    """Another key cannot read, cancel or delete it, go on from it, or put one in its place."""
    call = box.make(status="queued")
    async with box.client("sk-ben") as client:
        for method, path in (
            ("GET", "/v1/responses/resp_1"),
            ("DELETE", "/v1/responses/resp_1"),
            ("POST", "/v1/responses/resp_1/cancel"),
        ):
            answer = await client.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert box.found("resp_1", "sk-ben").answer is None
    box.front.leave(box.make(secret="sk-ben", output=["another"]))
    box.front.leave(call)
    async with box.client() as client:
        assert "output" not in (await client.get("/v1/responses/resp_1")).json()


async def test_a_deleted_response_is_gone(box: Box) -> None:
    box.front.leave(box.make())
    async with box.client() as client:
        answer = await client.delete("/v1/responses/resp_1")
        assert answer.json() == {"id": "resp_1", "object": "response", "deleted": True}
        assert (await client.get("/v1/responses/resp_1")).status_code == 404
        assert (await client.delete("/v1/responses/resp_1")).status_code == 404
    assert box.found("resp_1", "sk-anna").answer is None


async def test_a_response_in_the_background_is_cancelled(box: Box) -> None:
    """Its request ends at once, and what the front end says of it later changes nothing."""
    call = box.make(status="queued")
    box.front.submit(call, "r1")
    async with box.client() as client:
        answer = await client.post("/v1/responses/resp_1/cancel")
        assert answer.json()["status"] == "cancelled"
        assert box.front.refused["r1"].code == "cancelled"
        assert not box.service.live
        box.keep(call, status="failed")
        box.front.submit(call, "r2")
        assert box.front.refused["r2"].code == "cancelled"
        box.front.leave(call)
        assert (await client.get("/v1/responses/resp_1")).json()["status"] == "cancelled"
        again = await client.post("/v1/responses/resp_1/cancel")
        assert again.status_code == 400


async def test_a_response_that_is_made_cannot_be_cancelled(box: Box) -> None:
    box.front.leave(box.make())
    async with box.client() as client:
        answer = await client.post("/v1/responses/resp_1/cancel")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "Cannot cancel a synchronous response."


@pytest.mark.parametrize(("method", "path"), SPELT_OUT)
async def test_examples_that_are_spelt_out(box: Box, method: str, path: str) -> None:
    box.make(status="queued")
    async with box.client() as client:
        assert (await client.request(method, path)).status_code == 200


@pytest.mark.parametrize("dies", [False, True])
async def test_a_response_whose_call_ends_early_failed(box: Box, dies: bool) -> None:
    call = box.make(status="in_progress")
    if dies:
        box.front.die()
    else:
        box.front.leave(call)
    async with box.client() as client:
        assert (await client.get("/v1/responses/resp_1")).json()["status"] == "failed"


async def test_events_are_streamed_until_the_response_is_made(box: Box) -> None:
    """Those that were, then those that come; from the one on that the client wants."""
    call = box.make(status="in_progress")
    for number in range(3):
        box.front.say(KeepEvent(call, b"data: %d\n\n" % number))
    async with box.client() as client:

        async def streamed(**query: Any) -> bytes:
            answer = await client.get("/v1/responses/resp_1", params={"stream": "true", **query})
            assert answer.headers["content-type"].startswith("text/event-stream")
            return answer.content

        readers = [
            asyncio.create_task(streamed()),
            asyncio.create_task(streamed(starting_after=1)),
        ]
        for _ in range(20):
            await asyncio.sleep(0)
        box.front.say(KeepEvent(call, b"data: 3\n\n"))
        box.keep(call, status=DONE)
        box.front.leave(call)
        whole = b"data: 0\n\ndata: 1\n\ndata: 2\n\ndata: 3\n\n"
        assert await asyncio.gather(*readers) == [whole, b"data: 2\n\ndata: 3\n\n"]
        assert await streamed() == whole


@pytest.mark.parametrize(
    ("query", "param"),
    [("stream=true", "stream"), ("starting_at=1", "starting_at")],
)
async def test_what_cannot_be_streamed_is_refused_by_name(box: Box, query: str, param: str) -> None:
    box.front.leave(box.make())
    async with box.client() as client:
        answer = await client.get(f"/v1/responses/resp_1?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=true&starting_after=x", "starting_after"),
        ("starting_after=-1", "starting_after"),
        ("stream=false&starting_after=null", "starting_after"),
        ("stream=null", "stream"),
        ("stream=2", "stream"),
        ("stream=", "stream"),
    ],
)
async def test_a_wrong_query_is_refused_whether_it_streams_or_not(
    box: Box, query: str, param: str
) -> None:
    call = box.make(status="in_progress")
    box.front.say(KeepEvent(call, b"data: 0\n\n"))
    async with box.client() as client:
        answer = await client.get(f"/v1/responses/resp_1?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("query", ["stream=False", "stream=0&starting_after=3", "stream=false"])
async def test_a_response_that_is_not_streamed(box: Box, query: str) -> None:
    box.front.leave(box.make())
    async with box.client() as client:
        answer = await client.get(f"/v1/responses/resp_1?{query}")
    assert answer.status_code == 200


async def test_what_is_too_large_is_not_stored(box: Box) -> None:
    box.front.leave(box.make(output="a" * MAX_STORED_BYTES))
    assert box.found("resp_1", "sk-anna").answer is None


async def test_what_is_no_response_is_not_stored(box: Box) -> None:
    call = box.front.call("sk-anna")
    box.front.say(KeepResponse(call=call, response="resp_1", answer=b"[]", messages=b"[]"))
    assert box.found("resp_1", "sk-anna").answer is None


def test_a_full_store_gives_up_the_oldest_of_the_owner_that_has_most() -> None:
    stored = StoredResponses(max_bytes=6 * (EACH_BYTES + 40))
    stored.keep("anna", "first", answer_of("first", DONE), b"")
    for number in range(20):
        stored.keep("ben", f"r{number}", answer_of(f"r{number}", DONE), b"")
    assert stored.find("anna", "first") is not None
    assert stored.find("ben", "r19") is not None
    assert stored.find("ben", "r0") is None


def test_many_small_responses_do_not_displace_a_large_one_of_another_owner() -> None:
    stored = StoredResponses(max_responses=4)
    stored.keep("anna", "large", answer_of("large", DONE), b"m" * 100_000)
    for number in range(20):
        stored.keep("ben", f"r{number}", answer_of(f"r{number}", DONE), b"")
    assert stored.find("anna", "large") is not None
    assert stored.find("ben", "r19") is not None
    assert stored.find("ben", "r16") is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["keep", "add", "end", "remove"]),
            st.sampled_from(["anna", "ben"]),
            st.integers(0, 4),
            st.integers(0, 3000),
        ),
        max_size=60,
    )
)
def test_no_more_is_kept_than_there_is_room_for(steps: list[tuple[str, str, int, int]]) -> None:
    stored = StoredResponses(max_bytes=8000, max_responses=4)
    known: dict[tuple[str, str], Any] = {}
    for what, owner, number, size in steps:
        name = f"r{number}"
        if what == "keep":
            answer = answer_of(name, "in_progress")
            known[owner, name] = stored.keep(owner, name, answer, b"m" * size)
        elif (owner, name) in known:
            response = known[owner, name]
            if what == "add":
                stored.add(response, b"e" * size)
            elif what == "end":
                stored.end(response, "failed")
            elif stored.find(owner, name) is response:
                stored.remove(response)
        there = {
            id(response): response
            for owner_id, response in known.items()
            if stored.find(*owner_id) is response
        }
        assert len(there) <= 4
        assert sum(response.size_bytes for response in there.values()) <= 8000
