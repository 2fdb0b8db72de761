"""Seven kinds of model in one pool that holds three of them: compressed KV, states, windows,
experts, and the text of one that reads images.

Every output is plain vLLM's, through preemption and eviction, and the death of the worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec

from appliance.config.loader import load_config
from appliance.demo.run import free_port, running_daemon
from appliance.engines.vllm.reference import (
    ReferenceAnswer,
    ReferenceModel,
    ReferencePrompt,
    ReferenceTask,
)
from benchmarks.endurance.memory.kinds import PUBLISHED
from tests.configs import CONFIGS
from tests.engine.shrunken import make_shrunken
from tests.patience import PATIENCE_SECONDS

CONTEXT, TOKENS = 512, 40
READER = "qwen2.5-vl-7b-instruct"
NAMES = (*PUBLISHED, READER)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
PROMPTS = [tuple(3 + (i * 7 + k * 5) % 400 for k in range(5 + i * 20)) for i in range(5)]
POOL = "20MiB"
PNG = "data:image/png;base64,iVBORw0KGgo="
TOKENS_BEFORE_KILL = 15
SHORT_TURNS = """[policy]
use = ["aegaeon"]
[policy.aegaeon]
q_max_seconds = 0.02
"""
"""A turn ends after a few of its tokens on any machine, so that requests are preempted."""


def test_outputs_equal_plain_vllm(tmp_path: Path) -> None:
    paths = {name: make_shrunken(tmp_path, name, CONFIGS[name]) for name in NAMES}
    with_images = Path(paths[READER], "chat_template.json")
    with_images.write_text(json.dumps({"chat_template": TEMPLATE}))
    expected = plain(paths)
    file = configure(tmp_path, paths, f'memory = "{POOL}"\nhost_cache = "96MiB"\n{SHORT_TURNS}')
    with running_daemon(file, load_config(file)) as (url, _):
        outputs, killed = asyncio.run(ask_all(url))
        chats = [chat(url, "hello"), chat(url, [{"type": "image_url", "image_url": {"url": PNG}}])]
        status = httpx.get(f"{url}/api/status", timeout=PATIENCE_SECONDS).json()

    assert [answer.status_code for answer in chats] == [200, 400]
    assert f"{READER} is served for text only" in chats[1].text
    assert killed
    assert outputs == expected
    assert status["instances"][0]["pid"] != killed
    log = (tmp_path / "daemon.log").read_text(errors="replace")
    assert re.search(r'"preemptions":[1-9]', log), "they took turns"


def configure(
    folder: Path,
    paths: dict[str, str],
    devices: str,
    *,
    context: int = CONTEXT,
    dtype: str = "float32",
) -> Path:
    """A configuration of small models on the CPU; `devices` are further lines of its table, and
    of other tables after it."""
    file = folder / "appliance.toml"
    file.write_text(
        f'[api]\nbind = "127.0.0.1:{free_port()}"\nadmin_socket = ""\n'
        f'[devices]\nkind = "cpu"\nslab = "256KiB"\n{devices}'
        + "".join(
            f'[[model]]\nname = "{name}"\npath = "{path}"\ndtype = "{dtype}"\n'
            f"max_context = {context}\n"
            for name, path in paths.items()
        )
    )
    return file


def chat(url: str, content: object) -> httpx.Response:
    """With the model that reads images elsewhere."""
    messages = [{"role": "user", "content": content}]
    asked = {"model": READER, "messages": messages, "max_tokens": 3}
    return httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=PATIENCE_SECONDS)


def plain(
    paths: dict[str, str], module: str = "tests.engine.image_libraries", dtype: str = "float32"
) -> dict[tuple[str, int], list[int]]:
    """What unchanged vLLM, as a `module` runs it, adds to each prompt, by model and number of the
    prompt."""
    asked = [ReferencePrompt(list(prompt), TOKENS) for prompt in PROMPTS]
    task = ReferenceTask(
        [ReferenceModel(path, CONTEXT, asked, dtype=dtype) for path in paths.values()]
    )
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=msgspec.json.encode(task),
        stdout=subprocess.PIPE,
        check=True,
    )
    answers = msgspec.json.decode(done.stdout, type=list[list[ReferenceAnswer]])
    return {
        (name, number): answer.tokens
        for name, of_model in zip(paths, answers, strict=True)
        for number, answer in enumerate(of_model)
    }


async def ask_all(url: str) -> tuple[dict[tuple[str, int], list[int]], int]:
    """All prompts of all models at once, and the worker that was killed in the midst of it."""
    outputs: dict[tuple[str, int], list[int]] = {}
    killed = 0

    def on_token() -> None:
        nonlocal killed
        busy = [len(tokens) for tokens in outputs.values()]
        if killed or sum(busy) < TOKENS_BEFORE_KILL * len(NAMES):
            return
        status = httpx.get(f"{url}/api/status", timeout=PATIENCE_SECONDS).json()
        killed = status["instances"][0]["pid"]
        os.kill(killed, signal.SIGKILL)

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
        await asyncio.gather(
            *(
                ask(client, name, number, outputs.setdefault((name, number), []), on_token)
                for name in NAMES
                for number in range(len(PROMPTS))
            )
        )
    return outputs, killed


async def ask(
    client: httpx.AsyncClient,
    model: str,
    number: int,
    tokens: list[int],
    on_token: Callable[[], None],
) -> None:
    body = {
        "model": model,
        "prompt": PROMPTS[number],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                for choice in event["choices"]:
                    tokens += choice["token_ids"] or []
                    on_token()
