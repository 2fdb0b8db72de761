"""What the core keeps of live requests besides their tokens has a bound, as has one key's part."""

from __future__ import annotations

import pytest

from appliance.gateway.held_bodies import FREE_BYTES, OWNER_SHARE, HeldBodies, TooMuchHeld
from appliance.gateway.held_bodies import MAX_BYTES as MAX_HELD_BYTES
from appliance.service.front_frames import MAX_TOGETHER_BYTES

MIB = 1 << 20


def test_small_requests_do_not_count() -> None:
    held = HeldBodies(MIB)
    for number in range(100):
        held.take(str(number), "", FREE_BYTES)
    assert held.size_bytes == 0


def test_one_key_leaves_room_for_others() -> None:
    held = HeldBodies(4 * MIB)
    for number in range(2):
        held.take(str(number), "greedy", MIB + FREE_BYTES)
    held.take("2", "greedy", MIB + FREE_BYTES)
    with pytest.raises(TooMuchHeld) as refused:
        held.take("3", "greedy", MIB)
    assert (refused.value.status, refused.value.body.error.code) == (429, "too_much_held")
    held.take("3", "other", MIB + FREE_BYTES)
    assert held.size_bytes == 4 * MIB


def test_all_choices_of_a_request_fit() -> None:
    """What a front end lets pass is not refused for ever."""
    held = HeldBodies()
    for choice in range(16):
        held.take(str(choice), "one", MAX_TOGETHER_BYTES // 16 + FREE_BYTES)
    assert MAX_TOGETHER_BYTES < OWNER_SHARE * MAX_HELD_BYTES


def test_all_together_have_a_bound() -> None:
    held = HeldBodies(4 * MIB)
    for owner in ("a", "b"):
        held.take(owner, owner, 2 * MIB + FREE_BYTES)
    with pytest.raises(TooMuchHeld):
        held.take("c", "c", FREE_BYTES + 1)
    held.release("a")
    held.take("c", "c", FREE_BYTES + 1)


def test_what_is_over_counts_no_more() -> None:
    held = HeldBodies(MIB)
    held.take("a", "x", MIB // 2)
    held.release("a")
    held.release("a")
    held.release("never taken")
    assert held.size_bytes == 0
