"""Models with weights in 4 bits under a daemon, in a pool that does not hold all of them.

Every output is plain vLLM's, also after a second start, which reads the images that the first left.
"""

from __future__ import annotations

import asyncio
import re
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
from tests.configs import CONFIGS
from tests.engine.quantizing import awq_config, gptq_config, quantize
from tests.engine.shrunken import make_shrunken
from tests.patience import PATIENCE_SECONDS
from tests.system.test_kinds import CONTEXT, PROMPTS, TOKENS, ask

MODELS = {
    "llama-3.1-8b-instruct": awq_config(32),
    "qwen2.5-7b-instruct": gptq_config(128),
    "qwen3-8b": gptq_config(32),
}
POOL = "3MiB"

Outputs = dict[tuple[str, int], list[int]]


def test_outputs_equal_plain_vllm(tmp_path: Path) -> None:
    paths = {}
    for name, config in MODELS.items():
        paths[name] = make_shrunken(tmp_path, name, CONFIGS[name])
        quantize(paths[name], config)
    expected = plain(paths)
    file = tmp_path / "appliance.toml"
    file.write_text(
        f'[api]\nbind = "127.0.0.1:{free_port()}"\nadmin_socket = ""\n'
        f'[devices]\nkind = "cpu"\nmemory = "{POOL}"\nslab = "256KiB"\nhost_cache = "64MiB"\n'
        f'images = "images"\n'
        + "".join(
            f'[[model]]\nname = "{name}"\npath = "{path}"\nmax_context = {CONTEXT}\n'
            for name, path in paths.items()
        )
    )

    for _ in range(2):
        with running_daemon(file, load_config(file)) as (url, _):
            assert asyncio.run(ask_all(url)) == expected
    log = (tmp_path / "daemon.log").read_text(errors="replace")
    assert re.search(r'"preemptions":[1-9]', log), "they took turns"
    kept = [path for path in (tmp_path / "images").rglob("*") if path.is_file()]
    assert len(kept) >= len(MODELS)


def plain(paths: dict[str, str]) -> Outputs:
    """What unchanged vLLM adds to each prompt, by model and number of the prompt."""
    asked = [ReferencePrompt(list(prompt), TOKENS) for prompt in PROMPTS]
    task = ReferenceTask(
        [ReferenceModel(path, CONTEXT, asked, dtype="bfloat16") for path in paths.values()]
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
        for name, of_model in zip(paths, answers, strict=True)
        for number, answer in enumerate(of_model)
    }


async def ask_all(url: str) -> Outputs:
    """All prompts of all models at once."""
    outputs: Outputs = {}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
        await asyncio.gather(
            *(
                ask(client, name, number, outputs.setdefault((name, number), []), lambda: None)
                for name in MODELS
                for number in range(len(PROMPTS))
            )
        )
    return outputs
