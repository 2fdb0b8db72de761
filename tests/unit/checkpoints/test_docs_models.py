"""docs/models.md is true: every command of it runs, and prints what the page says."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from appliance.api.app import create_app
from appliance.cli.main import cli
from appliance.config.loader import load_config
from appliance.daemon.reload import LiveConfig
from tests.docblocks import code_blocks
from tests.docexamples import shape
from tests.unit.api.test_model_files import FiledBox
from tests.unit.cli.test_admin_page import curl, prints
from tests.unit.doubles.daemon import Box, setup_of, small
from tests.unit.doubles.serving import served


@pytest.fixture
async def box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Box]:
    monkeypatch.setattr(FiledBox, "path", str(tmp_path / "tiny"))
    models = small("ab")
    box = FiledBox(monkeypatch, models, setup_of(models, policy="serverlessllm"))
    box.world.models |= {"new": small("n")["n"], "linked": small("l")["l"]}
    box.start()
    yield box
    box.daemon.host.close()
    assert box.take_failures() == []


@pytest.fixture
def settings(
    box: Box, tmp_path: Path, fake_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> LiveConfig:
    """The configuration of the page, in the folder where its commands are given."""
    source = fake_checkpoint()
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    (downloads / "new").symlink_to(source)
    path = tmp_path / "appliance.toml"
    models = "".join(
        f'[[model]]\nname = "{name}"\npath = "tiny"\nmax_context = 256\n' for name in "ab"
    )
    devices = '[devices]\nmemory = "8MiB"\n[[devices.group]]\nname = "single"\n'
    path.write_text(f'{devices}[catalog]\nfolder = "models"\n{models}')
    monkeypatch.chdir(tmp_path)
    return LiveConfig(box.daemon, load_config(path), path)


def blocks() -> list[list[tuple[str, list[str]]]]:
    """The commands of every block, each with the lines that it is said to print."""
    found = []
    for block in code_blocks("docs/models.md", "console"):
        commands = [part.splitlines() for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]]
        found.append([(lines[0], lines[1:]) for lines in commands])
    return found


def steps(lines: str) -> list[str]:
    """What the lines of a pull say it does, each once, and which fields they have."""
    told = [json.loads(line) for line in lines.splitlines()]
    named = [line["status"] + str(sorted(shape(line))) for line in told]
    return list(dict.fromkeys(named))


@pytest.mark.parametrize("commands", blocks(), ids=lambda commands: commands[0][0])
async def test_the_commands_of_the_page(
    box: Box, settings: LiveConfig, commands: list[tuple[str, list[str]]]
) -> None:
    """Each block by itself, while the workers work."""

    async def work() -> None:
        while True:
            box.settle()
            await asyncio.sleep(0.01)

    working = asyncio.create_task(work())
    async with served(create_app(box.daemon, settings=settings)) as port:
        url = f"http://127.0.0.1:{port}"
        for command, shown in commands:
            program, *words = shlex.split(command)
            if program == "curl":
                printed = await curl(url, words)
                if "/api/pull" in command:
                    (shown_there,) = code_blocks("docs/models.md", "text", containing="status")
                    assert steps(printed) == steps(shown_there.text)
                continue
            assert program == "appliance"
            result = await asyncio.to_thread(CliRunner().invoke, cli, [*words, "--url", url])
            assert result.exit_code == 0, result.output
            assert prints(shown, result.stdout), result.stdout
    working.cancel()
    assert isinstance((await asyncio.gather(working, return_exceptions=True))[0], BaseException)
