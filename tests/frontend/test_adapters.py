"""Models with LoRA adapters in a front end: whom a name means, and what the core is asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from appliance.engines.vllm.messages import decode_request
from appliance.service.front_frames import Entered, FrontModel, Submit
from tests.frontend.conftest import model_at
from tests.frontend.served_here import http
from tests.frontend.stand_in_core import StandInCore, front_end

__all__ = ["http"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


def catalogue(generator: Path, *adapters: str) -> tuple[FrontModel, ...]:
    llama = model_at(generator, "llama", adapters=adapters, takes_adapters=True)
    return (llama, model_at(generator, "other"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(generator: Path) -> AsyncIterator[StandInCore]:
    async with front_end(catalogue(generator, "llama:legal", "llama:polite")) as core:
        yield core


@pytest_asyncio.fixture(loop_scope="module")
async def core(front: StandInCore) -> StandInCore:
    await front.quiet()
    front.script()
    front.frames.clear()
    return front


MESSAGES = [{"role": "user", "content": "hello"}]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 16, "store": False}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}),
    ("/api/chat", {"messages": MESSAGES, "stream": False}),
    ("/api/generate", {"prompt": "hello", "stream": False}),
    ("/api/generate", {"prompt": "hello", "stream": False, "raw": True}),
]


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize(
    ("asked", "adapter"),
    [
        ("llama", None),
        ("llama:latest", None),
        ("llama:legal", "llama:legal"),
        ("llama:polite", "llama:polite"),
    ],
)
async def test_a_name_means_a_model_or_one_of_its_adapters(
    core: StandInCore,
    http: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    asked: str,
    adapter: str | None,
) -> None:
    """In every dialect. The core is asked for the model, and told what its client asked for."""
    answer = await http.post(path, json={"model": asked, **body})

    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] in {asked, adapter or "llama"}
    (submit,) = core.said(Submit)
    assert (submit.model, submit.asked) == ("llama", adapter or "")
    lora = decode_request(submit.body).lora_request
    assert (lora and lora.lora_name) == adapter


@pytest.mark.parametrize("asked", ["llama:other", "llama:legal:latest", "other:legal", "legal"])
async def test_other_names_mean_nothing(
    core: StandInCore, http: httpx.AsyncClient, asked: str
) -> None:
    for path, body in CALLS:
        answer = await http.post(path, json={"model": asked, **body})
        assert answer.status_code == 404, f"{path}: {answer.text}"
    assert not core.said(Submit)


async def test_adapters_come_and_go(
    core: StandInCore, http: httpx.AsyncClient, generator: Path
) -> None:
    """Of a model that is built: the next call finds what the core said last, in any dialect."""
    for known, unknown in (("new", "legal"), ("legal", "new")):
        core.change(catalogue(generator, f"llama:{known}", "llama:polite"))
        for path, body in CALLS:
            found = await http.post(path, json={"model": f"llama:{known}", **body})
            gone = await http.post(path, json={"model": f"llama:{unknown}", **body})
            assert (found.status_code, gone.status_code) == (200, 404), f"{path}: {found.text}"
    core.change(catalogue(generator, "llama:legal", "llama:polite"))


async def test_a_key_allows_each_by_its_name(core: StandInCore, http: httpx.AsyncClient) -> None:
    """One for an adapter does not open its base, nor the other way round."""
    for allowed, refused in (("llama:legal", "llama"), ("llama", "llama:legal")):
        core.entering = lambda enter, one=allowed: Entered(call=enter.call, key="k", models=(one,))
        for path, body in CALLS:
            status = (await http.post(path, json={"model": allowed, **body})).status_code
            other = (await http.post(path, json={"model": refused, **body})).status_code
            assert (status, other) == (200, 404), path
