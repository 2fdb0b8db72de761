"""A daemon with a batch is killed: the next one finishes it, each line once."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.unit.api.test_batches import CHATS, chat, lines_of, over, until, upload

LINES = 20
LIFE = """
import asyncio, os, sys
from pathlib import Path
from tests.unit.doubles.serving import served
from tests.unit.api.test_batches import House

async def main():
    house = House(Path(sys.argv[1]))
    asked = os.open(Path(sys.argv[1]) / "asked", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def script(generation):
        os.write(asked, generation.text.encode() + b"\\n")
        if generation in house.service.submitted[: int(sys.argv[2])]:
            generation.say("hello")

    house.service.script = script
    async with served(house.app()) as port:
        print(port, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def life(folder: Path, answers: int) -> AsyncIterator[Any]:
    """A daemon of its own process that answers so many requests, and a client; it is killed in the
    end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LIFE, str(folder), str(answers),
        stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert process.stdout is not None
    try:
        url = f"http://127.0.0.1:{int(await process.stdout.readline())}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client
            process.kill()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.thorough
async def test_a_daemon_that_is_killed(tmp_path: Path) -> None:
    """What was seen as done is asked never again; every line has one answer in the end."""
    async with life(tmp_path, 9) as client:
        file = await upload(client, [chat(f"line {number}.") for number in range(LINES)])
        made = await client.batches.create(
            input_file_id=file, endpoint=CHATS, completion_window="24h"
        )
        await until(client, made.id, lambda batch: batch.request_counts.completed == 9)
    async with life(tmp_path, LINES) as client:
        done = await over(client, made.id)
        good = await lines_of(client, done.output_file_id)

    assert done.status == "completed"
    names = [f"line {number}." for number in range(LINES)]
    assert [line["custom_id"] for line in good] == names
    used = [line["response"]["body"]["usage"]["total_tokens"] for line in good]
    assert done.usage.total_tokens == sum(used)
    asked = Counter((tmp_path / "asked").read_text().splitlines())
    assert len(asked) == LINES
    # Four run at once: those are asked again that ran when it was killed, and no others.
    assert LINES <= sum(asked.values()) <= LINES + 4
