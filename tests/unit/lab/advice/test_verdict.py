"""What is recommended: only what wins by more than the lab's error, and the simplest of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.lab.advice.candidates import Candidate
from appliance.lab.advice.verdict import LEAST_ERROR, Finalist, lab_error, verdict
from appliance.lab.advice.window import Score
from appliance.service.policy_report import PolicyChoice


def score(tokens: float, requests: float | None = None) -> Score:
    return Score(
        tokens=tokens,
        requests=tokens if requests is None else requests,
        ttft_p50_seconds=0.1,
        ttft_p99_seconds=0.2,
        switches=3,
        refused=0,
    )


def finalist(name: str, *scores: Score, changed: int = 0) -> Finalist:
    choice = PolicyChoice(use=(name,))
    keys = {f"{name}.{number}": 1 for number in range(changed)}
    candidate = Candidate(name=name, choice=choice, changed=keys)
    return Finalist(candidate=candidate, scores=scores)


NOW = [score(0.8), score(0.82)]

shares = st.floats(0, 1)
pairs = st.tuples(st.builds(score, shares, shares), st.builds(score, shares, shares))


def test_a_clear_winner_is_recommended() -> None:
    """With its gain in the worst replay, and the reason in one sentence."""
    found = verdict("old", NOW, [finalist("new", score(0.95), score(0.9))], 0.02)
    assert found.candidate is not None
    assert found.candidate.name == "new"
    assert found.gain == pytest.approx(0.08)
    assert found.reason == (
        "Have new decide: in every replay it is at least 8.0 points ahead of old, in the mean of"
        " tokens and requests in time, and under old the lab was off by 2.0 points at most."
    )


def test_the_simplest_of_those_that_are_alike() -> None:
    """A parameter is not changed for what may be the lab's error; of equals the best on average."""
    finalists = [
        finalist("tuned", score(0.96), score(0.96), changed=1),
        finalist("plain", score(0.95), score(0.95)),
        finalist("better", score(0.955), score(0.95)),
    ]
    found = verdict("old", NOW, finalists, 0.02)
    assert found.candidate is not None
    assert found.candidate.name == "better"
    tuned = verdict("old", NOW, finalists, 0.001)
    assert tuned.candidate is not None
    assert tuned.candidate.name == "tuned"


@pytest.mark.parametrize(
    ("finalists", "error", "why"),
    [
        ([], 0.02, "Give more --cpu-seconds"),
        ([finalist("new", score(0.82), score(0.84))], 0.05, "may be the lab's error"),
        ([finalist("new", score(0.9), score(0.8))], 0.01, "no other policy has more in time"),
        ([finalist("new", score(0.7), score(0.7))], 0.01, "the best of them is new"),
        ([finalist("new", score(0.9), score(0.9))], 0.25, "so it cannot judge this box"),
        ([finalist("new", score(1.0, 0.75), score(1.0, 0.75))], 0.02, "it loses more than"),
        ([finalist("new", score(1.0), score(1.0))], math.nan, "its error is not known"),
    ],
)
def test_what_there_is_is_kept(finalists: list[Finalist], error: float, why: str) -> None:
    """For these reasons, each of which is given."""
    found = verdict("old", NOW, finalists, error)
    assert found.candidate is None
    assert found.reason.startswith("Keep what you have: ")
    assert why in found.reason


def test_a_policy_that_keeps_nearly_all_is_kept() -> None:
    """What could be won is less than the error."""
    found = verdict("old", [score(0.97)], [finalist("new", score(1.0))], 0.04)
    assert found.candidate is None
    assert "What is left to win is not more than the lab's own error" in found.reason


def test_the_error_is_the_largest_difference() -> None:
    """In tokens or requests, of all replays; what is not known in one of both does not count."""
    found = lab_error(
        [(score(0.9), score(0.88, 0.85)), (score(math.nan, 0.5), score(0.1, 0.58))], 1000
    )
    assert found == pytest.approx(0.08)
    assert math.isnan(lab_error([(score(math.nan), score(0.1))], 1000))


def test_the_error_is_never_nothing() -> None:
    """A replay that is like what happened does not make one request of some a reason."""
    same = [(score(0.9), score(0.9))]
    assert lab_error(same, 1000) == LEAST_ERROR
    assert lab_error(same, 50) == pytest.approx(0.04)


@given(st.lists(pairs, min_size=1, max_size=3), st.lists(shares, min_size=1, max_size=6), shares)
def test_nothing_within_the_error_is_recommended(
    replays: list[tuple[Score, Score]], values: list[float], error: float
) -> None:
    """Whatever the scores are: what is recommended is ahead by more in every single replay, and
    loses no more than that in tokens or requests."""
    current = [now for now, _ in replays]
    finalists = [
        finalist(f"p{n}", *(score(min(1, s.tokens + v), s.requests) for _, s in replays))
        for n, v in enumerate(values)
    ]
    found = verdict("old", current, finalists, error)
    if found.candidate is None:
        return
    (chosen,) = [one for one in finalists if one.candidate == found.candidate]
    for now, then in zip(current, chosen.scores, strict=True):
        assert then.value - now.value > error
    for share in ("tokens", "requests"):
        changes = [
            getattr(then, share) - getattr(now, share)
            for now, then in zip(current, chosen.scores, strict=True)
        ]
        assert sum(changes) / len(changes) >= -error - 1e-12


def test_what_is_not_known_does_not_count() -> None:
    """The value of a replay is the mean of what is known of it."""
    assert score(0.5, 1.0).value == 0.75
    assert score(math.nan, 1.0).value == 1.0
    assert score(math.nan).value == 0.0
