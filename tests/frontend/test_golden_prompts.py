"""Prompts are vLLM's, token for token: every template shape with every message shape, and random
conversations. The reference is vLLM's own renderer, called without anything of ours."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer

from tests.frontend.chat_templates import TEMPLATES
from tests.frontend.conftest import model_at
from tests.frontend.conversations import SHAPES, random_chat
from tests.frontend.stand_in_core import StandInCore, front_end

pytestmark = pytest.mark.asyncio(loop_scope="session")

MAX_CONTEXT: Final = 2048
RANDOM_CONVERSATIONS: Final = 5000
AT_ONCE: Final = 32
NAMES: Final = {template: f"t{number}" for number, template in enumerate(TEMPLATES)}
"""Models by the name of their template."""


@pytest.fixture(scope="module")
def folder(generator: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint for each template; front ends and the reference read no weights."""
    folder = tmp_path_factory.mktemp("templates")
    tokenizer = json.loads((generator / "tokenizer_config.json").read_bytes())
    for template, name in NAMES.items():
        path = folder / name
        path.mkdir()
        for file in ("config.json", "tokenizer.json"):
            shutil.copyfile(generator / file, path / file)
        config = tokenizer | {"chat_template": TEMPLATES[template]}
        (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def golden(folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a front end that has all of these models, more than it keeps at once."""
    models = tuple(
        model_at(folder / name, name, max_context=MAX_CONTEXT) for name in NAMES.values()
    )
    async with front_end(models) as core:
        core.keep_frames = False
        async with _client(core) as client:
            yield client


def _client(core: StandInCore) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(core.url, timeout=aiohttp.ClientTimeout(None))


class Reference:
    """vLLM's renderers of all models."""

    def __init__(self, folder: Path) -> None:
        self._renderers = {name: _renderer(folder / name) for name in NAMES.values()}

    async def prompt(self, model: str, chat: dict[str, Any]) -> list[int] | None:
        """The tokens of a chat's prompt; None if the template refuses it."""
        request = ChatCompletionRequest(model=model, **chat)
        try:
            rendered = await self._renderers[model].render_chat(request)
        except VLLMValidationError:
            return None
        _, (prompt,) = rendered
        tokens: list[int] = prompt["prompt_token_ids"]
        return tokens


def _renderer(path: Path) -> OnlineRenderer:
    config = ModelConfig(model=str(path), dtype="float32", max_model_len=MAX_CONTEXT)
    return OnlineRenderer(
        model_config=config,
        renderer=renderer_from_config(VllmConfig(model_config=config)),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
    )


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


async def _asked(
    client: aiohttp.ClientSession, model: str, chat: dict[str, Any]
) -> list[int] | None:
    """The tokens that a front end makes of a chat; None if it refuses it (400)."""
    body = {"model": model, "max_tokens": 1, "return_token_ids": True, **chat}
    async with client.post("/v1/chat/completions", json=body) as answer:
        if answer.status == 400:
            return None
        answer.raise_for_status()
        tokens: list[int] = (await answer.json())["prompt_token_ids"]
        return tokens


async def _all_equal(
    client: aiohttp.ClientSession, reference: Reference, chats: list[tuple[str, dict[str, Any]]]
) -> int:
    """Compare the prompts of all chats; returns how many templates took."""
    room = asyncio.Semaphore(AT_ONCE)

    async def same(model: str, chat: dict[str, Any]) -> bool:
        async with room:
            expected = await reference.prompt(model, chat)
            assert await _asked(client, model, chat) == expected, (model, chat)
            return expected is not None

    return sum(await asyncio.gather(*(same(model, chat) for model, chat in chats)))


async def test_every_template_with_every_shape(
    golden: aiohttp.ClientSession, reference: Reference
) -> None:
    """At least 40 template shapes; what a template refuses is refused here."""
    chats = [(model, chat) for model in NAMES.values() for chat in SHAPES.values()]

    rendered = await _all_equal(golden, reference, chats)

    assert len(TEMPLATES) >= 40
    assert rendered > 0.95 * len(chats)


async def test_random_conversations(golden: aiohttp.ClientSession, reference: Reference) -> None:
    """Turns, parts, calls, results, tools and variables, mixed by a seed, for a few models at a
    time: a front end keeps 32 of them built."""
    dice = random.Random(16)
    models = list(NAMES.values())
    chats = [
        (models[number * len(models) // RANDOM_CONVERSATIONS], random_chat(dice))
        for number in range(RANDOM_CONVERSATIONS)
    ]

    rendered = await _all_equal(golden, reference, chats)

    assert rendered > 0.8 * len(chats)
