"""The core's conversation with front ends: which calls and requests it takes, what it sends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from appliance.access.admission import Admission
from appliance.access.auth import Access
from appliance.access.keys import Key, KeyFile, KeyRing, Scope, digest
from appliance.api.key_view import gated
from appliance.engines.protocol import GuideRefused
from appliance.gateway import sessions as gateway
from appliance.gateway.image_wire import NotFetched
from appliance.gateway.remote_images import TooManyFetches
from appliance.gateway.sessions import FrontEndLost, FrontSettings, NoFrontEnd, Sessions
from appliance.service.front_frames import (
    Catalogue,
    Entered,
    FetchedImage,
    FetchImage,
    FrontModel,
    ModelRefused,
    Output,
    Outputs,
    Ran,
    Reading,
    Ready,
    Refused,
    StopRun,
    TookImage,
    Welcome,
)
from appliance.service.front_frames import Run as RunLine
from appliance.service.interface import GenerationFailed, RequestTimes
from appliance.vocabulary import FinishReason, RequestClass
from tests.unit.doubles.fake_service import IMPOSSIBLE, FakeService, encode
from tests.unit.doubles.front import FrontDouble


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class House:
    """A core without keys, until the first one is added."""

    def __init__(self, path: Path) -> None:
        self.file = KeyFile(path)
        self.clock = Clock()
        self.service = FakeService()
        self.access = Access(local=True, clock=self.clock, wall_clock=self.clock)
        self.waiting: dict[str, Any] = {}

    def add(self, name: str, **fields: Any) -> str:
        """A key; its secret."""
        secret = f"sk-{name}"
        self.file.add(Key(name=name, sha256=digest(secret), created_seconds=0.0, **fields))
        if not self.access.has_keys:
            self.access = Access(KeyRing(self.file.path), clock=self.clock, wall_clock=self.clock)
        return secret

    def sessions(self) -> Sessions:
        self.admission = Admission(self.service, self.access, **self.waiting)  # type: ignore[arg-type]
        settings = FrontSettings(keep_alive_seconds=5.0, max_body_bytes=1000, strict=True)
        return Sessions(self.service, self.access, self.admission, settings)  # type: ignore[arg-type]

    def front(self) -> FrontDouble:
        return FrontDouble(self.sessions())


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "keys.json")


async def settled() -> None:
    """All has happened that can without time going on."""
    for _ in range(10):
        await asyncio.sleep(0)


def refused(answer: Entered | Refused) -> Refused:
    assert isinstance(answer, Refused), answer
    return answer


# --- the beginning -------------------------------------------------------------------------------


async def test_a_front_end_is_welcomed_with_all_it_needs(house: House) -> None:
    """And told of the models whenever there are others."""
    sessions = house.sessions()
    front = FrontDouble(sessions)
    (welcome,) = front.heard(Welcome)
    assert (welcome.keep_alive_seconds, welcome.max_body_bytes, welcome.strict) == (5.0, 1000, True)
    assert [model.name for model in welcome.models] == ["small", "org/small"]
    assert welcome.models[1].tool_parser == "hermes"

    del house.service._cards["small"]
    sessions.catalogue_changed()

    assert [model.name for model in front.heard(Catalogue)[0].models] == ["org/small"]


async def test_a_model_without_a_front_half_is_failed(house: House) -> None:
    """The core hears why."""
    house.front().say(ModelRefused("small", "its tokenizer is damaged"))

    assert house.service.refused == {"small": "its tokenizer is damaged"}


# --- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({}, None),
        ({"host": "localhost:11500"}, None),
        ({"host": "127.0.0.1", "origin": "http://localhost:3000"}, None),
        ({"host": "127.0.0.1", "origin": "app://obsidian.md"}, None),
        ({"host": "127.0.0.1", "origin": "https://shop.example"}, 403),
        ({"host": "127.0.0.1", "origin": "null"}, 403),
        ({"host": "shop.example"}, 403),
        ({"client": "192.0.2.1"}, 403),
        ({"client": "192.0.2.1", "connection": 7}, None),
    ],
)
async def test_without_keys_this_machine_is_answered(
    house: House, given: dict[str, Any], status: int | None
) -> None:
    """And operators, whose connections are known."""
    answer = house.front().enter(**given)

    assert (answer.status if isinstance(answer, Refused) else None) == status


async def test_a_key_is_needed_where_there_are_keys(house: House) -> None:
    """Each refusal is the one that HTTP answers."""
    house.add("alice", models=("small",))
    house.add("operator", scopes=(Scope.ADMIN,))
    front = house.front()
    for headers in ({}, {"authorization": "Bearer sk-nobody"}, {"authorization": "Basic sk-alice"}):
        answer = refused(front.enter(**headers))
        assert (answer.status, answer.code) == (401, "invalid_api_key")
        assert ("WWW-Authenticate", "Bearer") in answer.headers
    answer = refused(front.enter(x_api_key="sk-operator"))
    assert (answer.status, answer.code) == (403, "permission_denied")
    entered = front.enter(x_api_key="sk-alice")
    assert isinstance(entered, Entered)
    assert entered.models == ("small",)
    entered = front.enter(connection=7)
    assert isinstance(entered, Entered)
    assert entered.models is None


async def test_an_slo_is_asked_for_by_a_key_that_may(house: House) -> None:
    """What cannot be read names its header."""
    house.add("plain")
    house.add("fast", slo=True)
    front = house.front()
    answer = refused(front.enter(x_api_key="sk-plain", x_slo="ttft=1s"))
    assert (answer.status, answer.param) == (403, "x-slo")
    answer = refused(front.enter(x_api_key="sk-fast", x_slo="soon"))
    assert (answer.status, answer.param) == (400, "x-slo")
    front.submit(front.call("sk-fast", x_slo="ttft=1s"), "r")
    front.submit(front.call("sk-fast", x_slo="gap=2s, tbt=50ms"), "s")
    front.submit(front.call("sk-fast", x_slo="gap=0s"), "t")
    asked = [one.request.slo for one in house.service.submitted]
    assert [slo.ttft_seconds for slo in asked] == [1.0, None, None]
    assert [slo.gap_seconds for slo in asked] == [None, 2.0, 0.0]


async def test_requests_of_a_key_are_limited(house: House) -> None:
    """Per minute and at once; what reads only does not count. A call that is left, and those of a
    front end that died, are answered."""
    house.add("often", requests_per_minute=2)
    house.add("once", concurrency=1)
    front = house.front()
    first = front.enter(x_api_key="sk-often")
    assert dict(first.headers)["x-ratelimit-remaining-requests"] == "1"
    front.enter(x_api_key="sk-often", method="GET", path="/tokenizer_info")
    front.enter(x_api_key="sk-often")
    answer = refused(front.enter(x_api_key="sk-often"))
    assert (answer.status, answer.code) == (429, "rate_limit_exceeded")
    assert dict(answer.headers)["Retry-After"] == "30"
    assert dict(answer.headers)["x-ratelimit-remaining-requests"] == "0"

    call = front.call("sk-once")
    assert "requests at once" in refused(front.enter(x_api_key="sk-once")).message
    front.leave(call)
    front.call("sk-once")
    assert refused(front.enter(x_api_key="sk-once")).status == 429
    front.die()
    assert isinstance(house.front().enter(x_api_key="sk-once"), Entered)


async def test_calls_and_requests_are_bounded(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front end with too many is told to try again."""
    monkeypatch.setattr(gateway, "MAX_CALLS", 2)
    monkeypatch.setattr(gateway, "MAX_REQUESTS", 1)
    front = house.front()
    call = front.call()
    front.call()
    assert refused(front.enter()).code == "overloaded"
    front.submit(call, "a")
    front.submit(call, "b")
    assert front.admitted("a")
    assert front.refused["b"].status == 503


# --- requests ------------------------------------------------------------------------------------


async def test_a_request_is_handed_on_as_it_came(house: House) -> None:
    """With its class, the name of its key, and where it was asked."""
    secret = house.add("alice")
    front = house.front()
    call = front.call(secret, traceparent="00-1-2-01", path="/v1/completions")
    front.submit(call, "r", "hi", body=b"opaque", request_class=RequestClass.BATCH)
    assert front.admitted("r")
    (generation,) = house.service.submitted
    request = generation.request
    assert (request.id, request.model, request.prompt) == ("r", "small", tuple(encode("hi")))
    assert (request.body, request.max_tokens, request.pooled) == (b"opaque", 8, False)
    assert (request.request_class, request.key) == (RequestClass.BATCH, "alice")
    assert request.trace is not None
    assert (request.trace.path, request.trace.parent) == ("/v1/completions", "00-1-2-01")


async def test_a_parent_that_is_too_long_is_not_kept(house: House) -> None:
    """Of a trace, that is: the request is its own beginning then."""
    front = house.front()
    front.submit(front.call(traceparent="x" * (gateway.LONGEST_PARENT + 1)), "r")
    trace = house.service.submitted[0].request.trace
    assert trace is not None
    assert trace.parent == ""


async def test_outputs_of_one_turn_are_one_frame(house: House) -> None:
    """Of all requests, the tokens of each as one; the last one comes with its end and times."""
    front = house.front()
    call = front.call()
    for name in ("a", "b"):
        front.submit(call, name)
    a, b = house.service.submitted
    a.feed([1])
    b.feed([7])
    a.feed([2, 3])
    await settled()
    assert front.heard(Outputs) == [Outputs([Output("a", [1, 2, 3]), Output("b", [7])])]
    a.times = RequestTimes(queue_seconds=0.5, decode_seconds=1.0)
    a.feed([4, 5], FinishReason.LENGTH)
    await settled()
    *_, last = front.heard(Outputs)
    assert [output.tokens for output in last.outputs] == [[4], [5]]
    assert last.outputs[-1].finished is FinishReason.LENGTH
    assert (last.outputs[-1].timing or "").startswith("queue;dur=500.0, load;dur=0.0")
    assert front.tokens == {"a": [1, 2, 3, 4, 5], "b": [7]}


async def test_details_keep_their_place_among_tokens(house: House) -> None:
    """An output has one or the other."""
    front = house.front()
    front.submit(front.call(), "r")
    (generation,) = house.service.submitted
    generation.detail(1, b"one")
    generation.feed([2, 3])
    generation.detail(4, b"four")
    generation.detail(5, b"five", FinishReason.STOP)
    await settled()
    (frame,) = front.heard(Outputs)
    assert [(output.tokens, output.details) for output in frame.outputs] == [
        ([], [b"one"]),
        ([2, 3], []),
        ([], [b"four"]),
        ([], [b"five"]),
    ]
    assert front.ends == {"r": FinishReason.STOP}


async def test_details_that_are_large_are_several_frames(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is below the bound, also with the last one; nothing is lost or out of order."""
    monkeypatch.setattr(gateway, "MOST_DETAIL_BYTES", 10)
    front = house.front()
    call = front.call()
    for name in ("a", "b"):
        front.submit(call, name)
    a, b = house.service.submitted
    a.detail(1, b"x" * 6)
    b.detail(1, b"y" * 4)
    a.detail(2, b"z" * 4)
    a.feed([3])
    b.detail(2, b"v" * 10, FinishReason.STOP)
    a.detail(4, b"w", FinishReason.STOP)
    await settled()
    frames = [
        [detail for output in frame.outputs for detail in output.details]
        for frame in front.heard(Outputs)
    ]
    assert frames == [[b"x" * 6, b"y" * 4], [b"z" * 4], [b"v" * 10], [b"w"]]
    assert front.details == {"a": [b"x" * 6, b"z" * 4, b"w"], "b": [b"y" * 4, b"v" * 10]}
    assert front.tokens["a"] == [3]
    assert front.ends == dict.fromkeys("ab", FinishReason.STOP)


async def test_the_largest_details_can_be_read(house: House) -> None:
    """A worker makes none of more than 32 MiB; two of them are two frames."""
    detail = bytes(32 << 20)
    front = house.front()
    front.submit(front.call(), "r")
    (generation,) = house.service.submitted
    generation.detail(1, detail)
    generation.detail(2, detail, FinishReason.STOP)
    await settled()
    assert front.details == {"r": [detail, detail]}
    assert len(front.heard(Outputs)) == 2


async def test_a_failure_comes_behind_the_tokens(house: House) -> None:
    """As a refusal of the request, with the status that HTTP would have had."""
    front = house.front()
    call = front.call()
    front.submit(call, "r")
    (generation,) = house.service.submitted
    generation.feed([1, 2])
    generation.fail(GenerationFailed("request_failed", "it broke", 503, 2.0))
    await settled()
    assert isinstance(front.sent[-2], Outputs)
    assert front.sent[-1] == Refused(
        call=call,
        request="r",
        status=503,
        code="request_failed",
        message="it broke",
        headers=(("Retry-After", "2"),),
    )


async def test_what_is_aborted_is_not_reported_again(house: House) -> None:
    """Whoever aborts it: by name, with its call, or by dying."""
    front = house.front()
    first, second, third = front.call(), front.call(), front.call()
    for call, name in ((first, "a"), (second, "b"), (third, "c")):
        front.submit(call, name)
    a, b, c = house.service.submitted
    a.feed([1])
    front.abort("a", "unknown", reason=FinishReason.STOP)
    front.leave(second)
    a.feed([2])
    await settled()
    assert front.tokens == {"a": [1]}
    assert (a.reason, b.reason) == (FinishReason.STOP, FinishReason.CANCELLED)
    c.feed([3])
    front.die()
    await settled()
    assert c.reason is FinishReason.CANCELLED
    assert house.service.live == {}
    assert (front.ends, front.refused) == ({}, {})


async def test_streams_of_a_front_end_that_dies_are_ended(house: House) -> None:
    """With what it said for that; of calls that are over nothing is sent, nor of other ones."""
    sessions = house.sessions()
    front, other = FrontDouble(sessions), FrontDouble(sessions)
    ends: dict[str, socket.socket] = {}
    for name, session, call in (
        ("left", front.session, front.call()),
        ("live", front.session, front.call()),
        ("late", front.session, 99),
        ("of the other", other.session, other.call()),
    ):
        ends[name], connection = socket.socketpair()
        ends[name].setblocking(False)
        session.stream_begun(call, connection, name.encode())
        if name == "left":
            front.leave(call)

    front.die()

    assert ends["live"].recv(100) == b"live"
    assert [ends[name].recv(100) for name in ("live", "left", "late")] == [b"", b"", b""]
    with pytest.raises(BlockingIOError):
        ends["of the other"].recv(100)
    other.die()
    for end in ends.values():
        end.close()


async def test_a_stream_whose_client_takes_nothing_is_closed(house: House) -> None:
    """When its front end dies: the core does not wait for room."""
    front = house.front()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            theirs.send(b"x" * 65536)
    front.session.stream_begun(front.call(), theirs, b"ending")

    front.die()

    with ours, ours.makefile("rb") as received:
        assert set(received.read()) == {ord("x")}


async def test_a_client_that_does_not_read_is_reported(house: House) -> None:
    """Backpressure goes through to the machine."""
    front = house.front()
    front.submit(front.call(), "r")
    (generation,) = house.service.submitted
    front.say(Reading(["r", "unknown"], reads=False))
    front.say(Reading(["r"], reads=True))
    assert generation.reads == [False, True]


async def test_an_id_is_of_one_request_at_a_time(house: House) -> None:
    """Of all front ends together; afterwards it may be used again."""
    sessions = house.sessions()
    one, other = FrontDouble(sessions), FrontDouble(sessions)
    one.submit(one.call(), "r")
    call = other.call()
    other.submit(call, "r")
    assert (other.refused["r"].status, other.refused["r"].code) == (409, "request_exists")
    house.service.submitted[0].feed([1], FinishReason.STOP)
    other.submit(call, "r")
    assert other.admitted("r")


async def test_a_request_without_a_call_is_refused(house: House) -> None:
    """It can only be a mistake."""
    front = house.front()
    call = front.call()
    front.leave(call)
    front.submit(call, "r")
    assert front.refused["r"].code == "call_not_found"
    assert house.service.submitted == []


@pytest.mark.parametrize("model", ["org/small", "unknown"])
async def test_a_model_that_a_key_does_not_know(house: House, model: str) -> None:
    """Is not there."""
    front = house.front()
    house.add("alice", models=("small",))
    front = house.front()
    front.submit(front.call("sk-alice"), "r", model=model)
    assert (front.refused["r"].status, front.refused["r"].code) == (404, "model_not_found")
    assert front.refused["r"].param == "model"


async def test_without_keys_a_full_queue_is_429_at_once(house: House) -> None:
    """Nobody's turn can be kept."""
    house.service.room = 0
    front = house.front()
    front.submit(front.call(), "r")
    assert (front.refused["r"].status, front.refused["r"].code) == (429, "queue_full")
    assert front.refused["r"].headers == (("Retry-After", "2"),)


# --- guides --------------------------------------------------------------------------------------


async def test_a_guide_is_compiled_first(house: House) -> None:
    """Only then the request is admitted, and counts for its key."""
    house.service.compiling = asyncio.Event()
    front = house.front()
    call = front.call()
    front.submit(call, "r", body=b"guide", guide=b"guide")
    await settled()
    assert not front.admitted("r")
    assert (house.service.guides, house.service.submitted) == ([b"guide"], [])
    house.service.compiling.set()
    await settled()
    assert front.admitted("r")
    house.service.submitted[0].feed([1], FinishReason.STOP)
    await front.until_over("r")


async def test_a_key_without_guides_asks_for_none(house: House) -> None:
    """A guide of its is not even compiled; all else it may ask."""
    secret = house.add("plain", guides=False)
    front = house.front()
    front.submit(front.call(secret), "r", body=b"guide", guide=b"guide")
    await front.until_over("r")
    refused = front.refused["r"]
    assert (refused.status, refused.code) == (403, "permission_denied")
    assert "response_format" in refused.message
    assert (house.service.guides, house.service.submitted) == ([], [])

    front.submit(front.call(secret), "plain", body=b"")
    await settled()
    assert front.admitted("plain")


async def test_a_guide_that_cannot_be_followed_is_refused(house: House) -> None:
    """Nothing was submitted."""
    front = house.front()
    front.submit(front.call(), "r", body=IMPOSSIBLE, guide=b"guide")
    await front.until_over("r")
    assert (front.refused["r"].status, front.refused["r"].code) == (400, "invalid_guide")
    assert house.service.submitted == []


@pytest.mark.parametrize("how", ["abort", "leave", "die"])
async def test_a_request_that_goes_while_its_guide_is_compiled(house: House, how: str) -> None:
    """Is never submitted, and its id is free."""
    house.service.compiling = asyncio.Event()
    sessions = house.sessions()
    front = FrontDouble(sessions)
    call = front.call()
    front.submit(call, "r", guide=b"guide")
    await settled()
    if how == "abort":
        front.abort("r")
    elif how == "leave":
        front.leave(call)
    else:
        front.die()
    house.service.compiling.set()
    await settled()
    assert house.service.submitted == []
    assert sessions.live == set()
    assert front.refused == {}


class TrialsDouble:
    """Compiles what it is asked to, unless it was asked to refuse it."""

    def __init__(self) -> None:
        self.checked: list[tuple[str, str, bytes]] = []
        self.refused: list[bytes] = []
        self.owners: list[str] = []
        """Of those that did harm."""

    async def check(self, owner: str, model: FrontModel, guide: bytes) -> None:
        self.checked.append((owner, model.name, guide))
        if guide in self.refused:
            raise GuideRefused("it did harm")

    def refuse(self, owner: str, model: FrontModel, guide: bytes, reason: str) -> None:
        self.refused.append(guide)
        self.owners.append(owner)


async def test_a_guide_is_tried_before_workers_compile_it(house: House) -> None:
    """A worker never sees one that is refused."""
    sessions = house.sessions()
    sessions.guides = trials = TrialsDouble()
    front = FrontDouble(sessions)
    trials.refused.append(b"bad")
    front.submit(front.call(), "r", guide=b"bad")
    await front.until_over("r")
    assert (front.refused["r"].status, front.refused["r"].code) == (400, "invalid_guide")
    assert trials.checked == [("", "small", b"bad")]
    assert house.service.guides == []


async def test_a_guide_that_takes_too_long_to_follow(house: House) -> None:
    """Its request ends with the guide's fault, which counts for its key, and the next one with it
    is refused."""
    secret = house.add("alice")
    sessions = house.sessions()
    sessions.guides = trials = TrialsDouble()
    front = FrontDouble(sessions)
    front.submit(front.call(secret), "r", guide=b"slow")
    await settled()
    house.service.submitted[0].feed([1], FinishReason.INVALID_GUIDE)
    await front.until_over("r")
    assert (front.refused["r"].status, front.refused["r"].code) == (400, "invalid_guide")
    assert "too long to follow" in front.refused["r"].message

    assert (trials.refused, trials.owners) == ([b"slow"], [digest(secret)])
    front.submit(front.call(secret), "again", guide=b"slow")
    await front.until_over("again")
    assert front.refused["again"].code == "invalid_guide"


# --- keys' tokens and turns ----------------------------------------------------------------------


async def test_tokens_of_a_key_are_reserved_and_settled(house: House) -> None:
    """For what a request may come to; what it did not is given back."""
    secret = house.add("alice", tokens_per_minute=20)
    front = house.front()
    call = front.call(secret)
    front.submit(call, "a", "hello", max_tokens=10)
    front.submit(call, "b", "hello", max_tokens=10)
    assert front.refused["b"].status == 429
    assert "tokens per minute" in front.refused["b"].message
    house.service.submitted[0].feed([1, 2, 3], FinishReason.STOP)
    front.submit(call, "c", "hello", max_tokens=7)
    assert front.admitted("c")
    use = house.access.metrics.use("alice")
    assert (use.requests, use.prompt_tokens, use.output_tokens) == (2, 5, 3)


@pytest.mark.parametrize(
    ("max_tokens", "code", "param"),
    [(5, "token_limit_exceeded", "n"), (0, "token_limit_exceeded", None)],
)
async def test_what_can_never_fit_together_is_400(
    house: House, max_tokens: int, code: str, param: str | None
) -> None:
    """And not 429 for ever."""
    secret = house.add("alice", tokens_per_minute=20)
    front = house.front()
    front.submit(front.call(secret), "a", max_tokens=max_tokens, together_tokens=21)
    answer = front.refused["a"]
    assert (answer.status, answer.code, answer.param) == (400, code, param)


async def test_a_class_that_a_key_has_not(house: House) -> None:
    """A key for batch work makes batch work of all; the other way round it is refused."""
    house.add("nightly", classes=(RequestClass.BATCH,))
    house.add("daily", classes=(RequestClass.INTERACTIVE,))
    front = house.front()
    front.submit(front.call("sk-nightly"), "a")
    front.submit(front.call("sk-daily"), "b", request_class=RequestClass.BATCH)
    assert house.service.submitted[0].request.request_class is RequestClass.BATCH
    assert (front.refused["b"].status, front.refused["b"].param) == (403, "service_tier")


async def test_who_waits_for_a_turn_is_admitted_and_begins_later(house: House) -> None:
    """Keys take turns: the one that was served least is next."""
    house.add("alice")
    house.add("bob")
    house.service.at_once = 1
    front = house.front()
    alice, bob = front.call("sk-alice"), front.call("sk-bob")
    for number in range(3):
        front.submit(alice, f"a{number}")
    front.submit(bob, "b0")
    assert all(front.admitted(name) for name in ("a0", "a1", "a2", "b0"))
    for _ in range(4):
        await settled()
        (generation,) = house.service.live.values()
        generation.say("hello", FinishReason.STOP)
    await front.until_over("a0", "a1", "a2", "b0")
    assert [one.id for one in house.service.submitted] == ["a0", "b0", "a1", "a2"]


async def test_the_wait_for_a_turn_is_time_in_the_queue(house: House) -> None:
    """In what the client is told of its request."""
    secret = house.add("alice")
    house.service.at_once = 1
    front = house.front()
    call = front.call(secret)
    for name in ("a", "b"):
        front.submit(call, name)
    house.clock.now += 3.0
    house.service.live["a"].feed([1], FinishReason.STOP)
    await settled()
    house.service.live["b"].times = RequestTimes(queue_seconds=0.5)
    house.service.live["b"].feed([1], FinishReason.STOP)
    await front.until_over("b")
    assert (front.timings["b"] or "").startswith("queue;dur=3500.0")


async def test_too_many_that_wait_are_refused(house: House) -> None:
    """With a reason that is counted for the key."""
    secret = house.add("alice")
    house.waiting = {"max_waiting": 1}
    house.service.at_once = 1
    front = house.front()
    call = front.call(secret)
    for name in ("a", "b", "c"):
        front.submit(call, name)
    assert front.admitted("b")
    assert (front.refused["c"].status, front.refused["c"].code) == (429, "queue_full")
    assert house.access.metrics.use("alice").refusals == 1


async def test_a_wait_has_an_end(house: House) -> None:
    """What has waited too long is refused, and has used nothing up."""
    secret = house.add("alice", tokens_per_minute=13)
    house.waiting = {"max_wait_seconds": 0.01}
    house.service.at_once = 0
    front = house.front()
    call = front.call(secret)
    front.submit(call, "a")
    assert front.admitted("a")
    await front.until_over("a")
    assert front.refused["a"].code == "queue_full"
    house.service.at_once = 1
    front.submit(call, "b")
    assert front.admitted("b")


async def test_one_that_waits_can_be_cancelled(house: House) -> None:
    """By its client, who hears nothing more, or by an operator. Routers count it until then."""
    secret = house.add("alice")
    house.service.at_once = 0
    front = house.front()
    call = front.call(secret)
    front.submit(call, "a")
    front.submit(call, "b")
    assert [one.id for one in house.admission.waiting()] == ["a", "b"]
    load = gated(house.service, house.access, house.admission).load()  # type: ignore[arg-type]
    assert (load.waiting, load.waiting_by_model) == (2, {"small": 2})
    assert load.requests_by_model == {"small": 4, "org/small": 1}
    front.abort("a")
    assert house.admission.turn_away("b")
    assert (front.refused["b"].status, front.refused["b"].code) == (499, "cancelled")
    assert "a" not in front.refused
    assert house.admission.waiting() == []


async def test_a_front_end_that_dies_gives_its_turns_back(house: House) -> None:
    """The others go on at once."""
    house.add("alice")
    house.service.at_once = 1
    sessions = house.sessions()
    one, other = FrontDouble(sessions), FrontDouble(sessions)
    mine = one.call("sk-alice")
    one.submit(mine, "a")
    one.submit(mine, "b")
    other.submit(other.call("sk-alice"), "c")
    one.die()
    await settled()
    assert list(house.service.live) == ["c"]


# --- lines of batches ----------------------------------------------------------------------------

LINE = b'{"model": "small", "messages": [{"role": "user", "content": "hello"}]}'


async def test_a_line_is_answered_by_the_least_busy_front_end(house: House) -> None:
    """As work of the class batch, in the name of its owner."""
    house.add("alice", models=("small",))
    house.service.script = lambda generation: generation.say("hi")
    sessions = house.sessions()
    busy, idle = FrontDouble(sessions), FrontDouble(sessions)
    busy.call("sk-alice")
    caller = house.access.on_behalf_of(digest("sk-alice"))
    assert caller is not None
    answer = await sessions.ask(caller, "/v1/chat/completions", LINE)
    (line,) = idle.heard(RunLine)
    assert (line.path, line.body, line.models) == ("/v1/chat/completions", LINE, ("small",))
    assert busy.heard(RunLine) == []
    assert answer.status == 200
    assert b'"hi"' in answer.body
    request = house.service.submitted[0].request
    assert (request.request_class, request.key) == (RequestClass.BATCH, "alice")
    assert idle.session.calls == 0


async def test_a_line_says_what_the_core_refused_of_it(house: House) -> None:
    """So that it is known whether to ask again."""
    house.service.room = 0
    sessions = house.sessions()
    FrontDouble(sessions)
    answer = await sessions.ask(caller_of(house), "/v1/chat/completions", LINE)
    assert answer.status == 429
    assert answer.refused is not None
    assert answer.refused.code == "queue_full"


def caller_of(house: House) -> Any:
    return house.access.on_behalf_of("")


async def test_one_that_is_drained_is_given_no_lines(house: House) -> None:
    """Others are; it answers those that it has. One that is drained before it is ready stays so."""
    sessions = house.sessions()
    front, other = FrontDouble(sessions), FrontDouble(sessions)
    front.session.drained()
    other.answers_lines = False

    asking = asyncio.create_task(sessions.ask(caller_of(house), "/v1/chat/completions", LINE))
    await settled()
    (line,) = other.heard(RunLine)
    other.session.drained()
    other.say(Ready())
    with pytest.raises(NoFrontEnd):
        await sessions.ask(caller_of(house), "/v1/chat/completions", LINE)
    other.say(Ran(call=line.call, status=200, body=b"{}"))

    assert (await asking).status == 200
    assert front.heard(RunLine) == []


async def test_a_line_is_lost_with_its_front_end(house: House) -> None:
    """Without any there is nobody to ask."""
    sessions = house.sessions()
    with pytest.raises(NoFrontEnd):
        await sessions.ask(caller_of(house), "/v1/chat/completions", LINE)
    front = FrontDouble(sessions)
    asking = asyncio.create_task(sessions.ask(caller_of(house), "/v1/chat/completions", LINE))
    await house.service.arrivals.get()
    front.die()
    with pytest.raises(FrontEndLost):
        await asking
    assert house.service.live == {}


async def test_a_line_that_is_given_up_is_stopped(house: House) -> None:
    """Its requests, too."""
    sessions = house.sessions()
    front = FrontDouble(sessions)
    asking = asyncio.create_task(sessions.ask(caller_of(house), "/v1/chat/completions", LINE))
    generation = await house.service.arrivals.get()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    (line,) = front.heard(RunLine)
    assert front.heard(StopRun) == [StopRun(line.call)]
    assert generation.reason is FinishReason.CANCELLED
    assert front.session.calls == 0


class Fetching:
    """In place of what fetches images: waits until it is told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.let_go = 0
        """Files that were sent and read."""
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    @asynccontextmanager
    async def fetched(self, owner: str, url: str) -> AsyncIterator[bytes]:
        self.asked.append((owner, url))
        yield await self.answer
        self.let_go += 1


async def test_images_are_fetched_for_a_call(house: House) -> None:
    """One at a time, in the name of its key; what is refused is said in the fetcher's words."""
    secret = house.add("alice")
    sessions = house.sessions()
    front = FrontDouble(sessions)
    fetching = sessions.remote_images = Fetching()  # type: ignore[assignment]
    call = front.call(secret)
    for url in ("https://a/1", "https://a/2"):
        front.say(FetchImage(call=call, url=url))
    await settled()
    fetching.answer.set_result(b"file")
    await settled()
    front.say(TookImage())
    fetching.answer = asyncio.get_running_loop().create_future()
    fetching.answer.set_exception(NotFetched("it is too large"))
    front.say(FetchImage(call=call + 1, url="https://a/3"))
    front.say(FetchImage(call=call, url="https://a/4"))
    await settled()
    assert [(frame.file, frame.refused) for frame in front.heard(FetchedImage)] == [
        (b"", "another one is being fetched"),
        (b"file", ""),
        (b"", "it is too large"),
    ]
    (owner,) = {owner for owner, _ in fetching.asked}
    assert owner == digest(secret)
    assert [url for _, url in fetching.asked] == ["https://a/1", "https://a/4"]


@pytest.mark.parametrize("dies", [False, True])
async def test_a_call_that_is_over_fetches_nothing(house: House, dies: bool) -> None:
    """Its client hung up, or its front end died."""
    sessions = house.sessions()
    front = FrontDouble(sessions)
    fetching = sessions.remote_images = Fetching()  # type: ignore[assignment]
    call = front.call()
    front.say(FetchImage(call=call, url="https://a/1"))
    await settled()
    if dies:
        front.die()
    else:
        front.leave(call)
    await settled()
    assert fetching.answer.cancelled()
    assert front.heard(FetchedImage) == []


async def test_one_file_is_unread_at_a_time(house: House) -> None:
    """A front end that reads slowly is not sent more, whatever becomes of the calls; what waits
    counts among those that are fetched."""
    sessions = house.sessions()
    front = FrontDouble(sessions)
    fetching = sessions.remote_images = Fetching()  # type: ignore[assignment]
    calls = [front.call() for _ in range(4)]
    for call in calls:
        front.say(FetchImage(call=call, url=f"https://a/{call}"))
    fetching.answer.set_result(bytes(20 << 20))
    await settled()
    assert [frame.call for frame in front.heard(FetchedImage)] == calls[:1]
    front.leave(calls[0])  # before it has read the file
    front.leave(calls[1])
    await settled()
    assert [frame.call for frame in front.heard(FetchedImage)] == calls[:1]
    assert fetching.let_go == 0
    for count in (1, 2):
        front.say(TookImage())
        await settled()
        assert [frame.call for frame in front.heard(FetchedImage)] == [calls[0], *calls[2:]][
            : count + 1
        ]
        assert fetching.let_go == count
    front.die()
    await settled()
    assert fetching.let_go == 2


async def test_fetches_that_are_too_many(house: House) -> None:
    sessions = house.sessions()
    front = FrontDouble(sessions)
    fetching = sessions.remote_images = Fetching()  # type: ignore[assignment]
    fetching.answer.set_exception(TooManyFetches("try again later"))
    call = front.call()
    front.say(FetchImage(call=call, url="https://a/1"))
    await settled()
    assert front.heard(FetchedImage) == [
        FetchedImage(call=call, refused="try again later", busy=True)
    ]
