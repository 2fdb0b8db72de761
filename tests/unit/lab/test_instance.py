"""Simulated instances: what waits for what, and what is told when."""

from __future__ import annotations

import statistics

import pytest

from appliance.errors import LabError
from appliance.lab.noise import Deviation, Pace
from appliance.lab.sim.instance import SimulatedInstance
from appliance.vocabulary import (
    Direction,
    EvictModel,
    Finish,
    FinishReason,
    KvMoved,
    LoadModel,
    ModelBuilt,
    ModelLoaded,
    Preempt,
    PrefetchModel,
    PrefillDeferred,
    PrefillDone,
    Release,
    StoreWeights,
    TokensProduced,
    TurnEnd,
    TurnEnded,
    WeightsStored,
)
from tests.unit.lab.bench import SLAB, Bench, profile


def test_an_engine_is_ready_at_once() -> None:
    """Building and the first fill take no time: the box is ready when the run begins."""
    bench = Bench()
    [(built_at, built)] = bench.events(ModelBuilt)
    assert (built_at, built.weight_slabs, built.host_slabs) == (0.0, 4, 4)
    assert (built.kv.block_bytes, built.kv.group_blocks, built.kv.group_slabs) == (64, 16, 1)
    assert [at for at, _ in bench.events(WeightsStored)] == [0.0]


def test_a_later_fill_reads_the_disk_and_holds_the_worker_up() -> None:
    """An image that had to go is written again at the speed of the disk; a load comes after."""
    bench = Bench()
    fill = StoreWeights(instance=0, model="m", host_offsets=(4, 5, 6, 7), fill=True)
    bench.order(fill, LoadModel(instance=0, model="m"))
    bench.run()
    assert [at for at, _ in bench.events(WeightsStored)] == [0.0, 4.0]
    assert [at for at, _ in bench.events(ModelLoaded)] == [5.0]


def test_without_an_image_weights_come_from_the_disk() -> None:
    """As slowly as that is."""
    bench = Bench()
    bench.order(StoreWeights(instance=0, model="m", host_offsets=(), fill=False))
    bench.load()
    bench.run()
    [(at, loaded)] = bench.events(ModelLoaded)
    assert (at, loaded.seconds, loaded.moved_bytes) == (4.0, 4.0, 4 * SLAB)


def test_a_prompt_waits_for_the_last_layer_only() -> None:
    """Layers are computed as they arrive: after the load there is one of four left to compute."""
    bench = Bench()
    life = bench.life("r", 64, 5)
    bench.load()
    bench.prefill(life)
    bench.run()
    seconds = 1 / 16 + 64 / 1024
    assert bench.token_times(life) == [1.0 + seconds / 4]
    kinds = [type(event) for _, event in bench.heard[2:]]
    assert kinds == [TokensProduced, ModelLoaded, PrefillDone]


def test_mapping_keeps_the_worker_from_anything_else() -> None:
    """Slabs are mapped before the copy begins, and before the prompt behind it."""
    bench = Bench(mapping_seconds=0.5)
    life = bench.life("r", 64, 5)
    bench.load()
    bench.prefill(life)
    bench.run()
    seconds = 1 / 16 + 64 / 1024
    assert bench.token_times(life) == [0.5 + 1.0 + seconds / 4]
    [(_, loaded)] = bench.events(ModelLoaded)
    [(_, done)] = bench.events(PrefillDone)
    assert (loaded.seconds, done.seconds) == (1.0, 1.0 + seconds / 4)


def test_slabs_of_weights_take_time_to_map_and_to_unmap() -> None:
    """Four that are unmapped, and four that are mapped before their copy begins."""
    bench = Bench([profile("m"), profile("n")], map_seconds_per_slab=1 / 32)
    bench.load()
    bench.run(10.0)
    bench.order(EvictModel(instance=0, model="m"))
    bench.load("n")
    bench.run()
    [(first, _), (second, loaded)] = bench.events(ModelLoaded)
    assert (first, second) == (4 / 32 + 1.0, 10.0 + 8 / 32 + 1.0)
    assert loaded.seconds == 1.0


def test_slabs_of_kv_take_time_before_what_needs_them() -> None:
    """A prompt takes the first; a turn pays for those that were added since, and what computes
    next for those that were given back."""

    def seconds(each: float) -> tuple[list[float], list[TurnEnded]]:
        bench = Bench(map_seconds_per_slab=each)
        life, later = bench.life("r", 64, 129), bench.life("s", 64, 1)
        bench.load()
        bench.run(8.0)
        bench.prefill(life)
        bench.turn(life, quota=2.0)
        bench.run()
        bench.turn(life, number=2)
        bench.prefill(later)
        bench.run()
        turns = [event for _, event in bench.events(TurnEnded)]
        return [event.seconds for _, event in bench.events(PrefillDone)], turns

    prompts, turns = seconds(1 / 32)
    plain, plain_turns = seconds(0.0)
    assert [turn.kv_slabs for turn in turns] == [3, 0]
    assert [turn.steps for turn in turns] == [turn.steps for turn in plain_turns]
    more = [turn.seconds - other.seconds for turn, other in zip(turns, plain_turns, strict=True)]
    assert more == [0.0, 2 / 32]
    assert [one - other for one, other in zip(prompts, plain, strict=True)] == [1 / 32, 2 / 32]


def test_computing_and_copying_may_cost_each_other() -> None:
    """A prompt under which its weights come takes longer; the next one does not."""
    bench = Bench(interference_seconds=2.0)
    first, second = bench.life("r", 64, 5), bench.life("s", 64, 5)
    bench.load()
    bench.prefill(first)
    bench.prefill(second)
    bench.run()
    seconds = 1 / 16 + 64 / 1024
    assert bench.token_times(first) == [2.0 + seconds]
    assert bench.token_times(second) == [2.0 + 2 * seconds]


def test_a_prompt_with_its_weights_in_place_takes_its_own_time() -> None:
    """And is told of with the slabs that it took."""
    bench = Bench()
    life = bench.life("r", 64, 5)
    bench.load()
    bench.run(2.0)
    bench.prefill(life)
    bench.run()
    [(at, done)] = bench.events(PrefillDone)
    assert (at, done.seconds, done.kv_slabs) == (2.125, 0.125, 1)


def test_a_long_prompt_hides_its_load() -> None:
    """It ends when it would have ended anyway, unless the last layer came late."""
    bench = Bench([profile(prefill_base_seconds=8.0)])
    life = bench.life("r", 64, 5)
    bench.load()
    bench.prefill(life)
    bench.run()
    assert bench.token_times(life) == [8.0625]


def test_a_turn_waits_for_weights_and_for_kv() -> None:
    """Its first step comes after both, which shared the link; its seconds are of decoding only."""
    bench = Bench()
    life = bench.life("r", 200, 4, produced=1)
    bench.load()
    bench.move(Direction.IN, life, kv_slabs=8)
    bench.turn(life)
    bench.run()
    nbytes = 4 * SLAB + 50 * 64
    [(at, ended)] = bench.events(TurnEnded)
    assert (ended.reason, ended.steps) == (TurnEnd.DRAINED, 3)
    assert at - ended.seconds == pytest.approx(nbytes / (4 * SLAB))
    [switch] = bench.recorder.switches
    assert switch.waited == pytest.approx(nbytes / (4 * SLAB))


def test_a_prefetch_goes_on_during_a_turn() -> None:
    """The turn is not longer for it, and the next turn finds the weights in place."""
    bench = Bench([profile("m"), profile("n")])
    first = bench.life("a", 8, 64, produced=1)
    second = bench.life("b", 8, 64, model="n", produced=1)
    bench.load()
    bench.move(Direction.IN, first)
    bench.run(4.0)
    bench.order(PrefetchModel(instance=0, model="n"))
    bench.turn(first, quota=2.0)
    bench.run()
    [_, (at, loaded)] = bench.events(ModelLoaded)
    [(ended_at, ended)] = bench.events(TurnEnded)
    assert (at, loaded.prefetched) == (5.0, True)
    assert ended_at == 4.0 + ended.seconds
    bench.move(Direction.IN, second)
    bench.turn(second, number=2)
    bench.run()
    assert bench.recorder.switches[-1].waited == pytest.approx(2 * 64 / (4 * SLAB))


def test_an_engine_of_another_system_is_started_at_every_switch() -> None:
    """After the copy, and nothing is computed under either; who runs already goes on at once."""
    bench = Bench([profile("m"), profile("n")], activation_seconds=2.0)
    first, second = bench.life("a", 64, 9), bench.life("b", 64, 9)
    other = bench.life("c", 64, 9, model="n")
    bench.load()
    bench.prefill(first)
    bench.prefill(second)
    bench.order(LoadModel(instance=0, model="n"))
    bench.prefill(other)
    bench.run()
    seconds = 1 / 16 + 64 / 1024
    done = [at for at, _ in bench.events(PrefillDone)]
    assert done == [3.0 + seconds, 3.0 + 2 * seconds, 6.0 + 3 * seconds]
    assert [switch.waited for switch in bench.recorder.switches] == [3.0, 3.0]


def test_an_engine_that_lost_its_weights_is_started_again() -> None:
    """Even if no other ran meanwhile; a turn that was preempted before it does one step."""
    bench = Bench(activation_seconds=2.0)
    life = bench.life("r", 8, 50, produced=1)
    bench.load()
    bench.move(Direction.IN, life)
    bench.turn(life, quota=0.01)
    bench.run(3.5)
    bench.order(EvictModel(instance=0, model="m"), LoadModel(instance=0, model="m"))
    bench.turn(life, number=2)
    bench.run(5.0)
    bench.order(Preempt(instance=0, turn=2))
    bench.run()
    [(first_at, first), (second_at, second)] = bench.events(TurnEnded)
    assert (first.steps, second.steps) == (1, 1)
    assert (first_at - first.seconds, second_at - second.seconds) == (3.03125, 6.5)


def test_an_evicted_load_is_never_reported() -> None:
    """Its slabs are free, and the link is for the next one."""
    bench = Bench([profile("m"), profile("n")], slabs=4)
    bench.order(PrefetchModel(instance=0, model="m"))
    bench.run(0.5)
    bench.order(EvictModel(instance=0, model="m"), LoadModel(instance=0, model="n"))
    bench.run()
    [(at, loaded)] = bench.events(ModelLoaded)
    assert (at, loaded.model) == (1.5, "n")


def test_a_load_waits_for_slabs_under_kv_on_its_way_out() -> None:
    """Swapping out goes on beside; only who needs the slabs waits."""
    bench = Bench([profile("m"), profile("n")], slabs=8)
    life = bench.life("r", 128, 9)
    bench.load()
    bench.prefill(life, kv_slabs=2)
    bench.run(4.0)
    bench.move(Direction.OUT, life, kv_slabs=0)
    bench.order(LoadModel(instance=0, model="n"))
    bench.run()
    [(moved_at, moved)] = bench.events(KvMoved)
    assert (moved_at, moved.moved, moved.kv_slabs) == (4.5, ("r",), 0)
    assert moved.moved_bytes == 32 * 64
    assert bench.events(ModelLoaded)[-1][0] == 5.5


def test_what_ends_during_a_prompt_is_reported_after_it() -> None:
    """A worker that computes a prompt does not look around."""
    bench = Bench([profile(prefill_seconds_per_token=1 / 64)])
    first, second = bench.life("a", 16, 9), bench.life("b", 64, 9)
    bench.load()
    bench.run(2.0)
    bench.prefill(first)
    bench.run(4.0)
    bench.move(Direction.OUT, first)
    bench.prefill(second)
    bench.run()
    assert bench.events(KvMoved)[0][0] == bench.events(PrefillDone)[1][0] == 4.0 + 1 / 16 + 1.0


def test_requests_finish_in_mid_turn() -> None:
    """They are told of at once, with everybody's tokens so far; the others go on."""
    bench = Bench()
    short, long = bench.life("a", 8, 3, produced=1), bench.life("b", 8, 5, produced=1)
    bench.load()
    bench.move(Direction.IN, short, long)
    bench.turn(short, long)
    bench.run()
    told = [
        [(token.request, token.count, token.finished) for token in event.tokens]
        for _, event in bench.events(TokensProduced)
    ]
    assert told == [
        [("a", 2, FinishReason.LENGTH), ("b", 2, None)],
        [("b", 2, FinishReason.LENGTH)],
    ]


def test_a_turn_preempted_before_its_weights_came_does_one_step() -> None:
    """Every turn is progress."""
    bench = Bench()
    life = bench.life("r", 8, 50, produced=1)
    bench.load()
    bench.move(Direction.IN, life)
    bench.turn(life)
    bench.run(0.5)
    bench.order(Preempt(instance=0, turn=1))
    bench.run()
    [(_, ended)] = bench.events(TurnEnded)
    assert (ended.reason, ended.steps) == (TurnEnd.PREEMPTED, 1)


def test_a_released_request_leaves_at_the_next_step() -> None:
    """With its blocks; the rest of the batch goes on."""
    bench = Bench()
    gone, stays = bench.life("a", 8, 500, produced=1), bench.life("b", 8, 30, produced=1)
    bench.load()
    bench.move(Direction.IN, gone, stays)
    bench.turn(gone, stays)
    bench.run(1.25)
    bench.order(Release(instance=0, model="m", request="a"))
    bench.run()
    [(_, ended)] = bench.events(TurnEnded)
    assert (ended.reason, ended.steps, ended.kv_slabs) == (TurnEnd.DRAINED, 29, 0)
    assert 1 < gone.produced < 29


def test_a_prompt_in_a_turn_leaves_with_its_release() -> None:
    """At the next step, with its blocks; another that had not begun is done at once."""
    bench = Bench()
    stays = bench.life("a", 8, 30, produced=1)
    gone, waits = bench.life("b", 200, 5), bench.life("c", 9, 5)
    bench.load()
    bench.move(Direction.IN, stays)
    bench.run(2.0)
    bench.turn(stays, prompts=[gone, waits], chunk_tokens=10)
    bench.order(Release(instance=0, model="m", request="c"))
    bench.run(2.25)
    bench.order(Release(instance=0, model="m", request="b"))
    bench.run()
    assert (gone.produced, waits.produced) == (0, 0)
    released, unknown = bench.events(PrefillDone)
    assert [released[1].request, unknown[1].request] == ["b", "c"]
    assert 2.25 < released[0] < 2.4
    assert unknown[1].seconds == 0.0
    [(_, ended)] = bench.events(TurnEnded)
    assert (ended.reason, ended.steps, ended.kv_slabs) == (TurnEnd.DRAINED, 29, 0)


def test_prompts_in_a_turn_that_cannot_begin_are_deferred() -> None:
    """A turn that is preempted before its first step computes none; one slab is too few."""
    bench = Bench()
    stays, large = bench.life("a", 8, 30, produced=1), bench.life("b", 100, 5)
    bench.load()
    bench.move(Direction.IN, stays)
    bench.turn(stays, prompts=[large], chunk_tokens=10)
    bench.order(Preempt(instance=0, turn=1))
    bench.run()
    bench.turn(stays, prompts=[large], chunk_tokens=10, kv_slabs=1, number=2)
    bench.run()
    assert [event.request for _, event in bench.events(PrefillDeferred)] == ["b", "b"]
    assert [event.reason for _, event in bench.events(TurnEnded)] == [
        TurnEnd.PREEMPTED,
        TurnEnd.DRAINED,
    ]


def test_a_mixed_turn_waits_for_slabs_under_kv_on_its_way_out() -> None:
    """As a prompt alone does."""
    bench = Bench(slabs=7)
    leaves, comes = bench.life("a", 128, 9, produced=1), bench.life("b", 100, 5)
    bench.load()
    bench.move(Direction.IN, leaves)
    bench.run(4.0)
    bench.move(Direction.OUT, leaves, kv_slabs=0)
    bench.turn(prompts=[comes], chunk_tokens=50, kv_slabs=2)
    bench.run()
    [(moved_at, _)] = bench.events(KvMoved)[1:]
    [(_, done)] = bench.events(PrefillDone)
    assert done.seconds == 2 / 16 + 100 / 1024
    assert bench.token_times(comes) == [moved_at + done.seconds]


def test_a_turn_waits_for_room_under_its_own_models_kv_on_its_way_out() -> None:
    """It never holds more than its cap; who is released meanwhile leaves with the next step."""
    bench = Bench()
    leaves, stays = bench.life("a", 56, 9, produced=1), bench.life("b", 8, 40, produced=1)
    gone = bench.life("c", 4, 40, produced=1)
    bench.load()
    bench.move(Direction.IN, leaves, stays, gone, kv_slabs=2)
    bench.run(4.0)
    bench.move(Direction.OUT, leaves, kv_slabs=2)
    bench.turn(stays, gone, kv_slabs=1)
    bench.order(Release(instance=0, model="m", request="c"))
    bench.run()
    [_, (moved_at, _)] = bench.events(KvMoved)
    [(_, ended)] = bench.events(TurnEnded)
    step = profile().step_seconds
    assert moved_at == 4.0 + 14 * 64 / (4 * SLAB)
    assert bench.token_times(stays)[0] == moved_at + step(2, 12)
    assert (gone.produced, ended.reason, ended.steps) == (1 + 1, TurnEnd.DRAINED, 39)
    assert ended.kv_slabs <= 1


def test_the_truth_may_deviate() -> None:
    """Prompts, steps and copies each by their own factor."""
    deviation = Deviation(prefill_factor=2.0, step_factor=4.0, link_factor=0.5)
    bench = Bench(deviation=deviation)
    life = bench.life("r", 64, 2)
    bench.load()
    bench.run(4.0)
    bench.prefill(life)
    bench.run(6.0)
    bench.turn(life)
    bench.run()
    [(_, loaded)] = bench.events(ModelLoaded)
    [(_, prefilled)] = bench.events(PrefillDone)
    [(_, ended)] = bench.events(TurnEnded)
    assert (loaded.seconds, prefilled.seconds) == (2.0, 0.25)
    assert ended.seconds == 4 * profile().step_seconds(1, 64)


def test_a_prompt_that_comes_back_to_a_mixed_turn_is_computed() -> None:
    """A request that was released is known again when a mixed turn has its prompt."""
    bench = Bench()
    stays, back = bench.life("a", 8, 30, produced=1), bench.life("b", 8, 5)
    bench.load()
    bench.move(Direction.IN, stays)
    bench.order(Release(instance=0, model="m", request="b"))
    bench.turn(stays, prompts=[back], chunk_tokens=10)
    bench.run()
    assert [event.request for _, event in bench.events(PrefillDone)] == ["b"]
    assert back.produced == 1


def test_noise_is_drawn_from_a_seed() -> None:
    """The same for the same seed and instance, of mean one, and as wide as asked for."""

    def drawn(seed: int, instance: int) -> list[float]:
        pace = Pace(Deviation(noise=0.2, seed=seed), instance)
        return [pace.turn() for _ in range(2000)]

    assert drawn(1, 0) == drawn(1, 0)
    assert drawn(1, 0) != drawn(2, 0) != drawn(2, 1)
    assert statistics.fmean(drawn(1, 0)) == pytest.approx(1.0, abs=0.02)
    assert statistics.stdev(drawn(1, 0)) == pytest.approx(0.2, abs=0.02)


def test_who_ended_has_nothing_to_move_or_compute() -> None:
    """It is named as missing; a turn of nobody is over at once."""
    bench = Bench()
    life = bench.life("r", 8, 50, produced=1)
    bench.load()
    bench.order(Release(instance=0, model="m", request="r"))
    bench.move(Direction.OUT, life)
    bench.turn(life)
    bench.run()
    [(_, moved)] = bench.events(KvMoved)
    assert (moved.moved, moved.missing, moved.moved_bytes) == ((), ("r",), 0)
    [(_, ended)] = bench.events(TurnEnded)
    assert (ended.reason, ended.steps) == (TurnEnd.DRAINED, 0)


def test_a_prompt_beyond_its_slabs_is_deferred() -> None:
    """Nothing of it is kept."""
    bench = Bench()
    life = bench.life("r", 200, 5)
    bench.load()
    bench.prefill(life, kv_slabs=1)
    bench.run()
    [(_, deferred)] = bench.events(PrefillDeferred)
    assert (deferred.request, deferred.kv_slabs) == ("r", 0)


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda bench, life: bench.prefill(life), "without its weights"),
        (lambda bench, life: bench.turn(life), "without its weights"),
        (lambda bench, life: (bench.load(), bench.load()), "loaded already"),
        (lambda bench, life: (bench.load(), bench.turn(life), bench.run()), "KV is elsewhere"),
        (lambda bench, life: bench.order(EvictModel(instance=0, model="m")), "not loaded"),
        (lambda bench, life: bench.move(Direction.IN, life, kv_slabs=0), "no room"),
        (
            lambda bench, life: bench.order(Finish(request="r", reason=FinishReason.STOP)),
            "not a command",
        ),
    ],
)
def test_a_command_that_cannot_be_is_an_error(ask, what: str) -> None:
    """The machine's plan is checked from outside, as a worker's pool would."""
    bench = Bench()
    life = bench.life("r", 8, 50, produced=1)
    with pytest.raises(LabError, match=what):
        ask(bench, life)


def test_weights_beyond_the_pool_are_an_error() -> None:
    """There is nothing to wait for."""
    bench = Bench(slabs=3)
    assert isinstance(bench.instance, SimulatedInstance)
    with pytest.raises(LabError, match="need 4 slabs, 3 are free"):
        bench.load()
