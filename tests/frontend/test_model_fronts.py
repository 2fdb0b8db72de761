"""The front halves of models: nothing of each other, all names, defaults of their checkpoints."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import openai
import pytest
from vllm.v1.engine.core_client import EngineCoreClient

from appliance.engines.vllm.messages import decode_request
from appliance.frontend.calls import Call, current
from appliance.frontend.core import Core
from appliance.frontend.serving.engine_client import EngineClient, replace_engine
from appliance.frontend.serving.model_fronts import ModelFronts, arguments, configuration
from appliance.service.front_frames import Submit
from tests.frontend.conftest import like, model_at
from tests.frontend.stand_in_core import front_end
from tests.patience import PATIENCE_SECONDS

HELLO: Any = [{"role": "user", "content": "hello"}]


def test_a_reasoning_parser_is_its_models_own(generator: Path) -> None:
    """Built before, a model that reasons makes no other one reason."""
    thinks = arguments(model_at(generator, "thinks", reasoning_parser="qwen3"))
    assert configuration(thinks).structured_outputs_config.reasoning_parser == "qwen3"

    plain = arguments(model_at(generator, "plain"))

    assert not configuration(plain).structured_outputs_config.reasoning_parser


@pytest.mark.asyncio
async def test_every_name_of_a_model_means_it(generator: Path) -> None:
    """Its aliases, too, for every dialect; answers name the model itself. Another name is none."""
    served = [
        model_at(generator, "llama-a", aliases=("gpt-4o", "my/best")),
        model_at(generator, "llama-b"),
    ]
    async with front_end(served) as core:
        client = openai.AsyncOpenAI(base_url=f"{core.url}/v1", api_key="none", max_retries=0)
        for name in ("llama-a", "gpt-4o", "gpt-4o:latest", "my/best"):
            answer = await client.chat.completions.create(model=name, messages=HELLO)
            assert answer.model == "llama-a"
            said = await client.responses.create(model=name, input="hello")
            assert said.output
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt-4", messages=HELLO)
        assert {submit.model for submit in core.said(Submit)} == {"llama-a"}
        assert {submit.asked for submit in core.said(Submit)} == {""}


@pytest.mark.asyncio
async def test_defaults_of_sampling_are_the_checkpoints(generator: Path) -> None:
    """Those of its `generation_config.json`, as with vLLM's `--generation-config auto`; what a
    request says goes before them."""
    path = like(generator, generator.parent / "recommends")
    recommended = {"temperature": 0.25, "top_k": 7, "top_p": 0.5, "repetition_penalty": 1.5}
    (path / "generation_config.json").write_text(json.dumps(recommended), encoding="utf-8")
    async with front_end([model_at(path, "llama-a")]) as core:
        client = openai.AsyncOpenAI(base_url=f"{core.url}/v1", api_key="none", max_retries=0)
        await client.chat.completions.create(model="llama-a", messages=HELLO)
        await client.completions.create(model="llama-a", prompt="hello", top_p=0.75)
        await client.responses.create(model="llama-a", input="hello", temperature=1.0)
        drawn = [decode_request(submit.body).sampling_params for submit in core.said(Submit)]

    assert [(one.temperature, one.top_k, one.top_p, one.repetition_penalty) for one in drawn] == [
        (0.25, 7, 0.5, 1.5),
        (0.25, 7, 0.75, 1.5),
        (1.0, 7, 0.5, 1.5),
    ]


@pytest.mark.asyncio
async def test_a_model_that_is_removed_leaves_no_task(
    generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for its tokens ends when nothing uses the model any more. A task that is collected
    while it waits would be reported as a fault."""
    make = "make_async_mp_client"
    monkeypatch.setattr(EngineCoreClient, make, vars(EngineCoreClient)[make])  # to be put back
    replace_engine()
    reported: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, what: reported.append(what["message"]))
    waits, over = asyncio.Event(), asyncio.Event()

    async def nothing(_: EngineClient) -> None:
        waits.set()
        await loop.create_future()

    monkeypatch.setattr(EngineClient, "get_output_async", nothing)
    before = asyncio.all_tasks()
    fronts = ModelFronts(Core(), [model_at(generator, "removed")])
    front = await fronts.get(fronts.resolve("removed"))
    # A call may hold what it used, and may be held as long as what it began.
    call = current.set(create_autospec(Call, instance=True, front=front))
    front.llm._run_output_handler()
    current.reset(call)
    (waiting,) = asyncio.all_tasks() - before
    waiting.add_done_callback(lambda _: over.set())
    async with asyncio.timeout(PATIENCE_SECONDS):
        await waits.wait()
        del front, waiting, call

        fronts.change([])
        gc.collect()

        # Clients of other tests are collected, too.
        assert "Task was destroyed but it is pending!" not in reported
        await over.wait()
