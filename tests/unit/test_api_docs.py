"""The examples of docs/api.md and of docs/embeddings.md run as they stand, and answer what the
page shows."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from appliance.api.app import create_app
from appliance.purpose import Purpose
from appliance.vocabulary import Task

from .fake_service import FakeGeneration, FakeService
from .serving import served

DOCS = Path(__file__).parents[2] / "docs"
ADDRESS = "http://127.0.0.1:11500"
BLOCK = re.compile(r"^```(sh|json|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
STRICT = 'curl() { command curl --silent --show-error --fail-with-body "$@"; }\n'


class Example(NamedTuple):
    """A command, and the answer that the page shows behind it, if it does."""

    command: str
    kind: str
    shown: str


def examples() -> Iterator[Example]:
    command = ""
    pages = "\n".join((DOCS / page).read_text() for page in ("api.md", "embeddings.md"))
    for kind, text in BLOCK.findall(pages):
        if kind != "sh":
            yield Example(command, kind, text)
            command = ""
            continue
        if command:
            yield Example(command, "", "")
        command = text
    if command:
        yield Example(command, "", "")


def shape(value: Any) -> Any:
    """Names and kinds of values, without the values; of a list, that of its first item."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return type(value).__name__


def speak_or_pool(generation: FakeGeneration) -> None:
    if generation.request.pooling is None:
        generation.say("hello world")
    else:
        generation.pool([0.5] if generation.request.model == "scorer" else [0.5, 0.75])


@pytest.mark.parametrize("example", [*examples()], ids=lambda example: example.command.split()[-1])
async def test_examples(example: Example) -> None:
    """Every command succeeds; a JSON answer has the fields shown, a stream the events."""
    service = FakeService(speak_or_pool)
    service.learn("embedder", Purpose(task=Task.EMBED, dimensions=2))
    service.learn("scorer", Purpose(task=Task.SCORE))
    async with served(create_app(service)) as port:
        running = await asyncio.create_subprocess_exec(
            "bash",
            "-euc",
            STRICT + example.command.replace(ADDRESS, f"http://127.0.0.1:{port}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, complaint = await running.communicate()

    answer = said.decode()
    assert running.returncode == 0, complaint.decode() + answer
    if example.kind == "json":
        assert shape(json.loads(answer)) == shape(json.loads(example.shown))
    if example.kind == "text":
        shown = [line.partition("{")[0] for line in example.shown.splitlines()]
        lines = iter([line.partition("{")[0] for line in answer.splitlines()])
        assert all(line in lines for line in shown), answer  # in this order
