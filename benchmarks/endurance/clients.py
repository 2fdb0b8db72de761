"""Clients: each asks one thing after the other on its connection, and often leaves in between."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace

from benchmarks.endurance.answers import CANCELLED, Heard
from benchmarks.endurance.asks import Ask, Book
from benchmarks.endurance.connection import Closed, Connection

PATIENCE_SECONDS = 900.0
"""Nobody has waited so long for an answer when all is well."""
NEAR = 1e-4
"""Of two numbers of a vector."""

FATES = ("stay", "nap", "mid-stream", "before the first byte", "mid-request")
FATE_WEIGHTS = (72, 10, 9, 6, 3)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a request: between `least` and `most` of its sequences were taken in."""

    kind: str
    prefix: str
    end: str
    """``whole``, ``cancelled``, ``refused``, ``left``, or what is wrong."""
    least: int
    most: int
    id: str | None = None
    """As the client was told; None if it was not."""


@dataclass
class PolicyStats:
    """What all clients saw."""

    outcomes: list[Outcome] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    fates: Counter[str] = field(default_factory=Counter)
    tokens_compared: int = 0

    def complain(self, what: str) -> None:
        if len(self.complaints) < 200:
            self.complaints.append(what)

    @property
    def ends(self) -> dict[str, dict[str, int]]:
        """How many requests of each kind ended how."""
        counts: dict[str, Counter[str]] = {}
        for outcome in self.outcomes:
            counts.setdefault(outcome.kind, Counter())[outcome.end] += 1
        return {kind: dict(sorted(count.items())) for kind, count in sorted(counts.items())}


class Client:
    """One connection, used again and again until it is told to stop."""

    def __init__(
        self,
        connection: Connection,
        book: Book,
        stats: PolicyStats,
        dice: random.Random,
        nap_seconds: float,
    ) -> None:
        """It does not read for `nap_seconds`, or a tenth of that, now and then."""
        self.heard = Heard()
        """What came so far of the answer to the last request."""
        self._nap_seconds = nap_seconds
        self._connection = connection
        self._book = book
        self._tally = stats
        self._dice = dice

    async def run(self, over: asyncio.Event) -> None:
        """Ask until it is over; what was asked is heard to its end."""
        while not over.is_set():
            ask = self._book.draw(self._dice)
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    pause = await self._one(ask)
            except TimeoutError:
                self._wrong(ask, f"no answer within {PATIENCE_SECONDS:.0f} s")
                self._connection.drop()
            except (Closed, OSError, ValueError, KeyError, TypeError) as error:
                self._wrong(ask, f"{type(error).__name__}: {error}")
                self._connection.drop()
            else:
                await asyncio.sleep(pause)
        self._connection.drop()

    def fate(self) -> str:
        """What is to become of the next request: one of `FATES`."""
        return self._dice.choices(FATES, FATE_WEIGHTS)[0]

    async def _one(self, ask: Ask) -> float:
        """Ask once; seconds to wait before the next time."""
        fate = self.fate()
        if not ask.stream and fate in ("mid-stream", "nap"):
            fate = "before the first byte" if fate == "mid-stream" else "stay"
        self._tally.fates[fate] += 1
        self.heard = heard = Heard()
        share = self._dice.random() if fate == "mid-request" else 1.0
        await self._connection.send("POST", ask.path, ask.body, share=share)
        if fate == "mid-request":
            self._hang_up()
            self._note(ask, "left", 0, 0)
            return 0.0
        if fate == "before the first byte":
            await asyncio.sleep(self._dice.choice((0.0, 0.01, 0.1, 1.0)))
            self._hang_up()
            self._note(ask, "left", 0, ask.sequences)
            return 0.0
        reply = await self._connection.reply()
        if reply.status == 429:
            return self._refused(ask, reply.headers, await reply.body())
        if reply.status != 200:
            body = await reply.body()
            heard.whole(body)
            return self._failed(ask, heard, reply.status)
        if not ask.stream:
            heard.whole(await reply.body())
            return self._whole(ask, heard)
        leave_after = self._dice.randrange(1, 60) if fate == "mid-stream" else None
        nap = self._nap_seconds * self._dice.choice((0.1, 1.0)) if fate == "nap" else 0.0
        async for data in reply.pieces():
            await asyncio.sleep(nap)
            nap = 0.0
            heard.stream(data)
            if leave_after is not None and heard.pieces >= leave_after and not heard.done:
                self._hang_up()
                self._begun(ask, heard)
                self._note(ask, "left", ask.sequences, ask.sequences, heard.id)
                return 0.0
        if heard.error is not None:
            return self._failed(ask, heard, 200)
        return self._whole(ask, heard)

    def _hang_up(self) -> None:
        self._connection.drop(reset=self._dice.random() < 0.5)

    def _refused(self, ask: Ask, headers: dict[str, str], body: bytes) -> float:
        """Too much at once: others of its sequences may have been taken in and given up."""
        try:
            pause = float(headers["retry-after"])
        except (KeyError, ValueError):
            self._wrong(ask, f"429 without Retry-After: {body!r}")
            return 0.0
        self._note(ask, "refused", 0, ask.sequences - 1)
        return min(pause, 5.0) * (0.5 + self._dice.random())

    def _failed(self, ask: Ask, heard: Heard, status: int) -> float:
        if heard.error != CANCELLED or status not in (200, 499):
            self._wrong(ask, f"{status}: {heard.error}")
            return 0.0
        self._begun(ask, heard)
        least = 1 if ask.vectors else ask.sequences
        self._note(ask, "cancelled", least, ask.sequences, heard.id)
        return 0.0

    def _whole(self, ask: Ask, heard: Heard) -> float:
        said = [heard.choices[index] for index in sorted(heard.choices)]
        if not heard.done:
            self._wrong(ask, "the stream ended before the answer did")
        elif ask.vectors:
            if not _alike(ask.vectors, heard.vectors):
                self._wrong(ask, "other vectors than alone")
        elif len(said) != len(ask.expected) or not all(
            one.is_like(other) for one, other in zip(said, ask.expected, strict=True)
        ):
            self._wrong(ask, f"said {said}, expected {ask.expected}")
        else:
            self._tally.tokens_compared += sum(len(one.ids or ()) for one in said)
        self._note(ask, "whole", ask.sequences, ask.sequences, heard.id)
        return 0.0

    def _begun(self, ask: Ask, heard: Heard) -> None:
        """What there is of an answer that was cut off has to be how the whole one begins."""
        for index, said in heard.choices.items():
            if not said.begins(ask.expected[index]):
                self._wrong(ask, f"began {said}, expected {ask.expected[index]}")

    def _wrong(self, ask: Ask, what: str) -> None:
        self._tally.complain(f"{ask.kind} of {ask.body['model']}: {what}")

    def _note(self, ask: Ask, end: str, least: int, most: int, id: str | None = None) -> None:
        self._tally.outcomes.append(Outcome(ask.kind, ask.prefix, end, least, most, id))


async def find_out(book: Book, connection: Connection) -> None:
    """Ask for what only the appliance can tell, one at a time while nothing else happens.

    Raises `ValueError` if it does not answer.
    """
    for ask in book.untold():
        reply = await connection.ask("POST", ask.path, ask.body)
        heard = Heard()
        hear = heard.stream if ask.stream else heard.whole
        hear(await reply.body())
        if not heard.done:
            raise ValueError(f"{ask.kind} of {ask.body['model']}: {reply.status} {heard.error}")
        said = tuple(heard.choices[index] for index in sorted(heard.choices))
        known = replace(ask, expected=said, vectors=tuple(map(tuple, heard.vectors)))
        book.others.append(known)
        if said and ask.kind != "tool":
            book.others.append(replace(known, body=ask.body | {"stream": True}))
    connection.drop()


def _alike(these: tuple[tuple[float, ...], ...], those: list[list[float]]) -> bool:
    return len(these) == len(those) and all(
        len(one) == len(other) and all(abs(a - b) < NEAR for a, b in zip(one, other, strict=True))
        for one, other in zip(these, those, strict=True)
    )
