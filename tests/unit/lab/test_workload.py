"""Workloads: drawn from seeds, read from traces."""

from __future__ import annotations

import gzip
from collections import Counter
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from appliance.errors import LabError
from appliance.lab.workload import Lengths, backlog, drawn, read_trace, with_keys
from appliance.vocabulary import RequestClass

LENGTHS = Lengths([(100, 10), (300, 30), (50, 500)])


def test_another_model_leaves_the_others_as_they_are() -> None:
    """Neither does another rate of one of them change what the rest gets."""
    few = drawn({"a": 0.5, "b": 0.5}, LENGTHS, 200.0, seed=3)
    more = drawn({"c": 2.0, "a": 0.5, "b": 1.5}, LENGTHS, 200.0, seed=3)
    assert [arrival for arrival in few if arrival.model == "a"] == [
        arrival for arrival in more if arrival.model == "a"
    ]
    assert few != drawn({"a": 0.5, "b": 0.5}, LENGTHS, 200.0, seed=4)


@pytest.mark.parametrize("cv", [1.0, 4.0])
def test_arrivals_come_at_their_rate_in_order(cv: float) -> None:
    """For a Poisson process and for a bursty one."""
    arrivals = drawn({"a": 2.0, "b": 0.0}, LENGTHS, 5000.0, seed=1, cv=cv)
    times = [arrival.seconds for arrival in arrivals]
    assert times == sorted(times)
    assert times[-1] < 5000.0
    assert len(times) == pytest.approx(10_000, rel=0.1)
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread / mean == pytest.approx(cv, rel=0.15)
    assert {arrival.model for arrival in arrivals} == {"a"}


@pytest.mark.parametrize("cv", [1.0, 4.0])
def test_a_rate_may_have_phases(cv: float) -> None:
    """Bursts and pauses; what is before the first is as it is without."""
    phases = [(1000.0, 3.0), (2000.0, 0.0), (3000.0, 0.5)]
    steady = [a.seconds for a in drawn({"a": 4.0}, LENGTHS, 5000.0, seed=1, cv=cv)]
    times = [a.seconds for a in drawn({"a": 4.0}, LENGTHS, 5000.0, seed=1, cv=cv, phases=phases)]
    assert times == sorted(times)
    spans = [(0, 1000, 4000), (1000, 2000, 12000), (2000, 3000, 0), (3000, 5000, 4000)]
    for begin, end, expected in spans:
        count = sum(begin <= at < end for at in times)
        assert count == pytest.approx(expected, rel=0.05 * cv)
    before = sum(at < 1000 for at in steady)
    assert times[:before] == steady[:before]
    assert max(drawn({"a": 4.0}, LENGTHS, 5e3, 1, phases=[(9.0, 0.0)])[-1].seconds, 9.0) == 9.0


def test_batch_requests_have_streams_of_their_own() -> None:
    """They leave the interactive ones as they are; a backlog is there all at once."""
    batch = drawn({"a": 0.5}, LENGTHS, 200.0, seed=3, request_class=RequestClass.BATCH)
    interactive = drawn({"a": 0.5}, LENGTHS, 200.0, seed=3)
    assert {arrival.request_class for arrival in batch} == {RequestClass.BATCH}
    assert [a.seconds for a in batch] != [a.seconds for a in interactive]
    waiting = backlog(["a", "b"], 50, LENGTHS, 60.0, seed=3)
    assert {(a.seconds, a.request_class) for a in waiting} == {(60.0, RequestClass.BATCH)}
    assert [a.model for a in waiting] == ["a"] * 50 + ["b"] * 50
    assert {a.prompt_tokens for a in waiting} == {100, 300, 50}
    assert waiting == backlog(["a", "b"], 50, LENGTHS, 60.0, seed=3)


def test_lengths_are_scaled_and_fitted() -> None:
    """To means, and into a context; never to nothing."""
    scaled = LENGTHS.with_means(257, 235)
    assert scaled.prompts.mean() == pytest.approx(257, abs=1)
    assert scaled.outputs.mean() == pytest.approx(235, abs=1)
    fitted = LENGTHS.within(110)
    assert (fitted.prompts + fitted.outputs).max() <= 110
    assert fitted.prompts[0] == 100
    assert LENGTHS.scaled(output=0.0001).outputs.tolist() == [1, 1, 1]
    with pytest.raises(LabError, match="no lengths"):
        Lengths([])


def test_a_trace_is_read_and_played_faster(tmp_path: Path) -> None:
    """Classes and keys are optional, the order of the lines does not matter."""
    path = tmp_path / "trace.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("arrival_s,model,prompt_tokens,output_tokens,class,key\n")
        file.write("4.0,b,7,8,batch,acme\n1.0,a,5,6,,\n")
    first, second = read_trace(path, rate_scale=2.0)
    assert (first.seconds, first.model, first.prompt_tokens, first.output_tokens) == (
        0.5,
        "a",
        5,
        6,
    )
    assert (second.seconds, second.request_class) == (2.0, RequestClass.BATCH)
    assert (first.key, second.key) == ("", "acme")
    lengths = Lengths.read(path)
    assert lengths.prompts.tolist() == [7, 5]


def test_keys_get_their_shares_of_requests() -> None:
    """The same ones every time; a request that has a key keeps it."""
    few = drawn({"a": 5.0}, Lengths([(10, 10)]), 400.0, seed=1)
    requests = [msgspec.structs.replace(few[0], key="own"), *few[1:]]

    keyed = list(with_keys(requests, {"acme": 3.0, "beta": 1.0}, seed=1))

    assert keyed[0].key == "own"
    shares = Counter(request.key for request in keyed[1:])
    assert set(shares) == {"acme", "beta"}
    assert shares["acme"] / len(keyed) == pytest.approx(0.75, abs=0.05)
    assert keyed == list(with_keys(requests, {"acme": 3.0, "beta": 1.0}, seed=1))
    assert keyed != list(with_keys(requests, {"acme": 3.0, "beta": 1.0}, seed=2))
    assert list(with_keys(requests, {}, seed=1)) == requests


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("arrival_s,model,prompt_tokens\n", "no column output_tokens"),
        ("arrival_s,model,prompt_tokens,output_tokens\nsoon,a,1,1\n", ":2: could not convert"),
        ("arrival_s,model,prompt_tokens,output_tokens\n1,a,many,1\n", ":2: prompt_tokens"),
        ("arrival_s,model,prompt_tokens,output_tokens,class\n1,a,1,1,urgent\n", ":2: 'urgent'"),
    ],
)
def test_what_is_wrong_with_a_trace_is_named(tmp_path: Path, text: str, wrong: str) -> None:
    """File, line and column."""
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(LabError, match=wrong):
        read_trace(path)
