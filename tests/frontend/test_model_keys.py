"""Keys of a model, and of the API, that change what a front end asks of the core and answers."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine import FinishReason as EngineFinishReason
from vllm.v1.outputs import LogprobsLists

from appliance.engines.vllm.messages import decode_request, encode_output
from appliance.service.front_frames import Enter, FrontModel, Submit
from appliance.vocabulary import Task
from tests.frontend.conftest import like, model_at
from tests.frontend.served_here import http
from tests.frontend.stand_in_core import StandInCore, front_end

__all__ = ["http"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 64
WIDE: dict[str, Any] = {
    "hidden_size": 1 << 16,
    "num_attention_heads": 1 << 10,
    "num_key_value_heads": 1 << 10,
    "head_dim": 64,
}
"""So that a vector for each of some hundred tokens is more than an output holds."""


@pytest.fixture(scope="module")
def keyed(generator: Path) -> tuple[FrontModel, ...]:
    folder = generator.parent
    embedder = like(generator, folder / "pooler")
    wide = like(generator, folder / "wide", **WIDE)
    rewarder = like(
        generator, folder / "rewarder", architectures=["Qwen2ForRewardModel"], model_type="qwen2"
    )
    each: dict[str, Any] = {"pooler_config": {"task": "token_embed"}}
    chunked = {"task": "embed", "enable_chunked_processing": True, "max_embed_len": 3 * CONTEXT}
    return (
        model_at(generator, "few"),
        model_at(generator, "many", max_logprobs=30),
        model_at(generator, "ids", return_tokens_as_token_ids=True),
        model_at(embedder, "each", Task.EMBED, **each),
        model_at(wide, "wide", Task.EMBED, **each),
        model_at(embedder, "chunked", Task.EMBED, max_context=CONTEXT, pooler_config=chunked),
        model_at(rewarder, "rewarder", Task.SCORE, pooler_config={"task": "token_classify"}),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(keyed: tuple[FrontModel, ...]) -> AsyncIterator[StandInCore]:
    async with front_end(keyed, root_path="/llm/a") as core:
        yield core


@pytest_asyncio.fixture(loop_scope="module")
async def core(front: StandInCore) -> StandInCore:
    await front.quiet()
    front.script()
    front.frames.clear()
    return front


def each_token(core: StandInCore, width: int) -> None:
    """Have each token of a prompt pooled to its own id, `width` times."""

    def pooled(submit: Submit, tokens: list[int]) -> list[bytes]:
        rows = torch.tensor(submit.prompt, dtype=torch.float32).reshape(-1, 1).repeat(1, width)
        return [_output(submit, rows)]

    core.details = pooled


def likely(submit: Submit, tokens: list[int]) -> list[bytes]:
    """Tokens with their log probabilities."""
    ids = np.array([[token] for token in tokens])
    found = LogprobsLists(ids, np.full(ids.shape, -0.5, np.float32), np.ones(len(tokens), int))
    output = EngineCoreOutput(request_id=submit.request, new_token_ids=tokens, new_logprobs=found)
    return [encode_output(output)]


def _output(submit: Submit, pooled: torch.Tensor) -> bytes:
    return encode_output(
        EngineCoreOutput(
            request_id=submit.request,
            new_token_ids=[],
            pooling_output=pooled,
            finish_reason=EngineFinishReason.STOP,
        )
    )


async def test_as_many_log_probabilities_as_a_model_allows(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    core.details = likely
    asked = {"prompt": "hello", "max_tokens": 1, "logprobs": 25}
    assert (await http.post("/v1/completions", json={"model": "many", **asked})).status_code == 200
    assert decode_request(core.said(Submit)[0].body).sampling_params.logprobs == 25

    refused = await http.post("/v1/completions", json={"model": "few", **asked})
    assert refused.status_code == 400
    assert "greater than max allowed: 20" in refused.json()["error"]["message"]
    more = asked | {"model": "many", "logprobs": 31}
    refused = await http.post("/v1/completions", json=more)
    assert "greater than max allowed: 30" in refused.json()["error"]["message"]
    assert len(core.said(Submit)) == 1


@pytest.mark.parametrize("model", ["few", "ids"])
async def test_tokens_are_written_as_ids_unasked(
    core: StandInCore, http: httpx.AsyncClient, model: str
) -> None:
    core.details = likely
    core.saying = lambda submit: [70, 71]
    asked = {"model": model, "prompt": "hello", "max_tokens": 2, "logprobs": 0}
    answer = (await http.post("/v1/completions", json=asked)).json()

    written = answer["choices"][0]["logprobs"]["tokens"]
    assert (written == ["token_id:70", "token_id:71"]) is (model == "ids")


async def test_each_token_has_a_vector(core: StandInCore, http: httpx.AsyncClient) -> None:
    each_token(core, 3)
    prompts = [[5, 6, 7], [8]]
    answer = await http.post("/pooling", json={"model": "each", "input": prompts})

    assert answer.status_code == 200
    found = [one["data"] for one in answer.json()["data"]]
    assert found == [[[float(token)] * 3 for token in prompt] for prompt in prompts]
    submit = core.said(Submit)[0]
    assert (submit.max_tokens, decode_request(submit.body).pooling_params.task) == (
        0,
        "token_embed",
    )


@pytest.mark.parametrize(
    ("path", "more", "status", "why"),
    [
        ("/pooling", {"task": "embed"}, 400, "Try switching the model's pooling_task"),
        ("/pooling", {"task": "classify"}, 400, "Unsupported task: 'classify'"),
        ("/v1/embeddings", {}, 501, "does not support Embeddings API"),
        ("/score", {"text_1": "a", "text_2": "b"}, 501, "does not support Score API"),
    ],
)
async def test_a_model_that_pools_tokens_does_nothing_else(
    core: StandInCore,
    http: httpx.AsyncClient,
    path: str,
    more: dict[str, Any],
    status: int,
    why: str,
) -> None:
    body = {"model": "each", **({} if "text_1" in more else {"input": "a"}), **more}
    answer = await http.post(path, json=body)

    assert (answer.status_code, core.said(Submit)) == (status, [])
    assert why in answer.json()["error"]["message"]


async def test_what_is_too_large_is_refused_before_it_is_computed(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    """A prompt of which no output holds what is pooled, and several that together take as much."""
    each_token(core, 1)
    asked: dict[str, Any] = {"model": "wide", "input": [7] * 200}
    answer = await http.post("/pooling", json=asked)
    assert (answer.status_code, core.said(Submit)) == (400, [])
    assert "52428800 bytes" in answer.json()["error"]["message"]
    assert "ask for a shorter prompt" in answer.json()["error"]["message"]

    assert (await http.post("/pooling", json=asked | {"input": [7] * 100})).status_code == 200
    answer = await http.post("/pooling", json=asked | {"input": [[7] * 100] * 2})
    assert answer.status_code == 400
    assert "ask for fewer at once" in answer.json()["error"]["message"]
    assert len(core.said(Submit)) == 2


async def test_a_reward_model_values_each_token(core: StandInCore, http: httpx.AsyncClient) -> None:
    """Also at the one path for all; there is no other task."""
    each_token(core, 1)
    for path in ("/pooling", "/invocations"):
        answer = await http.post(path, json={"model": "rewarder", "input": [5, 6]})
        assert answer.json()["data"][0]["data"] == [[5.0], [6.0]]
    params = decode_request(core.said(Submit)[0].body).pooling_params
    assert params.task == "token_classify"

    other = {"model": "rewarder", "input": [5], "task": "classify"}
    refused = await http.post("/pooling", json=other)
    assert "Unsupported task: 'classify'" in refused.json()["error"]["message"]
    refused = await http.post("/classify", json={"model": "rewarder", "input": [5]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (501, 501)


async def test_a_long_text_is_embedded_in_chunks(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    """Each is a request of its own; the answer is the mean of their vectors by length."""

    def pooled(submit: Submit, tokens: list[int]) -> list[bytes]:
        first = len(submit.prompt) == CONTEXT
        return [_output(submit, torch.tensor([1.0, 0.0] if first else [0.0, 1.0]))]

    core.details = pooled
    asked: dict[str, Any] = {"model": "chunked", "input": [7] * (CONTEXT + CONTEXT // 2)}
    answer = await http.post("/v1/embeddings", json=asked)

    assert answer.status_code == 200
    assert sorted(len(one.prompt) for one in core.said(Submit)) == [CONTEXT // 2, CONTEXT]
    length = math.hypot(2, 1)
    assert answer.json()["data"][0]["embedding"] == pytest.approx([2 / length, 1 / length])
    refused = await http.post("/v1/embeddings", json=asked | {"input": [7] * (3 * CONTEXT + 1)})
    assert refused.status_code == 400
    assert str(3 * CONTEXT) in refused.json()["error"]["message"]


async def test_requests_below_the_root_path_are_meant_without_it(
    core: StandInCore, http: httpx.AsyncClient
) -> None:
    """Those of the core go back to it, as they came."""
    asked = {"model": "few", "prompt": "hello", "max_tokens": 1}
    for path in ("/v1/completions", "/llm/a/v1/completions"):
        assert (await http.post(path, json=asked)).status_code == 200
    assert [enter.path for enter in core.said(Enter)] == ["/v1/completions"] * 2
    core.returned.clear()

    for path in ("/llm/a/api/tags", "/llm/v1/completions"):
        assert (await http.get(path)).text == "core"

    assert [one.received.split(b" ")[1] for one in core.returned] == [
        b"/llm/a/api/tags",
        b"/llm/v1/completions",
    ]
