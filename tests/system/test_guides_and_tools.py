"""Guides and tools through OpenAI's client, the real daemon, its front end and its workers."""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from appliance.platform.seccomp import has_filters
from tests.hostile.guides import AMBIGUOUS, chain_of_rules
from tests.processes import children, front_end_parent, worker_parent
from tests.system.conftest import HERMES, Appliance

HELLO: Any = [{"role": "user", "content": "Hello, river"}]
MODELS = ["llama-a", "qwen2-a", "qwen3-a"]
CHOOSES = HERMES
LONG = 700
RULES = 8_000
"""In a chain twice as long as ends what compiles it. The compiler goes last where processors are
busy, and has 10 s for a guide: a longer chain might not end it in time, and be refused for that."""


class Stay(BaseModel):
    city: Literal["Rome", "Bonn"]
    nights: Literal[1, 2, 3]


TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": name, "parameters": Stay.model_json_schema(), "strict": True},
    }
    for name in ("book", "cancel")
]


def ask(client: openai.OpenAI, model: str, seed: int) -> Stay | None:
    answer = client.chat.completions.parse(
        model=model, messages=HELLO, response_format=Stay, max_tokens=LONG, seed=seed
    )
    return answer.choices[0].message.parsed


def test_children_are_sandboxed(client: openai.OpenAI, appliance: Appliance) -> None:
    """Workers, front ends, the compiler of guides, and the processes that these are forked from."""
    assert ask(client, "llama-a", 1) is not None
    zygote = front_end_parent(appliance.pid)
    forked = children(zygote)
    assert len(forked) >= 2
    seccomp = "2" if has_filters() else "0"
    for pid in (*appliance.worker_pids(), worker_parent(appliance.pid), zygote, *forked):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        status = dict(line.split(":\t") for line in lines)
        assert (status["Seccomp"], status["NoNewPrivs"]) == (seccomp, "1")
        limits = Path(f"/proc/{pid}/limits").read_text(encoding="ascii")
        assert re.search(r"^Max core file size +0 +0 ", limits, re.M)


def test_models_that_take_turns_follow_their_guides(client: openai.OpenAI) -> None:
    """Models of random weights give the class that is asked for, each while others have the
    instance in between; and the same seed gives the same answer."""
    jobs = [(model, 1) for model in MODELS]
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(lambda job: ask(client, *job), jobs))
    assert all(isinstance(stay, Stay) for stay in together)

    assert [ask(client, *job) for job in jobs] == together


def test_a_guided_answer_survives_its_worker(client: openai.OpenAI, appliance: Appliance) -> None:
    """A worker is killed in the midst of an answer, which goes on behind what was sent."""
    stream = client.completions.create(
        model="llama-a",
        prompt="Once",
        max_tokens=400,
        stream=True,
        seed=5,
        extra_body={"structured_outputs": {"regex": "(ab){150}"}},
    )
    text = ""
    killed = False
    for chunk in stream:
        text += chunk.choices[0].text
        if text and not killed:
            killed = True
            for pid in appliance.worker_pids():
                os.kill(pid, signal.SIGKILL)

    assert killed
    assert text == "ab" * 150


@pytest.mark.parametrize("stream", [False, True])
def test_an_impossible_guide(client: openai.OpenAI, stream: bool) -> None:
    """It is the client's fault, and no other client notices. A stream has the error in an event, as
    vLLM's has."""

    def ask_for_it() -> None:
        answer = client.completions.create(
            model="llama-a",
            prompt="Once",
            stream=stream,
            extra_body={"structured_outputs": {"regex": "(ab"}},
        )
        list(answer)

    with pytest.raises(openai.APIError, match="invalid regex") as caught:
        ask_for_it()
    assert stream or isinstance(caught.value, openai.BadRequestError)
    assert ask(client, "llama-a", 3) is not None


def test_a_guide_that_ends_what_compiles_it(client: openai.OpenAI, appliance: Appliance) -> None:
    """It is refused, for each model; no worker dies of it, and its model goes on."""
    workers = appliance.worker_pids()
    for model in MODELS[:2]:
        with pytest.raises(openai.BadRequestError, match="nested too deeply") as caught:
            client.completions.create(
                model=model,
                prompt="Once",
                n=2,
                extra_body={"structured_outputs": {"grammar": chain_of_rules(RULES)}},
            )
        assert caught.value.code == "invalid_guide"
        assert ask(client, model, 3) is not None
    assert appliance.worker_pids() == workers


@pytest.mark.parametrize("stream", [False, True])
def test_a_guide_that_takes_too_long_to_follow(client: openai.OpenAI, stream: bool) -> None:
    """Its request is ended, and another one with it is not begun."""

    def ask_for_it(seed: int) -> str:
        answer = client.completions.create(
            model="llama-a",
            prompt="Once",
            max_tokens=900,
            seed=seed,
            stream=stream,
            extra_body={"structured_outputs": {"grammar": grammar}, "min_tokens": 899},
        )
        if stream:
            return "".join(chunk.choices[0].text for chunk in answer)
        return str(answer.choices[0].text)

    grammar = f"{AMBIGUOUS}# {'streamed' if stream else 'whole'}\n"
    for seed in (1, 2):
        with pytest.raises(openai.APIError, match="too long to follow"):
            ask_for_it(seed)
    assert ask(client, "llama-a", 3) is not None


@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_have_to_be_called(client: openai.OpenAI, choice: str, stream: bool) -> None:
    """Streamed or not: a call of a tool with arguments of its schema."""
    fields: Any = {
        "model": CHOOSES,
        "messages": HELLO,
        "tools": TOOLS,
        "tool_choice": "required" if choice == "required" else _named("cancel"),
        "parallel_tool_calls": False,
        "max_tokens": LONG,
        "seed": 11,
    }
    if stream:
        with client.chat.completions.stream(**fields) as events:
            answer = events.get_final_completion()
    else:
        answer = client.chat.completions.create(**fields)

    (said,) = answer.choices
    assert said.finish_reason == ("tool_calls" if choice == "required" else "stop")
    (call,) = said.message.tool_calls or ()
    assert call.type == "function"
    assert call.id
    assert call.function.name in (["book", "cancel"] if choice == "required" else ["cancel"])
    Stay.model_validate(json.loads(call.function.arguments))


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_a_model_that_may_choose(client: openai.OpenAI) -> None:
    """Without a call there is what the model said; without a parser it is refused."""
    fields: Any = {"messages": HELLO, "max_tokens": 12, "temperature": 0}
    plain = client.chat.completions.create(model=CHOOSES, **fields)
    chosen = client.chat.completions.create(model=CHOOSES, tools=TOOLS, **fields)

    assert chosen.choices[0].message.content == plain.choices[0].message.content
    assert chosen.choices[0].message.tool_calls is None
    with pytest.raises(openai.BadRequestError, match="tool_parser"):
        client.chat.completions.create(model="llama-a", tools=TOOLS, **fields)
