"""A model with drafts under a daemon, beside one without: the tokens of plain vLLM, also when their
worker is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx

from appliance.config.loader import load_config
from appliance.demo.run import running_daemon
from tests.engine.house import MODELS, make_checkpoint
from tests.patience import PATIENCE_SECONDS
from tests.system.test_kinds import PROMPTS, TOKENS, ask, configure, plain

DRAFTING, OTHER = "drafting", "other"
COUNTERS = {
    f"vllm:spec_decode_num_{kind}_tokens_total": f"{key}_tokens"
    for kind, key in (("draft", "drafted"), ("accepted", "accepted"))
}


def test_outputs_equal_plain_vllm_through_a_kill(tmp_path: Path) -> None:
    kind = next(iter(MODELS))
    path = make_checkpoint(tmp_path, kind, initializer_range=0.05)
    expected = plain({DRAFTING: path}, "appliance.engines.vllm.reference")
    devices = 'memory = "8MiB"\nhost_cache = "32MiB"\n'
    file = configure(tmp_path, {OTHER: path, DRAFTING: path}, devices)
    with file.open("a") as more:
        more.write('speculate = { method = "ngram", tokens = 6 }\n')

    with running_daemon(file, load_config(file)) as (url, _):
        outputs, killed = asyncio.run(ask_all(url))
        status = httpx.get(f"{url}/api/status", timeout=PATIENCE_SECONDS).json()
        metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE_SECONDS).text

    numbers = range(len(PROMPTS))
    assert outputs == {
        (name, number): expected[DRAFTING, number]
        for name in (OTHER, DRAFTING)
        for number in numbers
    }
    assert status["instances"][0]["pid"] != killed
    shown = {model["model"]: model for model in status["models"]}
    assert shown[OTHER]["drafted_tokens"] == shown[OTHER]["accepted_tokens"] == 0
    drafting = shown[DRAFTING]
    assert 0 < drafting["accepted_tokens"] <= drafting["drafted_tokens"]
    for counter, key in COUNTERS.items():
        assert f'{counter}{{model_name="{DRAFTING}"}} {drafting[key]:.1f}' in metrics
    assert drafting["output_tokens"] == len(PROMPTS) * TOKENS


async def ask_all(url: str) -> tuple[dict[tuple[str, int], list[int]], int]:
    """All prompts of both models at once, and the worker that was killed in the midst of it."""
    outputs: dict[tuple[str, int], list[int]] = {}
    killed = 0

    def on_token() -> None:
        nonlocal killed
        if killed or len(outputs[DRAFTING, 0]) < TOKENS // 3:
            return
        status = httpx.get(f"{url}/api/status", timeout=PATIENCE_SECONDS).json()
        killed = status["instances"][0]["pid"]
        os.kill(killed, signal.SIGKILL)

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
        await asyncio.gather(
            *(
                ask(client, name, number, outputs.setdefault((name, number), []), on_token)
                for name in (OTHER, DRAFTING)
                for number in range(len(PROMPTS))
            )
        )
    return outputs, killed
