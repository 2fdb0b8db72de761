"""Turns between keys: nobody starves, nobody saves up, and a place is never left empty."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from appliance.access.fair_queue import FairQueue

KEYS = "abc"
COSTS = st.integers(1, 50)


def take(queue: FairQueue[tuple[str, int]], tokens: float | None = None) -> tuple[str, int]:
    """The next one, which costs what its second part says."""
    found = queue.peek()
    assert found is not None
    key, item = found
    queue.pop(key, item[1] if tokens is None else tokens)
    return item


def test_a_key_s_own_keep_their_order_and_are_bounded() -> None:
    """One more than it may have waiting is not taken."""
    queue: FairQueue[int] = FairQueue(2)

    assert [queue.push("a", n) for n in (1, 2, 3)] == [True, True, False]
    assert queue.push("b", 4)
    assert [*queue] == [1, 2, 4]
    assert queue.peek() == ("a", 1)


def test_the_key_that_was_served_least_goes_next() -> None:
    """One of ten tokens for ten of one."""
    queue: FairQueue[tuple[str, int]] = FairQueue(100)
    for _ in range(30):
        queue.push("long", ("long", 10))
        queue.push("short", ("short", 1))

    assert Counter(take(queue)[0] for _ in range(22)) == {"long": 2, "short": 20}


def test_no_key_saves_up_while_others_wait() -> None:
    """Who comes later begins where the others are."""
    queue: FairQueue[tuple[str, int]] = FairQueue(100)
    for _ in range(50):
        queue.push("old", ("old", 10))
    for _ in range(20):
        take(queue)
    for _ in range(50):
        queue.push("new", ("new", 10))

    turns = Counter(take(queue)[0] for _ in range(10))
    assert turns["new"] <= 6


def test_output_counts_as_it_comes() -> None:
    """Also that of requests which began before anybody had to wait, from then on."""
    queue: FairQueue[tuple[str, int]] = FairQueue(100)
    queue.charge("a", 1000)  # nobody waits: of no account
    for _ in range(3):
        queue.push("a", ("a", 1))
        queue.push("b", ("b", 1))
    queue.charge("a", 5)
    queue.charge("c", 5)

    assert [take(queue)[0] for _ in range(3)] == ["b", "b", "b"]
    assert [take(queue)[0] for _ in range(3)] == ["a", "a", "a"]
    assert queue.peek() is None


def test_who_leaves_is_forgotten() -> None:
    """From the middle, and the last one."""
    queue: FairQueue[int] = FairQueue(9)
    for n in (1, 2, 3):
        queue.push("a", n)
    queue.remove("a", 2)
    queue.pop("a", 1)
    assert queue.peek() == ("a", 3)
    queue.remove("a", 3)
    assert not queue
    assert queue.push("b", 1)
    assert queue.peek() == ("b", 1)


@given(st.lists(COSTS, min_size=1, max_size=30), st.lists(COSTS, min_size=1, max_size=30))
def test_unfairness_is_bounded(mine: list[int], yours: list[int]) -> None:
    """While two keys wait, neither was served more than the other by more than its largest."""
    queue: FairQueue[tuple[str, int]] = FairQueue(100)
    for cost in mine:
        queue.push("mine", ("mine", cost))
    for cost in yours:
        queue.push("yours", ("yours", cost))
    served = Counter[str]()
    while len({owner for owner, _ in queue}) == 2:
        key, cost = take(queue)
        served[key] += cost
        assert abs(served["mine"] - served["yours"]) <= max(*mine, *yours)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.sampled_from(KEYS), COSTS),
            st.tuples(st.just("pop"), st.just(""), COSTS),
            st.tuples(st.just("charge"), st.sampled_from(KEYS), COSTS),
            st.tuples(st.just("leave"), st.sampled_from(KEYS), COSTS),
        ),
        max_size=60,
    )
)
def test_no_key_starves_and_no_turn_is_lost(steps: list[tuple[str, str, int]]) -> None:
    """While anybody waits there is a next one; each key's leave in order, each once; and who is
    first of its key goes before the others were served more than it by all that was charged."""
    queue: FairQueue[tuple[str, int]] = FairQueue(1000)
    waiting: dict[str, list[tuple[str, int]]] = {key: [] for key in KEYS}
    for number, (what, key, cost) in enumerate(steps):
        if what == "push":
            item = (f"{key}{number}", cost)
            assert queue.push(key, item)
            waiting[key].append(item)
        elif what == "charge":
            queue.charge(key, cost)
        elif what == "leave" and waiting[key]:
            queue.remove(key, waiting[key].pop())
        elif what == "pop" and (found := queue.peek()):
            whose, item = found
            assert waiting[str(whose)].pop(0) == item
            queue.pop(whose, cost)
        assert len(queue) == sum(map(len, waiting.values()))
        assert (queue.peek() is None) == (len(queue) == 0)
    charged = sum(cost for _, _, cost in steps)
    first = next((items[0] for items in waiting.values() if items), None)
    turns = 0
    while (found := queue.peek()) is not None and found[1] != first:
        queue.pop(found[0], 1)
        queue.push(found[0], (f"again{turns}", 1))  # who is served comes back at once
        turns += 1
        assert turns <= len(KEYS) * (charged + 1)
