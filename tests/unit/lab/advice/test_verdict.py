"""What is recommended: only what wins by more than the error of that, and the simplest of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.lab.advice.candidates import Candidate
from appliance.lab.advice.paired_error import LEAST_ERROR, difference_error
from appliance.lab.advice.verdict import Finalist, Verdict, level_error, verdict
from appliance.lab.advice.window import PARTS, Score, value_of
from appliance.lab.experiments.metrics import InTime
from appliance.service.policy_report import PolicyChoice

MANY = 10_000
"""Requests: two of these are less than the least error."""


def score(tokens: float, requests: float | None = None, each: Sequence[float] = ()) -> Score:
    """Of parts that are all alike, or of which `each` has another share of its requests in time."""
    requests = tokens if requests is None else requests
    shares = each or [requests] * PARTS
    return Score(
        tokens=tokens,
        requests=sum(shares) / len(shares),
        ttft_p50_seconds=0.1,
        ttft_p99_seconds=0.2,
        switches=3,
        refused=0,
        parts=tuple(part(tokens, share) for share in shares),
    )


def part(tokens: float, requests: float) -> InTime:
    """A thousand tokens and requests; none where nothing is known."""
    known = [0 if math.isnan(share) else 1000 for share in (tokens, requests)]
    kept = [0 if math.isnan(share) else round(1000 * share) for share in (tokens, requests)]
    return InTime(kept[0], known[0], kept[1], known[1])


def finalist(name: str, *scores: Score, changed: int = 0) -> Finalist:
    choice = PolicyChoice(use=(name,))
    keys = {f"{name}.{number}": 1 for number in range(changed)}
    candidate = Candidate(name=name, choice=choice, changed=keys)
    return Finalist(candidate=candidate, scores=scores)


NOW = [score(0.8), score(0.82)]
BAD = score(0.3)
"""What really came of the requests, with much to win."""

shares = st.floats(0, 1)
pairs = st.tuples(st.builds(score, shares, shares), st.builds(score, shares, shares))


def judged(
    finalists: Sequence[Finalist], error: float = 0.02, really: Score = BAD, now: object = NOW
) -> Verdict:
    """With an error that comes of the number of requests."""
    assert isinstance(now, list)
    old = Candidate(name="old", choice=PolicyChoice(use=("old",)))
    return verdict(old, now, finalists, really, round(2 / error))


def test_a_clear_winner_is_recommended() -> None:
    """With its gain in the worst replay, and the reason in one sentence."""
    found = judged([finalist("new", score(0.95), score(0.9))])
    assert found.candidate is not None
    assert found.candidate.name == "new"
    assert found.gain == pytest.approx(0.08)
    assert found.error == pytest.approx(0.02)
    assert found.reason == (
        "Have new decide: on the same requests it is at least 8.0 points ahead of old in every"
        " replay, in the mean of tokens and requests in time; that may be off by 2.0 points."
    )


def test_another_policy_comes_first_and_its_parameters_later() -> None:
    """Though it is far better with changed ones. They are recommended of the policy that decides
    now, and of one that wins with them only."""
    tuned = finalist("new", score(0.95), score(0.95), changed=1)
    plain = finalist("new", score(0.86), score(0.88))
    for finalists in ([tuned, plain], [plain, tuned]):
        found = judged(finalists)
        assert found.candidate == plain.candidate
        assert found.gain == pytest.approx(0.06)
    assert judged([tuned, finalist("new", *NOW)]).candidate == tuned.candidate
    own = finalist("old", score(0.95), score(0.95), changed=1)
    assert judged([own, finalist("old", score(0.86), score(0.88))]).candidate == own.candidate


def test_what_a_policy_has_not_is_not_compared() -> None:
    """The current one has a replay more, as the other's last one was stopped."""
    found = judged([finalist("new", score(0.95), score(0.9))], now=[*NOW, score(0.1)])
    assert found.gain == pytest.approx(0.08)
    found = judged([finalist("new", score(0.85))], now=[*NOW, score(0.9)])
    assert found.gain == pytest.approx(0.05)


def test_how_far_the_lab_is_off_does_not_decide() -> None:
    """Replays of an overload keep much more, or less, than clients got: that is so for both."""
    found = judged([finalist("new", score(0.95), score(0.9))], really=score(0.1))
    assert found.candidate is not None
    assert found.gain == pytest.approx(0.08)


def test_nothing_wins_more_than_clients_missed() -> None:
    """In the lab there is much to win, and in truth two points."""
    assert judged([finalist("new", score(0.95), score(0.9))], really=score(0.97)).candidate
    found = judged([finalist("new", score(0.95), score(0.9))], really=score(0.985))
    assert found.candidate is None
    assert found.gain == pytest.approx(0.015)
    assert "What is left to win is not more than" in found.reason


def test_the_simplest_of_those_that_are_alike() -> None:
    """A parameter is not changed for what may be an error; of equals the best on average."""
    finalists = [
        finalist("tuned", score(0.97), score(0.97), changed=1),
        finalist("plain", score(0.95), score(0.95)),
        finalist("better", score(0.955), score(0.95)),
    ]
    found = judged(finalists, 0.03)
    assert found.candidate is not None
    assert found.candidate.name == "better"
    tuned = judged(finalists, 0.01)
    assert tuned.candidate is not None
    assert tuned.candidate.name == "tuned"


def simpler(*scores: Score) -> Finalist:
    one = finalist("plain", *scores)
    return msgspec.structs.replace(
        one, candidate=msgspec.structs.replace(one.candidate, simpler=True)
    )


def test_fewer_parameters_need_no_gain() -> None:
    """Those of the current choice have to earn their place: without them it may be as good, but
    not behind in any replay, nor lose requests for tokens."""
    found = judged([simpler(score(0.8), score(0.82))], 0.05)
    assert found.candidate is not None
    assert (found.gain, found.error) == (0.0, 0.05)
    assert "plain decide, with fewer parameters set: " in found.reason
    assert judged([finalist("other", score(0.8), score(0.82))], 0.05).candidate is None
    assert judged([simpler(score(0.8), score(0.81))], 0.05).candidate is None
    assert judged([simpler(score(1.0, 0.7), score(1.0, 0.7))], 0.05).candidate is None


def test_parameters_stay_where_all_is_in_time() -> None:
    """Replays that differ in nothing, as nothing is asked, say nothing of them."""
    assert judged([simpler(score(0.8), score(0.82))], 0.05, really=score(0.96)).candidate is None


def test_what_wins_clearly_comes_before_fewer_parameters() -> None:
    """It is as if there were none of them."""
    finalists = [simpler(score(0.8), score(0.82)), finalist("new", score(0.95), score(0.95))]
    found = judged(finalists, 0.05)
    assert found.candidate is not None
    assert found.candidate.name == "new"


UNEVEN = [0.2, 1.0] * (PARTS // 2)


@pytest.mark.parametrize(
    ("finalists", "error", "why"),
    [
        ([], 0.02, "Give more --cpu-seconds"),
        ([finalist("new", score(0.82), score(0.84))], 0.05, "other minutes have other requests"),
        ([finalist("new", score(0.9), score(0.8))], 0.01, "no other policy has more in time"),
        ([finalist("new", score(0.7), score(0.7))], 0.01, "the best of them is new"),
        ([finalist("new", score(1.0, 0.7), score(1.0, 0.75))], 0.02, "it loses more than"),
        (
            [finalist("new", score(1.0, each=UNEVEN), score(1.0, each=UNEVEN))],
            0.02,
            "no other policy has more in time",
        ),
    ],
)
def test_what_there_is_is_kept(finalists: list[Finalist], error: float, why: str) -> None:
    """For these reasons, each of which is given."""
    found = judged(finalists, error)
    assert found.candidate is None
    assert found.reason.startswith("Keep what you have: ")
    assert why in found.reason


def test_one_part_of_the_window_is_no_reason() -> None:
    """All of the gain comes of one eighth of the requests, and others lose a little: the next
    minutes may have no such part."""
    now = score(0.5)
    once = score(0.5, each=[1.0] + [0.48] * (PARTS - 1))
    always = score(0.5, each=[0.545] * PARTS)
    assert once.requests == pytest.approx(always.requests)
    assert judged([finalist("once", once)], 0.01, now=[now]).candidate is None
    assert judged([finalist("always", always)], 0.01, now=[now]).candidate is not None


# --- errors --------------------------------------------------------------------------------------


def test_what_both_replays_do_wrong_is_no_error() -> None:
    """However uneven the parts are: what counts is how uneven their differences are."""
    low = score(0.5, each=[0.1 * k for k in range(PARTS)])
    high = score(0.6, each=[0.1 * k + 0.1 for k in range(PARTS)])
    assert difference_error([low], [high], MANY) == LEAST_ERROR


def test_the_error_is_the_standard_error_of_the_difference() -> None:
    """Of means of as many parts as there are, half of which differ by so much more than the rest;
    the value is the mean of two shares, of which one does not differ."""
    same = score(0.5)
    other = score(0.5, each=[0.5, 0.9] * (PARTS // 2))
    deviation = 0.2 * math.sqrt(PARTS / (PARTS - 1))
    expected = deviation / math.sqrt(PARTS) / 2
    assert difference_error([same], [other], MANY) == pytest.approx(expected, rel=0.01)
    assert difference_error([same] * 3, [other] * 3, MANY) == pytest.approx(expected, rel=0.01)


def test_the_error_is_never_nothing() -> None:
    """A replay that differs nowhere does not make one request of some a reason."""
    same = [score(0.9)]
    assert difference_error(same, same, MANY) == LEAST_ERROR
    assert difference_error(same, same, 50) == pytest.approx(0.04)


def test_the_error_of_what_came_at_once_is_not_known() -> None:
    """Of one part nothing is known of how much others would differ."""
    empty = InTime(0, 0, 0, 0)
    parts = (part(0.5, 0.5), *[empty] * (PARTS - 1))
    once = msgspec.structs.replace(score(0.5), parts=parts)
    assert math.isnan(difference_error([once], [once], MANY))
    found = judged([Finalist(candidate=finalist("new").candidate, scores=(once,))], now=[once])
    assert found.candidate is None
    assert "all at once" in found.reason


def test_the_level_error_is_the_largest_difference() -> None:
    """In tokens or requests, of all replays; what is not known does not count."""
    found = level_error([score(0.9), score(math.nan, 0.5)], score(0.88, 0.58))
    assert found == pytest.approx(0.32)
    assert math.isnan(level_error([score(math.nan)], score(0.1)))


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
    found = judged(finalists, max(error, 1e-3), now=current)
    if found.candidate is None:
        return
    (chosen,) = [one for one in finalists if one.candidate == found.candidate]
    for now, then in zip(current, chosen.scores, strict=True):
        assert then.value - now.value > found.error
    for share in ("tokens", "requests"):
        changes = [
            getattr(then, share) - getattr(now, share)
            for now, then in zip(current, chosen.scores, strict=True)
        ]
        assert sum(changes) / len(changes) >= -found.error - 1e-12


def test_what_is_not_known_does_not_count() -> None:
    """The value of a replay, or of parts of one, is the mean of what is known of it."""
    assert score(0.5, 1.0).value == value_of(score(0.5, 1.0).parts) == 0.75
    assert score(math.nan, 1.0).value == value_of(score(math.nan, 1.0).parts) == 1.0
    assert score(math.nan).value == value_of(()) == 0.0
