"""What a daemon tells of what its instances computed and moved, over worker doubles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from appliance.observability.timeline import KEPT, Timeline
from appliance.service.interface import Span, SpanKind
from appliance.service.policy_report import PolicyChoice
from appliance.vocabulary import BuildModel, ModelFailed, RunPrefill
from tests.unit.doubles.cluster import SLAB
from tests.unit.doubles.daemon import Box, box_maker

Maker = Callable[..., Box]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    with box_maker(monkeypatch, slabs=20) as make:
        yield make


def spans(box: Box, *kinds: SpanKind) -> list[Span]:
    return [one for one in box.daemon.snapshot().spans if not kinds or one.kind in kinds]


async def test_a_request_is_a_load_a_prompt_and_turns(make: Maker) -> None:
    """Each with its beginning, its end, and what led to it."""
    box = make("a")
    box.start()
    before = len(spans(box))
    box.ask("r", "a")
    box.settle()

    load, prompt, *turns = spans(box)[before:]
    assert (load.kind, prompt.kind) == (SpanKind.LOAD, SpanKind.PREFILL)
    assert {one.kind for one in turns} == {SpanKind.TURN}
    for span in (load, prompt, *turns):
        assert (span.model, span.instance) == ("a", 0)
        assert span.ended_unix_seconds is not None
        assert span.began_unix_seconds <= span.ended_unix_seconds
    assert (load.outcome, load.moved_bytes > 0) == ("done", True)
    assert prompt.prompts == ("r",)
    assert prompt.decision is not None
    assert (prompt.decision.after, prompt.decision.hook) == ("RequestArrived", "prefill")
    assert turns[-1].outcome == "drained"
    assert turns[0].requests == ("r",)
    assert turns[0].quota_seconds is not None
    assert turns[0].decision is not None
    assert (turns[0].decision.hook, turns[0].decision.policy) == ("round", "serverlessllm")


async def test_what_runs_has_no_end_yet(make: Maker) -> None:
    """And a prompt begins when its weights are there."""
    box = make("a")
    box.start()
    box.ask("r", "a", output=50)
    (load,) = spans(box, SpanKind.LOAD)
    assert load.ended_unix_seconds is None
    box.work_until(lambda: bool(spans(box, SpanKind.TURN)))
    (load,), (prompt,) = spans(box, SpanKind.LOAD), spans(box, SpanKind.PREFILL)
    assert prompt.began_unix_seconds == load.ended_unix_seconds
    assert spans(box, SpanKind.TURN)[0].ended_unix_seconds is None
    box.settle()


async def test_engines_and_images_take_time_too(make: Maker) -> None:
    """At the start all are built, and what has room is read from disk."""
    box = make("ab")
    box.start()

    assert [one.model for one in spans(box, SpanKind.BUILD)] == ["a", "b"]
    assert {one.outcome for one in spans(box, SpanKind.BUILD, SpanKind.FILL)} == {"done"}


async def test_swaps_are_seen_and_counted(make: Maker) -> None:
    """Models that take turns switch, and their KV goes out and in where there is little room."""
    box = make("ab", slabs=12, policy="aegaeon")
    box.start()
    for name in "ab":
        for number in range(3):
            box.ask(f"{name}{number}", name, output=200)
    box.settle()

    moved = spans(box, SpanKind.SWAP_OUT, SpanKind.SWAP_IN)
    assert {one.kind for one in moved} == {SpanKind.SWAP_OUT, SpanKind.SWAP_IN}
    assert {one.outcome for one in moved} == {"done"}
    assert all(one.requests for one in moved)
    (shown,) = box.daemon.activity().instances
    assert shown.switches > 1
    assert shown.moved_bytes["weights"] > 0
    assert shown.moved_bytes["kv_out"] > 0
    assert shown.busy_seconds > 0
    assert all(one.ended_unix_seconds is not None for one in spans(box))


async def test_a_lost_worker_ends_what_it_did(make: Maker) -> None:
    """At once, and it begins anew on the next one."""
    box = make("a")
    box.start()
    box.ask("r", "a", output=50)
    box.work_until(lambda: bool(spans(box, SpanKind.TURN)))
    box.workers[0].die()
    assert spans(box, SpanKind.TURN)[-1].outcome == "lost"
    assert all(one.ended_unix_seconds is not None for one in spans(box))
    box.workers[0].greet()
    box.settle()
    assert spans(box, SpanKind.TURN)[-1].outcome in ("quota", "drained")


async def test_a_model_that_fails_ends_its_load(make: Maker) -> None:
    """It is not on its way for ever."""
    box = make("a")
    box.start()
    box.daemon.load_model("a")
    assert spans(box, SpanKind.PREFETCH, SpanKind.LOAD)[-1].ended_unix_seconds is None
    box.workers[0].deliver(ModelFailed(instance=0, model="a", reason="gone"))

    assert spans(box, SpanKind.PREFETCH, SpanKind.LOAD)[-1].outcome == "failed"


async def test_so_many_are_kept(make: Maker) -> None:
    """The newest of each instance."""
    box = make("a")
    box.start()
    for number in range(KEPT):
        box.ask(f"r{number}", "a")
        box.settle()
    shown = spans(box)

    assert len(shown) == KEPT
    assert [one.number for one in shown] == sorted(one.number for one in shown)


def test_numbers_are_never_used_again() -> None:
    """Nor by a daemon that starts later; those of one go up though its clock stands still."""
    numbers: list[int] = []
    for started in (1_700_000_000.0, 1_700_000_060.0):
        kept = Timeline([0], partial(float, started))
        for model in "abc":
            kept.ordered(BuildModel(instance=0, model=model), 5.0)
        numbers += [one.number for one in kept.shown()]

    assert len(numbers) == 6
    assert numbers == sorted(set(numbers))


async def test_another_policy_is_named(make: Maker) -> None:
    """The one that answered, and that it was the change of policies after which it did."""
    box = make("a")
    box.start()
    await box.daemon.set_policy(PolicyChoice(use=("aegaeon", "serverlessllm")))
    box.ask("r", "a")
    box.settle()
    decision = spans(box, SpanKind.TURN)[-1].decision

    assert decision is not None
    assert decision.policy == "aegaeon"


async def test_models_pace_is_shown(make: Maker) -> None:
    """Tokens ever, and the last minute."""
    box = make("ab")
    box.start()
    box.ask("r", "a", output=5)
    box.settle()
    a, b = box.daemon.activity().models

    assert (a.output_tokens, b.output_tokens) == (5, 0)
    assert a.window is not None
    assert a.window.attainment == 1.0
    assert a.window.ttft_p50_seconds is not None
    assert b.window is None
    box.now += 120
    assert box.daemon.activity().models[0].window is None


async def test_memory_is_shown_by_owner(make: Maker) -> None:
    """Of the host cache too."""
    box = make("ab")
    box.start()
    sizes = box.daemon.activity().host_bytes

    assert set(sizes) == {"weights:a", "weights:b", "kv", "free"}
    assert sum(sizes.values()) == box.daemon.machine.host.total_slabs * SLAB


def test_the_time_of_day_follows_steps_of_the_wall_clock() -> None:
    """After a suspension spans tell the time that it is; who was under way took no longer of it,
    who was over stays where it was, and drift moves nobody."""
    offset = 1000.0
    spans = Timeline([0], lambda: offset)
    spans.ordered(BuildModel(instance=0, model="a"), 1.0)
    spans.reported(ModelFailed(instance=0, model="a", reason="it is broken"), 2.0)
    spans.ordered(RunPrefill(instance=0, model="a", request="r", kv_slabs=1), 3.0)
    offset = 1000.5
    (over, _) = before = spans.shown()
    assert [one.began_unix_seconds for one in before] == [1001.0, 1003.0]

    offset = 5000.0
    spans.lost(0, 5.0)

    still, prompt = spans.shown()
    assert still == over
    assert (prompt.began_unix_seconds, prompt.ended_unix_seconds) == (5003.0, 5005.0)
    assert spans.work[0].busy_seconds == 2.0


async def test_an_outlook_has_no_quota(make: Maker) -> None:
    """What is planned anew when its time has come is named without a time; the turn has its own."""
    box = make("ab", policy="appliance")
    box.start()
    for name in "ab":
        box.ask(name, name, output=50)
    box.settle()
    turns = spans(box, SpanKind.TURN)
    plans = [one.decision.plan for one in turns if one.decision is not None]

    assert {quota for plan in plans for _, quota in plan} == {None}
    assert all(one.quota_seconds for one in turns)
