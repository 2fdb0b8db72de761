"""Front ends of checkpoints that read images as well take chats of text, and refuse all others."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio

from appliance.service.front_frames import Submit
from tests.configs import CONFIGS
from tests.engine.shrunken import shrunken
from tests.frontend.conftest import like, model_at
from tests.frontend.served_here import http
from tests.frontend.stand_in_core import StandInCore, front_end

__all__ = ["http"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT_ONLY: Final = "is served for text only: leave out images, sound and videos"
PNG: Final = "iVBORw0KGgo="
URL: Final = f"data:image/png;base64,{PNG}"
NAMES: Final = (
    "gemma-3-4b-it",
    "mistral-small-3.1-24b-instruct-2503",
    "phi-4-multimodal-instruct",
    "qwen2.5-vl-7b-instruct",
    "qwen3.5-27b",
    "qwen3-vl-8b-instruct",
)
HELLO: Final = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def core(generator: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    folder = tmp_path_factory.mktemp("readers")
    paths = {name: like(generator, folder / name, **shrunken(CONFIGS[name])) for name in NAMES}
    # The one that has its template with what prepares images, as transformers once wrote it.
    *_, last = paths.values()
    described = json.loads((last / "tokenizer_config.json").read_bytes())
    template = described.pop("chat_template")
    (last / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    (last / "chat_template.json").write_text(
        json.dumps({"chat_template": template}), encoding="utf-8"
    )
    # Mistral's own files, which vLLM would read instead of those of transformers.
    for file in ("params.json", "consolidated.safetensors"):
        (paths["mistral-small-3.1-24b-instruct-2503"] / file).write_text("{}", encoding="utf-8")
    models = [model_at(path, name) for name, path in paths.items()]
    async with front_end([*models, model_at(generator, "talker")]) as core:
        yield core


@pytest.mark.parametrize("name", NAMES)
async def test_chats_of_text(core: StandInCore, http: httpx.AsyncClient, name: str) -> None:
    """Are rendered as for a model of text that has the same tokenizer and template; a list of parts
    that are all text is text."""
    asked = {"messages": HELLO, "max_tokens": 3}
    core.frames.clear()
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    answers = [
        await http.post(path, json={"model": model} | asked | changes)
        for path, model, changes in (
            ("/v1/chat/completions", "talker", {}),
            ("/v1/chat/completions", name, {}),
            ("/v1/chat/completions", name, {"messages": parts}),
            ("/v1/messages", name, {}),
            ("/api/chat", name, {"stream": False}),
        )
    ]
    assert {answer.status_code for answer in answers} == {200}, [one.text for one in answers]
    assert len({tuple(submit.prompt) for submit in core.said(Submit)}) == 1


@pytest.mark.parametrize("name", [*NAMES, "talker"])
async def test_images_are_refused(core: StandInCore, http: httpx.AsyncClient, name: str) -> None:
    """In each dialect, before anything is computed."""
    core.frames.clear()
    image = {"type": "image_url", "image_url": {"url": URL}}
    sound = {"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}}
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    embedded = {"type": "image_embeds", "image_embeds": PNG}
    pictured = {"type": "input_image", "image_url": URL, "detail": "auto"}
    for path, part in (
        ("/v1/chat/completions", image),
        ("/v1/chat/completions", sound),
        ("/v1/chat/completions", embedded),
        ("/v1/messages", {"type": "image", "source": source}),
        ("/v1/responses", pictured),
    ):
        said = [{"role": "user", "content": [part]}]
        asked = {"input": said} if path == "/v1/responses" else {"messages": said, "max_tokens": 3}
        answer = await http.post(path, json={"model": name} | asked)
        assert answer.status_code == 400, answer.text
        if part is not embedded:  # of which vLLM says that it takes none at all
            assert answer.json()["error"]["message"] == f"{name} {TEXT_ONLY}"
    answer = await http.post(
        "/api/chat", json={"model": name, "messages": [HELLO[0] | {"images": [PNG]}]}
    )
    assert answer.status_code == 400
    assert answer.json()["error"].endswith("does not support vision: messages[0].images")
    assert core.said(Submit) == []
