"""``Server-Timing``: in the header of a whole answer, in a comment of a stream."""

from __future__ import annotations

import httpx
from litestar import Litestar

from appliance.api.app import create_app
from appliance.api.service import RequestTimes
from appliance.api.timing import longest, server_timing
from tests.unit.fake_service import FakeGeneration, FakeService

TIMES = RequestTimes(queue_seconds=0.5, load_seconds=0.25, prefill_seconds=0.0625)
SHOWN = "queue;dur=500.0, load;dur=250.0, prefill;dur=62.5, decode;dur=0.0, preempted;dur=0.0"


def app() -> Litestar:
    def script(generation: FakeGeneration) -> None:
        generation.times = TIMES
        generation.say("hello world")

    return create_app(FakeService(script))


async def ask(**more: object) -> httpx.Response:
    body = {"model": "small", "prompt": "the", "max_tokens": 9, **more}
    transport = httpx.ASGITransport(app())  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://box") as client:
        return await client.post("/v1/completions", json=body)


async def test_a_whole_answer_has_it_in_its_header() -> None:
    """Milliseconds by phase."""
    assert (await ask()).headers["server-timing"] == SHOWN


async def test_a_stream_tells_before_its_end() -> None:
    """As a comment, which clients skip; the header was sent before anything was known."""
    answer = await ask(stream=True)

    assert "server-timing" not in answer.headers
    *_, comment, done, rest = answer.text.split("\n\n")
    assert (comment, done, rest) == (f": server-timing: {SHOWN}", "data: [DONE]", "")


async def test_operators_can_ask_about_it() -> None:
    """Before there is a token; an answer that was refused was never a request."""
    whole, stream = await ask(), await ask(stream=True)

    assert whole.headers["x-appliance-request"] == whole.json()["id"]
    assert f'"id":"{stream.headers["x-appliance-request"]}"' in stream.text
    assert "x-appliance-request" not in (await ask(prompt="")).headers


async def test_of_several_choices_the_first_is_named() -> None:
    """They are requests of their own."""
    answer = await ask(n=2)

    assert answer.headers["x-appliance-request"] == answer.json()["id"] + "-0"


async def test_an_error_has_none() -> None:
    """Nothing was computed for it."""
    answer = await ask(prompt="")

    assert answer.status_code == 400
    assert "server-timing" not in answer.headers


def test_of_several_choices_the_longest_is_shown() -> None:
    """They run side by side; the answer took as long as that one."""
    assert server_timing(longest([RequestTimes(decode_seconds=0.5), TIMES, None])) == SHOWN
    assert server_timing(longest([None])) == ""


def test_it_tells_how_often_it_was_preempted() -> None:
    """As the description of that phase, where it happened."""
    times = RequestTimes(preempted_seconds=0.25, preemptions=3)

    assert server_timing(times).endswith('decode;dur=0.0, preempted;dur=250.0;desc="3"')
