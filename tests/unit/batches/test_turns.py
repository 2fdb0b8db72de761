"""Who runs next: bounded, each request once, owners in turns."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.batches.turns import BatchTurn, Turns


def taken(turns: Turns, now: float = 0.0) -> list[BatchTurn]:
    found = []
    while (turn := turns.next(now)) is not None:
        found.append(turn)
    return found


def test_owners_take_turns() -> None:
    """However many batches one has; an owner's batches come one after the other."""
    turns = Turns(6)
    turns.add("a1", "a", [0, 1])
    turns.add("a2", "a", [0, 1, 2])
    turns.add("b1", "b", [0, 1])

    assert taken(turns) == [
        BatchTurn("a1", 0), BatchTurn("b1", 0), BatchTurn("a1", 1),
        BatchTurn("b1", 1), BatchTurn("a2", 0), BatchTurn("a2", 1),
    ]  # fmt: skip
    turns.ended(BatchTurn("b1", 0))
    assert taken(turns) == [BatchTurn("a2", 2)]


def test_what_is_put_back_waits_with_its_batch() -> None:
    """Others go on meanwhile, and it is the first one afterwards."""
    turns = Turns(2)
    turns.add("a", "a", [0, 1])
    turns.add("b", "b", [0, 1])
    assert taken(turns) == [BatchTurn("a", 0), BatchTurn("b", 0)]
    turns.put_back(BatchTurn("a", 0), 5.0)

    assert taken(turns, 4.0) == [BatchTurn("b", 1)]
    assert turns.next_time(4.0) is None  # nothing could run before something ends
    turns.ended(BatchTurn("b", 0))
    assert turns.next_time(4.0) == 5.0
    assert taken(turns, 5.0) == [BatchTurn("a", 0)]


def test_a_batch_that_is_gone() -> None:
    """Has no more turns; what of it runs still takes its place until it has ended."""
    turns = Turns(2)
    turns.add("a", "a", range(5))
    assert len(taken(turns)) == 2
    turns.remove("a")
    turns.remove("a")
    turns.put_back(BatchTurn("a", 1), 0.0)
    turns.add("b", "a", [0, 1])

    assert taken(turns) == [BatchTurn("b", 0)]
    turns.ended(BatchTurn("a", 0))
    assert taken(turns) == [BatchTurn("b", 1)]
    assert turns.running == 2


steps = st.one_of(
    st.tuples(st.just("add"), st.sampled_from("xyz"), st.integers(0, 4)),
    st.tuples(st.sampled_from(["next", "end", "back", "remove"]), st.integers(0, 9), st.just(0)),
)


@settings(deadline=None)
@given(st.integers(1, 3), st.lists(steps, max_size=40))
def test_each_request_runs_once(at_once: int, told: list[tuple[str, str | int, int]]) -> None:
    """Of batches that were not removed; never more at once than may be; nothing is forgotten."""
    turns = Turns(at_once)
    now = 0.0
    sizes: dict[str, int] = {}
    running: list[BatchTurn] = []
    ended: Counter[BatchTurn] = Counter()
    for what, which, size in told:
        now += 1.0
        if what == "add":
            name = f"{which}{len(sizes)}"
            sizes[name] = size
            turns.add(name, str(which), range(size))
        elif what == "next":
            turn = turns.next(now)
            if turn is not None:
                running.append(turn)
        elif what == "remove":
            name = list(sizes)[int(which) % len(sizes)] if sizes else ""
            turns.remove(name)
            sizes[name] = 0
        elif running:
            turn = running.pop(int(which) % len(running))
            if what == "end":
                turns.ended(turn)
                ended[turn] += 1
            else:
                turns.put_back(turn, now + 2.0)
        assert turns.running == len(running) <= at_once

    while True:
        for turn in running:
            turns.ended(turn)
            ended[turn] += 1
        running = taken(turns, now + 3.0)
        if not running:
            break
    assert max(ended.values(), default=1) == 1
    for name, size in sizes.items():
        assert {BatchTurn(name, n) for n in range(size)} <= ended.keys()
