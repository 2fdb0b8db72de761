"""A client of batches that goes on whatever happens, and still has at the end what it was given."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

from benchmarks.endurance.answers import name_of
from benchmarks.endurance.asks import Ask, Book
from benchmarks.endurance.batches import OVER, BatchClient
from benchmarks.endurance.clients import PolicyStats
from benchmarks.endurance.connection import Closed, Connection
from tests.chaos.record import CUT_OFF, NO_CONNECTION, End, Record

PAUSE_SECONDS = 0.5
LATER = frozenset({413, 429, 500, 503, 507})
"""Statuses after which a request is sent again; each has to have a name."""
KEPT = 0.5
"""Of batches, the share whose files are kept to the end."""


class Lost(Exception):
    """What was acknowledged is not there; how that is said."""


class LastingBatches(BatchClient):
    """Sends again what was not acknowledged. What was, is to be there as long as it lives."""

    def __init__(
        self,
        connection: Connection,
        book: Book,
        stats: PolicyStats,
        dice: random.Random,
        record: Record,
    ) -> None:
        super().__init__(connection, book, stats, dice)
        self._record = record
        self.acknowledged: dict[str, str] = {}
        """Batches by id, with the file of each."""
        self.harmed: dict[str, str] = {}
        """Those that damage on the disk cost something, and what was said of it."""
        self.kept: dict[str, bytes] = {}
        """Contents of files."""

    async def run(self, over: asyncio.Event) -> None:
        """Batches until it is over; the last one is waited for, too."""
        while not over.is_set():
            try:
                await self.run_one()
            except Lost as error:
                self._harm(str(error))
        self._connection.drop()

    async def check_kept(self) -> None:
        """All that was acknowledged and not deleted is there, and over."""
        for batch in self.acknowledged.keys() - self.harmed.keys():
            try:
                found = await self._json("GET", f"/v1/batches/{batch}")
                if found["status"] not in OVER:
                    self._tally.complain(f"batch {batch} is {found['status']} at the end")
            except Lost as error:
                self._harm(str(error))
        for file, content in self.kept.items():
            try:
                if await self._get(f"/v1/files/{file}/content") != content:
                    self._tally.complain(f"the content of {file} is another one")
            except Lost as error:
                self._harm(str(error))
        self._connection.drop()

    def _harm(self, said: str) -> None:
        """One harm for each batch: its files are lost with it, or it with them."""
        batch = next(
            (batch for batch, file in self.acknowledged.items() if batch in said or file in said),
            said,
        )
        self.harmed.setdefault(batch, said)

    def ended_otherwise(self, batch: dict[str, Any]) -> None:
        """Failed, for a reason that has a name: the file that it reads was lost to damage."""
        errors = (batch["errors"] or {}).get("data", [])
        if batch["status"] != "failed" or not all(error.get("code") for error in errors):
            super().ended_otherwise(batch)
            return
        self.harmed[batch["id"]] = str(errors)

    async def done_with(self, files: Sequence[str]) -> None:
        if self._dice.random() >= KEPT:
            await super().done_with(files)
            return
        for file in files:
            self.kept[file] = await self._get(f"/v1/files/{file}/content")

    def _look_at(self, ask: Ask, entry: dict[str, Any]) -> None:
        error, response = entry["error"], entry["response"]
        if response is None and error and error["code"] == "front_end_lost":
            now = self._record.now()
            self._record.ends.append(End("a line of a batch", error["code"], 0, 0.0, now))
            return
        if response is None and (not error or error["code"] != "batch_cancelled"):
            self._tally.complain(f"a line of a batch has no answer: {error}")
            return
        super()._look_at(ask, entry)

    async def _get(self, path: str) -> bytes:
        _, body = await self._persist("GET", path)
        return body

    async def _json(  # type: ignore[no-untyped-def]
        self, method: str, path: str, body: object = None, *, headers=None, accept=(200,)
    ):
        repeated = method == "DELETE"
        status, content = await self._persist(method, path, body, headers=headers, missing=repeated)
        answer = json.loads(content)
        if status not in accept and not (repeated and status == 404):
            raise ValueError(f"{method} {path}: {status} {answer}")
        if method == "POST" and path == "/v1/batches":
            assert isinstance(body, dict)
            self.acknowledged[answer["id"]] = body["input_file_id"]
        return answer

    async def _persist(
        self, method: str, path: str, body: object = None, *, missing: bool = False, **more: Any
    ) -> tuple[int, bytes]:
        """Ask until there is an answer that will not be another one later. Raises `Lost` if what
        is asked for is not there, unless it may be `missing`."""
        while True:
            asked = self._record.now()
            try:
                reply = await self._connection.ask(method, path, body, **more)
                content = await reply.body()
            except (Closed, OSError) as error:
                refused = isinstance(error, ConnectionRefusedError)
                name: str | None = NO_CONNECTION if refused else CUT_OFF
                status, said = 0, ""
                self._connection.drop()
            else:
                status = reply.status
                if status not in LATER and (status != 404 or missing):
                    return status, content
                error_said = json.loads(content)["error"]
                name, said = name_of(error_said), error_said["message"]
                source = body.get("input_file_id", "") if isinstance(body, dict) else ""
                if status == 404:
                    if name is None:
                        self._tally.complain(f"{path}: 404 without a name: {said}")
                    raise Lost(f"{path} {source}: {name}: {said}")
            request = f"{method} {path}"
            self._record.ends.append(End(request, name, status, asked, self._record.now(), said))
            await asyncio.sleep(PAUSE_SECONDS)
