"""KV that waits long goes from a short host tier to disk, and comes back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from appliance.scheduling import host_room
from appliance.scheduling.host_room import LONG_SECONDS, RETRY_SECONDS
from appliance.scheduling.lifecycle import KvPlace, Stage
from appliance.scheduling.state import RequestState
from appliance.scheduling.wait_reasons import wait_reason
from appliance.vocabulary import (
    DropSpilledKv,
    FinishReason,
    ModelEvictRequested,
    RequestClass,
    RestoreKv,
    SpillKv,
    Ticked,
    WaitCode,
)
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble

WEIGHT_SLABS = 4
CHAT, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
NAMES = ("a1", "a2", "a3")


def box(*, kv_slabs: int, disk_slabs: int = 100, slabs: int = 48) -> ClusterDouble:
    """An instance with two models, with so many slabs of the host tier and of a disk for KV, three
    blocks of 16 tokens each."""
    models = {name: ModelDouble(WEIGHT_SLABS, shape()) for name in "ab"}
    cluster = ClusterDouble(
        models,
        slabs=slabs,
        host_slabs=2 * WEIGHT_SLABS + kv_slabs,
        disk_slabs=disk_slabs,
    )
    cluster.start()
    cluster.settle()
    return cluster


def full(*kinds: RequestClass, kv_slabs: int = 13, disk_slabs: int = 100) -> ClusterDouble:
    """Three requests of model a, of these kinds or all chats, decode on an instance that serves
    model b as well. Each has 13 blocks in the host tier, where KV has 39: a thirteenth is a slab.
    """
    cluster = box(kv_slabs=kv_slabs, disk_slabs=disk_slabs)
    for name, kind in zip(NAMES, kinds or (CHAT,) * 3, strict=True):
        cluster.ask(name, "a", prompt=130, output=70, kind=kind)
    lives = cluster.world.lives
    cluster.work_until(0, lambda: all(lives[name].produced > 2 for name in NAMES))
    return cluster


def swap_out(cluster: ClusterDouble, *, after_seconds: float) -> None:
    """All KV leaves the device, and is in the host tier so many seconds after the last token."""
    cluster.tell(ModelEvictRequested(model="a"))
    cluster.work_until(0, lambda: bool(cluster.up[0].leaving))
    cluster.now += after_seconds
    cluster.work_until(0, lambda: not any(r.kv is KvPlace.LEAVING for r in states(cluster)))


def pause(cluster: ClusterDouble, *names: str) -> None:
    """Their clients take nothing, and their KV leaves the device."""
    for name in names:
        cluster.stall(name)
    cluster.work_until(0, lambda: all(place(cluster, n) in OFF_DEVICE for n in names))


OFF_DEVICE = (KvPlace.HOST, KvPlace.SPILLING)


def states(cluster: ClusterDouble) -> list[RequestState]:
    return list(cluster.machine.requests.values())


def place(cluster: ClusterDouble, name: str) -> KvPlace:
    return cluster.machine.requests[name].kv


def spilled(cluster: ClusterDouble) -> list[str]:
    """The requests whose KV was ordered to disk so far, in order."""
    return [command.request for command in cluster.commands(SpillKv)]


def wait(cluster: ClusterDouble, seconds: float) -> None:
    cluster.now += seconds
    cluster.tell(Ticked())


def finish(cluster: ClusterDouble) -> None:
    """All clients read on, and all requests end as they should; nothing of them is left."""
    for name in NAMES:
        cluster.read_on(name)
    cluster.settle()
    ends = {"stop", "length", "cancelled"}
    assert {life.outcome for life in cluster.world.lives.values()} <= ends
    assert cluster.machine.host.kv_slabs == 0
    assert not cluster.machine.disk.held_bytes
    assert not cluster.disk.files


def test_kv_of_slow_clients_goes_to_disk_and_comes_back() -> None:
    """It makes room, is not computed again, and nothing of it stays on disk."""
    cluster = full()
    pause(cluster, "a1")
    ordered = spilled(cluster)
    cluster.work_disk()
    there, room = place(cluster, "a1"), cluster.machine.requests["a1"].host_offsets
    finish(cluster)

    assert (ordered, there, room) == (["a1"], KvPlace.DISK, ())
    assert [command.request for command in cluster.commands(RestoreKv)] == ["a1"]
    assert cluster.world.lives["a1"].prefills == 1
    assert not any(cluster.machine.recomputed_tokens.values())


@pytest.mark.parametrize(
    ("kinds", "paused", "first"),
    [
        ((CHAT, BATCH, CHAT), "", "a2"),
        ((CHAT, BATCH, BATCH), "", "a3"),
        ((CHAT, BATCH, CHAT), "a1", "a1"),
    ],
)
def test_what_goes_first(kinds: Sequence[RequestClass], paused: str, first: str) -> None:
    """The KV of slow clients, then that of batch work, the youngest first."""
    cluster = full(*kinds)
    if paused:
        cluster.stall(paused)
    swap_out(cluster, after_seconds=2 * LONG_SECONDS)
    ordered = spilled(cluster)
    finish(cluster)

    assert ordered == [first]


def test_kv_of_requests_that_ran_just_now_stays() -> None:
    cluster = full(BATCH, BATCH, BATCH)
    swap_out(cluster, after_seconds=LONG_SECONDS / 2)
    finish(cluster)

    assert not spilled(cluster)


def test_kv_of_chats_stays() -> None:
    """Prompts would have to wait for it to come back."""
    cluster = full()
    swap_out(cluster, after_seconds=2 * LONG_SECONDS)
    finish(cluster)

    assert not spilled(cluster)


def test_kv_of_chats_goes_where_kv_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chats of two models that take turns, and outgrow the host tier."""
    monkeypatch.setattr(host_room, "LONG_SECONDS", 0.0)
    cluster = box(kv_slabs=20, slabs=30)
    lives = [cluster.ask(f"x{n}", "ab"[n % 2], prompt=20, output=180) for n in range(8)]
    while not spilled(cluster):
        assert cluster.work(0)
    given_up = list(cluster.machine.request_book.displaced)
    cluster.settle()

    assert given_up
    assert [life.produced for life in lives] == [180] * 8
    assert cluster.commands(RestoreKv)


@pytest.mark.parametrize(("kv_slabs", "disk_slabs"), [(13, 0), (13, 2), (15, 100)])
def test_kv_stays_where_it_has_room_or_the_disk_has_none(kv_slabs: int, disk_slabs: int) -> None:
    cluster = full(kv_slabs=kv_slabs, disk_slabs=disk_slabs)
    pause(cluster, "a1")
    ordered = spilled(cluster)
    finish(cluster)

    assert not ordered


def test_all_slow_clients_make_room_for_requests_that_wait() -> None:
    """The more so as there would be enough room free without them."""
    cluster = full(kv_slabs=15)
    pause(cluster, "a1", "a2")
    before = spilled(cluster)
    chat = cluster.ask("b1", "b", prompt=130, output=5)
    cluster.work_until(0, lambda: bool(cluster.machine.request_book.host_queue))
    wait(cluster, 1.5)
    ordered = spilled(cluster)
    cluster.settle()

    assert not before
    assert set(ordered) == {"a1", "a2"}
    assert chat.outcome is FinishReason.LENGTH
    finish(cluster)


def test_none_goes_twice_without_a_token() -> None:
    cluster = restoring()
    cluster.work_disk()
    cluster.ask("a4", "a", prompt=130, output=70)
    cluster.stall("a1")
    wait(cluster, 2 * LONG_SECONDS)
    ordered = spilled(cluster)
    finish(cluster)

    assert ordered == ["a1"]


def test_a_disk_that_refuses_is_left_alone_for_a_while() -> None:
    """The KV stays where it was."""
    cluster = full()
    cluster.disk.refuses = True
    pause(cluster, "a1")
    cluster.work_disk()
    there = place(cluster, "a1")
    wait(cluster, RETRY_SECONDS / 2)
    ordered = spilled(cluster)
    cluster.disk.refuses = False
    wait(cluster, RETRY_SECONDS)
    later = spilled(cluster)
    finish(cluster)

    assert there is KvPlace.HOST
    assert cluster.world.lives["a1"].prefills == 1
    assert (ordered, later) == (["a1"], ["a1", "a1"])


def on_disk(name: str = "a1") -> ClusterDouble:
    """A paused request with KV on disk."""
    cluster = full()
    pause(cluster, name)
    cluster.work_disk()
    assert place(cluster, name) is KvPlace.DISK
    return cluster


def restoring() -> ClusterDouble:
    """A request with KV on its way back from disk: another one left room for it."""
    cluster = on_disk()
    cluster.read_on("a1")
    assert place(cluster, "a1") is KvPlace.DISK
    cluster.cancel("a2")
    assert place(cluster, "a1") is KvPlace.RESTORING
    return cluster


def test_what_cannot_be_read_is_computed_again() -> None:
    """That is counted, and costs nothing else."""
    cluster = on_disk()
    tokens = cluster.machine.requests["a1"].kv_tokens
    cluster.disk.damages = True
    finish(cluster)

    assert cluster.machine.recomputed_tokens["a"] == tokens
    assert [cluster.world.lives[name].prefills for name in NAMES] == [2, 1, 1]


def test_prompts_wait_for_what_is_on_disk() -> None:
    """It comes back when there is room, and enough of it."""
    cluster = on_disk()
    chats = [cluster.ask(f"b{n}", "b", prompt=40, output=60, limit=100) for n in range(2)]
    cluster.work_until(0, lambda: chats[0].produced > 0)
    cluster.read_on("a1")
    late = cluster.ask("b2", "b", prompt=20, output=2)
    cluster.work_until(0, lambda: place(cluster, "a1") is not KvPlace.DISK)
    before = late.produced
    finish(cluster)

    assert before == 0
    assert late.outcome is FinishReason.LENGTH
    assert cluster.world.lives["a1"].prefills == 1


def test_a_request_is_cancelled_while_its_kv_is_written() -> None:
    """Its places in the host tier are free once the disk leaves them alone."""
    cluster = full()
    pause(cluster, "a1")
    cluster.cancel("a1")
    pending = set(cluster.machine.request_book.pending_frees)
    cluster.work_disk()
    left = dict(cluster.machine.request_book.pending_frees)
    finish(cluster)

    assert (pending, left) == ({"a1"}, {})
    assert len(cluster.commands(DropSpilledKv)) == 1


def test_a_request_is_cancelled_while_its_kv_is_on_disk() -> None:
    cluster = on_disk()
    cluster.cancel("a1")
    pending = dict(cluster.machine.request_book.pending_frees)
    finish(cluster)

    assert not pending
    assert len(cluster.commands(DropSpilledKv)) == 1


def test_a_request_is_cancelled_while_its_kv_is_read() -> None:
    """What was read is deleted anyway."""
    cluster = restoring()
    cluster.cancel("a1")
    pending = set(cluster.machine.request_book.pending_frees)
    cluster.lose(0)  # has nothing to do with it
    still = set(cluster.machine.request_book.pending_frees)
    cluster.work_disk()
    left = dict(cluster.machine.request_book.pending_frees)
    cluster.start(0)
    finish(cluster)

    assert (pending, still, left) == ({"a1"}, {"a1"}, {})
    assert not cluster.commands(DropSpilledKv)


def test_kv_on_disk_survives_the_loss_of_an_instance() -> None:
    cluster = on_disk()
    cluster.lose(0)
    unplaced = cluster.machine.requests["a1"].stage
    cluster.start(0)
    finish(cluster)

    assert unplaced is Stage.UNPLACED
    assert [cluster.world.lives[name].prefills for name in NAMES] == [1, 2, 2]


def test_what_is_read_without_an_instance_may_be_lost() -> None:
    """The request is computed again once there is one."""
    cluster = restoring()
    cluster.disk.damages = True
    cluster.lose(0)
    cluster.work_disk()
    kv = place(cluster, "a1")
    cluster.start(0)
    finish(cluster)

    assert kv is KvPlace.NONE
    assert cluster.world.lives["a1"].prefills == 2


def test_kv_without_a_known_geometry_stays() -> None:
    """The only engine of the model is gone with its instance."""
    cluster = full()
    pause(cluster, "a1")
    assert spilled(cluster) == ["a1"]
    cluster.work_until(0, lambda: not cluster.up[0].busy or place(cluster, "a2") is KvPlace.DEVICE)
    cluster.disk.refuses = True
    cluster.work_disk()
    cluster.lose(0)
    cluster.start(0)
    wait(cluster, 2 * RETRY_SECONDS)
    ordered = spilled(cluster)
    finish(cluster)

    assert ordered == ["a1"]


def test_kv_comes_back_to_no_room_at_all() -> None:
    """Weights of a new model have taken it: the KV is given up, and the request waits for room as
    one that was just asked."""
    cluster = full()
    pause(cluster, "a1")
    cluster.work_disk()
    for name in ("a2", "a3"):
        cluster.cancel(name)
    cluster.settle()
    cluster.add("c", ModelDouble(13, shape()), pinned=True)
    finish(cluster)

    assert cluster.machine.recomputed_tokens["a"] > 0
    assert cluster.world.lives["a1"].prefills == 2
    assert [command.request for command in cluster.commands(DropSpilledKv)] == ["a1"]


def test_a_request_says_that_it_waits_for_its_kv_on_disk() -> None:
    cluster = full(CHAT, CHAT, BATCH)
    swap_out(cluster, after_seconds=2 * LONG_SECONDS)

    def message() -> str:
        reason = wait_reason(cluster.machine, cluster.machine.requests["a3"], cluster.now)
        assert reason is not None
        assert reason.code is WaitCode.ON_DISK
        return reason.message

    messages = [message()]
    cluster.ask("b1", "b", prompt=60, output=10)  # has the room meanwhile
    cluster.work_disk()
    messages.append(message())
    cluster.cancel("b1")
    cluster.work_until(0, lambda: place(cluster, "a3") is KvPlace.RESTORING)
    messages.append(message())
    finish(cluster)

    assert ["to disk" in messages[0], "on disk" in messages[1], "back" in messages[2]] == [True] * 3
