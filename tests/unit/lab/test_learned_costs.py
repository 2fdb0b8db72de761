"""A box whose costs nothing is known of, as a daemon's: what is learned separates its instances."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.lab.experiments import scenario
from appliance.lab.experiments.metrics import measure
from appliance.lab.experiments.run import Contender, play

SCENARIO = Path(__file__).parents[3] / "benchmarks/scenarios/taichi_14b.toml"
SUMMARIES = {
    "slo.ttft": "6s",
    "slo.tbt": "50ms",
    "arrivals.rate": "2.25",
    "arrivals.prompt_scale": "2.5",
    "deviation.noise": "0.05",
    "deviation.learned": "true",
    "warmup": "40s",
    "duration": "120s",
}

pytestmark = pytest.mark.thorough


def in_time(separate: bool) -> float:
    """Share of the requests that keep both targets."""
    chosen = scenario.read(SCENARIO, SUMMARIES)
    given = {"appliance": {"separate": separate}}
    trial = play(chosen.setting(1, SCENARIO.parent), Contender("appliance", ["appliance"], given))
    assert not trial.faults
    return measure(trial.run, chosen.warmup_seconds).request_attainment


def test_prefill_and_decode_come_apart_and_more_is_in_time() -> None:
    """Long prompts and a tight TBT, on four instances: steps are learned in the warm-up."""
    together, apart = in_time(separate=False), in_time(separate=True)

    assert together < 0.75
    assert apart > 0.9
