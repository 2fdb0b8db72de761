"""Bodies in memory: no more than may be, and those of the client that has most give way."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.access.auth import Access
from appliance.access.keys import Key, KeyFile, KeyRing, Scope, digest
from appliance.api.app import create_app
from appliance.http.body_budget import CLIENT_SHARE, BodiesFull, BodyBudget, BodyTooLarge, HeldBody
from tests.unit.doubles.fake_service import FakeService

MOST = 100


def scope_of(path: str = "/v1/completions", client: str | None = None) -> Any:
    return {"type": "http", "path": path, "client": None if client is None else (client, 1)}


# --- the budget ----------------------------------------------------------------------------------


class Sender:
    """A client's request, whose body comes piece by piece."""

    def __init__(self, budget: BodyBudget, key: str | None, client: str | None = None) -> None:
        self._stack = ExitStack()
        self.held: HeldBody = self._stack.enter_context(budget.hold(key, scope_of(client=client)))
        self._pieces: asyncio.Queue[Any] = asyncio.Queue()
        self._receive = self.held.receiving(self._pieces.get)
        self.reading: asyncio.Task[Any] | None = None

    def send(self, size: int, *, more: bool = True) -> None:
        self._pieces.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": more})

    async def read(self) -> Any:
        return await self._receive()

    async def refused(self) -> bool:
        """Whether the request is told that it gives way, also while nothing comes."""
        try:
            async with asyncio.timeout(0.001):
                await self._receive()
        except BodiesFull:
            return True
        except TimeoutError:
            pass
        return False

    def answered(self) -> None:
        self._stack.close()


Steps = st.lists(
    st.tuples(
        st.sampled_from(["begin", "piece", "piece", "last", "answer"]),
        st.sampled_from(["alice", "bob", "carol"]),
        st.integers(0, 9),
        st.integers(1, 60),
    ),
    max_size=50,
)


@given(Steps)
def test_no_more_is_held_than_may_be(steps: list[tuple[str, str, int, int]]) -> None:
    """Of all bodies, and of each client; what was read counts until it is answered or cut; and a
    client that has little is never cut for one that has much."""

    async def scene() -> None:
        budget = BodyBudget(MOST, free_bytes=0)
        senders: list[Sender] = []

        def of(key: str) -> int:
            return sum(one.held.counted_bytes for one in senders if one.held.client[0] == key)

        for what, key, which, size in steps:
            mine = [one for one in senders if one.held.client[0] == key]
            if what == "begin":
                senders.append(Sender(budget, key))
            elif mine and what == "answer":
                one = mine[which % len(mine)]
                one.answered()
                senders.remove(one)
            elif mine:
                one = mine[which % len(mine)]
                if one.held.whole:
                    continue
                before = {other: other.held.counted_bytes for other in senders}
                had = {name: of(name) for name in ("alice", "bob", "carol")}
                one.send(size, more=what == "piece")
                try:
                    await one.read()
                except BodiesFull:
                    assert one.held.counted_bytes == 0
                had[key] += size
                for other, bytes_before in before.items():
                    if other.held.counted_bytes < bytes_before and other is not one:
                        cut_from = str(other.held.client[0])
                        assert not other.held.whole
                        assert had[cut_from] == max(had.values()) or cut_from == key
            assert budget.held_bytes == sum(one.held.counted_bytes for one in senders) <= MOST
            assert all(of(name) <= CLIENT_SHARE * MOST for name in ("alice", "bob", "carol"))
        for one in senders:
            one.answered()
        assert budget.held_bytes == 0
        assert budget.coming() == []

    asyncio.run(scene())


async def test_a_body_that_stalls_makes_room_at_once() -> None:
    """Nothing more has to come of it."""
    budget = BodyBudget(MOST, free_bytes=0)
    slow = [Sender(budget, "mallory") for _ in range(2)]
    for one in slow:
        one.send(35)
        await one.read()
    waiting = asyncio.create_task(slow[1].read())
    alice = Sender(budget, "alice")
    alice.send(60, more=False)
    await alice.read()
    with pytest.raises(BodiesFull, match="all of the 100 bytes"):
        await waiting
    assert not await slow[0].refused()
    assert budget.held_bytes == 95


async def test_one_client_leaves_room_to_others() -> None:
    """Also with bodies that are whole, which are not cut any more. Without keys clients are told
    apart by their addresses."""
    budget = BodyBudget(MOST, free_bytes=0)
    whole = [Sender(budget, None, "127.0.0.1") for _ in range(3)]
    for one in whole:
        one.send(25, more=False)
        await one.read()
    more = Sender(budget, None, "127.0.0.1")
    more.send(1)
    with pytest.raises(BodiesFull):
        await more.read()
    other = Sender(budget, None, "127.0.0.2")
    other.send(25)
    await other.read()
    assert budget.held_bytes == MOST


async def test_small_bodies_are_always_read() -> None:
    """However much others have, and though none of that gives way any more."""
    budget = BodyBudget(MOST, free_bytes=10)
    held = []
    for name, size in (("alice", 75), ("bob", 25)):
        one = Sender(budget, name)
        held.append(one)
        one.send(size, more=False)
        await one.read()
    carol = Sender(budget, "carol")
    carol.send(10)
    await carol.read()
    assert budget.held_bytes == MOST
    carol.send(1)
    with pytest.raises(BodiesFull):
        await carol.read()


async def test_operators_see_what_comes_in() -> None:
    """The largest first; not what is whole, or has not begun to come."""
    now = 10.0
    budget = BodyBudget(MOST, free_bytes=0, clock=lambda: now)
    small, large, whole, _ = (Sender(budget, "alice") for _ in range(4))
    small.send(3)
    large.send(9)
    whole.send(20, more=False)
    for one in (small, large, whole):
        await one.read()
    now = 12.5
    assert [
        (one.path, one.key, one.received_bytes, one.age_seconds) for one in budget.coming()
    ] == [("/v1/completions", "alice", 9, 2.5), ("/v1/completions", "alice", 3, 2.5)]


async def test_what_is_kept_with_a_body_counts() -> None:
    """Until the request is answered; what is too much ends the request."""
    budget = BodyBudget(MOST, free_bytes=0)
    one, other = Sender(budget, "alice"), Sender(budget, "bob")
    for sender in (one, other):
        sender.send(10, more=False)
        await sender.read()
    one.held.keep(50)
    assert budget.held_bytes == 70
    with pytest.raises(BodyTooLarge, match="send fewer or smaller images"):
        one.held.keep(16)
    with pytest.raises(BodiesFull):
        other.held.keep(60)
    one.answered()
    other.answered()
    assert budget.held_bytes == 0


# --- what the core answers -----------------------------------------------------------------------


async def test_the_core_bounds_the_bodies_of_its_requests(tmp_path: Any) -> None:
    """Except those of uploads, which go to the disk. Operators see those that come in."""
    file = KeyFile(tmp_path / "keys.json")
    for name in ("alice", "root"):
        scopes = (Scope.ADMIN, Scope.INFER)
        sha256 = digest(f"sk-{name}")
        file.add(Key(name=name, sha256=sha256, created_seconds=0.0, scopes=scopes))
    service: Any = FakeService()
    service.requests = list
    app = create_app(service, access=Access(KeyRing(file.path)), max_bodies_bytes=1_000_000)
    came = asyncio.Event()
    go_on = asyncio.Event()

    async def slowly() -> Any:
        yield b"{" + b" " * 500_000
        came.set()
        await go_on.wait()
        yield b"}"

    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://core") as client:
        alice, root = ({"authorization": f"Bearer sk-{name}"} for name in ("alice", "root"))
        first = asyncio.create_task(client.post("/api/keys", content=slowly(), headers=alice))
        await came.wait()
        second = await client.post("/api/keys", content=b" " * 300_000, headers=alice)
        assert second.status_code == 429
        assert second.json()["error"]["code"] == "too_many_bodies"
        assert second.headers["retry-after"] == "1"
        shown = (await client.get("/api/requests", headers=root)).json()["bodies"]
        assert [(one["path"], one["key"], one["received_bytes"]) for one in shown] == [
            ("/api/keys", "alice", 500_001)
        ]
        go_on.set()
        assert (await first).status_code == 400  # it names no key
        upload = await client.post("/v1/files", content=b" " * 3_000_000, headers=alice)
        assert upload.status_code == 404  # there is no folder for files
