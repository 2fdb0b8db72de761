"""docs/admin.md is true: every command of it runs, and prints what the page says."""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from appliance.api.app import create_app
from appliance.cli.main import cli
from appliance.config.loader import load_config
from appliance.daemon.reload import LiveConfig
from appliance.service.event_log import NoticeKind
from appliance.vocabulary import WaitCode
from tests.docblocks import code_blocks
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.daemon import Box, setup_of, small
from tests.unit.doubles.serving import served
from tests.unit.usage.test_books import entry
from tests.unit.usage.test_ledger import opened

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "admin.md").read_text(encoding="utf-8")
PRINTED = "http://127.0.0.1:11500"


@pytest.fixture
async def box(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Box]:
    """The box of the page: one worker, `a` decodes, `b` waits."""
    models = small("ab")
    box = Box(monkeypatch, models, setup_of(models, policy="serverlessllm"))
    box.start()
    box.workers[0].tells_slabs = True
    yield box
    box.daemon.host.close()
    assert box.take_failures() == []


@pytest.fixture
def settings(box: Box, tmp_path: Path, fake_checkpoint: Callable[..., Path]) -> LiveConfig:
    """Its configuration, in a file."""
    fake_checkpoint()
    path = tmp_path / "appliance.toml"
    models = "".join(
        f'[[model]]\nname = "{name}"\npath = "tiny"\nmax_context = 256\n' for name in "ab"
    )
    path.write_text(f'[devices]\nmemory = "8MiB"\n{models}', encoding="utf-8")
    return LiveConfig(box.daemon, load_config(path), path)


def blocks() -> list[list[tuple[str, list[str]]]]:
    """The commands of every block, each with the lines that it is said to print."""
    found = []
    for block in code_blocks("docs/admin.md", "console"):
        commands: list[tuple[str, list[str]]] = []
        for line in block.text.splitlines():
            if line.startswith("$ "):
                commands.append((line.removeprefix("$ "), []))
            else:
                commands[-1][1].append(line)
        found.append(commands)
    return found


def prints(shown: list[str], printed: str) -> bool:
    """Whether what was printed is what the page shows; ``...`` stands for anything."""
    words = " ".join(" ".join(shown).split())
    pattern = ".*".join(re.escape(part) for part in words.split("..."))
    return re.fullmatch(pattern, " ".join(printed.split()), re.DOTALL) is not None


async def curl(url: str, words: list[str]) -> str:
    """What `curl` would do and print, as far as the page needs it."""
    method, body, headers = "GET", None, {}
    target = ""
    while words:
        word = words.pop(0)
        match word:
            case "-X":
                method = words.pop(0)
            case "-d":
                body = words.pop(0)
            case "-H":
                name, _, value = words.pop(0).partition(": ")
                headers[name] = value
            case _:
                target = word
    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
        answer = await client.request(
            method, target.replace(PRINTED, url), content=body, headers=headers
        )
    assert answer.status_code in (200, 206), answer.text
    return answer.text


@pytest.mark.parametrize("commands", blocks(), ids=lambda commands: commands[0][0])
async def test_the_commands_of_the_page(
    box: Box, settings: LiveConfig, commands: list[tuple[str, list[str]]], tmp_path: Path
) -> None:
    """In the situation of the page, each block by itself."""
    box.ask("chat-1", "a", output=200)
    box.work_until(lambda: box.world.lives["chat-1"].produced == 3)
    if any("chat-2" in line for command, shown in commands for line in (command, *shown)):
        box.ask("chat-2", "b")
    for name in box.world.lives:
        box.world.lives[name].outcome = "cancelled"  # whatever the page does with it
    async with (
        opened(tmp_path / "usage", now=time.time) as ledger,
        served(create_app(box.daemon, settings=settings, ledger=ledger)) as port,
    ):
        written = asyncio.Event()
        ledger.record(entry("1", ended=time.time(), key="", model="a"), written.set)
        await asyncio.wait_for(written.wait(), PATIENCE_SECONDS)
        url = f"http://127.0.0.1:{port}"
        for command, shown in commands:
            program, *words = shlex.split(command)
            if program == "curl":
                await curl(url, words)
                continue
            assert program == "appliance"
            line = [*words, "--url", url]
            result = await asyncio.to_thread(CliRunner().invoke, cli, line)
            assert result.exit_code == 0, result.output
            assert not shown or prints(shown, result.stdout), result.stdout


@pytest.mark.parametrize(("head", "words"), [("code", WaitCode), ("event", NoticeKind)])
def test_every_word_is_explained(head: str, words: type[StrEnum]) -> None:
    """The tables of reasons and of events have those that there are, and no other."""
    (table,) = re.findall(rf"^\| {head} \|.*\n\|---\|---\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)

    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {w.value for w in words}
