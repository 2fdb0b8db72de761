"""Requests and outputs cross the core as bytes, and come out as they went in."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
import torch


def request(**fields: Any) -> Any:
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        **{
            "request_id": "r",
            "prompt_token_ids": [5, 6, 7],
            "mm_features": None,
            "sampling_params": None,
            "pooling_params": None,
            "arrival_time": 1.5,
            "lora_request": None,
            "cache_salt": None,
            "data_parallel_rank": None,
            **fields,
        }
    )


def test_a_request_leaves_its_prompt_behind() -> None:
    """The core has that; all else arrives, also what vLLM calls private."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from appliance.engines.vllm.messages import decode_request, encode_request

    params = SamplingParams(
        temperature=0.5,
        seed=-3,
        stop=["end"],
        stop_token_ids=[3],
        logit_bias={1: 2.0},
        allowed_token_ids=[1, 2],
        prompt_logprobs=3,
        logprob_token_ids=[4],
        thinking_token_budget=9,
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
        extra_args={"any": [1, "thing"]},
    )
    params.update_from_generation_config({"eos_token_id": [2, 8]}, 2)
    params._bad_words_token_ids = [[4, 5]]
    params.structured_outputs._backend = "xgrammar"
    params.structured_outputs._backend_was_auto = True
    asked = request(
        sampling_params=params,
        cache_salt="salt",
        reasoning_ended=False,
        reasoning_parser_kwargs={"chat_template_kwargs": {"enable_thinking": True}},
    )

    told = decode_request(encode_request(asked))

    assert asked.prompt_token_ids == [5, 6, 7]
    assert told.prompt_token_ids == []
    assert told.sampling_params == params
    found = told.sampling_params
    assert (found._eos_token_id, found._all_stop_token_ids) == (2, {2, 3, 8})
    assert found._bad_words_token_ids == [[4, 5]]
    assert found.structured_outputs._backend == "xgrammar"
    assert found.structured_outputs._backend_was_auto
    assert (told.cache_salt, told.reasoning_ended) == ("salt", False)
    assert told.reasoning_parser_kwargs == asked.reasoning_parser_kwargs


def test_pooling_crosses() -> None:
    from vllm import PoolingParams

    from appliance.engines.vllm.messages import decode_request, encode_params

    params = PoolingParams(task="embed", dimensions=16, use_activation=False)
    assert decode_request(encode_params(params)).pooling_params == params


def test_an_output_arrives_in_one_buffer() -> None:
    """However long its arrays are."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.metrics.stats import PrefillStats
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors

    from appliance.engines.vllm.messages import decode_output, encode_output

    ids = torch.arange(30_000, dtype=torch.int32).reshape(-1, 3)
    output = EngineCoreOutput(
        request_id="r",
        new_token_ids=[7],
        new_logprobs=LogprobsLists(
            np.array([[7, 1]]), np.array([[-0.5, -1.0]], np.float32), np.array([1])
        ),
        new_prompt_logprobs_tensors=LogprobsTensors(ids, ids / 7, ids[:, 0]),
        pooling_output=torch.ones(700, dtype=torch.bfloat16),
        finish_reason=FinishReason.STOP,
        stop_reason=7,
        prefill_stats=PrefillStats(num_prompt_tokens=9, num_cached_tokens=8),
    )

    told = decode_output(encode_output(output))

    assert told.new_token_ids == [7]
    assert (told.finish_reason, told.stop_reason) == (FinishReason.STOP, 7)
    assert told.prefill_stats == output.prefill_stats
    for found, sent in zip(told.new_logprobs[:3], output.new_logprobs[:3], strict=True):
        np.testing.assert_array_equal(found, sent)
    for found, sent in zip(
        told.new_prompt_logprobs_tensors[:3], output.new_prompt_logprobs_tensors[:3], strict=True
    ):
        assert torch.equal(found, sent)
    assert torch.equal(told.pooling_output, output.pooling_output)


@pytest.mark.parametrize("allowed", ["0", "1"])
def test_nothing_is_pickled(monkeypatch: pytest.MonkeyPatch, allowed: str) -> None:
    """Whatever vLLM's environment allows."""
    from vllm import SamplingParams
    from vllm.v1.serial_utils import CUSTOM_TYPE_PICKLE

    from appliance.engines.vllm.messages import BadMessage, decode_request, encode_request

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", allowed)
    with pytest.raises(BadMessage, match="encoded"):
        encode_request(request(sampling_params=SamplingParams(extra_args={"any": object()})))
    evil = msgspec.msgpack.Ext(CUSTOM_TYPE_PICKLE, pickle.dumps("unpickled"))
    fields = ["r", [], None, {"extra_args": {"any": evil}}, None, 1.5, None, None, None]
    with pytest.raises(BadMessage, match="extension"):
        decode_request(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01", msgspec.msgpack.encode(["r"])])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    from appliance.engines.vllm.messages import BadMessage, decode_output, decode_request

    with pytest.raises(BadMessage, match="request"):
        decode_request(data)
    with pytest.raises(BadMessage, match="output"):
        decode_output(data)


def test_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends, and before they are looked at."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreOutput

    from appliance.engines.vllm import messages

    body = messages.encode_params(SamplingParams())
    detail = messages.encode_output(EngineCoreOutput(request_id="r", new_token_ids=[1] * 50))
    monkeypatch.setattr(messages, "MAX_REQUEST_BYTES", len(body) - 1)
    monkeypatch.setattr(messages, "MAX_OUTPUT_BYTES", len(detail) - 1)

    with pytest.raises(messages.BadMessage, match="more than"):
        messages.encode_params(SamplingParams())
    with pytest.raises(messages.BadMessage, match="more than"):
        messages.decode_request(body)
    with pytest.raises(messages.BadMessage, match="more than"):
        messages.encode_output(EngineCoreOutput(request_id="r", new_token_ids=[1] * 50))
    with pytest.raises(messages.BadMessage, match="more than"):
        messages.decode_output(detail)
