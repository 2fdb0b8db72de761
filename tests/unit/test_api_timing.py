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


async def test_an_error_has_none() -> None:
    """Nothing was computed for it."""
    answer = await ask(prompt="")

    assert answer.status_code == 400
    assert "server-timing" not in answer.headers


def test_of_several_choices_the_longest_is_shown() -> None:
    """They run side by side; the answer took as long as that one."""
    assert server_timing(longest([RequestTimes(decode_seconds=0.5), TIMES, None])) == SHOWN
    assert server_timing(longest([None])) == ""
