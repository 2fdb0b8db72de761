"""Models are pulled into a busy daemon on real vLLM, and removed from it: nobody else notices."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
from click.testing import CliRunner

from appliance import journal
from appliance.cli import cli
from appliance.config import load_config
from appliance.demo.checkpoints import write_config
from appliance.demo.run import free_port, running_daemon
from appliance.demo.traffic import Answer, Chat, send
from appliance.vocabulary import ModelAdded, ModelRemoved


def test_a_model_comes_and_goes_under_load(
    checkpoints: Path, tmp_path: Path, chats: list[Chat], expected: dict[Chat, list[int]]
) -> None:
    """One is pulled, asked, and removed again with its files, another is removed while its requests
    run: every answer is token for token plain vLLM's, and the journal replays."""
    file, record = tmp_path / "appliance.toml", tmp_path / "journal"
    text = write_config(
        checkpoints, policy="appliance", instances=1, bind=f"127.0.0.1:{free_port()}"
    ).read_text()
    head, *tables = text.split("[[model]]")
    names = sorted({chat.model for chat in chats})
    leaving, joining = names[0], names[-1]
    kept = [table for table in tables if f'"{joining}"' not in table]
    journals = f"[journal]\npath = {str(record)!r}\n\n[catalog]\nfolder = 'pulled'\n\n"
    file.write_text("[[model]]".join([f"{head}{journals}", *kept]))
    asked = [chat for chat in chats if chat.model in names[:3]][:12]
    late = [chat for chat in chats if chat.model == joining][:3]

    def run(url: str, *line: str) -> str:
        result = CliRunner().invoke(cli, [*line, "--url", url])
        assert result.exit_code == 0, result.output
        return result.stdout

    async def load(url: str) -> tuple[list[Answer], list[Answer]]:
        """All that is asked of the first models; what is pulled meanwhile is asked, too."""
        begun = asyncio.Semaphore(0)
        sending = asyncio.create_task(send(url, asked, lambda _: begun.release()))
        for _ in range(20):
            await begun.acquire()
        source = str(checkpoints / joining)
        line = ["pull", source, "--max-context", "1024", "--dtype", "float32"]
        await asyncio.to_thread(run, url, *line)
        removing = asyncio.create_task(asyncio.to_thread(run, url, "rm", leaving, "--json"))
        answers = await send(url, late, lambda _: None)
        assert json.loads(await removing)["live"] > 0
        return await sending, answers

    config = load_config(file)
    with running_daemon(file, config) as (url, _):
        first, second = asyncio.run(load(url))
        answered = [*first, *second]
        assert [answer.error for answer in answered] == [None] * len(answered)
        assert [answer.tokens for answer in answered] == [expected[chat] for chat in asked + late]

        assert (tmp_path / "pulled" / joining).is_dir()
        assert run(url, "rm", joining, "--yes") == f"{joining} is gone; its files are deleted\n"
        (again,) = asyncio.run(send(url, late[:1], lambda _: None))
        assert again.error is not None
        assert json.loads(again.error)["error"]["code"] == "model_not_found"
        held = httpx.get(f"{url}/api/status", timeout=10).json()["instances"][0]["pool_bytes"]
        assert not [owner for owner in held if leaving in owner or joining in owner]
    served = {model.name for model in load_config(file).models}
    assert served == set(names) - {leaving, joining}
    events = [entry.event for entry in journal.read(record)[1]]
    assert sum(isinstance(event, ModelAdded) for event in events) == 1
    assert sum(isinstance(event, ModelRemoved) for event in events) == 2
    assert journal.replay(record)[1] == []
