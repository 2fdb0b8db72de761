"""Whole runs: the daemon's machine on simulated instances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.errors import LabError
from appliance.hookspecs import hookimpl
from appliance.lab.experiments.metrics import measure
from appliance.lab.experiments.run import Contender, Setting, System, play
from appliance.lab.hardware import Box, gpu, profile
from appliance.lab.sim.closed_form import elapsed
from appliance.lab.sim.simulator import SimulationRun, Visit, simulate
from appliance.lab.workload import Arrival, Lengths, drawn
from appliance.memory.ledger import DiskLedger, HostLedger
from appliance.plugins.aegaeon import Aegaeon
from appliance.policies.loader import load_stack
from appliance.policies.stack import PolicyStack
from appliance.scheduling.machine import Machine
from appliance.scheduling.policy_api import (
    BatchLimits,
    ClusterView,
    InstanceView,
    Phase,
    Placement,
    Refusal,
    RequestView,
)
from appliance.service.policy_report import PolicyChoice
from appliance.vocabulary import (
    Command,
    Event,
    KvRestored,
    KvSpilled,
    ModelLoaded,
    ModelSpec,
    RequestArrived,
    RequestClass,
    Ticked,
    TokensProduced,
)
from tests.unit.lab import bench as lab_bench
from tests.unit.lab.bench import SLAB, SLO
from tests.unit.plugins.whimsical import Whimsical

pytestmark = pytest.mark.thorough

MODELS = ["a", "b", "c", "d", "e"]


class HearingMachine(Machine):
    """Keeps its journal, and checks its books after every event."""

    journal: list[tuple[float, Event, list[Command]]]

    def handle(self, event: Event, now: float) -> list[Command]:
        commands = super().handle(event, now)
        self.check_integrity()
        self.journal.append((now, event, commands))
        return commands


def machine(
    policy: str, instances: int, host_slabs: int = 400, disk_slabs: int = 0
) -> HearingMachine:
    specs = [
        ModelSpec(name=name, weight_bytes=4 * SLAB, max_context_tokens=400, max_batch=8, slo=SLO)
        for name in MODELS
    ]
    host = HostLedger(host_slabs * SLAB, SLAB)
    stack, disk = load_stack(PolicyChoice(use=(policy,))), DiskLedger(disk_slabs * SLAB)
    made = HearingMachine(specs, instances, host, stack, disk=disk)
    made.journal = []
    return made


def run(
    made: Machine, arrivals: Iterable[Arrival], *, slabs: int = 32, until: float = 1e5
) -> SimulationRun:
    box = lab_bench.box(len(made.instances), slabs)
    profiles = {name: lab_bench.profile(name) for name in MODELS}
    return simulate(made, box, profiles, arrivals, until)


def small_setting(instances: int = 2, slabs: int = 32, host_slabs: int = 400) -> Setting:
    """Instances of the toy box."""
    made = machine("aegaeon", instances)
    return Setting(
        models=list(made.models.values()),
        box=lab_bench.box(instances, slabs, host_slabs),
        profiles={name: lab_bench.profile(name) for name in MODELS},
        arrivals=arrivals(),
        seconds=1e4,
    )


def loads(made: HearingMachine) -> list[ModelLoaded]:
    """What it was told of loads."""
    return [event for _, event, _ in made.journal if isinstance(event, ModelLoaded)]


def arrivals(count: int = 30, seed: int = 1, rate: float = 0.4) -> list[Arrival]:
    lengths = Lengths([(20, 30), (150, 5), (8, 120), (60, 60)])
    return drawn(dict.fromkeys(MODELS, rate), lengths, 1e3, seed)[:count]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["aegaeon", "serverlessllm"]),
    st.integers(1, 4),
    st.integers(16, 40),
    st.integers(40, 120),
    st.integers(0, 99),
    st.floats(0.05, 3.0),
)
def test_every_request_ends_and_gets_its_tokens(
    policy: str, instances: int, slabs: int, host_slabs: int, seed: int, rate: float
) -> None:
    """Whatever is scarce; nobody gets a token too many, and time goes forwards."""
    made = machine(policy, instances, host_slabs)
    done = run(made, arrivals(seed=seed, rate=rate), slabs=slabs)
    assert not made.requests
    assert len(done.recorder.lives) == 30
    for life in done.recorder.lives:
        assert life.outcome in ("stop", "length")
        assert life.produced == life.output_tokens
    times = [now for now, _, _ in made.journal]
    assert times == sorted(times)
    assert measure(done).finished == 30


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.integers(16, 40),
    st.integers(60, 120),
    st.floats(0.2, 3.0),
    st.integers(1, 2),
    st.sampled_from([0.0, 0.5]),
)
def test_instances_can_do_whatever_a_policy_may_want(
    seed: int,
    instances: int,
    slabs: int,
    host_slabs: int,
    rate: float,
    gpus_per_root: int,
    activation_seconds: float,
) -> None:
    """Mixed turns, migrations, roles that change: nothing is asked for that cannot be, by whatever
    hardware and whatever switches cost."""
    setting = small_setting(instances, slabs, host_slabs)
    setting = replace(
        setting,
        arrivals=arrivals(seed=seed % 7, rate=rate),
        box=msgspec.structs.replace(setting.box, gpus_per_root=gpus_per_root),
    )
    system = System(activation_seconds=activation_seconds)
    trial = play(setting, Contender("whimsical", policy=Whimsical(seed), system=system))
    assert not trial.faults
    assert {life.outcome for life in trial.run.recorder.lives} <= {"stop", "length", "overloaded"}


@pytest.mark.parametrize("policy", ["aegaeon", "serverlessllm"])
def test_the_same_run_twice_is_the_same_to_the_byte(policy: str) -> None:
    """The journal as JSON, and the metrics."""
    encoded = []
    for _ in range(2):
        made = machine(policy, 3)
        done = run(made, arrivals())
        encoded.append(
            (msgspec.json.encode(made.journal), msgspec.json.encode(measure(done).rounded()))
        )
    assert encoded[0] == encoded[1]


class Chunking:
    """Computes prompts beside decoding, on any instance; everything else is the built-in's."""

    @hookimpl
    def place(self, cluster: ClusterView) -> list[Placement]:
        return [Placement() for _ in cluster.instances]

    @hookimpl
    def decode(self, prefilled_on: int) -> int:
        return prefilled_on

    @hookimpl
    def batch(self, instance: InstanceView) -> BatchLimits:
        return BatchLimits(requests=8, chunk_tokens=16)

    @hookimpl
    def phase(self) -> Phase:
        return Phase.PREFILL


def test_mixed_turns_in_a_whole_run() -> None:
    """Every request ends; prompts are computed beside steps, which a policy may want."""
    setting = small_setting()
    trial = play(setting, Contender("chunking", policy=Chunking()))
    spans = trial.run.recorder.spans
    assert not trial.faults
    assert {life.outcome for life in trial.run.recorder.lives} == {"stop"}
    assert sum(span.prompts for span in spans) == len(trial.run.recorder.lives)
    assert any(span.prompts and span.steps > 1 for span in spans)


class Foresight:
    """An oracle: takes the request with the shortest output first."""

    oracle = True

    def learn_oracle(self, lengths: Mapping[str, int]) -> None:
        self.lengths = lengths
        self.asked: dict[str, int] = {}

    @hookimpl
    def prefill(self, request: RequestView) -> None:
        self.asked[request.id] = self.lengths[request.id]


def test_only_an_oracle_knows_the_lengths() -> None:
    """It is handed them when it is loaded, and finds each when the request arrives."""
    policy = Foresight()
    trial = play(small_setting(), Contender("foresight", policy=policy))
    assert policy.asked == {life.id: life.output_tokens for life in trial.run.recorder.lives}


def test_estimates_begin_with_the_profiles() -> None:
    """What the instances take is what policies expect, before they have seen anything."""
    setting = small_setting()
    costs, truth = setting.costs(), setting.profiles["a"]
    assert costs.step_seconds("a", 3, 100) == truth.step_seconds(3, 100)
    assert costs.prefill_seconds("a", 70) == truth.prefill_seconds(70)
    assert costs.switch_seconds("a") == setting.box.gpu.switch_seconds(truth.weight_bytes) == 1.0


def test_the_machine_hears_when_its_deadline_has_come() -> None:
    """At that time, and not before; it has none when there is nothing to do."""
    made = machine("aegaeon", 1)
    run(made, arrivals(5))
    ticks = [now for now, event, _ in made.journal if isinstance(event, Ticked)]
    assert ticks
    assert made.next_deadline() is None
    assert all(later - now >= 0.99 for now, later in pairwise(ticks))


@pytest.mark.parametrize("policy", ["aegaeon", "appliance", "prism"])
def test_a_run_may_begin_with_a_backlog(policy: str) -> None:
    """The machine hears of requests from before 0 with their own times, and places them on all
    instances; nothing is computed before 0, and their tokens are as late as that makes them."""
    backlog = [msgspec.structs.replace(one, seconds=one.seconds - 60) for one in arrivals(30)]
    late = [one for one in backlog if one.seconds < 0]
    assert len(late) == 30
    made = machine(policy, 2)
    done = run(made, [*late, *arrivals(10)])
    heard = [(now, event) for now, event, _ in made.journal]
    assert [now for now, _ in heard] == sorted(now for now, _ in heard)
    came = [now for now, event in heard if isinstance(event, RequestArrived)]
    assert came == [one.seconds for one in (*late, *arrivals(10))]
    lives = done.recorder.lives
    assert [life.arrived for life in lives] == came
    assert all(life.produced == life.output_tokens for life in lives)
    assert min(done.recorder.starts) > 0
    assert {span.instance for span in done.recorder.spans if span.began < 15} == {0, 1}
    assert measure(done, -60).ttft_p50_seconds > -late[-1].seconds
    assert measure(done).requests == 10


class Refusing:
    """Serves nobody."""

    @hookimpl
    def prefill(self) -> Refusal:
        return Refusal(reason="closed")


def test_orders_may_be_on_their_way() -> None:
    """What follows from an arrival begins so much later; a request that is done leaves at once."""
    setting = small_setting()
    # When every engine has heard that it is to be built, and from where to load.
    arrival = Arrival(seconds=100.0, model="a", prompt_tokens=20, output_tokens=9)
    at_once = replace(setting, arrivals=[arrival])
    box = msgspec.structs.replace(setting.box, order_seconds=0.25)
    later = replace(at_once, box=box)
    contender = Contender("serverlessllm", ("serverlessllm",))
    first, second = (play(one, contender).run.recorder.lives[0] for one in (at_once, later))
    assert first.ended is not None
    assert second.ended is not None
    # The load and the prompt were ordered together, and then a turn.
    assert second.ended - first.ended == pytest.approx(2 * 0.25)
    assert second.outcome == first.outcome


def test_another_policy_takes_over_in_mid_run() -> None:
    """Who came before is served to the end, who comes after is the other's."""
    made = machine("aegaeon", 2)
    swap = (20.0, PolicyStack({"refusing": Refusing(), "built-in": Aegaeon()}))
    box, profiles = lab_bench.box(2), {name: lab_bench.profile(name) for name in MODELS}
    done = simulate(made, box, profiles, arrivals(60), 1e5, swaps=[swap])
    outcomes = {life.outcome for life in done.recorder.lives if life.arrived > 20.0}
    assert outcomes == {"overloaded"}
    assert {life.outcome for life in done.recorder.lives if life.arrived < 20.0} == {"stop"}


def test_a_visitor_says_when_another_policy_takes_over() -> None:
    """And when it comes again; it changes nothing but by the policy that it answers."""
    box, profiles = lab_bench.box(2), {name: lab_bench.profile(name) for name in MODELS}
    visits: list[float] = []

    def visitor(now: float) -> Visit:
        visits.append(now)
        refusing = PolicyStack({"refusing": Refusing(), "built-in": Aegaeon()})
        return Visit(now + 10.0, refusing if now == 20.0 else None)

    visited = simulate(machine("aegaeon", 2), box, profiles, arrivals(60), 35.0, visitor=visitor)
    swap = (20.0, PolicyStack({"refusing": Refusing(), "built-in": Aegaeon()}))
    swapped = simulate(machine("aegaeon", 2), box, profiles, arrivals(60), 35.0, swaps=[swap])
    assert visits == [0.0, 10.0, 20.0, 30.0]
    assert visited.recorder == swapped.recorder
    assert "overloaded" in {life.outcome for life in visited.recorder.lives}


def test_tokens_can_be_reported_more_often() -> None:
    """No step is reported later than so long after it began, or than its own end."""
    made = machine("aegaeon", 1)
    box = msgspec.structs.replace(lab_bench.box(1), report_seconds=0.1)
    profiles = {name: lab_bench.profile(name) for name in MODELS}
    one = Arrival(seconds=0.0, model="a", prompt_tokens=8, output_tokens=120)
    done = simulate(made, box, profiles, [one], 1e4)
    times = [now for now, event, _ in made.journal if isinstance(event, TokensProduced)]
    step = lab_bench.profile().step_seconds(1, 128)
    assert max(after - before for before, after in pairwise(times)) < 0.1 + step
    plain = machine("aegaeon", 1)
    before = simulate(plain, lab_bench.box(1), profiles, [one], 1e4)
    assert len(times) > 2 * sum(isinstance(e, TokensProduced) for _, e, _ in plain.journal)
    assert done.recorder.lives[0].ended == pytest.approx(before.recorder.lives[0].ended)


def test_weights_that_the_host_has_no_room_for_come_from_the_disk() -> None:
    """Which is one, whoever reads it: two instances get half of its rate each, one gets it all."""
    waiting = [
        Arrival(seconds=0.0, model=model, prompt_tokens=10, output_tokens=3, max_tokens=3)
        for model in "abc"
    ]
    together, alone = (machine("serverlessllm", 2, host_slabs=3) for _ in range(2))
    run(together, waiting)
    run(alone, waiting[:1])
    assert [(e.instance, e.seconds) for e in loads(together)][:2] == [(0, 8.0), (1, 8.0)]
    assert [e.seconds for e in loads(alone)] == [4.0]


def test_kv_goes_to_the_disk_and_back() -> None:
    """That of batch work, while the host has little room. It takes a second for each slab."""
    made = machine("aegaeon", 1, host_slabs=40, disk_slabs=100)
    batch = [
        Arrival(
            seconds=0.0,
            model=model,
            prompt_tokens=60,
            output_tokens=150,
            request_class=RequestClass.BATCH,
        )
        for model in 3 * MODELS
    ]
    chats = [
        Arrival(seconds=float(at), model=MODELS[at % 5], prompt_tokens=60, output_tokens=60)
        for at in range(3, 200, 2)
    ]
    done = run(made, [*batch, *chats], slabs=12)
    written = [event for _, event, _ in made.journal if isinstance(event, KvSpilled)]
    read = [event for _, event, _ in made.journal if isinstance(event, KvRestored)]
    assert {life.outcome for life in done.recorder.lives} == {"stop"}
    assert written
    assert sorted(e.request for e in read) == sorted(e.request for e in written)
    # Weights are in the host: nothing else uses the disk.
    assert all(event.seconds == pytest.approx(event.moved_bytes / SLAB) for event in written)
    assert not made.disk.held


def test_a_group_of_gpus_holds_a_model_that_one_cannot() -> None:
    """Two of 72B in four GPUs each: they load a quarter of the weights each, side by side, at half
    the pace under roots of two; KV of a token is a quarter of its own on each."""
    large = lab_bench.profile(
        weight_bytes=145_412_407_296, layers=80, kv_bytes_per_token=327_680, tp=4
    )
    took, kv = [], []
    for gpus_per_root in (1, 2):
        box = Box(
            gpu=gpu("H800"), instances=2, tp=4, host_bytes=1 << 40, gpus_per_root=gpus_per_root
        )
        specs = [
            ModelSpec(
                name=name,
                weight_bytes=large.weight_bytes,
                max_context_tokens=4096,
                max_batch=8,
                slo=SLO,
            )
            for name in "ab"
        ]
        host = HostLedger(box.host_bytes, box.slab_bytes)
        made = HearingMachine(specs, 2, host, load_stack(PolicyChoice(use=("serverlessllm",))))
        made.journal = []
        waiting = [
            Arrival(seconds=at, model=model, prompt_tokens=2000, output_tokens=500)
            for at, model in [(0.0, "a"), (30.0, "b"), (60.0, "a")]
        ]
        done = simulate(made, box, dict.fromkeys("ab", large), waiting, 600.0)
        assert {life.outcome for life in done.recorder.lives} == {"stop"}
        took.append([event.seconds for event in loads(made)])
        kv.append(max(max(look.kv) for look in done.samples))
        assert measure(done).gpus_opened == 8.0
    shard_seconds = large.weight_bytes / 4 / 40e9
    assert took[0] == pytest.approx([shard_seconds] * len(took[0]))
    assert took[1] == pytest.approx([2 * shard_seconds] * len(took[1]))
    assert 2000 * 327_680 / 4 < kv[0] < 2 * 2500 * 327_680 / 4


def test_a_box_is_looked_at_while_it_runs() -> None:
    """What is held is in the pool, KV fills its slabs at most, and a box with nothing to do has
    no work."""
    done = run(machine("aegaeon", 2), arrivals(), until=600.0)
    assert [look.at for look in done.samples] == [float(at) for at in range(1, 601)]
    for look in done.samples:
        held = [w + kv for w, kv in zip(look.weights, look.kv, strict=True)]
        assert len(held) == 2
        assert max(held) <= done.pool_bytes == 32 * SLAB
        assert sum(look.kv) == sum(mapped for _, mapped in look.device.values())
        assert all(used <= mapped for used, mapped in look.device.values())
        assert look.host_weights == 20 * SLAB
    assert max(look.with_work for look in done.samples) == 2
    last = done.samples[-1]
    assert (last.with_work, last.opened, sum(last.kv)) == (0, 2, 0)
    assert 0 < measure(done).fragmentation < 1


def test_the_machine_is_not_shown_how_long_an_output_will_be() -> None:
    """It is told of the room in the context, or of what the client allows."""
    made = machine("aegaeon", 1)
    done = run(
        made,
        [
            Arrival(seconds=0.0, model="a", prompt_tokens=100, output_tokens=7),
            Arrival(seconds=1.0, model="a", prompt_tokens=100, output_tokens=70, max_tokens=20),
            Arrival(seconds=2.0, model="a", prompt_tokens=390, output_tokens=70),
        ],
    )
    told = [
        event.request.max_tokens
        for _, event, _ in made.journal
        if isinstance(event, RequestArrived)
    ]
    assert told == [300, 20, 10]
    assert [life.produced for life in done.recorder.lives] == [7, 20, 10]
    assert [life.outcome for life in done.recorder.lives] == ["stop", "length", "length"]


def test_a_prompt_beyond_the_context_is_refused() -> None:
    """And counts as missed."""
    made = machine("aegaeon", 1)
    done = run(made, [Arrival(seconds=0.0, model="a", prompt_tokens=500, output_tokens=7)])
    assert done.recorder.lives[0].outcome == "context_length_exceeded"
    assert measure(done).token_attainment == 0.0


def test_a_run_ends_when_its_time_is_up() -> None:
    """Requests that are under way then are left as they are."""
    done = run(machine("aegaeon", 1), arrivals(), until=10.0)
    assert {life.outcome for life in done.recorder.lives} > {None}
    metrics = measure(done)
    assert 0 < metrics.finished < metrics.requests
    assert 0 < metrics.busy_share < 1


@pytest.mark.parametrize("policy", ["aegaeon", "taichi", "appliance"])
@pytest.mark.parametrize("until", [3.0, 10.0, 31.4])
def test_a_run_that_ends_has_the_tokens_of_turns_under_way(policy: str, until: float) -> None:
    """As many of each request as a longer run of the same has by then."""
    short = run(machine(policy, 2), arrivals(), until=until)
    long = run(machine(policy, 2), arrivals())

    assert tokens_by(until, short) == tokens_by(until, long)
    assert tokens_by(until, short).total() == sum(short.recorder.counts)


def tokens_by(seconds: float, done: SimulationRun) -> Counter[int]:
    """Tokens of each request that came by then."""
    found: Counter[int] = Counter()
    record = done.recorder
    columns = (record.requests, record.starts, record.firsts, record.growths, record.counts)
    for request, start, first, growth, count in zip(*columns, strict=True):
        steps = range(1, count + 1)
        found[request] += sum(start + elapsed(first, growth, k) <= seconds for k in steps)
    return +found


def test_built_in_tables_know_the_models_of_the_paper() -> None:
    """Times of the paper's order: 7B loads in 0.4 s, steps in 9 ms; what is unknown is an error
    that says what there is."""
    qwen = profile("Qwen2.5-7B", "H800")
    assert gpu("H800").switch_seconds(qwen.shard_bytes) == pytest.approx(0.381, abs=0.001)
    assert 0.008 < qwen.step_seconds(1, 500) < 0.010
    assert qwen.step_seconds(8, 4000) > qwen.step_seconds(1, 500)
    assert 0.01 < qwen.prefill_seconds(257) < 0.02
    shape = qwen.kv_shape(64 << 20, 16)
    assert (shape.group_slabs, shape.group_blocks) == (1, 73)
    assert profile("Qwen-7B", "H800", tp=2).shard_bytes * 2 >= 15_442_649_088
    with pytest.raises(LabError, match="no GPU 'B42' is known; there are: A10, A100"):
        gpu("B42")
    with pytest.raises(LabError, match=r"no profile of GPT-9 on H800 with tp=1; .*Yi-9B on H800"):
        profile("GPT-9", "H800")
