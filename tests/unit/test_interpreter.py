"""The process that reads tool calls, and how the daemon asks it; its parsers are scripts here."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from appliance.api.service import ChatRefused, GenerationFailed
from appliance.dialogue import Begin, Parsers, ParserUnusable
from appliance.engines.protocol import Guide, GuideKind
from appliance.interpreter import converse
from appliance.interpreting import BEGIN_SECONDS, HEAR_SECONDS, MISHAPS, MOVES, Interpreter
from appliance.toolcalls import CallPiece, Heard
from tests.patience import PATIENCE_SECONDS

HEARD = threading.Event()
"""Set when text was heard; a slow chat waits for it to begin."""
OPENING = threading.Event()
"""Set when a slow chat is beginning."""
BEGUN: queue.SimpleQueue[weakref.ref[Script]] = queue.SimpleQueue()
"""All that have begun."""


class Broken(BaseException):
    """The process is no more."""


class Script:
    """Upper case is content, or what was heard before; it does what its chat says."""

    guide = Guide(GuideKind.REGEX, "x")
    special_tokens = True

    def __init__(self, killed: threading.Event, begin: Begin) -> None:
        match begin.chat:
            case b"refuse":
                raise ValueError("that cannot be")
            case b"fault":
                raise ParserUnusable("there is no such parser")
            case b"defect":
                raise KeyError("oops")
            case b"slow":
                OPENING.set()
                assert HEARD.wait(PATIENCE_SECONDS)
        self._killed = killed
        self._begin = begin
        self._before: list[str] = []
        BEGUN.put(weakref.ref(self))

    def hear(self, choice: int, text: str, tokens: Sequence[int], finished: bool) -> Heard:
        if text == "choke":
            raise IndexError("nothing there")
        if text == "hang":
            assert self._killed.wait(PATIENCE_SECONDS)
        if text == "half":
            return Heard("\ud83d")
        if text == "break":
            raise Broken
        if text == "tell":
            return Heard(" ".join(self._before))
        self._before.append(text)
        if text != "quiet":
            HEARD.set()
        name = f"{self._begin.parsers.tool} {choice} {len(tokens)} {finished}"
        return Heard(text.upper(), (CallPiece(0, "id", name, "{}"),))


class ThreadProcess:
    """An interpreter in a thread; killing it hangs up."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection.dup()
        self._killed = threading.Event()
        self.thread = threading.Thread(target=self._converse, daemon=True)
        self.thread.start()

    def _converse(self) -> None:
        with contextlib.suppress(Broken), self._connection:
            converse(self._connection, partial(Script, self._killed))

    def kill(self) -> None:
        self._killed.set()
        with contextlib.suppress(OSError):  # it hung up itself
            self._connection.shutdown(socket.SHUT_RDWR)

    async def wait(self) -> None:
        pass


class Bench:
    """An interpreter, and the processes that it started."""

    def __init__(self) -> None:
        self.processes: list[ThreadProcess] = []
        self.startable = True
        self.interpreter = Interpreter(self._start)

    async def _start(self, theirs: socket.socket) -> ThreadProcess:
        if not self.startable:
            raise OSError("no room for a process")
        self.processes.append(ThreadProcess(theirs))
        return self.processes[-1]

    async def begin(self, chat: bytes = b"", parser: str | None = "p") -> Any:
        return await self.interpreter.begin("/model", Parsers(parser), chat, (1, 2), 2)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.interpreter.stop()
    HEARD.set()  # nothing is slow any longer
    for process in bench.processes:
        await asyncio.to_thread(process.thread.join, PATIENCE_SECONDS)


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """So many seconds pass at once for whoever waits on the event loop."""

    def passes(seconds: float) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + seconds)

    return passes


async def test_chats_are_read_side_by_side(bench: Bench) -> None:
    """Each by a parser of its own, in one process."""
    one, two = await asyncio.gather(bench.begin(parser="a"), bench.begin(parser=None))
    heard = await asyncio.gather(one.hear(0, "x", (1, 2), False), two.hear(1, "y", (3,), True))

    assert one.guide == Script.guide
    assert one.special_tokens
    assert heard == [
        Heard("X", (CallPiece(0, "id", "a 0 2 False", "{}"),)),
        Heard("Y", (CallPiece(0, "id", "None 1 1 True", "{}"),)),
    ]
    assert len(bench.processes) == 1


async def test_a_chat_that_begins_slowly_holds_up_no_other(bench: Bench) -> None:
    """Text of others is read meanwhile."""
    one = await bench.begin()
    HEARD.clear()
    slow = asyncio.create_task(bench.begin(b"slow"))
    await asyncio.sleep(0)  # its question goes out

    assert (await one.hear(0, "x", (), False)).content == "X"
    assert (await (await slow).hear(0, "y", (), False)).content == "Y"


async def test_a_chat_that_nobody_waits_for_is_forgotten(bench: Bench) -> None:
    """Its client left while it was beginning."""
    other = await bench.begin()
    HEARD.clear()
    OPENING.clear()
    slow = asyncio.create_task(bench.begin(b"slow"))
    assert await asyncio.to_thread(OPENING.wait, PATIENCE_SECONDS)
    while not BEGUN.empty():
        BEGUN.get()
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    await other.hear(0, "x", (), False)
    await bench.begin()  # behind it

    left = BEGUN.get(timeout=PATIENCE_SECONDS)
    gc.collect()
    assert left() is None


async def test_a_chat_that_does_not_begin_in_time(
    bench: Bench, pass_time: Callable[[float], None]
) -> None:
    """It fails by itself while the process answers others; those behind it can begin."""
    other = await bench.begin()
    HEARD.clear()
    slow = asyncio.create_task(bench.begin(b"slow"))
    await asyncio.sleep(0)  # its question goes out
    await other.hear(0, "quiet", (), False)
    pass_time(BEGIN_SECONDS)

    with pytest.raises(GenerationFailed) as caught:
        await slow
    assert (caught.value.code, caught.value.status) == ("overloaded", 503)
    assert caught.value.retry_after_seconds
    assert (await other.hear(0, "x", (), False)).content == "X"
    assert (await (await bench.begin()).hear(0, "x", (), False)).content == "X"
    assert len(bench.processes) == 1


async def test_a_process_that_begins_no_chat_and_answers_nobody(
    bench: Bench, pass_time: Callable[[float], None]
) -> None:
    """It is ended, and the next chat has another one."""
    await bench.begin()
    HEARD.clear()
    slow = asyncio.create_task(bench.begin(b"slow"))
    await asyncio.sleep(0)
    pass_time(BEGIN_SECONDS)
    with pytest.raises(GenerationFailed) as caught:
        await slow
    HEARD.set()

    assert caught.value.code == "interpreter_lost"
    assert (await (await bench.begin()).hear(0, "x", (), False)).content == "X"
    assert len(bench.processes) == 2


async def test_chats_that_may_be_beginning_are_so_many(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more is told to come again; when they have begun, there is room."""
    monkeypatch.setattr("appliance.interpreting.BEGINNING", 2)
    other = await bench.begin()
    HEARD.clear()
    waiting = [asyncio.create_task(bench.begin(b"slow")) for _ in range(2)]
    await asyncio.sleep(0)

    with pytest.raises(GenerationFailed) as caught:
        await bench.begin()
    assert (caught.value.code, caught.value.status) == ("overloaded", 503)
    assert caught.value.retry_after_seconds

    await other.hear(0, "x", (), False)
    for chat in [*await asyncio.gather(*waiting), await bench.begin()]:
        assert (await chat.hear(0, "x", (), False)).content == "X"


async def test_a_chat_that_nobody_waits_for_does_not_begin(bench: Bench) -> None:
    """Its client left while others were before it: it takes no time from those behind it."""
    other = await bench.begin()
    HEARD.clear()
    slow = asyncio.create_task(bench.begin(b"slow"))
    left = asyncio.create_task(bench.begin())
    await asyncio.sleep(0)
    while not BEGUN.empty():
        BEGUN.get()
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    await other.hear(0, "x", (), False)
    kept = [await slow, await bench.begin()]

    assert BEGUN.qsize() == len(kept)


async def test_a_process_that_is_prepared(bench: Bench) -> None:
    """It is started before there is any chat, which then needs no other one."""
    bench.interpreter.prepare()
    await bench.begin()
    assert len(bench.processes) == 1


async def test_a_process_that_cannot_be_prepared(bench: Bench) -> None:
    """That harms nobody; the first chat tries again."""
    bench.startable = False
    bench.interpreter.prepare()
    with pytest.raises(GenerationFailed):
        await bench.begin()
    bench.startable = True
    await bench.begin()


async def test_a_chat_that_is_over_is_forgotten(bench: Bench) -> None:
    """Nothing of it is kept; others go on."""
    one, two = await bench.begin(), await bench.begin()
    one.end()
    one.end()

    with pytest.raises(GenerationFailed, match="KeyError"):
        await one.hear(0, "x", (), False)
    assert (await two.hear(0, "x", (), False)).content == "X"


@pytest.mark.parametrize(
    ("chat", "reason"),
    [(b"fault", "there is no such parser"), (b"defect", "KeyError: 'oops'")],
)
async def test_a_parser_that_cannot_be_used(bench: Bench, chat: bytes, reason: str) -> None:
    """Not the client's fault; the process goes on."""
    with pytest.raises(GenerationFailed, match=reason) as caught:
        await bench.begin(chat)
    assert (caught.value.code, caught.value.status) == ("parser_unusable", 500)
    assert (await (await bench.begin()).hear(0, "x", (), False)).content == "X"


async def test_a_chat_that_is_refused(bench: Bench) -> None:
    """The client's fault, with the reason."""
    with pytest.raises(ChatRefused, match="that cannot be"):
        await bench.begin(b"refuse")


async def test_a_parser_that_fails(bench: Bench) -> None:
    """It fails its request and no other."""
    chat = await bench.begin()
    with pytest.raises(GenerationFailed, match="IndexError: nothing there") as caught:
        await chat.hear(0, "choke", (), False)
    assert caught.value.code == "parser_failed"
    assert (await chat.hear(0, "x", (), False)).content == "X"


async def test_text_that_is_none(bench: Bench) -> None:
    """A model may write half of a surrogate pair: that ends its own chat only."""
    chat, other = await bench.begin(), await bench.begin()
    with pytest.raises(GenerationFailed, match="no Unicode") as caught:
        await chat.hear(0, "half", (), False)
    assert caught.value.code == "parser_failed"
    assert (await other.hear(0, "x", (), False)).content == "X"
    assert len(bench.processes) == 1


async def test_a_lost_process_is_started_anew(bench: Bench) -> None:
    """What it was reading is read by the next one, from its beginning."""
    chat = await bench.begin()
    for text in ("a", "b"):
        await chat.hear(0, text, (), False)
    bench.processes[0].kill()
    bench.processes[0].thread.join(PATIENCE_SECONDS)

    assert (await chat.hear(0, "tell", (), False)).content == "a b"
    chat.end()
    assert (await (await bench.begin()).hear(0, "x", (), False)).content == "X"
    assert len(bench.processes) == 2


async def test_a_parser_that_hangs_is_ended(
    bench: Bench, pass_time: Callable[[float], None]
) -> None:
    """Its chat fails; those that wait in its process, or will, are read by another one."""
    one, two, idle = [await bench.begin() for _ in range(3)]
    for chat, text in ((two, "a"), (idle, "b")):
        await chat.hear(0, text, (), False)

    hears = asyncio.gather(
        one.hear(0, "hang", (), False), two.hear(0, "tell", (), False), return_exceptions=True
    )
    await asyncio.sleep(0)
    pass_time(HEAR_SECONDS)
    failed, told = await hears

    assert failed.code == "interpreter_lost"
    assert told.content == "a"
    assert (await idle.hear(0, "tell", (), False)).content == "b"
    assert (await bench.begin()).guide == Script.guide
    assert len(bench.processes) == 2


async def test_a_process_that_breaks(bench: Bench) -> None:
    """Whose text it was reading has failed; who is behind has not."""
    one, two, begins = await bench.begin(), await bench.begin(), bench.begin(b"slow")

    failed, told, begun = await asyncio.gather(
        one.hear(0, "break", (), False), two.hear(0, "x", (), False), begins, return_exceptions=True
    )

    assert failed.code == "interpreter_lost"
    assert told.content == "X"
    assert begun.guide == Script.guide


async def test_a_chat_with_which_processes_break(bench: Bench) -> None:
    """Once may be an accident."""
    chat = await bench.begin()

    with pytest.raises(GenerationFailed) as caught:
        await chat.hear(0, "break", (), False)
    assert caught.value.code == "interpreter_lost"
    assert len(bench.processes) == MISHAPS


async def test_processes_that_are_lost_again_and_again(
    bench: Bench, pass_time: Callable[[float], None]
) -> None:
    """A chat moves so many times, and no more."""
    chat = await bench.begin()
    for _ in range(MOVES + 1):
        other = await bench.begin()
        assert (await chat.hear(0, "x", (), False)).content == "X"
        hangs = asyncio.create_task(other.hear(0, "hang", (), False))
        await asyncio.sleep(0)
        pass_time(HEAR_SECONDS)
        with pytest.raises(GenerationFailed):
            await hangs

    with pytest.raises(GenerationFailed) as caught:
        await chat.hear(0, "x", (), False)
    assert caught.value.code == "interpreter_lost"


async def test_no_process_is_started_at_the_end(bench: Bench) -> None:
    """Whatever is still to be read fails."""
    chat = await bench.begin()
    await bench.interpreter.stop()

    with pytest.raises(GenerationFailed) as caught:
        await chat.hear(0, "x", (), False)
    assert caught.value.code == "interpreter_lost"
    assert len(bench.processes) == 1


async def test_a_process_that_cannot_be_started(bench: Bench) -> None:
    """Its chat fails; the next one tries again."""
    bench.startable = False
    with pytest.raises(GenerationFailed) as caught:
        await bench.begin()
    assert caught.value.code == "interpreter_lost"
    bench.startable = True
    await bench.begin()


async def test_the_process_ends_with_the_daemon(bench: Bench) -> None:
    """It is hung up on, and ends by itself."""
    await bench.begin()
    await bench.interpreter.stop()

    bench.processes[0].thread.join(PATIENCE_SECONDS)
    assert not bench.processes[0].thread.is_alive()


def left_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_what_the_process_leaves_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process has a temporary directory of its own as long as it lives."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    interpreter = Interpreter()
    interpreter.prepare()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not left_in(tmp_path):  # noqa: ASYNC110 - the process is another one
            await asyncio.sleep(0)

    await interpreter.stop()

    assert left_in(tmp_path) == []
