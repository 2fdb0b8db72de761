"""Guides are compiled in a process that they may end, and no other notices."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from appliance.engines.protocol import GuideRefused
from appliance.gateway import guide_trials
from appliance.gateway.front_forks import front_forks
from appliance.gateway.guide_trials import (
    HARMFUL_SECONDS,
    MAX_WAITING,
    MOST_HARMFUL,
    SUSPENDED_SECONDS,
    GuideTrials,
    Patience,
)
from appliance.http.errors import ApiError
from appliance.service.front_frames import FrontModel
from appliance.vocabulary import Task
from tests.unit.doubles.guide_compiler import (
    BAD,
    COMMAND,
    COUNT,
    DEADLY,
    ENDLESS,
    FOLDERS,
    GOOD,
    NO_TOKENIZER,
    once,
)

MODEL = FrontModel(
    name="a",
    path="/a",
    dtype="float32",
    max_context=64,
    max_batch=1,
    task=Task.GENERATE,
    created=1,
)
SHORT = Patience(guide_seconds=1.0)
LONG = Patience(guide_seconds=3600)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def trying(
    patience: Patience = LONG,
    command: Sequence[str] = COMMAND,
    clock: Clock | None = None,
    models: Sequence[FrontModel] = (),
) -> AsyncIterator[GuideTrials]:
    forks = front_forks(command)
    forks.start()
    trials = GuideTrials(forks, patience, clock or Clock(), lambda: models)
    trials.start()
    try:
        yield trials
    finally:
        await trials.aclose()
        await forks.stop()


async def reason(
    trials: GuideTrials, guide: bytes, owner: str = "alice", model: FrontModel = MODEL
) -> str:
    """Why a guide is refused."""
    with pytest.raises(GuideRefused) as caught:
        await trials.check(owner, model, guide)
    return str(caught.value)


async def test_a_guide_is_compiled_once() -> None:
    """What was compiled is not sent again; what was refused is, as it may have been a defect."""
    async with trying() as trials:
        await trials.check("alice", MODEL, GOOD)
        await trials.check("bob", MODEL, GOOD)
        assert await reason(trials, BAD) == "it is bad"
        assert await reason(trials, COUNT) == "3"


async def test_the_same_guide_at_the_same_time_is_compiled_once() -> None:
    async with trying() as trials:
        await asyncio.gather(*(trials.check(f"key-{n}", MODEL, GOOD) for n in range(20)))
        assert await reason(trials, COUNT) == "2"


async def test_another_model_of_the_name_compiles_anew() -> None:
    """It may have another tokenizer."""
    later = msgspec.structs.replace(MODEL, created=2)
    async with trying(models=[MODEL, later]) as trials:
        await trials.check("alice", MODEL, GOOD)
        await trials.check("alice", later, GOOD)
        assert await reason(trials, COUNT) == "3"


async def test_the_compiler_may_read_the_models_that_are_served() -> None:
    """For one that was added since, or came to lie at a path, there is another process."""
    models = [MODEL, msgspec.structs.replace(MODEL, name="b", path="/b")]
    async with trying(models=models) as trials:
        assert await reason(trials, FOLDERS) == "/a /b"
        assert await reason(trials, COUNT, model=models[1]) == "2"

        models[1] = added = msgspec.structs.replace(MODEL, name="c", path="/c")
        assert await reason(trials, COUNT) == "3"
        assert await reason(trials, FOLDERS, model=added) == "/a /c"
        assert await reason(trials, COUNT) == "2"

        assert await reason(trials, COUNT, model=msgspec.structs.replace(added, created=2)) == "1"


async def test_a_guide_that_ends_its_compiler_is_refused() -> None:
    """From then on without a process, and the next guide has another process."""
    clock = Clock()
    async with trying(clock=clock) as trials:
        assert "too large or nested too deeply" in await reason(trials, DEADLY)
        assert await reason(trials, COUNT) == "1"
        assert "too large or nested too deeply" in await reason(trials, DEADLY, "bob")
        assert await reason(trials, COUNT) == "2"

        clock.now += HARMFUL_SECONDS
        assert "too large or nested too deeply" in await reason(trials, DEADLY)
        assert await reason(trials, COUNT) == "1", "it was tried anew"


async def test_a_process_that_dies_of_something_else(tmp_path: Path) -> None:
    """A guide is tried twice."""
    marker = tmp_path / "marker"
    marker.touch()
    async with trying() as trials:
        await trials.check("alice", MODEL, once(marker))
    assert not marker.exists()


async def test_a_guide_that_takes_too_long_is_refused() -> None:
    async with trying(SHORT) as trials:
        assert "longer than 1 s" in await reason(trials, ENDLESS)
        assert await reason(trials, COUNT) == "1"
        assert "longer than 1 s" in await reason(trials, ENDLESS)
        assert await reason(trials, COUNT) == "2", "the same process as before"


async def test_owners_take_turns() -> None:
    """However many slow guides a key has, another key's waits for one of them at most."""
    async with trying(SHORT) as trials:
        slow = [asyncio.create_task(reason(trials, ENDLESS + b"!" * n)) for n in range(1, 4)]
        slow = [asyncio.create_task(reason(trials, ENDLESS)), *slow]
        with pytest.raises(GuideRefused):
            await asyncio.create_task(trials.check("bob", MODEL, COUNT))  # begins after the others
        assert sum(task.done() for task in slow) <= 1
        for task in slow:
            task.cancel()


async def test_a_key_has_so_many_waiting() -> None:
    """Others still may send theirs."""
    async with trying() as trials:
        waiting = [
            asyncio.create_task(trials.check("alice", MODEL, GOOD + bytes([n])))
            for n in range(MAX_WAITING)
        ]
        with pytest.raises(ApiError) as caught:
            await asyncio.create_task(trials.check("alice", MODEL, GOOD))
        assert (caught.value.status, caught.value.body.error.code) == (429, "too_many_guides")
        await trials.check("bob", MODEL, GOOD)
        await asyncio.gather(*waiting)
        await trials.check("alice", MODEL, COUNT + b"!")


async def test_what_did_harm_later_is_refused() -> None:
    """Though it was compiled."""
    async with trying() as trials:
        await trials.check("alice", MODEL, GOOD)
        trials.refuse("alice", MODEL, GOOD, "it took too long")
        assert await reason(trials, GOOD) == "it took too long"


async def test_only_so_much_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten, and compiled again."""
    monkeypatch.setattr(guide_trials, "KNOWN", 2)
    monkeypatch.setattr(guide_trials, "HARMFUL", 1)
    async with trying() as trials:
        for guide in (GOOD, GOOD + b"2", GOOD + b"3", GOOD):
            await trials.check("alice", MODEL, guide)
        assert await reason(trials, COUNT) == "5"
        trials.refuse("alice", MODEL, GOOD, "it took too long")
        trials.refuse("alice", MODEL, GOOD + b"2", "it took too long")
        await trials.check("alice", MODEL, GOOD)


async def test_a_model_without_a_tokenizer_is_no_fault_of_a_guide() -> None:
    async with trying() as trials:
        with pytest.raises(ApiError, match="tokenizer cannot be loaded") as caught:
            await trials.check("alice", MODEL, NO_TOKENIZER)
        assert (caught.value.status, caught.value.body.error.code) == (503, "guide_unanswered")


async def test_a_compiler_that_cannot_start_is_no_fault_of_a_guide() -> None:
    missing = (sys.executable, "-c", "raise SystemExit(1)")
    async with trying(Patience(start_seconds=0.5), missing) as trials:
        with pytest.raises(ApiError, match="could not be started") as caught:
            await trials.check("alice", MODEL, GOOD)
        assert caught.value.status == 503


async def test_the_end_of_the_appliance_answers_who_waits() -> None:
    async with trying() as trials:
        waiting = asyncio.create_task(trials.check("alice", MODEL, ENDLESS))
        await asyncio.create_task(trials.aclose())  # begins after the guide
        with pytest.raises(ApiError, match="shuts down"):
            await waiting


async def test_a_key_with_many_harmful_guides_gets_none_for_a_while() -> None:
    """Each of them costs others time. Other keys are not refused, and neither are clients without
    keys, which cannot be told apart."""
    clock = Clock()
    async with trying(clock=clock) as trials:
        for number in range(2 * MOST_HARMFUL):
            for owner in ("mallory", ""):
                guide = GOOD + b"%d %s" % (number, owner.encode())
                if number >= MOST_HARMFUL and owner == "mallory":
                    with pytest.raises(ApiError) as caught:
                        await trials.check(owner, MODEL, guide)
                    assert (caught.value.status, caught.value.headers["Retry-After"]) == (
                        429,
                        "600",
                    )
                    assert "it may use guides again in 600 s" in str(caught.value)
                else:
                    await trials.check(owner, MODEL, guide)
                    trials.refuse(owner, MODEL, guide, "it took too long")
        await trials.check("alice", MODEL, GOOD)

        clock.now += SUSPENDED_SECONDS
        await trials.check("mallory", MODEL, GOOD)


async def test_the_same_harmful_guide_counts_once() -> None:
    """A program that sends it again and again keeps its other guides."""
    async with trying() as trials:
        for _ in range(2 * MOST_HARMFUL):
            assert "too large or nested too deeply" in await reason(trials, DEADLY)
        await trials.check("alice", MODEL, GOOD)
