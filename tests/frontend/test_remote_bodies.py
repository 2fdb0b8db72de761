"""Bodies for models of other servers: what is passed on, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from appliance.frontend.remote.bodies import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, outgoing
from appliance.http.errors import ApiError
from appliance.service.front_frames import FrontModel
from appliance.vocabulary import RequestClass, Task

MODEL = FrontModel(
    name="far",
    path="",
    dtype="",
    max_context=100,
    max_batch=1,
    task=Task.GENERATE,
    created=1,
    remote="their/model",
)


def sent(path: str, **body: Any) -> Any:
    fields = msgspec.json.decode(json.dumps(body), type=dict[str, msgspec.Raw])
    return outgoing(path, {**fields, "model": "far"}, MODEL)


def body_of(path: str, **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sent(path, **body).body)
    return found


def test_fields_are_passed_on_as_they_are() -> None:
    """Also those that we do not know; what costs at that server, or stays there, is left out."""
    known = {"messages": [{"role": "user", "content": "Hello"}], "reasoning_effort": "low"}

    assert body_of(CHAT, **known, store=True, service_tier="priority") == {
        "model": "their/model",
        **known,
    }


def test_a_stream_has_its_usage_whoever_asks() -> None:
    asked = sent(CHAT, stream=True, stream_options={"include_obfuscation": False})
    both = {"include_obfuscation": False, "include_usage": True}
    assert (asked.streams, asked.wants_usage) == (True, False)
    assert json.loads(asked.body)["stream_options"] == both
    assert sent(CHAT, stream=True, stream_options={"include_usage": True}).wants_usage
    assert "stream_options" not in body_of(RESPONSES, stream=True, input="x")
    assert not sent(EMBEDDINGS, input="x", stream=True).streams


def test_tokens_are_estimated_from_what_is_sent() -> None:
    """Four bytes are one; files as data URLs are none, and no estimate is beyond the context."""
    assert 5 < sent(COMPLETIONS, prompt="x").prompt_tokens < 15
    assert sent(COMPLETIONS, prompt="x" * 4000).prompt_tokens == 100
    url = "data:image/png;base64," + "A" * 4000
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    assert sent(CHAT, messages=[{"role": "user", "content": parts}]).prompt_tokens < 40


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        (CHAT, {"max_tokens": 7}, 7),
        (CHAT, {"max_completion_tokens": 8, "max_tokens": 7}, 8),
        (RESPONSES, {"max_output_tokens": 9, "input": "x"}, 9),
        (EMBEDDINGS, {"input": "x"}, 0),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 10_000}, None),
        (COMPLETIONS, {"prompt": "x"}, None),
    ],
)
def test_an_answer_may_have_what_is_asked_or_the_rest(
    path: str, body: dict[str, Any], most: int | None
) -> None:
    found = sent(path, **body)
    assert found.max_tokens == (100 - found.prompt_tokens if most is None else most)


def test_choices_are_counted() -> None:
    assert sent(CHAT, n=3).choices == 3
    assert sent(COMPLETIONS, prompt=["a", "b"], n=2).choices == 4
    assert sent(COMPLETIONS, prompt=[1, 2, 3]).choices == 1
    assert sent(COMPLETIONS, prompt=[[1], [2]], best_of=2).choices == 4


GUIDES: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}},
    {"guided_json": {}},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"parallel_tool_calls": False},
    {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
    {"text": {"format": {"type": "json_schema"}}, "input": "x"},
]


@pytest.mark.parametrize("body", GUIDES)
def test_guides_are_seen(body: dict[str, Any]) -> None:
    """Keys may have none."""
    assert sent(RESPONSES if "input" in body else CHAT, **body).guided


def test_others_have_no_guide() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    form = {"type": "text"}
    assert not sent(CHAT, tools=tools, tool_choice="auto", response_format=form).guided
    assert not sent(RESPONSES, text={"format": form}, input="x").guided


def test_work_of_the_class_batch_is_known() -> None:
    assert sent(CHAT, service_tier="flex").request_class is RequestClass.BATCH
    assert sent(CHAT).request_class is RequestClass.INTERACTIVE


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    (CHAT, "priority", {"priority": -5}),
    (CHAT, "kv_transfer_params", {"kv_transfer_params": {"remote_host": "x"}}),
    (CHAT, "web_search_options", {"web_search_options": {}}),
    (CHAT, "n", {"n": 0}),
    (CHAT, "n", {"n": "many"}),
    (CHAT, "max_tokens", {"max_tokens": -1}),
    (CHAT, "stream", {"stream": "yes"}),
    (CHAT, "stream_options", {"stream": True, "stream_options": 3}),
    (CHAT, "messages", {"messages": [{"content": [{"image_url": "http://10.0.0.1/x"}]}]}),
    (CHAT, "messages", {"messages": [{"content": [{"image_url": {"url": "file:///etc"}}]}]}),
    (CHAT, "messages", {"messages": [{"content": [{"video_url": {"url": "http://x"}}]}]}),
    (CHAT, "messages", {"messages": [{"content": [{"file": {"file_id": "file-1"}}]}]}),
    (RESPONSES, "input", {"input": [{"content": [{"file_url": "https://x.example/"}]}]}),
    (RESPONSES, "input", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    (RESPONSES, "previous_response_id", {"input": "x", "previous_response_id": "resp_1"}),
    (RESPONSES, "conversation", {"input": "x", "conversation": "conv_1"}),
    (RESPONSES, "background", {"input": "x", "background": True}),
    (RESPONSES, "prompt", {"input": "x", "prompt": {"id": "pmpt_1"}}),
    (RESPONSES, "tools", {"input": "x", "tools": [{"type": "mcp", "server_url": "http://x"}]}),
    (RESPONSES, "tools", {"input": "x", "tools": [{"type": "file_search"}]}),
]


@pytest.mark.parametrize(("path", "field", "body"), REFUSED)
def test_what_would_reach_further_is_refused(path: str, field: str, body: dict[str, Any]) -> None:
    """The field is named."""
    with pytest.raises(ApiError) as caught:
        sent(path, **body)

    assert caught.value.status == 400
    assert caught.value.body.error.param == field
    assert field in caught.value.body.error.message


def test_a_response_is_never_stored_there() -> None:
    """The server would keep it for all keys of ours alike."""
    assert body_of(RESPONSES, input="x", store=True)["store"] is False
    assert body_of(RESPONSES, input="x")["store"] is False
    assert body_of(RESPONSES, input="x", previous_response_id=None)["input"] == "x"


def test_urls_in_texts_are_texts() -> None:
    messages = [{"role": "user", "content": "see http://10.0.0.1/x"}]
    assert body_of(CHAT, messages=messages)["messages"] == messages
