"""Answers of servers that leave fields of OpenAI's API out, or have others for them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from appliance.frontend.remote.said import (
    MOST_CALLED_BYTES,
    BadAnswer,
    Chunks,
    refusal_message,
    whole,
)

DONE = b"data: [DONE]\n\n"


def events(*values: object) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(value).encode() for value in values)


def read(chunks: Chunks, data: bytes) -> list[Any]:
    """What a translation gets, without the end."""
    found = [text.removeprefix("data: ").strip() for text in chunks.feed(data)]
    return [json.loads(text) for text in found if text != "[DONE]"]


def deltas(*calls: dict[str, Any]) -> list[Any]:
    """The parts of calls in the chunks of a stream, each of one part."""
    data = events(*({"choices": [{"delta": {"tool_calls": [call]}}]} for call in calls))
    return [
        call
        for chunk in read(Chunks(1), data + DONE)
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]


def test_the_first_chunk_has_no_text_and_the_last_one_the_usage() -> None:
    """Wherever the server says it: here with the last piece of text."""
    usage = {"prompt_tokens": 4, "completion_tokens": 1, "prompt_tokens_details": None}
    said = {"id": "c", "model": "far", "choices": [{"delta": {"content": "one"}}], "usage": usage}
    first, text, last = read(Chunks(9), events(said) + DONE)

    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text["choices"][0]["delta"] == {"content": "one"}
    assert (last["choices"], last["usage"]["total_tokens"], last["id"]) == ([], 5, "c")
    assert [text["usage"], first.get("usage")] == [None, None]


def test_a_server_without_usage_is_estimated_as_the_ledger_does() -> None:
    """The prompt as it was estimated, and a token for each piece."""
    said = [{"choices": [{"delta": {"content": word}}]} for word in ("one", "two")]
    *_, last = read(Chunks(9), events(*said) + DONE)
    assert last["usage"] == {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
    body = json.dumps({"choices": [{"message": {"content": "x"}}], "usage": None}).encode()
    assert whole(body, 9)["usage"]["prompt_tokens"] == 9
    assert whole(body, 9)["usage"]["completion_tokens"] == len(body) // 4


def test_calls_of_tools_in_every_manner() -> None:
    """Named in each part, without indices, without ids, with objects for arguments."""
    named = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{"}}
    again = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "}"}}
    first, second = deltas(named, again)
    assert (first["id"], first["function"]) == ("a", {"name": "f", "arguments": "{"})
    assert second == {"index": 0, "function": {"arguments": "}"}}

    bare = {"function": {"name": "f", "arguments": {"a": 1}}}
    one, two = deltas(bare, bare)
    assert (one["index"], one["id"], two["index"], two["id"]) == (0, "call_0", 1, "call_1")
    assert json.loads(one["function"]["arguments"]) == {"a": 1}

    body = {"choices": [{"message": {"tool_calls": [bare, {"id": "b", **bare}]}}]}
    calls = whole(json.dumps(body).encode(), 1)["choices"][0]["message"]["tool_calls"]
    assert [call["id"] for call in calls] == ["call_0", "b"]


def test_calls_that_a_server_writes_in_turns() -> None:
    """The first one goes on as it comes; others come whole at the end, after what still came of the
    first, and after a reason to end that came early."""
    parts = [
        {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{"}},
        {"index": 1, "id": "b", "function": {"name": "g", "arguments": "["}},
        {"index": 0, "function": {"arguments": "}"}},
        {"index": 1, "function": {"arguments": "]"}},
    ]
    *begun, end = deltas(*parts)
    assert [call["index"] for call in begun] == [0, 0]
    assert "".join(call["function"]["arguments"] for call in begun) == "{}"
    assert (end["index"], end["id"]) == (1, "b")
    assert end["function"] == {"name": "g", "arguments": "[]"}

    early = {"delta": {"tool_calls": parts[:3]}, "finish_reason": "tool_calls"}
    late = {"delta": {"tool_calls": parts[3:]}}
    data = events({"choices": [early]}, {"choices": [late]}) + DONE
    *_, last, usage = read(Chunks(1), data)
    (choice,) = last["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["delta"]["tool_calls"][0]["function"] == {"name": "g", "arguments": "[]"}
    assert usage["choices"] == []


def test_other_choices_and_refusals_of_models() -> None:
    """Only the first choice is asked for; a refusal is text."""
    said = {"choices": [{"index": 1, "delta": {"content": "no"}}]}
    assert [chunk["choices"] for chunk in read(Chunks(1), events(said) + DONE)][1:] == [[]]
    body = b'{"choices": [{"message": {"refusal": "I will not."}}]}'
    message = whole(body, 1)["choices"][0]["message"]
    assert message["content"] == "I will not."


def test_the_text_of_a_completion_is_content() -> None:
    """Also where a chat was asked for."""
    said = {"choices": [{"text": "one", "finish_reason": "length"}]}
    (choice,) = whole(json.dumps(said).encode(), 1)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one", "length")
    _, text, end, _ = read(Chunks(1), events(said) + DONE)
    assert text["choices"][0]["delta"] == {"content": "one"}
    assert end["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("asked", [False, True])
def test_logprobs_are_read_where_they_were_asked_for(asked: bool) -> None:
    said = {"choices": [{"text": "one", "logprobs": {"tokens": ["one"]}}]}
    expected = {"tokens": ["one"]} if asked else None
    (choice,) = whole(json.dumps(said).encode(), 1, logprobs=asked)["choices"]
    assert choice["logprobs"] == expected
    _, text, _ = read(Chunks(1, logprobs=asked), events(said) + DONE)
    assert text["choices"][0]["logprobs"] == expected


@pytest.mark.parametrize(
    ("reason", "read_as"),
    [
        *((reason, reason) for reason in ("stop", "length", "tool_calls", "content_filter")),
        ("function_call", "tool_calls"),
        ("eos_token", "stop"),
        ("", "stop"),
    ],
)
def test_reasons_to_end_that_others_have(reason: str, read_as: str) -> None:
    """Whole and streamed; one that is empty is none."""
    said = {"choices": [{"message": {"content": "one"}, "finish_reason": reason}]}
    assert whole(json.dumps(said).encode(), 1)["choices"][0]["finish_reason"] == read_as
    chunks = read(Chunks(1), events(said) + DONE)
    found = [choice.get("finish_reason") for chunk in chunks for choice in chunk["choices"]]
    assert found[2:] == ([read_as] if reason else [])
    assert not any(found[:2])


@pytest.mark.parametrize("body", [b"[]", b"{", b"{}", b'{"choices": [{"message": 5}]}', b"\xff"])
def test_what_is_no_answer_is_none(body: bytes) -> None:
    with pytest.raises(BadAnswer):
        whole(body, 1)


def test_calls_are_kept_only_so_far() -> None:
    """A server that never ends the arguments of one does not fill the memory."""
    chunks = Chunks(1)
    begin = {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}]}
    more = {"index": 0, "function": {"arguments": "x" * (1 << 20)}}
    read(chunks, events(begin))
    endless = events(*[{"choices": [{"delta": {"tool_calls": [more]}}]}] * 8)
    with pytest.raises(BadAnswer, match=str(MOST_CALLED_BYTES)):
        read(chunks, endless)
    plain = Chunks(1)
    for _ in range(8):
        read(plain, events({"choices": [{"delta": {"content": "x" * (1 << 20)}}]}))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "a: wrong"}}', "a: wrong"),
        (b'{"error": "a: wrong"}', "a: wrong"),
        (b'{"object": "error", "message": "a: wrong"}', "a: wrong"),
        (b'{"detail": [{"loc": ["a"]}]}', "refuses the request"),
        (b"[]", "refuses the request"),
        (b"{", "refuses the request"),
    ],
)
def test_refusals_of_servers_in_their_words(body: bytes, words: str) -> None:
    assert words in refusal_message(body)
