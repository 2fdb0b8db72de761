"""Clients that take nothing of what is made: their requests make room, and nobody else's do."""

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
from tests.unit.doubles.floor import SLO, FloorDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.told import Told


def ready(
    *, instances: int = 1, slabs: int = 40, host_slabs: int = 200, stranger: Told | None = None
) -> FloorDouble:
    """Two models, whose engines are built, and nothing to do."""
    floor = FloorDouble(
        {name: ModelDouble(4, shape()) for name in "ab"},
        instances=instances,
        slabs=slabs,
        host_slabs=host_slabs,
        stranger=stranger,
    )
    floor.start()
    floor.settle()
    return floor


def until(floor: FloorDouble, name: str, stage: Stage) -> None:
    floor.work_until(0, lambda: floor.machine.requests[name].stage is stage)


def turns_with(floor: FloorDouble, name: str) -> list[RunTurn]:
    return [turn for turn in floor.commands(RunTurn) if name in turn.requests]


def leaving(floor: FloorDouble) -> list[str]:
    return [
        move.request
        for command in floor.commands(MoveKv)
        if command.direction is Direction.OUT
        for move in command.moves
    ]


def test_a_turn_goes_on_without_who_stalled() -> None:
    """The turn is ended, the rest of its quota is run by the others; the KV of who stalled leaves
    the device. When its client reads it goes on where it was."""
    floor = ready()
    for name in ("stalled", "other"):
        floor.ask(name, "a", output=60)
    floor.work_until(0, lambda: bool(turns_with(floor, "stalled") and turns_with(floor, "other")))
    until(floor, "stalled", Stage.RUNNING)
    before = len(turns_with(floor, "stalled"))

    cuts = len(floor.commands(Preempt))
    floor.stall("stalled")
    assert len(floor.commands(Preempt)) == cuts + 1
    floor.work_until(0, lambda: floor.machine.requests["stalled"].stage is Stage.HELD)
    floor.work(0)
    ended = [e for _, e, _ in floor.journal if isinstance(e, TurnEnded)]
    assert ended[-1].reason is TurnEnd.PREEMPTED
    cut, rest = floor.commands(RunTurn)[-2:]
    assert rest.requests == ("other",)
    assert rest.quota_seconds == cut.quota_seconds - ended[-1].seconds
    floor.settle()

    assert floor.world.lives["other"].outcome is FinishReason.LENGTH
    assert len(turns_with(floor, "stalled")) == before
    assert leaving(floor) == ["stalled"]
    assert floor.machine.requests["stalled"].kv is KvPlace.HOST
    floor.read_on("stalled")
    floor.settle()
    assert floor.world.lives["stalled"].outcome is FinishReason.LENGTH
    assert floor.world.lives["stalled"].prefills == 1
    assert floor.machine.preemptions == {"a": 0, "b": 0}


def test_between_turns() -> None:
    """Who waits for its turn waits for its client then, and says so; its model is not run for it,
    nor is it what an operator has to know of."""
    floor = ready()
    floor.ask("stalled", "a", output=60)
    floor.ask("other", "b", output=60)
    floor.work_until(
        0,
        lambda: (
            floor.machine.requests["stalled"].stage is Stage.READY
            and floor.machine.requests["other"].stage is Stage.RUNNING
        ),
    )
    held = floor.machine.requests["stalled"]

    floor.stall("stalled")

    assert (held.stage, held.kv) == (Stage.HELD, KvPlace.LEAVING)
    found = wait_reason(floor.machine, held, floor.now)
    assert found is not None
    assert found.code is WaitCode.READER
    assert floor.machine.oldest_progress() == floor.machine.requests["other"].progressed
    floor.settle()
    assert [command.request for command in floor.commands(Finish)] == ["other"]
    assert floor.machine.oldest_progress() is None


def test_tokens_that_nobody_read_are_not_late() -> None:
    """What is due, is due so much later, and its pace is as if there had been no pause."""
    floor = ready()
    floor.ask("r", "a", output=60)
    until(floor, "r", Stage.RUNNING)
    request = floor.machine.requests["r"]
    floor.stall("r")
    until(floor, "r", Stage.HELD)
    assert not floor.machine.instances[0].work, "nothing is planned for it"
    due, since = request.next_due, floor.now
    floor.now += 100.0

    floor.read_on("r")

    assert request.next_due == due + floor.now - since
    assert request.next_due > floor.now + SLO.tbt_seconds
    assert floor.machine.oldest_progress() == floor.now
    made = request.generated
    floor.work_until(0, lambda: request.generated > made)
    assert request.newest_token - request.first_token < 100.0


def test_it_is_said_once() -> None:
    """Of who is not there any more, or was said to stall before, nothing follows."""
    floor = ready()
    floor.ask("r", "a", output=60)
    until(floor, "r", Stage.RUNNING)
    floor.stall("r")
    ordered = [c for _, _, commands in floor.journal for c in commands]

    floor.stall("r")
    floor.stall("nobody")
    floor.read_on("nobody")

    assert [c for _, _, commands in floor.journal for c in commands] == ordered
    floor.read_on("r")  # before its turn was over
    floor.read_on("r")
    floor.settle()
    assert floor.world.lives["r"].outcome is FinishReason.LENGTH
    assert leaving(floor) == []


def test_who_leaves_while_it_is_held() -> None:
    """Its KV is given back wherever it is."""
    floor = ready()
    floor.ask("r", "a", output=60)
    until(floor, "r", Stage.RUNNING)
    floor.stall("r")
    until(floor, "r", Stage.HELD)

    floor.cancel("r")
    floor.settle()

    assert not floor.machine.requests
    assert floor.machine.host.kv_slabs == 0
    assert floor.machine.instances[0].ledger.kv.get("a", 0) == floor.up[0].engines["a"].slabs()


def test_a_turn_with_a_prompt_is_not_ended() -> None:
    """Who stalls beside a prompt is held when that is done."""
    chunks = Told(
        batch=lambda: BatchLimits(requests=64, chunk_tokens=16), phase=lambda: Phase.PREFILL
    )
    floor = ready(stranger=chunks)
    floor.ask("stalled", "a", output=60)
    until(floor, "stalled", Stage.RUNNING)
    floor.ask("long", "a", prompt=150, output=5)
    floor.work_until(0, lambda: bool([t for t in floor.commands(RunTurn) if t.prompts]))
    cut = len(floor.commands(Preempt))

    floor.stall("stalled")
    floor.settle()

    assert len(floor.commands(Preempt)) == cut
    assert floor.machine.requests["stalled"].stage is Stage.HELD
    assert floor.world.lives["long"].outcome is FinishReason.LENGTH


def test_a_lost_worker() -> None:
    """What it held of a stalled request is computed again, elsewhere too; then it is held as
    before."""
    floor = ready(
        instances=2,
        stranger=Told(prefill=lambda: PrefillChoice(instance=0), decode=lambda: 1),
    )
    floor.ask("r", "a", output=60)
    request = floor.machine.requests["r"]
    floor.work_until(0, lambda: request.instance == 1)
    while (request.stage, request.kv) != (Stage.RUNNING, KvPlace.DEVICE):
        assert floor.work(1) or floor.work(0)
    floor.stall("r")

    floor.lose(1)
    floor.start(1)
    floor.settle()

    assert (request.stage, request.instance) == (Stage.HELD, 1)
    assert request.kv is KvPlace.HOST
    due = request.next_due
    floor.now += 100.0
    floor.lose(1)
    assert (request.stage, request.kv) == (Stage.HELD, KvPlace.HOST)
    floor.now += 10.0
    floor.read_on("r")
    assert request.next_due >= due + 110.0
    floor.settle()
    assert floor.world.lives["r"].outcome is FinishReason.LENGTH
    assert [command.request for command in floor.commands(RunPrefill)] == ["r", "r"]


def test_nobody_waits_for_the_room_of_who_is_held() -> None:
    """In the host tier it keeps its room until it ends: when others wait for some it goes on, read
    or not, and who stalls then is not held at all."""
    floor = ready(host_slabs=12)
    floor.ask("held", "a", prompt=100, output=60)
    until(floor, "held", Stage.RUNNING)
    floor.stall("held")
    floor.settle()
    assert floor.machine.requests["held"].stage is Stage.HELD

    floor.ask("waits", "a", prompt=100, output=60)
    floor.settle()
    assert floor.machine.foreman.host_queue
    floor.now += 2.0
    floor.tell(Ticked())
    until(floor, "held", Stage.RUNNING)
    floor.read_on("held")
    floor.stall("held")
    floor.settle()

    assert [command.request for command in floor.commands(Finish)] == ["held", "waits"]
