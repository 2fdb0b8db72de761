"""Clients of several keys that go on whatever happens, and note how each request ended."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from appliance.demo.run import Known
from appliance.demo.traffic import ChatRequest
from benchmarks.endurance.answers import Heard
from benchmarks.endurance.asks import Ask, Book
from benchmarks.endurance.clients import PATIENCE_SECONDS, Client, PolicyStats
from benchmarks.endurance.connection import Closed, Connection
from tests.chaos.daemon import INNOCENT, key
from tests.chaos.record import CUT_OFF, NO_CONNECTION, End, Record

PAUSE_SECONDS = 0.5
"""Before a request is sent again that got no connection."""
INNOCENT_EVERY_SECONDS = 1.0
INNOCENT_TOKENS = 8


class LastingClient(Client):
    """A client of the endurance benchmark, in whose life daemons come and go."""

    def __init__(
        self,
        connection: Connection,
        book: Book,
        stats: PolicyStats,
        dice: random.Random,
        nap_seconds: float,
        record: Record,
    ) -> None:
        super().__init__(connection, book, stats, dice, nap_seconds)
        self._record = record
        self._asked = 0.0
        self._dropped = False

    async def run(self, over: asyncio.Event) -> None:
        """Ask until it is over; what was asked is heard to its end."""
        while not over.is_set():
            await self.once(self.draw())
        self._connection.drop()

    def draw(self) -> Ask:
        """The next request."""
        return self._book.draw(self._dice)

    async def once(self, ask: Ask) -> None:
        """Ask, and note what became of it."""
        self._dropped, self._asked, pause = False, self._record.now(), PAUSE_SECONDS
        self.heard = Heard()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                pause = await self._one(ask)
        except TimeoutError:
            self._wrong(ask, f"no answer within {PATIENCE_SECONDS:.0f} s")
            self._connection.drop()
        except Closed:
            self._cut(ask, CUT_OFF)
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            self._cut(ask, NO_CONNECTION if refused else CUT_OFF)
        except (ValueError, KeyError, TypeError) as error:
            self._wrong(ask, f"{type(error).__name__}: {error}")
            self._connection.drop()
        await asyncio.sleep(pause)

    def hang_up_now(self) -> None:
        """Whatever it is about."""
        self._dropped = True
        self._hang_up()

    def _cut(self, ask: Ask, how: str) -> None:
        """What came before has to be how the answer begins."""
        self._connection.drop()
        self._begun(ask, self.heard)
        if not self._dropped:
            self._end(ask, how, 0)

    def _refused(self, ask: Ask, headers: dict[str, str], body: bytes) -> float:
        heard = Heard()
        heard.event(json.loads(body))
        self._end(ask, _name(ask, heard), 429, heard.error)
        return super()._refused(ask, headers, body)

    def _failed(self, ask: Ask, heard: Heard, status: int) -> float:
        self._begun(ask, heard)
        self._end(ask, _name(ask, heard), status, heard.error)
        return PAUSE_SECONDS

    def _end(self, ask: Ask, name: str | None, status: int, said: str | None = None) -> None:
        request = f"{ask.kind} of {ask.body['model']}"
        self._record.ends.append(
            End(request, name, status, self._asked, self._record.now(), said or "")
        )


class SlowClient(LastingClient):
    """Does not read for a while after its answer has begun, which is long for its few tokens."""

    def fate(self) -> str:
        return "nap"

    def draw(self) -> Ask:
        while True:
            ask = self._book.draw(self._dice)
            if ask.kind == "chat" and not ask.vectors:
                more = {"logprobs": True, "top_logprobs": 20, "stream": True}
                return replace(ask, body=ask.body | more)


def _name(ask: Ask, heard: Heard) -> str | None:
    """Of a refusal. Ollama's have a text alone."""
    return heard.error_name or (heard.error if ask.path.startswith("/api/") else None)


@dataclass
class Innocent:
    """A key that asks for a short answer every second, however long the last one takes."""

    address: tuple[str, int]
    chats: Sequence[tuple[ChatRequest, Known]]
    record: Record
    ttfts: list[tuple[float, float]] = field(default_factory=list)
    """When a chat was first sent, in seconds since the beginning, and the seconds to its first
    token: tries that failed in between are part of it."""
    complaints: list[str] = field(default_factory=list)

    async def run(self, over: asyncio.Event) -> None:
        """Until it is over; returns when all was answered."""
        asking: set[asyncio.Task[None]] = set()
        number = 0
        while not over.is_set():
            task = asyncio.create_task(self._ask(*self.chats[number % len(self.chats)]))
            asking.add(task)
            task.add_done_callback(asking.discard)
            number += 1
            await asyncio.sleep(INNOCENT_EVERY_SECONDS)
        await asyncio.gather(*asking)

    async def _ask(self, chat: ChatRequest, known: Known) -> None:
        began = self.record.now()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not await self._try(chat, known, began):  # noqa: ASYNC110 - not a condition
                    await asyncio.sleep(PAUSE_SECONDS)
        except TimeoutError:
            self.complaints.append(
                f"{INNOCENT}, from {began:.1f} s: no answer within {PATIENCE_SECONDS:.0f} s"
            )
        except (ValueError, KeyError, TypeError) as error:
            self.complaints.append(f"{INNOCENT}: {type(error).__name__}: {error}")

    async def _try(self, chat: ChatRequest, known: Known, began: float) -> bool:
        """Ask once; whether it was answered. A token that came counts, though it may be sent again
        in the next answer."""
        body = {
            "model": chat.model,
            "messages": [{"role": "user", "content": chat.prompt}],
            "max_tokens": INNOCENT_TOKENS,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        connection, heard, asked = self._connection(), Heard(), self.record.now()
        ttft: float | None = None
        try:
            reply = await connection.ask("POST", "/v1/chat/completions", body)
            if reply.status != 200:
                heard.event(json.loads(await reply.body()))
            else:
                async for data in reply.pieces():
                    heard.stream(data)
                    if ttft is None and heard.choices and heard.choices[0].ids:
                        ttft = self.record.now() - began
            name, status = heard.error_name, reply.status
        except Closed:
            name, status = CUT_OFF, 0
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            name, status = NO_CONNECTION if refused else CUT_OFF, 0
        finally:
            connection.drop()
        ids = heard.choices[0].ids or [] if heard.choices else []
        expected = known.tokens[:INNOCENT_TOKENS]
        if heard.done and heard.error is None and ttft is not None:
            if ids != expected:
                self.complaints.append(f"{INNOCENT}: said {ids}, expected {expected}")
            self.ttfts.append((round(began, 2), round(ttft, 4)))
            return True
        if ids != expected[: len(ids)]:
            self.complaints.append(f"{INNOCENT}: began {ids}, expected {expected}")
        said = heard.error or ""
        request = f"{INNOCENT} of {chat.model}"
        self.record.ends.append(End(request, name, status, asked, self.record.now(), said))
        return False

    def _connection(self) -> Connection:
        return Connection(*self.address, headers=key(INNOCENT))
