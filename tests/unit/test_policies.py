"""The stack of policies: loaded from entry points, asked in order, and never trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from appliance.errors import PolicyError
from appliance.hookspecs import hookimpl
from appliance.plugins.aegaeon import Aegaeon
from appliance.plugins.serverlessllm import ServerlessLlm
from appliance.policies import PolicyStack, available, load_stack
from appliance.scheduling.questions import Phase, PlannedTurn, PrefillChoice
from appliance.vocabulary import Role
from tests.unit.policy_views import batch_view, group_view, instance_view, request_view

VIEW = instance_view(
    0, groups=(group_view("b"), group_view("a")), batches=(batch_view("a"), batch_view("b"))
)
ELSEWHERE = instance_view(1, batches=(batch_view("c", 9),))

QUESTIONS: dict[str, dict[str, Any]] = {
    "assign_roles": {"instances": 2},
    "choose_prefill": {"request": request_view("a"), "instances": [VIEW, ELSEWHERE]},
    "choose_decode": {
        "request": request_view("a"),
        "prefilled_on": 0,
        "instances": [VIEW, ELSEWHERE],
    },
    "choose_phase": {"instance": VIEW},
    "plan_round": {"instance": VIEW},
    "choose_prefetch": {"instance": VIEW, "upcoming": ["a", "b"]},
}
RIGHT: dict[str, Any] = {
    "assign_roles": (Role.MIXED, Role.MIXED),
    "choose_prefill": PrefillChoice(instance=0, group=1),
    "choose_decode": 0,
    "choose_phase": Phase.DECODE,
    "plan_round": (PlannedTurn(model="a", quota_seconds=86400.0),),
    "choose_prefetch": None,
}
"""What serverlessllm answers."""


def turn(model: str, quota: float = 1.0) -> PlannedTurn:
    return PlannedTurn(model=model, quota_seconds=quota)


def policy_with(hook: str, answer: Callable[[], Any]) -> object:
    """A policy with this one hook."""

    class Stranger:
        @hookimpl
        def assign_roles(self) -> Any:
            return answer()

        @hookimpl
        def choose_prefill(self) -> Any:
            return answer()

        @hookimpl
        def choose_decode(self) -> Any:
            return answer()

        @hookimpl
        def choose_phase(self) -> Any:
            return answer()

        @hookimpl
        def plan_round(self) -> Any:
            return answer()

        @hookimpl
        def choose_prefetch(self) -> Any:
            return answer()

    for name in QUESTIONS:
        if name != hook:
            delattr(Stranger, name)
    return Stranger()


def asked(stack: PolicyStack, hook: str) -> Any:
    answer = getattr(stack, hook)(**QUESTIONS[hook])
    return tuple(answer) if isinstance(answer, list) else answer


def test_the_built_in_policies_are_found() -> None:
    """Those of the appliance are installed like anybody else's."""
    assert {"aegaeon", "serverlessllm"} <= set(available())


def test_a_stack_is_loaded_with_parameters() -> None:
    """A policy is made from its own table, and the built-in stands behind it."""
    stack = load_stack(
        ["aegaeon"], {"aegaeon": {"prefill_share": 0.75}, "serverlessllm": {"max_group": 1}}
    )

    assert stack.assign_roles(4) == (Role.PREFILL,) * 3 + (Role.DECODE,)


def test_an_unknown_policy_is_named() -> None:
    """A policy that is not installed is an error that lists those that are."""
    with pytest.raises(PolicyError, match=r"'lifo' .* aegaeon, .*serverlessllm"):
        load_stack(["lifo"], {})


@pytest.mark.parametrize(
    ("parameters", "named"),
    [({"q_max": 1}, "q_max"), ({"q_max_seconds": "long"}, r"\$\.q_max_seconds")],
)
def test_a_bad_parameter_is_named(parameters: dict[str, object], named: str) -> None:
    """A parameter that does not exist, or has the wrong type, is named with its policy."""
    with pytest.raises(PolicyError, match=rf"policy\.aegaeon: .*{named}"):
        load_stack(["serverlessllm"], {"aegaeon": parameters})


def test_a_misspelt_hook_is_named() -> None:
    """A hook that does not exist would never be asked; that is an error when it is loaded."""

    class Misspelt:
        @hookimpl
        def choose_faze(self, instance: object) -> None:
            """Never asked."""

    with pytest.raises(PolicyError, match=r"policy mine: .*choose_faze"):
        PolicyStack({"mine": Misspelt()})


def test_a_misspelt_argument_is_named() -> None:
    """A hook that asks for what is not offered could not be called; that is an error, too."""

    class Misspelt:
        @hookimpl
        def choose_phase(self, instanz: object) -> None:
            """Never asked."""

    with pytest.raises(PolicyError, match=r"policy mine: (.|\n)*instanz"):
        PolicyStack({"mine": Misspelt()})


@pytest.mark.parametrize("hook", QUESTIONS)
def test_a_right_answer_is_taken(hook: str) -> None:
    """The first policy of the stack decides, without a fault."""
    stack = PolicyStack(
        {"first": policy_with(hook, lambda: RIGHT_OTHER[hook]), "serverlessllm": ServerlessLlm()}
    )

    answer = asked(stack, hook)

    assert answer == (RIGHT_OTHER[hook][0] if hook == "choose_prefetch" else RIGHT_OTHER[hook])
    assert stack.faults == []


RIGHT_OTHER: dict[str, Any] = {
    "assign_roles": (Role.PREFILL, Role.DECODE),
    "choose_prefill": PrefillChoice(instance=1),
    "choose_decode": 1,
    "choose_phase": Phase.PREFILL,
    "plan_round": (turn("b"), turn("a")),
    "choose_prefetch": ("b",),
}
"""Valid answers that serverlessllm would not give."""


@pytest.mark.parametrize("hook", QUESTIONS)
def test_a_question_left_open_goes_to_the_next(hook: str) -> None:
    """None is no answer and no fault."""
    stack = PolicyStack({"shy": policy_with(hook, lambda: None), "serverlessllm": ServerlessLlm()})

    assert asked(stack, hook) == RIGHT[hook]
    assert stack.faults == []


@pytest.mark.parametrize("hook", QUESTIONS)
def test_a_policy_that_raises_loses_the_question(hook: str) -> None:
    """What a policy raises goes no further, and is told with its name and the hook's."""

    def fail() -> None:
        raise RuntimeError("out of ideas")

    stack = PolicyStack({"broken": policy_with(hook, fail), "serverlessllm": ServerlessLlm()})

    assert asked(stack, hook) == RIGHT[hook]
    (fault,) = stack.take_faults()
    assert (fault.policy, fault.hook) == ("broken", hook)
    assert "out of ideas" in fault.reason
    assert stack.take_faults() == []


@pytest.mark.parametrize(
    ("hook", "nonsense"),
    [
        ("assign_roles", [Role.MIXED]),
        ("assign_roles", ["prefill", "decode"]),
        ("assign_roles", 2),
        ("choose_prefill", PrefillChoice(instance=7)),
        ("choose_prefill", PrefillChoice(instance=0, group=0)),
        ("choose_prefill", PrefillChoice(instance=0, group=2)),
        ("choose_prefill", PrefillChoice(instance=0, group=-1)),
        ("choose_prefill", PrefillChoice(instance=1, group=0)),
        ("choose_prefill", 0),
        ("choose_decode", 7),
        ("choose_decode", [0]),
        ("choose_decode", {}),
        ("choose_phase", "prefill"),
        ("choose_phase", True),
        ("plan_round", []),
        ("plan_round", [turn("a"), turn("a")]),
        ("plan_round", [turn("z")]),
        ("plan_round", [turn("a", 0.0)]),
        ("plan_round", [turn("a", -1.0)]),
        ("plan_round", [turn("a", math.inf)]),
        ("plan_round", [turn("a", math.nan)]),
        ("plan_round", ["a"]),
        ("plan_round", turn("a")),
        ("choose_prefetch", ["a", "b"]),
        ("choose_prefetch", ["z"]),
        ("choose_prefetch", "ab"),
        ("choose_prefetch", 1),
    ],
)
def test_nonsense_is_not_taken(hook: str, nonsense: Any) -> None:
    """An answer that the machine could not act on costs its policy the question."""
    stack = PolicyStack(
        {"odd": policy_with(hook, lambda: nonsense), "serverlessllm": ServerlessLlm()}
    )

    assert asked(stack, hook) == RIGHT[hook]
    assert [(fault.policy, fault.hook) for fault in stack.faults] == [("odd", hook)]


def test_a_round_may_be_a_generator() -> None:
    """An answer that can be looked at only once is still whole after it was checked."""

    def generate() -> Iterator[PlannedTurn]:
        yield turn("b")
        yield turn("a")

    stack = PolicyStack(
        {"lazy": policy_with("plan_round", generate), "serverlessllm": ServerlessLlm()}
    )

    assert tuple(stack.plan_round(VIEW)) == (turn("b"), turn("a"))


def test_a_prefetch_may_be_a_set() -> None:
    """Any collection of one model is an answer."""
    stack = PolicyStack(
        {"lazy": policy_with("choose_prefetch", lambda: {"b"}), "serverlessllm": ServerlessLlm()}
    )

    assert stack.choose_prefetch(VIEW, ["a", "b"]) == "b"


def test_a_round_takes_only_what_can_run() -> None:
    """A model whose requests are all on their way gets no turn."""
    view = instance_view(batches=(batch_view("a", runnable=0), batch_view("b")))
    stack = PolicyStack(
        {"odd": policy_with("plan_round", lambda: [turn("a")]), "aegaeon": Aegaeon()}
    )

    assert [planned.model for planned in stack.plan_round(view)] == ["b"]
    assert len(stack.faults) == 1


def test_a_question_nobody_answers_is_an_error() -> None:
    """A stack without the built-in may have no answer; it says to which question."""
    stack = PolicyStack({"shy": policy_with("choose_phase", lambda: None)})

    with pytest.raises(PolicyError, match="no policy answered choose_phase"):
        stack.choose_phase(VIEW)


def test_the_built_in_stands_behind_every_stack() -> None:
    """Whoever is asked first, in the end there is an answer."""
    stack = load_stack([], {})

    assert stack.assign_roles(1) == (Role.MIXED,)
