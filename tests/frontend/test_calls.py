"""What a front end and the core say to each other about calls, requests and connections."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from appliance.service import front_frames
from appliance.service.front_frames import (
    LARGE_BYTES,
    Abort,
    Drain,
    Enter,
    Entered,
    FrontModel,
    Leave,
    ModelRefused,
    Ping,
    Pong,
    Ran,
    Reading,
    Ready,
    Refused,
    Run,
    StopRun,
    Submit,
)
from appliance.vocabulary import FinishReason, RequestClass
from tests.frontend.conftest import KEEP_ALIVE_SECONDS
from tests.frontend.stand_in_core import TIMING, StandInCore, front_end
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "model": "talker",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 6,
}


@pytest_asyncio.fixture(loop_scope="session")
async def http(core: StandInCore) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as client:
        yield client


# --- entering ------------------------------------------------------------------------------------


async def test_a_call_is_entered_before_its_body_is_read(core: StandInCore) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", core.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer key\r\n"
        b"cookie: secret\r\ncontent-length: 100\r\n\r\n"
    )
    enter = await core.seen(Enter)
    assert (enter.method, enter.path, enter.client) == ("POST", "/v1/completions", "127.0.0.1")
    assert dict(enter.headers) == {"host": "localhost", "authorization": "Bearer key"}
    assert enter.connection == core.connections
    writer.close()
    assert (await core.seen(Leave)).call == enter.call
    del reader


async def test_lists_of_tokens_are_bounded_for_all_choices(http: httpx.AsyncClient) -> None:
    """Each choice has a copy of them in the front end, in the core and in the worker."""
    listed = list(range(10, 1500))
    asked = ASKED | {"stop_token_ids": listed, "logit_bias": {str(token): 1 for token in listed}}

    few = await http.post(CHAT, json=asked | {"n": 8})
    many = await http.post(CHAT, json=asked | {"n": 128})

    assert few.status_code == 200
    assert many.status_code == 400
    assert "stop_token_ids, logit_bias" in many.json()["error"]["message"]


async def test_a_refused_call_is_answered_in_the_dialect_of_its_path(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    core.entering = lambda enter: Refused(
        call=enter.call,
        status=401,
        code="invalid_api_key",
        message="an API key is needed",
        headers=(("WWW-Authenticate", "Bearer"),),
    )
    openai = await http.post(CHAT, json=ASKED)
    assert openai.status_code == 401
    assert openai.headers["www-authenticate"] == "Bearer"
    assert openai.json()["error"]["code"] == "invalid_api_key"
    anthropic = await http.post("/v1/messages", json=ASKED)
    assert anthropic.json()["error"]["type"] == "authentication_error"
    ollama = await http.post("/api/chat", json=ASKED)
    assert ollama.json() == {"error": "an API key is needed"}


async def test_headers_of_the_core_and_the_request_id_go_into_every_answer(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    core.entering = lambda enter: Entered(
        call=enter.call, headers=(("x-ratelimit-remaining-requests", "7"),)
    )
    for body in (ASKED, {"model": "nobody"}):
        answer = await http.post(CHAT, json=body, headers={"x-request-id": "mine"})
        assert answer.headers["x-ratelimit-remaining-requests"] == "7"
        assert answer.headers["x-request-id"] == answer.headers["request-id"] == "mine"
    assert (await core.seen(Submit)).request.startswith("chatcmpl-mine-")


async def test_a_model_that_the_key_does_not_allow_is_unknown(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    core.entering = lambda enter: Entered(call=enter.call, models=("other",))
    hidden = await http.post(CHAT, json=ASKED)
    unknown = await http.post(CHAT, json=ASKED | {"model": "nobody"})
    assert hidden.status_code == unknown.status_code == 404
    assert hidden.text.replace("talker", "nobody") == unknown.text
    assert (await http.post(CHAT, json=ASKED | {"model": "other"})).status_code == 200


async def test_a_body_that_is_too_large_is_refused(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    answer = await http.post(CHAT, json=ASKED | {"user": "x" * (1 << 20)})
    assert answer.status_code == 413

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(1 << 6):
            yield b" " * (1 << 15)

    assert (await http.post(CHAT, content=parts())).status_code == 413


async def test_bodies_of_one_key_leave_room_to_others(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    """All together have 2 MiB here, a key three quarters of it. What a key sends beyond it is
    refused at once, also what stalls; operators see what still comes in."""
    core.entering = lambda enter: Entered(
        call=enter.call, key=dict(enter.headers)["authorization"].removeprefix("Bearer ")
    )
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer mallory\r\n"
        f"content-length: {1 << 20}\r\n\r\n"
    )
    writers = []
    for number in range(4):
        reader, writer = await asyncio.open_connection("127.0.0.1", core.port)
        writers.append(writer)
        writer.write(head.encode() + b" " * (900 << 10))
        await writer.drain()
        if number == 0:
            while not (shown := (await pinged(core)).bodies):
                pass
            while shown[0].received_bytes < 900 << 10:
                shown = (await pinged(core)).bodies
            assert [(one.path, one.key) for one in shown] == [(CHAT, "mallory")]
        else:
            assert (await reader.readline()).startswith(b"HTTP/1.1 429")
            while b"too_many_bodies" not in await reader.readline():
                pass

    padded = ASKED | {"messages": [{"role": "user", "content": "hello" + " " * (300 << 10)}]}
    answer = await http.post(CHAT, json=padded, headers={"authorization": "Bearer alice"})
    assert answer.status_code == 400  # too long for the model, so it was read
    answer = await http.post(CHAT, json=ASKED, headers={"authorization": "Bearer alice"})
    assert answer.status_code == 200
    for writer in writers:
        writer.close()


async def pinged(core: StandInCore) -> Pong:
    """What the front end says of itself now."""
    core.frames.clear()
    core.send(Ping(1))
    return await core.seen(Pong)


@pytest.mark.parametrize(
    ("path", "more", "told"),
    [
        (CHAT, {}, "there are 1025 messages"),
        ("/v1/messages", {}, "there are 1025 messages"),
        (CHAT, {"truncate_prompt_tokens": 10}, None),
        ("/tokenize", {}, None),
    ],
)
async def test_more_messages_than_tokens_are_refused(
    core: StandInCore, http: httpx.AsyncClient, path: str, more: dict[str, Any], told: str | None
) -> None:
    """Before they are rendered, where they have to fit into the context of 1024 tokens."""
    body = ASKED | {"messages": [{"role": "user", "content": ""}] * 1025} | more
    answer = await http.post(path, json=body)
    assert answer.status_code == (200 if told is None else 400)
    if told is not None:
        assert told in answer.json()["error"]["message"]


async def test_a_page_of_this_machine_may_ask(core: StandInCore, http: httpx.AsyncClient) -> None:
    asking = {
        "origin": "http://localhost:3000",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    }
    core.entering = lambda enter: Refused(
        call=enter.call, status=401, code="invalid_api_key", message="a key is needed"
    )
    preflight = await http.options(CHAT, headers=asking)
    core.script()
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert preflight.headers["access-control-allow-headers"] == "content-type"
    answer = await http.post(CHAT, json=ASKED, headers={"origin": "https://pages.example"})
    assert answer.headers["access-control-allow-origin"] == "https://pages.example"
    other = await http.post(CHAT, json=ASKED, headers={"origin": "https://elsewhere.example"})
    assert "access-control-allow-origin" not in other.headers


async def test_fields_that_are_ignored_are_named(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    answer = await http.post(CHAT, json=ASKED | {"safety_identifier": "x"})
    assert answer.status_code == 200
    assert answer.headers["x-appliance-ignored"] == "safety_identifier"


async def test_flexible_work_is_of_the_class_batch(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    await http.post(CHAT, json=ASKED | {"service_tier": "flex"})
    assert (await core.seen(Submit)).request_class is RequestClass.BATCH


# --- what an answer says of itself ---------------------------------------------------------------

ASKING: dict[str, dict[str, Any]] = {
    CHAT: ASKED,
    "/v1/completions": {"model": "talker", "prompt": "hello", "max_tokens": 6, "n": 2},
    "/v1/responses": {"model": "talker", "input": "hello", "max_output_tokens": 6},
    "/v1/messages": ASKED,
    "/api/chat": {"model": "talker", "messages": ASKED["messages"], "options": {"num_predict": 6}},
}
LAST: dict[str, str] = {
    CHAT: "data: [DONE]",
    "/v1/completions": "data: [DONE]",
    "/v1/responses": "event: response.completed",
    "/v1/messages": "event: message_stop",
}
"""How the last event of a stream begins."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKING)
async def test_an_answer_names_its_first_request(
    core: StandInCore, http: httpx.AsyncClient, path: str, stream: bool
) -> None:
    """In its head: a stream's is there before its first token."""
    core.hold_at = lambda submit: 0
    asking = asyncio.create_task(_streamed(http, path, ASKING[path] | {"stream": stream}))
    first = await core.seen(Submit)
    core.go_on()
    answer, _ = await asking
    assert answer.headers.get_list("x-appliance-request") == [first.request]


async def test_an_answer_without_a_request_names_none(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    answer = await http.post("/tokenize", json={"model": "talker", "prompt": "a"})
    assert answer.status_code == 200
    assert "x-appliance-request" not in answer.headers


@pytest.mark.parametrize("path", ASKING)
async def test_a_whole_answer_says_in_its_head_what_its_time_went_to(
    core: StandInCore, http: httpx.AsyncClient, path: str
) -> None:
    answer, lines = await _streamed(http, path, ASKING[path] | {"stream": False})
    assert answer.headers["server-timing"] == TIMING
    assert TIMING not in "".join(lines)


@pytest.mark.parametrize("path", LAST)
async def test_a_stream_says_before_its_last_event_what_its_time_went_to(
    core: StandInCore, http: httpx.AsyncClient, path: str
) -> None:
    answer, lines = await _streamed(http, path, ASKING[path] | {"stream": True})
    assert "server-timing" not in answer.headers
    said = f": server-timing: {TIMING}"
    assert lines.count(said) == 1
    assert lines[lines.index(said) + 2].startswith(LAST[path])
    assert len([line for line in lines[lines.index(said) :] if line.startswith("data: ")]) == 1


async def test_a_stream_that_fails_says_no_times(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    core.hold_at = lambda submit: 2
    async with http.stream("POST", CHAT, json=ASKED | {"stream": True}) as answer:
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        core.give_up(core.said(Submit)[0].request)
        assert not [line async for line in lines if "server-timing" in line]


@pytest.mark.parametrize(
    ("path", "event"),
    [
        (CHAT, b"data: {error}\n\ndata: [DONE]\n\n"),
        ("/v1/responses", b"event: error\ndata: {error}\n\n"),
        ("/v1/messages", b"event: error\ndata: {error}\n\n"),
        ("/api/chat", b"{error}\n"),
    ],
)
async def test_the_core_learns_how_a_stream_ends_if_its_front_end_dies(
    core: StandInCore, http: httpx.AsyncClient, path: str, event: bytes
) -> None:
    """As soon as it has begun: with an event in the dialect of its path, and the last chunk."""
    await _streamed(http, path, ASKING[path] | {"stream": True})
    ending = core.endings[(await core.seen(Enter)).call]
    size, _, rest = ending.partition(b"\r\n")
    told, last = rest[: int(size, 16)], rest[int(size, 16) :]
    error = told[told.index(b"{") : told.rindex(b"}") + 1]
    assert last == b"\r\n0\r\n\r\n"
    assert told.replace(error, b"{error}") == event
    assert "the process that made the answer died" in json.dumps(json.loads(error))


async def test_a_whole_answer_needs_no_ending(core: StandInCore, http: httpx.AsyncClient) -> None:
    await http.post(CHAT, json=ASKED)
    assert (await core.seen(Enter)).call not in core.endings


async def _streamed(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> tuple[httpx.Response, list[str]]:
    async with http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        return answer, [line async for line in answer.aiter_lines()]


# --- admission -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_a_status_and_no_broken_stream(
    core: StandInCore, http: httpx.AsyncClient, path: str, stream: bool
) -> None:
    core.refusing = lambda submit: Refused(
        call=submit.call,
        request=submit.request,
        status=429,
        code="queue_full",
        message="too many requests wait",
        headers=(("Retry-After", "3"),),
    )
    body = {
        CHAT: ASKED,
        "/v1/messages": ASKED,
        "/v1/responses": {"model": "talker", "input": "hello"},
        "/v1/completions": {"model": "talker", "prompt": "hello", "n": 2},
    }[path]
    answer = await http.post(path, json=body | {"stream": stream})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"
    assert answer.headers["content-type"] == "application/json"
    assert "too many requests wait" in answer.text
    await core.seen(Leave)
    assert not core.live


async def test_no_comment_before_the_time_of_one(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    """None at all, unless the machine keeps one of the processes waiting for so long."""
    begun = asyncio.get_running_loop().time()
    async with http.stream("POST", CHAT, json=ASKED | {"stream": True}) as answer:
        text = (await answer.aread()).decode()
    most = int((asyncio.get_running_loop().time() - begun) / KEEP_ALIVE_SECONDS)
    assert most or text.startswith("data: ")
    assert text.count("keep-alive") <= most


async def test_a_stream_that_waits_for_its_admission_is_kept_alive(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    core.admitting.clear()
    loop = asyncio.get_running_loop()
    begun = loop.time()
    async with http.stream("POST", CHAT, json=ASKED | {"stream": True}) as answer:
        assert loop.time() - begun >= KEEP_ALIVE_SECONDS * 0.9
        lines = answer.aiter_lines()
        assert await anext(lines) == ": keep-alive"
        core.admitting.set()
        rest = [line async for line in lines]
    assert rest[-2] == "data: [DONE]"


async def test_a_stream_that_waits_for_a_token_is_kept_alive(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    core.hold_at = lambda submit: 2
    seen = []
    async with http.stream("POST", CHAT, json=ASKED | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            seen.append(line)
            if line == ": keep-alive":
                core.go_on()
    assert seen[0].startswith("data: ")
    assert seen.count("data: [DONE]") == 1


async def test_who_waits_long_for_a_whole_answer_gets_no_comments(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    core.admitting.clear()
    asking = asyncio.create_task(http.post(CHAT, json=ASKED))
    await core.seen(Submit)
    await asyncio.wait((asking,), timeout=2 * KEEP_ALIVE_SECONDS)
    core.admitting.set()
    assert (await asking).json()["choices"]


# --- clients that leave or do not read -----------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels(core: StandInCore, stream: bool) -> None:
    core.hold_at = lambda submit: 2
    body = json.dumps(ASKED | {"stream": stream, "n": 2}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", core.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    await core.seen(Submit, count=2)
    writer.close()
    await core.seen(Leave)
    aborted = {request for abort in core.said(Abort) for request in abort.requests}
    assert aborted == {submit.request for submit in core.said(Submit)}
    assert {abort.reason for abort in core.said(Abort)} == {FinishReason.CANCELLED}


async def test_a_client_that_leaves_while_it_waits_for_admission_cancels(
    core: StandInCore,
) -> None:
    core.admitting.clear()
    body = json.dumps(ASKED).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", core.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    submit = await core.seen(Submit)
    writer.close()
    abort = await core.seen(Abort)
    assert abort.requests == [submit.request]
    assert abort.reason is FinishReason.CANCELLED
    await core.seen(Leave)


async def test_the_core_hears_of_a_client_that_does_not_read(core: StandInCore) -> None:
    asked = ASKED | {"stream": True, "max_tokens": 900, "return_token_ids": True}
    body = json.dumps(asked).encode()
    core.saying = lambda submit: [20 + i % 50 for i in range(900)]
    core.step_seconds = 0.001  # a chunk for each token
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", core.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    try:
        stalled = await core.seen(Reading, lambda frame: not frame.reads)
        assert stalled.requests == [core.said(Submit)[0].request]
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        reading = asyncio.create_task(reader.read(-1))
        await core.seen(Reading, lambda frame: frame.reads)
        reading.cancel()
    finally:
        core.step_seconds = 0.0
        writer.close()


# --- connections ---------------------------------------------------------------------------------


async def test_a_request_for_the_core_takes_its_connection_back(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    assert (await http.post(CHAT, json=ASKED)).status_code == 200
    before = core.connections
    answer = await http.get("/v1/models", headers={"x-mark": "here"})
    assert answer.text == "core"
    (handover,) = core.returned[-1:]
    assert handover.connection == before
    assert handover.received.startswith(b"GET /v1/models HTTP/1.1\r\n")
    assert b"x-mark: here" in handover.received
    assert (await http.post(CHAT, json=ASKED)).status_code == 200


async def test_a_request_for_the_core_behind_one_that_is_answered_is_misdirected(
    core: StandInCore,
) -> None:
    core.hold_at = lambda submit: 1
    body = json.dumps(ASKED).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", core.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%sGET /livez HTTP/1.1\r\nhost: a\r\n\r\n" % (len(body), body)
    )
    await core.seen(Submit)
    core.go_on()
    answers = (await reader.read(-1)).decode()
    assert answers.startswith("HTTP/1.1 200 OK")
    assert "HTTP/1.1 421 " in answers
    writer.close()


async def test_pings_tell_connections_and_calls(core: StandInCore) -> None:
    core.hold_at = lambda submit: 1
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
        asking = asyncio.create_task(http.post(CHAT, json=ASKED))
        await core.seen(Submit)
        core.send(Ping(5))
        pong = await core.seen(Pong, lambda pong: pong.number == 5)
        assert pong.connections >= 1
        assert (pong.calls, pong.large) == (1, 0)
        core.go_on()
        await asking


async def test_pings_tell_large_bodies(core: StandInCore) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", core.port)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {LARGE_BYTES}\r\n\r\n"
    writer.write(head.encode())
    enter = await core.seen(Enter)
    core.send(Ping(6))
    assert (await core.seen(Pong, lambda pong: pong.number == 6)).large == 1
    writer.close()
    await core.seen(Leave, lambda leave: leave.call == enter.call)
    core.send(Ping(7))
    assert (await core.seen(Pong, lambda pong: pong.number == 7)).large == 0
    del reader


# --- batches -------------------------------------------------------------------------------------


async def test_a_line_of_a_batch_is_answered_as_over_http(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    ran = await core.run(CHAT, ASKED)
    over_http = (await http.post(CHAT, json=ASKED)).json()
    assert ran.status == 200
    assert dict(ran.headers)["content-type"] == "application/json"
    assert json.loads(ran.body)["choices"] == over_http["choices"]
    submit = core.said(Submit)[0]
    assert submit.call == ran.call
    assert submit.request_class is RequestClass.BATCH
    assert not core.said(Enter)[1:]


@pytest.mark.parametrize(
    ("changes", "status"), [({"stream": True}, 400), ({"model": "nobody"}, 404)]
)
async def test_a_line_that_cannot_be_answered_is_refused(
    core: StandInCore, changes: dict[str, Any], status: int
) -> None:
    ran = await core.run(CHAT, ASKED | changes)
    assert ran.status == status
    assert json.loads(ran.body)["error"]["message"]


async def test_a_line_may_only_ask_the_models_of_its_key(core: StandInCore) -> None:
    assert (await core.run(CHAT, ASKED, models=("other",))).status == 404


async def test_a_line_that_the_core_refuses_has_its_status(core: StandInCore) -> None:
    core.refusing = lambda submit: Refused(
        call=submit.call, request=submit.request, status=429, code="queue_full", message="full"
    )
    ran = await core.run(CHAT, ASKED)
    assert ran.status == 429
    assert json.loads(ran.body)["error"]["code"] == "queue_full"


async def test_a_line_is_given_up(core: StandInCore) -> None:
    core.hold_at = lambda submit: 1
    core.send(Run(call=-3, path=CHAT, body=json.dumps(ASKED).encode()))
    submit = await core.seen(Submit)
    core.send(StopRun(-3))
    assert (await core.seen(Abort)).requests == [submit.request]
    await core.seen(Leave, lambda leave: leave.call == -3)
    assert not core.said(Ran)


# --- the catalogue, and the end ------------------------------------------------------------------


async def test_a_model_that_cannot_be_served_is_passed_to_the_core(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    answer = await http.post(CHAT, json=ASKED | {"model": "damaged"})
    assert answer.status_code == 500
    assert (await core.seen(ModelRefused)).model == "damaged"


async def test_models_come_and_go_while_answers_go_on(
    core: StandInCore, http: httpx.AsyncClient, models: tuple[FrontModel, ...]
) -> None:
    core.hold_at = lambda submit: 1
    going_on = asyncio.create_task(http.post(CHAT, json=ASKED | {"model": "other"}))
    await core.seen(Submit)
    try:
        core.change(model for model in models if model.name != "other")
        assert (await http.post(CHAT, json=ASKED | {"model": "other"})).status_code == 404
        core.go_on()
        assert (await going_on).status_code == 200
    finally:
        core.change(models)
    assert (await http.post(CHAT, json=ASKED | {"model": "other"})).status_code == 200


async def test_a_front_end_drains_and_ends_with_its_last_answer(
    models: tuple[FrontModel, ...],
) -> None:
    async with front_end(models[:1], alone=True) as core:
        core.hold_at = lambda submit: 1
        assert core.process is not None
        async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
            asked = {name: value for name, value in ASKED.items() if name != "model"}
            asking = asyncio.create_task(http.post(CHAT, json=asked))
            await core.seen(Submit)
            core.send(Drain(), Ping(1))
            await core.seen(Pong)
            assert core.process.returncode is None
            core.go_on()
            answer = await asking
            assert answer.status_code == 200
            assert answer.headers["connection"] == "close"
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert await core.process.wait() == 0


async def test_a_front_end_ends_with_its_core(models: tuple[FrontModel, ...]) -> None:
    async with front_end(models[:1], alone=True) as core:
        core.hold_at = lambda submit: 1
        async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
            asking = asyncio.create_task(http.post(CHAT, json=ASKED))
            await core.seen(Submit)
            assert await core.end() == 0
            with pytest.raises(httpx.HTTPError):
                (await asking).raise_for_status()


@pytest.mark.parametrize(
    ("path", "stream"), [(CHAT, True), ("/v1/completions", False), ("/v1/messages", True)]
)
async def test_a_core_that_ends_before_it_admits_is_no_defect(
    models: tuple[FrontModel, ...], tmp_path: Path, path: str, stream: bool
) -> None:
    """The client is told to try again, or its connection ends; the log has no exception."""
    body = {
        CHAT: ASKED,
        "/v1/messages": ASKED,
        "/v1/completions": {"model": "talker", "prompt": "hello"},
    }[path]
    core = StandInCore(models[:1])
    with (tmp_path / "log").open("wb") as errors:
        try:
            await core.begin(errors=errors)
            await core.ready()
            core.admitting.clear()
            async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
                asking = asyncio.create_task(http.post(path, json=body | {"stream": stream}))
                await core.seen(Submit)
                assert await core.end() == 0
                try:
                    answer = await asking
                except httpx.TransportError:
                    pass
                else:
                    assert answer.status_code == 503
                    assert "shutting down" in answer.text
        finally:
            await core.close()
    assert "Traceback" not in (tmp_path / "log").read_text()


async def test_another_version_of_the_core_ends_a_front_end(
    models: tuple[FrontModel, ...],
) -> None:
    core = StandInCore(models, version=front_frames.VERSION + 1)
    try:
        await core.begin()
        assert core.process is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await core.process.wait() == 1
        assert not core.said(Ready)
    finally:
        await core.close()
