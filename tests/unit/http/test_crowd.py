"""When descriptors are short, connections without a request give way to others."""

from __future__ import annotations

import logging

import pytest

from appliance.http.crowd import EACH, LEAST_CLOSED, LOG_SECONDS, Crowd, Room, peer_name


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class One:
    """A connection that gives way, unless it is busy."""

    def __init__(self, crowd: Crowd, peer: str, *, busy: bool = False) -> None:
        self.open = True
        self.busy = busy
        crowd.enter(self, (peer, 1), self._give_way)

    def _give_way(self) -> bool:
        self.open = self.busy
        return not self.busy


class Descriptors:
    """How many are in use."""

    number = 10

    def __call__(self) -> int:
        return self.number


def crowd_at(most: int | None, in_use: int = 10) -> Crowd:
    descriptors = Descriptors()
    descriptors.number = in_use
    return Crowd(most, Clock(), descriptors)


def test_while_there_are_descriptors_none_gives_way() -> None:
    crowd = crowd_at(100, in_use=99)
    one = One(crowd, "a")
    assert crowd.room() is Room.THERE
    assert crowd_at(None, in_use=1000).room() is Room.THERE
    assert one.open


def test_descriptors_are_counted_anew_before_they_are_short() -> None:
    """A connection may take three: under TLS."""
    descriptors = Descriptors()
    crowd = Crowd(100, Clock(), descriptors)
    one = One(crowd, "a")
    taken = 0
    while crowd.room() is Room.THERE:
        taken += 1
        descriptors.number += EACH
    assert 0 <= descriptors.number - 100 < EACH
    assert taken >= 30
    assert not one.open


def test_the_oldest_of_the_peer_with_most_give_way() -> None:
    """A peer that has few keeps them, however old they are."""
    crowd = crowd_at(10)
    few = [One(crowd, "a") for _ in range(3)]
    many = [One(crowd, "b") for _ in range(2 * LEAST_CLOSED + 4)]
    assert crowd.room() is Room.SOON
    assert [one.open for one in many] == [False] * LEAST_CLOSED + [True] * (LEAST_CLOSED + 4)
    assert crowd.room() is Room.SOON
    assert [one.open for one in many] == [False] * 2 * LEAST_CLOSED + [True] * 4
    assert all(one.open for one in few)


def test_of_many_descriptors_a_part_is_freed() -> None:
    """To count them is not cheap."""
    crowd = crowd_at(64_000, in_use=64_000)
    ones = [One(crowd, "a") for _ in range(1500)]
    assert crowd.room() is Room.SOON
    assert sum(not one.open for one in ones) == 1000


def test_who_has_a_request_stays() -> None:
    """The next one that has none goes; if all have one, there is no room."""
    crowd = crowd_at(10)
    busy = [One(crowd, "a", busy=True) for _ in range(3)]
    idle = One(crowd, "a")
    assert crowd.room() is Room.SOON
    assert not idle.open
    assert crowd.room() is Room.NONE
    assert all(one.open for one in busy)


def test_who_has_left_is_not_closed() -> None:
    crowd = crowd_at(10)
    gone, there = One(crowd, "a"), One(crowd, "a")
    crowd.leave(gone)
    crowd.leave(gone)
    assert crowd.room() is Room.SOON
    assert (gone.open, there.open) == (True, False)
    assert crowd.room() is Room.NONE


def test_it_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """How many were closed, and who has most of the others."""
    clock = Clock()
    crowd = Crowd(10, clock, Descriptors())
    for _ in range(5 * LEAST_CLOSED):
        One(crowd, "9.9.9.9")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            crowd.room()
        clock.now += LOG_SECONDS
        crowd.room()
    first, second = (record.getMessage() for record in caplog.records)
    assert f"{LEAST_CLOSED} connections without a request were closed" in first
    assert "9.9.9.9" in first
    assert f"{3 * LEAST_CLOSED} connections" in second


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (("10.0.0.7", 5), "10.0.0.7"),
        (("2001:db8:1:2:3:4:5:6", 5), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5), "fe80::/64"),
        (("somewhere", 5), "somewhere"),
        (None, "a local process"),
        ("", "a local process"),
    ],
)
def test_the_name_of_a_peer(address: object, name: str) -> None:
    """A client with IPv6 has a network of its own."""
    assert peer_name(address) == name
