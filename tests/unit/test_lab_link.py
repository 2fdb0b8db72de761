"""Links: transfers queue in their lane, lanes share the rate."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.lab.agenda import Agenda, Rank
from appliance.lab.link import Link, Transfer


def finish(agenda: Agenda) -> None:
    while agenda.step(1e6):
        pass


def test_transfers_of_a_lane_go_one_after_the_other() -> None:
    """The second begins when the first is over, and knows how long it waited."""
    agenda = Agenda()
    link = Link(agenda, 100.0)
    over: list[Transfer] = []
    first = link.start("weights", 100, over.append)
    second = link.start("weights", 200, over.append)
    finish(agenda)
    assert over == [first, second]
    assert (first.ended, second.queued_seconds, second.seconds) == (1.0, 1.0, 2.0)


def test_lanes_share_the_rate() -> None:
    """Two at once go at half the rate each; who is left has all of it."""
    agenda = Agenda()
    link = Link(agenda, 100.0)
    over: list[Transfer] = []
    weights = link.start("weights", 200, over.append)
    kv = link.start("kv_in", 50, over.append)
    finish(agenda)
    assert over == [kv, weights]
    assert (kv.ended, weights.ended) == (1.0, 2.5)


def test_a_cancelled_transfer_frees_the_link() -> None:
    """Nobody is told of it, and what is behind it begins at once."""
    agenda = Agenda()
    link = Link(agenda, 100.0)
    over: list[Transfer] = []
    first = link.start("weights", 1000, over.append)
    second = link.start("weights", 100, over.append)
    agenda.at(2.0, Rank.JOB, lambda: link.cancel("weights", first))
    finish(agenda)
    assert over == [second]
    assert second.ended == 3.0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 10**10)), min_size=1, max_size=12))
def test_every_byte_arrives_in_the_time_that_the_rate_takes(
    transfers: list[tuple[str, int]],
) -> None:
    """A link that is never idle ends when all bytes together would have passed."""
    agenda = Agenda()
    link = Link(agenda, 3e9)
    over: list[Transfer] = []
    for lane, nbytes in transfers:
        link.start(lane, nbytes, over.append)
    finish(agenda)
    assert len(over) == len(transfers)
    expected = sum(nbytes for _, nbytes in transfers) / 3e9
    last = over[-1].ended
    assert last is not None
    assert abs(last - expected) < 1e-6


def test_what_happens_at_once_happens_in_the_declared_order() -> None:
    """By rank, then in the order in which it was planned."""
    agenda = Agenda()
    order: list[str] = []
    for name, rank in (
        ("tick", Rank.TICK),
        ("arrival", Rank.ARRIVAL),
        ("job", Rank.JOB),
        ("transfer", Rank.TRANSFER),
        ("second job", Rank.JOB),
    ):
        agenda.at(1.0, rank, lambda name=name: order.append(name))
    agenda.at(0.5, Rank.TICK, lambda: order.append("before"))
    agenda.at(1.0, Rank.JOB, lambda: order.append("never")).call_off()
    assert agenda.step(0.1) is False
    finish(agenda)
    assert order == ["before", "transfer", "job", "second job", "arrival", "tick"]
