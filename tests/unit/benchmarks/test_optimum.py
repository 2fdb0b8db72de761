"""The best that is possible on a tiny box: by hand, against a plain search slot by slot, and no
policy reaches more in the lab."""

from __future__ import annotations

import json
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import optimum
from benchmarks.optimum_search import least_lost
from benchmarks.tiny_boxes import TinyBox, TinyModel, TinyRequest, cases, tokens_in_time

RESULT = Path(optimum.__file__).parent / "results" / "2026-11-27-lab-optimum.json"
POLICIES = (
    "appliance",
    "aegaeon",
    "serverlessllm",
    "prism",
    "serverlessllm_sjf",
    "qlm",
    "static",
    "muxserve",
    "chiron",
    "utilization",
    "pd_aggregated",
    "pd_disaggregated",
    "taichi",
)
LOAD = 20
MODEL = TinyModel(load=LOAD, prompt=3, ttft=LOAD, tbt=2)


def box(*requests: TinyRequest, models: tuple[TinyModel, ...] = (MODEL, MODEL)) -> TinyBox:
    return TinyBox(instances=1, all_fit=False, models=models, requests=requests)


def request(arrives: int, tokens: int = 4, model: int = 0) -> TinyRequest:
    return TinyRequest(arrives=arrives, model=model, tokens=tokens)


def lost(tiny: TinyBox) -> int:
    found = least_lost(tiny)
    assert found.is_exact
    return found.lost


def with_ttft(slots: int) -> TinyModel:
    return TinyModel(load=LOAD, prompt=3, ttft=slots, tbt=2)


def test_a_request_that_is_there_at_the_beginning_waits_for_a_load() -> None:
    """With its prompt under it: the first token at 20, the others each a slot later."""
    assert lost(box(request(0))) == 0
    assert lost(box(request(0), models=(with_ttft(19),))) == 1  # 19 is missed, 21 is not
    assert lost(box(request(0), models=(with_ttft(17),))) == 3  # the last is in time: 23


def test_a_request_that_is_known_before_it_comes_finds_its_weights() -> None:
    """It takes its prompt."""
    assert lost(box(request(40), models=(with_ttft(3),))) == 0
    assert lost(box(request(40), models=(with_ttft(2),))) == 1


def test_two_models_that_do_not_fit_together_take_turns() -> None:
    """The other one's first token comes after a second load, the running one's second token after
    a third."""
    once = box(request(0, 1), request(0, 1, model=1), models=(with_ttft(20), with_ttft(40)))
    first = box(request(0, 8), request(0, 1, model=1), models=(with_ttft(20), with_ttft(40)))
    both = box(request(0, 2), request(0, 2, model=1), models=(with_ttft(20), with_ttft(39)))

    assert lost(once) == 0
    assert lost(first) == 1
    assert lost(both) == 2


def test_models_that_fit_together_load_while_others_run() -> None:
    """Two loads one after the other; the first one's tokens come during the second."""
    tiny = TinyBox(
        instances=1,
        all_fit=True,
        models=(with_ttft(20), with_ttft(40)),
        requests=(request(0, 21), request(0, 5, model=1)),
    )

    assert lost(tiny) == 0


def test_two_instances_compute_side_by_side() -> None:
    """What one of them cannot do."""
    requests = (request(0, 9), request(0, 9, model=1))
    two = TinyBox(instances=2, all_fit=False, models=(MODEL, MODEL), requests=requests)

    assert lost(two) == 0
    assert lost(box(*requests)) > 0


def plainly_lost(tiny: TinyBox) -> int:
    """The same for one instance with room for one model, with every decision in every slot, and
    without a bound."""
    requests, models = tiny.requests, tiny.models
    end = 1 + max(tiny.due(one, one.tokens - 1) for one in requests)

    def passes(slot: int, until: int, tokens: tuple[int, ...]) -> int:
        return sum(
            slot <= tiny.due(one, token) < until
            for one, done in zip(requests, tokens, strict=True)
            for token in range(done, one.tokens)
        )

    @cache
    def least(slot: int, here: int, tokens: tuple[int, ...]) -> int:
        if slot >= end:
            return 0

        def after(slots: int, then: int, more: set[int]) -> int:
            now = tuple(done + (n in more) for n, done in enumerate(tokens))
            return passes(slot, slot + slots, tokens) + least(slot + slots, then, now)

        its = [n for n, one in enumerate(requests) if one.model == here]
        active = {n for n in its if 0 < tokens[n] < requests[n].tokens}
        waiting = {n for n in its if not tokens[n] and requests[n].arrives <= slot}
        found = [after(1, here, set())]
        if active:
            found.append(after(1, here, active))
        if waiting:
            found.append(after(models[here].prompt, here, active | waiting))
        for model, times in enumerate(models):
            if model != here:
                found.append(after(times.load, model, set()))
                new = [n for n, one in enumerate(requests) if one.model == model]
                for n in new:
                    ends, loaded = requests[n].arrives + times.prompt, slot + times.load
                    if tokens[n] or requests[n].arrives > loaded:
                        continue
                    if ends <= loaded:
                        found.append(after(times.load, model, {n}))
                    else:  # it goes on after the load, with all that the model has by then
                        begun = {k for k in new if tokens[k] < requests[k].tokens}
                        begun = {
                            k
                            for k in begun
                            if tokens[k] or requests[k].arrives <= requests[n].arrives
                        }
                        found.append(after(ends - slot, model, begun))
        return min(found)

    return least(0, -1, (0,) * len(requests))


small_requests = st.builds(
    TinyRequest, arrives=st.integers(0, 14), model=st.integers(0, 1), tokens=st.integers(1, 4)
)
small_models = st.builds(
    TinyModel,
    load=st.integers(2, 5),
    prompt=st.integers(1, 3),
    ttft=st.integers(1, 10),
    tbt=st.integers(2, 3),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(small_requests, min_size=1, max_size=4), st.tuples(small_models, small_models))
def test_the_search_finds_what_a_plain_one_finds(
    requests: list[TinyRequest], models: tuple[TinyModel, TinyModel]
) -> None:
    """To decide only where something ends or arrives, and the bound, leave out nothing."""
    tiny = box(*sorted(requests, key=lambda one: one.arrives), models=models)

    assert lost(tiny) == plainly_lost(tiny)


def test_a_search_that_is_cut_off_still_bounds() -> None:
    """It says that it is no optimum."""
    for tiny in islice(cases(40, seed=3), 40):
        whole, cut = least_lost(tiny), least_lost(tiny, most_states=10)
        assert not cut.is_exact
        assert cut.lost <= whole.lost


@pytest.mark.thorough
@pytest.mark.parametrize("turn", range(len(POLICIES)))
def test_no_policy_reaches_more(turn: int) -> None:
    """Each of them on its sixteen of 208 random boxes."""
    for tiny in islice(cases(16 * len(POLICIES), seed=2), turn, None, len(POLICIES)):
        most = tiny.tokens - least_lost(tiny, most_states=20_000).lost

        assert tokens_in_time(tiny, POLICIES[turn]) <= most, (POLICIES[turn], tiny)


def test_the_figures_that_are_published() -> None:
    """They follow from the cases beside them; no policy is better than the optimum in any."""
    document = json.loads(RESULT.read_text(encoding="utf-8"))
    found = document["cases"]
    boxes = list(cases(len(found), document["seed"]))

    assert [case["tokens"] for case in found] == [tiny.tokens for tiny in boxes]
    assert document["summary"] == optimum.summary(boxes, found)
    assert all(case["optimum"] <= min(case["lost"].values()) for case in found)


def test_a_file_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many calls as it takes; the cases are those of one call."""
    file = tmp_path / "optimum.json"
    monkeypatch.setattr(optimum, "POLICIES", ("serverlessllm",))
    call = ["optimum", "--seed", "5", "--json", str(file), "--cases"]
    for count in ("1", "3"):
        monkeypatch.setattr("sys.argv", [*call, count])
        optimum.main()
    again = json.loads(file.read_text(encoding="utf-8"))["cases"]

    assert again == [optimum.played(tiny) for tiny in cases(3, seed=5)]
