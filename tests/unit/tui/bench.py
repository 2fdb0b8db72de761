"""A dashboard on a source that says what a test wants, with a clock that stands still."""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from textual import events
from textual.keys import _character_to_key
from textual.widget import Widget

from tui.app import Dashboard
from tui.messages import (
    AnswerPiece,
    DaemonRefused,
    DaemonSource,
    Document,
    Kind,
    Message,
    PieceKind,
)

Shown = TypeVar("Shown", bound=Dashboard)

NOW = 1_700_000_000.0
"""2023-11-14 22:13:20 UTC."""


def state(tree: Document, at: float = NOW, *, missed: bool = False) -> Message:
    data = {"unix_seconds": at, "newest_event": 1, "missed": missed, "state": copy.deepcopy(tree)}
    return Message(at, Kind.STATE, data)


def delta(patch: Document, at: float = NOW) -> Message:
    return Message(at, Kind.DELTA, {"unix_seconds": at, "patch": copy.deepcopy(patch)})


def notice(number: int, kind: str, at: float = NOW, **facts: Any) -> Message:
    data = {"number": number, "unix_seconds": at, "kind": kind, "facts": facts}
    return Message(at, Kind.NOTICE, data)


def lost(reason: str, seconds: float = 2.0, at: float = NOW) -> Message:
    return Message(at, Kind.LOST, {"reason": reason, "seconds": seconds})


def model(name: str, **members: Any) -> Document:
    return {
        "model": name, "state": "loaded", "residency": {"0": "loaded"}, "running": 0, "waiting": 0,
        "draining": False, "load_requested": False, "output_tokens": 0,
        "terms": {"max_queue": 9, "pinned": False},
        "facts": {"architecture": "LlamaForCausalLM", "weight_bytes": 3 << 30},
    } | members  # fmt: skip


def request(name: str, of: str, **members: Any) -> Document:
    return {
        "id": name, "model": of, "request_class": "interactive", "phase": "running",
        "arrived_unix_seconds": NOW - 3, "prompt_tokens": 12, "output_tokens": 5, "max_tokens": 64,
        "instance": 0, "kv": "device",
    } | members  # fmt: skip


def tree(models: str = "abc", requests: Iterable[Document] = (), **members: Any) -> Document:
    return {
        "version": "1.2.3",
        "started_unix_seconds": NOW - 90,
        "readiness": {"ok": True, "reasons": []},
        "instances": {
            "0": {"instance": 0, "role": "mixed", "state": "up", "pid": 7, "model": models[0]}
        },
        "models": {name: model(name) for name in models},
        "requests": {row["id"]: row for row in requests},
    } | members


def said(text: str, **delta: Any) -> Document:
    """A chunk of an answer."""
    return {"choices": [{"index": 0, "delta": {"content": text} | delta, "finish_reason": None}]}


class Spoken:
    """A streamed answer: the test says the pieces of it."""

    def __init__(self, path: str, body: Any) -> None:
        self.path = path
        self.body = body
        self.closed = False
        """Nobody listens any more."""
        self._pieces: asyncio.Queue[AnswerPiece | DaemonRefused | None] = asyncio.Queue()

    def begin(self, request: str = "chatcmpl-1", at: float = NOW) -> None:
        self._pieces.put_nowait(AnswerPiece(at, PieceKind.BEGUN, {"request": request}))

    def say(self, data: Document | str, at: float = NOW) -> None:
        """An event, or new text."""
        data = said(data) if isinstance(data, str) else data
        self._pieces.put_nowait(AnswerPiece(at, PieceKind.DATA, data))

    def end(self, tokens: int, timing: str = "", at: float = NOW, *, reason: str = "stop") -> None:
        """As the daemon does it."""
        finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
        usage = {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}
        self._pieces.put_nowait(AnswerPiece(at, PieceKind.DATA, finish))
        self._pieces.put_nowait(
            AnswerPiece(at, PieceKind.REMARK, {"text": f"server-timing: {timing}"})
        )
        self._pieces.put_nowait(AnswerPiece(at, PieceKind.DATA, {"choices": [], "usage": usage}))
        self._pieces.put_nowait(None)

    def refuse(self, why: str) -> None:
        self._pieces.put_nowait(DaemonRefused(why))

    async def pieces(self) -> AsyncIterator[AnswerPiece]:
        try:
            yield AnswerPiece(NOW, PieceKind.ASKED, {})
            while (piece := await self._pieces.get()) is not None:
                if isinstance(piece, DaemonRefused):
                    raise piece
                yield piece
        finally:
            self.closed = True


class Told:
    """A source that says what it is told to, at once, and answers from `answers`."""

    name = "http://127.0.0.1:11500"

    def __init__(self, *messages: Message, live: bool = True) -> None:
        self.live = live
        self.asked: list[tuple[str, str, object]] = []
        self.answers: dict[tuple[str, str], Any] = {}
        self.streams: list[Spoken] = []
        """What was asked for as a stream, in order; the test speaks."""
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue()
        for message in messages:
            self.say(message)

    def say(self, message: Message | None) -> None:
        """None is the end."""
        self._queue.put_nowait(message)

    async def follow(self) -> AsyncIterator[Message]:
        while (message := await self._queue.get()) is not None:
            yield message

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        self.asked.append((method, path, body))
        answer = self.answers.get((method, path), DaemonRefused(f"{path} is not known"))
        if isinstance(answer, DaemonRefused):
            raise answer
        return answer

    def stream(self, path: str, body: object) -> AsyncIterator[AnswerPiece]:
        self.streams.append(Spoken(path, body))
        return self.streams[-1].pieces()


@asynccontextmanager
async def dashboard(
    source: DaemonSource,
    *,
    size: tuple[int, int] = (80, 24),
    colours: bool = True,
    kind: type[Shown] = Dashboard,  # type: ignore[assignment]
    **options: Any,
) -> AsyncIterator[Shown]:
    """It has heard all that the source has said so far. Whatever the machine wishes for, it is in
    UTC, and has its colours unless it is to have none."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TZ", "UTC")
            time.tzset()
            if colours:
                patch.delenv("NO_COLOR", raising=False)
            else:
                patch.setenv("NO_COLOR", "1")
            # Two clicks are a double click however long this machine takes for them.
            patch.setattr(Dashboard, "CLICK_CHAIN_TIME_THRESHOLD", math.inf)
            app = kind(source, clock=lambda: NOW, **options)
            async with app.run_test(size=size, notifications=True):
                await settle(app)
                yield app
    finally:
        time.tzset()


QUIET_ROUNDS = 25
"""Of the event loop. A message that is handled takes a few, and then it is in no queue."""


async def settle(app: Dashboard) -> None:
    """What was said is heard, what was pressed is done, and the screen shows it.

    Textual's own pilot waits for the process to be idle, which takes 40 ms a key.
    """
    for _ in range(2):
        quiet = 0
        while quiet < QUIET_ROUNDS:
            await asyncio.sleep(0)
            if app._exception is not None:
                raise app._exception
            pumps = [app, *(node for screen in app.screen_stack for node in walk(screen))]
            busy = any(not pump._message_queue.empty() for pump in pumps)
            quiet = 0 if busy else quiet + 1
        app.refresh_shown()
        for shown in app.screen_stack:
            shown._on_timer_update()


def walk(node: Widget) -> Iterator[Widget]:
    yield node
    for child in node._nodes:
        yield from walk(child)


async def press(app: Dashboard, *keys: str) -> None:
    """Press keys, by their names, one after the other."""
    for key in keys:
        app.post_message(_event(key))
        await settle(app)


async def paste(app: Dashboard, *keys: str) -> None:
    """Press keys before the first of them is looked at: fast fingers, on a machine that is busy."""
    for key in keys:
        app.post_message(_event(key))
    await settle(app)


def _event(key: str) -> events.Key:
    name = key if len(key) > 1 or key.isalnum() else _character_to_key(key)
    return events.Key(name, key if len(key) == 1 else {"space": " "}.get(key))


async def command(app: Dashboard, text: str) -> None:
    """Type a command and give it."""
    await press(app, ":", *text, "enter")


async def click(app: Dashboard, x: int, y: int, times: int = 1) -> None:
    """With the left button, at a place of the screen; clicks before do not count with these."""
    app._click_chain_last_time = None
    for kind in [events.MouseDown, events.MouseUp] * times:
        app.post_message(
            kind(None, x, y, 0, 0, 1, False, False, False, x, y)  # type: ignore[arg-type]
        )
        await settle(app)


def screen(app: Dashboard) -> list[str]:
    """What stands on the screen, a text for each line."""
    strips = app.screen._compositor.render_strips()
    return ["".join([segment.text for segment in strip]).rstrip() for strip in strips]


def seen(app: Dashboard) -> str:
    return "\n".join(screen(app))


def notified(app: Dashboard) -> list[str]:
    """What it tells in passing, before lines are broken."""
    return [one.message for one in app._notifications]


def compare(app: Dashboard, path: Path, *, update: bool) -> None:
    """What is on the screen is, to the last colour, what stands in an SVG file."""
    found = app.export_screenshot(simplify=True)
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == found, (
        f"{path.name} differs; look at it, then run with --update-snapshots"
    )
