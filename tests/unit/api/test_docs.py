"""The examples of docs/api.md that the core answers run as they stand, and answer what the page
shows; tests/frontend/test_docs.py runs those that front ends answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from appliance.api.app import create_app
from appliance.service.interface import ModelActivity, ModelFacts
from tests.docblocks import code_blocks
from tests.docexamples import Example, examples, shape, told
from tests.unit.doubles.fake_service import FakeService
from tests.unit.doubles.serving import served
from tests.unit.usage.test_ledger import opened

BLOCKS = code_blocks("docs/api.md", "sh", "json", "text")
EXAMPLES = [one for one in examples(BLOCKS) if not one.of_front_ends]


class _Service(FakeService):
    """Its models have a checkpoint of which only the shape is known."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        shape_told = b'{"hidden_size": 4096, "num_hidden_layers": 32}'
        (folder / "config.json").write_bytes(shape_told)

    def model_activity(self, name: str) -> ModelActivity:
        facts = ModelFacts(
            architecture="LlamaForCausalLM",
            dtype="bfloat16",
            parameters=8030261248,
            weight_bytes=16060522496,
            kv_bytes_per_token=131072,
            max_context_tokens=8192,
            max_batch=256,
            path=str(self._folder),
        )
        return ModelActivity(model=name, state="cold", facts=facts)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.command.split()[-1])
async def test_examples(example: Example, tmp_path: Path) -> None:
    """Every command succeeds; a JSON answer has the fields shown."""
    async with (
        opened(tmp_path / "usage") as ledger,
        served(create_app(_Service(tmp_path), ledger=ledger)) as port,
    ):
        running = await asyncio.create_subprocess_exec(
            *("bash", "-euc", example.script(f"http://127.0.0.1:{port}")),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, complaint = await running.communicate()

    answer = said.decode()
    assert running.returncode == 0, complaint.decode() + answer
    if example.kind == "json":
        assert shape(json.loads(answer)) == shape(json.loads(example.shown))
    if example.kind == "text":
        assert told(example.shown, answer), answer
