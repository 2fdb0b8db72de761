"""Clients that take nothing of what is made: their requests make room, and no others do."""

from __future__ import annotations

from appliance.scheduling.lifecycle import KvPlace, Stage
from appliance.scheduling.policy_api import BatchLimits, Phase, PrefillChoice
from appliance.scheduling.wait_reasons import wait_reason
from appliance.vocabulary import (
    Direction,
    Finish,
    FinishReason,
    MoveKv,
    Preempt,
    RunPrefill,
    RunTurn,
    Ticked,
    TurnEnd,
    TurnEnded,
    WaitCode,
)
from tests.unit.doubles.cluster import SLO, ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.told import Told


def ready(
    *, instances: int = 1, slabs: int = 40, host_slabs: int = 200, stranger: Told | None = None
) -> ClusterDouble:
    """Two models, whose engines are built, and nothing to do."""
    cluster = ClusterDouble(
        {name: ModelDouble(4, shape()) for name in "ab"},
        instances=instances,
        slabs=slabs,
        host_slabs=host_slabs,
        stranger=stranger,
    )
    cluster.start()
    cluster.settle()
    return cluster


def until(cluster: ClusterDouble, name: str, stage: Stage) -> None:
    cluster.work_until(0, lambda: cluster.machine.requests[name].stage is stage)


def turns_with(cluster: ClusterDouble, name: str) -> list[RunTurn]:
    return [turn for turn in cluster.commands(RunTurn) if name in turn.requests]


def leaving(cluster: ClusterDouble) -> list[str]:
    return [
        move.request
        for command in cluster.commands(MoveKv)
        if command.direction is Direction.OUT
        for move in command.moves
    ]


def test_a_turn_goes_on_without_a_paused_request() -> None:
    """The turn is ended, the rest of its quota is run by the others; the KV of who stalled leaves
    the device. When its client reads it goes on where it was."""
    cluster = ready()
    for name in ("stalled", "other"):
        cluster.ask(name, "a", output=60)
    cluster.work_until(
        0, lambda: bool(turns_with(cluster, "stalled") and turns_with(cluster, "other"))
    )
    until(cluster, "stalled", Stage.RUNNING)
    before = len(turns_with(cluster, "stalled"))

    cuts = len(cluster.commands(Preempt))
    cluster.stall("stalled")
    assert len(cluster.commands(Preempt)) == cuts + 1
    cluster.work_until(0, lambda: cluster.machine.requests["stalled"].stage is Stage.PAUSED)
    cluster.work(0)
    ended = [e for _, e, _ in cluster.journal if isinstance(e, TurnEnded)]
    assert ended[-1].reason is TurnEnd.PREEMPTED
    cut, rest = cluster.commands(RunTurn)[-2:]
    assert rest.requests == ("other",)
    assert rest.quota_seconds == cut.quota_seconds - ended[-1].seconds
    cluster.settle()

    assert cluster.world.lives["other"].outcome is FinishReason.LENGTH
    assert len(turns_with(cluster, "stalled")) == before
    assert leaving(cluster) == ["stalled"]
    assert cluster.machine.requests["stalled"].kv is KvPlace.HOST
    cluster.read_on("stalled")
    cluster.settle()
    assert cluster.world.lives["stalled"].outcome is FinishReason.LENGTH
    assert cluster.world.lives["stalled"].prefills == 1
    assert cluster.machine.preemptions == {"a": 0, "b": 0}


def test_between_turns() -> None:
    """Who waits for its turn waits for its client then, and says so; its model is not run for it,
    nor is it what an operator has to know of."""
    cluster = ready()
    cluster.ask("stalled", "a", output=60)
    cluster.ask("other", "b", output=60)
    cluster.work_until(
        0,
        lambda: (
            cluster.machine.requests["stalled"].stage is Stage.READY
            and cluster.machine.requests["other"].stage is Stage.RUNNING
        ),
    )
    held = cluster.machine.requests["stalled"]

    cluster.stall("stalled")

    assert (held.stage, held.kv) == (Stage.PAUSED, KvPlace.LEAVING)
    found = wait_reason(cluster.machine, held, cluster.now)
    assert found is not None
    assert found.code is WaitCode.SLOW_CLIENT
    assert cluster.machine.oldest_progress() == cluster.machine.requests["other"].progressed
    cluster.settle()
    assert [command.request for command in cluster.commands(Finish)] == ["other"]
    assert cluster.machine.oldest_progress() is None


def test_tokens_that_were_not_read_are_not_late() -> None:
    """What is due, is due so much later, and its pace is as if there had been no pause."""
    cluster = ready()
    cluster.ask("r", "a", output=60)
    until(cluster, "r", Stage.RUNNING)
    request = cluster.machine.requests["r"]
    cluster.stall("r")
    until(cluster, "r", Stage.PAUSED)
    assert not cluster.machine.instances[0].work, "nothing is planned for it"
    due, since = request.next_due, cluster.now
    cluster.now += 100.0

    cluster.read_on("r")

    assert request.next_due == due + cluster.now - since
    assert request.next_due > cluster.now + SLO.tbt_seconds
    assert cluster.machine.oldest_progress() == cluster.now
    made = request.generated
    cluster.work_until(0, lambda: request.generated > made)
    assert request.newest_token - request.first_token < 100.0


def test_it_is_said_once() -> None:
    """Of who is not there any more, or was said to stall before, nothing follows."""
    cluster = ready()
    cluster.ask("r", "a", output=60)
    until(cluster, "r", Stage.RUNNING)
    cluster.stall("r")
    ordered = [c for _, _, commands in cluster.journal for c in commands]

    cluster.stall("r")
    cluster.stall("nobody")
    cluster.read_on("nobody")

    assert [c for _, _, commands in cluster.journal for c in commands] == ordered
    cluster.read_on("r")  # before its turn was over
    cluster.read_on("r")
    cluster.settle()
    assert cluster.world.lives["r"].outcome is FinishReason.LENGTH
    assert leaving(cluster) == []


def test_who_leaves_while_it_is_held() -> None:
    """Its KV is given back wherever it is."""
    cluster = ready()
    cluster.ask("r", "a", output=60)
    until(cluster, "r", Stage.RUNNING)
    cluster.stall("r")
    until(cluster, "r", Stage.PAUSED)

    cluster.cancel("r")
    cluster.settle()

    assert not cluster.machine.requests
    assert cluster.machine.host.kv_slabs == 0
    assert cluster.machine.instances[0].ledger.kv.get("a", 0) == cluster.up[0].engines["a"].slabs()


def test_a_turn_with_a_prompt_is_not_ended() -> None:
    """Who stalls beside a prompt is held when that is done."""
    chunks = Told(
        batch=lambda: BatchLimits(requests=64, chunk_tokens=16), phase=lambda: Phase.PREFILL
    )
    cluster = ready(stranger=chunks)
    cluster.ask("stalled", "a", output=60)
    until(cluster, "stalled", Stage.RUNNING)
    cluster.ask("long", "a", prompt=150, output=5)
    cluster.work_until(0, lambda: bool([t for t in cluster.commands(RunTurn) if t.prompts]))
    cut = len(cluster.commands(Preempt))

    cluster.stall("stalled")
    cluster.settle()

    assert len(cluster.commands(Preempt)) == cut
    assert cluster.machine.requests["stalled"].stage is Stage.PAUSED
    assert cluster.world.lives["long"].outcome is FinishReason.LENGTH


def test_a_lost_worker() -> None:
    """What it held of a stalled request is computed again, elsewhere too; then it is held as
    before."""
    cluster = ready(
        instances=2,
        stranger=Told(prefill=lambda: PrefillChoice(instance=0), decode=lambda: 1),
    )
    cluster.ask("r", "a", output=60)
    request = cluster.machine.requests["r"]
    cluster.work_until(0, lambda: request.instance == 1)
    while (request.stage, request.kv) != (Stage.RUNNING, KvPlace.DEVICE):
        assert cluster.work(1) or cluster.work(0)
    cluster.stall("r")

    cluster.lose(1)
    cluster.start(1)
    cluster.settle()

    assert (request.stage, request.instance) == (Stage.PAUSED, 1)
    assert request.kv is KvPlace.HOST
    due = request.next_due
    cluster.now += 100.0
    cluster.lose(1)
    assert (request.stage, request.kv) == (Stage.PAUSED, KvPlace.HOST)
    cluster.now += 10.0
    cluster.read_on("r")
    assert request.next_due >= due + 110.0
    cluster.settle()
    assert cluster.world.lives["r"].outcome is FinishReason.LENGTH
    assert [command.request for command in cluster.commands(RunPrefill)] == ["r", "r"]


def test_no_request_waits_for_the_room_of_a_paused_one() -> None:
    """In the host tier it keeps its room until it ends: when others wait for some it goes on, read
    or not, and who stalls then is not held at all."""
    cluster = ready(host_slabs=12)
    cluster.ask("held", "a", prompt=100, output=60)
    until(cluster, "held", Stage.RUNNING)
    cluster.stall("held")
    cluster.settle()
    assert cluster.machine.requests["held"].stage is Stage.PAUSED

    cluster.ask("waits", "a", prompt=100, output=60)
    cluster.settle()
    assert cluster.machine.request_book.host_queue
    cluster.now += 2.0
    cluster.tell(Ticked())
    until(cluster, "held", Stage.RUNNING)
    cluster.read_on("held")
    cluster.stall("held")
    cluster.settle()

    assert [command.request for command in cluster.commands(Finish)] == ["held", "waits"]
