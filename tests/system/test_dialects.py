"""Anthropic's and Ollama's official clients against the real daemon: what an application sees."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import ollama
import openai
import pytest
from pydantic import BaseModel

from tests.system.conftest import EMBEDDER, HERMES, THINKER, Appliance, until

HELLO: Any = [{"role": "user", "content": "Hello, river"}]
LONG = 700
GREEDY = {"temperature": 0.0, "num_predict": 24}


def message(claude: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    """A greedy answer."""
    asked: dict[str, Any] = {"model": "qwen3-a", "max_tokens": 24, "messages": HELLO}
    answer: anthropic.types.Message = claude.messages.create(
        **(asked | fields), extra_body={"temperature": 0}
    )
    return answer


def text_of(answer: anthropic.types.Message) -> str:
    (block,) = answer.content
    assert block.type == "text"
    return block.text


def test_all_dialects_say_the_same(
    client: openai.OpenAI, claude: anthropic.Anthropic, llama: ollama.Client
) -> None:
    """One chat, one text, one count of tokens, whole or streamed, in every dialect."""
    asked = client.chat.completions.create(
        model="qwen3-a", messages=HELLO, max_tokens=24, temperature=0
    )
    with claude.messages.stream(
        model="qwen3-a", max_tokens=24, messages=HELLO, extra_body={"temperature": 0}
    ) as stream:
        streamed = stream.get_final_message()
    whole = message(claude)
    chatted = llama.chat("qwen3-a", HELLO, options=GREEDY)
    lines = list(llama.chat("qwen3-a:latest", HELLO, options=GREEDY, stream=True))
    generated = llama.generate("qwen3-a", "Hello, river", options=GREEDY)

    text, usage = asked.choices[0].message.content, asked.usage
    assert text
    assert usage is not None
    assert text_of(whole) == text_of(streamed) == text
    assert chatted.message.content == generated.response == text
    assert "".join(line.message.content or "" for line in lines) == text
    counts = (usage.prompt_tokens, usage.completion_tokens)
    for answer in (whole, streamed):
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == counts
        assert answer.stop_reason == "max_tokens"
    for last in (chatted, lines[-1], generated):
        assert (last.prompt_eval_count, last.eval_count) == counts
        assert last.done_reason == "length"
        assert last.total_duration
        assert last.eval_duration


def test_embeddings_among_chats(
    client: openai.OpenAI, claude: anthropic.Anthropic, llama: ollama.Client
) -> None:
    """Vectors are the same in every dialect, and after other models had the memory."""
    texts = ["Hello, river", "The quick brown fox. " * 20, "one"]
    first = llama.embed(EMBEDDER, texts)
    for model in ("llama-a", "llama-b", "llama-c", "qwen2-a", "qwen2-b"):
        message(claude, model=model)
    again = client.embeddings.create(model=EMBEDDER, input=texts)
    with pytest.raises(openai.BadRequestError, match="does not support Chat Completions API"):
        client.chat.completions.create(model=EMBEDDER, messages=HELLO)

    assert first.prompt_eval_count == again.usage.prompt_tokens
    assert len({tuple(vector) for vector in first.embeddings}) == 3
    for one, other in zip(first.embeddings, again.data, strict=True):
        assert len(one) == 256
        assert sum(x * x for x in one) == pytest.approx(1)
        assert other.embedding == pytest.approx(one, abs=1e-5)


def test_counted_tokens_are_those_of_the_usage(claude: anthropic.Anthropic) -> None:
    """What is counted beforehand is what the answer's usage says."""
    asked: Any = {"model": "llama-a", "messages": HELLO, "system": "Be brief."}
    counted = claude.messages.count_tokens(**asked)

    assert counted.input_tokens == message(claude, **asked).usage.input_tokens


def test_stop_sequence(claude: anthropic.Anthropic) -> None:
    """Text ends before a stop sequence, which is named."""
    whole = text_of(message(claude, model="llama-c"))
    stop = whole[9:13]
    cut = message(claude, model="llama-c", stop_sequences=["nowhere to be found", stop])

    assert text_of(cut) == whole[: whole.index(stop)]
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


class Stay(BaseModel):
    """What an answer has to be; it ends by itself."""

    city: Literal["Rome", "Bonn"]
    nights: Literal[1, 2, 3]


def test_an_answer_of_a_schema(claude: anthropic.Anthropic, llama: ollama.Client) -> None:
    """Models of random weights give what is asked for, in both dialects' ways of asking."""
    schema = Stay.model_json_schema()
    chatted = llama.chat(
        "qwen2-a", HELLO, format=schema, options={"num_predict": LONG, "seed": 1}
    ).message.content
    answer = claude.messages.create(
        model="llama-b",
        max_tokens=LONG,
        messages=HELLO,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )

    assert Stay.model_validate_json(chatted or "")
    assert Stay.model_validate_json(text_of(answer))


def test_tools_that_have_to_be_called(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    """Models of random weights call them with what their schema allows, in the dialects that can
    ask for it."""
    schema = Stay.model_json_schema()
    asked: Any = {"model": HERMES, "max_tokens": LONG, "extra_body": {"temperature": 0}}
    asked |= {"tools": [{"name": "book", "input_schema": schema, "strict": True}]}
    single = {"type": "any", "disable_parallel_tool_use": True}
    with claude.messages.stream(**asked, messages=HELLO, tool_choice=single) as stream:
        answer = stream.get_final_message()
    tool: Any = {"type": "function", "name": "book", "parameters": schema, "strict": True}
    response = client.responses.create(
        model=HERMES,
        input="Hello, river",
        tools=[tool],
        tool_choice={"type": "function", "name": "book"},
        max_output_tokens=LONG,
    )

    (used,) = answer.content
    assert used.type == "tool_use"
    assert (used.name, answer.stop_reason) == ("book", "tool_use")
    assert Stay.model_validate(used.input)
    (called,) = response.output
    assert called.type == "function_call"
    assert Stay.model_validate_json(called.arguments)


def test_models(appliance: Appliance, llama: ollama.Client) -> None:
    """The catalogue with what the checkpoints say; what runs, with what it takes."""
    llama.generate("llama-a", "x", options={"num_predict": 1})
    listed = {model.model: model for model in llama.list().models}
    running = {model.model: model for model in llama.ps().models}
    shown = llama.show("qwen2-a")

    names = [configured.name for configured in appliance.config.models]
    assert set(listed) == {f"{name}:latest" for name in names}
    assert llama.show(EMBEDDER).capabilities == ["embedding"]
    assert llama.show(THINKER).capabilities == ["completion", "tools", "thinking"]
    assert all(model.size for model in listed.values())
    assert len({model.digest for model in listed.values()}) == len(listed)
    assert (running["llama-a:latest"].size or 0) >= (listed["llama-a:latest"].size or 0)
    assert shown.details is not None
    assert shown.details.family == "qwen2"
    (configured,) = (m for m in appliance.config.models if m.name == "qwen2-a")
    assert shown.modelinfo is not None
    assert shown.modelinfo["qwen2.context_length"] == configured.max_context


def test_errors(claude: anthropic.Anthropic, llama: ollama.Client) -> None:
    """An unknown model and a prompt that is too long, as each client tells of them. An over-long
    chat of Ollama's loses its beginning."""
    long: Any = [{"role": "user", "content": "river " * 3000}]
    with pytest.raises(anthropic.NotFoundError):
        message(claude, model="claude-9")
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        message(claude, messages=long)
    with pytest.raises(ollama.ResponseError, match="model 'gpt' not found") as missing:
        llama.chat("gpt", HELLO)
    cut = llama.chat("qwen3-a", long, options=GREEDY)

    assert missing.value.status_code == 404
    assert cut.prompt_eval_count is not None
    assert cut.prompt_eval_count < 1024


def test_a_message_batch_says_the_same(claude: anthropic.Anthropic) -> None:
    """What each request is answered is what HTTP answers it, or refuses it with."""
    batches = claude.messages.batches
    asked: Any = {"max_tokens": 8, "messages": HELLO, "temperature": 0}
    models = ("qwen3-a", "llama-b", "claude-9")
    made = batches.create(
        requests=[{"custom_id": model, "params": asked | {"model": model}} for model in models]
    )
    until(lambda: batches.retrieve(made.id).processing_status == "ended")
    *good, bad = batches.results(made.id)

    assert [line.custom_id for line in good] == list(models[:2])
    for line in good:
        assert line.result.type == "succeeded"
        direct = message(claude, model=line.custom_id, max_tokens=8)
        batched = line.result.message
        assert (text_of(batched), batched.usage) == (text_of(direct), direct.usage)
    assert bad.result.type == "errored"
    assert bad.result.error.error.type == "not_found_error"
    assert batches.delete(made.id).id == made.id


def test_hanging_up_cancels(
    appliance: Appliance, claude: anthropic.Anthropic, llama: ollama.Client
) -> None:
    """A client that leaves its stream takes its request with it, in every dialect."""
    until(lambda: not appliance.busy("llama-b"))
    before = appliance.cancelled("llama-b")
    with claude.messages.stream(
        model="llama-b", max_tokens=900, messages=HELLO, extra_body={"temperature": 0}
    ) as stream:
        next(iter(stream.text_stream))
    until(lambda: appliance.cancelled("llama-b") >= before + 1)
    endless = GREEDY | {"num_predict": 900}
    lines: Any = llama.chat("llama-b", HELLO, stream=True, options=endless)
    next(lines)
    lines.close()
    until(lambda: appliance.cancelled("llama-b") >= before + 2)

    assert not appliance.busy("llama-b")
