"""The stack of policies: asked in order, every answer checked, and never trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from appliance.errors import PolicyError
from appliance.hookspecs import HOOKS, hookimpl
from appliance.plugins.aegaeon import Aegaeon
from appliance.policies import stack as policystack
from appliance.policies.guard import RECENT, PolicyStats
from appliance.policies.stack import PolicyStack
from appliance.scheduling.policy_api import (
    BatchLimits,
    ClusterView,
    Fleet,
    InstanceView,
    Migration,
    Phase,
    Placement,
    PlannedTurn,
    PrefillChoice,
    Refusal,
)
from appliance.service.policy_report import DecisionStats, Missed
from appliance.testing.scenes import Interposed
from appliance.vocabulary import Role
from tests.unit.plugins.policy_views import (
    FixedCosts,
    batch_view,
    cluster_view,
    decoding_view,
    group_view,
    instance_view,
    model_view,
    request_view,
)

VIEW = instance_view(
    0, groups=(group_view("b"), group_view("a")), batches=(batch_view("a"), batch_view("b"))
)
ELSEWHERE = instance_view(1, batches=(batch_view("c", 9),))
MODELS = (model_view("a"), model_view("b"))

QUESTIONS: dict[str, dict[str, Any]] = {
    "place": {"cluster": cluster_view([VIEW, ELSEWHERE], *MODELS)},
    "scale": {"cluster": cluster_view([VIEW, ELSEWHERE], *MODELS)},
    "prefill": {"request": request_view("a"), "instances": [VIEW, ELSEWHERE]},
    "decode": {"request": request_view("a"), "prefilled_on": 0, "instances": [VIEW, ELSEWHERE]},
    "admit": {"instance": VIEW},
    "phase": {"instance": VIEW},
    "round": {"instance": VIEW},
    "preempt": {"instance": VIEW},
    "batch": {"model": "a", "instance": VIEW},
    "flow": {
        "instance": VIEW,
        "requests": [decoding_view("r"), decoding_view("s")],
        "others": [ELSEWHERE],
    },
    "evict": {"instance": VIEW, "victims": ["a", "b"]},
    "prefetch": {"instance": VIEW, "upcoming": ["a", "b"]},
}


def turn(model: str, quota: Any = 1.0, firm: Any = True) -> PlannedTurn:
    return PlannedTurn(model=model, quota_seconds=quota, firm=firm)


def flow(request: Any, target: Any = 1) -> Migration:
    return Migration(request=request, target=target)


def to(instance: Any, group: Any = None) -> PrefillChoice:
    return PrefillChoice(instance=instance, group=group)


def placement(models: Any = None, role: Any = Role.MIXED, ahead: Any = ()) -> Placement:
    return Placement(role=role, models=models, ahead=ahead)


def fleet(interactive: Any, mixed: Any, batch: Any) -> Fleet:
    return Fleet(interactive=interactive, mixed=mixed, batch=batch)


def limits(requests: Any, chunk_tokens: Any = 0) -> BatchLimits:
    return BatchLimits(requests=requests, chunk_tokens=chunk_tokens)


RIGHT: list[tuple[str, Any]] = [
    ("place", (placement(role=Role.PREFILL), placement(role=Role.DECODE))),
    ("place", (placement(frozenset("a")), placement(frozenset("ab")))),
    ("place", (placement(frozenset()), placement())),
    ("place", (placement(ahead=("b", "a")), placement())),
    ("scale", fleet(1, 0, 1)),
    ("scale", fleet(0, 1, 0)),
    ("prefill", to(1)),
    ("prefill", to(0, 1)),
    ("prefill", Refusal(reason="too late")),
    ("decode", 1),
    ("admit", (1,)),
    ("admit", (1, 0)),
    ("admit", ()),
    ("phase", Phase.DECODE),
    ("round", (turn("b"), turn("a", 3))),
    ("round", (turn("b"), turn("c", firm=False))),
    ("preempt", math.inf),
    ("preempt", 0),
    ("preempt", 0.5),
    ("batch", limits(1, 512)),
    ("batch", limits(8)),
    ("flow", (flow("s"),)),
    ("flow", ()),
    ("evict", ("b",)),
    ("evict", ("b", "a")),
]

NONSENSE: list[tuple[str, Any]] = [
    ("place", [placement()]),
    ("place", [placement()] * 3),
    ("place", 2),
    ("place", [Role.MIXED, Role.MIXED]),
    ("place", [placement(), "mixed"]),
    ("place", [placement(role="prefill"), placement()]),
    ("place", [placement({"a", "b"}), placement()]),
    ("place", [placement(frozenset("a")), placement(frozenset("a"))]),
    ("place", [placement(frozenset("ab")), placement(frozenset("az"))]),
    ("place", [placement(frozenset("z")), placement()]),
    ("place", [placement(ahead=["a"]), placement()]),
    ("place", [placement(ahead=("z",)), placement()]),
    ("place", [placement(ahead=(["a"],)), placement()]),
    ("place", [placement(frozenset({1})), placement()]),
    ("scale", 2),
    ("scale", (0, 2, 0)),
    ("scale", fleet(0, 0, 2)),
    ("scale", fleet(0, 0, 0)),
    ("scale", fleet(0, 3, 0)),
    ("scale", fleet(-1, 2, 0)),
    ("scale", fleet(0, True, 0)),
    ("scale", fleet(0, 1.0, 0)),
    ("prefill", 0),
    ("prefill", to(7)),
    ("prefill", to(True)),
    ("prefill", to("0")),
    ("prefill", to(0, 0)),
    ("prefill", to(0, 2)),
    ("prefill", to(0, -1)),
    ("prefill", to(0, True)),
    ("prefill", to(0, 1.0)),
    ("prefill", to(1, 0)),
    ("prefill", Refusal(reason=None)),  # type: ignore[arg-type]
    ("prefill", Refusal(reason="\ud800")),
    ("decode", 7),
    ("decode", True),
    ("decode", 1.0),
    ("decode", "1"),
    ("decode", [1]),
    ("decode", {}),
    ("admit", 0),
    ("admit", [0, 0]),
    ("admit", [2]),
    ("admit", [-1]),
    ("admit", [True]),
    ("admit", [0.0]),
    ("admit", ["0"]),
    ("admit", {0: 1}),
    ("phase", "prefill"),
    ("phase", True),
    ("round", []),
    ("round", [turn("a"), turn("a")]),
    ("round", [turn("z")]),
    ("round", [turn("a", firm=False)]),
    ("round", [turn("a"), turn("b", firm=1)]),
    ("round", [turn("a"), turn("a", firm=False)]),
    ("round", [turn("a", 0.0)]),
    ("round", [turn("a", -1.0)]),
    ("round", [turn("a", math.inf)]),
    ("round", [turn("a", math.nan)]),
    ("round", [turn("a", 1e308)]),
    ("round", [turn("a", 10**400)]),
    ("round", [turn("a", True)]),
    ("round", [turn("a", "1")]),
    ("round", [turn(["a"])]),  # type: ignore[arg-type]
    ("round", ["a"]),
    ("round", turn("a")),
    ("preempt", math.nan),
    ("preempt", -0.1),
    ("preempt", -math.inf),
    ("preempt", True),
    ("preempt", 10**400),
    ("preempt", "soon"),
    ("preempt", [1.0]),
    ("batch", 8),
    ("batch", limits(0)),
    ("batch", limits(-1)),
    ("batch", limits(True)),
    ("batch", limits(8.0)),
    ("batch", limits(8, -1)),
    ("batch", limits(8, 1 << 64)),
    ("batch", limits(8, None)),
    ("flow", "r"),
    ("flow", ["r"]),
    ("flow", [flow("z")]),
    ("flow", [flow("r"), flow("r")]),
    ("flow", [flow(["r"])]),
    ("flow", [flow("r", 0)]),
    ("flow", [flow("r", 7)]),
    ("flow", [flow("r", True)]),
    ("flow", flow("r")),
    ("evict", "ab"),
    ("evict", "a"),
    ("evict", ["z"]),
    ("evict", ["a", "a"]),
    ("evict", [1]),
    ("evict", 1),
    ("prefetch", ["a", "b"]),
    ("prefetch", ["z"]),
    ("prefetch", "a"),
    ("prefetch", [0]),
    ("prefetch", 1),
]


def policy_with(hook: str, answer: Callable[[], Any]) -> object:
    """A policy with this one hook."""

    def implementation(self: object) -> Any:
        return answer()

    implementation.__name__ = hook
    implementation.__qualname__ = f"Stranger.{hook}"
    return type("Stranger", (), {hook: hookimpl(implementation)})()


def stack_of(hook: str, answer: Callable[[], Any]) -> PolicyStack:
    """A stranger with this one hook, before the built-in."""
    return PolicyStack({"stranger": policy_with(hook, answer), "built-in": Aegaeon()})


def asked(stack: PolicyStack, hook: str) -> Any:
    answer = getattr(stack, hook)(now=1.0, costs=FixedCosts(), **QUESTIONS[hook])
    return tuple(answer) if isinstance(answer, list) else answer


def built_in(hook: str) -> Any:
    """What the built-in answers."""
    return asked(PolicyStack({"built-in": Aegaeon()}), hook)


def test_every_hook_is_asked_here() -> None:
    """The questions of these tests are all there are."""
    assert set(QUESTIONS) == set(HOOKS)
    assert {hook for hook, _ in NONSENSE} == set(HOOKS)


@pytest.mark.parametrize(("hook", "answer"), RIGHT)
def test_a_right_answer_is_taken(hook: str, answer: Any) -> None:
    """The first policy of the stack decides, without a fault."""
    stack = stack_of(hook, lambda: answer)

    assert asked(stack, hook) == answer
    assert stack.faults == []


@pytest.mark.parametrize(
    ("answer", "model"), [(["b"], "b"), ({"b"}, "b"), (iter(["b"]), "b"), ([], None)]
)
def test_a_prefetch_is_one_model_or_none(answer: Any, model: str | None) -> None:
    """Any collection will do, of one at most."""
    stack = stack_of("prefetch", lambda: answer)

    assert asked(stack, "prefetch") == model
    assert stack.faults == []


@pytest.mark.parametrize("hook", HOOKS)
def test_a_question_left_open_goes_to_the_next(hook: str) -> None:
    """None is no answer and no fault."""
    stack = stack_of(hook, lambda: None)

    assert asked(stack, hook) == built_in(hook)
    assert stack.faults == []


@pytest.mark.parametrize("hook", HOOKS)
def test_a_policy_that_raises_loses_the_question(hook: str) -> None:
    """What a policy raises goes no further, and is told with its name and the hook's."""

    def fail() -> None:
        raise RuntimeError("out of ideas")

    stack = stack_of(hook, fail)

    assert asked(stack, hook) == built_in(hook)
    (fault,) = stack.take_faults()
    assert (fault.policy, fault.hook) == ("stranger", hook)
    assert "out of ideas" in fault.reason
    assert stack.take_faults() == []


@pytest.mark.parametrize(("hook", "nonsense"), NONSENSE)
def test_nonsense_is_not_taken(hook: str, nonsense: Any) -> None:
    """An answer that the machine could not act on costs its policy the question."""
    stack = stack_of(hook, lambda: nonsense)

    assert asked(stack, hook) == built_in(hook)
    assert [(fault.policy, fault.hook) for fault in stack.faults] == [("stranger", hook)]
    assert len(stack.faults[0].reason) < 400


def test_a_subclass_is_not_what_it_says() -> None:
    """A choice whose group is another one when it is read again is refused."""

    class Sly(PrefillChoice, frozen=True):
        """Would have its way when nobody looks."""

    stack = stack_of("prefill", lambda: Sly(instance=0))

    asked(stack, "prefill")

    assert len(stack.faults) == 1


def test_an_answer_that_cannot_be_shown_is_a_fault() -> None:
    """Not even a reason can be had of it."""

    class Mute(Exception):
        def __repr__(self) -> str:
            raise RuntimeError

    def fail() -> None:
        raise Mute

    stack = stack_of("phase", fail)

    asked(stack, "phase")

    assert [fault.reason for fault in stack.faults] == ["Mute"]


def test_a_round_may_be_a_generator() -> None:
    """An answer that can be looked at only once is still whole after it was checked."""

    def generate() -> Iterator[PlannedTurn]:
        yield turn("b")
        yield turn("a")

    assert asked(stack_of("round", generate), "round") == (turn("b"), turn("a"))


def test_a_generator_that_breaks_off_is_a_fault() -> None:
    """What is raised while an answer is read is raised by the policy."""

    def generate() -> Iterator[PlannedTurn]:
        yield turn("b")
        raise RuntimeError("no more")

    stack = stack_of("round", generate)

    assert asked(stack, "round") == built_in("round")
    assert "no more" in stack.faults[0].reason


def test_a_round_takes_only_what_can_run() -> None:
    """A model whose requests are all on their way gets no turn."""
    view = instance_view(batches=(batch_view("a", runnable=0), batch_view("b")))
    stack = stack_of("round", lambda: [turn("a")])

    turns = stack.round(1.0, view, FixedCosts())

    assert [planned.model for planned in turns] == ["b"]
    assert len(stack.faults) == 1


def test_a_question_that_no_policy_answers_is_an_error() -> None:
    """A stack without the built-in may have no answer; it says to which question."""
    stack = PolicyStack({"shy": policy_with("phase", lambda: None)})

    with pytest.raises(PolicyError, match="no policy answered phase"):
        asked(stack, "phase")


def test_each_decision_has_its_order() -> None:
    """Who is asked, and before whom, is told for each hook; a policy without the hook is left
    out."""

    class Both:
        @hookimpl
        def phase(self) -> Phase:
            return Phase.PREFILL

        @hookimpl
        def decode(self) -> int:
            return 1

    class Phased:
        @hookimpl
        def phase(self) -> Phase:
            return Phase.DECODE

    stack = PolicyStack(
        {"both": Both(), "phased": Phased(), "built-in": Aegaeon()},
        {"phase": ("phased", "both"), "decode": ("phased", "both", "built-in")},
    )

    assert (asked(stack, "phase"), asked(stack, "decode")) == (Phase.DECODE, 1)
    assert stack.asked()["phase"] == ("phased", "both")
    assert stack.asked()["decode"] == ("both", "built-in")
    assert stack.asked()["round"] == ("built-in",)


# --- what is shown cannot be changed -------------------------------------------------------------


class Vandal:
    """Tries to change what it is shown."""

    def __init__(self, deed: Callable[..., Any]) -> None:
        self._deed = deed

    @hookimpl
    def round(self, instance: InstanceView, costs: Any) -> None:
        self._deed(instance, costs)

    @hookimpl
    def evict(self, victims: Any) -> None:
        self._deed(victims)

    @hookimpl
    def prefill(self, instances: Any) -> None:
        self._deed(instances)

    @hookimpl
    def place(self, cluster: ClusterView) -> None:
        self._deed(cluster)


def set_load(view: InstanceView, _: Any) -> None:
    view.up = False  # type: ignore[misc]


def add_group(view: InstanceView, _: Any) -> None:
    view.groups += (group_view("z"),)  # type: ignore[misc]


def drop_group(view: InstanceView, _: Any) -> None:
    del view.groups[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("deed", [set_load, add_group, drop_group])
def test_a_view_cannot_be_changed(deed: Callable[..., Any]) -> None:
    """Who tries has failed, and everybody else sees what was there."""
    stack = PolicyStack({"vandal": Vandal(deed), "built-in": Aegaeon()})
    before = msgspec.json.encode(VIEW)

    assert asked(stack, "round") == built_in("round")
    assert [fault.policy for fault in stack.faults] == ["vandal"]
    assert msgspec.json.encode(VIEW) == before


@pytest.mark.parametrize("hook", ["evict", "prefill"])
def test_lists_of_the_machine_are_not_handed_out(hook: str) -> None:
    """What the machine offers is its own: emptying it fails, and changes nothing."""
    stack = PolicyStack({"vandal": Vandal(lambda offered: offered.clear()), "built-in": Aegaeon()})
    offered = QUESTIONS[hook]["victims" if hook == "evict" else "instances"]

    assert asked(stack, hook) == built_in(hook)
    assert len(stack.faults) == 1
    assert len(offered) == 2


# --- faults in a row -----------------------------------------------------------------------------


def test_three_faults_in_a_row_disable_a_policy() -> None:
    """Over all its hooks; the last fault says so, and it is not asked again until it is enabled."""
    calls: list[str] = []

    class Broken:
        @hookimpl
        def phase(self) -> Any:
            calls.append("phase")
            return "prefill"

        @hookimpl
        def decode(self) -> Any:
            calls.append("decode")
            raise ValueError

    stack = PolicyStack({"broken": Broken(), "built-in": Aegaeon()})
    for hook in ("phase", "decode", "phase", "decode", "phase"):
        asked(stack, hook)

    assert calls == ["phase", "decode", "phase"]
    assert [fault.disables for fault in stack.take_faults()] == [False, False, True]
    broken, _ = stack.states()
    assert (broken.disabled, broken.calls, broken.faults) == (True, 3, 3)

    stack.enable("broken")
    asked(stack, "phase")

    assert calls == ["phase", "decode", "phase", "phase"]
    assert [fault.disables for fault in stack.take_faults()] == [False]
    assert not stack.states()[0].disabled


def test_a_good_answer_makes_good() -> None:
    """Faults count in a row only; having no opinion is neither good nor bad."""
    answers = iter(["x", "x", Phase.DECODE, "x", None, "x", None, "x", "never asked"])
    stack = stack_of("phase", lambda: next(answers))

    for _ in range(9):
        asked(stack, "phase")

    assert [fault.disables for fault in stack.faults] == [False] * 4 + [True]
    assert next(answers) == "never asked"


def test_the_last_policy_is_never_disabled() -> None:
    """Somebody has to answer."""
    answers = iter(["x", "x", "x", Phase.DECODE])
    stack = PolicyStack({"only": policy_with("phase", lambda: next(answers))})
    for _ in range(3):
        with pytest.raises(PolicyError, match="no policy answered phase"):
            asked(stack, "phase")

    assert asked(stack, "phase") is Phase.DECODE
    assert not any(fault.disables for fault in stack.faults)


def test_who_does_not_decide_cannot_be_enabled() -> None:
    """The error names those that do."""
    with pytest.raises(PolicyError, match=r"'lifo' does not decide; stranger, built-in do"):
        stack_of("phase", lambda: None).enable("lifo")


# --- the record ----------------------------------------------------------------------------------


def test_what_was_missed_is_missed_again() -> None:
    """A question that a policy overran is a fault without being asked; one that it was too busy for
    is not. Others are put as always."""
    stack = stack_of("phase", lambda: Phase.DECODE)
    asked(stack, "phase")

    stack.expect(
        [
            Missed(question=1, policy="stranger", overran=True),
            Missed(question=2, policy="stranger", overran=False),
        ]
    )
    answers = [asked(stack, "phase") for _ in range(4)]

    taken = built_in("phase")
    assert answers == [Phase.DECODE, taken, taken, Phase.DECODE]
    assert taken is Phase.PREFILL
    assert [fault.hook for fault in stack.faults] == ["phase"]
    assert stack.states()[0].calls == 3
    stack.expect(())
    assert [asked(stack, "phase") for _ in range(3)] == [Phase.DECODE] * 3


def test_every_question_is_timed() -> None:
    """Whoever wants to know is told the hook and the seconds, also if nobody could answer."""
    told: list[tuple[str, float]] = []
    stack = PolicyStack(
        {"shy": policy_with("phase", lambda: None), "built-in": policy_with("decode", lambda: 1)},
        observe=lambda hook, seconds: told.append((hook, seconds)),
    )
    asked(stack, "decode")
    with pytest.raises(PolicyError):
        asked(stack, "phase")

    assert [hook for hook, _ in told] == ["decode", "phase"]
    assert all(0 <= seconds < 1 for _, seconds in told)


def test_time_is_each_policys_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By decision; who was asked before in vain has spent its own, and the answer took the sum. Of
    a fault the time counts, too."""
    clock = iter([0.0, 0.25, 1.0, 1.5, 2.0, 2.125, 3.0, 3.25])
    monkeypatch.setattr(policystack, "perf_counter", lambda: next(clock))
    answers = iter([None, "nonsense"])
    told: list[tuple[str, float]] = []
    stack = PolicyStack(
        {"shy": policy_with("phase", lambda: next(answers)), "built-in": Aegaeon()},
        observe=lambda hook, seconds: told.append((hook, seconds)),
    )
    asked(stack, "phase")
    asked(stack, "phase")

    shy, built_in = stack.states()
    assert told == [("phase", 0.75), ("phase", 0.375)]
    assert shy.decisions == {
        "phase": DecisionStats(
            calls=2, faults=1, seconds=0.375, p50_seconds=0.125, p99_seconds=0.25, max_seconds=0.25
        )
    }
    assert built_in.decisions["phase"].seconds == 0.75


def test_quantiles_are_of_the_last_questions() -> None:
    """The sum is of all; before there was one there are no times."""
    stats = PolicyStats()
    assert stats.report() == DecisionStats(
        calls=0, faults=0, seconds=0.0, p50_seconds=None, p99_seconds=None, max_seconds=None
    )
    for seconds in [1000.0, *range(1, RECENT + 1)]:
        stats.took(seconds)

    told = stats.report()
    assert told.seconds == 1000 + sum(range(RECENT + 1))
    assert (told.p50_seconds, told.p99_seconds, told.max_seconds) == (128, 254, 256)


def test_nothing_is_timed_without_an_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the lab, where a clock would be another run's; questions are counted all the same."""
    monkeypatch.setattr(policystack, "perf_counter", None)
    stack = PolicyStack({"built-in": Aegaeon()})
    asked(stack, "phase")

    (state,) = stack.states()
    assert (state.calls, state.decisions["phase"].p50_seconds) == (1, None)


@pytest.mark.parametrize(("name", "argument"), [("faze", "instance"), ("phase", "instanz")])
def test_a_misspelt_hook_or_argument_is_named(name: str, argument: str) -> None:
    """It would never be asked, or could not be: that is an error when the stack is made."""
    space: dict[str, Any] = {}
    exec(f"def {name}(self, {argument}): ...", space)
    space[name].__qualname__ = f"Misspelt.{name}"
    misspelt = type("Misspelt", (), {name: hookimpl(space[name])})()

    with pytest.raises(PolicyError, match=rf"policy mine: (.|\n)*({name}|{argument})"):
        PolicyStack({"mine": misspelt})


class Learner:
    """A policy that hands over what it knows."""

    def __init__(self) -> None:
        self.known: list[object] = []

    def take_over(self, before: Learner) -> None:
        self.known.append(before)


class OtherLearner(Learner):
    """Of another kind."""


def test_policies_go_on_from_those_of_their_kind() -> None:
    """Only ours, as a stranger's code may do anything; those of the same name and kind, in a stack
    that was there before."""
    mine, stranger, new = Learner(), Learner(), Learner()
    before = Learner()
    stack = PolicyStack(
        {"mine": mine, "stranger": stranger, "new": new, "built-in": Aegaeon()},
        ours=("mine", "new", "built-in"),
    )
    stack.take_over(PolicyStack({"mine": before, "stranger": Learner(), "built-in": Aegaeon()}))
    assert mine.known == [before]
    assert stranger.known == new.known == []
    stack.take_over(PolicyStack({"mine": OtherLearner()}))
    stack.take_over(Interposed(lambda call: None))
    assert mine.known == [before]
