"""What calls come to: each way in which a request may end is in the ledger once, and a month's
budget is reserved before it is spent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from appliance.access.admission import Admission
from appliance.access.auth import Access
from appliance.access.keys import Key, KeyFile, KeyRing, digest
from appliance.access.organizations import Organization
from appliance.engines.protocol import Produced
from appliance.gateway.accounts import Accounts
from appliance.gateway.sessions import FrontEndLost, FrontSettings, Sessions
from appliance.service.front_frames import Settled, Stopped
from appliance.service.interface import GenerationFailed, RequestTimes
from appliance.usage.entries import CUT, WHOLE, Amounts
from appliance.usage.ledger import Ledger
from appliance.vocabulary import FinishReason
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.fake_service import FakeService
from tests.unit.doubles.front import FrontDouble
from tests.unit.usage.test_books import NOW
from tests.unit.usage.test_ledger import Disk, opened

TIMES = RequestTimes(queue_seconds=1.0, load_seconds=0.5, decode_seconds=9.0, device_seconds=2.0)


class House:
    """A core with a ledger; its keys are added before it opens."""

    def __init__(self, folder: Path, ledger: Ledger | None) -> None:
        self.ledger = ledger
        self.service = FakeService()
        self._file = KeyFile(folder / "keys.json")
        self.now = NOW

    def organization(self, **limits: Any) -> None:
        self._file.set_organization(Organization(name="acme", **limits))

    def remove(self, name: str) -> None:
        self._file.remove(name)

    def assign(self, name: str, organization: str | None) -> None:
        self._file.assign(name, organization)

    def add(self, name: str, **fields: Any) -> None:
        key = Key(name=name, sha256=digest(f"sk-{name}"), created_seconds=0.0, **fields)
        self._file.add(key)

    def front(self) -> FrontDouble:
        def clock() -> float:
            return self.now

        self.access = Access(KeyRing(self._file.path), clock=clock, wall_clock=clock)
        admission = Admission(self.service, self.access)  # type: ignore[arg-type]
        settings = FrontSettings(keep_alive_seconds=5.0, max_body_bytes=1000)
        accounts = Accounts(self.access, self.ledger)
        self.sessions = Sessions(self.service, self.access, admission, settings, accounts)  # type: ignore[arg-type]
        return FrontDouble(self.sessions)

    async def written(self) -> None:
        assert self.ledger is not None
        if self.ledger._writing is not None:
            await asyncio.wait_for(asyncio.shield(self.ledger._writing), PATIENCE_SECONDS)

    async def counted(self) -> dict[tuple[str, str, str], tuple[int, int, int]]:
        """Requests, input and output by key, model and outcome."""
        await self.written()
        assert self.ledger is not None
        return {
            cell[1:4]: (one.requests, one.input_tokens, one.output_tokens)
            for cell, one in self.ledger.books.rows()
        }


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with opened(tmp_path / "usage") as ledger:
        house = House(tmp_path, ledger)
        house.add("alice")
        yield house


async def test_the_end_waits_for_the_disk(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has all tokens but the last one before its answer is written down."""
    assert house.ledger is not None
    disk = Disk(house.ledger, monkeypatch)
    disk.free.clear()
    front = house.front()
    front.submit(front.call("sk-alice"), "r")
    house.service.live["r"].times = TIMES
    house.service.live["r"].say("hello")
    await asyncio.to_thread(disk.began.wait, PATIENCE_SECONDS)
    assert front.text("r") == "hell"
    assert front.ends == {}

    disk.free.set()
    await front.until_over("r")

    assert front.text("r") == "hello"
    assert await house.counted() == {("alice", "small", WHOLE): (1, 5, 5)}
    ((_, sums),) = house.ledger.books.rows()
    assert (sums.device_microseconds, sums.waiting_microseconds) == (2_000_000, 1_500_000)


async def test_every_end_is_counted_once(house: House) -> None:
    """Whole, failed, cancelled by the client, left with the connection, lost with the front end;
    what is refused, or ends before anything came of it, is not."""
    front = house.front()
    for name in ("whole", "failed", "aborted", "left", "lost", "early", "refused"):
        call = front.call("sk-alice")
        front.submit(call, name, model="none" if name == "refused" else "small")
        if name not in ("early", "refused"):
            house.service.live[name].feed([1, 2])
        match name:
            case "whole":
                house.service.live[name].say("!")
            case "failed":
                house.service.live[name].fail(GenerationFailed("broken", "it broke"))
            case "aborted" | "early":
                if name == "early":  # it has waited only
                    house.service.live[name].times = RequestTimes(queue_seconds=1.0)
                front.abort(name)
                front.abort(name)
            case "left":
                front.leave(call)
        if name != "lost":
            front.leave(call)
    front.die()

    assert await house.counted() == {
        ("alice", "small", WHOLE): (1, 5, 3), ("alice", "small", CUT): (4, 20, 8),
    }  # fmt: skip


async def test_choices_are_one_request_with_one_prompt(house: House) -> None:
    """As clients are told."""
    front = house.front()
    call = front.call("sk-alice")
    for number in range(3):
        front.submit(call, f"{number}", counts_prompt=number == 0)
    for generation in list(house.service.live.values()):
        generation.say("ab")
    await front.until_over("0", "1", "2")

    assert await house.counted() == {("alice", "small", WHOLE): (1, 5, 6)}


async def test_the_prefix_cache_is_counted(house: House) -> None:
    """What the engine says with its first output; never more than the prompt."""
    front = house.front()
    front.submit(front.call("sk-alice"), "r")
    sink = house.service.live["r"]._sink
    sink.produced(Produced("r", 1, None, None, 4))
    house.service.live["r"].say("b")
    await front.until_over("r")
    await house.written()

    assert house.ledger is not None
    assert [sums.cached_tokens for _, sums in house.ledger.books.rows()] == [4]


@pytest.mark.parametrize("over", [False, True], ids=["live", "over"])
async def test_a_stop_string_counts_what_the_client_is_sent(house: House, over: bool) -> None:
    """Also where the core was done with it already, with more tokens."""
    front = house.front()
    call = front.call("sk-alice")
    front.submit(call, "r")
    house.service.live["r"].feed([1, 2, 3])
    if over:
        house.service.live["r"].say("!")
        await front.until_over("r")
    front.say(Stopped(call, "r", 2))
    await house.written()

    assert front.heard(Settled) == [Settled(call, "r")]
    assert await house.counted() == {("alice", "small", WHOLE): (1, 5, 2)}


async def test_a_line_of_a_batch_that_is_asked_again_counts_once(house: House) -> None:
    """A front end dies with it, another one answers: what is there in the end is the answer."""
    front = house.front()
    caller = house.access.on_behalf_of(digest("sk-alice"))
    assert caller is not None
    body = b'{"model": "small", "messages": [{"role": "user", "content": "hi"}]}'

    async def ask() -> int:
        return (await house.sessions.ask(caller, "/v1/chat/completions", body, "b:1")).status

    first = asyncio.create_task(ask())
    generation = await asyncio.wait_for(house.service.arrivals.get(), PATIENCE_SECONDS)
    generation.feed([1, 2, 3])
    front.die()
    with pytest.raises(FrontEndLost):
        await first
    prompt = len(generation.request.prompt)
    assert await house.counted() == {("alice", "small", CUT): (1, prompt, 3)}

    house.service.script = lambda generation: generation.say("hello!")
    FrontDouble(house.sessions)
    assert await ask() == 200

    assert await house.counted() == {("alice", "small", WHOLE): (1, prompt, 6)}


async def test_choices_of_one_prompt_are_reserved_together_once(house: House) -> None:
    """The first one asks for all; the prompt counts once. What fits the budget is not refused."""
    house.add("poor", tokens_per_month=50)
    front = house.front()
    call = front.call("sk-poor")
    front.submit(call, "a", max_tokens=20, together_tokens=50)
    front.submit(call, "b", max_tokens=20, together_tokens=50, counts_prompt=False)
    assert not front.refused
    assert {"a", "b"} <= house.service.live.keys()

    front.submit(front.call("sk-poor"), "c", max_tokens=20, together_tokens=50)
    assert front.refused["c"].status == 429


async def test_more_than_a_whole_budget_is_a_bad_request(house: House) -> None:
    """No month has as many tokens: to try again later is of no use, and the message says so. Of
    several choices all are counted."""
    house.add("poor", tokens_per_month=50)
    front = house.front()
    front.submit(front.call("sk-poor"), "one", max_tokens=46)
    front.submit(front.call("sk-poor"), "many", max_tokens=20, together_tokens=51)
    for name in ("one", "many"):
        refusal = front.refused[name]
        assert (refusal.status, refusal.code) == (400, "more_than_budget")
        assert "may need 51 tokens, and the whole monthly budget of its key is 50" in (
            refusal.message
        )
        assert "Retry-After" not in dict(refusal.headers)
    front.submit(front.call("sk-poor"), "fits", max_tokens=45)
    assert "fits" in house.service.live


async def test_a_budget_is_reserved_before_it_is_spent(house: House) -> None:
    """Two requests may not have what one of them may need; what is not used is given back; when it
    is spent, the message says when it renews."""
    house.add("poor", tokens_per_month=30)
    front = house.front()
    front.submit(front.call("sk-poor"), "a", max_tokens=20)
    front.submit(front.call("sk-poor"), "b", max_tokens=20)
    refusal = front.refused["b"]
    assert (refusal.status, refusal.code) == (429, "insufficient_quota")
    assert "reserved the rest" in refusal.message
    assert dict(refusal.headers)["Retry-After"] == "1"
    house.service.live["a"].say("x")
    await front.until_over("a")

    front.submit(front.call("sk-poor"), "c", max_tokens=19)
    house.service.live["c"].feed([1] * 19, FinishReason.LENGTH)
    await front.until_over("c")
    front.submit(front.call("sk-poor"), "d", max_tokens=20)

    refusal = front.refused["d"]
    assert "30 tokens, 30 are spent" in refusal.message
    assert "renews on 2026-12-01 UTC" in refusal.message
    assert int(dict(refusal.headers)["Retry-After"]) == 2 * 86_400 + 23 * 3600
    house.now += 3 * 86_400
    front.submit(front.call("sk-poor"), "e", max_tokens=20)
    assert "e" in house.service.live


async def test_a_budget_outlives_the_daemon(house: House) -> None:
    """What the ledger has of the month is spent."""
    house.add("poor", tokens_per_month=12)
    front = house.front()
    front.submit(front.call("sk-poor"), "a", max_tokens=7)
    house.service.live["a"].feed([1] * 7, FinishReason.LENGTH)
    await front.until_over("a")

    front = house.front()  # another run, with new accounts
    front.submit(front.call("sk-poor"), "b", max_tokens=1)

    assert front.refused["b"].code == "insufficient_quota"


async def test_an_organizations_budget_is_one_of_all_its_keys(house: House) -> None:
    """Reserved, spent and renewed as that of a key; the message says whose it is. A key that is
    revoked has spent what it has spent."""
    house.organization(tokens_per_month=30)
    house.add("one", organization="acme", tokens_per_month=29)
    house.add("two", organization="acme")
    front = house.front()
    front.submit(front.call("sk-one"), "a", max_tokens=20)
    front.submit(front.call("sk-two"), "b", max_tokens=20)
    front.submit(front.call("sk-two"), "more", max_tokens=26)
    front.submit(front.call("sk-one"), "own", max_tokens=25)
    assert (front.refused["b"].status, front.refused["b"].code) == (429, "insufficient_quota")
    assert "budget of the organization 'acme' of this key is 30" in front.refused["b"].message
    assert front.refused["more"].code == "more_than_budget"
    assert "budget of the organization 'acme' of its key is 30" in front.refused["more"].message
    assert "monthly budget of its key is 29" in front.refused["own"].message

    house.service.live["a"].feed([1] * 20, FinishReason.LENGTH)
    await front.until_over("a")
    house.remove("one")
    front.submit(front.call("sk-two"), "c", max_tokens=1)

    assert "30 tokens, 25 are spent" in front.refused["c"].message
    assert "renews on 2026-12-01 UTC" in front.refused["c"].message
    assert house.ledger is not None
    assert house.ledger.spent_tokens_of("acme", "2026-11") == 25
    house.now += 3 * 86_400
    front.submit(front.call("sk-two"), "d", max_tokens=1)
    assert "d" in house.service.live


async def test_a_key_that_changes_its_organization(house: House) -> None:
    """What began before counts for the one before; what was reserved there is given back there."""
    house.organization(tokens_per_month=30)
    house.add("one", organization="acme")
    house.add("two", organization="acme")
    front = house.front()
    front.submit(front.call("sk-one"), "a", max_tokens=20)
    house.assign("one", None)
    front.submit(front.call("sk-one"), "b", max_tokens=1000)
    house.service.live["a"].say("x")
    await front.until_over("a")
    front.submit(front.call("sk-two"), "c", max_tokens=19)

    assert {"b", "c"} <= house.service.live.keys()
    await house.written()
    assert house.ledger is not None
    assert [cell.organization for cell, _ in house.ledger.books.rows()] == ["acme"]


async def test_without_a_ledger_a_budget_lets_nothing_through(tmp_path: Path) -> None:
    """Other keys are served."""
    house = House(tmp_path, None)
    house.add("poor", tokens_per_month=12)
    house.add("alice")
    house.organization(tokens_per_month=12)
    house.add("member", organization="acme")
    front = house.front()
    front.submit(front.call("sk-poor"), "a")
    front.submit(front.call("sk-member"), "of acme")
    front.submit(front.call("sk-alice"), "b")

    for name in ("a", "of acme"):
        refusal = front.refused[name]
        assert (refusal.status, refusal.code) == (503, "budget_not_counted")
    assert "b" in house.service.live


async def test_when_nothing_more_can_be_kept_requests_are_refused(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than forgotten."""
    monkeypatch.setattr("appliance.usage.ledger.MAX_PENDING", 0)
    front = house.front()
    front.submit(front.call("sk-alice"), "a")

    assert (front.refused["a"].status, front.refused["a"].code) == (503, "usage_not_counted")


def test_amounts_add_up_and_take_away() -> None:
    assert Amounts(1, 2) + Amounts(3, 4) == Amounts(4, 6)
    assert Amounts(4, 6) - Amounts(3, 4) == Amounts(1, 2)
    assert not Amounts(1, 2) - Amounts(1, 2)
