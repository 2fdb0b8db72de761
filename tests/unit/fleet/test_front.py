"""The front of a fleet over real connections: what goes on, what is tried again, what is said."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from appliance.fleet import front
from appliance.fleet.front import MOST_BODIES, MOST_HELD_BYTES
from tests.unit.fleet.served_boxes import EVENTS, LINES, ScriptedBox, fleet_of

CHAT = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
PATH = "/v1/chat/completions"


async def test_a_request_goes_to_the_box_that_has_its_model_on_a_device() -> None:
    """With its query, body and headers, and its answer has the box's own headers."""
    far, near = ScriptedBox(), ScriptedBox(resident=("small",))
    near.headers.append((b"x-request-id", b"mine"))
    sent = {
        "authorization": "Bearer sk-1",
        "x-slo": "interactive",
        "x-request-id": "mine",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "connection": "x-hop",
        "x-hop": "not mine",
    }
    async with fleet_of({"far": far, "near": near}) as (client, _):
        answer = await client.post(f"{PATH}?beta=true", json=CHAT, headers=sent)

    assert answer.status_code == 200
    assert answer.json() == {"said": "it"}
    assert answer.headers["x-appliance-box"] == "near"
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert json.loads(near.bodies[0]) == CHAT
    assert (near.asked[0]["path"], near.asked[0]["query_string"]) == (PATH, b"beta=true")
    for name in ("authorization", "x-slo", "x-request-id", "traceparent"):
        assert near.header(name.encode()) == sent[name].encode()
    assert near.header(b"x-hop") is None
    assert not far.asked


@pytest.mark.parametrize("status", [429, 503])
async def test_a_refused_request_goes_to_another_box(status: int) -> None:
    refuses, takes = ScriptedBox(status=status, resident=("small",)), ScriptedBox()
    async with fleet_of({"refuses": refuses, "takes": takes, "gone": None}) as (client, fleet):
        answer = await client.post(PATH, json=CHAT)

    assert answer.status_code == 200
    assert fleet.sent == ["refuses", "takes"]


async def test_if_all_refuse_the_client_gets_a_box_own_refusal() -> None:
    """With its Retry-After; a box without the model is not asked, which would answer 404."""
    full = ScriptedBox(status=429, chunks=(b'{"error": "full"}',))
    full.headers.append((b"retry-after", b"7"))
    other = ScriptedBox(models=("other",), status=404)
    async with fleet_of({"full": full, "other": other}) as (client, _):
        answer = await client.post(PATH, json=CHAT)

    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.json() == {"error": "full"}
    assert not other.asked


@pytest.mark.parametrize("status", [400, 404, 500, 502])
async def test_other_errors_are_not_tried_again(status: int) -> None:
    boxes = [ScriptedBox(status=status), ScriptedBox(status=status)]
    async with fleet_of({"a": boxes[0], "b": boxes[1]}) as (client, fleet):
        answer = await client.post(PATH, json=CHAT)

    assert answer.status_code == status
    assert len(fleet.sent) == 1


async def test_a_box_that_died_since_it_was_asked_is_left_out() -> None:
    """It was never reached, so the request may go elsewhere."""
    near, far = ScriptedBox(resident=("small",)), ScriptedBox()
    async with fleet_of({"near": near, "far": far}) as (client, fleet):
        fleet.move("near", 9)
        answer = await client.post(PATH, json=CHAT)

    assert answer.status_code == 200
    assert fleet.sent == ["near", "far"]


async def test_no_box_is_said_in_the_words_of_the_dialect() -> None:
    async with fleet_of({"gone": None}) as (client, _):
        openai = await client.post(PATH, json=CHAT)
        anthropic = await client.post("/v1/messages", json=CHAT)
        ollama = await client.post("/api/chat", json=CHAT)
        models = await client.get("/v1/models")

    for answer in (openai, anthropic, ollama, models):
        assert answer.status_code == 503
    assert openai.headers["retry-after"] == "1"
    assert openai.json()["error"]["code"] == "no_box"
    assert anthropic.json()["error"]["type"] == "overloaded_error"
    assert "no box of the fleet" in ollama.json()["error"]


async def test_bytes_come_before_the_answer_ends() -> None:
    """The second event is made only after the client has seen the first."""
    box = ScriptedBox(
        headers=EVENTS, chunks=(b"data: 1\n\n", b"data: 2\n\n"), waits=asyncio.Event()
    )
    async with fleet_of({"box": box}) as (client, _):
        async with client.stream("POST", PATH, json=CHAT) as answer:
            chunks = answer.aiter_raw()
            assert await anext(chunks) == b"data: 1\n\n"
            assert box.waits is not None
            box.waits.set()
            assert b"".join([chunk async for chunk in chunks]) == b"data: 2\n\n"


async def test_a_client_that_hangs_up_is_gone_for_the_box() -> None:
    box = ScriptedBox(
        headers=EVENTS, chunks=(b"data: 1\n\n", b"data: 2\n\n"), waits=asyncio.Event()
    )
    async with fleet_of({"box": box}) as (client, _):
        async with client.stream("POST", PATH, json=CHAT) as answer:
            await anext(answer.aiter_raw())
        async with asyncio.timeout(60):
            await box.hung_up.wait()


@pytest.mark.parametrize(
    ("path", "headers", "begun", "ends"),
    [
        (PATH, EVENTS, b"data: 1\n\n", b"data: [DONE]\n\n"),
        ("/v1/messages", EVENTS, b"event: x\ndata: 1\n\n", b'"request_id":""}\n\n'),
        ("/api/chat", LINES, b'{"done":false}\n', b"}\n"),
    ],
)
async def test_a_stream_that_breaks_off_ends_with_an_error(
    path: str, headers: list[tuple[bytes, bytes]], begun: bytes, ends: bytes
) -> None:
    """It is not tried again: the client has a part of it."""
    boxes = {name: ScriptedBox(headers=headers, chunks=(begun,), breaks=True) for name in "ab"}
    async with fleet_of(boxes) as (client, fleet):
        answer = await client.post(path, json=CHAT)

    assert len(fleet.sent) == 1
    assert answer.content.startswith(begun)
    assert answer.content.endswith(ends)
    said = answer.content.removeprefix(begun).decode()
    assert f"box {fleet.sent[0]} had begun the request and gave no whole answer" in said
    if path == "/api/chat":
        assert "error" in json.loads(said.strip())


@pytest.mark.parametrize(
    ("begun", "lines"),
    [
        ((b" ",), 1),  # white space keeps a silent stream alive
        ((b" ", b" "), 1),
        ((b'{"done":false}\n', b" "), 2),
        ((b'{"done":false}\n  ',), 2),
        ((b' {"done":false}', b"\n"), 2),
        ((b' {"done":fal', b" "), 1),  # what broke off is left out
        ((b'{"done":false}\n{"do', b'ne":fal'), 2),
    ],
)
async def test_lines_before_and_after_a_break_are_all_json(
    begun: tuple[bytes, ...], lines: int
) -> None:
    boxes = {name: ScriptedBox(headers=LINES, chunks=begun, breaks=True) for name in "ab"}
    async with fleet_of(boxes) as (client, _):
        answer = await client.post("/api/chat", json=CHAT)

    *before, last, rest = answer.content.split(b"\n")
    assert (len(before), rest) == (lines - 1, b"")
    assert "gave no whole answer" in json.loads(last)["error"]
    assert [json.loads(line) for line in before] == [{"done": False}] * (lines - 1)


@pytest.mark.parametrize("path", [PATH, "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("begun", [(b'data: {"id', b'":"'), (b"event: x\n",), (b"event: x\nda",)])
async def test_events_before_and_after_a_break_are_whole(path: str, begun: tuple[bytes]) -> None:
    """The event that broke off is left out."""
    chunks = (b"data: {}\n", b"\n", *begun)
    boxes = {name: ScriptedBox(headers=EVENTS, chunks=chunks, breaks=True) for name in "ab"}
    async with fleet_of(boxes) as (client, _):
        answer = await client.post(path, json=CHAT)

    assert b"event: x" not in answer.content
    words = [line.removeprefix(b"data: ") for line in answer.content.splitlines()]
    first, error = [json.loads(word) for word in words if word.startswith(b"{")]
    assert first == {}
    assert "gave no whole answer" in json.dumps(error)


async def test_white_space_that_keeps_a_silent_stream_alive_comes_at_once() -> None:
    box = ScriptedBox(headers=LINES, chunks=(b" ", b'{"done":true}\n'), waits=asyncio.Event())
    async with fleet_of({"box": box}) as (client, _):
        async with client.stream("POST", "/api/chat", json=CHAT) as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == b" "
            assert box.waits is not None
            box.waits.set()
            assert await anext(pieces) == b'{"done":true}\n'


async def test_an_answer_that_is_no_stream_is_held_until_it_is_whole() -> None:
    """If it breaks off, there is an error in its place. It is not tried again."""
    boxes = {name: ScriptedBox(breaks=True) for name in "ab"}
    async with fleet_of(boxes) as (client, fleet):
        answer = await client.post(PATH, json=CHAT)

    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "box_failed"
    assert len(fleet.sent) == 1


@pytest.mark.parametrize("more", [0, 1])
async def test_a_long_answer_is_not_held(more: int) -> None:
    """Its format has no place for an error: the connection ends, and the client notices. One that
    does not break off is whole."""
    long = b'"' + b"x" * MOST_HELD_BYTES + b'"'
    box = ScriptedBox(chunks=(long,) * (1 + more), breaks=not more)
    async with fleet_of({"box": box}) as (client, _):
        if more:
            assert (await client.post(PATH, json=CHAT)).content == 2 * long
        else:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post(PATH, json=CHAT)


async def test_all_answers_together_are_not_held_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they would be too much, one begins before it is whole, and leaves room to the other."""
    monkeypatch.setattr(front, "MOST_HELD_ANSWERS", 1)
    first, last = b'"' + b"x" * (MOST_HELD_BYTES * 2 // 3), b'"'
    box = ScriptedBox(chunks=(first, last), waits=asyncio.Event())
    async with fleet_of({"box": box}) as (client, _):
        request = client.build_request("POST", PATH, json=CHAT)
        begun = {asyncio.ensure_future(client.send(request, stream=True)) for _ in range(2)}
        done, others = await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), len(others)) == (1, 1)

        assert box.waits is not None
        box.waits.set()
        answers = [await one for one in begun]
        assert {await answer.aread() for answer in answers} == {first + last}

        box.breaks = True  # there is room again: the error has the place of the answer
        assert (await client.post(PATH, json=CHAT)).status_code == 502


async def test_a_box_that_breaks_off_before_it_answers_is_not_asked_again() -> None:
    """It may be the request that ended it, and would end the next one."""

    async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(hangs_up, "127.0.0.1", 0)
    near, far = ScriptedBox(resident=("small",)), ScriptedBox()
    async with server, fleet_of({"near": near, "far": far}) as (client, fleet):
        fleet.move("near", server.sockets[0].getsockname()[1])
        answer = await client.post(PATH, json=CHAT)

    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "box_failed"
    assert not far.asked


async def test_lists_are_those_of_all_boxes() -> None:
    boxes = {"a": ScriptedBox(models=("x", "y")), "b": ScriptedBox(models=("y", "z")), "c": None}
    async with fleet_of(boxes) as (client, _):
        listed = (await client.get("/v1/models")).json()
        rows = (await client.get("/api/fleet")).json()["boxes"]

    assert [row["id"] for row in listed["data"]] == ["x", "y", "z"]
    assert [(row["box"], row["status"]) for row in rows] == [("a", 200), ("b", 200), ("c", 0)]
    assert rows[0]["load"]["catalogue"] == ["x", "y"]
    assert rows[2]["load"] is None


@pytest.mark.parametrize("path", ["/api/status", "/v1/files", "/v1/batches/1", "/api/keys"])
async def test_what_is_of_one_box_is_not_passed_on(path: str) -> None:
    box = ScriptedBox()
    async with fleet_of({"box": box}) as (client, _):
        answer = await client.get(path)

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_of_a_fleet"
    assert not box.asked


async def test_a_body_that_is_too_long_is_refused() -> None:
    box = ScriptedBox()
    async with fleet_of({"box": box}) as (client, _):
        answer = await client.post(PATH, content=b"x" * (1 << 17))

    assert answer.status_code == 413
    assert not box.asked


async def test_bodies_of_all_requests_together_are_bounded() -> None:
    """A further one is refused until some have ended; a short one still has room."""
    box = ScriptedBox(chunks=(b"{", b"}"), waits=asyncio.Event())
    long = b"x" * 60_000
    async with fleet_of({"box": box}) as (client, _):
        asked = [asyncio.create_task(client.post(PATH, content=long)) for _ in range(MOST_BODIES)]
        while len(box.asked) < MOST_BODIES:  # noqa: ASYNC110 - requests come from all clients
            await asyncio.sleep(0)
        refused = await client.post(PATH, content=long)
        short = asyncio.create_task(client.post(PATH, json=CHAT))
        assert box.waits is not None
        box.waits.set()
        answers = [await one for one in (*asked, short)]
        later = await client.post(PATH, content=long)

    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "fleet_full"
    assert {answer.status_code for answer in (*answers, later)} == {200}


async def test_a_model_is_looked_up_where_it_is() -> None:
    boxes = {"a": ScriptedBox(models=("org/x",)), "b": ScriptedBox(models=("y",))}
    async with fleet_of(boxes) as (client, fleet):
        await client.get("/v1/models/org/x")
        await client.get("/v1/models/y:latest")
        await client.post("/api/show", json={"name": "y"})

    assert fleet.sent == ["a", "b", "b"]
