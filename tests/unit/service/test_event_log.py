"""What happens is told to who follows, in order, without a queue for anybody."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from appliance.service.event_log import BATCH, EventLog, Notice, NoticeKind


def tell(feed: EventLog, *models: object) -> None:
    for model in models:
        feed.tell(NoticeKind.MODEL_LOAD_REQUESTED, model=model)


def models(batch: list[Notice] | None) -> list[object] | None:
    return None if batch is None else [notice.facts["model"] for notice in batch]


async def test_a_follower_hears_everything_from_a_snapshot_on() -> None:
    """First that it missed what was before; then all that happens, in order."""
    feed = EventLog(unix_clock=lambda: 0.0)
    tell(feed, "before")
    async with aclosing(feed.follow(None)) as batches:  # type: ignore[type-var]
        assert await anext(batches) is None

        tell(feed, "a", "b")
        first = await anext(batches)
        waiting = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        assert not waiting.done()
        tell(feed, "c")

        assert models(first) == ["a", "b"]
        assert models(await waiting) == ["c"]
    assert first is not None
    assert [notice.number for notice in first] == [2, 3]
    assert feed._followers == set()


async def test_a_follower_that_comes_back_goes_on() -> None:
    """Behind the last notice that it saw."""
    feed = EventLog(unix_clock=lambda: 0.0)
    tell(feed, "a", "b", "c")

    async with aclosing(feed.follow(1)) as batches:  # type: ignore[type-var]
        assert models(await anext(batches)) == ["b", "c"]


@pytest.mark.parametrize(("after", "missed"), [(2, True), (3, False), (6, False), (7, True)])
async def test_who_is_too_far_behind_missed_something(after: int, missed: bool) -> None:
    """The ring reaches back so far; a number that was never given is of another life."""
    feed = EventLog(capacity=3, unix_clock=lambda: 0.0)
    tell(feed, *range(6))

    async with aclosing(feed.follow(after)) as batches:  # type: ignore[type-var]
        if not missed:
            tell(feed, "next") if after == 6 else None
            assert models(await anext(batches)) == (["next"] if after == 6 else [3, 4, 5])
        else:
            assert await anext(batches) is None


async def test_a_slow_follower_learns_that_it_missed_something() -> None:
    """However much happens meanwhile, nothing is kept for it; then it hears what is new."""
    feed = EventLog(capacity=3, unix_clock=lambda: 0.0)
    async with aclosing(feed.follow(None)) as batches:  # type: ignore[type-var]
        assert await anext(batches) is None
        tell(feed, *range(10))

        assert await anext(batches) is None
        tell(feed, "new")
        assert models(await anext(batches)) == ["new"]


async def test_batches_are_bounded() -> None:
    """Much at once comes in several."""
    feed = EventLog(unix_clock=lambda: 0.0)
    tell(feed, *range(BATCH + 1))

    async with aclosing(feed.follow(0)) as batches:  # type: ignore[type-var]
        assert models(await anext(batches)) == list(range(BATCH))
        assert models(await anext(batches)) == [BATCH]


async def test_the_end_is_received() -> None:
    """After what there is, and also by who waits."""
    feed = EventLog(unix_clock=lambda: 0.0)
    tell(feed, "a")
    follower = feed.follow(0)
    assert models(await anext(follower)) == ["a"]
    waiting = asyncio.ensure_future(anext(follower, []))
    await asyncio.sleep(0)

    feed.close()

    assert await waiting == []


def test_numbers_of_an_earlier_life_are_behind() -> None:
    """They begin with the time, which is later after a restart."""
    assert EventLog(unix_clock=lambda: 5.0).newest > EventLog(unix_clock=lambda: 4.0).newest + 1000
