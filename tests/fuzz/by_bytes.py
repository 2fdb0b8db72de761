"""Requests to every endpoint that are spoilt byte by byte, over connections that misbehave.

    python -m tests.fuzz.by_bytes --seconds 600

Nothing may be answered with a server's error but for those that docs/api.md lists, nothing may stay
behind, and the target has to go on answering, without an error in its log. Half of the time it has
API keys, and with them the endpoints that administer keys. A case is made from its number and the
seed alone, but for the ids of files and batches.

What was not answered in time is asked again, alone and with more patience: only if that is of no
use either it is the target's fault, not that of a busy box.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import httpx

from appliance.api.app import create_app
from tests.fuzz import mutations
from tests.fuzz.corpus import BATCH, FILE, FORM, MESSAGE_BATCH, UPLOAD, Seed, message_batch, seeds
from tests.fuzz.documented import answers, is_undocumented
from tests.fuzz.running import Target, running
from tests.fuzz.target import ANYTHING, MODELS, SECRETS, Held
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
        self._ids = {FILE: FILE, BATCH: BATCH, MESSAGE_BATCH: MESSAGE_BATCH}
        """What is written for the ids of a file and of batches, until there is one."""
        self._secrets = [*SECRETS.values(), ANYTHING] if keys else []
        headers = {"Authorization": f"Bearer {ANYTHING}"} if keys else {}
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
        """Another file, a batch of it, and a message batch take the place of those that there
        are."""
        headers = {"Content-Type": FORM}
        kept = await self._operator.post("/v1/files", content=UPLOAD, headers=headers)
        if kept.status_code != 200:  # the store is full
            return
        self._ids[FILE] = kept.json()["id"]
        asked = {"input_file_id": self._ids[FILE], "endpoint": "/v1/chat/completions"}
        batch = await self._operator.post("/v1/batches", json={**asked, "completion_window": "24h"})
        self._ids[BATCH] = batch.json().get("id", BATCH)
        batch = await self._operator.post("/v1/messages/batches", json=message_batch())
        self._ids[MESSAGE_BATCH] = batch.json().get("id", MESSAGE_BATCH)

    async def _case(self, number: int) -> None:
        rng = random.Random(f"{self._seed}-{number}")
        if number % _WHOLE_EVERY == 0:
            await self._whole_case(number, rng)
            return
        sent = self.made(rng)
        try:
            got = await _exchange(self._target.port, sent, rng)
        except OSError as error:
            self.findings.append(Finding(f"no connection: {error}", number, sent))
            return
        found = list(answers(got))
        statuses = [answer.status for answer in found]
        self.statuses.update(statuses or [0])
        if any(map(is_undocumented, found)) or b"internal_error" in got:
            self.findings.append(Finding(f"status {statuses}", number, sent, got))

    async def _whole_case(self, number: int, rng: random.Random) -> None:
        """Nothing but its JSON is spoilt, and somebody listens: its answer begins."""
        sent = mutations.framed(rng, self._chosen(rng), self._keyed(rng))
        try:
            got = await self._begun(sent)
        except (OSError, TimeoutError) as error:
            self.findings.append(Finding(f"no answer begins: {error!r}", number, sent))
            return
        answer = next(answers(got), None)
        self.statuses[0 if answer is None else answer.status] += 1
        if answer is None or is_undocumented(answer):
            what = "no answer" if answer is None else f"status {answer.status}"
            self.findings.append(Finding(what, number, sent, got))

    async def _begun(self, sent: bytes) -> bytes:
        """The beginning of an answer; all of an error."""
        try:
            return await beginning(self._target.port, sent, _STATUS_SECONDS)
        except TimeoutError:
            async with self._alone:
                got = await beginning(self._target.port, sent, _PATIENCE * _STATUS_SECONDS)
            self.slow += 1
            return got

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


async def _exchange(port: int, data: bytes, rng: random.Random) -> bytes:
    """Send `data` over a connection of its own, in one way or another; what came back in time."""
    manner = rng.random()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = b""
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
    finally:
        if 0.25 <= manner < 0.45:  # a reset
            connection = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):  # it may be closed already, by the other side
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return got


async def beginning(port: int, data: bytes, seconds: float) -> bytes:
    """The first line of the answer to `data`, and all of it if it is an error: an error has no
    stream. Raises `TimeoutError` if it does not come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(seconds):
            writer.write(data)
            line = await reader.readline()
            return line + await reader.read() if line.startswith(b"HTTP/1.1 5") else line
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


def _run(*, keys: bool, seconds: float, seed: int) -> bool:
    """Fuzz a target of our own, and print what came of it; whether all was well."""
    with running(keys=keys) as target:
        outcome = asyncio.run(fuzz(target, seed=seed, seconds=seconds, keys=keys, warm_cases=3000))
        complaints = target.complaints()
    for finding in outcome.findings[:20]:
        print(finding)
    print(complaints, end="")
    for held in outcome.samples:
        print(held)
    statuses = ", ".join(f"{status}: {n}" for status, n in sorted(outcome.statuses.items()))
    growth = grown(outcome.samples)
    print(growth)
    print(
        f"{'with' if keys else 'without'} keys: {outcome.cases} cases, "
        f"{len(outcome.findings)} findings, {outcome.slow} slow answers; statuses {statuses}"
    )
    return not (outcome.findings or complaints or growth)


def main() -> int:
    """Fuzz targets without and with keys; the exit status says whether all was well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    well = [_run(keys=keys, seconds=asked.seconds / 2, seed=asked.seed) for keys in (False, True)]
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
