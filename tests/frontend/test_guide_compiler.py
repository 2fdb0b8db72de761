"""The process that compiles guides first, with vLLM's backends and a model's tokenizer."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from vllm.sampling_params import StructuredOutputsParams

from appliance import framing
from appliance.engines.protocol import GuideRefused
from appliance.engines.vllm.messages import encode_guide
from appliance.forking.orders import Fork
from appliance.forking.server import ForkServer
from appliance.gateway.front_forks import front_forks
from appliance.gateway.guide_trials import GuideTrials
from appliance.http.errors import ApiError
from appliance.platform.sandbox import landlock_version
from appliance.service.front_frames import FrontModel, Role
from appliance.service.guide_frames import (
    CompileGuide,
    GuideCompiled,
    ReadFolders,
    decoder_for_core,
)
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
async def forks() -> AsyncIterator[ForkServer]:
    forks = front_forks()
    forks.start()
    yield forks
    await forks.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trials(forks: ForkServer) -> AsyncIterator[GuideTrials]:
    trials = GuideTrials(forks)
    trials.start()
    yield trials
    await trials.aclose()


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
async def test_a_model_whose_files_are_links(
    trials: GuideTrials, generator: Path, tmp_path: Path
) -> None:
    """As in the cache of a hub: the compiler may read what they lead to."""
    linked = tmp_path / "snapshots" / "main"
    linked.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    for number, name in enumerate(("config.json", "tokenizer.json", "tokenizer_config.json")):
        shutil.copyfile(generator / name, tmp_path / "blobs" / str(number))
        (linked / name).symlink_to(f"../../blobs/{number}")
    for guide in GUIDES:
        await trials.check("alice", model_at(linked, "linked"), encode_guide(guide))


async def compiled(forks: ForkServer, folders: tuple[str, ...], model: FrontModel) -> GuideCompiled:
    """What a compiler that was given these folders answers about the model."""
    ours, theirs = socket.socketpair()
    await forks.until_there()
    with theirs:
        order = Fork(forks.next_number(), Role.GUIDE_COMPILER)
        forks.fork(order, [theirs.fileno()], lambda child: os.close(child.handle))
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    writer.write(framing.encode(ReadFolders(folders)))
    writer.write(framing.encode(CompileGuide(1, model, encode_guide(GUIDES[0]))))
    decoder = decoder_for_core()
    try:
        while data := await reader.read(1 << 16):
            for frame in decoder.feed(data):
                if isinstance(frame, GuideCompiled):
                    return frame
    finally:
        writer.close()
    raise AssertionError("the compiler ended")


@pytest.mark.asyncio(loop_scope="module")
async def test_files_that_it_was_not_given(forks: ForkServer, talker: FrontModel) -> None:
    """They cannot be read, where the kernel can forbid it."""
    given = await compiled(forks, (talker.path,), talker)
    assert (given.refused, given.failed) == (None, None)

    other = await compiled(forks, (), talker)
    assert other.refused is None
    assert (other.failed is not None) == (landlock_version() > 0)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_that_is_damaged(trials: GuideTrials, models: tuple[FrontModel, ...]) -> None:
    damaged = next(model for model in models if model.name == "damaged")
    with pytest.raises(ApiError, match="tokenizer cannot be loaded"):
        await trials.check("alice", damaged, encode_guide(GUIDES[0]))
