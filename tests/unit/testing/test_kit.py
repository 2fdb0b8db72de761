"""The conformance kit: what it lets pass, and what it finds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

import msgspec
import pytest

from appliance.cli.docs.hook_examples import Examples
from appliance.cli.docs.hooks import shipped_policies
from appliance.hookspecs import HOOKS, hookimpl
from appliance.plugins.aegaeon import Aegaeon
from appliance.scheduling.policy_api import (
    ClusterView,
    Costs,
    Hold,
    InstanceView,
    LocalClock,
    Phase,
    PlannedTurn,
    PrefillChoice,
    Refusal,
    RequestView,
)
from appliance.testing import ConformanceReport, asking, check, kit, questions, scenes
from appliance.testing.recorded_calls import asked
from appliance.testing.scenes import SCENES, HookCall, Played, Scene
from appliance.testing.trial import trial
from appliance.vocabulary import InstanceId, ModelName, RequestId, Role, Word

pytestmark = pytest.mark.thorough


class Policy(Word, frozen=True, forbid_unknown_fields=True):
    """What policies have in common."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two scenes are enough to find what is wrong everywhere."""
    monkeypatch.setattr(kit, "SCENES", {name: SCENES[name] for name in ("lone", "pair")})
    monkeypatch.setattr(kit, "RUN_SCENES", ("lone",))


def found(report: ConformanceReport) -> set[tuple[str, str]]:
    """Which checks found something, and at which hooks."""
    return {(finding.check, finding.hook) for finding in report.findings}


# --- what passes ---------------------------------------------------------------------------------


def test_a_policy_of_every_hook_passes() -> None:
    """The built-in keeps the rules: every question of every hook has a valid answer, and every
    request of the runs comes to its end."""
    report = check(Aegaeon)

    assert report.ok, str(report)
    assert [row.hook for row in report.hooks] == list(HOOKS)
    assert all(row.valid == row.answered == row.asked > 0 for row in report.hooks)
    assert report.ended == sum(len(scenes.arrivals(SCENES[name])) for name in kit.RUN_SCENES)
    assert str(report) == "Aegaeon: nothing to object to"


def test_the_documentation_s_examples_pass() -> None:
    """Each example in docs/hooks.md runs, and always has an answer that is valid."""
    report = check(Examples)

    assert report.ok, str(report)
    assert [row.hook for row in report.hooks] == list(HOOKS)
    assert all(row.valid == row.asked > 0 for row in report.hooks)


@pytest.mark.parametrize("kind", [kind for _, _, kind in shipped_policies()])
def test_every_shipped_policy_passes(kind: type) -> None:
    """Ours keep the rules that strangers have to keep."""
    report = check(kind)

    assert report.ok, str(report)


@pytest.mark.usefixtures("small")
def test_an_object_is_tested_with_its_parameters() -> None:
    """Not as it ships."""

    class Quota(Policy, frozen=True):
        seconds: float = 1.0

        @hookimpl
        def round(self, instance: InstanceView) -> Sequence[PlannedTurn]:
            models = [batch.model for batch in instance.batches if batch.runnable]
            return [PlannedTurn(model=model, quota_seconds=self.seconds) for model in models]

    assert check(Quota).ok
    assert found(check(Quota(seconds=-1.0))) == {("answers", "round")}


@pytest.mark.usefixtures("small")
def test_opinions_and_refusals_are_free() -> None:
    """A policy may leave a question to others, and may refuse requests."""

    class Picky(Policy, frozen=True):
        @hookimpl
        def prefill(self, request: RequestView) -> PrefillChoice | Refusal | None:
            return Refusal(reason="too long") if request.tokens > 500 else None

    report = check(Picky)

    assert report.ok, str(report)
    (row,) = report.hooks
    assert 0 < row.answered == row.valid < row.asked
    assert report.unseen == (f"prefill: it never answered with a Hold to {row.asked} questions",)


class Mean(Policy, frozen=True):
    """Refuses and holds for reasons that no request of the scenes has by itself."""

    @hookimpl
    def prefill(self, now: float, request: RequestView, clock: LocalClock) -> Hold | Refusal | None:
        if request.accepted:
            return None
        if request.tokens > 4000 or now > request.deadline + 30.0:
            return Refusal(reason="too long, or too late")
        if request.key_requests > 500 or clock.local(now).weekday() == 3:
            return Hold(until=min(now + 60.0, request.hold_limit))
        return None


@pytest.mark.usefixtures("small")
def test_refusals_and_holds_are_asked_for() -> None:
    """By questions about long, late and urgent requests, of clients with many, at all hours."""
    report = check(Mean)

    assert report.ok, str(report)
    assert report.unseen == ()


@pytest.mark.usefixtures("small")
def test_what_was_not_tested_is_named() -> None:
    """It is no finding: the author is to test it."""

    class Silent(Policy, frozen=True):
        @hookimpl
        def prefill(self, request: RequestView) -> Refusal | None:
            return Refusal(reason="it is of m77") if request.model == "m77" else None

        @hookimpl
        def evict(self) -> None:
            return None

    report = check(Silent)

    assert report.ok
    asked_prefill, asked_evict = (row.asked for row in report.hooks)
    assert report.unseen == (
        f"prefill: it had no opinion on any of {asked_prefill} questions",
        f"evict: it had no opinion on any of {asked_evict} questions",
        f"prefill: it never answered with a Refusal to {asked_prefill} questions",
        f"prefill: it never answered with a Hold to {asked_prefill} questions",
    )
    assert str(report).splitlines()[0] == "Silent: nothing to object to"
    assert str(report).splitlines()[1].startswith("not tested: prefill: it had no opinion")


def test_hooks_that_are_never_asked_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One model on one instance leaves nothing to order."""
    monkeypatch.setattr(kit, "SCENES", {"lone": SCENES["lone"]})
    monkeypatch.setattr(kit, "RUN_SCENES", ())

    assert "flow: it was never asked" in check(Aegaeon).unseen


@pytest.mark.usefixtures("small")
def test_requests_that_are_held_for_hours_come_to_their_end() -> None:
    """The run goes on until the holds are over."""

    class Late(Policy, frozen=True):
        @hookimpl
        def prefill(self, request: RequestView, now: float) -> Hold | None:
            until = request.arrived + 7200.0
            return Hold(until=until) if now < until and not request.accepted else None

    report = check(Late)

    assert report.ok, str(report)
    assert report.ended == len(scenes.arrivals(SCENES["lone"]))


@pytest.mark.usefixtures("small")
def test_state_in_parameters_is_found() -> None:
    """State in attributes that are no fields is not."""

    class Counting(msgspec.Struct, forbid_unknown_fields=True):
        count: int = 0

        @hookimpl
        def phase(self) -> None:
            self.count += 1

    class Remembering(msgspec.Struct, forbid_unknown_fields=True, dict=True):
        def __post_init__(self) -> None:
            self._count = 0

        @hookimpl
        def phase(self) -> None:
            self._count += 1

    assert found(check(Counting)) == {("state", "")}
    assert check(Remembering).ok


@pytest.mark.usefixtures("small")
def test_an_oracle_gets_the_lengths_of_each_run() -> None:
    """And of nothing else: it knows every request that it is asked about."""

    class Oracle(msgspec.Struct, forbid_unknown_fields=True):
        oracle: ClassVar[bool] = True
        _lengths: dict[RequestId, int] = {}

        def learn_oracle(self, lengths: dict[RequestId, int]) -> None:
            self._lengths = lengths

        @hookimpl
        def prefill(self, request: RequestView) -> None:
            assert 0 < self._lengths[request.id] <= request.max_tokens

    report = check(Oracle)

    assert report.ok, str(report)


# --- what is found -------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_an_exception_comes_with_its_traceback() -> None:
    """The first one of a hook, and how many there were; requests are served nonetheless."""

    class Raising(Policy, frozen=True):
        @hookimpl
        def admit(self, instance: InstanceView) -> Sequence[int]:
            return [len(instance.groups) // 0]

    report = check(Raising)

    (finding,) = report.findings
    assert (finding.check, finding.hook) == ("exceptions", "admit")
    assert finding.count > 10
    assert "ZeroDivisionError" in finding.message
    assert "len(instance.groups) // 0" in finding.detail
    assert finding.detail in str(report)
    assert report.ended == len(scenes.arrivals(SCENES["lone"]))


@pytest.mark.usefixtures("small")
def test_answers_that_cannot_be_used_are_found() -> None:
    """With the reason that the daemon would give."""

    class Nonsense(Policy, frozen=True):
        @hookimpl
        def phase(self) -> str:
            return "prefill"

        @hookimpl
        def decode(self) -> InstanceId:
            return 99

    report = check(Nonsense)

    assert found(report) == {("answers", "phase"), ("answers", "decode")}
    assert "answers: decode: instance 99 was not offered" in str(report)


@pytest.mark.usefixtures("small")
def test_dice_are_found() -> None:
    """Two policies asked the same have to say the same."""

    class Random(Policy, frozen=True):
        @hookimpl
        def phase(self) -> Phase:
            return random.choice(list(Phase))

    assert found(check(Random)) == {("determinism", "phase")}


class SetOrder(Policy, frozen=True):
    """Goes through a set of names, whose order is another one in every process."""

    @hookimpl
    def evict(self, victims: Sequence[ModelName]) -> Sequence[ModelName]:
        return list(set(victims))


def test_the_order_of_sets_is_found() -> None:
    """A run in another process must not depend on how strings hash there."""
    report = check(SetOrder)

    assert found(report) == {("determinism", "")}
    assert "another process" in str(report)


class Absent(Policy, frozen=True):
    """Another process does not find it: it is told to look elsewhere."""

    @hookimpl
    def phase(self) -> Phase:
        return Phase.DECODE


def test_a_policy_that_only_works_here_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the other process said."""
    monkeypatch.setattr(kit, "SCENES", {"pair": SCENES["pair"]})
    monkeypatch.setattr(kit, "RUN_SCENES", ("pair",))
    monkeypatch.setattr(kit, "importable", lambda kind: True)
    monkeypatch.setattr(Absent, "__module__", "no_such_module")

    report = check(Absent)

    assert found(report) == {("run", "")}
    assert "ModuleNotFoundError: No module named 'no_such_module'" in str(report)


@pytest.mark.usefixtures("small")
def test_changes_to_what_is_shown_are_found() -> None:
    """Views and estimates; the next policy is shown what was there before."""

    class Mutating(Policy, frozen=True):
        @hookimpl
        def admit(self, instance: InstanceView) -> None:
            msgspec.structs.force_setattr(instance.groups[0], "deadline", -1.0)

        @hookimpl
        def decode(self, costs: Costs) -> None:
            msgspec.structs.force_setattr(costs, "switch_seconds", lambda model: 0.0)  # type: ignore[type-var]

    assert found(check(Mutating)) == {("mutation", "admit"), ("mutation", "")}
    groups = [group for q in questions("admit") for group in q.views["instance"].groups]  # type: ignore[attr-defined]
    assert all(group.deadline > 0 for group in groups)


@pytest.mark.usefixtures("small")
def test_an_attempt_to_change_a_view_is_an_exception() -> None:
    """Views are frozen."""

    class Assigning(Policy, frozen=True):
        @hookimpl
        def place(self, cluster: ClusterView, costs: Costs) -> None:
            cluster.models = ()  # type: ignore[misc]

        @hookimpl
        def scale(self, cluster: ClusterView, costs: Costs) -> None:
            costs.switch_seconds = len  # type: ignore[assignment, method-assign]

    assert found(check(Assigning)) == {("exceptions", "place"), ("exceptions", "scale")}


@pytest.mark.usefixtures("small")
def test_slowness_is_measured() -> None:
    """The slowest hundredth of a hook's answers against what they may take."""
    report = check(Aegaeon, p99_seconds=1e-9)

    assert found(report) == {("budget", row.hook) for row in report.hooks}
    assert all(row.p99_seconds > 1e-9 for row in report.hooks)


@pytest.mark.usefixtures("small")
def test_a_policy_that_takes_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test has to come to its end."""
    monkeypatch.setattr(asking, "SLOW_SECONDS", 0.0)

    report = check(Aegaeon)

    assert found(report) == {("budget", "")}
    assert sum(row.asked for row in report.hooks) == asking.MAX_SLOW
    assert report.ended == 0


class Refusing(Policy, frozen=True):
    @hookimpl
    def prefill(self) -> Refusal:
        return Refusal(reason="never")


def test_requests_that_never_end_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is one too many."""

    def cut_short(policy: object, scene: Scene, look: object) -> Played:
        played = trial(policy, scene)
        played.lives[0].outcome = None
        played.lives[1].outcome = "request_failed"
        return played

    monkeypatch.setattr(kit, "SCENES", {"lone": SCENES["lone"]})
    monkeypatch.setattr(kit, "RUN_SCENES", ("lone",))
    monkeypatch.setattr(kit, "trial", cut_short)

    report = check(Refusing)

    assert "run: requests never ended\nr0 of m00" in str(report)
    assert "run: requests ended as request_failed\nr1" in str(report)
    assert report.ended == len(scenes.arrivals(SCENES["lone"])) - 2


def test_events_without_an_end_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has a bound."""
    asked(SCENES["lone"])  # before there is a bound
    monkeypatch.setattr(kit, "SCENES", {"lone": SCENES["lone"]})
    monkeypatch.setattr(kit, "RUN_SCENES", ("lone",))
    monkeypatch.setattr(scenes, "MAX_EVENTS", 20)

    report = check(Aegaeon)

    assert found(report) == {("run", "")}
    assert "20 events, and no end of them" in str(report)


# --- what cannot be loaded -----------------------------------------------------------------------


class Misspelt(Policy, frozen=True):
    @hookimpl
    def prefil(self) -> None:
        """There is no such hook."""


class WrongArgument(Policy, frozen=True):
    @hookimpl
    def phase(self, cluster: ClusterView) -> Phase:
        return Phase.DECODE


class Unmarked(Policy, frozen=True):
    @hookimpl
    def place(self, cluster: ClusterView) -> None:
        """Marked."""

    def round(self, instance: InstanceView) -> None:
        """Not marked."""


class Mute(Policy, frozen=True):
    pass


class Required(Policy, frozen=True):
    seconds: float

    @hookimpl
    def phase(self) -> Phase:
        return Phase.DECODE


class Tolerant(msgspec.Struct):
    @hookimpl
    def phase(self) -> Phase:
        return Phase.DECODE


class Newer(Policy, frozen=True):
    api_version: ClassVar[int] = 999

    @hookimpl
    def phase(self) -> Phase:
        return Phase.DECODE


class Fragile(Policy, frozen=True):
    def __post_init__(self) -> None:
        raise RuntimeError("not today")

    @hookimpl
    def phase(self) -> Phase:
        return Phase.DECODE


class Plain:
    @hookimpl
    def phase(self) -> Phase:
        return Phase.DECODE


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Misspelt, "hooks: policy policy: unknown hook 'prefil'"),
        (WrongArgument, "Argument(s) {'cluster'} are declared in the hookimpl but"),
        (Unmarked, "hooks: round: not marked with @hookimpl: it is never called"),
        (Mute, "hooks: it answers no question"),
        (Required, "parameters: seconds has no default"),
        (Tolerant, "parameters: unknown ones are taken: set forbid_unknown_fields=True"),
        (Newer, "version: written for version 999, this is 1"),
        (Fragile, "not today"),
        (Plain, "parameters: Plain is not a msgspec.Struct class"),
    ],
)
def test_what_the_daemon_would_not_load_is_found(kind: type, message: str) -> None:
    """Or would load and never ask; and nothing else is said of it."""
    report = check(kind)

    assert message in str(report)
    assert len(report.findings) == 1, str(report)


# --- the questions -------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", HOOKS)
def test_there_are_questions_of_every_kind(hook: str) -> None:
    """Enough of them to meet a slip, in boxes of more than one size."""
    of_hook = questions(hook)

    assert len(of_hook) >= 40
    assert all(question.hook == hook for question in of_hook)
    assert sum(any(q.hook == hook for q in asked(scene)) for scene in SCENES.values()) >= 3


def test_the_questions_span_small_and_large_boxes() -> None:
    """One to sixteen instances, one to a hundred models; idle and busy, in all roles and classes,
    with places for all models and for some."""
    floors = [q.views["cluster"] for q in questions("place")]
    views = [view for cluster in floors for view in cluster.instances]  # type: ignore[attr-defined]

    assert {len(cluster.instances) for cluster in floors} == {1, 2, 5, 16}  # type: ignore[attr-defined]
    assert {len(cluster.models) for cluster in floors} == {1, 4, 8, 12, 30, 100}  # type: ignore[attr-defined]
    assert {view.role for view in views} == set(Role)
    assert len({view.instance_class for view in views}) == 4
    assert {view.models is None for view in views} == {True, False}
    assert {bool(view.load) for view in views} == {True, False}
    assert max(len(view.groups) for view in views) > 10
    assert max(len(view.batches) for view in views) > 3


def test_the_questions_are_the_same_every_time() -> None:
    """A finding can be looked at again."""

    def told(scene: Scene) -> list[tuple[str, object]]:
        return [(q.hook, {k: v for k, v in q.views.items() if k != "costs"}) for q in asked(scene)]

    first = told(SCENES["crowd"])
    asked.cache_clear()

    assert told(SCENES["crowd"]) == first


def test_a_question_is_asked_by_name() -> None:
    """As pluggy asks it, so that an implementation may leave arguments out."""
    question: HookCall = questions("flow")[0]

    assert list(question.views) == [
        "now", "instance", "requests", "others", "costs", "clock"
    ]  # fmt: skip
