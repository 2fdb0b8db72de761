"""Models with drafts under a daemon, by n-grams and by a head, beside one without: the tokens of
plain vLLM, also when their worker is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx

from appliance.config.loader import load_config
from appliance.demo.run import running_daemon
from tests.engine.heads import make_eagle, make_target
from tests.engine.house import MODELS, make_checkpoint
from tests.patience import PATIENCE_SECONDS, until
from tests.system.test_kinds import PROMPTS, TOKENS, ask, configure, plain

DRAFTING, HEADED, OTHER = "drafting", "headed", "other"
COUNTERS = {
    f"vllm:spec_decode_num_{kind}_tokens_total": f"{key}_tokens"
    for kind, key in (("draft", "drafted"), ("accepted", "accepted"))
}


def test_outputs_equal_plain_vllm_through_a_kill(tmp_path: Path) -> None:
    kind = next(iter(MODELS))
    path = make_checkpoint(tmp_path, kind, initializer_range=0.05)
    (tmp_path / "heads").mkdir()
    target = make_target(tmp_path / "heads")
    make_eagle(tmp_path, target, "eagle")
    expected = plain({DRAFTING: path, HEADED: target}, "appliance.engines.vllm.reference")
    devices = 'memory = "8MiB"\nhost_cache = "32MiB"\n'
    file = configure(tmp_path, {OTHER: path, DRAFTING: path, HEADED: target}, devices)
    text = file.read_text().replace(
        f'name = "{DRAFTING}"\n',
        f'name = "{DRAFTING}"\nspeculate = {{ method = "ngram", tokens = 6 }}\n',
    )
    file.write_text(f'{text}speculate = {{ method = "eagle", path = "eagle" }}\n')

    with running_daemon(file, load_config(file)) as (url, _):
        outputs, killed = asyncio.run(ask_all(url))
        # A worker tells of a turn when it has ended, which is after the last of its tokens.
        until(lambda: drafts_are_told(url))
        status = get(url, "/api/status").json()

    numbers = range(len(PROMPTS))
    assert outputs == {
        (name, number): expected[like, number]
        for name, like in ((OTHER, DRAFTING), (DRAFTING, DRAFTING), (HEADED, HEADED))
        for number in numbers
    }
    assert status["instances"][0]["pid"] != killed
    shown = {model["model"]: model for model in status["models"]}
    assert shown[OTHER]["drafted_tokens"] == shown[OTHER]["accepted_tokens"] == 0
    for name in (DRAFTING, HEADED):
        drafting = shown[name]
        assert 0 < drafting["accepted_tokens"] <= drafting["drafted_tokens"]
        assert drafting["output_tokens"] == sum(len(outputs[name, number]) for number in numbers)


def get(url: str, path: str) -> httpx.Response:
    return httpx.get(url + path, timeout=PATIENCE_SECONDS).raise_for_status()


def drafts_are_told(url: str) -> bool:
    """Whether the API and the metrics tell of drafts of both models, and the same."""
    models = get(url, "/api/status").json()["models"]
    metrics = get(url, "/metrics").text
    return all(
        model[key] > 0 and f'{counter}{{model_name="{model["model"]}"}} {model[key]:.1f}' in metrics
        for model in models
        if model["model"] in (DRAFTING, HEADED)
        for counter, key in COUNTERS.items()
    )


async def ask_all(url: str) -> tuple[dict[tuple[str, int], list[int]], int]:
    """All prompts of all models at once, and the worker that was killed in the midst of it."""
    outputs: dict[tuple[str, int], list[int]] = {}
    killed = 0

    def on_token() -> None:
        nonlocal killed
        if killed or len(outputs[DRAFTING, 0]) < TOKENS // 3:
            return
        status = get(url, "/api/status").json()
        killed = status["instances"][0]["pid"]
        os.kill(killed, signal.SIGKILL)

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
        await asyncio.gather(
            *(
                ask(client, name, number, outputs.setdefault((name, number), []), on_token)
                for name in (OTHER, DRAFTING, HEADED)
                for number in range(len(PROMPTS))
            )
        )
    return outputs, killed
