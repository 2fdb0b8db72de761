"""docs/batches.md: its examples run as they stand, in order."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from tests.unit.api.test_batches import House
from tests.unit.doubles.serving import served

PAGE = Path(__file__).parents[3] / "docs/batches.md"
ADDRESS = "http://127.0.0.1:11500"
CURL = 'curl() { command curl --silent --show-error --fail-with-body "$@"; }\n'


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("kind", ["sh", "python"])
async def test_examples(tmp_path: Path, kind: str) -> None:
    """Both ways end with the answers to all lines, in both dialects."""
    house = House(tmp_path)
    (tmp_path / "requests.jsonl").write_text(blocks("sh")[0].split("END'\n")[1].split("END\n")[0])
    command = {"sh": ["bash", "-euc", CURL], "python": [sys.executable, "-c", ""]}[kind]
    async with served(house.app()) as port:
        command[-1] += "".join(blocks(kind)).replace(ADDRESS, f"http://127.0.0.1:{port}")
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
