"""Ollama's official client and a real front end: what it sends is understood, what it gets,
readable."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy
import ollama
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

from appliance.demo.checkpoints import train_tokenizer
from appliance.demo.recipes import EOS_ID
from appliance.engines.vllm.messages import decode_request, encode_output
from appliance.service.front_frames import Abort, Entered, FrontModel, Refused, Submit
from appliance.vocabulary import FinishReason, RequestId, Task
from tests.conftest import CHECKPOINT_CONFIG
from tests.frontend.stand_in_core import StandInCore, front_end, made_up
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO: Any = [{"role": "user", "content": "hello"}]
CONTEXT = 200
SYSTEM_AND_USER = "<|bos|><|system|>be brief<|eos|><|user|>hello<|eos|><|assistant|>"
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}"
    "{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    made = train_tokenizer()
    made.add_special_tokens(list(MARKS[:2]))
    made.add_tokens(list(MARKS[2:]))
    return made


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, words: Tokenizer) -> Path:
    """A checkpoint without weights: a front end reads none."""
    path = tmp_path_factory.mktemp("ollama")
    config = CHECKPOINT_CONFIG | {"model_type": "llama", "vocab_size": words.get_vocab_size()}
    config |= {"intermediate_size": 64, "hidden_act": "silu", "eos_token_id": EOS_ID}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID, "top_k": 7}))
    words.save(str(path / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(described))
    return path


def model(name: str, path: Path, task: Task = Task.GENERATE, **parsers: str) -> FrontModel:
    return FrontModel(
        name=name,
        path=str(path),
        dtype="float32",
        max_context=CONTEXT,
        max_batch=8,
        task=task,
        created=1_700_000_000,
        **parsers,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(checkpoint: Path) -> AsyncIterator[StandInCore]:
    models = [
        model("small", checkpoint),
        model("org/thinker", checkpoint, tool_parser="hermes", reasoning_parser="deepseek_r1"),
        model("vectors", checkpoint, Task.EMBED),
    ]
    async with front_end(models, keep_alive_seconds=0.05) as core:
        yield core


@pytest_asyncio.fixture(loop_scope="module")
async def core(served: StandInCore) -> AsyncIterator[StandInCore]:
    """The core, as it decides when nothing is said."""
    served.frames.clear()
    served.saying = lambda submit: made_up(submit.prompt, min(submit.max_tokens, 5))
    served.ending = lambda submit: FinishReason.STOP
    served.entering = lambda enter: Entered(call=enter.call)
    served.refusing = lambda submit: None
    served.hold_at = lambda submit: None
    served.details = None
    yield served


@pytest_asyncio.fixture(loop_scope="module")
async def client(core: StandInCore) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(core.url) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def http(core: StandInCore) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as client:
        yield client


def says(core: StandInCore, words: Tokenizer, text: str) -> None:
    """Every answer is `text`, and the token that says stop if it ends so."""
    tokens = words.encode(text, add_special_tokens=False).ids
    core.saying = lambda submit: (
        [*tokens, EOS_ID] if core.ending(submit) is FinishReason.STOP else tokens
    )


def submitted(core: StandInCore) -> Submit:
    return core.said(Submit)[-1]


def prompt(core: StandInCore, words: Tokenizer) -> str:
    return str(words.decode(list(submitted(core).prompt), skip_special_tokens=False))


def sampling(core: StandInCore) -> SamplingParams:
    return decode_request(submitted(core).body).sampling_params


# --- chats ---------------------------------------------------------------------------------------


async def test_a_chat(client: ollama.AsyncClient, core: StandInCore, words: Tokenizer) -> None:
    """A chat is rendered by the template, answered, counted and timed."""
    says(core, words, "one two")
    messages: Any = [{"role": "system", "content": "be brief"}, *HELLO]
    answer = await client.chat("small", messages, options={"num_predict": 9}, keep_alive="5m")

    assert (
        prompt(core, words) == "<|bos|><|system|>be brief<|eos|><|user|>hello<|eos|><|assistant|>"
    )
    assert submitted(core).max_tokens == 9
    assert (answer.model, answer.done, answer.done_reason) == ("small", True, "stop")
    assert (answer.message.role, answer.message.content) == ("assistant", "one two")
    assert answer.prompt_eval_count == len(submitted(core).prompt)
    assert answer.eval_count == len(words.encode("one two", add_special_tokens=False).ids) + 1
    assert answer.eval_duration == 1_000_000
    assert answer.total_duration is not None
    assert answer.total_duration > answer.eval_duration


async def test_a_streamed_chat(
    client: ollama.AsyncClient, core: StandInCore, words: Tokenizer
) -> None:
    """Text in pieces that are not done, then one that is, with the metrics and no text."""
    says(core, words, "one 🙂 two")
    core.ending = lambda submit: FinishReason.LENGTH
    *parts, last = [part async for part in await client.chat("small", HELLO, stream=True)]

    assert "".join(part.message.content or "" for part in parts) == "one 🙂 two"
    assert {(part.done, part.done_reason, part.eval_count) for part in parts} == {
        (False, None, None)
    }
    assert (last.done, last.done_reason, last.message.content) == (True, "length", "")
    assert last.eval_count == len(words.encode("one 🙂 two", add_special_tokens=False).ids)
    assert last.eval_duration == 1_000_000


async def test_an_answer_can_be_sent_back(
    client: ollama.AsyncClient, core: StandInCore, words: Tokenizer
) -> None:
    """The message of an answer is accepted as part of the next request."""
    says(core, words, "one two")
    first = await client.chat("small", HELLO)
    await client.chat("small", [*HELLO, first.message, *HELLO])

    assert "<|assistant|>one two<|eos|><|user|>" in prompt(core, words)


async def test_a_tag_is_understood(client: ollama.AsyncClient, core: StandInCore) -> None:
    """A name is also known with the tag that Ollama's clients add, in every endpoint."""
    answer = await client.chat("org/thinker:latest", HELLO)
    generated = await client.generate("small:latest", "hello")
    embedded = await client.embed("vectors:latest", [])

    assert answer.model == "org/thinker:latest"
    assert (generated.done, embedded.embeddings) == (True, [])
    assert [submit.model for submit in core.said(Submit)] == ["org/thinker", "small"]


async def test_unknown_fields_are_ignored(http: httpx.AsyncClient, core: StandInCore) -> None:
    """As Ollama does; null is as good as nothing."""
    body: dict[str, Any] = {"model": "small", "stream": False, "nonsense": 1, "tools": None}
    body |= {"messages": [{"role": "User", "content": "hello", "name": "x"}], "format": None}
    body |= {"options": {"nonsense": 1, "num_gpu": 1, "mirostat": 2}, "shift": True}
    answer = await http.post("/api/chat", json=body)

    assert answer.status_code == 200, answer.text


async def test_a_strict_front_end_refuses_them(checkpoint: Path) -> None:
    """With `api.strict` what Ollama does not know is refused by name; what it knows is not."""
    async with (
        front_end([model("small", checkpoint)], strict=True) as core,
        httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http,
    ):
        body: dict[str, Any] = {"model": "small", "prompt": "hello", "stream": False}
        body["options"] = {"num_gpu": 1, "num_predict": 2}
        known = await http.post("/api/generate", json=body)
        field = await http.post("/api/generate", json=body | {"nonsense": 1})
        option = await http.post("/api/generate", json=body | {"options": {"nonsense": 1}})

    assert known.status_code == 200, known.text
    assert (field.status_code, option.status_code) == (400, 400)
    assert field.json()["error"].startswith("nonsense: ")
    assert option.json()["error"].startswith("options.nonsense: ")


# --- options -------------------------------------------------------------------------------------


async def test_options_arrive(client: ollama.AsyncClient, core: StandInCore) -> None:
    """Every option that shapes the sampling reaches the engine, in vLLM's words."""
    options: dict[str, Any] = {"temperature": 2.5, "top_k": 4, "top_p": 0.25, "min_p": 0.125}
    options |= {"seed": -5, "num_predict": 11, "repeat_penalty": 1.5, "repeat_last_n": 64}
    options |= {"presence_penalty": 1.0, "frequency_penalty": -1.0, "stop": ["zzz", ""]}
    await client.chat("small", HELLO, options=options)

    drawn = sampling(core)
    assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p) == (2.0, 4, 0.25, 0.125)
    assert (drawn.seed, drawn.max_tokens, drawn.stop) == (-5, 11, ["zzz"])
    assert drawn.repetition_penalty == 1.5
    assert (drawn.presence_penalty, drawn.frequency_penalty) == (1.0, -1.0)


async def test_defaults_are_the_models_then_ollamas(
    client: ollama.AsyncClient, core: StandInCore
) -> None:
    """What the checkpoint recommends goes before Ollama's defaults."""
    await client.chat("small", HELLO)

    drawn = sampling(core)
    assert (drawn.temperature, drawn.top_k, drawn.top_p) == (0.8, 7, 0.9)
    assert (drawn.seed, drawn.repetition_penalty) == (None, 1.0)


@pytest.mark.parametrize("limit", [0, -1, -2, 5000])
async def test_without_a_limit_the_context_is_one(
    client: ollama.AsyncClient, core: StandInCore, limit: int
) -> None:
    """No limit, or one that is beyond the context, ends with the context."""
    await client.chat("small", HELLO, options={"num_predict": limit})

    assert submitted(core).max_tokens == CONTEXT - len(submitted(core).prompt)


async def test_a_context_beyond_the_models_is_accepted(
    client: ollama.AsyncClient, core: StandInCore
) -> None:
    """Ollama warns, and takes what the model has."""
    await client.chat("small", HELLO, options={"num_ctx": 1_000_000, "top_p": 0})

    assert sampling(core).top_k == 1


@pytest.mark.parametrize("raw", [False, True])
async def test_a_format_guides_the_answer(
    client: ollama.AsyncClient, core: StandInCore, raw: bool
) -> None:
    """Any object of JSON, or what a schema allows, of templates and of raw prompts."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await client.generate("small", "hello", raw=raw, format="json")
    anything = sampling(core).structured_outputs
    await client.generate("small", "hello", raw=raw, format=schema)
    exact = sampling(core).structured_outputs

    assert anything.json_object
    assert exact.json == schema
    assert submitted(core).guide


# --- prompts that are too long -------------------------------------------------------------------


async def test_a_long_chat_loses_its_oldest_messages(
    client: ollama.AsyncClient, core: StandInCore, words: Tokenizer
) -> None:
    """The system's message and the last one stay."""
    chat: list[Any] = [{"role": "system", "content": "be brief"}]
    for i in range(40):
        chat += [{"role": "user", "content": f"question {i}"}]
        chat += [{"role": "assistant", "content": f"answer {i}"}]
    await client.chat("small", [*chat, {"role": "user", "content": "the last one"}])

    kept = prompt(core, words)
    assert kept.startswith("<|bos|><|system|>be brief<|eos|><|user|>question ")
    assert kept.endswith("<|user|>the last one<|eos|><|assistant|>")
    assert "question 1<" not in kept
    assert "question 39<" in kept
    # One pair of messages more would not have fitted.
    assert CONTEXT - 40 < len(submitted(core).prompt) < CONTEXT


async def test_a_small_num_ctx_cuts_more(
    client: ollama.AsyncClient, core: StandInCore, words: Tokenizer
) -> None:
    """The client's own context is obeyed."""
    chat: Any = [
        {"role": role, "content": f"{role} {i} says something"}
        for i in range(4)
        for role in ("user", "assistant")
    ]
    await client.chat("small", [*chat, *HELLO], options={"num_ctx": 40})

    assert len(submitted(core).prompt) < 40
    assert prompt(core, words).endswith("<|user|>hello<|eos|><|assistant|>")


async def test_steps_of_one_turn_are_dropped_too(
    client: ollama.AsyncClient, core: StandInCore, words: Tokenizer
) -> None:
    """An agent's only question may be long ago: what goes is its oldest calls and results."""
    call = {"function": {"name": "look", "arguments": {"at": 1}}}
    chat: list[Any] = [{"role": "system", "content": "be brief"}, *HELLO]
    for i in range(30):
        chat += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        chat += [{"role": "tool", "tool_name": "look", "content": f"seen {i}"}]
    await client.chat("org/thinker", chat)

    kept = prompt(core, words)
    assert kept.startswith("<|bos|><|system|>be brief<|eos|><|assistant|>[call_")
    assert "seen 29#call_60_0" in kept


async def test_a_last_message_that_is_too_long_loses_its_beginning(
    client: ollama.AsyncClient, core: StandInCore, words: Tokenizer
) -> None:
    long = " ".join(f"word {i}" for i in range(300))
    await client.chat("small", [{"role": "user", "content": long}])
    chatted, of_chat = prompt(core, words), submitted(core)
    await client.generate("small", long, raw=True)
    raw, of_raw = prompt(core, words), submitted(core)

    assert chatted.endswith("word 299<|eos|><|assistant|>")
    assert raw.endswith("word 299")
    assert (len(of_chat.prompt), len(of_raw.prompt)) == (CONTEXT - 1, CONTEXT - 1)


@pytest.mark.parametrize("raw", [False, True])
async def test_who_wants_nothing_cut_is_refused(http: httpx.AsyncClient, raw: bool) -> None:
    """`truncate: false` refuses, in Ollama's words; `true` is what happens anyway."""
    body: dict[str, Any] = {"model": "small", "raw": raw, "prompt": "hello " * 300}
    refused = await http.post("/api/generate", json=body | {"truncate": False})
    cut = await http.post("/api/generate", json=body | {"truncate": True, "stream": False})

    assert refused.status_code == 400
    assert refused.json() == {"error": "the input length exceeds the context length"}
    assert cut.status_code == 200, cut.text


# --- generating ----------------------------------------------------------------------------------


async def test_generating(client: ollama.AsyncClient, core: StandInCore, words: Tokenizer) -> None:
    """A prompt is a chat of one message, behind a system message if there is one."""
    says(core, words, "one two")
    answer = await client.generate("small", "hello", system="be brief")
    whole = prompt(core, words)
    stream = await client.generate("small", "hello", stream=True)
    texts = [part.response async for part in stream]

    assert whole == SYSTEM_AND_USER
    assert prompt(core, words) == "<|bos|><|user|>hello<|eos|><|assistant|>"
    assert (answer.response, answer.done_reason) == ("one two", "stop")
    assert "".join(text or "" for text in texts) == "one two"


async def test_generating_raw(
    client: ollama.AsyncClient, core: StandInCore, words: Tokenizer
) -> None:
    """A raw prompt goes to the model as it is, and may be continued to the end of the context."""
    await client.generate("small", "hello", raw=True)

    assert prompt(core, words) == "<|bos|>hello"
    assert submitted(core).max_tokens == CONTEXT - len(submitted(core).prompt)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_context_goes_on(
    client: ollama.AsyncClient, core: StandInCore, words: Tokenizer, stream: bool
) -> None:
    """An answer tells the tokens of the conversation, which the next request gives back."""
    says(core, words, "one two")
    asked: Any = {"stream": stream}
    first: Any = await client.generate("small", "hello", **asked)
    context = [part async for part in first][-1].context if stream else first.context
    assert context == [*submitted(core).prompt, *core.saying(submitted(core))]

    await client.generate("small", "again", context=context)
    assert prompt(core, words) == (
        "<|bos|><|user|>hello<|eos|><|assistant|>one two<|eos|><|user|>again<|eos|><|assistant|>"
    )
    with pytest.raises(ollama.ResponseError, match=r"context: the model has no token 99999"):
        await client.generate("small", "again", context=[99999])


async def test_a_template_of_the_clients_own(
    client: ollama.AsyncClient, core: StandInCore, words: Tokenizer
) -> None:
    """Variables and conditions of Go's templates are obeyed; what loops is refused by name."""
    template = "{{ if .System }}S: {{ .System }} {{ end }}U: {{ .Prompt }} A: {{ .Response }}."
    await client.generate("small", "hello", system="be brief", template=template)

    assert prompt(core, words) == "<|bos|>S: be brief U: hello A: "
    with pytest.raises(ollama.ResponseError, match=r"range \.Messages.* is not supported"):
        await client.generate("small", "x", template="{{ range .Messages }}{{ end }}")


async def test_a_suffix_needs_a_model_that_fills_in(client: ollama.AsyncClient) -> None:
    """Most cannot."""
    with pytest.raises(ollama.ResponseError, match='"small" does not support insert') as refused:
        await client.generate("small", "def f(", suffix="return 1")

    assert refused.value.status_code == 400


@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [(None, "load"), ("5m", "load"), (-1, "load"), (0, "unload"), ("0s", "unload")],
)
async def test_a_request_without_a_prompt(
    client: ollama.AsyncClient, core: StandInCore, keep_alive: Any, reason: str
) -> None:
    """It only concerns where the model is: answered at once, nothing is generated."""
    said = await client.generate("small", keep_alive=keep_alive)
    chatted = await client.chat("small", keep_alive=keep_alive)

    assert (said.done, said.done_reason, said.response) == (True, reason, "")
    assert (chatted.done, chatted.done_reason, chatted.message.content) == (True, reason, "")
    assert core.said(Submit) == []


@pytest.mark.parametrize("endpoint", ["chat", "generate", "raw"])
@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(
    client: ollama.AsyncClient, core: StandInCore, words: Tokenizer, endpoint: str, stream: bool
) -> None:
    """Every token comes with its log probability and the top ones asked for."""
    says(core, words, "one two")
    core.details = with_logprobs
    asked: Any = {"logprobs": True, "top_logprobs": 2, "stream": stream}
    if endpoint == "chat":
        answer: Any = await client.chat("small", HELLO, **asked)
    else:
        answer = await client.generate("small", "hello", raw=endpoint == "raw", **asked)
    parts = [part async for part in answer] if stream else [answer]

    tokens = [token for part in parts for token in part.logprobs or ()]
    assert "".join(token.token for token in tokens).startswith("one two")
    tops = {tuple(top.logprob for top in token.top_logprobs or ()) for token in tokens}
    assert tops == {(-1.0, -2.0)}


def with_logprobs(submit: Submit, tokens: list[int]) -> list[bytes]:
    """The token itself, and token 300, are the likeliest."""
    (token,) = tokens
    logprobs = LogprobsLists(
        numpy.array([[token, token, 300]]),
        numpy.array([[-1.0, -1.0, -2.0]], dtype=numpy.float32),
        numpy.array([1]),
    )
    return [encode_output(EngineCoreOutput(submit.request, tokens, new_logprobs=logprobs))]


# --- tools and thoughts --------------------------------------------------------------------------


def weather(city: str) -> str:
    """Tells it.

    Args:
      city: Where.
    """
    return city


CALLS = (
    'hm</think>so: <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
)


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_and_thoughts(
    client: ollama.AsyncClient, core: StandInCore, words: Tokenizer, stream: bool
) -> None:
    """Calls have objects for arguments, and come whole; thoughts have a field of their own."""
    says(core, words, CALLS)
    asked: Any = {"tools": [weather], "stream": stream}
    answer: Any = await client.chat("org/thinker", HELLO, **asked)
    parts = [part async for part in answer] if stream else [answer]

    assert prompt(core, words).startswith("<|bos|>[weather]<|user|>hello")
    assert "".join(part.message.thinking or "" for part in parts) == "hm"
    assert "".join(part.message.content or "" for part in parts).strip() == "so:"
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", {"city": "Rome"}),
        ("weather", {}),
    ]
    assert parts[-1].done_reason == "stop"


async def test_results_go_back(
    client: ollama.AsyncClient, core: StandInCore, words: Tokenizer
) -> None:
    """Ollama's clients keep no ids: results get those of the calls of their tool, in order."""
    calls: Any = [
        {"function": {"name": "weather", "arguments": {"city": "Rome"}}},
        {"function": {"name": "weather", "arguments": {}}},
    ]
    history: Any = [
        *HELLO,
        {"role": "assistant", "content": "so: ", "tool_calls": calls},
        {"role": "tool", "content": "sunny", "tool_name": "weather"},
        {"role": "tool", "content": "nowhere"},
        {"role": "tool", "content": "else"},
    ]
    await client.chat("org/thinker", history)

    told = prompt(core, words)
    assert '[call_1_0 weather {"city": "Rome"}][call_1_1 weather {}]' in told
    assert "sunny#call_1_0<" in told
    assert "nowhere#call_1_1<" in told
    assert "else<" in told


@pytest.mark.parametrize(
    ("think", "ending"),
    [
        (None, "<|assistant|>"),
        (True, "<|assistant|>"),
        (False, "<|assistant|><think></think>"),
        ("high", "<|assistant|>(high)"),
    ],
)
async def test_how_much_a_model_thinks(
    client: ollama.AsyncClient, core: StandInCore, words: Tokenizer, think: Any, ending: str
) -> None:
    """What is asked reaches the template."""
    await client.chat("org/thinker", HELLO, think=think)

    assert prompt(core, words).endswith("<|eos|>" + ending)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"tools": [weather]}, "registry.ollama.ai/library/small:latest does not support tools"),
        ({"think": True}, '"small" does not support thinking'),
        ({"think": "high"}, '"small" does not support thinking'),
    ],
)
async def test_what_a_model_cannot(
    client: ollama.AsyncClient, asked: dict[str, Any], why: str
) -> None:
    """It is refused in the words that clients match; `think: false` is what it does anyway."""
    with pytest.raises(ollama.ResponseError) as refused:
        await client.chat("small", HELLO, **asked)
    await client.chat("small", HELLO, think=False)

    assert (refused.value.status_code, refused.value.error) == (400, why)


async def test_images_are_refused_by_name(client: ollama.AsyncClient) -> None:
    picture = base64.b64encode(b"no picture").decode()
    with pytest.raises(ollama.ResponseError, match=r"messages\[0\]\.images") as refused:
        await client.chat("small", [{"role": "user", "content": "look", "images": [picture]}])
    with pytest.raises(ollama.ResponseError, match="does not support vision: images"):
        await client.generate("small", "look", images=[picture])

    assert refused.value.status_code == 400


# --- vectors -------------------------------------------------------------------------------------


def pooled(submit: Submit, tokens: list[int]) -> list[bytes]:
    vector = torch.tensor([0.5, -0.25])
    return [encode_output(EngineCoreOutput(submit.request, [], pooling_output=vector))]


async def test_vectors(client: ollama.AsyncClient, core: StandInCore) -> None:
    """Texts, counts and durations; the older endpoint has one text."""
    core.details = pooled
    core.saying = lambda submit: []
    several = await client.embed("vectors", ["hello", "one two"])
    tokens = sum(len(submit.prompt) for submit in core.said(Submit))
    old = await client.embeddings("vectors", "hello")

    assert [list(vector) for vector in several.embeddings] == [[0.5, -0.25]] * 2
    assert several.prompt_eval_count == tokens
    assert several.total_duration is not None
    assert list(old.embedding) == [0.5, -0.25]


async def test_a_long_text_is_cut(client: ollama.AsyncClient, core: StandInCore) -> None:
    """The beginning is taken, unless the client wants nothing cut."""
    core.details = pooled
    core.saying = lambda submit: []
    await client.embed("vectors", "hello " * 400)
    with pytest.raises(ollama.ResponseError, match="input length exceeds the context") as refused:
        await client.embed("vectors", "hello " * 400, truncate=False)

    assert len(core.said(Submit)[0].prompt) == CONTEXT
    assert refused.value.status_code == 400


async def test_models_have_one_task(client: ollama.AsyncClient) -> None:
    """In Ollama's words, and with its statuses."""
    with pytest.raises(ollama.ResponseError, match="model does not support embeddings") as vectors:
        await client.embed("small", "hello")
    with pytest.raises(ollama.ResponseError, match='"vectors" does not support chat') as text:
        await client.chat("vectors", HELLO)

    assert (vectors.value.status_code, text.value.status_code) == (501, 400)


# --- errors, waiting, leaving --------------------------------------------------------------------


async def test_errors_are_ollamas(
    client: ollama.AsyncClient, http: httpx.AsyncClient, core: StandInCore
) -> None:
    """A sentence under its status."""
    with pytest.raises(ollama.ResponseError) as missing:
        await client.chat("none:latest", HELLO)
    core.entering = lambda enter: Entered(call=enter.call, models=("small",))
    with pytest.raises(ollama.ResponseError) as hidden:
        await client.chat("org/thinker", HELLO)
    unnamed = await http.post("/api/chat", json={"messages": HELLO})
    broken = await http.post("/api/chat", content=b"{")
    wrong = await http.post("/api/chat", json={"model": "small", "format": "xml"})
    absent = await http.post("/api/chat", json={"model": "small", "keep_alive": "soon"})

    assert (missing.value.status_code, hidden.value.status_code) == (404, 404)
    assert missing.value.error == "model 'none:latest' not found"
    assert hidden.value.error == "model 'org/thinker' not found"
    assert (unnamed.status_code, unnamed.json()) == (400, {"error": "model is required"})
    assert broken.status_code == 400
    assert "not valid JSON" in broken.json()["error"]
    assert wrong.json()["error"].startswith("format: 'xml'")
    assert absent.json()["error"].startswith("keep_alive: 'soon'")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_the_core(
    http: httpx.AsyncClient, core: StandInCore, stream: bool
) -> None:
    """It is a status and a sentence, also where a stream was asked for."""
    core.refusing = lambda submit: Refused(
        call=submit.call,
        request=submit.request,
        status=429,
        code="queue_full",
        message="the queue is full",
        headers=(("Retry-After", "3"),),
    )
    body = {"model": "small", "messages": HELLO, "stream": stream}
    answer = await http.post("/api/chat", json=body)

    assert (answer.status_code, answer.json()) == (429, {"error": "the queue is full"})
    assert answer.headers["retry-after"] == "3"


async def test_a_failure_in_a_stream_is_its_last_line(
    client: ollama.AsyncClient, core: StandInCore, words: Tokenizer
) -> None:
    """Text that came before the failure is delivered; then the client raises."""
    says(core, words, "one two three")
    core.hold_at = lambda submit: 1
    stream = await client.chat("small", HELLO, stream=True)
    first = await anext(stream)
    core.give_up(RequestId(submitted(core).request), message="sorry")
    with pytest.raises(ollama.ResponseError, match="sorry"):
        await anext(stream)

    assert first.message.content


async def test_a_waiting_stream_is_kept_alive(
    http: httpx.AsyncClient, core: StandInCore, words: Tokenizer
) -> None:
    """Blanks go out, which no reader of JSON sees, and no line is added."""
    says(core, words, "one two")
    core.hold_at = lambda submit: 0
    body = {"model": "small", "prompt": "hello"}
    async with http.stream("POST", "/api/generate", json=body) as answer:
        chunks = answer.aiter_bytes()
        blanks = [await anext(chunks) for _ in range(2)]
        core.go_on()
        rest = b"".join([chunk async for chunk in chunks])

    assert answer.headers["content-type"].startswith("application/x-ndjson")
    assert b"".join(blanks).strip() == b""
    lines = [json.loads(line) for line in rest.splitlines()]
    assert "".join(line["response"] for line in lines) == "one two"


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_cancels(core: StandInCore, words: Tokenizer, stream: bool) -> None:
    """A client that has had enough takes its request with it."""
    says(core, words, "one two three")
    core.hold_at = lambda submit: 1
    body = {"model": "small", "messages": HELLO, "stream": stream}
    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as leaving:
        asking = asyncio.create_task(leaving.post("/api/chat", json=body))
        asked = await core.seen(Submit)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    abort = await core.seen(Abort)

    assert (abort.requests, abort.reason) == ([asked.request], FinishReason.CANCELLED)
