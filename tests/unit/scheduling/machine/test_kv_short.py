"""KV that does not fit the device: prompts wait for room, and few requests move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from appliance.scheduling.device_room import ADMISSION_GROWTH_TOKENS
from appliance.scheduling.lifecycle import KvPlace
from appliance.scheduling.policy_api import (
    InstanceView,
    Placement,
    PrefillChoice,
    RequestView,
)
from appliance.scheduling.router import PLAN_SECONDS
from appliance.scheduling.wait_reasons import wait_reason
from appliance.vocabulary import (
    Direction,
    Finish,
    FinishReason,
    MoveKv,
    Preempt,
    Release,
    RequestClass,
    RunPrefill,
    RunTurn,
    Ticked,
    WaitCode,
)
from tests.unit.doubles.cluster import SLO, ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.told import Told

ROOM_TOKENS = 256
POLICIES = ["aegaeon", "appliance", "pd_aggregated", "serverlessllm", "taichi"]


def small_box(names: str = "a", *, policy: str = "appliance", max_batch: int = 64) -> ClusterDouble:
    """One instance with KV for `ROOM_TOKENS` tokens of a model, whose turns end only when they
    are asked to, or lack room."""
    models = {name: ModelDouble(4, shape()) for name in names}
    cluster = ClusterDouble(models, policy=policy, slabs=4 + 8, max_batch=max_batch)
    cluster.start()
    cluster.settle()
    cluster.up[0].steps_per_turn = 10_000
    return cluster


def moved_out(cluster: ClusterDouble) -> list[str]:
    return [
        move.request
        for command in cluster.commands(MoveKv)
        if command.direction is Direction.OUT
        for move in command.moves
    ]


def started_before_the_end(cluster: ClusterDouble, prompt: str, other: str) -> bool:
    """Whether the prompt was computed before the other request ended."""
    for _, _, commands in cluster.journal:
        for command in commands:
            if isinstance(command, Finish) and command.request == other:
                return False
            if isinstance(command, RunPrefill) and command.request == prompt:
                return True
            if isinstance(command, RunTurn) and prompt in command.prompts:
                return True
    raise AssertionError("neither happened")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_waits_until_its_kv_has_room(policy: str) -> None:
    """It starts when the request before it ends, and no KV moves."""
    cluster = small_box(policy=policy)
    lives = [cluster.ask(f"r{index}", "a", prompt=150, output=40) for index in range(3)]
    cluster.work_until(0, lambda: bool(cluster.commands(RunTurn)))
    reason = wait_reason(cluster.machine, cluster.machine.requests["r1"], cluster.now)
    cluster.settle()

    assert reason is not None
    assert reason.code is WaitCode.KV_ROOM
    assert [life.outcome for life in lives] == [FinishReason.LENGTH] * 3
    assert not started_before_the_end(cluster, "r1", "r0")
    assert cluster.commands(MoveKv) == []


@pytest.mark.parametrize("images", [(), (150,)])
def test_a_prompt_waits_until_its_images_have_room(images: tuple[int, ...]) -> None:
    """Next to its KV, for as long as it is computed; then they take none."""
    cluster = ClusterDouble({"a": ModelDouble(4, shape(images=1))}, slabs=4 + 14, max_context=160)
    cluster.start()
    cluster.settle()
    cluster.up[0].steps_per_turn = 10_000
    lives = [cluster.ask("r0", "a", prompt=100, output=40)]
    cluster.work_until(0, lambda: bool(cluster.turns()))
    lives.append(cluster.ask("r1", "a", prompt=150, output=10, images=images))
    cluster.settle()

    assert [life.outcome for life in lives] == [FinishReason.LENGTH] * 2
    assert started_before_the_end(cluster, "r1", "r0") is not bool(images)
    assert cluster.commands(MoveKv) == []


def test_images_that_never_have_room() -> None:
    """A model is not served whose longest prompt has no room if all of it are images."""
    for images, slabs in ((0, 8), (1, 18), (6, 20)):
        for more in (0, -1):
            models = {"a": ModelDouble(4, shape(images=images))}
            cluster = ClusterDouble(models, slabs=4 + slabs + more, max_context=256)
            cluster.start()
            cluster.settle()
            assert bool(cluster.machine.failed) is bool(more)


def test_a_policy_sees_that_a_prompt_waits_for_room() -> None:
    """As long as it does, so that it need not end a turn for it: the machine does."""
    cluster = small_box(policy="aegaeon")
    cluster.ask("r0", "a", prompt=150, output=60)
    cluster.work_until(0, lambda: bool(cluster.turns()))
    before = cluster.machine.cluster.view(cluster.machine.instances[0]).kv_short
    cluster.ask("r1", "a", prompt=150, output=10)
    waits = cluster.machine.cluster.view(cluster.machine.instances[0]).kv_short
    cluster.work_until(0, lambda: "r1" in cluster.prompts())
    after = cluster.machine.cluster.view(cluster.machine.instances[0]).kv_short

    assert [before, waits, after] == [False, True, False]


@pytest.mark.parametrize("seconds", [0.0, SLO.ttft_seconds])
def test_a_short_prompt_passes_a_large_one_for_a_while(seconds: float) -> None:
    """The large one waits for room that the short one does not need. Once half of its time to the
    first token is over, no other passes it."""
    cluster = small_box(policy="aegaeon")
    cluster.ask("r0", "a", prompt=60, output=60)
    cluster.work_until(0, lambda: bool(cluster.turns()))
    cluster.ask("large", "a", prompt=180, output=2)
    cluster.now += seconds
    cluster.ask("as large", "a", prompt=180, output=2)
    cluster.ask("short", "a", prompt=20, output=2)
    cluster.settle()

    passed = cluster.prompts().index("short") < cluster.prompts().index("large")
    assert passed == (not seconds)
    assert {life.outcome for life in cluster.world.lives.values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_youngest_leave_as_others_grow(policy: str) -> None:
    """All start, as each has room to grow a little. When none is left, the oldest go on. The others
    come back as requests end, and are not computed again."""
    cluster = small_box(policy=policy)
    lives = [cluster.ask(f"r{index}", "a", prompt=20, output=150) for index in range(3)]
    cluster.settle()

    assert [life.outcome for life in lives] == [FinishReason.LENGTH] * 3
    assert [life.prefills for life in lives] == [1, 1, 1]
    moves = Counter(moved_out(cluster))
    assert "r0" not in moves
    assert 1 <= moves["r1"] <= moves["r2"] <= 2


def test_a_turn_ends_for_a_request_that_has_room_again() -> None:
    """Else it would wait until all requests of the turn end."""
    cluster = small_box(policy="serverlessllm")
    cluster.ask("r0", "a", prompt=20, output=70)
    cluster.ask("r1", "a", prompt=20, output=110)
    cluster.ask("r2", "a", prompt=10, output=110)
    cluster.settle()

    assert moved_out(cluster) == ["r2"]
    (preempt,) = cluster.commands(Preempt)[-1:]
    turns = {turn.turn: turn.requests for turn in cluster.commands(RunTurn)}
    assert turns[preempt.turn] == ("r0", "r1")
    assert set(turns[preempt.turn + 1]) == {"r1", "r2"}


def test_prompts_of_other_models_do_not_wait() -> None:
    """A model whose KV is short makes only its own prompts wait."""
    cluster = small_box("ab", policy="aegaeon")
    for name in ("a1", "a2"):
        cluster.ask(name, "a", prompt=150, output=90)
    cluster.work_until(0, lambda: bool(cluster.commands(RunTurn)))
    cluster.ask("b1", "b", prompt=20, output=10)
    cluster.settle()

    assert started_before_the_end(cluster, "b1", "a1")
    assert not started_before_the_end(cluster, "a2", "a1")
    assert {life.outcome for life in cluster.world.lives.values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cancelled_request_leaves_its_room(policy: str) -> None:
    """The prompt that waited for it starts during the turn, or right after it."""
    cluster = small_box(policy=policy)
    cluster.ask("r0", "a", prompt=20, output=200)
    cluster.ask("r1", "a", prompt=60, output=150)
    cluster.work_until(0, lambda: any("r1" in turn.requests for turn in cluster.commands(RunTurn)))
    waiting = cluster.ask("r2", "a", prompt=64, output=20)
    for _ in range(5):
        cluster.work(0)
    assert waiting.prefills == 0
    cluster.cancel("r1")
    cluster.work_until(0, lambda: waiting.prefills == 1)

    assert cluster.world.lives["r0"].outcome is None
    cluster.settle()
    assert waiting.outcome == FinishReason.LENGTH


def grown_out(cluster: ClusterDouble) -> None:
    """Three requests whose KV outgrew the device: `r2` is on its way to the host."""
    for name in ("r0", "r1", "r2"):
        cluster.ask(name, "a", prompt=20, output=150)
    cluster.work_until(0, lambda: moved_out(cluster) == ["r2"])


def test_a_request_on_its_way_out_comes_back_later() -> None:
    """Room for it comes while its KV is still leaving."""
    cluster = small_box(policy="serverlessllm")
    grown_out(cluster)
    assert cluster.machine.requests["r2"].kv is KvPlace.LEAVING
    cluster.cancel("r0")
    cluster.settle()

    assert cluster.world.lives["r2"].outcome == FinishReason.LENGTH
    assert cluster.world.lives["r2"].prefills == 1


def test_a_turn_goes_on_if_no_request_was_left_out_any_more() -> None:
    """The request that it left out was cancelled."""
    cluster = small_box(policy="serverlessllm")
    grown_out(cluster)
    cluster.cancel("r2")
    turns = len(cluster.commands(RunTurn))
    cluster.cancel("r0")
    assert cluster.commands(Preempt) == []
    cluster.settle()

    assert cluster.world.lives["r1"].outcome == FinishReason.LENGTH
    assert len(cluster.commands(RunTurn)) <= turns + 1


def test_the_last_request_of_a_turn_that_lacked_room_is_cancelled() -> None:
    """None is left to give the room to."""
    cluster = small_box(policy="serverlessllm")
    grown_out(cluster)
    for name in ("r2", "r1", "r0"):
        cluster.cancel(name)
    cluster.settle()

    assert cluster.machine.requests == {}
    assert cluster.machine.instances[0].ledger.kv.get("a", 0) == 0


@pytest.mark.parametrize("policy", ["serverlessllm", "pd_aggregated"])
def test_a_prompt_without_an_answer_takes_room_from_the_youngest(policy: str) -> None:
    """A text that is embedded keeps no KV, so it need not wait for room: as many requests leave
    the device as it needs, and come back after it."""
    cluster = small_box(policy=policy)
    for name in ("r0", "r1"):
        cluster.ask(name, "a", prompt=60, output=60)
    cluster.work_until(0, lambda: any("r1" in turn.requests for turn in cluster.commands(RunTurn)))
    embedded = cluster.ask("e", "a", prompt=140, output=0)
    cluster.work_until(0, lambda: embedded.outcome is not None)

    assert moved_out(cluster) == ["r1"]
    cluster.settle()
    assert [life.prefills for life in cluster.world.lives.values()] == [1, 1, 1]


def test_batch_requests_leave_the_device_for_an_interactive_one() -> None:
    """Its prompt does not wait until they end."""
    cluster = small_box(policy="chiron")
    for name in ("b0", "b1"):
        cluster.ask(name, "a", prompt=60, output=120, kind=RequestClass.BATCH)
    cluster.work_until(0, lambda: any("b1" in turn.requests for turn in cluster.commands(RunTurn)))
    cluster.ask("r0", "a", prompt=150, output=20)
    cluster.settle()

    assert started_before_the_end(cluster, "r0", "b0")
    assert moved_out(cluster)[0] == "b1"
    assert {life.outcome for life in cluster.world.lives.values()} == {FinishReason.LENGTH}
    assert {life.prefills for life in cluster.world.lives.values()} == {1}


def test_a_prompt_that_fills_the_device_is_computed_alone() -> None:
    """Also under a policy that computes prompts in the steps of other requests."""
    cluster = small_box(policy="pd_aggregated")
    for name in ("r0", "r1"):
        cluster.ask(name, "a", prompt=60, output=60)
    cluster.work_until(0, lambda: any("r1" in turn.requests for turn in cluster.commands(RunTurn)))
    embedded = cluster.ask("e", "a", prompt=240, output=0)
    cluster.settle()

    assert embedded.outcome == FinishReason.STOP
    assert [command.request for command in cluster.commands(RunPrefill)][-1] == "e"
    assert sorted(moved_out(cluster)) == ["r0", "r1"]


def test_as_many_run_as_have_room() -> None:
    """What keys may share is what fits, with the KV that requests have on average."""
    cluster = small_box(max_batch=8)
    room, instance = cluster.machine.device_room, cluster.machine.instances[0]
    assert room.sequences(instance, "a") == 8

    lives = [cluster.ask(f"r{index}", "a", prompt=20, output=80) for index in range(2)]
    cluster.work_until(0, lambda: any(len(turn.requests) == 2 for turn in cluster.turns()))
    shortest, longest = 20 + ADMISSION_GROWTH_TOKENS, 20 + 80
    assert ROOM_TOKENS // longest <= room.sequences(instance, "a") <= ROOM_TOKENS // shortest

    cluster.settle()
    assert {live.outcome for live in lives} == {FinishReason.LENGTH}
    assert room.sequences(instance, "a") == 8


def test_at_least_one_runs_however_large() -> None:
    cluster = small_box()
    room, instance = cluster.machine.device_room, cluster.machine.instances[0]
    cluster.ask("r", "a", prompt=200, output=55)
    cluster.work_until(0, lambda: bool(cluster.turns()))
    assert room.sequences(instance, "a") == 1


def limited(policy: str = "aegaeon") -> ClusterDouble:
    """One instance with much room, on which two requests of a model may have begun."""
    models = {"a": ModelDouble(4, shape())}
    cluster = ClusterDouble(models, policy=policy, slabs=100, max_sequences=2)
    cluster.start()
    cluster.settle()
    return cluster


@pytest.mark.parametrize("policy", POLICIES)
def test_no_more_requests_begin_than_max_sequences(policy: str) -> None:
    """Others wait before their prompts are computed, and say why."""
    cluster = limited(policy)
    cluster.ask("warm", "a", output=2)
    cluster.settle()
    lives = [cluster.ask(f"r{index}", "a", prompt=20, output=60) for index in range(4)]
    cluster.work_until(0, lambda: any("r1" in turn.requests for turn in cluster.turns()))
    reason = wait_reason(cluster.machine, cluster.machine.requests["r2"], cluster.now)
    most = 0
    while cluster.work(0):
        batch = cluster.machine.instances[0].batches.get("a")
        most = max(most, len(batch.members) if batch is not None else 0)

    assert reason is not None
    assert reason.code is WaitCode.SEQUENCES
    assert most == 2
    assert [life.outcome for life in lives] == [FinishReason.LENGTH] * 4


def test_requests_of_slow_clients_take_no_place() -> None:
    """Clients that read nothing could keep all others of the model waiting."""
    cluster = limited()
    for name in ("r0", "r1"):
        cluster.ask(name, "a", prompt=20, output=90)
    cluster.work_until(0, lambda: any("r1" in turn.requests for turn in cluster.turns()))
    for name in ("r0", "r1"):
        cluster.stall(name)
    other = cluster.ask("r2", "a", prompt=20, output=5)
    cluster.settle()

    assert other.outcome == FinishReason.LENGTH
    assert cluster.world.lives["r0"].outcome is None


def test_what_is_embedded_needs_no_place() -> None:
    """It never decodes."""
    cluster = limited()
    for name in ("r0", "r1"):
        cluster.ask(name, "a", prompt=20, output=90)
    cluster.work_until(0, lambda: any("r1" in turn.requests for turn in cluster.turns()))
    embedded = cluster.ask("e", "a", prompt=20, output=0)
    cluster.work_until(0, lambda: embedded.outcome is not None)

    assert cluster.world.lives["r0"].outcome is None


def filled_box(stranger: object, prompt: int = 150) -> ClusterDouble:
    """Two instances; a request with a prompt of so many tokens decodes on the first, and fills it
    sooner or later."""
    cluster = ClusterDouble(
        {"a": ModelDouble(4, shape())}, instances=2, slabs=4 + 8, stranger=stranger
    )
    cluster.start()
    cluster.settle()
    for number in (0, 1):
        cluster.up[number].steps_per_turn = 10_000
    cluster.ask("long", "a", prompt=prompt, output=250 - prompt)
    cluster.work_until(0, lambda: bool(cluster.turns()))
    return cluster


def first_offered(instances: list[InstanceView]) -> PrefillChoice:
    return PrefillChoice(instance=instances[0].id)


def on_the_first(prefill: Callable[..., PrefillChoice] = first_offered) -> Told:
    """A policy that sends each request to the first instance that it is offered."""
    return Told(
        place=lambda: [Placement()] * 2,
        prefill=prefill,
        decode=lambda prefilled_on: prefilled_on,
    )


def test_no_prompt_goes_where_others_wait_for_room() -> None:
    """A policy is not offered the instance that a request has filled while another has room."""
    cluster = filled_box(on_the_first())
    cluster.ask("waits", "a", prompt=150, output=10)
    cluster.ask("elsewhere", "a", prompt=60, output=10)
    placed = {name: r.instance for name, r in cluster.machine.requests.items()}
    cluster.settle()

    assert placed == {"long": 0, "waits": 0, "elsewhere": 1}
    assert {life.outcome for life in cluster.world.lives.values()} == {FinishReason.LENGTH}


def test_a_prompt_that_waits_for_room_leaves_for_an_instance_with_room() -> None:
    """It does when the next plan is made, and starts there before the long request ends."""
    cluster = filled_box(on_the_first())
    cluster.ask("waits", "a", prompt=150, output=10)
    assert cluster.machine.requests["waits"].instance == 0
    cluster.now += PLAN_SECONDS
    cluster.tell(Ticked())
    assert cluster.machine.requests["waits"].instance == 1
    cluster.settle()

    assert started_before_the_end(cluster, "waits", "long")
    assert cluster.commands(MoveKv) == []


def test_prompts_stay_where_they_wait_if_no_instance_has_room() -> None:
    """They are not dealt out anew each second."""
    cluster = filled_box(on_the_first())
    for name in ("w0", "w1", "w2", "w3"):
        cluster.ask(name, "a", prompt=150, output=100)
    cluster.work_until(1, lambda: any("w1" in turn.requests for turn in cluster.turns()))
    before = {name: r.instance for name, r in cluster.machine.requests.items()}
    version = [i.membership_version for i in cluster.machine.instances.values()]
    cluster.now += PLAN_SECONDS
    cluster.tell(Ticked())

    assert {name: r.instance for name, r in cluster.machine.requests.items()} == before
    assert [i.membership_version for i in cluster.machine.instances.values()] == version
    cluster.settle()
    assert {life.outcome for life in cluster.world.lives.values()} == {FinishReason.LENGTH}


def test_a_request_that_found_no_room_stays_if_there_is_none_elsewhere() -> None:
    """Nothing moves then."""

    def prefill(request: RequestView, instances: list[InstanceView]) -> PrefillChoice:
        return PrefillChoice(instance=instances[-1 if request.id == "other" else 0].id)

    cluster = filled_box(on_the_first(prefill), prompt=100)
    cluster.ask("young", "a", prompt=20, output=100)
    cluster.ask("other", "a", prompt=150, output=100)
    cluster.work_until(1, lambda: any("other" in turn.requests for turn in cluster.turns()))
    cluster.work_until(0, lambda: moved_out(cluster) == ["young"])
    cluster.work_until(0, lambda: cluster.machine.requests["young"].kv is KvPlace.HOST)
    cluster.now += PLAN_SECONDS
    cluster.tell(Ticked())

    assert cluster.machine.requests["young"].instance == 0
    cluster.settle()
    assert {life.outcome for life in cluster.world.lives.values()} == {FinishReason.LENGTH}


def test_a_request_that_found_no_room_decodes_elsewhere() -> None:
    """Its KV left the device for requests that are older, and is on the host: it goes on where
    there is room, when the next plan is made. Its prompt is not computed again."""
    cluster = filled_box(on_the_first(), prompt=100)
    young = cluster.ask("young", "a", prompt=20, output=100)
    cluster.work_until(0, lambda: moved_out(cluster) == ["young"])
    cluster.work_until(0, lambda: cluster.machine.requests["young"].kv is KvPlace.HOST)
    assert cluster.machine.requests["young"].instance == 0
    cluster.now += PLAN_SECONDS
    cluster.tell(Ticked())
    cluster.settle()

    assert {turn.instance for turn in cluster.turns() if "young" in turn.requests} == {0, 1}
    assert Release(instance=0, model="a", request="young") in cluster.commands(Release)
    assert (young.prefills, young.outcome) == (1, FinishReason.LENGTH)
    assert cluster.world.lives["long"].outcome == FinishReason.LENGTH
