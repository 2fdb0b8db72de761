"""The daemon under changing policies: swapped between two events, guarded, and written down."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from datetime import time as at
from pathlib import Path
from typing import Any

import pytest

from appliance.daemon.daemon import Limits
from appliance.errors import PolicyChoiceError
from appliance.hookspecs import HOOKS, hookimpl
from appliance.journal import Journal, Setup, read, replay
from appliance.plugins.aegaeon import Aegaeon
from appliance.policies.loader import installed
from appliance.policies.stack import PolicyStack
from appliance.scheduling.lifecycle import Stage
from appliance.scheduling.policy_api import (
    Hold,
    InstanceView,
    LocalClock,
    Placement,
    PlannedTurn,
    Refusal,
    RequestView,
)
from appliance.service.interface import (
    Generation,
    GenerationFailed,
    NothingPrevious,
    PolicyNotActive,
)
from appliance.service.policy_report import (
    Happening,
    Missed,
    PolicyChoice,
    PolicyChosen,
    PolicyEnabled,
)
from appliance.vocabulary import ClockSet, Role, RunPrefill, RunTurn
from tests.unit.doubles.daemon import Box, box_maker, setup_of, small
from tests.unit.policies.strangers import install

SERVERLESSLLM = PolicyChoice(use=("serverlessllm",))
AEGAEON = PolicyChoice(use=("aegaeon",))

MakeBox = Callable[..., Box]


@pytest.fixture
def make_box(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeBox]:
    with box_maker(monkeypatch, slabs=40) as make:
        yield make


async def tokens_of(stream: Generation) -> list[int]:
    return [produced.token async for batch in stream for produced in batch]


async def happenings(box: Box) -> list[tuple[str, str]]:
    """What happened to which policy, in order."""
    return [(event.what.value, event.policy) for event in (await box.daemon.policies()).events]


class Mistaken:
    """A policy that fails whenever a round is to be planned."""

    @hookimpl
    def round(self, instance: InstanceView) -> Sequence[PlannedTurn]:
        raise ZeroDivisionError("no share for nobody")


class MistakenSetup(Setup, frozen=True):
    """Has it asked first."""

    def stack(self, **_: Any) -> PolicyStack:
        return PolicyStack({"mistaken": Mistaken(), "behind it": Aegaeon()})


async def test_faults_are_counted_logged_and_reported(
    make_box: MakeBox, caplog: pytest.LogCaptureFixture
) -> None:
    """Every fault counts, the first of its kind is logged; after three the policy is disabled and
    requests are served on."""
    box = make_box(kind=MistakenSetup)
    box.start()
    stream = box.ask("r", "a", output=12)
    with caplog.at_level(logging.ERROR):
        box.settle()

    assert await tokens_of(stream) == list(range(1, 13))
    assert len(box.workers[0].heard(RunTurn)) > 3
    assert box.samples("appliance_policy_errors_total") == {"policy=mistaken": 3}
    logged = [r.getMessage() for r in caplog.records if r.name == "appliance.daemon"]
    assert "mistaken failed at round: ZeroDivisionError" in logged[0]
    assert "mistaken is disabled" in logged[1]
    assert len(logged) == 2
    fault, disabled = (await box.daemon.policies()).events
    assert (fault.what, fault.policy, fault.hook, fault.count) == ("fault", "mistaken", "round", 3)
    assert "no share for nobody" in fault.reason
    assert (disabled.what, disabled.policy) == (Happening.DISABLED, "mistaken")
    assert box.daemon.readiness().ok


class Closed:
    """A policy that takes nobody."""

    @hookimpl
    def prefill(self) -> Refusal:
        return Refusal(reason="come back later")


class ClosedSetup(Setup, frozen=True):
    """Has it asked first."""

    def stack(self, **_: Any) -> PolicyStack:
        return PolicyStack({"closed": Closed(), "behind it": Aegaeon()})


async def test_a_refusal_is_no_failure_of_ours(make_box: MakeBox) -> None:
    """A client whose request a policy refuses hears why, as of a service that is too busy now."""
    box = make_box(kind=ClosedSetup)
    box.start()

    with pytest.raises(GenerationFailed) as caught:
        box.ask("r", "a")

    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    assert caught.value.message == "come back later"
    assert caught.value.retry_after_seconds == 1.0
    assert box.daemon.readiness().ok


class Night:
    """Holds requests of a key until ten."""

    @hookimpl
    def prefill(self, now: float, request: RequestView, clock: LocalClock) -> Hold | None:
        if request.key != "nightly" or clock.local(now).hour >= 22:
            return None
        return Hold(until=clock.next(now, at(22)), reason="it is early")


class NightSetup(Setup, frozen=True):
    """Has it asked first."""

    def stack(self, **_: Any) -> PolicyStack:
        return PolicyStack({"night": Night(), "behind it": Aegaeon()})


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The clock on the wall of a machine in Berlin, in winter at 21:30; it may be set."""
    shown = [datetime(2026, 11, 27, 20, 30, tzinfo=UTC).timestamp()]
    monkeypatch.setattr(time, "time", lambda: shown[0])
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield shown
    monkeypatch.undo()
    time.tzset()


async def test_a_held_request_waits_and_says_until_when(
    make_box: MakeBox, berlin: list[float]
) -> None:
    """By the local time of the machine; others are served, and it can be cancelled."""
    box = make_box(kind=NightSetup)
    box.start()
    box.ask("r1", "a", key="nightly")
    box.ask("r2", "a", key="nightly")
    other = box.ask("r3", "a", key="daily")
    box.settle()

    assert len(await tokens_of(other)) == 5
    first, _ = box.daemon.requests()
    assert first.reason is not None
    assert (first.phase, first.reason.code) == ("unplaced", "held")
    assert first.reason.message == "held until 22:00:00 by the policy: it is early"
    box.cancel(box.clients["r1"])
    assert [shown.id for shown in box.daemon.requests()] == ["r2"]
    assert box.daemon.readiness().ok

    box.now += 1801.0
    berlin[0] += 1801.0
    box.ask("r4", "b")
    box.settle()
    assert len(await tokens_of(box.clients["r2"])) == 5


async def test_the_machine_hears_when_the_clock_is_set(
    make_box: MakeBox, berlin: list[float], tmp_path: Path
) -> None:
    """At its first event, and when what it believes is off by more than a second; in winter time,
    then in summer time. A replay knows it from the journal."""
    path = tmp_path / "journal"
    box = make_box(kind=NightSetup, journal=Journal(path, setup_of(small("ab"))))
    box.start()
    box.ask("r1", "a")
    berlin[0] += 0.5  # a clock that is a little off is not set
    box.ask("r2", "a")
    berlin[0] = datetime(2027, 3, 28, 0, 59, tzinfo=UTC).timestamp()
    box.ask("r3", "a")
    berlin[0] += 120.0
    box.now += 120.0
    box.ask("r4", "a")
    box.settle()
    await box.daemon.stop()

    events = [entry.event for entry in read(path)[1]]
    assert type(events[0]) is ClockSet
    clocks = [event for event in events if isinstance(event, ClockSet)]
    assert [event.utc_offset_seconds for event in clocks] == [3600, 3600, 7200]
    assert [event.unix_seconds for event in clocks[1:]] == [berlin[0] - 120.0, berlin[0]]


async def test_a_drain_ends_what_is_held(make_box: MakeBox, berlin: list[float]) -> None:
    """As it ends every request that still waits when its time is over."""
    box = make_box(kind=NightSetup)
    box.start()
    held = box.ask("r1", "a", key="nightly")

    await box.daemon.drain(0.0)

    with pytest.raises(GenerationFailed) as caught:
        await tokens_of(held)
    assert (caught.value.code, caught.value.status) == ("shutting_down", 503)


class Movers:
    """A policy whose only instance for prompts changes; requests decode on the first. Who came
    last goes first."""

    prefills_on = 0

    @hookimpl
    def place(self) -> Sequence[Placement]:
        return [
            Placement(role=Role.MIXED if n == self.prefills_on else Role.DECODE) for n in range(2)
        ]

    @hookimpl
    def decode(self) -> int:
        return 0

    @hookimpl
    def admit(self, instance: InstanceView) -> list[int]:
        return [len(instance.groups) - 1]


MOVERS = Movers()


class MoversSetup(Setup, frozen=True):
    """Has it asked first."""

    def stack(self, **_: Any) -> PolicyStack:
        return PolicyStack({"movers": MOVERS, "behind it": Aegaeon()})


async def test_who_was_deferred_and_comes_back_is_introduced_anew(
    make_box: MakeBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that found no room on an instance, was computed on another one, and decodes on the
    first: that is told of the output that came meanwhile."""
    box = make_box("a", kind=MoversSetup, instances=2)
    box.start()
    stream = box.ask("r", "a", output=12)
    first = box.workers[0].double
    assert first is not None
    first.deferring.add("r")
    blocker = box.ask("s", "a", output=12)
    box.work_until(lambda: not first.deferring)
    assert box.daemon.machine.requests["r"].stage is Stage.QUEUED

    monkeypatch.setattr(MOVERS, "prefills_on", 1)
    box.now += 2
    box.settle()

    assert await tokens_of(stream) == list(range(1, 13))
    assert await tokens_of(blocker) == list(range(1, 13))


async def test_questions_are_timed_by_hook(make_box: MakeBox) -> None:
    """As many as were asked; all hooks of one kind together."""
    box = make_box()
    box.start()
    box.ask("r", "a", output=12)
    box.settle()

    counts = box.samples("appliance_policy_call_seconds_count")
    assert counts["hook=prefill"] == 1
    assert counts["hook=decode"] == 1
    assert {label.removeprefix("hook=") for label in counts} <= set(HOOKS)
    assert sum(box.samples("appliance_policy_call_seconds_sum").values()) > 0


# --- other policies decide -----------------------------------------------------------------------


async def test_no_request_notices_a_swap(make_box: MakeBox, tmp_path: Path) -> None:
    """Whenever it comes: every client gets every token once, nothing is computed again, and the
    journal of it all replays to the same commands."""
    path = tmp_path / "journal"
    box = make_box("abc", instances=2, policy="aegaeon", journal=path)
    box.start()
    usable = [policy.name for policy in installed() if policy.shipped and not policy.lab_only]
    names = [name for name in usable if name != "aegaeon"]
    choices = [PolicyChoice(use=(name,)) for name in names]
    choices += [AEGAEON, PolicyChoice(use=("serverlessllm",), decisions={"round": "aegaeon"})]
    streams = {}
    for number in range(4 * len(choices)):
        streams[f"r{number}"] = box.ask(f"r{number}", "abc"[number % 3], output=10 + number)
        box.work(number % 2)
        if number % 4 == 3:
            await box.daemon.set_policy(choices[number // 4])
            box.work(0)
    box.settle()
    await box.daemon.stop()

    for number, stream in enumerate(streams.values()):
        assert await tokens_of(stream) == list(range(1, 11 + number))
    entries = list(read(path)[1])
    swaps = [entry.event for entry in entries if isinstance(entry.event, PolicyChosen)]
    assert [swap.choice for swap in swaps] == choices
    commands = [command for entry in entries for command in entry.commands]
    computed = [command.request for command in commands if isinstance(command, RunPrefill)]
    for command in commands:
        computed += command.prompts if isinstance(command, RunTurn) else ()
    assert sorted(computed) == sorted(streams)
    assert replay(path) == (len(entries), [])


async def test_a_swap_takes_effect_at_once(make_box: MakeBox) -> None:
    """From the next question on the other policies are asked, and the report says so."""
    box = make_box(policy="serverlessllm", instances=2)
    box.start()
    assert {i.role for i in box.daemon.activity().instances} == {"mixed"}

    await box.daemon.set_policy(AEGAEON)

    assert [i.role for i in box.daemon.activity().instances] == ["prefill", "decode"]
    report = await box.daemon.policies()
    assert report.active == AEGAEON
    assert report.previous == (SERVERLESSLLM,)
    assert report.decisions["flow"] == ("aegaeon", "built-in aegaeon")
    assert [state.name for state in report.policies] == ["aegaeon", "built-in aegaeon"]
    assert {"aegaeon", "serverlessllm"} <= {policy.name for policy in report.installed}
    assert await happenings(box) == [("chosen", "aegaeon")]


async def test_a_choice_that_cannot_be_used_changes_nothing(make_box: MakeBox) -> None:
    """The error names the key; the old stack decides on, and there is nothing to go back to."""
    box = make_box(policy="serverlessllm")

    with pytest.raises(PolicyChoiceError, match=r"decisions\.round: no policy 'lifo'"):
        await box.daemon.set_policy(PolicyChoice(use=("aegaeon",), decisions={"round": "lifo"}))

    assert (await box.daemon.policies()).active == SERVERLESSLLM
    with pytest.raises(NothingPrevious):
        await box.daemon.rollback_policy()


async def test_the_choice_before_is_one_call_away(make_box: MakeBox) -> None:
    """Each call goes back one more, until there is none."""
    box = make_box(policy="serverlessllm")
    both = PolicyChoice(use=("aegaeon", "serverlessllm"), parameters={"aegaeon": {"max_group": 2}})
    await box.daemon.set_policy(both)
    await box.daemon.set_policy(AEGAEON)

    await box.daemon.rollback_policy()
    assert (await box.daemon.policies()).active == both
    assert (await box.daemon.policies()).previous == (SERVERLESSLLM,)
    await box.daemon.rollback_policy()
    assert (await box.daemon.policies()).active == SERVERLESSLLM
    with pytest.raises(NothingPrevious):
        await box.daemon.rollback_policy()
    assert [what for what, _ in await happenings(box)] == ["chosen"] * 4


async def test_only_the_last_choices_are_remembered(make_box: MakeBox) -> None:
    """A daemon that runs for years does not grow."""
    box = make_box(policy="serverlessllm")
    for number in range(10):
        await box.daemon.set_policy(
            PolicyChoice(use=("aegaeon",), parameters={"aegaeon": {"max_group": number + 1}})
        )
    for _ in range(120):
        box.daemon.enable_policy("aegaeon")

    report = await box.daemon.policies()
    assert len(report.previous) == 8
    assert report.previous[-1].parameters == {"aegaeon": {"max_group": 9}}
    assert len(report.events) == 100


async def test_two_policies_that_go_back_at_once(make_box: MakeBox) -> None:
    """Each goes back one, in turn."""
    box = make_box(policy="serverlessllm")
    await box.daemon.set_policy(AEGAEON)
    await box.daemon.set_policy(PolicyChoice(use=("serverlessllm", "aegaeon")))

    await asyncio.gather(box.daemon.rollback_policy(), box.daemon.rollback_policy())

    assert (await box.daemon.policies()).active == SERVERLESSLLM


async def test_a_broken_daemon_takes_no_policies(
    make_box: MakeBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the swap itself fails, the machine is told nothing more."""

    def breaks(*_: object) -> None:
        raise RuntimeError("the books do not balance")

    box = make_box(policy="serverlessllm")
    monkeypatch.setattr(box.daemon.machine, "set_policy", breaks)

    with pytest.raises(RuntimeError, match="balance"):
        await box.daemon.set_policy(AEGAEON)
    with pytest.raises(GenerationFailed):
        await box.daemon.set_policy(AEGAEON)

    assert box.take_failures() == ["the books do not balance"]


async def test_a_disabled_policy_is_enabled(make_box: MakeBox, tmp_path: Path) -> None:
    """It is asked again, and the journal knows when."""
    path = tmp_path / "journal"
    box = make_box(kind=MistakenSetup, journal=path)
    box.start()
    box.ask("r1", "a", output=30)
    box.settle()
    assert (await box.daemon.policies()).policies[0].disabled

    box.daemon.enable_policy("mistaken")
    assert not (await box.daemon.policies()).policies[0].disabled
    box.ask("r2", "a", output=30)
    box.settle()
    await box.daemon.stop()

    assert await happenings(box) == [
        ("fault", "mistaken"), ("disabled", "mistaken"), ("enabled", "mistaken"),
        ("fault", "mistaken"), ("disabled", "mistaken"),
    ]  # fmt: skip
    enabled = [entry.event for entry in read(path)[1] if isinstance(entry.event, PolicyEnabled)]
    assert enabled == [PolicyEnabled(policy="mistaken")]


async def test_what_does_not_decide_cannot_be_enabled(make_box: MakeBox) -> None:
    """Nothing happens, and nothing is written down."""
    box = make_box(policy="serverlessllm")

    with pytest.raises(PolicyNotActive, match="'aegaeon' does not decide; serverlessllm"):
        box.daemon.enable_policy("aegaeon")

    assert (await box.daemon.policies()).events == ()


# --- a stranger among them -----------------------------------------------------------------------

SLEEPER = """\
    @hookimpl
    def decode(self, instances):
        import {gate}
        {gate}.asked.append(1)
        if len({gate}.asked) == 2:
            {gate}.wake.wait(60.0)
        return instances[-1].id
    @hookimpl
    def round(self, instance):
        raise ArithmeticError("no idea")
    @hookimpl
    def phase(self):
        return "decode"
"""


async def test_a_journal_replays_without_the_clock(
    make_box: MakeBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger that oversleeps, raises and answers nonsense, is disabled and enabled: the replay
    asks it what it answered then, and nothing that it missed."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "gate_of_sleep.py").write_text(
        "import threading\nasked = []\nwake = threading.Event()\n"
    )
    import gate_of_sleep  # type: ignore[import-not-found]

    install(tmp_path, "sleeper", SLEEPER.format(gate="gate_of_sleep"))
    path = tmp_path / "journal"
    limits = Limits(queue=100, progress_seconds=60.0, policy_seconds=1.0)
    box = make_box("abc", instances=2, policy="serverlessllm", journal=path, limits=limits)
    box.start()
    await box.daemon.set_policy(PolicyChoice(use=("aegaeon",), decisions={"decode": "sleeper"}))
    streams = [box.ask(f"r{n}", "abc"[n % 3], output=9) for n in range(6)]
    box.settle()
    gate_of_sleep.wake.set()
    while any([state.busy for state in (await box.daemon.policies()).policies]):
        pass
    streams += [box.ask(f"s{n}", "abc"[n % 3], output=9) for n in range(3)]
    box.settle()
    await box.daemon.set_policy(PolicyChoice(use=("sleeper", "aegaeon")))
    streams += [box.ask(f"t{n}", "abc"[n % 3], output=9) for n in range(6)]
    box.settle()
    disabled = [state.disabled for state in (await box.daemon.policies()).policies]
    box.daemon.enable_policy("sleeper")
    streams += [box.ask(f"u{n}", "abc"[n % 3], output=9) for n in range(6)]
    box.settle()
    await box.daemon.stop()

    assert [await tokens_of(stream) for stream in streams] == [list(range(1, 10))] * 21
    assert disabled == [True, False, False]
    entries = list(read(path)[1])
    missed = [one for entry in entries for one in entry.missed]
    assert missed[0] == Missed(question=missed[0].question, policy="sleeper", overran=True)
    assert [one.overran for one in missed[1:]] == [False] * (len(missed) - 1)
    assert len(missed) > 1
    gate_of_sleep.asked[:] = []
    assert replay(path) == (len(entries), [])
