"""What the endurance benchmark (`benchmarks/endurance`) takes for wrong: it must not miss it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.endurance.answers import CANCELLED, Heard, Said
from benchmarks.endurance.audit import Books, at_rest, cancelled_by, compare, read_books
from benchmarks.endurance.clients import Outcome
from benchmarks.endurance.disturbances import Disturbances
from benchmarks.endurance.memory.vectors import equal
from benchmarks.endurance.watch import Sample, Watch
from tests.patience import PATIENCE_SECONDS


def line(name: str, outcome: str = "stop", request_class: str = "interactive") -> dict[str, Any]:
    return {"request": name, "class": request_class, "outcome": outcome, "status": 200}


def whole(name: str, choices: int = 1) -> Outcome:
    return Outcome("chat", "chatcmpl-", "whole", choices, choices, name)


def complaints(
    lines: Sequence[dict[str, Any]], arrived: Sequence[str], outcomes: Sequence[Outcome]
) -> str:
    return "; ".join(compare(Books(list(lines), []), arrived, outcomes))


def test_books_that_agree() -> None:
    """Whole answers of one choice and of two, one that was refused, and one whose client left
    before it could know whether it was taken in."""
    lines = [line("chatcmpl-a"), line("chatcmpl-b-0"), line("chatcmpl-b-1", "length")]
    outcomes = [
        whole("chatcmpl-a"),
        whole("chatcmpl-b", 2),
        Outcome("chat", "chatcmpl-", "refused", 0, 0),
        Outcome("chat", "chatcmpl-", "left", 0, 1),
    ]
    assert complaints(lines, [one["request"] for one in lines], outcomes) == ""
    lines.append(line("chatcmpl-c", "cancelled"))
    assert complaints(lines, [one["request"] for one in lines], outcomes) == ""


@pytest.mark.parametrize(
    ("lines", "arrived", "outcomes", "said"),
    [
        ([], ["chatcmpl-a"], [], "arrived and never ended"),
        ([line("chatcmpl-a")], [], [], "ended and never arrived"),
        ([line("chatcmpl-a")] * 2, ["chatcmpl-a"], [whole("chatcmpl-a")], "ended 2 times"),
        ([line("chatcmpl-a")], ["chatcmpl-a"] * 2, [whole("chatcmpl-a")], "arrived 2 times"),
        ([line("chatcmpl-a")], ["chatcmpl-a"], [], "1 in the log, 0 to 0 asked for"),
        ([], [], [whole("chatcmpl-a")], "0 in the log, 1 to 1 asked for"),
        ([line("chatcmpl-b")], ["chatcmpl-b"], [whole("chatcmpl-a")], "the log says []"),
        (
            [line("chatcmpl-a", "cancelled")],
            ["chatcmpl-a"],
            [whole("chatcmpl-a")],
            "the log says ['cancelled']",
        ),
        (
            [line("chatcmpl-a", "internal_error")],
            ["chatcmpl-a"],
            [whole("chatcmpl-a")],
            "ended as internal_error",
        ),
        (
            [line("chatcmpl-a", request_class="batch")],
            ["chatcmpl-a"],
            [whole("chatcmpl-a")],
            "'batch'): 1 in the log, 0 to 0 asked for",
        ),
    ],
)
def test_books_that_do_not(
    lines: list[dict[str, Any]], arrived: list[str], outcomes: list[Outcome], said: str
) -> None:
    """A request that was lost, duplicated, mixed up, or given up is told."""
    assert said in complaints(lines, arrived, outcomes)


def test_cancelled_requests() -> None:
    """Clients are told so only of requests that an operator ended, and those ended so."""
    told = [Outcome("chat", "chatcmpl-", "cancelled", 1, 1, "chatcmpl-a")]
    books = Books([line("chatcmpl-a", "cancelled")], [])
    assert cancelled_by(books, told, ["chatcmpl-a"]) == []
    assert "by nobody" in cancelled_by(books, told, [])[0]
    (said,) = cancelled_by(Books([line("chatcmpl-a")], []), told, ["chatcmpl-a"])
    assert said == "chatcmpl-a was cancelled, but ended as stop"


@pytest.mark.parametrize("what", ["cancel", "policy"])
async def test_what_is_under_way_at_the_end_is_done(what: str) -> None:
    """The daemon is slow to answer, and meanwhile it is to stop: what it did is noted, once."""
    asked, stop, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def daemon(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked_for = await reader.readuntil(b"\r\n\r\n")
        if not asked_for.startswith(b"GET "):
            asked.set()
            await go_on.wait()
        body = json.dumps({"requests": [{"id": "chatcmpl-a"}]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    async with asyncio.timeout(PATIENCE_SECONDS):
        server = await asyncio.start_server(daemon, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            disturbances = Disturbances("127.0.0.1", port, random.Random(0))
            disturbing = asyncio.create_task(
                disturbances.cancel_requests(0.001, stop)
                if what == "cancel"
                else disturbances.change_policies(0.001, ["aegaeon"], stop)
            )
            await asked.wait()
            stop.set()
            go_on.set()
            await disturbing

    assert disturbances.cancelled == (["chatcmpl-a"] if what == "cancel" else [])
    assert disturbances.policies == (["aegaeon"] if what == "policy" else [])
    assert disturbances.complaints == []


def test_the_log_is_read(tmp_path: Path) -> None:
    """Requests, but those of before; errors; and a traceback that is no record."""
    log = tmp_path / "daemon.log"
    records = [
        {"logger": "appliance.requests", "level": "info", **line("chatcmpl-a")},
        {"logger": "appliance.requests", "level": "info", **line("chatcmpl-b")},
        {"logger": "appliance.daemon", "level": "warning", "message": "a worker died"},
        {"logger": "appliance.api", "level": "error", "message": "a request failed"},
    ]
    log.write_text("\n".join(map(json.dumps, records)) + "\nTraceback (most recent call last):\n")
    books = read_books(log, {"chatcmpl-a"})
    assert [one["request"] for one in books.lines] == ["chatcmpl-b"]
    assert len(books.trouble) == 2


def test_what_is_still_held() -> None:
    """A live request, KV in use, and a policy that failed."""
    snapshot = {
        "requests": [{"id": "chatcmpl-a"}],
        "status": {
            "instances": [{"instance": 0, "state": "lost"}, {"instance": 1, "state": "up"}],
            "kv": {"host": {"shapes": {"1024": {"used_bytes": 2048}, "512": {"used_bytes": 0}}}},
        },
    }
    found = at_rest(snapshot, {("appliance_policy_errors_total", ""): 1.0})
    assert found == [
        "chatcmpl-a is still live",
        "instance 0 is lost",
        "2048 bytes of KV (1024) in use on the host",
        "policies failed 1 times",
    ]


def sample(seconds: float, daemon_bytes: int) -> Sample:
    return Sample(seconds, daemon_bytes, 0, 0, 0, 0, 3, 0, 0, ready=True)


@pytest.mark.parametrize(("growth", "flat"), [(0, True), (1 << 20, False)])
def test_memory_that_grows(tmp_path: Path, growth: int, flat: bool) -> None:
    """A megabyte in each of a hundred samples is told from none."""
    watch = Watch(1, "http://127.0.0.1:1", tmp_path)
    watch.samples = [sample(10.0 * i, (80 << 20) + growth * i) for i in range(100)]
    assert watch.flatness()["daemon_bytes"]["flat"] is flat


def events(*told: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in told)


def chunk(text: str, token: int, finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "token_ids": [token], "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}


def delta(text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": 0, "delta": {"text": text}}


def output(text: str) -> dict[str, Any]:
    return {"id": "c", "status": "completed", "error": None, "output": [{"content": [
        {"text": text}]}]}  # fmt: skip


def spoken(text: str, **end: object) -> dict[str, Any]:
    return {"model": "m", "message": {"content": text}, "done": bool(end), **end}


STREAMS = {
    "chat": events(chunk("Hel", 1, None), chunk("lo", 2, "stop")) + b"data: [DONE]\n\n",
    "message": b"event: message_start\n"
    + events(
        {"type": "message_start", "message": {"id": "c"}},
        delta("Hel"),
        delta("lo"),
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        {"type": "message_stop"},
    ),
    "response": events(
        {"type": "response.created", "response": {"id": "c", "error": None}},
        {"type": "response.output_text.delta", "delta": "Hel"},
        {"type": "response.output_text.delta", "delta": "lo"},
        {"type": "response.completed", "response": output("Hello")},
    ),
    "ollama": b"".join(
        json.dumps(one).encode() + b"\n"
        for one in (spoken("Hel"), spoken("lo"), spoken("", done_reason="stop"))
    ),
}


@pytest.mark.parametrize("dialect", STREAMS)
def test_streams_are_read(dialect: str) -> None:
    """Whatever the dialect and wherever it is cut, the same was said."""
    stream = STREAMS[dialect]
    heard = Heard()
    for place in range(0, len(stream), 7):
        assert not heard.done
        heard.stream(stream[place : place + 7])
    assert heard.done
    assert heard.choices[0].is_like(Said("Hello", None, "stop"))
    assert not heard.choices[0].is_like(Said("Hallo", None, "stop"))
    assert heard.id == (None if dialect == "ollama" else "c")
    assert heard.choices[0].ids == ([1, 2] if dialect == "chat" else None)


@pytest.mark.parametrize(
    "told",
    [
        {"error": {"message": CANCELLED, "code": "cancelled"}},
        {"error": CANCELLED},
        {"type": "error", "error": {"message": CANCELLED}},
        {"type": "response.failed", "response": {"id": "c", "error": {"message": CANCELLED}}},
    ],
)
def test_errors_are_read(told: dict[str, Any]) -> None:
    """In the words of each dialect."""
    heard = Heard()
    heard.event(told)
    assert heard.error == CANCELLED
    assert not heard.done


def test_a_wrong_vector_is_found() -> None:
    """Of an encoder: another number, and one too few; not what rounding changes."""
    plain = [0.25, -0.5, 0.0]

    assert equal([0.250001, -0.5, 1e-6], plain)
    assert not equal([0.2502, -0.5, 0.0], plain)
    assert not equal([0.25, -0.5, 1e-4], plain)
    assert not equal([0.25, -0.5], plain)
