"""The process that compiles guides first, with vLLM's backends and a model's tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from vllm.sampling_params import StructuredOutputsParams

from appliance.engines.protocol import GuideRefused
from appliance.engines.vllm.messages import encode_guide
from appliance.gateway.fork_server import ForkServer
from appliance.gateway.guide_trials import GuideTrials
from appliance.http.errors import ApiError
from appliance.service.front_frames import FrontModel
from tests.frontend.conftest import model_at
from tests.hostile.guides import AMBIGUOUS, chain_of_rules

SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}}
GUIDES = [
    StructuredOutputsParams(json=SCHEMA),
    StructuredOutputsParams(json_object=True),
    StructuredOutputsParams(regex="(ab){3}"),
    StructuredOutputsParams(choice=["yes", "no"]),
    StructuredOutputsParams(grammar='root ::= "yes" | "no"'),
    StructuredOutputsParams(grammar='start: "yes" | "no"'),
    StructuredOutputsParams(grammar=AMBIGUOUS),
    StructuredOutputsParams(grammar=chain_of_rules(1000)),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trials() -> AsyncIterator[GuideTrials]:
    forks = ForkServer()
    forks.start()
    trials = GuideTrials(forks)
    trials.start()
    yield trials
    await trials.aclose()
    await forks.stop()


@pytest.fixture(scope="module")
def talker(generator: Path) -> FrontModel:
    return model_at(generator, "talker")


@pytest.mark.asyncio(loop_scope="module")
async def test_guides_of_each_kind(trials: GuideTrials, talker: FrontModel) -> None:
    for guide in GUIDES:
        await trials.check("alice", talker, encode_guide(guide))


@pytest.mark.asyncio(loop_scope="module")
async def test_what_cannot_be_followed_is_refused(trials: GuideTrials, talker: FrontModel) -> None:
    """In the words of vLLM."""
    with pytest.raises(GuideRefused, match="invalid regex"):
        await trials.check("alice", talker, encode_guide(StructuredOutputsParams(regex="(ab")))
    with pytest.raises(GuideRefused, match="cannot be decoded"):
        await trials.check("alice", talker, b"\xc1")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_guide_that_overflows_the_stack(trials: GuideTrials, talker: FrontModel) -> None:
    """It is refused, and the next one is compiled."""
    chain = StructuredOutputsParams(grammar=chain_of_rules(20_000))
    with pytest.raises(GuideRefused, match="too large or nested too deeply"):
        await trials.check("alice", talker, encode_guide(chain))
    await trials.check("bob", talker, encode_guide(StructuredOutputsParams(regex="(cd){3}")))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_that_is_damaged(trials: GuideTrials, models: tuple[FrontModel, ...]) -> None:
    damaged = next(model for model in models if model.name == "damaged")
    with pytest.raises(ApiError, match="tokenizer cannot be loaded"):
        await trials.check("alice", damaged, encode_guide(GUIDES[0]))
