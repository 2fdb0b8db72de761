"""vLLM's answers in Ollama's words, and Ollama's templates: what no client can ask for at will."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from appliance.frontend.ollama.errors import OllamaError
from appliance.frontend.ollama.replies import Reply, events, understood
from appliance.frontend.ollama.templates import render

VALUES = {"System": "", "Prompt": "hello", "Suffix": ""}


def chunk(finish: str | None = None, **delta: Any) -> Any:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return understood(json.dumps({"choices": [choice]}))


def call(index: int, name: str | None = None, arguments: str = "") -> dict[str, Any]:
    return {"index": index, "id": f"id{index}", "function": {"name": name, "arguments": arguments}}


def told(line: bytes) -> Any:
    return json.loads(line) if line else None


def reply() -> Reply:
    return Reply("small", "chat", time.monotonic())


def test_calls_come_whole() -> None:
    """A call is told when the next one begins, or the answer ends."""
    answer = reply()
    lines = [
        told(answer.line(chunk(tool_calls=[call(0, "look", '{"a"')]))),
        told(answer.line(chunk(tool_calls=[call(0, None, ": 1}")]))),
        told(answer.line(chunk(tool_calls=[call(1, "see")]))),
        told(answer.line(chunk("tool_calls"))),
    ]

    assert lines[:2] == [None, None]
    (first,), (second,) = (line["message"]["tool_calls"] for line in lines[2:])
    assert first == {"id": "id0", "function": {"index": 0, "name": "look", "arguments": {"a": 1}}}
    assert second["function"] == {"index": 1, "name": "see", "arguments": {}}
    assert told(answer.last())["done_reason"] == "stop"


def test_a_call_that_is_cut_off_is_none() -> None:
    """Those before it are."""
    answer = reply()
    answer.line(chunk(tool_calls=[call(0, "look", "{}"), call(1, "see", '{"a')]))

    line = told(answer.line(chunk("length", content="x")))
    assert line["message"]["content"] == "x"
    assert "tool_calls" not in line["message"]
    assert told(answer.last())["done_reason"] == "length"


@pytest.mark.parametrize("arguments", ["oops", "[1]", "1"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    """What is no object is no call: the request failed."""
    answer = reply()
    answer.line(chunk(tool_calls=[call(0, "look", arguments)]))

    with pytest.raises(OllamaError, match="without JSON"):
        answer.line(chunk("tool_calls"))


async def test_an_error_in_a_stream() -> None:
    """It ends what is understood of it; what is no JSON is no event."""

    async def stream() -> AsyncIterator[str]:
        yield ": comment\n\n"
        yield 'data: {"choices": []}\n\n'
        yield 'data: {"error": {"message": "sorry", "type": "x", "code": 503}}\n\n'

    said = events(stream())
    first = await anext(said)
    with pytest.raises(OllamaError, match="sorry") as failed:
        await anext(said)

    assert (first.choices, failed.value.status) == ([], 503)


def test_the_cores_times_are_reported() -> None:
    """Phases of the request, and what passed before it was submitted."""
    timing = "queue;dur=500.0, load;dur=250.0, prefill;dur=125.0, decode;dur=2000.0, "
    timing += 'preempted;dur=1000.0;desc="2"'
    answer = Reply("small", "chat", time.monotonic() - 1, lambda: timing)
    last = told(answer.last())

    assert (last["prompt_eval_duration"], last["eval_duration"]) == (125_000_000, 3_000_000_000)
    assert last["load_duration"] >= 1_750_000_000
    assert last["total_duration"] == last["load_duration"] + 3_125_000_000


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{{ .Prompt }}", "hello"),
        ("a {{- .Prompt -}} b", "ahellob"),
        ("{{ if .System }}S{{ else }}none{{ end }} {{ .Prompt }}", "none hello"),
        ("{{ if .Prompt }}{{ if .System }}S{{ end }}P{{ end }}", "P"),
        ("{{ .Prompt }} A: {{ .Response }}.", "hello A: "),
        ("{{ if .System }}{{ .Response }}{{ end }}.", "."),
        ("no variables", "no variables"),
    ],
)
def test_templates(template: str, prompt: str) -> None:
    """Variables, conditions and white space, as Go has them."""
    assert render(template, VALUES) == prompt


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (" " * (1 << 20) + "{{ .Prompt }}", " " * (1 << 20) + "hello"),
        ("{{ if .Prompt }}" * 50_000 + "P" + "{{ end }}" * 50_000, "P"),
        ("{{ if .System }}" * 50_000 + "{{ else }}" + "{{ end }}" * 50_000, ""),
        ("{" * (1 << 20), "{" * (1 << 20)),
    ],
    ids=["space", "conditions", "false conditions", "braces"],
)
def test_a_long_template_takes_time_with_its_length(template: str, prompt: str) -> None:
    """With the square of it, these would take hours, and hold up all streams of the front end."""
    assert render(template, VALUES) == prompt


def test_a_template_that_repeats_a_long_prompt() -> None:
    """Little text would come to a terabyte."""
    with pytest.raises(OllamaError, match="more than 8388608 characters"):
        render("{{ .Prompt }}" * 300_000, {"Prompt": "x" * (4 << 20)})


@pytest.mark.parametrize(
    "template",
    ["{{ range .Messages }}", "{{ .Messages }}", "{{ end }}", "{{ if .Prompt }}", "{{ toJson . }}"],
)
def test_templates_that_are_refused(template: str) -> None:
    with pytest.raises(OllamaError, match="template: ") as refused:
        render(template, VALUES)

    assert refused.value.status == 400
