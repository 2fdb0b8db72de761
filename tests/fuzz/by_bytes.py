"""Requests to every endpoint that are spoilt byte by byte, over connections that misbehave.

    python -m tests.fuzz.by_bytes --seconds 600

Nothing may be answered with a server's error (but for 503 where an operator drained a model or
ended a request), nothing may stay behind, and the target has to go on answering, without an error
in its log. A case is made from its number and the seed alone, but for the ids of files and batches.

What was not answered in time is asked again, alone and with more patience: only if that is of no
use either it is the target's fault, not that of a busy box.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import httpx

from appliance.access.keys import Scope
from appliance.api.app import create_app
from tests.fuzz import mutations
from tests.fuzz.corpus import BATCH, FILE, FORM, UPLOAD, Seed, seeds
from tests.fuzz.running import Target, running
from tests.fuzz.target import MODELS, SECRETS, Held
from tests.unit.doubles.fake_service import FakeService

_AT_ONCE: Final = 24
_ANSWER_SECONDS: Final = 0.7
"""How long a case listens; streams that have no end are left then."""
_STATUS_SECONDS: Final = 30.0
"""How long a request that is whole may take until its answer begins, on a box that is busy."""
_PATIENCE: Final = 4
"""Times that, for what is asked again."""
_WHOLE_EVERY: Final = 10
"""Cases of which one is whole."""
_WITH_BODY: Final = 0.7
"""How often a request has a body for certain: there is more in it to go wrong."""
_MEND_EVERY: Final = 100
"""Cases after which what operators' requests changed is put in order again."""
_ANOTHER_BATCH_EVERY: Final = 1000
"""Cases after which another batch is begun."""
_REST_SECONDS: Final = 30.0
"""How long the target may take until nothing lives any more."""

_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n")
_BY_NAME: Final = re.compile(
    rb"is being drained|shutting down|was cancelled|model_draining|is quarantined"
)


class Finding(NamedTuple):
    """What should not have happened. `sent` are the bytes of the case, `got` those that came."""

    what: str
    case: int
    sent: bytes = b""
    got: bytes = b""


class Outcome(NamedTuple):
    """What came of a run."""

    cases: int
    statuses: Counter[int]
    """Of all answers; 0 for a connection that was closed without one."""
    slow: int
    """Answers that came only when they were asked for again: the box was busy."""
    findings: list[Finding]
    samples: list[Held]
    """What the target held: when it was warm, and from then on until the end."""


async def fuzz(
    target: Target,
    *,
    seed: int,
    cases: int | None = None,
    seconds: float | None = None,
    keys: bool = False,
    warm_cases: int = 300,
) -> Outcome:
    """Fuzz until there were enough cases, or for so long. What the target holds is looked at after
    `warm_cases`, every thirty seconds, and at the end."""
    run = _Run(target, seed, keys)
    ends = None if seconds is None else time.monotonic() + seconds
    await run.until(warm_cases, ends)
    samples = [await run.rest()]
    while (cases is None or run.cases < cases) and (ends is None or time.monotonic() < ends):
        pause = time.monotonic() + 30
        await run.until(cases, pause if ends is None else min(pause, ends))
        samples.append(await run.rest())
    return Outcome(run.cases, run.statuses, run.slow, run.findings, samples)


class _Run:
    def __init__(self, target: Target, seed: int, keys: bool) -> None:
        self.cases = 0
        self.statuses: Counter[int] = Counter()
        self.slow = 0
        self.findings: list[Finding] = []
        self._alone = asyncio.Lock()
        """Held by who asks again."""
        self._target = target
        self._seed = seed
        self._seeds = seeds(create_app(FakeService(), settings=object()))  # type: ignore[arg-type]
        self._ids = {FILE: FILE, BATCH: BATCH}
        """What is written for the ids of a file and of a batch, until there is one."""
        self._secrets = list(SECRETS.values()) if keys else []
        headers = {"Authorization": f"Bearer {SECRETS[Scope.ADMIN]}"} if keys else {}
        self._operator = httpx.AsyncClient(
            base_url=target.url, headers=headers, timeout=_PATIENCE * _STATUS_SECONDS
        )

    async def until(self, cases: int | None, ends: float | None) -> None:
        """Several cases at once, until it is enough, or too late."""

        async def work() -> None:
            while (cases is None or self.cases < cases) and (
                ends is None or time.monotonic() < ends
            ):
                self.cases += 1
                number = self.cases  # others count on meanwhile
                await self._case(number)
                if number % _MEND_EVERY == 0:
                    await self._mend()

        await asyncio.gather(*(work() for _ in range(_AT_ONCE)))

    async def rest(self) -> Held:
        """What the target holds when all was done."""
        await self._mend()
        await self._operator.aclose()
        self._operator = httpx.AsyncClient(
            base_url=self._operator.base_url,
            headers=self._operator.headers,
            timeout=self._operator.timeout,
        )
        began = time.monotonic()
        before, held = None, self._target.held()
        while not _rests(before, held) and time.monotonic() - began < _REST_SECONDS:
            await asyncio.sleep(0.3)
            before, held = held, self._target.held()
        if held.requests or held.connections:
            self.findings.append(Finding(f"something stays: {held}", self.cases))
        return held

    async def _mend(self) -> None:
        """The appliance answers, and serves all models on their old terms again."""
        try:
            answer = await self._operator.get("/livez")
            for model in MODELS:
                for verb in ("resume", "load"):
                    await self._operator.post(f"/api/models/{model}/{verb}")
                await self._operator.put(f"/api/models/{model}/limits", json={"max_queue": 100})
            await self._operator.put("/api/policies", json={"use": ["serverlessllm"]})
            if self.cases % _ANOTHER_BATCH_EVERY < _MEND_EVERY:
                await self._begin_batch()
        except httpx.HTTPError as error:
            asked = f"{error.request.method} {error.request.url.path}"
            self.findings.append(
                Finding(f"no answer to an operator: {asked}: {error!r}", self.cases)
            )
            return
        if answer.status_code != 200:
            self.findings.append(Finding("it does not live", self.cases, got=answer.content))

    async def _begin_batch(self) -> None:
        """Another file, and a batch of it, take the place of those that there are."""
        headers = {"Content-Type": FORM}
        kept = await self._operator.post("/v1/files", content=UPLOAD, headers=headers)
        if kept.status_code != 200:  # the store is full
            return
        self._ids[FILE] = kept.json()["id"]
        asked = {"input_file_id": self._ids[FILE], "endpoint": "/v1/chat/completions"}
        batch = await self._operator.post("/v1/batches", json={**asked, "completion_window": "24h"})
        self._ids[BATCH] = batch.json().get("id", BATCH)

    async def _case(self, number: int) -> None:
        rng = random.Random(f"{self._seed}-{number}")
        if number % _WHOLE_EVERY == 0:
            await self._whole_case(number, rng)
            return
        sent = self.made(rng)
        try:
            got, whole = await _exchange(self._target.port, sent, rng)
        except OSError as error:
            self.findings.append(Finding(f"no connection: {error}", number, sent))
            return
        statuses = [int(status) for status in _STATUS.findall(got)]
        self.statuses.update(statuses or [0])
        wrong = [status for status in statuses if status >= 500 and status != 503]
        told = not got.endswith(b"\r\n\r\n")  # else only its head came while it was listened to
        nameless = whole and told and 503 in statuses and not _BY_NAME.search(got)
        if wrong or nameless or b"internal_error" in got:
            self.findings.append(Finding(f"status {statuses}", number, sent, got))

    async def _whole_case(self, number: int, rng: random.Random) -> None:
        """Nothing but its JSON is spoilt, and somebody listens: its answer begins."""
        sent = mutations.framed(rng, self._chosen(rng), self._keyed(rng))
        try:
            line = await self._begun(sent)
        except (OSError, TimeoutError) as error:
            self.findings.append(Finding(f"no answer begins: {error!r}", number, sent))
            return
        found = _STATUS.match(line)
        status = int(found[1]) if found else 0
        self.statuses[status] += 1
        if not found or (status >= 500 and status != 503):
            self.findings.append(Finding(f"status {status}", number, sent, line))

    async def _begun(self, sent: bytes) -> bytes:
        """The first line of an answer."""
        try:
            return await status_line(self._target.port, sent, _STATUS_SECONDS)
        except TimeoutError:
            async with self._alone:
                line = await status_line(self._target.port, sent, _PATIENCE * _STATUS_SECONDS)
            self.slow += 1
            return line

    def made(self, rng: random.Random) -> bytes:
        """The bytes of a case; sometimes several requests behind each other."""
        many = rng.choice((1,) * 20 + (2, 5))
        return b"".join(
            mutations.request(rng, self._chosen(rng), self._keyed(rng)) for _ in range(many)
        )

    def _chosen(self, rng: random.Random) -> Seed:
        with_body = [seed for seed in self._seeds if seed.body]
        seed = rng.choice(with_body if rng.random() < _WITH_BODY else self._seeds)
        for stands, id in self._ids.items():
            path, body = seed.path, seed.body
            seed = Seed(
                seed.method, path.replace(stands, id), body.replace(stands.encode(), id.encode())
            )
        return seed

    def _keyed(self, rng: random.Random) -> mutations.Headers:
        if not self._secrets or rng.random() < 0.05:
            return []
        secret = rng.choice(self._secrets).encode()
        return [rng.choice(((b"Authorization", b"Bearer " + secret), (b"x-api-key", secret)))]


def _rests(before: Held | None, held: Held) -> bool:
    """Whether nothing is asked, and nothing came or went since it was looked at before: a batch may
    be about to go on."""
    if before is None or held.requests or held.connections:
        return False
    return (before.tasks, before.descriptors) == (held.tasks, held.descriptors)


async def _exchange(port: int, data: bytes, rng: random.Random) -> tuple[bytes, bool]:
    """Send `data` over a connection of its own, in one way or another; what came back, and whether
    that is all there is: a busy box may need longer for it."""
    manner = rng.random()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got, whole = b"", False
    try:
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(_ANSWER_SECONDS):
                for part in _parts(rng, data) if manner < 0.15 else (data,):
                    writer.write(part)
                    await writer.drain()
                    if manner < 0.15:
                        await asyncio.sleep(rng.random() * 0.01)
                if 0.15 <= manner < 0.25:
                    writer.write_eof()
                if 0.25 <= manner < 0.35:
                    got = await reader.read(rng.randrange(1, 400))  # and leave
                elif manner >= 0.4 or manner < 0.25:
                    while chunk := await reader.read(1 << 16):
                        got += chunk
                    whole = True
    finally:
        if 0.25 <= manner < 0.45:  # a reset
            connection = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):  # it may be closed already, by the other side
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return got, whole


async def status_line(port: int, data: bytes, seconds: float) -> bytes:
    """The first line of the answer to `data`; raises `TimeoutError` if it does not come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(seconds):
            writer.write(data)
            return await reader.readline()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def grown(samples: Sequence[Held]) -> str:
    """What there is more of at the end than when it was warm; nothing if nothing stays behind."""
    first, last = samples[0], samples[-1]
    more = {name: n for name, n in last.tasks.items() if n > first.tasks.get(name, 0)}
    if last.descriptors > first.descriptors:
        more["descriptors"] = last.descriptors
    return f"more than when it was warm: {more}" if more else ""


def _parts(rng: random.Random, data: bytes) -> Sequence[bytes]:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(1, 8)))
    return [data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def main() -> int:
    """Fuzz a target of our own, and print what came of it; the exit status says how."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keys", action="store_true", help="an appliance that has keys")
    asked = parser.parse_args()
    with running(keys=asked.keys) as target:
        outcome = asyncio.run(
            fuzz(target, seed=asked.seed, seconds=asked.seconds, keys=asked.keys, warm_cases=3000)
        )
        complaints = target.complaints()
    for finding in outcome.findings[:20]:
        print(finding)
    print(complaints, end="")
    for held in outcome.samples:
        print(held)
    answers = ", ".join(f"{status}: {n}" for status, n in sorted(outcome.statuses.items()))
    growth = grown(outcome.samples)
    print(growth)
    print(
        f"{outcome.cases} cases, {len(outcome.findings)} findings, {outcome.slow} slow answers; "
        f"statuses {answers}"
    )
    return 1 if outcome.findings or complaints or growth else 0


if __name__ == "__main__":
    sys.exit(main())
