"""Hostile requests of one key, each kind for a moment: they are answered, or refused by name."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import suppress

from benchmarks.endurance.answers import name_of
from benchmarks.endurance.connection import Closed, Connection
from benchmarks.hostile import CHAT, HALF_SENT_BODIES, HALF_SENT_HEADS, REQUESTS
from tests.chaos.daemon import HOSTILE, key, secret
from tests.chaos.record import CUT_OFF, NO_CONNECTION, End, Record
from tests.hostile.connections import HALF_SENT, half_sent_body

ANSWER_SECONDS = 300.0
HEADS, BODIES = 400, 12
"""Connections that are held at once."""
HOLD_SECONDS = 5.0
HALF_SENT_KINDS = (HALF_SENT_HEADS, HALF_SENT_BODIES)
KINDS = (*REQUESTS, *HALF_SENT_KINDS)


async def send(address: tuple[str, int], kind: str, record: Record) -> str:
    """As many requests of the kind as it has at once; how they were answered, in words."""
    bodies, many = REQUESTS[kind].bodies(), REQUESTS[kind].at_once
    ends = await asyncio.gather(*(_one(address, kind, next(bodies), record) for _ in range(many)))
    return ", ".join(f"{count} {end}" for end, count in sorted(Counter(ends).items()))


async def _one(address: tuple[str, int], kind: str, body: bytes, record: Record) -> str:
    connection, asked = Connection(*address, headers=key(HOSTILE)), record.now()
    status, said, name = 0, "", None
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reply = await connection.ask("POST", CHAT, body)
            content = await reply.body()
        status = reply.status
        if status == 200:
            return "answered"
        error = json.loads(content)["error"]
        name, said = name_of(error), error["message"]
    except TimeoutError:
        name, said = "unanswered", f"no answer within {ANSWER_SECONDS:.0f} s"
    except Closed:
        name = CUT_OFF
    except OSError as error:
        name = NO_CONNECTION if isinstance(error, ConnectionRefusedError) else CUT_OFF
    finally:
        connection.drop()
    if not 400 <= status < 500 or name is None:
        record.ends.append(End(f"hostile: {kind}", name, status, asked, record.now(), said))
    return str(name)


async def hold(address: tuple[str, int], kind: str) -> str:
    """Many connections with half a request each, for a while; how many there were."""
    begun = [half_sent_body(secret(HOSTILE))] * BODIES
    if kind == HALF_SENT_HEADS:
        begun = [HALF_SENT[number % len(HALF_SENT)] for number in range(HEADS)]

    async def hold_one(data: bytes) -> None:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(*address)
            try:
                writer.write(data)
                await asyncio.sleep(HOLD_SECONDS)
            finally:
                writer.transport.abort()

    await asyncio.gather(*(hold_one(data) for data in begun))
    return f"{len(begun)} connections"
