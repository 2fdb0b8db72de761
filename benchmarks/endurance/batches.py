"""A client of batches: files of requests, waited for or cancelled, every line accounted for."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

from benchmarks.endurance.answers import Heard
from benchmarks.endurance.asks import Ask, Book
from benchmarks.endurance.clients import Outcome, PolicyStats
from benchmarks.endurance.connection import Connection

LINES = 12
LOOK_SECONDS = 2.0
OVER = ("completed", "failed", "expired", "cancelled")


class BatchClient:
    """Has one batch after the other answered; deletes its files afterwards."""

    def __init__(self, connection: Connection, book: Book, stats: PolicyStats, dice: random.Random):
        self._connection = connection
        self._book = book
        self._tally = stats
        self._dice = dice

    async def run(self, over: asyncio.Event) -> None:
        """Batches until it is over; the last one is waited for, too."""
        while not over.is_set():
            await self.run_one()
        self._connection.drop()

    async def run_one(self) -> None:
        """A batch, from its file to the end."""
        lines = {f"line-{i}": self._book.batch_line(self._dice) for i in range(LINES)}
        source = await self._upload(lines)
        cancels = self._dice.random() < 0.3
        await self._one(lines, source, cancels=cancels)

    async def _one(self, lines: dict[str, Ask], source: str, *, cancels: bool) -> None:
        wanted = {
            "input_file_id": source,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        batch = await self._json("POST", "/v1/batches", wanted)
        if cancels:
            await asyncio.sleep(self._dice.uniform(0, 20))
            await self._json("POST", f"/v1/batches/{batch['id']}/cancel", accept=(200, 409))
        while batch["status"] not in OVER:
            await asyncio.sleep(LOOK_SECONDS)
            batch = await self._json("GET", f"/v1/batches/{batch['id']}")
        expected = ("completed", "cancelled") if cancels else ("completed",)
        if batch["status"] not in expected:
            self.ended_otherwise(batch)
            return
        files = [batch[name] for name in ("output_file_id", "error_file_id") if batch[name]]
        told: list[str] = []
        for file in files:
            for line in (await self._get(f"/v1/files/{file}/content")).splitlines():
                entry = json.loads(line)
                told.append(entry["custom_id"])
                self._look_at(lines[entry["custom_id"]], entry)
        if sorted(told) != sorted(lines):
            self._tally.complain(f"batch {batch['id']}: its files have the lines {sorted(told)}")
        await self.done_with([source, *files])

    def ended_otherwise(self, batch: dict[str, Any]) -> None:
        """A batch failed, or was cancelled though its client did not ask for that."""
        self._tally.complain(f"batch {batch['id']}: {batch['status']} {batch['errors']}")

    async def done_with(self, files: Sequence[str]) -> None:
        """A batch was as it should be; these are its files."""
        for file in files:
            await self._json("DELETE", f"/v1/files/{file}")

    def _look_at(self, ask: Ask, entry: dict[str, object]) -> None:
        """A line of a result: an answer, or why there is none."""
        response, error = entry["response"], entry["error"]
        if response is None:
            end = "never ran" if error["code"] == "batch_cancelled" else str(error)  # type: ignore[index]
            self._note(ask, end, 0, 1)
            return
        heard = Heard()
        heard.whole(json.dumps(response["body"]).encode())  # type: ignore[index]
        status = response["status_code"]  # type: ignore[index]
        if status == 499:
            self._note(ask, "cancelled", 1, 1)
        elif status != 200 or not heard.choices[0].is_like(ask.expected[0]):
            self._tally.complain(f"a line of a batch: {status} {response}, expected {ask.expected}")
        else:
            self._tally.tokens_compared += len(heard.choices[0].ids or ())
            self._note(ask, "whole", 1, 1, heard.id)

    def _note(self, ask: Ask, end: str, least: int, most: int, id: str | None = None) -> None:
        self._tally.outcomes.append(Outcome(ask.kind, ask.prefix, end, least, most, id))

    async def _upload(self, lines: dict[str, Ask]) -> str:
        content = "".join(
            json.dumps({"custom_id": name, "method": "POST", "url": ask.path,
                        "body": {k: v for k, v in ask.body.items() if k != "stream"}}) + "\n"
            for name, ask in lines.items()
        )  # fmt: skip
        parts = (
            '--frontier\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            '--frontier\r\nContent-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n'
            f"Content-Type: application/jsonl\r\n\r\n{content}\r\n--frontier--\r\n"
        )
        kind = {"Content-Type": "multipart/form-data; boundary=frontier"}
        file = await self._json("POST", "/v1/files", parts.encode(), headers=kind)
        return str(file["id"])

    async def _get(self, path: str) -> bytes:
        reply = await self._connection.ask("GET", path)
        return await reply.body()

    async def _json(  # type: ignore[no-untyped-def]
        self, method: str, path: str, body: object = None, *, headers=None, accept=(200,)
    ):
        reply = await self._connection.ask(method, path, body, headers=headers)
        answer = json.loads(await reply.body())
        if reply.status not in accept:
            raise ValueError(f"{method} {path}: {reply.status} {answer}")
        return answer
