"""Room for sequences is never given twice, never lost, and given in order."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.batches.room import Room
from tests.patience import PATIENCE_SECONDS


async def settled() -> None:
    """Everything that could go on did."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_large_one_is_not_passed() -> None:
    """What would fit waits behind it; when it gives up, the others have their room."""
    room = Room(3)
    entered: list[str] = []
    leave = asyncio.Event()

    async def take(name: str, sequences: int) -> None:
        async with room.taken(sequences):
            entered.append(name)
            await leave.wait()

    tasks = [asyncio.create_task(take(*one)) for one in (("a", 2), ("large", 9), ("b", 1))]
    await settled()
    assert entered == ["a"]
    tasks[1].cancel()
    await settled()
    assert entered == ["a", "b"]
    leave.set()
    await asyncio.gather(*tasks, return_exceptions=True)


told = st.tuples(st.sampled_from(["take", "leave", "cancel"]), st.integers(1, 6))


@settings(deadline=None)
@given(st.integers(1, 4), st.lists(told, max_size=30))
def test_room_is_never_lost(size: int, steps: list[tuple[str, int]]) -> None:
    """Whoever leaves, or is cancelled while it waits or has room; all of it is there afterwards."""
    asyncio.run(played(size, steps))


async def played(size: int, steps: list[tuple[str, int]]) -> None:
    room = Room(size)
    inside: list[int] = []
    begun: list[tuple[asyncio.Task[None], asyncio.Event]] = []

    async def take(sequences: int, leave: asyncio.Event) -> None:
        async with room.taken(sequences):
            inside.append(min(sequences, size))
            try:
                await leave.wait()
            finally:
                inside.remove(min(sequences, size))

    live: list[tuple[asyncio.Task[None], asyncio.Event]] = []
    for what, number in steps:
        if what == "take":
            leave = asyncio.Event()
            live.append((asyncio.create_task(take(number, leave)), leave))
            begun.append(live[-1])
        elif live:
            task, leave = live.pop(number % len(live))
            if what == "leave":
                leave.set()
            else:
                task.cancel()
        if number % 2:  # else several things happen at once
            await settled()
        assert sum(inside) <= size
    for _, leave in begun:
        leave.set()
    await asyncio.gather(*(task for task, _ in begun), return_exceptions=True)
    async with asyncio.timeout(PATIENCE_SECONDS), room.taken(size):
        assert not inside
