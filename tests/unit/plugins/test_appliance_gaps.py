"""Our own policy where streams are promised a longest gap between tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from appliance.lab.experiments import scenario
from appliance.lab.experiments.metrics import expand
from appliance.lab.experiments.run import play
from appliance.plugins.appliance import Appliance
from appliance.scheduling.policy_api import BatchView, GroupView, InstanceView
from appliance.vocabulary import Slo
from tests.unit.plugins.policy_views import FixedCosts, batch_view, group_view, instance_view

ALWAYS = 1000.0
"""A slack target that is never earned."""
COSTS = FixedCosts(step=0.01, per_token=0.0001, switch=1.0)
NOW = 100.0


def stream(
    model: str, due: float, scheduled: float, gap: float = 1.0, ttft: float = 1.0
) -> BatchView:
    """A request whose next token is due in so many seconds, and without a gap in `scheduled`."""
    return structs.replace(
        batch_view(model, deadline=NOW + due),
        slo=Slo(ttft_seconds=ttft, tbt_seconds=0.1, gap_seconds=gap),
        scheduled=(NOW + scheduled,),
    )


def running(model: str, *batches: BatchView) -> InstanceView:
    """All weights are on the device."""
    return instance_view(
        batches=batches,
        current=model,
        turn=model,
        turn_began=NOW,
        resident=[batch.model for batch in batches],
    )


def first_of(policy: Appliance, *batches: BatchView) -> str:
    view = running(batches[0].model, *batches)
    return policy.round(now=NOW, instance=view, costs=COSTS)[0].model


def test_a_turn_ends_when_a_stream_has_to_be_back() -> None:
    """The margin before that is a share of the gap, as it is of a TTFT that is due."""
    view = running("a", stream("a", 50, 50), stream("b", 0.9, 50, gap=2.0))

    first, *_ = Appliance(slack_target=ALWAYS, margin=0.1).round(
        now=NOW, instance=view, costs=COSTS
    )

    assert first.quota_seconds == pytest.approx(0.9 - 0.1 * 1.0)  # which is less than 0.1 * 2.0
    shorter = running("a", stream("a", 50, 50), stream("b", 0.9, 50, gap=0.5))
    first, *_ = Appliance(slack_target=ALWAYS, margin=0.1).round(
        now=NOW, instance=shorter, costs=COSTS
    )
    assert first.quota_seconds == pytest.approx(0.9 - 0.1 * 0.5)


def test_a_stream_whose_gap_is_over_waits_for_those_that_can_be_in_time() -> None:
    """It has lost one token, and loses no other before its schedule is missed."""
    policy = Appliance(slack_target=ALWAYS)
    runs, can = stream("a", 50, 50), stream("c", 0.1, 50)

    assert first_of(policy, runs, stream("b", -0.1, 20, ttft=30), can) == "c"
    assert first_of(policy, runs, stream("b", -0.1, 20, ttft=30)) == "a"
    assert first_of(policy, runs, stream("b", -0.1, 0.05, ttft=30), can) == "b"


def test_one_stream_of_a_batch_that_is_late_does_not_hide_another() -> None:
    """Of two requests the gap of one is over, and that of the other is not."""
    both = structs.replace(
        stream("b", -0.1, 20, ttft=30),
        deadlines=(NOW - 0.1, NOW + 0.1),
        scheduled=(NOW + 20, NOW + 30),
    )

    assert first_of(Appliance(slack_target=ALWAYS), stream("a", 50, 50), both) == "b"


def test_slack_is_earned_on_the_schedule() -> None:
    """A model that was just left is due when its gap is over, whatever it has earned: it goes on
    until it is so many TTFT targets ahead of its schedule, then others do."""
    policy, waits = Appliance(pace=0.0, slack_target=1.0), stream("b", 0.9, 30)

    assert first_of(policy, stream("a", 0.95, 0.99), waits) == "a"
    assert first_of(policy, stream("a", 0.95, 1.01), waits) == "b"


def test_a_prompt_does_not_wait_for_streams_until_it_is_late() -> None:
    """Streams are always due soon. So where there are some with a gap, a prompt is due after a
    part of its TTFT target (10 s) already."""
    group = structs.replace(
        group_view("c", ttft=10.0, arrived=NOW, deadline=NOW + 10),
        slo=Slo(ttft_seconds=10.0, tbt_seconds=0.1),
    )

    def turn(batch: BatchView) -> float:
        view = instance_view(
            groups=(group,),
            batches=(batch,),
            current="a",
            turn="a",
            turn_began=NOW,
            resident=["a"],
        )
        return Appliance(slack_target=ALWAYS).preempt(now=NOW, instance=view, costs=COSTS)

    assert turn(batch_view("a", deadline=NOW + 50)) == pytest.approx(10 - 2 - 0.1 - 1)
    assert turn(stream("a", 50, 50)) == pytest.approx(7 - 0.2 - 0.1 - 1)


def test_a_stream_that_is_computed_again_is_due_as_it_was() -> None:
    """Its gap says nothing of whether the instance is behind, and it has no first token to wait
    for: it came 90 s ago and is 20 s ahead of its schedule."""
    again = structs.replace(
        group_view("c", ttft=2.0, arrived=NOW - 90, deadline=NOW - 3),
        slo=Slo(ttft_seconds=2.0, tbt_seconds=0.1, gap_seconds=1.0),
        scheduled=NOW + 20,
        resumed=1,
    )

    def left(group: GroupView) -> float:
        view = structs.replace(
            running("a", stream("a", 50, 50)), groups=(group,), resident=frozenset("ac")
        )
        return Appliance(pace=0.0, slack_target=ALWAYS).preempt(now=NOW, instance=view, costs=COSTS)

    due = structs.replace(again, deadline=NOW + 5)
    assert left(due) == pytest.approx(5 - 0.2 - 0.1)
    urgent = batch_view("d", deadline=NOW + 0.15)
    view = structs.replace(
        running("a", stream("a", 50, 50), stream("b", 0.1, 50), urgent), groups=(again,)
    )
    first, *_ = Appliance(pace=0.0, slack_target=ALWAYS).round(now=NOW, instance=view, costs=COSTS)
    assert first.model == "b", "the instance is not behind"


def test_an_instance_that_is_behind_keeps_no_gaps() -> None:
    """From when a token is later than its schedule by more than a TTFT target; a gap that is over
    for so long says nothing of that."""
    late, urgent = stream("a", -1.1, -1.1), batch_view("c", deadline=NOW + 0.15)
    policy = Appliance(pace=0.0, slack_target=ALWAYS)

    assert first_of(policy, stream("a", -1.1, 50, ttft=9), stream("b", 0.1, 50), urgent) == "b"
    assert first_of(policy, late, stream("b", 0.1, 50), urgent) == "c"


BOX = """
title = "two models on one GPU"
duration = "60s"
[hardware]
gpu = "H800"
count = 1
host_cache = "256GiB"
[slo]
ttft = "10s"
tbt = "100ms"
{gap}
[[models]]
mix = ["Qwen2.5-7B"]
count = 2
context = 4096
[arrivals]
rate = 0.3
lengths = "lengths.csv"
"""


def longest_gap(folder: Path, gap: str, policy: str = "appliance") -> float:
    """Between two tokens of any request, in seconds."""
    (folder / "box.toml").write_text(BOX.format(gap=gap))
    (folder / "lengths.csv").write_text("prompt_tokens,output_tokens\n200,600\n300,400\n")
    chosen = scenario.read(folder / "box.toml")
    run = play(chosen.setting(1, folder), chosen.contender(policy)).run
    tokens = expand(run.recorder, run.recorder.lives)
    return float(np.diff(tokens.seconds)[tokens.index[1:] > 0].max())


@pytest.mark.parametrize("gap", [1.0, 0.5])
def test_streams_of_two_models_keep_their_gap(tmp_path: Path, gap: float) -> None:
    """On a GPU that has room for both, through the machine and on simulated engines: no stream
    stands still for longer than was promised. Without a promise some do."""
    assert longest_gap(tmp_path, "") > 1.0
    assert longest_gap(tmp_path, f'gap = "{gap}s"') <= gap
