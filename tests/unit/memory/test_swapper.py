"""The swapper and its book: who waits for whom, what is reaped, and what a failure leaves."""

from __future__ import annotations

import mmap
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.memory import mapping
from appliance.memory.arena import Arena
from appliance.memory.hazards import TransferBook, TransferWaits
from appliance.memory.host_tier import HostTier
from appliance.memory.streams import Copy
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import Transfer, TransferCancelled, TransferFailed, TransferKind
from appliance.memory.vmm_host import HostVmm
from tests.patience import PATIENCE_SECONDS

KV_IN, KV_OUT, WEIGHTS = TransferKind.KV_IN, TransferKind.KV_OUT, TransferKind.WEIGHTS
PAGE = mmap.PAGESIZE


def make(owner: str = "a") -> Transfer:
    return Transfer(KV_IN, owner, 0, 0.0)


class Line:
    """A stream that does nothing by itself: the test ends its transfers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.given: list[tuple[Transfer, set[Transfer], set[Transfer]]] = []
        self.closed = False

    def run(
        self,
        transfer: Transfer,
        copies: Iterable[Copy],
        *,
        after: Sequence[Transfer] = (),
        needs: Sequence[Transfer] = (),
    ) -> None:
        if self.closed:
            raise RuntimeError("closed")
        self.given.append((transfer, set(after), set(needs)))

    def close(self) -> None:
        self.closed = True
        for transfer, _, _ in self.given:
            if not transfer.done:
                transfer.fail(TransferCancelled("closed"), 9.0)


@pytest.fixture
def lines() -> dict[str, Line]:
    return {}


@pytest.fixture
def swapper(lines: dict[str, Line]) -> Swapper:
    return Swapper(lambda name: lines.setdefault(name, Line(name)), clock=lambda: 1.0)


def test_reading_comes_after_writing_and_writing_after_everything() -> None:
    """Rules 2 and 3 of Aegaeon; two that only read know nothing of one another."""
    book = TransferBook()
    writer, reader, other, overwriter, later = (make() for _ in range(5))

    assert book.enter(writer, (), ["x", "y"]) == ((), ())
    assert book.enter(reader, ["x"], ["z"]) == ((writer,), ())
    assert book.enter(other, ["x"], ()) == ((writer,), ())
    order = book.enter(overwriter, (), ["x"])
    assert (order.needs, set(order.after)) == ((), {writer, reader, other})
    assert book.enter(later, ["x"], ()) == ((overwriter,), ())
    book.check_integrity()


def test_reading_and_writing_one_place_needs_its_writer() -> None:
    """In place: it reads what the last one wrote, and the next one reads what it writes."""
    book = TransferBook()
    first, reader, second, third = (make() for _ in range(4))
    book.enter(first, (), ["x"])
    book.enter(reader, ["x"], ())

    assert book.enter(second, ["x"], ["x"]) == ((first,), (reader,))
    assert book.enter(third, ["x"], ()) == ((second,), ())


def test_who_left_is_not_waited_for_and_leaves_nothing_behind() -> None:
    """The book is as large as what is under way, in whatever order that leaves."""
    book = TransferBook()
    transfers = [make() for _ in range(4)]
    book.enter(transfers[0], ["a"], ["b"])
    book.enter(transfers[1], ["b"], ["a"])
    book.leave(transfers[0])

    assert book.enter(transfers[2], ["b", "c"], ()) == ((), ())
    book.enter(transfers[3], (), ["b"])
    for transfer in reversed(transfers[1:]):
        book.leave(transfer)
        book.check_integrity()
    assert len(book) == 0
    assert not book._uses
    with pytest.raises(KeyError):
        book.leave(transfers[1])


def test_a_place_kept_for_no_transfer_is_noticed() -> None:
    """The integrity check can fail."""
    book, transfer = TransferBook(), make()
    book.enter(transfer, ["a"], ())
    del book._places[transfer]
    with pytest.raises(AssertionError, match="'a' is kept"):
        book.check_integrity()


def test_each_kind_has_its_stream(swapper: Swapper, lines: dict[str, Line]) -> None:
    """Kinds overlap; hazards between them are told to the stream."""
    out = swapper.start(KV_OUT, "a", (), nbytes=0, writes=["host"])
    back = swapper.start(KV_IN, "a", (), nbytes=0, reads=["host"], writes=["block"])
    weights = swapper.start(WEIGHTS, "b", (), nbytes=0, writes=["block"])

    assert lines["swap-kv_out"].given == [(out, set(), set())]
    assert lines["swap-kv_in"].given == [(back, set(), {out})]
    assert lines["swap-weights"].given == [(weights, {back}, set())]


def test_what_follows_runs_when_reaped_and_only_once(swapper: Swapper) -> None:
    """Memory that a transfer used is given back by the reaper, in the order of the ends."""
    freed: list[str] = []
    transfers = {
        owner: swapper.start(
            KV_OUT, owner, (), nbytes=0, reads=[owner], then=lambda t: freed.append(t.owner)
        )
        for owner in "abc"
    }
    woken: list[int] = []
    swapper.on_end = lambda: woken.append(1)
    transfers["c"].finish(2.0)
    transfers["a"].fail(OSError("broken"), 2.0)
    assert (freed, len(woken)) == ([], 2)

    assert swapper.reap() == [transfers["c"], transfers["a"]]
    assert freed == ["c", "a"]
    assert swapper.reap() == []
    assert swapper.pending == 1
    swapper.check_integrity()


def test_settling_some_leaves_the_others(swapper: Swapper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those asked for are over and reaped when `settle` returns, even if they failed."""
    freed: list[str] = []

    def then(transfer: Transfer) -> None:
        assert transfer.done
        freed.append(transfer.owner)

    a, b = (swapper.start(KV_IN, owner, (), nbytes=0, then=then) for owner in "ab")
    waited, join = threading.Event(), Transfer.join
    monkeypatch.setattr(Transfer, "join", lambda one: (waited.set(), join(one))[1])
    ender = threading.Thread(
        target=lambda: waited.wait(PATIENCE_SECONDS) and a.fail(OSError("no"), 2.0), daemon=True
    )
    ender.start()
    swapper.settle([a])
    ender.join()

    assert freed == ["a"]
    assert swapper.reap() == []
    swapper.settle([a])
    assert swapper.pending == 1
    b.finish(2.0)
    swapper.settle()
    assert freed == ["a", "b"]


def test_what_follows_may_start_the_next(swapper: Swapper, lines: dict[str, Line]) -> None:
    """A `then` finds its own transfer out of the way."""
    started: list[Transfer] = []

    def again(transfer: Transfer) -> None:
        started.append(swapper.start(KV_IN, "next", (), nbytes=0, writes=["x"]))

    first = swapper.start(KV_IN, "first", (), nbytes=0, writes=["x"], then=again)
    first.fail(OSError("no"), 2.0)
    swapper.reap()

    assert lines["swap-kv_in"].given[-1] == (started[0], set(), set())


def test_closing_ends_and_reaps_all(swapper: Swapper) -> None:
    """Nothing is under way afterwards, and nothing can be started."""
    freed: list[str] = []
    swapper.start(KV_IN, "a", (), nbytes=0, writes=["x"], then=lambda t: freed.append(t.owner))
    swapper.close()
    swapper.close()

    assert freed == ["a"]
    with pytest.raises(RuntimeError, match="closed"):
        swapper.start(KV_IN, "b", (), nbytes=0, writes=["x"])
    assert swapper.pending == 0
    swapper.check_integrity()


def test_a_leak_is_noticed(swapper: Swapper) -> None:
    """The integrity check can fail."""
    swapper.start(KV_IN, "a", (), nbytes=0)
    swapper._pending.clear()
    with pytest.raises(AssertionError, match="1 in the book, 0 pending"):
        swapper.check_integrity()


def test_a_failed_copy_fails_its_readers_and_its_place_is_written_again() -> None:
    """On real streams: what was read in vain is not copied on; a new writer makes it good."""
    vmm, tier = HostVmm(2, PAGE), HostTier.create(4 * PAGE)
    base = vmm.reserve(2 * PAGE)
    vmm.map(base, 0, 2)
    swapper = Swapper(vmm.stream)
    tier.view(0, 1)[0], tier.view(PAGE, 1)[0] = 1, 2

    def broken() -> Iterator[Copy]:
        yield Copy(base, tier.address(0, PAGE), PAGE // 2)
        raise OSError("broken")

    def whole(destination: int, source: int) -> list[Copy]:
        return [Copy(destination, source, PAGE)]

    failed = swapper.start(KV_IN, "a", broken(), nbytes=PAGE, writes=["block"])
    reader = swapper.start(
        KV_OUT,
        "a",
        whole(tier.address(2 * PAGE, PAGE), base),
        nbytes=PAGE,
        reads=["block"],
        writes=["host"],
    )
    writer = swapper.start(
        WEIGHTS, "b", whole(base, tier.address(PAGE, PAGE)), nbytes=PAGE, writes=["block"]
    )
    good = swapper.start(
        KV_OUT,
        "b",
        whole(tier.address(3 * PAGE, PAGE), base),
        nbytes=PAGE,
        reads=["block"],
        writes=["host"],
    )
    swapper.settle()

    assert isinstance(failed.error, TransferFailed)
    assert isinstance(reader.error, TransferFailed)
    assert (writer.error, good.error) == (None, None)
    assert (tier.view(2 * PAGE, 1)[0], tier.view(3 * PAGE, 1)[0]) == (0, 2)
    assert swapper.pending == 0
    swapper.check_integrity()
    swapper.close()
    vmm.release(base, 2 * PAGE)
    vmm.close()
    tier.close()


class WithoutRule2(TransferBook):
    """A defect: who reads does not wait for who writes."""

    def enter(self, *arguments: Any) -> TransferWaits:
        return super().enter(*arguments)._replace(needs=())


@pytest.mark.parametrize("book", [TransferBook, WithoutRule2])
def test_poison_shows_a_read_of_what_has_not_landed(
    book: type[TransferBook], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block swapped out before it was in brings NaNs to the host; by the rules it never is."""
    monkeypatch.setattr("appliance.memory.swapper.TransferBook", book)
    arena, tier = Arena(HostVmm(1, PAGE), poison=True), HostTier.create(2 * PAGE)
    region = arena.reserve("kv", 1)
    region.map([0])
    block = region.slot_address(0)
    host = np.frombuffer(tier.view(0, 2 * PAGE), np.float32)
    host[:] = 1.5
    swapper = Swapper(arena.vmm.stream)
    opened = threading.Event()

    def late() -> Iterator[Copy]:
        assert opened.wait(PATIENCE_SECONDS)
        yield Copy(block, tier.address(0, PAGE), PAGE)

    swapper.start(KV_IN, "a", late(), nbytes=PAGE, reads=[0], writes=["block"])
    out = [Copy(tier.address(PAGE, PAGE), block, PAGE)]
    reader = swapper.start(KV_OUT, "a", out, nbytes=PAGE, reads=["block"], writes=[1])
    if book is WithoutRule2:
        reader.join()
    opened.set()
    swapper.settle()

    seen = host[PAGE // 4 :]
    assert np.isnan(seen).all() if book is WithoutRule2 else (seen == 1.5).all()
    swapper.close()
    region.release()
    arena.vmm.close()
    del host, seen
    tier.close()


@pytest.mark.parametrize("seed", range(10))
def test_random_transfers_end_as_if_done_one_by_one(seed: int) -> None:
    """Three streams at once, failures and cancellations among them, and no byte out of turn."""
    dice = random.Random(seed)
    size, places = 16 * PAGE, 6
    vmm, tier = HostVmm(places, size), HostTier.create(2 * places * size)
    base = vmm.reserve(places * size)
    vmm.map(base, 0, places)
    address = [base + i * size for i in range(places)]
    address += [tier.address(i * size, size) for i in range(2 * places)]
    swapper = Swapper(vmm.stream)
    # What every byte of a place is, None where that is undefined.
    content: list[int | None] = list(range(3 * places))
    for place, start in enumerate(address):
        mapping.view(start, size)[:] = bytes([place]) * size
    done: list[tuple[Transfer, int, int]] = []

    def copies(source: int, target: int, fails: bool) -> Iterator[Copy]:
        for start in range(0, size, PAGE):
            if fails and start == size // 2:
                raise OSError("injected")
            yield Copy(address[target] + start, address[source] + start, PAGE)

    for _ in range(400):
        # The last places are never written: weight_cache, from which the others become good again.
        source, target = dice.randrange(3 * places), dice.randrange(2 * places)
        transfer = swapper.start(
            dice.choice(list(TransferKind)),
            "a",
            copies(source, target, dice.random() < 0.1),
            nbytes=size,
            reads=[source],
            writes=[target],
        )
        done.append((transfer, source, target))
        if dice.random() < 0.1:
            dice.choice(done)[0].cancel()
        if dice.random() < 0.2:
            swapper.reap()
    swapper.settle()
    swapper.check_integrity()

    assert (swapper.pending, len(done)) == (0, 400)
    for transfer, source, target in done:
        content[target] = content[source] if transfer.error is None else None
    assert any(value is not None for value in content[: 2 * places])
    for place, value in enumerate(content):
        if value is not None:
            assert bytes(mapping.view(address[place], size)) == bytes([value]) * size
    swapper.close()
    vmm.release(base, places * size)
    vmm.close()
    tier.close()


HOLDER = """
import mmap, os, sys, threading
from appliance.memory.host_tier import HostTier
from appliance.memory.streams import Copy
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import TransferKind
from appliance.memory.vmm_host import HostVmm
PAGE = mmap.PAGESIZE
tier, vmm = HostTier.attach(int(sys.argv[1]), 4 * PAGE), HostVmm(1, PAGE)
base = vmm.reserve(PAGE)
vmm.map(base, 0)
def copies():
    yield Copy(tier.address(PAGE, PAGE), base, PAGE)
    print(os.fstat(vmm.fd).st_ino, flush=True)
    threading.Event().wait()
Swapper(vmm.stream).start(TransferKind.KV_OUT, "a", copies(), nbytes=2 * PAGE, writes=["host"])
threading.Event().wait()
"""


def test_a_worker_killed_in_mid_transfer_leaves_the_host_tier_to_the_others() -> None:
    """The survivor reads, overwrites and swaps as before; the dead one's pool is gone."""
    tier = HostTier.create(4 * PAGE)
    tier.view(0, 5)[:] = b"mine!"
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tier.fd)],
        stdout=subprocess.PIPE,
        pass_fds=[tier.fd],
        text=True,
    )
    assert child.stdout is not None
    pool = f"/memfd:appliance-pool (deleted) {child.stdout.readline().strip()}"
    assert pool in open_files()
    child.send_signal(signal.SIGKILL)
    child.wait(PATIENCE_SECONDS)
    child.stdout.close()

    assert pool not in open_files()
    vmm = HostVmm(1, PAGE)
    base = vmm.reserve(PAGE)
    vmm.map(base, 0)
    swapper = Swapper(vmm.stream)
    into = [Copy(base, tier.address(0, PAGE), PAGE)]
    back = [Copy(tier.address(PAGE, PAGE), base, PAGE)]
    swapper.start(KV_IN, "a", into, nbytes=PAGE, reads=["mine"], writes=["block"])
    swapper.start(KV_OUT, "a", back, nbytes=PAGE, reads=["block"], writes=["host"]).wait()
    swapper.settle()

    assert bytes(tier.view(PAGE, 5)) == b"mine!"
    swapper.close()
    vmm.release(base, PAGE)
    vmm.close()
    tier.close()


def open_files() -> set[str]:
    """Name and inode of all files that any process we may look at has open."""
    found: set[str] = set()
    for directory in Path("/proc").glob("[0-9]*/fd"):
        try:
            for link in directory.iterdir():
                found.add(f"{link.readlink()} {link.stat().st_ino}")
        except OSError:
            continue
    return found
