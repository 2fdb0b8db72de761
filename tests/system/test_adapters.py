"""LoRA adapters under a daemon: a base, two adapters and another model in a pool for one of them.

Every output is plain vLLM's with the same adapter, through evictions and the death of the worker,
while a third adapter is loaded.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
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
from tests.engine.house import make_checkpoint
from tests.lora import ATTENTION, make_adapter
from tests.patience import PATIENCE_SECONDS
from tests.system.test_kinds import CONTEXT, TOKENS, ask
from tests.system.test_kinds import PROMPTS as KINDS_PROMPTS

BASE, OTHER = "llama-mha", "qwen2-gqa"
ALL, SOME = f"{BASE}:all", f"{BASE}:some"
LATE = f"{BASE}:late"
NAMES = (BASE, ALL, SOME, OTHER)
TOKENS_BEFORE_LOAD = 20
TOKENS_BEFORE_KILL = 60
PROMPTS = KINDS_PROMPTS[:4]

Outputs = dict[tuple[str, int], list[int]]


def test_outputs_equal_plain_vllm(tmp_path: Path) -> None:
    base, other = make_checkpoint(tmp_path, BASE), make_checkpoint(tmp_path, OTHER)
    every = make_adapter(tmp_path / "all", base, seed=1)
    some = make_adapter(tmp_path / "some", base, rank=16, targets=ATTENTION, seed=2)
    late = make_adapter(tmp_path / "late", base, rank=3, targets=("q_proj", "down_proj"), seed=3)
    file = configure(tmp_path, base, other)
    expected = plain(
        [
            *((BASE, base, ""), (ALL, base, every), (SOME, base, some), (OTHER, other, "")),
            (LATE, base, late),
        ]
    )

    with running_daemon(file, load_config(file)) as (url, _):
        outputs, killed = asyncio.run(ask_all(url, late))
        status = httpx.get(f"{url}/api/status", timeout=PATIENCE_SECONDS).json()
        listed = httpx.get(f"{url}/v1/models", timeout=PATIENCE_SECONDS).json()["data"]
        tags = httpx.get(f"{url}/api/tags", timeout=PATIENCE_SECONDS).json()["models"]
        unknown = complete(url, f"{BASE}:none", "hello")
        texts = [complete(url, name, "hello").json() for name in (BASE, ALL)]
        ollama = [generate(url, name, "hello") for name in (BASE, f"{BASE}:latest", ALL)]
        unloaded = change(url, "unload", lora_name=LATE)
        gone = complete(url, LATE, "hello")
        kept = load_config(file).models[0].adapters

    assert killed
    assert status["instances"][0]["pid"] != killed
    assert outputs == expected
    assert [(one["id"], one["parent"]) for one in listed] == [
        *((BASE, None), (ALL, BASE), (SOME, BASE), (LATE, BASE), (OTHER, None))
    ]
    assert [tag["name"] for tag in tags] == [f"{BASE}:latest", ALL, SOME, LATE, f"{OTHER}:latest"]
    assert (unloaded.status_code, gone.status_code) == (200, 404), unloaded.text
    assert [one.name for one in kept] == ["all", "some"]
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert [one["model"] for one in texts] == [BASE, ALL]
    said = [one["choices"][0]["text"] for one in texts]
    assert said[0] != said[1]
    assert [one["response"] for one in ollama] == [said[0], said[0], said[1]]


def configure(folder: Path, base: str, other: str) -> Path:
    file = folder / "appliance.toml"
    file.write_text(
        f'[api]\nbind = "127.0.0.1:{free_port()}"\nadmin_socket = ""\n'
        '[devices]\nkind = "cpu"\nslab = "256KiB"\nmemory = "8MiB"\nhost_cache = "64MiB"\n'
        f'[[model]]\nname = "{BASE}"\npath = "{base}"\ndtype = "float32"\nmax_context = {CONTEXT}\n'
        "max_loras = 3\n"
        '[[model.adapter]]\nname = "all"\npath = "all"\n'
        '[[model.adapter]]\nname = "some"\npath = "some"\n'
        f'[[model]]\nname = "{OTHER}"\npath = "{other}"\ndtype = "float32"\n'
        f"max_context = {CONTEXT}\n"
    )
    return file


def plain(models: list[tuple[str, str, str]]) -> Outputs:
    """What unchanged vLLM adds to each prompt, by model and number of the prompt."""
    asked = [ReferencePrompt(list(prompt), TOKENS) for prompt in PROMPTS]
    task = ReferenceTask(
        [ReferenceModel(path, CONTEXT, asked, adapter=adapter) for _, path, adapter in models]
    )
    done = subprocess.run(
        [sys.executable, "-m", "appliance.engines.vllm.reference"],
        input=msgspec.json.encode(task),
        stdout=subprocess.PIPE,
        check=True,
    )
    answers = msgspec.json.decode(done.stdout, type=list[list[ReferenceAnswer]])
    return {
        (name, number): answer.tokens
        for (name, _, _), of_model in zip(models, answers, strict=True)
        for number, answer in enumerate(of_model)
    }


async def ask_all(url: str, late: str) -> tuple[Outputs, int]:
    """All prompts of all names at once, and the worker that was killed in the midst of it; an
    adapter is loaded meanwhile, and asked, too."""
    outputs: Outputs = {}
    killed = 0
    begun = asyncio.Event()

    def on_token() -> None:
        nonlocal killed
        if sum(map(len, outputs.values())) >= TOKENS_BEFORE_LOAD:
            begun.set()
        if not killed and sum(map(len, outputs.values())) >= TOKENS_BEFORE_KILL:
            status = httpx.get(f"{url}/api/status", timeout=PATIENCE_SECONDS).json()
            killed = status["instances"][0]["pid"]
            os.kill(killed, signal.SIGKILL)

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:

        async def ask_for(name: str) -> None:
            await asyncio.gather(
                *(
                    ask(client, name, number, outputs.setdefault((name, number), []), on_token)
                    for number in range(len(PROMPTS))
                )
            )

        async def load_late() -> None:
            await begun.wait()
            body = {"lora_name": "late", "lora_path": late}
            loaded = await client.post("/v1/load_lora_adapter", json=body)
            assert loaded.status_code == 200, loaded.text
            await ask_for(LATE)

        await asyncio.gather(*map(ask_for, NAMES), load_late())
    return outputs, killed


def change(url: str, verb: str, **body: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/{verb}_lora_adapter", json=body, timeout=PATIENCE_SECONDS)


def complete(url: str, name: str, prompt: str) -> httpx.Response:
    body = {"model": name, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_SECONDS)


def generate(url: str, name: str, prompt: str) -> dict[str, str]:
    """The same in Ollama's dialect."""
    options = {"num_predict": 12, "temperature": 0, "repeat_penalty": 1.0}
    body = {"model": name, "prompt": prompt, "raw": True, "stream": False, "options": options}
    found: dict[str, str] = httpx.post(
        f"{url}/api/generate", json=body, timeout=PATIENCE_SECONDS
    ).json()
    return found
