"""KV that has no room: on the device, in the host cache, and for clients that name no bound."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx

from appliance.client import event_lines_async
from appliance.config.loader import load_config
from appliance.demo.checkpoints import write_config
from appliance.demo.run import free_port, metrics_by_model, running_daemon
from appliance.demo.traffic import ChatRequest, send
from tests.patience import PATIENCE_SECONDS
from tests.system.conftest import copy_with_context

MODEL = "llama-a"
MEMORY = "20MiB"
CONTEXT = 32768


def test_kv_that_the_host_cache_cannot_hold_is_computed_again(
    checkpoints: Path, chats: list[ChatRequest], expected: dict[ChatRequest, list[int]]
) -> None:
    """A pool for the KV of 320 tokens, beside a host cache for 384: requests outgrow both, and
    every answer is that of plain vLLM all the same."""
    longest = max((chat for chat in chats if chat.model == MODEL), key=lambda c: c.max_tokens)
    mine = [longest] * 16
    file = write_config(
        checkpoints,
        [MODEL],
        instances=1,
        memory=MEMORY,
        host_cache="3MiB",
        max_context=256,
        bind=f"127.0.0.1:{free_port()}",
    )
    config = load_config(file)
    with running_daemon(file, config) as (url, _):
        answers = asyncio.run(send(url, mine, lambda _: None))
        recomputed = metrics_by_model(url)["appliance_kv_recomputed_tokens_total", MODEL]
    assert [answer.error for answer in answers] == [None] * len(mine)
    assert [answer.tokens for answer in answers] == [expected[longest]] * 16
    assert recomputed > 0


def test_clients_that_name_no_bound_run_at_once(checkpoints: Path, tmp_path: Path) -> None:
    """48 chats without `max_tokens`, with a model of 32k tokens of context: all have tokens before
    the first of them ends. Room for all at full length would be 12 GiB."""
    copy_with_context(checkpoints / MODEL, tmp_path / MODEL, CONTEXT)
    file = write_config(
        tmp_path,
        [MODEL],
        instances=1,
        memory="384MiB",
        host_cache="384MiB",
        max_context=CONTEXT,
        bind=f"127.0.0.1:{free_port()}",
    )
    config = load_config(file)
    with running_daemon(file, config) as (url, _):
        asyncio.run(asyncio.wait_for(_chat_at_once(url, 48), PATIENCE_SECONDS))


async def _chat_at_once(url: str, clients: int) -> None:
    """So many chats; none goes on before all have tokens."""
    all_began = asyncio.Barrier(clients)

    async def chat(number: int) -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Tell me about bridge number {number}."}],
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            tokens = 0
            async for line in event_lines_async(response.aiter_bytes()):
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        tokens += len(choice.get("token_ids") or ())
                if tokens >= 3:
                    break
            await all_began.wait()  # the connection is closed only then

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=None) as client:
        await asyncio.gather(*(chat(number) for number in range(clients)))
