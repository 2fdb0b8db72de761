"""docs/batches.md: its examples run as they stand, in order."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.docblocks import code_blocks
from tests.unit.api.test_batches import House
from tests.unit.doubles.serving import served

BLOCKS = {
    "sh": code_blocks("docs/batches.md", "sh"),
    "python": code_blocks("docs/batches.md", "python"),
}
ADDRESS = "http://127.0.0.1:11500"
CURL = 'curl() { command curl --silent --show-error --fail-with-body "$@"; }\n'


@pytest.mark.parametrize("kind", BLOCKS)
async def test_examples(tmp_path: Path, kind: str) -> None:
    """Both ways end with the answers to all lines, in both dialects."""
    house = House(tmp_path)
    (tmp_path / "requests.jsonl").write_text(
        BLOCKS["sh"][0].text.split("END'\n")[1].split("END\n")[0]
    )
    command = {"sh": ["bash", "-euc", CURL], "python": [sys.executable, "-c", ""]}[kind]
    async with served(house.app()) as port:
        command[-1] += "".join(block.text for block in BLOCKS[kind])
        command[-1] = command[-1].replace(ADDRESS, f"http://127.0.0.1:{port}")
        running = await asyncio.create_subprocess_exec(
            *command,
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, complaint = await running.communicate()

    assert running.returncode == 0, complaint.decode()
    for name in ("first", "second"):
        assert f'"custom_id":"{name}"' in said.decode()
    assert said.decode().count('"content":"hello"') == 2
    if kind == "sh":
        assert said.decode().count('"type":"succeeded"') == 2
    else:
        assert "third succeeded" in said.decode()
