"""How many sequences of a key run at once: none beyond its bounds, none left without need."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.access.admission import Admission
from appliance.access.auth import Access, Caller
from appliance.access.keys import Key, KeyFile, KeyRing, Scope
from appliance.access.organizations import Organization
from appliance.access.places import Bounds, Line, Places
from appliance.access.rate_limits import Counts, Meter
from appliance.service.interface import (
    ModelNotFound,
    ModelPlaces,
    QueueFull,
    Sink,
    SubmitRequest,
)
from appliance.vocabulary import FinishReason, RequestClass, WaitCode
from tests.unit.access.test_admission_properties import Client, Room, Sequence, happen

LINES: tuple[Line, ...] = (
    ("a", RequestClass.INTERACTIVE),
    ("a", RequestClass.BATCH),
    ("b", RequestClass.INTERACTIVE),
)
MOST_WAITING = 5

# --- the places ----------------------------------------------------------------------------------


@given(
    bounds=st.builds(
        Bounds,
        of_key=st.none() | st.integers(1, 4),
        of_model=st.none() | st.integers(1, 3),
        starting=st.none() | st.integers(1, 2),
        organization=st.just("acme"),
        of_organization=st.none() | st.integers(1, 5),
    ),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["come", "come", "start", "end", "leave"]),
            st.sampled_from(["alice", "bob"]),
            st.sampled_from(LINES),
            st.integers(0, 9),
        ),
        max_size=60,
    ),
)
def test_places_are_taken_in_order_and_never_left(
    bounds: Bounds, steps: list[tuple[str, str, Line, int]]
) -> None:
    """No bound is passed; an item waits only where a bound says so; items of one key and line run
    in the order in which they came; and each that came runs, waits, left or was refused."""
    places: Places[int] = Places(MOST_WAITING)
    running: dict[int, tuple[str, Line, bool]] = {}
    waiting: dict[tuple[str, Line], list[int]] = {
        (key, line): [] for key in ("alice", "bob") for line in LINES
    }

    def of(key: str) -> int:
        return sum(len(waiting[key, each]) for each in LINES)

    def may_run(key: str, line: Line) -> bool:
        mine = [one for one in running.values() if one[0] == key]
        same = [one for one in mine if one[1][0] == line[0]]
        starting = [one for one in mine if one[1] == line and not one[2]]
        counts = (
            (len(mine), bounds.of_key), (len(same), bounds.of_model),
            (len(starting), bounds.starting), (len(running), bounds.of_organization),
        )  # fmt: skip
        return all(most is None or has < most for has, most in counts)

    for number, (what, key, line, which) in enumerate(steps):
        items = waiting[key, line]
        if what == "come":
            if places.take(key, line, bounds):
                assert not items
                assert may_run(key, line)
                running[number] = key, line, False
            else:
                assert items or not may_run(key, line)
                other = "bob" if key == "alice" else "alice"
                full = of(key) >= MOST_WAITING // (2 if of(other) else 1)
                assert places.wait(key, line, number) is not full
                if not full:
                    items.append(number)
        elif what == "leave" and items:
            places.leave(key, line, items.pop(which % len(items)))
        elif what in ("start", "end") and running:
            ended = sorted(running)[which % len(running)]
            key, line, started = running[ended]
            if what == "end":
                del running[ended]
                places.give_back(key, line, started=started, organization="acme")
            elif not started:
                running[ended] = key, line, True
                places.started(key, line)
        for key in ("alice", "bob"):
            while (item := places.next(key, lambda _: bounds)) is not None:
                line = next(each for each in LINES if waiting[key, each][:1] == [item])
                assert may_run(key, line)
                waiting[key, line].pop(0)
                running[item] = key, line, False
            assert not any(waiting[key, each] and may_run(key, each) for each in LINES)
            assert places.running(key) == sum(one[0] == key for one in running.values())
            assert places.running_of("acme") == len(running)
        assert sorted(places) == sorted(item for items in waiting.values() for item in items)
        assert len(places) == sum(map(len, waiting.values()))


# --- in front of an appliance --------------------------------------------------------------------


class Shared(Room):
    """An appliance that runs so many sequences of each model at once."""

    def __init__(self, places: int) -> None:
        super().__init__(room=1000)
        self._places = places
        self.removed: set[str] = set()

    def places(self, model: str) -> ModelPlaces:
        if model in self.removed:
            raise ModelNotFound(model)
        return ModelPlaces(instances=1, sequences=self._places)

    def submit(self, request: SubmitRequest, sink: Sink) -> Sequence:
        if request.model in self.removed:
            raise ModelNotFound(request.model)
        return super().submit(request, sink)


ASKED = SubmitRequest(id="", model="m", prompt=(1, 2), max_tokens=5, body=b"")


class House:
    """An appliance in front of which keys have three quarters of the places of a model each."""

    def __init__(self, path: Path, keys: list[Key], places: int, max_waiting: int = 64) -> None:
        file = KeyFile(path)
        organization = Organization(name="acme", concurrency=3)
        file.set_organization(organization)
        acme = Counts(organization, 0.0, organization.name)
        for key in keys:
            file.add(key)
        self.service = Shared(places)
        access = Access(KeyRing(path), clock=lambda: 0.0)
        self.admission = Admission(
            self.service,  # type: ignore[arg-type]
            access,
            key_share=0.75,
            max_waiting=max_waiting,
        )
        self._callers = {
            key.name: Caller(Meter(key, 0.0, acme if key.organization else None)) for key in keys
        }
        self._asked = 0

    def ask(self, name: str, times: int = 1, **fields: object) -> list[Client]:
        clients = []
        for _ in range(times):
            self._asked += 1
            request = msgspec.structs.replace(ASKED, id=f"{name}-{self._asked}", **fields)
            client = Client()
            client.generation = self.admission.submit(request, self._callers[name], client)
            clients.append(client)
        return clients

    def live(self, name: str) -> list[str]:
        return [one for one in self.service.live if one.startswith(name)]

    async def start(self) -> None:
        """All that were given to the appliance, and what follows them, get a token."""
        before: list[str] = []
        while (live := list(self.service.live)) != before:
            for one in set(live) - set(before):
                self.service.live[one].produce(None)
            before = live
            await happen()

    async def end(self, name: str) -> None:
        self.service.live[self.live(name)[0]].produce(FinishReason.STOP)
        await happen()


def key(name: str, digit: str, **fields: object) -> Key:
    return Key(name=name, sha256=digit * 64, created_seconds=0.0, **fields)  # type: ignore[arg-type]


async def test_one_key_leaves_places_to_others(tmp_path: Path) -> None:
    """However many sequences it asks for, and two of its prompts at most are before another's."""
    house = House(tmp_path / "keys.json", [key("bob", "b"), key("alice", "a")], places=8)
    house.ask("bob", 20)
    await happen()
    assert len(house.live("bob")) == 2  # their prompts

    house.ask("alice")
    assert len(house.live("alice")) == 1

    await house.start()
    assert len(house.live("bob")) == 6  # of 8
    assert [one.phase for one in house.admission.waiting()] == ["waiting"] * 14
    reason = house.admission.waiting()[0].reason
    assert reason is not None
    assert reason.code is WaitCode.KEY
    assert "as many sequences at once as it may (6 of all models)" in reason.message

    await house.end("bob")
    await house.start()
    assert len(house.live("bob")) == 6
    assert len(list(house.admission.keys_waiting())) == 13


async def test_a_key_that_is_alone_has_all_places(tmp_path: Path) -> None:
    """An operator's key that may ask for no answers is none of the others."""
    operator = key("operator", "c", scopes=(Scope.ADMIN,))
    house = House(tmp_path / "keys.json", [key("bob", "b"), operator], places=8)
    house.ask("bob", 20)
    assert len(house.live("bob")) == 20


async def test_a_key_has_so_many_sequences_at_once(tmp_path: Path) -> None:
    """`concurrency` bounds what runs, not only what is asked over HTTP; more of a request waits."""
    house = House(tmp_path / "keys.json", [key("bob", "b", concurrency=3)], places=8)
    clients = house.ask("bob", 5)
    assert len(house.live("bob")) == 3

    clients[3].leave()  # while it waits
    await house.end("bob")
    assert len(house.live("bob")) == 3
    assert not house.admission.waiting()
    assert clients[3].over


async def test_prompts_that_are_pooled_are_computed_together(tmp_path: Path) -> None:
    """So more of them are given to the appliance at once."""
    house = House(tmp_path / "keys.json", [key("bob", "b"), key("alice", "a")], places=8)
    house.ask("bob", 200, max_tokens=0)
    assert len(house.live("bob")) == 128
    await house.end("bob")
    assert len(house.live("bob")) == 128


async def test_so_many_of_a_key_wait_for_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more is refused, and costs others of the key nothing."""
    monkeypatch.setattr("appliance.access.admission._MOST_WITHOUT_PLACE", 3)
    house = House(tmp_path / "keys.json", [key("bob", "b", concurrency=1)], places=8)
    clients = house.ask("bob", 4)
    with pytest.raises(QueueFull):
        house.ask("bob")
    clients[2].leave()
    house.ask("bob")
    for _ in range(4):
        await house.end("bob")
    assert not house.service.live
    assert not house.admission.waiting()


def failures_of(client: Client) -> list[str]:
    """What the client is told, in a list that grows."""
    failures: list[str] = []
    client.ended = lambda _, failure: failures.append(str(failure))  # type: ignore[method-assign]
    return failures


async def test_an_operator_ends_one_that_waits_for_a_place(tmp_path: Path) -> None:
    """Its client gets an error, and those behind it go on."""
    house = House(tmp_path / "keys.json", [key("bob", "b", concurrency=1)], places=8)
    _, second, third = house.ask("bob", 3)
    failures = failures_of(second)
    assert house.admission.waiting_one(second.generation.id) is not None
    assert house.admission.turn_away(second.generation.id) is True
    assert failures == ["an operator cancelled the request"]
    await house.end("bob")
    assert house.live("bob") == [third.generation.id]


async def test_one_that_cannot_begin_when_it_has_its_place(tmp_path: Path) -> None:
    """It ends with the error, and those behind it go on."""
    house = House(tmp_path / "keys.json", [key("bob", "b", concurrency=1)], places=8)
    _, second, third = house.ask("bob", 3)
    failures = failures_of(second)
    submit = house.service.submit

    def gone(request: SubmitRequest, sink: Sink) -> Sequence:
        if request.id == second.generation.id:
            raise RuntimeError("it is gone")
        return submit(request, sink)

    house.service.submit = gone  # type: ignore[method-assign]
    await house.end("bob")
    assert failures == ["it is gone"]
    assert house.live("bob") == [third.generation.id]


async def test_a_model_is_removed_while_sequences_wait_for_a_place(tmp_path: Path) -> None:
    """They are answered that it was, and those of other models and keys go on."""
    house = House(tmp_path / "keys.json", [key("bob", "b"), key("alice", "a")], places=8)
    first, *others = house.ask("bob", 5)
    failures = [failures_of(one) for one in others[1:]]
    other = house.ask("bob", 3, model="other")[-1]
    house.service.removed.add("m")
    first.leave()
    await happen()
    assert failures == [["m was removed"]] * 3
    assert other.generation.id not in house.service.live
    await house.start()
    assert other.generation.id in house.service.live
    assert len(house.ask("alice", model="other")) == 1


async def test_no_sequence_is_refused_for_its_turn_that_waits_for_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its place when it may also wait for its turn: eight run here, four wait for their turn
    and eight for a place."""
    monkeypatch.setattr("appliance.access.admission._LEAST_POOLED", 12)
    house = House(tmp_path / "keys.json", [key("bob", "b"), key("alice", "a")], 8, max_waiting=4)
    house.service.room = 8
    clients = house.ask("bob", 20, max_tokens=0)
    for ended in range(20):
        assert sum(client.over for client in clients) == ended
        assert len(house.live("bob")) == min(8, 20 - ended)
        await house.end("bob")


async def test_other_classes_of_a_key_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """They may run on other instances."""
    house = House(tmp_path / "keys.json", [key("bob", "b"), key("alice", "a")], places=8)
    house.ask("bob", 3, request_class=RequestClass.BATCH)
    (interactive,) = house.ask("bob")
    assert interactive.generation.id in house.service.live


async def test_keys_share_the_room_to_wait_for_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has taken all of it takes nothing of it from the next one."""
    monkeypatch.setattr("appliance.access.admission._MOST_WITHOUT_PLACE", 10)
    keys = [key(name, name[0], concurrency=1) for name in ("alice", "bob")]
    house = House(tmp_path / "keys.json", keys, places=8)
    house.ask("bob", 11)
    house.ask("alice", 6)
    for name in ("alice", "bob"):
        with pytest.raises(QueueFull):
            house.ask(name)


async def test_keys_of_an_organization_share_its_places(tmp_path: Path) -> None:
    """Both together have no more, each gets what becomes free in turn, and others are not held
    back."""
    keys = [
        key("bob", "b", organization="acme"), key("eve", "e", organization="acme"),
        key("alice", "a"),
    ]  # fmt: skip
    house = House(tmp_path / "keys.json", keys, places=100)
    house.ask("bob", 6)
    house.ask("eve", 6)
    house.ask("alice", 4)
    await house.start()
    assert [len(house.live(name)) for name in ("bob", "eve", "alice")] == [2, 1, 4]
    reason = house.admission.waiting()[0].reason
    assert reason is not None
    assert "the organization 'acme' of its API key has as many sequences" in reason.message

    for first in ("bob", "bob", "eve"):
        await house.end(first)
        await house.start()
        assert len(house.live("bob")) + len(house.live("eve")) == 3
        assert min(len(house.live("bob")), len(house.live("eve"))) == 1
    for _ in range(9):
        await house.end("bob" if house.live("bob") else "eve")
        await house.start()
    assert [len(house.live(name)) for name in ("bob", "eve", "alice")] == [0, 0, 4]
