"""Models are pulled into a busy daemon on real vLLM and removed; other models do not notice."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import httpx
import ollama
from click.testing import CliRunner

from appliance import journal
from appliance.cli.main import cli
from appliance.config.loader import load_config
from appliance.demo.checkpoints import write_config
from appliance.demo.run import free_port, running_daemon
from appliance.demo.traffic import ChatRequest, TimedAnswer, send
from appliance.vocabulary import ModelAdded, ModelRemoved
from tests.hub import hub
from tests.patience import PATIENCE_SECONDS

CONFIGURED = ("llama-a", "llama-b", "llama-c")
LEAVING, PULLED, FROM_HUB = "llama-a", "qwen3-a", "qwen2-b"
PACKED, TWIN = "packed", "twin"
"""A model that comes as an archive, and one that the files have from some time on."""
FIT = ("--max-context", "1024", "--dtype", "float32")


def test_models_come_and_go_under_load(
    checkpoints: Path,
    tmp_path: Path,
    chats: list[ChatRequest],
    expected: dict[ChatRequest, list[int]],
) -> None:
    """They come from a directory, an archive, a hub (one of our own) and the configuration; they go
    by command, by Ollama's client and with their table, one while its requests run. Every answer is
    token for token plain vLLM's, and the journal replays."""
    file, record = tmp_path / "appliance.toml", tmp_path / "journal"
    bind = f"127.0.0.1:{free_port()}"
    text = write_config(checkpoints, CONFIGURED, policy="appliance", instances=1, bind=bind)
    tables = f"[journal]\npath = {str(record)!r}\n\n[catalog]\nfolder = 'pulled'\n\n"
    configured = text.read_text().replace("[[model]]", f"{tables}[[model]]", 1)
    file.write_text(configured)
    twin = (
        f'\n[[model]]\nname = "{TWIN}"\npath = {str(checkpoints / "llama-c")!r}\n'
        'max_context = 1024\ndtype = "float32"\n'
    )
    with tarfile.open(tmp_path / f"{PACKED}.tar", "w") as archive:
        archive.add(checkpoints / "qwen2-a", PACKED)

    asked = [chat for chat in chats if chat.model in CONFIGURED][:12]
    twins = {replace(c, model=TWIN): expected[c] for c in chats if c.model == "llama-c"}
    answers = expected | twins
    late = [
        chat
        for name in (PULLED, FROM_HUB, TWIN)
        for chat in [chat for chat in answers if chat.model == name][:3]
    ]

    of_leaving = [chat for chat in chats if chat.model == LEAVING]
    longest = max(of_leaving, key=lambda chat: len(expected[chat]))
    # It still runs when the command to remove its model has come.
    endless = ChatRequest(LEAVING, "Tell me everything", 800, ignore_eos=True)

    def run(url: str, *line: str) -> str:
        result = CliRunner().invoke(cli, [*line, "--url", url])
        assert result.exit_code == 0, result.output
        return result.stdout

    def pull_and_reload(url: str) -> str:
        run(url, "pull", str(checkpoints / PULLED), *FIT)
        rewrite(file, configured + twin)
        return run(url, "reload")

    async def load(url: str, endpoint: str) -> tuple[list[TimedAnswer], list[TimedAnswer]]:
        """All that is asked of the first models; what comes meanwhile is asked, too."""
        begun = asyncio.Semaphore(0)
        sending = asyncio.create_task(send(url, asked, lambda _: begun.release()))
        for _ in range(20):
            await begun.acquire()
        reloaded, packed, _ = await asyncio.gather(
            asyncio.to_thread(pull_and_reload, url),
            asyncio.to_thread(ollama.Client(url).pull, str(tmp_path / f"{PACKED}.tar")),
            asyncio.to_thread(pull_from_hub, url, endpoint),
        )
        assert (reloaded.splitlines()[0], packed.status) == (
            "1 applied, 0 wait for a restart",
            "success",
        )
        heard, running = set[ChatRequest](), asyncio.Event()

        def hear(answer: TimedAnswer) -> None:
            heard.add(answer.chat)
            if len(heard) == 2:
                running.set()

        last = asyncio.create_task(send(url, [longest, endless], hear))
        await running.wait()
        removing = asyncio.create_task(asyncio.to_thread(run, url, "rm", LEAVING, "--json"))
        answered = await send(url, late, lambda _: None)
        assert json.loads(await removing)["live"] > 0
        longest_answer, endless_answer = await last
        assert (endless_answer.error, len(endless_answer.tokens)) == (None, 800)
        return await sending, [longest_answer, *answered]

    config = load_config(file)
    with (
        hub({f"demo/{FROM_HUB}": checkpoints / FROM_HUB}) as endpoint,
        running_daemon(file, config) as (url, _),
        httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client,
    ):
        first, second = asyncio.run(load(url, endpoint))
        answered = [*first, *second]
        assert [answer.error for answer in answered] == [None] * len(answered)
        assert [answer.tokens for answer in answered] == [
            answers[chat] for chat in [*asked, longest, *late]
        ]

        llama = ollama.Client(url)
        said = llama.generate(PACKED, "Once", options={"num_predict": 4, "temperature": 0})
        assert said.eval_count
        llama.delete(PACKED)
        rewrite(file, configured)
        assert run(url, "reload").startswith("1 applied, 0 wait")
        assert (tmp_path / "pulled" / PULLED).is_dir()
        assert run(url, "rm", PULLED, "--yes") == f"{PULLED} is gone; its files are deleted\n"
        for name in (LEAVING, PACKED, TWIN):
            until_gone(client, name)
        (again,) = asyncio.run(send(url, [late[-1]], lambda _: None))
        assert again.error is not None
        assert json.loads(again.error)["error"]["code"] == "model_not_found"
        held = client.get("/api/status").json()["instances"][0]["pool_bytes"]
        gone = {LEAVING, PULLED, PACKED, TWIN}
        assert not [owner for owner in held if owner.partition(":")[2] in gone]
        assert client.post("/api/config/check").json()["changes"] == []
    assert {model.name for model in load_config(file).models} == {"llama-b", "llama-c", FROM_HUB}
    assert [path.name for path in (tmp_path / "pulled").iterdir()] == [FROM_HUB]
    events = [entry.event for entry in journal.read(record)[1]]
    assert sum(isinstance(event, ModelAdded) for event in events) == 4
    assert sum(isinstance(event, ModelRemoved) for event in events) == 4
    assert journal.replay(record)[1] == []


def rewrite(file: Path, text: str) -> None:
    """As an editor does it: the daemon, which reads when it likes, never finds half of it."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


def pull_from_hub(url: str, endpoint: str) -> None:
    """In a process of its own: where its hub is, the client reads when it is imported."""
    command = [sys.executable, "-m", "appliance", "pull", f"demo/{FROM_HUB}", "--url", url]
    done = subprocess.run(
        [*command, "--name", FROM_HUB, *FIT],
        env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr


def until_gone(client: httpx.Client, name: str) -> None:
    """Until nothing is left of a model, nor of its files."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while client.get(f"/api/models/{name}").status_code != httpx.codes.NOT_FOUND:
        assert time.monotonic() < deadline, f"{name} does not go"
        time.sleep(0.05)
