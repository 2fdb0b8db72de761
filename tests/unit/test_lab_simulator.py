"""Whole runs: the daemon's machine on simulated instances."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.errors import LabError
from appliance.lab.hardware import gpu, profile
from appliance.lab.metrics import measure
from appliance.lab.simulator import Run, simulate
from appliance.lab.workload import Arrival, Lengths, drawn
from appliance.memory.ledger import HostLedger
from appliance.policies import load_stack
from appliance.scheduling.machine import Machine
from appliance.vocabulary import Command, Event, ModelSpec, RequestArrived
from tests.unit import lab_bench
from tests.unit.lab_bench import SLAB, SLO

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
    policy: str, instances: int, host_slabs: int = 400, context: int = 400
) -> HearingMachine:
    specs = [
        ModelSpec(name=name, weight_bytes=4 * SLAB, max_context_tokens=400, max_batch=8, slo=SLO)
        for name in MODELS
    ]
    host = HostLedger(host_slabs * SLAB, SLAB)
    made = HearingMachine(specs, instances, host, load_stack([policy], {}))
    made.journal = []
    return made


def run(made: Machine, arrivals: Iterable[Arrival], *, slabs: int = 32, until: float = 1e5) -> Run:
    box = lab_bench.box(len(made.instances), slabs)
    profiles = {name: lab_bench.profile(name) for name in MODELS}
    return simulate(made, box, profiles, arrivals, until)


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
    """What is under way then is left as it is."""
    done = run(machine("aegaeon", 1), arrivals(), until=10.0)
    assert {life.outcome for life in done.recorder.lives} > {None}
    metrics = measure(done)
    assert 0 < metrics.finished < metrics.requests
    assert 0 < metrics.busy_share < 1


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
