"""TaiChi's algorithms by hand and by their claims, and its answers to the machine."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.plugins.taichi import (
    KvRoom,
    Sliders,
    Taichi,
    backflow,
    chunked_seconds,
    degrade,
    distribute,
    feasible,
    p_heavy,
    search_sliders,
    slider_grid,
)
from appliance.scheduling.policy_api import (
    DecodingView,
    InstanceView,
    Migration,
    Phase,
    PlannedTurn,
    PrefillChoice,
    Refusal,
)
from appliance.vocabulary import InstanceClass, RequestClass, Role
from tests.docblocks import code_blocks
from tests.unit.plugins.policy_views import (
    GIB,
    FixedCosts,
    batch_view,
    cluster_view,
    decoding_view,
    group_view,
    instance_view,
    model_view,
    request_view,
)

ALPHA = 0.96
PER_TOKEN = 1 << 20


def paced(
    name: str, tpot: float, *, output: int = 11, here: int | None = None, tokens: int = 20
) -> DecodingView:
    """A request that got a token every `tpot` seconds; 0.1 was promised."""
    newest = tpot * (output - 1)
    return decoding_view(name, output=output, here=here, newest=newest, tokens=tokens, tbt=0.1)


# --- Algorithm 1 ---------------------------------------------------------------------------------


def test_requests_at_risk_flow_back() -> None:
    """Beyond 0.96 of the promise, not at it; one token alone has no pace yet."""
    requests = [
        paced("fine", 0.05),
        paced("at", 0.0959),
        paced("beyond", 0.0961),
        paced("late", 0.2),
        paced("first", 9.0, output=1),
    ]

    assert [request.id for request in backflow(requests, ALPHA)] == ["beyond", "late"]


def test_the_longest_are_degraded_until_enough_is_released() -> None:
    """By hand: 25 bytes too many; outputs of 40, 30, 20, 10 tokens hold 10 bytes each: three go."""
    requests = [
        paced(name, 0.05, here=here) for name, here in {"a": 10, "b": 40, "c": 20, "d": 30}.items()
    ]
    sizes = dict.fromkeys("abcd", 10.0)

    def chosen(excess: float) -> str:
        return "".join(request.id for request in degrade(requests, excess, sizes, ALPHA))

    assert chosen(25.0) == "bdc"
    assert chosen(20.0) == "bd"
    assert chosen(0.0) == ""
    assert chosen(1000.0) == "bdca"


def test_an_output_counts_from_backflow() -> None:
    """Who came back has a short output again; who is at risk still is not sent away again."""
    back = paced("back", 0.05, output=500, here=3)
    risky = paced("risky", 0.097, output=400, here=100)
    other = paced("other", 0.05, output=50, here=50)
    sizes = {"back": 10.0, "risky": 10.0, "other": 10.0}

    assert [r.id for r in degrade([back, risky, other], 15.0, sizes, ALPHA)] == ["other", "back"]


def test_targets_are_balanced() -> None:
    """By hand, shares used: 0.5 and 0.2 of 100; 30 makes 0.5 of the second; 10 go to the first of
    the two then, 20 to the second."""
    requests = [paced(name, 0.05) for name in ("x", "y", "z")]
    sizes = {"x": 30.0, "y": 10.0, "z": 20.0}
    targets = {1: KvRoom(50.0, 100.0), 2: KvRoom(20.0, 100.0)}

    moved = distribute(requests, sizes, targets, 0.95, lambda target, request: True)

    assert moved == [
        Migration(request="x", target=2),
        Migration(request="y", target=1),
        Migration(request="z", target=2),
    ]


def test_no_request_goes_where_there_is_no_room() -> None:
    """Full targets, and those that do not take the request, are left alone."""
    requests = [paced("big", 0.05), paced("small", 0.05)]
    sizes = {"big": 60.0, "small": 40.0}
    targets = {1: KvRoom(50.0, 100.0), 2: KvRoom(0.0, 100.0), 3: KvRoom(0.0, 0.0)}

    moved = distribute(requests, sizes, targets, 0.95, lambda target, request: target != 2)

    assert moved == [Migration(request="small", target=1)]


@given(
    requests=st.lists(
        st.tuples(st.integers(2, 60), st.floats(0.01, 0.2), st.integers(1, 40)), max_size=12
    ),
    used=st.lists(st.integers(0, 120), min_size=1, max_size=3),
)
@settings(deadline=None)
def test_degrading_fills_no_instance_beyond_the_watermark(
    requests: list[tuple[int, float, int]], used: list[int]
) -> None:
    """No target is filled beyond the limit, nobody goes twice, and nobody at risk goes at all."""
    views = [paced(f"r{n}", pace, here=here) for n, (here, pace, _) in enumerate(requests)]
    sizes = {f"r{n}": float(size) for n, (_, _, size) in enumerate(requests)}
    targets = {n: KvRoom(float(bytes_), 100.0) for n, bytes_ in enumerate(used)}

    leaving = degrade(views, 50.0, sizes, ALPHA)
    moved = distribute(leaving, sizes, targets, 0.95, lambda target, request: True)

    assert all(request.tpot_seconds() <= 0.096 for request in leaving)
    assert len({move.request for move in moved}) == len(moved)
    for target, memory in targets.items():
        more = sum(sizes[move.request] for move in moved if move.target == target)
        assert not more or memory.use(more) <= 0.95


# --- Algorithm 2 ---------------------------------------------------------------------------------


def test_a_prompt_in_chunks_pays_for_the_steps_it_is_in() -> None:
    """1000 tokens in chunks of 256 are four steps; alone, none."""
    assert chunked_seconds(0.5, 1000, 256, 0.02) == pytest.approx(0.58)
    assert chunked_seconds(0.5, 1024, 256, 0.02) == pytest.approx(0.58)
    assert chunked_seconds(0.5, 1000, 0, 0.02) == 0.5


def test_feasible_is_strictly_before_the_deadline() -> None:
    """Q + E + T has to be less than the TTFT SLO."""
    assert feasible(1.0, 1.0, 0.5, 2.6)
    assert not feasible(1.0, 1.0, 0.5, 2.5)


def policy(instances: int = 4, **parameters: object) -> Taichi:
    """Which knows of so many instances: the first half of them is P-heavy."""
    made = msgspec.convert(parameters, Taichi)
    models = [model_view(n, kv_bytes_per_token=PER_TOKEN, weight_bytes=20 * GIB) for n in "ab"]
    made.place(cluster=cluster_view(instances, *models))
    return made


def choose(
    taichi: Taichi, views: list[InstanceView], *, tokens: int = 100, ttft: float = 1.0
) -> PrefillChoice | Refusal:
    """Where a request that arrived at 0 goes; a token takes a millisecond, a step 25 ms."""
    return taichi.prefill(
        now=0.0,
        request=request_view("a", tokens=tokens, ttft=ttft),
        instances=views,
        costs=FixedCosts(),
    )


def queue(number: int, tokens: int = 0, **more: object) -> InstanceView:
    """An instance where prompts of so many tokens wait."""
    groups = (group_view("a", tokens=tokens),) if tokens else ()
    return instance_view(number, groups=groups, resident=["a"], current="a", **more)  # type: ignore[arg-type]


def test_a_prompt_goes_where_the_fewest_tokens_wait() -> None:
    """Of those that are in time; with a D-heavy instance among the fewest, there."""
    taichi = policy()

    assert choose(taichi, [queue(0, 300), queue(1, 100), queue(2, 200), queue(3, 250)]) == (
        PrefillChoice(instance=1)
    )
    assert choose(taichi, [queue(n) for n in range(4)]) == PrefillChoice(instance=2)


def test_long_prompts_go_where_they_are_fast() -> None:
    """By hand: 800 tokens beside decoding take 0.8 + 4 x 0.025 = 0.9 s on a D-heavy instance, and
    0.8 + 0.025 + 0.052 = 0.877 s on a P-heavy one, with 800 MiB that move at 16 GB/s then. Short
    ones go to the D-heavy one either way."""
    taichi = policy(2)
    views = [queue(n, batches=(batch_view("a"),)) for n in range(2)]

    assert choose(taichi, views, tokens=800, ttft=0.91) == PrefillChoice(instance=1)
    assert choose(taichi, views, tokens=800, ttft=0.89) == PrefillChoice(instance=0)
    assert choose(taichi, views, tokens=100, ttft=0.89) == PrefillChoice(instance=1)
    refusing = policy(2, infeasible="refuse")
    assert isinstance(choose(refusing, views, tokens=800, ttft=0.87), Refusal)


def test_what_is_being_computed_counts() -> None:
    """A prompt under way is waited for like those in the queue, in tokens and in time."""
    taichi = policy()
    views = [queue(0), queue(1), queue(2, computing=900), queue(3, computing=50)]

    assert choose(taichi, views) == PrefillChoice(instance=0)
    assert choose(taichi, views[2:], ttft=0.5) == PrefillChoice(instance=3)


def test_switches_are_waited_for() -> None:
    """One to each queued model that is not resident, and to one's own."""
    taichi, costs = policy(infeasible="refuse"), FixedCosts(switch=1.0)
    queued = (group_view("b", tokens=100), group_view("c", tokens=100))

    def soonest(view: InstanceView, ttft: float) -> bool:
        request = request_view("a", tokens=100, ttft=ttft)
        answer = taichi.prefill(now=0.0, request=request, instances=[view], costs=costs)
        return isinstance(answer, PrefillChoice)

    absent = instance_view(2, groups=queued, resident=["b"])
    present = instance_view(2, groups=queued, resident=["a", "b", "c"])
    assert (soonest(absent, 2.31), soonest(absent, 2.29)) == (True, False)
    assert (soonest(present, 0.31), soonest(present, 0.29)) == (True, False)


def test_time_already_waited_is_gone() -> None:
    """A request that has to be computed again has what is left of its SLO."""
    taichi = policy(infeasible="refuse")
    request = request_view("a", tokens=100, ttft=1.0, arrived=0.0)

    answers = [
        taichi.prefill(now=now, request=request, instances=[queue(2)], costs=FixedCosts())
        for now in (0.8, 0.95)
    ]

    assert answers[0] == PrefillChoice(instance=2)
    assert answers[1] == Refusal(
        reason="its first token would come 0.1 s from now at the soonest, 0.1 s are left"
    )


def test_who_cannot_be_in_time_goes_where_least_late() -> None:
    """Or anywhere by its id, or nowhere."""
    views = [queue(0, 9000), queue(1, 5000), queue(2, 7000), queue(3, 6000)]
    requests = [request_view("a", name=f"r{n}", tokens=100) for n in range(40)]

    def targets(taichi: Taichi) -> list[object]:
        answers = [
            taichi.prefill(now=0.0, request=request, instances=views, costs=FixedCosts())
            for request in requests
        ]
        return [getattr(answer, "instance", None) for answer in answers]

    assert set(targets(policy())) == {1}
    assert set(targets(policy(infeasible="random"))) == {0, 1, 2, 3}
    assert targets(policy(infeasible="random")) == targets(policy(infeasible="random"))
    assert set(targets(policy(infeasible="refuse"))) == {None}


# --- kinds of instances --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instances", "share", "heavy"),
    [(1, 0.5, 0), (2, 0.5, 1), (4, 0.5, 2), (4, 0.01, 1), (4, 0.99, 3), (8, 0.25, 2)],
)
def test_the_ratio(instances: int, share: float, heavy: int) -> None:
    """The first instances are P-heavy, neither none nor all; a lone one is not."""
    assert p_heavy(range(instances), share) == frozenset(range(heavy))


def test_kinds_are_chunks() -> None:
    """All instances compute prompts and decode, in larger or smaller chunks."""
    taichi = policy(4, p_chunk_tokens=1000, d_chunk_tokens=100)

    placements = taichi.place(cluster=cluster_view(4, model_view("a")))

    assert {placement.role for placement in placements} == {Role.MIXED}
    chunks = [taichi.batch(instance=instance_view(n)).chunk_tokens for n in range(4)]
    assert chunks == [1000, 1000, 100, 100]


def test_a_lone_instance_computes_prompts_in_large_chunks() -> None:
    """No request can leave it, so small chunks would only take more steps."""
    lone = policy(1, p_chunk_tokens=1000, d_chunk_tokens=100)

    assert lone.batch(instance=instance_view(0)).chunk_tokens == 1000


def test_who_is_gone_is_no_part_of_the_ratio() -> None:
    """Of those that are up, the share is P-heavy."""
    taichi = policy(4)
    views = [instance_view(0, up=False), *(instance_view(n) for n in (1, 2, 3))]

    taichi.place(cluster=cluster_view(views))

    chunks = [taichi.batch(instance=view).chunk_tokens for view in views]
    assert chunks == [256, 1024, 1024, 256]


def test_without_chunks_on_the_d_heavy_it_is_disaggregation() -> None:
    """Each kind does its own then; a lone instance does everything, prompts whole."""
    placements = policy(d_chunk_tokens=0).place(cluster=cluster_view(4, model_view("a")))
    lone = policy(1, d_chunk_tokens=0)

    assert [p.role for p in placements] == [Role.PREFILL] * 2 + [Role.DECODE] * 2
    assert lone.place(cluster=cluster_view(1, model_view("a")))[0].role is Role.MIXED
    assert lone.batch(instance=instance_view(0)).chunk_tokens == 0


def test_a_prompt_of_the_decoding_model_starts_at_once() -> None:
    """Others alternate with turns, and so does one that found no room beside them."""
    taichi = policy()
    groups = (group_view("a"),)
    own, both = (batch_view("a"), batch_view("b", runnable=0)), (batch_view("a"), batch_view("b"))

    def phase(batches: object, prefills: int, made: Taichi = taichi) -> Phase:
        view = instance_view(2, groups=groups, batches=batches, prefills=prefills)  # type: ignore[arg-type]
        return made.phase(instance=view)

    assert [phase(own, n) for n in (0, 1, 2)] == [Phase.PREFILL, Phase.PREFILL, Phase.DECODE]
    assert [phase(both, n) for n in (0, 1)] == [Phase.PREFILL, Phase.DECODE]
    assert phase(own, 1, policy(1, d_chunk_tokens=0)) is Phase.DECODE


def test_turns_of_a_lone_model_are_short() -> None:
    """So that flows are looked at often; several models are somebody else's to arrange."""
    lone = instance_view(batches=(batch_view("a"), batch_view("b", runnable=0)))
    several = instance_view(batches=(batch_view("a"), batch_view("b")))

    assert policy().round(instance=lone) == [PlannedTurn(model="a", quota_seconds=0.25)]
    assert policy().round(instance=several) is None


def test_a_turn_with_a_prompt_ends_with_it() -> None:
    """Nothing cuts it; other turns are somebody else's to end."""
    assert policy().preempt(instance=instance_view(turn="a", computing=100)) == math.inf
    assert policy().preempt(instance=instance_view(turn="a")) is None


# --- decoding ------------------------------------------------------------------------------------


def decoding(number: int, kv_tokens: int, **more: object) -> InstanceView:
    """An instance of 80 GiB whose requests of model a (20 GiB) have so many tokens, 1 MiB each."""
    batches = (batch_view("a", kv_tokens=kv_tokens),)
    return instance_view(number, batches=batches, **more)  # type: ignore[arg-type]


def test_decoding_begins_in_place_on_a_d_heavy_instance() -> None:
    """Else on the D-heavy one with the least memory in use; on P-heavy ones if there is no other,
    in place."""
    taichi = policy()
    views = [decoding(0, 0), decoding(1, 0), decoding(2, 9000), decoding(3, 8000)]

    assert taichi.decode(prefilled_on=2, instances=views) == 2
    assert taichi.decode(prefilled_on=0, instances=views) == 3
    assert taichi.decode(prefilled_on=1, instances=views[:2]) == 1


def test_memory_that_fills_flows_to_the_p_heavy() -> None:
    """By hand: 60 GiB are left beside the model, 57 are the watermark, 58 are used: one request of
    1000 tokens is too little, so the two longest go, each where less is used."""
    taichi = policy()
    full = decoding(2, 58 * 1024)
    requests = [
        decoding_view("short", here=5, tokens=1000),
        decoding_view("longest", here=50, tokens=1000),
        decoding_view("long", here=40, tokens=1000),
    ]
    others = [decoding(0, 1500), decoding(1, 1000), decoding(3, 0)]

    moved = taichi.flow(instance=full, requests=requests, others=others)

    assert moved == [Migration(request="longest", target=1), Migration(request="long", target=0)]
    assert taichi.flow(instance=decoding(2, 57 * 1024), requests=requests, others=others) == []
    assert taichi.flow(instance=full, requests=requests, others=others[2:]) == []
    full_too = [decoding(0, 57 * 1024)]
    assert taichi.flow(instance=full, requests=requests, others=full_too) == []


def test_requests_at_risk_flow_to_the_d_heavy() -> None:
    """Beyond the watermark too, which makes others flow away; but not beyond the memory."""
    taichi = policy()
    requests = [paced("late", 0.2, tokens=1000), paced("fine", 0.01)]
    others = [decoding(1, 0), decoding(2, 59 * 1024), decoding(3, 58 * 1024)]

    moved = taichi.flow(instance=decoding(0, 2000), requests=requests, others=others)
    none = taichi.flow(
        instance=decoding(0, 2000), requests=requests, others=[decoding(3, 60 * 1024)]
    )

    assert moved == [Migration(request="late", target=3)]
    assert none == []


def test_requests_flow_only_where_they_are_taken() -> None:
    """Not where their model may not be served, nor where their class is not."""
    taichi = policy()
    late = [paced("late", 0.2)]

    def target(**more: object) -> bool:
        others = [decoding(2, 0, **more)]
        return bool(taichi.flow(instance=decoding(0, 0), requests=late, others=others))

    assert target()
    assert target(models=frozenset("a"))
    assert target(kind=InstanceClass.INTERACTIVE)
    assert not target(models=frozenset("b"))
    assert not target(kind=InstanceClass.BATCH)
    assert not target(kind=InstanceClass.PARKED)
    batch = [decoding_view("r", newest=99.0, kind=RequestClass.BATCH)]
    others = [decoding(2, 0, kind=InstanceClass.BATCH)]
    assert taichi.flow(instance=decoding(0, 0), requests=batch, others=others)


def test_flow_alone_knows_enough() -> None:
    """If another policy decides places: the first half of those shown is P-heavy, and sizes are
    what the instance holds: 10 GiB in 1000 tokens here, of 10.1 GiB that there are."""
    taichi = msgspec.convert({}, Taichi)
    full = decoding(1, 1000, kv_bytes=10 * GIB, free_bytes=GIB // 10)
    empty = instance_view(0, kv_bytes=0, free_bytes=20 * GIB)
    requests = [decoding_view("r", tokens=500), decoding_view("s", tokens=500, here=20)]

    moved = taichi.flow(instance=full, requests=requests, others=[empty])

    assert moved == [Migration(request="s", target=0)]
    assert taichi.flow(instance=empty, requests=requests, others=[full]) == []
    request, costs = request_view("a", tokens=100), FixedCosts()
    views = [instance_view(0, resident=["a"]), instance_view(1, resident=["a"])]
    choice = taichi.prefill(now=0.0, request=request, instances=views, costs=costs)
    assert choice == PrefillChoice(instance=1)


# --- sliders -------------------------------------------------------------------------------------


def test_the_grid_has_every_setting_that_makes_sense() -> None:
    """D-heavy instances have no larger chunks than P-heavy ones, and both kinds exist."""
    grid = slider_grid(3, [256, 1024], [0, 512])

    assert [(s.prefill_share, s.p_chunk_tokens, s.d_chunk_tokens) for s in grid] == [
        (pytest.approx(heavy / 3), p, d)
        for p, d in ((256, 0), (1024, 0), (1024, 512))
        for heavy in (1, 2)
    ]
    for sliders in grid:
        heavy = p_heavy(range(3), sliders.prefill_share)
        assert len(heavy) == pytest.approx(3 * sliders.prefill_share)


def test_the_search_of_the_page() -> None:
    """docs/policies/taichi.md, with an `evaluate` of ours."""
    (block,) = code_blocks("docs/policies/taichi.md", "python")
    names: dict[str, Any] = {"evaluate": lambda sliders: sliders.prefill_share}

    exec(block.text, names)

    assert names["goodput"] == names["best"].prefill_share == 0.75


def test_the_search_finds_the_best() -> None:
    """The first of several; nothing to search is an error."""
    grid = slider_grid(4, [512, 1024], [128, 256])

    def goodput(sliders: Sliders) -> float:
        return -abs(sliders.prefill_share - 0.5) - abs(sliders.d_chunk_tokens - 256)

    best, value = search_sliders(goodput, grid)

    assert (best, value) == (Sliders(prefill_share=0.5, p_chunk_tokens=512, d_chunk_tokens=256), 0)
    assert msgspec.convert(msgspec.to_builtins(best), Taichi).d_chunk_tokens == 256
    with pytest.raises(ValueError, match="empty"):
        search_sliders(goodput, [])
