"""OpenAI's and Anthropic's official clients and a real front end, over a stand-in core."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
import torch
from tokenizers import Tokenizer
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine import FinishReason as EngineFinishReason
from vllm.v1.outputs import LogprobsLists

from appliance.engines.vllm.messages import decode_request, encode_output
from appliance.service.front_frames import FrontModel, Refused, Stopped, Submit
from appliance.vocabulary import FinishReason
from tests.frontend.stand_in_core import StandInCore, made_up
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(core: StandInCore) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{core.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def tokenizer(models: tuple[FrontModel, ...]) -> Tokenizer:
    return Tokenizer.from_file(f"{models[0].path}/tokenizer.json")


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


async def test_a_chat_is_the_cores_tokens(
    core: StandInCore, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    answer = await client.chat.completions.create(model="talker", messages=HELLO, max_tokens=8)
    submit = await core.seen(Submit)
    assert submit.model == "talker"
    assert submit.max_tokens == 8
    assert submit.together_tokens == 0
    assert not submit.guide
    assert tokenizer.decode(submit.prompt, skip_special_tokens=False).startswith("<|bos|><|user|>")
    assert answer.choices[0].message.content == text_of(tokenizer, made_up(submit.prompt, 8))
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == "talker"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(submit.prompt), 8)


async def test_a_stream_has_the_same_text(core: StandInCore, client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "talker", "messages": HELLO, "max_tokens": 12}
    whole = await client.chat.completions.create(**asked)
    parts = []
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        parts.append(chunk.choices[0].delta.content or "")
    assert "".join(parts) == whole.choices[0].message.content


async def test_several_answers_are_asked_for_together(
    core: StandInCore, client: openai.AsyncOpenAI
) -> None:
    core.saying = lambda submit: made_up((*submit.prompt, len(core.said(Submit))), 5)
    answer = await client.chat.completions.create(
        model="talker", messages=HELLO, max_tokens=5, n=2, temperature=1.0
    )
    first, second = core.said(Submit)
    assert first.together_tokens == second.together_tokens == 2 * (len(first.prompt) + 5)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content


async def test_log_probabilities_come_as_details(
    core: StandInCore, client: openai.AsyncOpenAI
) -> None:
    def detailed(submit: Submit, tokens: list[int]) -> list[bytes]:
        ids = np.array([[token, token + 1] for token in tokens])
        found = LogprobsLists(ids, np.full(ids.shape, -0.5, np.float32), np.ones(len(tokens), int))
        return [
            encode_output(
                EngineCoreOutput(
                    request_id=submit.request, new_token_ids=tokens, new_logprobs=found
                )
            )
        ]

    core.details = detailed
    answer = await client.chat.completions.create(
        model="talker", messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=1
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert [entry.logprob for entry in found.content] == [-0.5] * 3


async def test_a_stop_string_ends_the_request_in_the_core(
    core: StandInCore, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    said = tokenizer.encode("one two stop three", add_special_tokens=False).ids
    core.saying = lambda submit: said
    core.hold_at = lambda submit: len(said) - 1
    answer = await client.chat.completions.create(
        model="talker", messages=HELLO, max_tokens=50, stop=["stop"]
    )
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "stop"
    stopped = await core.seen(Stopped)
    assert stopped.request == core.said(Submit)[0].request
    assert answer.usage is not None
    assert stopped.output_tokens == answer.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_at_a_stop_string_waits_until_it_is_counted(
    core: StandInCore, client: openai.AsyncOpenAI, tokenizer: Tokenizer, stream: bool
) -> None:
    """The client has nothing of the end before the core has counted what it is sent, which is less
    than the core has made."""
    core.settles = False
    said = tokenizer.encode("stop three four five", add_special_tokens=False).ids
    core.saying = lambda submit: said
    asked: Any = {"model": "talker", "messages": HELLO, "max_tokens": 50, "stop": ["stop"]}

    async def ask() -> int:
        if not stream:
            whole = await client.chat.completions.create(**asked)
            assert whole.usage is not None
            return whole.usage.completion_tokens
        options = {"stream": True, "stream_options": {"include_usage": True}}
        pieces = [piece async for piece in await client.chat.completions.create(**asked, **options)]
        assert pieces[-1].usage is not None
        return int(pieces[-1].usage.completion_tokens)

    asking = asyncio.create_task(ask())
    stopped = await core.seen(Stopped)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not asking.done()

    core.settle(stopped)

    assert await asking == stopped.output_tokens < len(said)


async def test_a_stop_token_is_named(core: StandInCore, client: openai.AsyncOpenAI) -> None:
    core.saying = lambda submit: [20, 21, 22]
    core.ending = lambda submit: FinishReason.STOP
    answer: Any = await client.completions.create(
        model="talker", prompt="a", max_tokens=9, extra_body={"stop_token_ids": [22]}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == 22


async def test_a_guided_answer_says_so(core: StandInCore, client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(
        model="talker", messages=HELLO, max_tokens=4, response_format={"type": "json_object"}
    )
    submit = await core.seen(Submit)
    assert submit.guide
    assert decode_request(submit.body).sampling_params.structured_outputs.json_object


async def test_a_streamed_response_has_all_events(
    core: StandInCore, client: openai.AsyncOpenAI
) -> None:
    kinds = []
    stream = await client.responses.create(
        model="talker", input="hello", max_output_tokens=4, stream=True
    )
    async for event in stream:
        kinds.append(event.type)
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


async def test_anthropics_client_gets_messages(core: StandInCore, tokenizer: Tokenizer) -> None:
    client = anthropic.AsyncAnthropic(base_url=core.url, api_key="none", max_retries=0)
    asked: Any = {"model": "talker", "messages": HELLO, "max_tokens": 6}
    answer = await client.messages.create(**asked)
    submit = await core.seen(Submit)
    expected = text_of(tokenizer, made_up(submit.prompt, 6))
    assert [block.text for block in answer.content if block.type == "text"] == [expected]
    assert answer.stop_reason == "max_tokens"
    async with client.messages.stream(**asked) as stream:
        assert "".join([text async for text in stream.text_stream]) == expected
    counted = await client.messages.count_tokens(model="talker", messages=HELLO)
    assert counted.input_tokens == len(submit.prompt)


async def test_an_unknown_model_is_answered_in_anthropics_words(core: StandInCore) -> None:
    client = anthropic.AsyncAnthropic(base_url=core.url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.NotFoundError) as caught:
        await client.messages.create(model="nobody", messages=HELLO, max_tokens=6)
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


def pooled(core: StandInCore, vector: list[float]) -> None:
    core.saying = lambda submit: []
    core.ending = lambda submit: FinishReason.STOP
    core.details = lambda submit, tokens: [
        encode_output(
            EngineCoreOutput(
                request_id=submit.request,
                new_token_ids=[],
                pooling_output=torch.tensor(vector),
                finish_reason=EngineFinishReason.STOP,
            )
        )
    ]


async def test_embeddings_are_the_cores_vectors(
    core: StandInCore, client: openai.AsyncOpenAI
) -> None:
    pooled(core, [0.25, -0.5])
    answer = await client.embeddings.create(model="embedder", input=["a", "b"])
    assert [one.embedding for one in answer.data] == [[0.25, -0.5]] * 2
    submits = core.said(Submit)
    assert [submit.max_tokens for submit in submits] == [0, 0]
    assert decode_request(submits[0].body).pooling_params.task == "embed"
    raw = await client.embeddings.create(model="embedder", input="a", encoding_format="base64")
    assert isinstance(raw.data[0].embedding, (str, list))


async def test_scores_and_ranks_come_from_a_model_that_scores(core: StandInCore) -> None:
    pooled(core, [0.75])
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
        scored = await http.post(
            "/v1/score", json={"model": "scorer", "text_1": "a", "text_2": ["b", "c"]}
        )
        assert [one["score"] for one in scored.json()["data"]] == [0.75, 0.75]
        ranked = await http.post(
            "/rerank", json={"model": "scorer", "query": "a", "documents": ["b", "c"]}
        )
        assert len(ranked.json()["results"]) == 2


async def test_a_text_gets_the_likeliest_class(core: StandInCore) -> None:
    """A model of several classes gives no score."""
    pooled(core, [0.25, 0.75])
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
        found = await http.post("/classify", json={"model": "classifier", "input": "a"})
        scored = await http.post(
            "/score", json={"model": "classifier", "text_1": "a", "text_2": "b"}
        )
    (one,) = found.json()["data"]
    assert (one["label"], one["probs"], one["num_classes"]) == ("bad", [0.25, 0.75], 2)
    assert scored.status_code == 501
    assert "does not support Score API" in scored.json()["error"]["message"]


@pytest.mark.parametrize(
    ("model", "body", "path"),
    [
        ("talker", {"messages": HELLO, "max_tokens": 2}, "/v1/chat/completions"),
        ("talker", {"prompt": "hello", "max_tokens": 2}, "/v1/completions"),
        ("embedder", {"input": "a"}, "/v1/embeddings"),
        ("embedder", {"input": "a", "task": "embed"}, "/pooling"),
        ("scorer", {"text_1": "a", "text_2": "b"}, "/score"),
        ("scorer", {"query": "a", "documents": ["b"]}, "/rerank"),
        ("classifier", {"input": "a"}, "/classify"),
    ],
)
async def test_an_invocation_is_answered_by_the_endpoint_that_it_is_meant_for(
    core: StandInCore, model: str, body: dict[str, Any], path: str
) -> None:
    if model != "talker":
        pooled(core, [0.25, 0.75][: 1 + (model != "scorer")])
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
        invoked = await http.post("/invocations", json={"model": model, **body})
        asked = await http.post(path, json={"model": model, **body})
        nameless = await http.post("/invocations", json={**body, "best_of": 3})
    changing = {"id", "created"}
    assert invoked.status_code == asked.status_code == 200
    assert {k: v for k, v in invoked.json().items() if k not in changing} == {
        k: v for k, v in asked.json().items() if k not in changing
    }
    assert nameless.status_code == 400
    assert nameless.json()["error"]["code"] == "model_missing"


async def test_what_no_endpoint_takes_is_refused_as_vllm_does(core: StandInCore) -> None:
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
        for body in ({"model": "talker"}, [], {"model": "embedder", "messages": 7}):
            answer = await http.post("/invocations", json=body)
            assert answer.status_code == 400, body


async def test_a_tokenizer_is_described(core: StandInCore) -> None:
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
        found = await http.get("/tokenizer_info", params={"model": "talker"})
        nameless = await http.get("/tokenizer_info")
    assert found.json()["tokenizer_class"]
    assert nameless.status_code == 400
    assert nameless.json()["error"]["code"] == "model_missing"


async def test_texts_are_tokenized_and_back(core: StandInCore) -> None:
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
        found = await http.post("/tokenize", json={"model": "talker", "prompt": "hello there"})
        tokens = found.json()["tokens"]
        back = await http.post("/detokenize", json={"model": "talker", "tokens": tokens[1:]})
    assert back.json()["prompt"] == "hello there"
    assert not core.said(Submit)


async def test_a_prompt_may_be_rendered_only(core: StandInCore) -> None:
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
        found = await http.post(
            "/v1/chat/completions/render", json={"model": "talker", "messages": HELLO}
        )
    assert found.status_code == 200
    assert found.json()["token_ids"][0] == 0
    assert not core.said(Submit)


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, "embedder"),
        ("/v1/completions", {"prompt": "a"}, "scorer"),
        ("/v1/responses", {"input": "a"}, "embedder"),
        ("/v1/embeddings", {"input": "a"}, "talker"),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, "talker"),
        ("/classify", {"input": "a"}, "embedder"),
    ],
)
async def test_a_model_that_does_something_else_is_refused_by_name(
    core: StandInCore, path: str, body: dict[str, Any], model: str
) -> None:
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
        answer = await http.post(path, json=body | {"model": model})
    assert answer.status_code == 400
    assert "does not support" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "unsupported_task"


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b'{"model": 3, "messages": []}', b'{"messages": "x", "model": "talker"}', b""],
)
async def test_what_is_no_request_is_refused_in_vllms_words(core: StandInCore, body: bytes) -> None:
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
        answer = await http.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/api/generate"])
@pytest.mark.parametrize(
    "wrong", [b'"metadata": {"x": NaN}', b'"unknown": Infinity', b'"user": "\\ud800"']
)
async def test_what_only_pythons_json_reads_is_no_json(
    core: StandInCore, path: str, wrong: bytes
) -> None:
    """Its fields could not be checked; so it is refused, in the words of the dialect."""
    body = b'{"model": "talker", "prompt": "a", "max_tokens": 1, %s}' % wrong
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
        answer = await http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "not valid JSON" in (error if path == "/api/generate" else error["message"])
    assert not core.said(Submit)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/api/chat"]
)
@pytest.mark.parametrize(
    ("method", "body", "status"),
    [
        ("GET", {}, 405),
        ("POST", {"model": "nobody", "messages": HELLO, "max_tokens": 1}, 404),
        ("POST", {"model": "talker", "messages": HELLO, "user": "x" * (1 << 20)}, 413),
    ],
)
async def test_a_refusal_before_a_model_is_in_the_paths_dialect(
    core: StandInCore, path: str, method: str, body: dict[str, Any], status: int
) -> None:
    """A wrong method, an unknown model, a body that is too large."""
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
        answer = await http.request(method, path, json=body)
    assert answer.status_code == status
    told = answer.json()
    if path == "/api/chat":
        assert isinstance(told["error"], str)
    elif path.startswith("/v1/messages"):
        assert told["type"] == "error"
        kinds = {405: "invalid_request_error", 404: "not_found_error", 413: "request_too_large"}
        assert told["error"]["type"] == kinds[status]
        assert told["error"]["message"]
    else:
        assert told["error"]["message"]
    assert not core.said(Submit)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": HELLO, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "model": None}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 16}),
    ],
)
async def test_no_model_has_to_be_named_where_there_is_one(
    core: StandInCore, models: tuple[FrontModel, ...], path: str, body: dict[str, Any]
) -> None:
    core.change(models[:1])
    try:
        async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
            answer = await http.post(path, json=body)
    finally:
        core.change(models)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == core.said(Submit)[0].model == "talker"


async def test_names_with_and_without_a_tag(core: StandInCore, client: openai.AsyncOpenAI) -> None:
    for asked, model in (("talker:latest", "talker"), ("tagged:7b", "tagged:7b")):
        core.frames.clear()
        answer = await client.completions.create(model=asked, prompt="a", max_tokens=1)
        assert (await core.seen(Submit)).model == answer.model == model
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="tagged", prompt="a", max_tokens=1)


async def test_a_model_has_to_be_named_where_there_are_several(core: StandInCore) -> None:
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
        answer = await http.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"


async def test_a_damaged_tokenizer_is_reported(
    core: StandInCore, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(model="damaged", prompt="a", max_tokens=1)
    assert "damaged" in caught.value.message


@pytest.mark.parametrize("status", [503, 499])
async def test_a_sequence_that_is_given_up_ends_its_stream_with_an_error(
    core: StandInCore, client: openai.AsyncOpenAI, status: int
) -> None:
    """Whatever the status is: 499, of what an operator cancels, is not registered."""
    core.hold_at = lambda submit: 3
    stream = await client.chat.completions.create(
        model="talker", messages=HELLO, max_tokens=9, stream=True
    )
    texts = []

    async def read() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content)
            if len(core.live) and next(iter(core.live.values())).sent == 3:
                core.give_up(next(iter(core.live)), status=status, message="the worker is gone")

    with pytest.raises(openai.APIError, match="the worker is gone"):
        await read()
    assert texts


async def test_a_stream_of_messages_that_is_given_up_ends_with_the_error(
    core: StandInCore,
) -> None:
    """In Anthropic's words, as its client reads them."""
    core.hold_at = lambda submit: 3
    client = anthropic.AsyncAnthropic(base_url=core.url, api_key="none", max_retries=0)
    texts = []

    async def read() -> None:
        async with client.messages.stream(model="talker", messages=HELLO, max_tokens=9) as stream:
            async for text in stream.text_stream:
                texts.append(text)
                if len(core.live) and next(iter(core.live.values())).sent == 3:
                    core.give_up(next(iter(core.live)), message="the worker is gone")

    with pytest.raises(anthropic.APIStatusError) as caught:
        await read()
    assert texts
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"] == {"type": "overloaded_error", "message": "the worker is gone"}


async def test_a_whole_answer_that_is_given_up_is_a_status(
    core: StandInCore, client: openai.AsyncOpenAI
) -> None:
    core.refusing = lambda submit: Refused(
        call=submit.call, request=submit.request, status=504, code="deadline", message="too late"
    )
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(model="talker", messages=HELLO, max_tokens=9)
    assert caught.value.status_code == 504
    assert caught.value.code == "deadline"
