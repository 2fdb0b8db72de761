"""What clients get under a change, from their requests to whether it is rolled back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from appliance.daemon.autopilot.control import Control, Moment, Seen, StartReplay, Use
from appliance.daemon.autopilot.promise_count import MOST_KEYS, PromiseCount
from appliance.engines.protocol import Produced
from appliance.service.autopilot import (
    AutopilotMode,
    AutopilotNote,
    AutopilotStep,
    AutopilotTerms,
    Promises,
)
from appliance.service.generation import RequestStream
from appliance.service.interface import SubmitRequest
from appliance.service.policy_report import PolicyChoice
from appliance.vocabulary import RequestId
from tests.unit.daemon.autopilot.test_control import OLD, UNIX, advice

WATCH = 300.0
TERMS = AutopilotTerms(mode=AutopilotMode.APPLY, interval_seconds=400.0, watch_seconds=WATCH)
ENDS = (AutopilotStep.CONFIRMED, AutopilotStep.ROLLED_BACK)


class Sink:
    """A client that takes everything."""

    def produced(self, produced: object) -> None:
        pass

    def ended(self, times: object, failure: object) -> None:
        pass


class House:
    """The counter and the control, with clients whose requests the test answers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.changes = 0
        self.active = OLD
        self.count = PromiseCount(lambda: self.changes, lambda: WATCH)
        self.control = Control(TERMS, OLD)
        self.live: list[RequestStream] = []
        self.notes: list[AutopilotNote] = []

    @property
    def promises(self) -> Promises:
        return self.count.total(self.live)

    def ask(self, key: str | None) -> RequestStream:
        request = SubmitRequest(
            id=RequestId("r"), model="m", prompt=(), max_tokens=9, body=b"", key=key
        )
        stream = RequestStream(request, self.now, Sink(), lambda *_: None, lambda *_: None)
        self.count.arrived(stream)
        self.live.append(stream)
        return stream

    def token(self, stream: RequestStream, *, late: bool = False) -> None:
        self.count.produced(stream, 1, late=late)
        stream.push(Produced(request=stream.id, token=1))

    def end(self, stream: RequestStream) -> None:
        self.count.completed(stream)
        self.live.remove(stream)

    def serve(self, key: str | None, requests: int = 1, *, late: bool = False) -> None:
        for _ in range(requests):
            stream = self.ask(key)
            for _ in range(10):
                self.token(stream, late=late)
            self.end(stream)

    def refuse(self, key: str | None, requests: int = 1) -> None:
        for _ in range(requests):
            stream = self.ask(key)
            self.count.broken(stream)
            self.live.remove(stream)

    def judged(self, before: Callable[[], None], after: Callable[[], None]) -> AutopilotNote:
        """How a change ends: every five seconds this happens before it, and that after it."""
        while not self.notes or self.notes[-1].what not in ENDS:
            (before if self.active == OLD else after)()
            for action in self.control.tick(self._moment, self._seen):
                if isinstance(action, StartReplay):
                    (use,) = self.control.advised(self._moment, self._seen, advice())
                    assert isinstance(use, Use)
                    self._use(use.choice)
                elif isinstance(action, Use):
                    self._use(action.choice)
                elif isinstance(action, AutopilotNote):
                    self.notes.append(action)
            self.now += 5.0
        assert self.notes[0].what is AutopilotStep.APPLIED
        return self.notes[-1]

    @property
    def _moment(self) -> Moment:
        return Moment(seconds=self.now, unix_seconds=UNIX + self.now)

    @property
    def _seen(self) -> Seen:
        return Seen(active=self.active, promises=self.promises)

    def _use(self, choice: PolicyChoice) -> None:
        self.active = choice
        self.changes += 1
        told = self.control.used(self._moment, self._seen)
        self.notes += [note for note in told if isinstance(note, AutopilotNote)]


@pytest.fixture
def house() -> House:
    return House()


# --- a policy that starves -----------------------------------------------------------------------


def test_a_policy_that_starves_one_key_of_two_is_rolled_back(house: House) -> None:
    """It answers all of the other one, in time. What the starved key had answered before says how
    many of its requests count."""

    def before() -> None:
        house.serve("A", 1)
        house.serve("B", 8)
        house.serve("B", 1, late=True)

    def after() -> None:
        house.serve("A", 1)
        house.refuse("B", 9)

    end = house.judged(before, after)
    assert end.what is AutopilotStep.ROLLED_BACK
    assert end.before == pytest.approx(0.9)
    assert (end.after or 0) < 0.6


def test_a_policy_that_answers_one_in_twenty_is_rolled_back(house: House) -> None:
    """All have one key, and what it answers is in time; a third was late before."""

    def before() -> None:
        house.serve(None, 13)
        house.serve(None, 7, late=True)

    def after() -> None:
        house.serve(None, 1)
        house.refuse(None, 19)

    end = house.judged(before, after)
    assert end.what is AutopilotStep.ROLLED_BACK
    assert end.before == pytest.approx(0.65)
    assert end.after == pytest.approx((1 + 1 / 20) / 2, abs=0.01)


def test_few_requests_of_which_none_is_answered_are_reason_enough(house: House) -> None:
    """Half of them were answered before: too few count after it to judge by a share."""

    def before() -> None:
        house.refuse("A", house.now % 10 == 0)
        house.serve("A", house.now % 20 == 0)

    end = house.judged(before, lambda: house.refuse("A"))
    assert end.what is AutopilotStep.ROLLED_BACK


# --- a change that changes nothing ---------------------------------------------------------------


def test_what_is_refused_as_before_is_no_reason(house: House) -> None:
    """Two thirds of a key's requests, before and after: as many count as it has answers, and what
    it had answered before does not count beside these."""

    def same() -> None:
        house.serve("A", 2)
        house.refuse("A", 4)

    end = house.judged(same, same)
    assert end.what is AutopilotStep.CONFIRMED
    assert end.before == pytest.approx(0.75, abs=0.05)
    assert end.after == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("seconds", [10, 150, 260])
def test_long_answers_are_no_reason(house: House, seconds: int) -> None:
    """One of ten has a late first token, before and after. That is known at once, and that the
    others are kept only at their end."""
    began: dict[int, float] = {}
    asked = 0

    def same() -> None:
        nonlocal asked
        for stream in list(house.live):
            house.token(stream)
            if house.now - began[id(stream)] >= seconds:
                house.end(stream)
        for _ in range(2):
            asked += 1
            stream = house.ask(None)
            began[id(stream)] = house.now
            house.token(stream, late=asked % 10 == 0)

    end = house.judged(same, same)
    assert end.what is AutopilotStep.CONFIRMED
    assert end.after == pytest.approx(end.before, abs=0.02)


def test_a_request_under_way_is_kept_until_it_misses(house: House) -> None:
    """It counts once, and no time has more missed than there are."""
    house.serve(None)
    start, stream = house.promises, house.ask(None)
    assert house.promises.since(start).requests == 0
    house.token(stream)
    middle = house.promises
    assert middle.since(start) == Promises(tokens=1, requests=1)
    house.count.broken(stream)
    assert house.promises.since(middle) == Promises(requests=1, missed=1)
    assert house.promises.since(start) == Promises(tokens=1, requests=1, missed=1)

    other = house.ask(None)
    house.token(other)
    middle = house.promises
    house.end(other)
    assert house.promises.since(middle) == Promises()


# --- one client ----------------------------------------------------------------------------------


@pytest.mark.parametrize("answered", [0, 2])
def test_one_key_on_a_quiet_watch_forces_nothing(house: House, answered: int) -> None:
    """Twenty-five of its requests are refused, and fewer than twenty others count. So many of them
    are reported as it had answered before, and a few."""
    served = answered

    def before() -> None:
        nonlocal served
        house.serve("good")
        if served and house.now > 200:
            served -= 1
            house.serve("bad")

    def after() -> None:
        house.refuse("bad")
        if house.now % 75 == 0:
            house.serve("good")

    end = house.judged(before, after)
    assert end.what is AutopilotStep.CONFIRMED


def test_keys_that_come_and_go_are_forgotten(house: House) -> None:
    """Those that were active last are remembered."""
    house.serve("first", 50)
    for number in range(MOST_KEYS - 1):
        house.serve(f"k{number}")
    middle = house.promises
    house.refuse("first", 10)
    assert house.promises.since(middle).missed == 10
    house.serve("one more", 1)
    middle = house.promises
    house.refuse("k0", 1)
    assert house.promises.since(middle).missed == 0
    house.refuse("first", 10)
    assert house.promises.since(middle).missed == 10


def test_what_was_answered_long_ago_does_not_count(house: House) -> None:
    """A key that was served two watches ago, and nothing since, cannot have its refusals count."""
    house.serve("A", 50)
    house.now += 2.5 * WATCH
    house.changes += 1
    house.serve("B", 1)
    middle = house.promises
    house.refuse("A", 50)
    assert house.promises.since(middle).missed == 0
