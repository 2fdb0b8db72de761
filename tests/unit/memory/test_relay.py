"""The relay's planner: which path takes which piece, whatever the order in which hops end."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.memory.relay import (
    OWN_PIECES,
    PIECE_BYTES,
    STAGING_BUFFERS,
    Copy,
    Hop,
    Piece,
    RelayPlanner,
    Step,
    Switch,
)
from appliance.vocabulary import Direction

RATE, NVLINK_RATE = 1.0 * PIECE_BYTES, 7.0 * PIECE_BYTES
IN = Direction.IN


def planner(gpus: int = 4, nvlink: float = NVLINK_RATE, *switches: Switch) -> RelayPlanner:
    """Of GPUs that all reach each other; a link takes a piece a second."""
    return RelayPlanner(
        bytes_per_second=RATE,
        nvlink_bytes_per_second=nvlink,
        peers={one: [other for other in range(gpus) if other != one] for one in range(gpus)},
        switches=switches,
    )


def paths(hops: Sequence[Hop]) -> list[tuple[int, int | None]]:
    """Number of the piece, and the peer it goes by."""
    return [(hop.piece.offset // PIECE_BYTES, hop.piece.peer) for hop in hops]


def test_pieces_go_out_in_order_on_the_path_that_ends_them_first() -> None:
    """The own link and each idle peer begin with the first; then all buffers and lines fill."""
    plan = planner(gpus=3)
    plan.begin(0, 100 * PIECE_BYTES)

    hops = plan.next_hops()

    assert [number for number, _ in paths(hops)] == list(range(len(hops)))
    assert paths(hops)[:4] == [(0, None), (1, None), (2, 1), (3, 2)]
    by = Counter(peer for _, peer in paths(hops))
    assert by == {None: OWN_PIECES, 1: STAGING_BUFFERS, 2: STAGING_BUFFERS}
    assert plan.next_hops() == []


def test_a_buffer_is_free_when_its_piece_has_landed() -> None:
    """A pulled piece is sent at once, one at a time; the next is pulled when one has landed."""
    plan = planner(gpus=2)
    plan.begin(0, 100 * PIECE_BYTES)
    first, second = (hop.piece for hop in plan.next_hops() if hop.step is Step.PULL)

    plan.pulled(first)
    assert plan.next_hops() == [Hop(Step.SEND, first)]
    plan.pulled(second)
    assert plan.next_hops() == []
    plan.landed(first)
    assert [hop.step for hop in plan.next_hops()] == [Step.SEND, Step.PULL]


def test_without_a_peer_all_goes_over_the_own_link() -> None:
    """In line, never more than the line takes."""
    plan = planner(gpus=1)
    copy = plan.begin(0, 6 * PIECE_BYTES + 1)
    sizes = []
    line = deque(plan.next_hops())
    while line:
        assert len(line) <= OWN_PIECES
        step, piece = line.popleft()
        sizes.append((step, piece.nbytes))
        plan.landed(piece)
        line.extend(plan.next_hops())
    assert sizes == [(Step.OWN, PIECE_BYTES)] * 6 + [(Step.OWN, 1)]
    assert copy.over
    assert copy.landed_bytes == copy.nbytes


def test_a_peer_gives_way_to_its_own_transfers() -> None:
    """It pulls nothing new from then on, and goes on when they are over."""
    plan = planner(gpus=2)
    plan.begin(0, 100 * PIECE_BYTES)
    pulls = [hop.piece for hop in plan.next_hops() if hop.step is Step.PULL]
    plan.occupy(1, IN)
    for piece in pulls:
        plan.pulled(piece)
        plan.next_hops()
    for piece in pulls:
        plan.landed(piece)
        assert Step.PULL not in [hop.step for hop in plan.next_hops()]
    plan.vacate(1, IN)
    assert [hop.step for hop in plan.next_hops()] == [Step.PULL] * STAGING_BUFFERS


def test_a_peer_with_a_copy_of_its_own_relays_nothing() -> None:
    """Two that load at once share the third, the first one first."""
    plan = planner(gpus=3)
    plan.begin(0, 100 * PIECE_BYTES)
    plan.begin(1, 100 * PIECE_BYTES)

    pulls = [hop.piece for hop in plan.next_hops() if hop.step is Step.PULL]

    assert {(piece.copy.target, piece.peer) for piece in pulls} == {(0, 2)}


def test_a_switch_is_never_asked_for_more_than_it_has() -> None:
    """Its room counts links that are in use, in each direction that it has; a link at a lower rate
    is left to the copies of the GPUs there."""
    root = Switch(1.5 * RATE, [(1, IN), (2, IN)])
    memory = Switch(4 * RATE, [(gpu, way) for gpu in range(6) for way in Direction])
    plan = planner(6, NVLINK_RATE, root, memory)
    plan.occupy(5, Direction.OUT)
    plan.begin(0, 100 * PIECE_BYTES)

    peers = {hop.piece.peer for hop in plan.next_hops() if hop.step is Step.PULL}

    assert peers == {1, 3}  # with 0's own link and what 5 sends out the memory has no more
    assert (root.used, memory.used) == (1, 4)


def test_a_slow_nvlink_is_not_used() -> None:
    """A piece that the own link brings sooner waits for it."""
    plan = planner(2, RATE / 100)
    plan.begin(0, 100 * PIECE_BYTES)
    assert {peer for _, peer in paths(plan.next_hops())} == {None}


def test_the_next_copy_of_a_gpu_begins_on_its_own_link() -> None:
    """It is relayed when the first is over: on NVLink it could delay the first one's end."""
    plan = planner(gpus=2)
    first = plan.begin(0, 4 * PIECE_BYTES)
    second = plan.begin(0, 100 * PIECE_BYTES)
    hops = plan.next_hops()
    assert {hop.piece.copy for hop in hops if hop.step is Step.PULL} == {first}
    assert {hop.piece.copy for hop in hops if hop.step is Step.OWN} == {first, second}


def test_a_cancelled_copy_gives_out_nothing_more() -> None:
    """It is over when what was under way has landed; only then its GPU relays for others."""
    plan = planner(gpus=2)
    copy = plan.begin(0, 100 * PIECE_BYTES)
    under_way = [hop.piece for hop in plan.next_hops()]
    plan.cancel(copy)
    plan.begin(1, 100 * PIECE_BYTES)
    for piece in under_way:
        assert not copy.over
        assert 0 not in [peer for _, peer in paths(plan.next_hops())]
        if piece.peer is not None:
            plan.pulled(piece)
            plan.next_hops()
        plan.landed(piece)
    assert copy.over
    assert 0 in [peer for _, peer in paths(plan.next_hops())]


def test_a_copy_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a copy of 0 bytes: give at least 1"):
        planner().begin(0, 0)


class Links:
    """Carries hops out, each link's in line, in an order that a test draws."""

    def __init__(self, plan: RelayPlanner) -> None:
        self.plan = plan
        self.lines: dict[tuple[str, int], deque[Hop]] = {}
        self.given: dict[Copy, list[Piece]] = {}
        self.landed: Counter[Copy] = Counter()
        self.busy: Counter[int] = Counter()
        self.buffers: Counter[int] = Counter()
        self.open: list[Copy] = []

    def go_on(self) -> None:
        for hop in self.plan.next_hops():
            step, piece = hop
            target, peer = piece.copy.target, piece.peer
            if step is not Step.SEND:
                self.given.setdefault(piece.copy, []).append(piece)
            if step is Step.PULL:
                assert peer is not None
                assert not self.busy[peer]
                assert not any(copy.target == peer for copy in self.open)
                self.buffers[peer] += 1
                assert self.buffers[peer] <= STAGING_BUFFERS
            own = target if peer is None else peer
            link = ("nvlink", target) if step is Step.SEND else ("pcie", own)
            self.lines.setdefault(link, deque()).append(hop)

    def end_one(self, choice: int) -> bool:
        busy = [line for line in self.lines.values() if line]
        if not busy:
            return False
        step, piece = busy[choice % len(busy)].popleft()
        if step is Step.PULL:
            self.plan.pulled(piece)
        else:
            self.landed[piece.copy] += piece.nbytes
            if piece.peer is not None:
                self.buffers[piece.peer] -= 1
            self.plan.landed(piece)
            if piece.copy.over and piece.copy in self.open:
                self.open.remove(piece.copy)
        self.go_on()
        return True


@settings(max_examples=60)
@given(st.data(), st.integers(1, 5), st.sampled_from([0.3, 2.0, 7.0]), st.floats(1, 6))
def test_every_byte_is_copied_once(
    data: st.DataObject, gpus: int, nvlink: float, memory: float
) -> None:
    """Whatever ends first, whatever else the GPUs copy: pieces are given out in order and cover the
    copy, none twice, each lands, and no peer relays what it has no buffer or no time for."""
    switch = Switch(memory * RATE, [(gpu, way) for gpu in range(gpus) for way in Direction])
    links = Links(planner(gpus, nvlink * RATE, switch))
    steps = st.tuples(st.sampled_from("bbceeeeeeeeeoov"), st.integers(0, 40))
    for what, number in data.draw(st.lists(steps, max_size=80)):
        gpu = number % gpus
        if what == "b":
            links.open.append(links.plan.begin(gpu, 1 + number * PIECE_BYTES // 3))
        elif what == "c" and links.open:
            copy = links.open[number % len(links.open)]
            links.plan.cancel(copy)
            if copy.over:
                links.open.remove(copy)
        elif what == "o":
            links.busy[gpu] += 1
            links.plan.occupy(gpu, IN)
        elif what == "v" and links.busy[gpu]:
            links.busy[gpu] -= 1
            links.plan.vacate(gpu, IN)
        links.go_on()
        if what == "e":
            links.end_one(number)
    while links.end_one(data.draw(st.integers(0, 40)) if links.open else 0):
        pass
    assert not links.open
    for copy, pieces in links.given.items():
        ends = [0]
        for piece in pieces:
            assert piece.offset == ends[-1]
            ends.append(piece.offset + piece.nbytes)
        assert links.landed[copy] == copy.landed_bytes == ends[-1]
        assert copy.cancelled or ends[-1] == copy.nbytes
    assert switch.used == sum(1 for gpu in range(gpus) if links.busy[gpu])
