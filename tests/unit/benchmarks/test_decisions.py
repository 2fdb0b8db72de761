"""The benchmarks of decisions, on a small machine: they ask what they say, and answers are used."""

from __future__ import annotations

import pytest

from benchmarks import policy_calls
from benchmarks.decisions import measure


@pytest.mark.parametrize(
    ("load", "asked"),
    [
        ("turns", {"admit", "place", "prefill", "preempt", "round"}),
        pytest.param("homes", {"batch", "place", "prefill", "round"}, marks=pytest.mark.thorough),
        pytest.param("apart", {"decode", "flow", "place", "prefill"}, marks=pytest.mark.thorough),
    ],
)
def test_each_load_asks_for_decisions_and_two_runs_are_the_same(load: str, asked: set[str]) -> None:
    found = measure(load, "appliance", models=8, instances=4, warm_up=800, events=800, runs=2)

    assert found["faults"] == 0
    assert found["decisions"].keys() >= asked
    if load == "homes":
        assert found["answers"]["most_homes"] >= 8


def test_a_question_is_put_in_each_way() -> None:
    found = policy_calls.measure(rounds=10)

    for question in ("phase", "prefill"):
        assert found[question].keys() == {"bare", "pluggy", "inline", "apart"}
