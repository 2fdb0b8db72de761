"""Requests that a policy holds: they wait, are looked at again, and always go on or end."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, time
from itertools import pairwise

import pytest

from appliance.scheduling.policy_api import MAX_HOLD_SECONDS, Hold, LocalClock, Refusal, RequestView
from appliance.scheduling.request_book import LINES_LOOKED_AT, SHORTEST_HOLD_SECONDS
from appliance.scheduling.wait_reasons import wait_reason
from appliance.vocabulary import (
    ClockSet,
    FinishReason,
    ModelRemoved,
    RequestClass,
    RunPrefill,
    Ticked,
    WaitCode,
)
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.told import Told

EVENING = datetime(2026, 11, 27, 21, 0, tzinfo=UTC).timestamp()


def built(prefill: Callable[..., object], names: str = "ab") -> ClusterDouble:
    """One instance with every engine built and nothing to do."""
    cluster = ClusterDouble(
        {name: ModelDouble(4, shape()) for name in names},
        slabs=40,
        stranger=Told(prefill=prefill),
    )
    cluster.start()
    cluster.settle()
    return cluster


def pass_to(cluster: ClusterDouble, until: float) -> None:
    """Time goes on; the machine hears of it whenever it wants to."""
    for _ in range(100_000):
        deadline = cluster.machine.next_deadline()
        if deadline is None or deadline > until:
            break
        cluster.now = max(cluster.now, deadline) - 0.001
        cluster.tell(Ticked())
    cluster.now = max(cluster.now, until)


class Held:
    """Holds requests of model a until a time, and counts how often it is asked about each."""

    def __init__(self, until: float, reason: str = "not yet") -> None:
        self.until = until
        self.reason = reason
        self.open = False
        self.asked: list[str] = []

    def prefill(self) -> Callable[..., object]:
        """What is to be asked."""

        def answer(now: float, request: RequestView) -> Hold | None:
            self.asked.append(request.id)
            if self.open or request.model != "a" or now >= self.until or request.accepted:
                return None
            return Hold(until=self.until, reason=self.reason)

        return answer


def test_a_held_request_begins_when_its_time_has_come() -> None:
    """Not before; others are served meanwhile."""
    held = Held(until=5.0)
    cluster = built(held.prefill())
    first, other = cluster.ask("a1", "a"), cluster.ask("b1", "b")
    cluster.settle()
    assert (first.outcome, other.outcome) == (None, FinishReason.LENGTH)
    assert cluster.prompts() == ["b1"]

    pass_to(cluster, 4.99)
    assert cluster.prompts() == ["b1"]
    pass_to(cluster, 5.0)
    cluster.settle()

    assert first.outcome is FinishReason.LENGTH
    assert [now for now, _, out in cluster.journal if any(type(c) is RunPrefill for c in out)][
        -1
    ] == pytest.approx(5.0)


def test_a_held_request_begins_sooner_when_another_one_ended() -> None:
    """The policy is asked again then: there may be room now."""
    held = Held(until=1000.0)
    cluster = built(held.prefill())
    life = cluster.ask("a1", "a")
    cluster.ask("b1", "b")
    held.open = True

    cluster.settle()

    assert life.outcome is FinishReason.LENGTH
    assert cluster.now < 1.0


def test_requests_of_a_line_go_on_in_their_order() -> None:
    """The first of a line is asked about, and the next one if that goes on."""
    held = Held(until=1000.0)
    cluster = built(held.prefill())
    for number in range(3):
        cluster.ask(f"a{number}", "a")
    held.asked.clear()
    cluster.ask("b1", "b")

    cluster.cancel("b1")
    assert held.asked == ["b1", "a0"]

    held.open = True
    cluster.ask("b2", "b")
    cluster.cancel("b2")
    assert held.asked[-3:] == ["a0", "a1", "a2"]
    cluster.settle()
    assert cluster.prompts()[-3:] == ["a0", "a1", "a2"]


def test_many_lines_are_looked_at_in_turn() -> None:
    """An event asks about some of them; those that wait for longest come first."""
    held = Held(until=1000.0)
    cluster = built(held.prefill())
    count = LINES_LOOKED_AT + 2
    for number in range(count):
        cluster.ask(f"a{number}", "a", key=f"key{number}")

    seen = []
    for number in range(2):
        cluster.ask(f"b{number}", "b")
        held.asked.clear()
        cluster.cancel(f"b{number}")
        seen.append(list(held.asked))

    assert seen[0] == [f"a{number}" for number in range(LINES_LOOKED_AT)]
    assert seen[1][:2] == [f"a{number}" for number in range(LINES_LOOKED_AT, count)]
    assert len(seen[1]) == LINES_LOOKED_AT


def test_a_hold_may_be_prolonged() -> None:
    """Each answer counts from when it was given; old alarms ask nothing."""
    until = {"now": 2.0}
    asked: list[float] = []

    def prefill(now: float, request: RequestView) -> Hold | None:
        asked.append(now)
        return Hold(until=until["now"]) if now < 6.0 and request.model == "a" else None

    cluster = built(prefill)
    life = cluster.ask("a1", "a")
    until["now"] = 6.0
    cluster.ask("b1", "b")
    cluster.cancel("b1")
    asked.clear()

    pass_to(cluster, 6.5)
    cluster.settle()

    assert life.outcome is FinishReason.LENGTH
    # The alarm at 2 s is of a hold that was prolonged.
    assert asked == [pytest.approx(6.0)]


def test_a_policy_that_holds_for_no_time_is_asked_after_a_pause() -> None:
    """Events without a pause between them would keep the daemon busy."""
    asked: list[float] = []

    def prefill(now: float, request: RequestView) -> Hold:
        asked.append(now)
        return Hold(until=min(now + 1e-6, request.hold_limit))

    cluster = built(prefill)
    cluster.ask("a1", "a")

    pass_to(cluster, 0.9)

    assert all(later - now >= SHORTEST_HOLD_SECONDS - 1e-9 for now, later in pairwise(asked))


def test_many_prolonged_holds_take_little_memory() -> None:
    """Alarms of holds that were prolonged are forgotten, also behind one that is over first."""

    def prefill(now: float, request: RequestView) -> Hold | None:
        if request.model == "b":
            return None
        return Hold(until=500.0 if request.key == "near" else now + 1000.0)

    cluster = built(prefill)
    cluster.ask("near", "a", key="near")
    cluster.ask("far", "a")
    for number in range(300):
        cluster.ask(f"b{number}", "b")
        cluster.cancel(f"b{number}")

    assert cluster.machine.request_book.holds.alarms < 100
    assert cluster.machine.next_deadline() is not None


def test_an_alarm_of_a_hold_that_was_prolonged_asks_nothing() -> None:
    """When time makes a leap, and another hold is over before."""
    far = 1.5
    asked: list[str] = []

    def prefill(now: float, request: RequestView) -> Hold | None:
        asked.append(request.id)
        if request.model == "b" or now >= 1.0:
            return None
        return Hold(until=1.0 if request.key == "near" else far)

    cluster = built(prefill)
    cluster.ask("near", "a", key="near")
    cluster.ask("far", "a")
    far = 5.0
    cluster.ask("b1", "b")
    cluster.cancel("b1")
    asked.clear()

    cluster.now = 2.0
    cluster.tell(Ticked())

    assert asked == ["near"]
    pass_to(cluster, 5.0)
    assert asked == ["near", "far"]


def test_cancelled_and_rejected_requests_are_held_no_more() -> None:
    """Nothing of them stays, and no alarm."""
    held = Held(until=1000.0)
    cluster = built(held.prefill())
    lives = [cluster.ask(name, "a") for name in ("a1", "a2")]

    cluster.cancel("a1")
    cluster.tell(ModelRemoved(model="a"))
    cluster.settle()

    assert [life.outcome for life in lives] == [FinishReason.CANCELLED, "model_removed"]
    assert cluster.machine.requests == {}
    assert cluster.machine.request_book.holds.of == {}
    assert cluster.machine.next_deadline() is None


def test_a_held_request_may_be_refused_later() -> None:
    """The question is put again, with every answer to it."""
    refuses = False

    def prefill(now: float) -> Hold | Refusal:
        return Refusal(reason="too many") if refuses else Hold(until=now + 3.0)

    cluster = built(prefill)
    life = cluster.ask("a1", "a")
    refuses = True

    pass_to(cluster, 4.0)

    assert life.outcome == "overloaded"


def test_an_accepted_request_is_not_held() -> None:
    """After a loss it goes somewhere, whatever the policy says."""
    holds = False
    cluster = built(lambda now: Hold(until=now + 3.0) if holds else None)
    life = cluster.ask("a1", "a", output=40)
    cluster.work_until(0, lambda: cluster.up[0].turn is not None)
    holds = True

    cluster.lose(0)
    cluster.start(0)
    cluster.settle()

    assert (life.outcome, life.prefills) == (FinishReason.LENGTH, 2)


@pytest.mark.parametrize("until", [math.nan, 0.0, -1.0, math.inf, MAX_HOLD_SECONDS + 10.0, "soon"])
def test_a_hold_that_cannot_be_is_a_fault(until: object) -> None:
    """Past, endless or further than a day: the next policy decides."""
    cluster = built(lambda: Hold(until=until))  # type: ignore[arg-type]

    life = cluster.ask("a1", "a")
    cluster.settle()

    assert life.outcome is FinishReason.LENGTH
    (fault, *_) = cluster.stack.faults
    assert fault.hook == "prefill"
    assert "a hold is until after now" in fault.reason


def test_no_request_is_held_for_longer_than_a_day() -> None:
    """A policy that never lets one go loses the question then."""
    cluster = built(lambda request: Hold(until=request.hold_limit))
    life = cluster.ask("a1", "a")
    arrived = cluster.now

    cluster.now = arrived + MAX_HOLD_SECONDS - 1.0
    cluster.tell(Ticked())
    assert cluster.stack.faults == []
    cluster.now = arrived + MAX_HOLD_SECONDS
    cluster.tell(Ticked())
    cluster.settle()

    assert life.outcome is FinishReason.LENGTH
    assert len(cluster.stack.faults) == 1


def test_other_policies_look_at_what_is_held() -> None:
    """At once, not only when the hold of the old one is over."""
    cluster = built(Held(until=1000.0).prefill())
    life = cluster.ask("a1", "a")

    cluster.set_policy(["aegaeon"])
    cluster.settle()

    assert life.outcome is FinishReason.LENGTH


def test_what_is_held_when_no_instance_is_up_begins_with_the_first() -> None:
    """It waits for an instance then, and for nothing else."""
    held = Held(until=3.0)
    cluster = built(held.prefill())
    life = cluster.ask("a1", "a")
    cluster.lose(0)

    pass_to(cluster, 3.5)
    state = cluster.machine.requests["a1"]
    reason = wait_reason(cluster.machine, state, cluster.now)
    assert reason is not None
    assert reason.code is WaitCode.NO_INSTANCE

    cluster.start(0)
    cluster.settle()
    assert life.outcome is FinishReason.LENGTH


def test_a_held_request_is_not_stuck() -> None:
    """The watchdog of progress does not count it, however long it is held."""
    cluster = built(Held(until=1000.0).prefill())
    cluster.ask("a1", "a")
    assert cluster.machine.oldest_progress() is None

    cluster.ask("b1", "b")
    assert cluster.machine.oldest_progress() == pytest.approx(cluster.now)


# --- keys ----------------------------------------------------------------------------------------


def test_a_policy_sees_the_key_and_how_much_it_has() -> None:
    """Its name, and the other requests of it that instances took on."""
    seen: list[tuple[str, str, int]] = []

    def prefill(request: RequestView) -> Hold | None:
        seen.append((request.id, request.key, request.key_requests))
        return Hold(until=request.hold_limit) if request.id == "held" else None

    cluster = built(prefill)
    cluster.ask("r1", "a", key="acme")
    cluster.ask("held", "a", key="acme")
    cluster.ask("r2", "a", key="acme")
    cluster.ask("r3", "a", key="beta")
    cluster.ask("r4", "a")
    cluster.cancel("r1")
    cluster.ask("r5", "a", key="acme")

    assert [entry for entry in seen if entry[0] != "held"] == [
        ("r1", "acme", 0),
        ("r2", "acme", 1),
        ("r3", "beta", 0),
        ("r4", "", 0),
        ("r5", "acme", 1),
    ]
    assert seen[1] == ("held", "acme", 1)
    cluster.cancel("held")
    cluster.settle()
    cluster.ask("r6", "a", key="acme")
    assert seen[-1] == ("r6", "acme", 0)


def test_a_request_does_not_count_itself_when_it_is_placed_again() -> None:
    """After a loss, for which it was accepted already."""
    seen: list[int] = []
    cluster = built(lambda request: seen.append(request.key_requests))
    cluster.ask("r1", "a", key="acme", output=40)
    cluster.ask("r2", "a", key="acme", output=40)
    cluster.work_until(0, lambda: cluster.up[0].turn is not None)
    seen.clear()

    cluster.lose(0)
    cluster.start(0)

    assert seen == [1, 1]


# --- the clock on the wall -----------------------------------------------------------------------


def at_night(now: float, request: RequestView, clock: LocalClock) -> Hold | None:
    if request.request_class is RequestClass.INTERACTIVE or clock.local(now).hour >= 22:
        return None
    return Hold(until=clock.next(now, time(22)), reason="batch work begins at night")


def test_batch_work_waits_for_the_night() -> None:
    """An hour, by the clock on the wall; the reason says until when."""
    cluster = built(at_night)
    cluster.tell(ClockSet(unix_seconds=EVENING, utc_offset_seconds=0))
    set_at = cluster.now
    batch = cluster.ask("batch", "a", kind=RequestClass.BATCH)
    inter = cluster.ask("inter", "a")
    cluster.settle()
    assert (batch.outcome, inter.outcome) == (None, FinishReason.LENGTH)

    reason = wait_reason(cluster.machine, cluster.machine.requests["batch"], cluster.now)
    assert reason is not None
    assert reason.code is WaitCode.HELD
    assert reason.message == "held until 22:00:00 by the policy: batch work begins at night"
    assert reason.seconds == pytest.approx(3600.0, abs=1.0)

    cluster.now = set_at + 3599.0
    cluster.tell(Ticked())
    assert "batch" not in cluster.prompts()
    pass_to(cluster, set_at + 3600.001)
    cluster.settle()
    assert batch.outcome is FinishReason.LENGTH


def test_a_clock_that_is_set_lets_requests_go_on_at_once() -> None:
    """Also one of another zone."""
    cluster = built(at_night)
    cluster.tell(ClockSet(unix_seconds=EVENING, utc_offset_seconds=0))
    batch = cluster.ask("batch", "a", kind=RequestClass.BATCH)

    cluster.tell(ClockSet(unix_seconds=EVENING, utc_offset_seconds=3600))
    cluster.settle()

    assert batch.outcome is FinishReason.LENGTH


def test_policies_that_come_later_have_the_clock_too() -> None:
    """It is the machine's."""
    cluster = built(at_night)
    cluster.tell(ClockSet(unix_seconds=EVENING, utc_offset_seconds=0))
    shown: list[datetime] = []

    cluster.set_policy(["aegaeon"], Told(prefill=lambda now, clock: shown.append(clock.local(now))))
    cluster.ask("a1", "a")

    assert (shown[0].hour, shown[0].weekday()) == (21, 4)


def test_a_reason_names_the_day_if_it_is_another_one() -> None:
    """And says nothing of a reason that the policy does not give."""
    cluster = built(Held(until=50_000.0, reason="").prefill())
    cluster.tell(ClockSet(unix_seconds=EVENING, utc_offset_seconds=0))
    cluster.ask("a1", "a")

    reason = wait_reason(cluster.machine, cluster.machine.requests["a1"], cluster.now)

    assert reason is not None
    assert reason.message == "held until 2026-11-28 10:53:19 by the policy"


def test_local_time() -> None:
    """Unix time, local time, and when it is a time of day next."""
    clock = LocalClock(unix_offset_seconds=EVENING, utc_offset_seconds=3600)

    assert clock.unix_seconds(10.0) == EVENING + 10.0
    assert clock.local(0.0).isoformat() == "2026-11-27T22:00:00+01:00"
    assert clock.next(0.0, time(22, 0, 30)) == 30.0
    assert clock.next(30.0, time(22, 0, 30)) == 30.0 + 86_400.0
    assert clock.next(0.0, time(6)) == 8 * 3600.0
    assert LocalClock().local(0.0).isoformat() == "1970-01-01T00:00:00+00:00"
