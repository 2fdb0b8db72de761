"""Anthropic's client: messages, their streams and their tools."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.conftest import BOOKED, SCHEMA, SMALL, WORDY, Appliance, Stay
from tests.docblocks import code_blocks
from tests.parrot import ANSWER, THOUGHT
from tests.patience import PATIENCE_SECONDS

HELLO: Any = [{"role": "user", "content": "Hello, river"}]
TOOL: Any = {"name": "book", "input_schema": SCHEMA}
ASKED: Any = {"model": SMALL, "max_tokens": 1500, "messages": HELLO}


@pytest.fixture
def claude(appliance: Appliance) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=appliance.url, api_key="unused", max_retries=0) as made:
        yield made


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_recipe(recipe: Callable[..., str], run: Callable[..., str]) -> None:
    assert ANSWER in run("python", "-c", recipe(code_blocks("docs/recipes/anthropic.md", "python")))


def test_messages(claude: anthropic.Anthropic) -> None:
    """Whole or streamed: one text, one usage; tokens counted beforehand are those."""
    asked = ASKED | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    counted = claude.messages.count_tokens(model=SMALL, messages=HELLO)

    for message in (whole, streamed):
        assert text_of(message) == ANSWER
        assert message.content[0].thinking == THOUGHT
        assert message.stop_reason == "end_turn"
        assert message.usage.input_tokens == counted.input_tokens
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tools(claude: anthropic.Anthropic, stream: bool) -> None:
    def said(**fields: Any) -> Any:
        asked = ASKED | {"tools": [TOOL]} | fields
        if not stream:
            return claude.messages.create(**asked)
        with claude.messages.stream(**asked) as events:
            return events.get_final_message()

    both = said()
    one = said(tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    calls = [block for block in both.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "done"} for call in calls]
    chat = [*HELLO, {"role": "assistant", "content": both.content}]
    end = said(messages=[*chat, {"role": "user", "content": results}])

    assert both.stop_reason == "tool_use"
    assert [Stay.model_validate(call.input) for call in calls] == BOOKED
    assert [block.type for block in one.content].count("tool_use") == 1
    assert text_of(end) == ANSWER


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "book"}])
def test_tools_that_must_be_called(claude: anthropic.Anthropic, choice: Any) -> None:
    message = claude.messages.create(
        **ASKED | {"model": WORDY}, tools=[TOOL | {"strict": True}],
        tool_choice=choice | {"disable_parallel_tool_use": True},
    )  # fmt: skip

    (call,) = message.content
    assert call.type == "tool_use"
    Stay.model_validate(call.input)


def test_structured_output(claude: anthropic.Anthropic) -> None:
    message = claude.messages.parse(**ASKED, output_format=Stay)

    assert isinstance(message.parsed_output, Stay)


def test_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(**ASKED | {"model": "claude-9"})
    with pytest.raises(anthropic.BadRequestError) as bad:
        claude.messages.create(**ASKED | {"max_tokens": 0})

    body: Any = unknown.value.body
    assert body["error"]["type"] == "not_found_error"
    assert "max_tokens" in str(bad.value)


def test_message_batches(claude: anthropic.Anthropic) -> None:
    batches = claude.messages.batches
    asked: Any = [
        {"custom_id": "good", "params": ASKED},
        {"custom_id": "bad", "params": ASKED | {"max_tokens": 0}},
    ]
    made = batches.create(requests=asked)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (done := batches.retrieve(made.id)).processing_status != "ended":
        assert time.monotonic() < deadline, "it did not end"
        time.sleep(0.05)
    good, bad = batches.results(made.id)
    listed = [batch.id for batch in batches.list(limit=1)]
    batches.delete(made.id)

    assert (done.request_counts.succeeded, done.request_counts.errored) == (1, 1)
    assert good.result.type == "succeeded"
    assert text_of(good.result.message) == ANSWER
    assert bad.result.type == "errored"
    assert "max_tokens" in bad.result.error.error.message
    assert made.id in listed
    with pytest.raises(anthropic.NotFoundError):
        batches.retrieve(made.id)


def test_message_batch_that_is_cancelled(appliance: Appliance, claude: anthropic.Anthropic) -> None:
    batches = claude.messages.batches
    params: Any = ASKED | {"model": WORDY}
    with appliance.cancels():
        made = batches.create(requests=[{"custom_id": "endless", "params": params}])
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not appliance.busy(WORDY):
            assert time.monotonic() < deadline, "it did not begin"
            time.sleep(0.02)
        batches.cancel(made.id)
    while batches.retrieve(made.id).processing_status != "ended":
        assert time.monotonic() < deadline, "it did not end"
        time.sleep(0.05)

    (line,) = batches.results(made.id)
    assert (line.custom_id, line.result.type) == ("endless", "canceled")


def test_cancel(appliance: Appliance, claude: anthropic.Anthropic) -> None:
    with appliance.cancels():
        with claude.messages.stream(**ASKED | {"model": WORDY}) as stream:
            next(iter(stream.text_stream))
