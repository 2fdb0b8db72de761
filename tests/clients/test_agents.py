"""instructor, pydantic-ai, openai-agents and DSPy: schemas, and loops of calls and results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

import instructor
import openai
import pytest
from agents import Agent as OpenAIAgent
from agents import OpenAIProvider as AgentsProvider
from agents import RunConfig, Runner, function_tool
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.conftest import (
    BOOKED,
    EMBEDDER,
    SMALL,
    VECTOR_SIZE,
    WORDY,
    Appliance,
    Stay,
)  # fmt: skip
from tests.docblocks import Block, code_blocks
from tests.parrot import ANSWER

# Else DSPy's LiteLLM asks the internet for prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import dspy

HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    "blocks",
    [
        code_blocks("docs/recipes/pydantic-ai.md", "python"),
        code_blocks("docs/recipes/openai-agents.md", "python"),
        code_blocks("docs/recipes/dspy.md", "python"),
    ],
    ids=lambda blocks: blocks[0].page,
)
def test_recipe(blocks: list[Block], recipe: Callable[..., str], run: Callable[..., str]) -> None:
    assert ANSWER in run("python", "-c", recipe(blocks))


def test_recipe_of_instructor(recipe: Callable[..., str], run: Callable[..., str]) -> None:
    assert "city=" in run(
        "python", "-c", recipe(code_blocks("docs/recipes/instructor.md", "python"))
    )


# --- instructor ----------------------------------------------------------------------------------


def test_instructor(appliance: Appliance) -> None:
    """A class, whole or as it grows."""
    plain = openai.OpenAI(base_url=appliance.v1, api_key="unused", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    asked: Any = {"model": WORDY, "messages": HELLO, "max_tokens": 1000, "max_retries": 0}
    whole = client.create(response_model=Stay, **asked)
    *_, last = client.create_partial(response_model=Stay, **asked)

    assert isinstance(whole, Stay)
    assert Stay.model_validate(last.model_dump())


def test_instructor_of_parallel_tools(appliance: Appliance) -> None:
    """Several classes in one answer; the model chooses them."""
    plain = openai.OpenAI(base_url=appliance.v1, api_key="unused", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.PARALLEL_TOOLS)

    class book(Stay):  # noqa: N801 - what the model calls
        """Book a stay."""

    stays = client.create(
        model=SMALL, messages=HELLO, response_model=Iterable[book], tool_choice="auto"
    )
    assert [Stay(**stay.model_dump()) for stay in stays] == BOOKED


# --- pydantic-ai ---------------------------------------------------------------------------------


def pydantic_model(appliance: Appliance, dialect: str, name: str = SMALL) -> Any:
    provider = OpenAIProvider(base_url=appliance.v1, api_key="unused")
    kind = OpenAIChatModel if dialect == "openai" else OpenAIResponsesModel
    return kind(name, provider=provider)


@pytest.mark.parametrize("dialect", ["openai", "responses"])
async def test_pydantic_ai(appliance: Appliance, dialect: str) -> None:
    """An answer, a stream, two calls with their results, an error, a stream that is left."""
    booked = []

    def book(city: Literal["Rome", "Bonn"], nights: int) -> str:
        """Book a stay."""
        booked.append(Stay(city=city, nights=nights))
        return "done"

    agent = Agent(pydantic_model(appliance, dialect))
    whole = await agent.run("Hello")
    async with agent.run_stream("Hello") as stream:
        streamed = [part async for part in stream.stream_text(delta=True)]
    called = await Agent(pydantic_model(appliance, dialect), tools=[book]).run("Hello")
    with pytest.raises(ModelHTTPError) as caught:
        await Agent(pydantic_model(appliance, dialect, "gpt-9")).run("Hello")
    with appliance.cancels():
        async with Agent(pydantic_model(appliance, dialect, WORDY)).run_stream("Hello") as stream:
            async for _ in stream.stream_text(delta=True):
                break

    assert whole.output == "".join(streamed) == called.output == ANSWER
    assert whole.usage.output_tokens
    assert booked == BOOKED
    assert caught.value.status_code == 404


@pytest.mark.parametrize("dialect", ["openai", "responses"])
async def test_pydantic_ai_s_schema(appliance: Appliance, dialect: str) -> None:
    agent = Agent(pydantic_model(appliance, dialect), output_type=NativeOutput(Stay))

    assert isinstance((await agent.run("Hello")).output, Stay)


# --- openai-agents -------------------------------------------------------------------------------


@pytest.mark.parametrize("responses", [True, False])
async def test_openai_agents(appliance: Appliance, responses: bool) -> None:
    """An answer, a stream, two calls with their results, a schema."""
    provider = AgentsProvider(base_url=appliance.v1, api_key="unused", use_responses=responses)
    config = RunConfig(model_provider=provider, tracing_disabled=True)
    booked = []

    @function_tool
    def book(city: Literal["Rome", "Bonn"], nights: int) -> str:
        """Book a stay."""
        booked.append(Stay(city=city, nights=nights))
        return "done"

    plain = OpenAIAgent(name="guide", model=SMALL, instructions="Be brief.")
    whole = await Runner.run(plain, "Hello", run_config=config)
    streamed = Runner.run_streamed(plain, "Hello", run_config=config)
    kinds = [event.type async for event in streamed.stream_events()]
    calling = OpenAIAgent(name="guide", model=SMALL, tools=[book])
    called = await Runner.run(calling, "Hello", run_config=config)
    typed = OpenAIAgent(name="guide", model=SMALL, output_type=Stay)
    stay = await Runner.run(typed, "Hello", run_config=config)
    with pytest.raises(openai.NotFoundError):
        await Runner.run(OpenAIAgent(name="guide", model="gpt-9"), "Hello", run_config=config)

    assert whole.final_output == streamed.final_output == called.final_output == ANSWER
    assert "raw_response_event" in kinds
    assert sorted(booked, key=lambda stay: stay.nights) == BOOKED
    assert isinstance(stay.final_output, Stay)


# --- DSPy ----------------------------------------------------------------------------------------


def test_dspy(appliance: Appliance) -> None:
    """A text, a schema, vectors."""
    asked: Any = {"api_base": appliance.v1, "api_key": "unused", "num_retries": 0, "cache": False}
    lm = dspy.LM(f"openai/{SMALL}", max_tokens=1000, **asked)
    (stay,) = lm("Hello", response_format=Stay)
    embed = dspy.Embedder(
        f"openai/{EMBEDDER}", api_base=appliance.v1, api_key="unused", caching=False
    )

    assert ANSWER in str(lm("Hello"))
    Stay.model_validate_json(stay["text"] if isinstance(stay, dict) else stay)
    assert embed(["Hello", "river"]).shape == (2, VECTOR_SIZE)
