"""A stranger's policy is asked in a thread of its own, and waited for no longer than its budget."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from appliance.hookspecs import hookimpl
from appliance.plugins.aegaeon import Aegaeon
from appliance.policies.stack import PolicyStack
from appliance.scheduling.policy_api import Phase, PlannedTurn
from appliance.service.policy_report import Missed
from tests.unit.plugins.policy_views import FixedCosts, batch_view, group_view, instance_view

SHORT = 0.002
LONG = 60.0
VIEW = instance_view(groups=(group_view("a"),), batches=(batch_view("a"),))


class Sleeper:
    """Says `answer` to what comes next, when it is woken."""

    def __init__(self) -> None:
        self.asleep = threading.Event()
        self.wake = threading.Event()
        self.answers = iter((Phase.DECODE,) * 9)
        self.threads: list[str] = []

    @hookimpl
    def phase(self) -> Phase:
        answer = next(self.answers)
        self.threads.append(threading.current_thread().name)
        self.asleep.set()
        self.wake.wait(LONG)
        return answer


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    """It is awake when the test is over, whatever happened."""
    policy = Sleeper()
    yield policy
    policy.wake.set()


def stack_of(policy: object, budget_seconds: float) -> PolicyStack:
    return PolicyStack(
        {"stranger": policy, "built-in": Aegaeon()},
        apart=["stranger"],
        budget_seconds=budget_seconds,
    )


def phase(stack: PolicyStack) -> Phase:
    return stack.phase(1.0, VIEW, FixedCosts())


def missed(question: int, overran: bool) -> Missed:
    return Missed(question=question, policy="stranger", overran=overran)


def wait_until_free(stack: PolicyStack) -> None:
    while stack.states()[0].busy:
        pass


def test_an_answer_in_time_is_taken(sleeper: Sleeper) -> None:
    """It is given in one thread, which is not ours and lives as long as the stack."""
    sleeper.wake.set()
    stack = stack_of(sleeper, LONG)

    assert [phase(stack), phase(stack)] == [Phase.DECODE] * 2
    (name,) = set(sleeper.threads)
    assert name == "policy-stranger"
    assert stack.take_missed() == []
    (thread,) = [t for t in threading.enumerate() if t.name == name]
    stack.close()
    thread.join(LONG)
    assert not thread.is_alive()


def test_who_sleeps_costs_the_budget_and_no_more(sleeper: Sleeper) -> None:
    """The built-in answers instead; it is one fault, and the question is written down."""
    stack = stack_of(sleeper, SHORT)

    assert phase(stack) is Phase.PREFILL
    (fault,) = stack.take_faults()
    assert (fault.policy, fault.hook) == ("stranger", "phase")
    assert fault.reason == "no answer within 0.002 s"
    assert stack.take_missed() == [missed(0, True)]
    assert stack.states()[0].busy


def test_a_policy_that_still_sleeps_is_not_asked(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is no fault, however often; its late answer is dropped, and then it is asked again."""
    stack = stack_of(sleeper, SHORT)
    phase(stack)
    stack.take_faults(), stack.take_missed()

    assert [phase(stack) for _ in range(5)] == [Phase.PREFILL] * 5
    assert stack.faults == []
    assert stack.take_missed() == [missed(number, False) for number in range(5)]
    assert stack.states()[0].calls == 1

    sleeper.wake.set()
    wait_until_free(stack)
    # It has time for its next answer, however busy the machine is.
    monkeypatch.setattr(stack._policies["stranger"]._thread, "_budget_seconds", LONG)
    sleeper.answers = iter(["not the late answer"])  # type: ignore[arg-type]
    phase(stack)

    (fault,) = stack.faults
    assert "not the late answer" in fault.reason
    assert stack.states()[0].calls == 2


def test_what_an_overrun_took_is_its_time(sleeper: Sleeper) -> None:
    """That of the budget; a question for which it was too busy took it none."""
    stack = PolicyStack(
        {"stranger": sleeper, "built-in": Aegaeon()},
        apart=["stranger"],
        budget_seconds=SHORT,
        observe=lambda hook, seconds: None,
    )
    phase(stack)
    first = stack.states()[0].decisions["phase"]
    phase(stack)
    again = stack.states()[0].decisions["phase"]

    assert (first.calls, first.faults) == (1, 1)
    assert first.seconds == first.p50_seconds == first.max_seconds
    assert first.seconds >= SHORT
    assert again == first


def test_three_overruns_disable(sleeper: Sleeper) -> None:
    """Each with a question of its own."""
    stack = stack_of(sleeper, SHORT)
    for _ in range(3):
        sleeper.wake.clear()
        phase(stack)
        sleeper.wake.set()
        wait_until_free(stack)

    assert [fault.disables for fault in stack.faults] == [False, False, True]


class Endless:
    """An answer that never ends."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    @hookimpl
    def round(self) -> Iterator[PlannedTurn]:
        while not self.stop.wait(SHORT):
            yield PlannedTurn(model="a", quota_seconds=1.0)


def test_an_answer_is_read_in_its_thread() -> None:
    """A generator without an end overruns like any other answer that takes too long."""
    endless = Endless()
    stack = stack_of(endless, SHORT)
    try:
        turns = stack.round(1.0, VIEW, FixedCosts())
    finally:
        endless.stop.set()

    assert [turn.model for turn in turns] == ["a"]
    assert stack.take_missed() == [missed(0, True)]


@pytest.mark.parametrize("error", [RuntimeError("lost"), SystemExit("lost"), KeyboardInterrupt()])
def test_what_is_raised_apart_is_a_fault(error: BaseException) -> None:
    """Even what would end a program ends only the question, and the thread goes on."""

    class Broken:
        @hookimpl
        def phase(self) -> Any:
            raise error

    stack = stack_of(Broken(), LONG)

    assert [phase(stack), phase(stack)] == [Phase.PREFILL] * 2
    assert [fault.reason for fault in stack.faults] == [repr(error)] * 2


def test_no_opinion_apart_is_no_fault() -> None:
    """None goes to the next policy here, too."""

    class Shy:
        @hookimpl
        def phase(self) -> None:
            """No opinion."""

    stack = stack_of(Shy(), LONG)

    assert phase(stack) is Phase.PREFILL
    assert stack.faults == []
    assert stack.states()[0].apart
