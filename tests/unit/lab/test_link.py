"""Links: transfers queue in their lane, lanes share the rate."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.lab.sim.event_queue import Agenda, Rank
from appliance.lab.sim.link import Link, LinkTransfer, Root
from appliance.lab.sim.topology import Wiring
from tests.unit.lab.bench import SLAB, box


def finish(agenda: Agenda) -> None:
    while agenda.step(1e6):
        pass


def test_transfers_of_a_lane_go_one_after_the_other() -> None:
    """The second begins when the first is over, and knows how long it waited."""
    agenda = Agenda()
    link = Link(agenda, 100.0)
    over: list[LinkTransfer] = []
    first = link.start("weights", 100, over.append)
    second = link.start("weights", 200, over.append)
    finish(agenda)
    assert over == [first, second]
    assert (first.ended, second.queued_seconds, second.seconds) == (1.0, 1.0, 2.0)


def test_lanes_share_the_rate() -> None:
    """Two at once go at half the rate each; who is left has all of it."""
    agenda = Agenda()
    link = Link(agenda, 100.0)
    over: list[LinkTransfer] = []
    weights = link.start("weights", 200, over.append)
    kv = link.start("kv_in", 50, over.append)
    finish(agenda)
    assert over == [kv, weights]
    assert (kv.ended, weights.ended) == (1.0, 2.5)


def test_a_cancelled_transfer_frees_the_link() -> None:
    """Nobody is told of it, and what is behind it begins at once."""
    agenda = Agenda()
    link = Link(agenda, 100.0)
    over: list[LinkTransfer] = []
    first = link.start("weights", 1000, over.append)
    second = link.start("weights", 100, over.append)
    agenda.at(2.0, Rank.JOB, lambda: link.cancel("weights", first))
    finish(agenda)
    assert over == [second]
    assert second.ended == 3.0


def test_links_under_a_root_share_its_rate_while_they_are_in_use() -> None:
    """Evenly, and none is faster than it is alone; who is left has what it can take."""
    agenda = Agenda()
    root = Root(120.0)
    links = [Link(agenda, 100.0, root) for _ in range(3)]
    over: list[LinkTransfer] = []
    first = links[0].start("weights", 100, over.append)
    second = links[1].start("weights", 120, over.append)
    agenda.at(1.0, Rank.JOB, lambda: links[2].start("kv_in", 20, over.append))
    finish(agenda)
    # 60 each for a second; then 40 each until the third has its 20; then 60, then 100 again.
    assert [one.nbytes for one in over] == [20, 100, 120]
    assert over[0].ended == pytest.approx(1.5)
    assert first.ended == pytest.approx(1.5 + 20 / 60)
    assert second.ended == pytest.approx(1.5 + 20 / 60 + 20 / 100)


def test_instances_share_roots_with_their_neighbours() -> None:
    """Two GPUs to a root: instances of one GPU in pairs; those of two GPUs have a root of their
    own, and half of it for each GPU. Directions do not share."""

    def seconds(instances: list[int], **changed: object) -> list[float]:
        agenda = Agenda()
        over: list[LinkTransfer] = []
        wiring = Wiring(agenda, msgspec.structs.replace(box(4), **changed))
        for instance in instances:
            wiring.inwards(instance).start("weights", 4 * SLAB, over.append)
        wiring.outwards(0).start("kv_out", 4 * SLAB, over.append)
        finish(agenda)
        return [round(one.ended or 0.0, 6) for one in over]

    assert seconds([0, 1]) == [1.0, 1.0, 1.0]
    assert seconds([0, 1], gpus_per_root=2) == [1.0, 2.0, 2.0]
    assert seconds([1, 2], gpus_per_root=2) == [1.0, 1.0, 1.0]
    wide = {"root_pcie_bytes_per_second": 16 * SLAB}
    assert seconds([0, 1], gpus_per_root=2, **wide) == [1.0, 1.0, 1.0]
    assert seconds([0, 1], gpus_per_root=2, tp=2) == [2.0, 2.0, 2.0]
    assert seconds([0, 1], gpus_per_root=2, tp=4) == [2.0, 2.0, 2.0]


def test_the_memory_of_the_host_is_shared_by_all_links_and_both_directions() -> None:
    """A copy has its link's rate, and no more than its part of what the memory has; an instance of
    two GPUs takes two parts. Under a root that is shorter, its share of that counts."""

    def seconds(*copies: tuple[int, bool], **changed: object) -> list[float]:
        agenda = Agenda()
        over: list[LinkTransfer] = []
        wiring = Wiring(agenda, msgspec.structs.replace(box(4), **changed))
        for instance, inwards in copies:
            link = wiring.inwards(instance) if inwards else wiring.outwards(instance)
            link.start("kv", 4 * SLAB, over.append)
        finish(agenda)
        return [round(one.ended or 0.0, 6) for one in over]

    both, four = [(0, True), (0, False)], [(0, True), (1, True), (2, False), (3, False)]
    assert seconds(*both) == [1.0, 1.0]
    memory = {"host_bytes_per_second": 6.0 * SLAB}
    assert seconds(both[0], **memory) == [1.0]
    assert seconds(*both, **memory) == pytest.approx([4 / 3] * 2)
    assert seconds(*four, **memory) == pytest.approx([8 / 3] * 4)
    assert seconds(both[0], **memory, tp=2) == pytest.approx([4 / 3])
    # Two under a root get 2 slabs a second each, the third 2 of the memory's 6.
    three = [(0, True), (1, True), (2, True)]
    assert seconds(*three, **memory, gpus_per_root=2) == [2.0, 2.0, 2.0]
    # Of ample memory the third has all that its link takes.
    ample = {"host_bytes_per_second": 24.0 * SLAB}
    assert seconds(*three, **ample, gpus_per_root=2) == [1.0, 2.0, 2.0]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 10**10)), min_size=1, max_size=12),
    st.floats(1e9, 9e9),
)
def test_a_root_that_is_never_idle_passes_all_bytes_in_its_time(
    transfers: list[tuple[int, int]], rate: float
) -> None:
    """However they come and go, if one link alone could use all of it."""
    agenda = Agenda()
    root = Root(rate)
    links = [Link(agenda, 9e9, root) for _ in range(4)]
    over: list[LinkTransfer] = []
    for link, nbytes in transfers:
        links[link].start("weights", nbytes, over.append)
    finish(agenda)
    assert len(over) == len(transfers)
    total = sum(nbytes for _, nbytes in transfers)
    assert over[-1].ended == pytest.approx(total / rate, rel=1e-6)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 10**10)), min_size=1, max_size=12))
def test_every_byte_arrives_in_the_time_that_the_rate_takes(
    transfers: list[tuple[str, int]],
) -> None:
    """A link that is never idle ends when all bytes together would have passed."""
    agenda = Agenda()
    link = Link(agenda, 3e9)
    over: list[LinkTransfer] = []
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
