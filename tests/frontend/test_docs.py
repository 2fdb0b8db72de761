"""The examples of the documentation that front ends answer run as they stand."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from appliance.vocabulary import Task
from tests.docblocks import code_blocks
from tests.docexamples import ADDRESS, Example, examples, told
from tests.frontend.conftest import model_at
from tests.frontend.small_models import answer, small_models
from tests.frontend.sounds import CONTEXT, file_of, make_hearer, make_transcriber, tone
from tests.frontend.stand_in_core import StandInCore, front_end
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCKS = [
    *code_blocks("docs/api.md", "sh", "json", "text"),
    *code_blocks("docs/embeddings.md", "sh", "json"),
    *code_blocks("docs/speech.md", "sh", "json"),
]
EXAMPLES = [one for one in examples(BLOCKS) if one.of_front_ends]
SPELT_OUT = [
    re.match(r"POST (/\S+)\n(.+)", block.text, re.DOTALL).groups()
    for block in code_blocks("docs/openai-endpoints.md", "json", containing="{")
] + [
    ("/v1/chat/completions", block.text)
    for block in code_blocks("docs/structured-outputs.md", "json")
]
(EMBEDDING,) = code_blocks("docs/embeddings.md", "python")
(IGNORED,) = code_blocks("docs/api.md", "http")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def core(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StandInCore]:
    folder = tmp_path_factory.mktemp("models")
    hears = make_transcriber(folder / "whisper")
    models = [
        *small_models(folder),
        model_at(make_hearer(folder / "hearer"), "hearer", sounds=2),
        model_at(hears, "whisper", Task.TRANSCRIPTION, max_context=CONTEXT),
    ]
    async with front_end(models) as core:
        answer(core)
        yield core


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.command.split()[-1])
async def test_examples(core: StandInCore, example: Example, tmp_path: Path) -> None:
    """Every command succeeds; a JSON answer has the fields shown, a stream the events."""
    (tmp_path / "said.wav").write_bytes(file_of(tone(2.0)))
    running = await asyncio.create_subprocess_exec(
        *("bash", "-euc", example.script(core.url)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
    )
    said, complaint = await running.communicate()

    told_all = said.decode()
    assert running.returncode == 0, complaint.decode() + told_all
    if example.kind == "json":
        assert has(json.loads(told_all), json.loads(example.shown)), told_all
    if example.kind == "text":
        assert told(example.shown, told_all), told_all


def has(answer: Any, shown: Any) -> bool:
    """Whether it has all fields that are shown, of their kinds."""
    if isinstance(shown, dict):
        return all(name in answer and has(answer[name], one) for name, one in shown.items())
    if isinstance(shown, list):
        return not shown or has(answer[0], shown[0])
    kinds = (int, float) if isinstance(shown, int | float) else type(shown)
    return isinstance(answer, kinds)


@pytest.mark.parametrize(("path", "body"), SPELT_OUT, ids=str)
async def test_examples_that_are_spelt_out(core: StandInCore, path: str, body: str) -> None:
    """Those that force a tool need a model whose output follows a guide; it is not run here."""
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as client:
        sent = json.loads(body) | {"model": "small"}
        sent.pop("tool_choice", None)
        answered = await client.post(path, json=sent)

    assert answered.status_code == 200, answered.text


async def test_the_example_in_python(core: StandInCore) -> None:
    """Its last line is a vector."""
    *lines, last = EMBEDDING.text.splitlines()
    program = "\n".join([*lines, f"print(len({last}))"]).replace(ADDRESS, core.url)
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await running.communicate()

    assert int(said) > 0


async def test_the_header_of_what_is_ignored(core: StandInCore) -> None:
    """As the page shows it, for a request with all that it names."""
    name, _, value = IGNORED.text.strip().partition(": ")
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as client:
        answered = await client.post(
            "/v1/responses",
            json={
                "model": "small",
                "input": "Hello",
                "tools": [{"type": "web_search"}],
                "safety_identifier": "anna",
                "prompt_cache_key": "1",
            },
        )

    assert answered.status_code == 200, answered.text
    assert answered.headers[name] == value
