"""A transfer: what waiters see of it, and the one end it has."""

from __future__ import annotations

import threading

import pytest

from appliance.memory.transfers import Transfer, TransferCancelled, TransferFailed, TransferKind
from tests.patience import PATIENCE_SECONDS


def make(nbytes: int = 10) -> Transfer:
    return Transfer(TransferKind.KV_IN, "a", nbytes, 1.0)


def test_the_first_bytes_can_be_waited_for_alone() -> None:
    """Who needs the first layer goes on when that has landed, and not before."""
    transfer = make()
    went_on = threading.Event()

    def work() -> None:
        transfer.wait(6)
        went_on.set()

    waiter = threading.Thread(target=work)
    waiter.start()
    transfer.land(5)
    assert not went_on.wait(0.02)
    transfer.land(1)

    assert went_on.wait(PATIENCE_SECONDS)
    waiter.join()
    transfer.wait(6)


def test_waiting_for_all_is_waiting_for_the_end() -> None:
    """All bytes landed is not all done: only the executor knows."""
    transfer = make()
    transfer.land(10)
    waiter = threading.Thread(target=transfer.wait)
    waiter.start()
    waiter.join(0.02)
    assert waiter.is_alive()

    transfer.finish(3.0)

    waiter.join(PATIENCE_SECONDS)
    assert not waiter.is_alive()


def test_a_failure_reaches_every_waiter_but_joining_raises_nothing() -> None:
    """Waiters want the bytes, and get the reason; `join` wants the end only."""
    transfer = make()
    transfer.land(4)
    transfer.fail(OSError("disk on fire"), 3.0)

    for nbytes in (None, 4, 5):
        with pytest.raises(TransferFailed, match="kv_in of a: disk on fire") as caught:
            transfer.wait(nbytes)
    assert isinstance(caught.value.__cause__, OSError)
    transfer.join()
    assert transfer.done


def test_its_end_is_reported_once_and_after_the_fact() -> None:
    """Who is told finds it over; a second end is a defect."""
    for end in (lambda t: t.finish(3.0), lambda t: t.fail(TransferCancelled("no"), 3.0)):
        transfer = make()
        told: list[bool] = []
        transfer.on_end = lambda ended, told=told: told.append(ended.done)
        end(transfer)

        assert told == [True]
        with pytest.raises(AssertionError, match="ends twice"):
            transfer.finish(4.0)


def test_a_trace_says_what_moved_and_when() -> None:
    """A transfer that failed moved what had landed; one that never began, began at its end."""
    whole, part, none = make(), make(), make()
    whole.begin(2.0)
    whole.finish(3.0)
    part.begin(2.0)
    part.land(4)
    part.fail(OSError(), 5.0)
    none.fail(OSError(), 7.0)

    assert tuple(whole.trace()) == (TransferKind.KV_IN, "a", 10, 1.0, 2.0, 3.0)
    assert tuple(part.trace()) == (TransferKind.KV_IN, "a", 4, 1.0, 2.0, 5.0)
    assert tuple(none.trace()) == (TransferKind.KV_IN, "a", 0, 1.0, 7.0, 7.0)
    with pytest.raises(AssertionError, match="not over"):
        make().trace()
