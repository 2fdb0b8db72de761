"""Installed policies are found, described, and made into the stack that was chosen."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import PolicyChoiceError
from appliance.hookspecs import API_VERSION, HOOKS
from appliance.policies.loader import FALLBACK, available, installed, load_stack
from appliance.policies.stack import PolicyStack
from appliance.scheduling.policy_api import Phase
from appliance.service.policy_report import InstalledPolicy, PolicyChoice
from appliance.vocabulary import Role
from tests.patience import PATIENCE_SECONDS
from tests.unit.plugins.policy_views import (
    FixedCosts,
    batch_view,
    cluster_view,
    group_view,
    instance_view,
    request_view,
)
from tests.unit.policies.strangers import HEAD, install

VIEW = instance_view(groups=(group_view("a"),), batches=(batch_view("a"),))
BUILT_IN = f"built-in {FALLBACK}"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose packages are installed."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def phase_of(answer: str) -> str:
    """A policy with one hook, with this answer."""
    return f"    @hookimpl\n    def phase(self):\n        return {answer}\n"


def chosen(*use: str, **more: Any) -> PolicyChoice:
    return PolicyChoice(use=use, **more)


def problems(choice: PolicyChoice) -> list[tuple[str, str, str]]:
    """Everything wrong with a choice: key, what, and remedy."""
    with pytest.raises(PolicyChoiceError) as caught:
        load_stack(choice)
    assert str(caught.value).splitlines() == [str(problem) for problem in caught.value.problems]
    return [(".".join(p.key), p.wrong, p.remedy) for p in caught.value.problems]


def roles(stack: PolicyStack, instances: int) -> list[Role]:
    return [place.role for place in stack.place(1.0, cluster_view(instances), FixedCosts())]


def phase(stack: PolicyStack) -> Phase:
    return stack.phase(1.0, VIEW, FixedCosts())


# --- what is installed ---------------------------------------------------------------------------


def test_the_built_in_policies_are_found() -> None:
    """Those of the appliance are installed like anybody else's."""
    assert {"aegaeon", "serverlessllm"} <= set(available())


def test_ours_are_described() -> None:
    """With distribution, hooks, and the schema of the parameters."""
    (aegaeon,) = [policy for policy in installed() if policy.name == "aegaeon"]

    assert (aegaeon.distribution, aegaeon.shipped, aegaeon.error) == ("appliance", True, "")
    assert aegaeon.api_version == API_VERSION
    assert aegaeon.hooks == HOOKS
    assert aegaeon.about.startswith("Aegaeon")
    properties: Any = aegaeon.parameters["$defs"]
    assert properties["Aegaeon"]["properties"]["q_max_seconds"]["default"] == 4.0


def test_a_stranger_is_found_while_we_run(site: Path) -> None:
    """One that was installed after we began is listed, and can be chosen."""
    assert "lifo" not in available()

    install(site, "lifo", phase_of("Phase.DECODE"))

    assert "lifo" in available()
    (lifo,) = [policy for policy in installed() if policy.name == "lifo"]
    assert (lifo.version, lifo.shipped, lifo.hooks) == ("1.5", False, ("phase",))
    assert lifo.about == "A policy from elsewhere."
    assert phase(load_stack(chosen("lifo"))) is Phase.DECODE


def broken(name: str) -> InstalledPolicy:
    (found,) = [policy for policy in installed() if policy.name == name]
    return found


@pytest.mark.parametrize(
    ("head", "body", "wrong"),
    [
        ("import nowhere_to_be_found\n", "", "cannot be imported: ModuleNotFoundError"),
        ("1 / 0\n", "", "cannot be imported: ZeroDivisionError"),
        ("Strange = 1\n", "", "cannot be imported: AttributeError"),
        ("class Stranger:\n    pass\n", "", "is not a msgspec.Struct class"),
        ("def Stranger():\n    pass\n", "", "is not a msgspec.Struct class"),
        (None, "    api_version = 99\n", f"for version 99 of the hooks, this is {API_VERSION}"),
        (None, "    @hookimpl\n    def faze(self):\n        pass\n", "faze"),
    ],
)
def test_a_policy_that_cannot_be_used_says_why(
    site: Path, head: str | None, body: str, wrong: str
) -> None:
    """In the list, and to who chooses it, at the key that names it."""
    body = body.replace("api_version", "api_version: 'ClassVar[int]'")
    if head is None:
        head = (
            "from typing import ClassVar\nimport msgspec\n"
            "from appliance.hookspecs import hookimpl\n"
            "class Stranger(msgspec.Struct):\n    share: float = 0.5\n"
        )
    install(site, "odd", body, head=head)

    assert wrong in broken("odd").error
    ((key, told, _),) = problems(chosen("serverlessllm", decisions={"phase": "odd"}))
    assert key == "decisions.phase"
    assert wrong in told


def test_a_policy_that_cannot_be_made_says_why(site: Path) -> None:
    """Whatever its constructor raises."""
    body = "    def __post_init__(self):\n        raise OSError('no such table')\n"
    install(site, "odd", body)

    ((key, told, _),) = problems(chosen("odd"))

    assert key == "use"
    assert "no such table" in told


def test_ours_cannot_be_replaced(site: Path) -> None:
    """A stranger of the same name is passed over."""
    install(site, "aegaeon", phase_of("Phase.DECODE"))

    assert phase(load_stack(chosen("aegaeon"))) is Phase.PREFILL


# --- the stack that was chosen -------------------------------------------------------------------


def test_a_stack_is_loaded_with_parameters() -> None:
    """A policy is made from its own table, and the built-in stands behind it, as it ships."""
    stack = load_stack(
        chosen(
            "aegaeon",
            parameters={"aegaeon": {"prefill_share": 0.75}, "serverlessllm": {"max_group": 1}},
        )
    )

    assert roles(stack, 4) == [Role.PREFILL] * 3 + [Role.DECODE]
    assert stack.asked()["place"] == ("aegaeon", BUILT_IN)


def test_the_built_in_is_at_the_end_of_every_stack() -> None:
    """Whoever is asked first, in the end there is an answer."""
    stack = load_stack(chosen())

    assert roles(stack, 1) == [Role.MIXED]
    assert set(stack.asked().values()) == {(BUILT_IN,)}


def test_a_decision_is_given_to_another(site: Path) -> None:
    """Who is named for a decision is asked for that one only, before all others; who is named for
    both is asked once."""
    install(site, "decoder", phase_of("Phase.DECODE") + "    place = phase\n")
    choice = chosen("serverlessllm", "aegaeon", decisions={"phase": "decoder", "round": "aegaeon"})

    asked = load_stack(choice).asked()

    assert asked["phase"] == ("decoder", "serverlessllm", "aegaeon", BUILT_IN)
    assert asked["place"] == ("serverlessllm", "aegaeon", BUILT_IN)
    assert asked["round"] == ("aegaeon", "serverlessllm", BUILT_IN)
    assert asked["flow"] == ("aegaeon", BUILT_IN)


def test_a_policy_is_one_for_all_its_decisions(site: Path) -> None:
    """What it keeps in mind at one question is there at the next."""
    body = (
        "    seen: list = []\n"
        "    @hookimpl\n    def phase(self):\n        self.seen.append(1)\n"
        "        return Phase.DECODE if len(self.seen) > 1 else Phase.PREFILL\n"
        "    @hookimpl\n    def preempt(self):\n        self.seen.append(1)\n        return 0.0\n"
    )
    install(site, "mindful", body)
    stack = load_stack(
        chosen("serverlessllm", decisions={"phase": "mindful", "preempt": "mindful"})
    )

    stack.preempt(1.0, VIEW, FixedCosts())

    assert phase(stack) is Phase.DECODE


@pytest.mark.parametrize(
    ("choice", "key", "wrong", "remedy"),
    [
        (
            chosen("serverlesllm"),
            "use",
            "no policy 'serverlesllm' is installed",
            "did you mean serverlessllm?",
        ),
        (
            chosen("serverlessllm", "serverlessllm"),
            "use",
            "serverlessllm is listed twice",
            "list it once",
        ),
        (
            chosen("serverlessllm", decisions={"round": "x"}),
            "decisions.round",
            "no policy 'x' is installed",
            "aegaeon",
        ),
        (
            chosen("serverlessllm", decisions={"rond": "serverlessllm"}),
            "decisions.rond",
            "there is no such decision",
            "did you mean round?",
        ),
        (
            chosen("serverlessllm", parameters={"aegeon": {}}),
            "parameters.aegeon",
            "no policy 'aegeon' is installed",
            "did you mean aegaeon?",
        ),
        (
            chosen("serverlessllm", parameters={"aegaeon": {"q_max": 1}}),
            "parameters.aegaeon.q_max",
            "policy aegaeon has no parameter q_max",
            "use max_group, q_max_seconds, alpha_floor",
        ),
        (
            chosen("serverlessllm", parameters={"aegaeon": {"q_max_seconds": "long"}}),
            "parameters.aegaeon.q_max_seconds",
            "Expected `float`",
            "correct it",
        ),
    ],
)
def test_a_choice_that_cannot_be_used(
    choice: PolicyChoice, key: str, wrong: str, remedy: str
) -> None:
    """Each problem names its key, what is wrong, and what to do."""
    ((told_key, told_wrong, told_remedy),) = problems(choice)

    assert told_key == key
    assert wrong in told_wrong
    assert remedy in told_remedy


def test_a_key_of_a_table_gets_a_suggestion(site: Path) -> None:
    """However deep it is; of a table of any keys there is nothing to suggest."""
    head, end, kind = HEAD.partition("class Stranger")
    head += (
        "class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):\n    pass\n\n"
        "class Inner(Table, frozen=True):\n    speed: int = 1\n\n"
        "class Outer(Table, frozen=True):\n    inner: Inner = Inner()\n\n"
    )
    body = (
        "    outer: 'Outer' = Outer()\n    shares: 'dict[str, int]' = {}\n"
        "    many: 'dict[str, Inner]' = {}\n"
        "    @hookimpl\n    def preempt(self):\n        return 0.0\n"
    )
    install(site, "nested", body, head=head + end + kind)

    def told(table: dict[str, object]) -> list[tuple[str, str, str]]:
        return problems(chosen("nested", parameters={"nested": table}))

    table: dict[str, object] = {"outer": {"inner": {"speed": 2}}, "shares": {"acme": 3}}
    load_stack(chosen("nested", parameters={"nested": table}))
    assert told({"outer": {"inner": {"sped": 2}}}) == [
        (
            "parameters.nested.outer.inner.sped",
            "policy nested has no parameter outer.inner.sped",
            "did you mean speed?",
        )
    ]
    assert [key for key, _, _ in told({"shares": {"acme": "all"}})] == ["parameters.nested.shares"]
    assert [key for key, _, _ in told({"many": {"x": {"sped": 1}}})] == ["parameters.nested.many"]


def test_all_problems_are_reported_at_once() -> None:
    """One does not hide another."""
    choice = chosen(
        "x", "serverlessllm", decisions={"y": "z"}, parameters={"serverlessllm": {"w": 1}}
    )

    assert {key for key, _, _ in problems(choice)} == {
        "use", "decisions.y", "parameters.serverlessllm.w",
    }  # fmt: skip


def test_only_the_lab_has_an_oracle(site: Path) -> None:
    """A policy that declares to need the true lengths is told them where there are any, cannot be
    chosen elsewhere, and is listed as such."""
    body = (
        "    oracle: 'ClassVar[bool]' = True\n"
        "    known: list = []\n"
        "    def learn_oracle(self, lengths):\n        self.known.append(lengths)\n"
        "    @hookimpl\n    def decode(self, request):\n        return self.known[0][request.id]\n"
    )
    head = HEAD.replace("import math", "from typing import ClassVar\nimport math")
    install(site, "seer", body, head=head)
    (listed,) = [policy for policy in installed() if policy.name == "seer"]

    stack = load_stack(chosen("seer"), lengths={"r": 0})

    assert stack.decode(1.0, request_view(name="r"), 0, [VIEW], FixedCosts()) == 0
    assert stack.faults == []
    assert listed.lab_only
    ((key, wrong, _),) = problems(chosen("serverlessllm", "seer"))
    assert (key, wrong) == ("use", "policy seer needs an oracle: lab only")


# --- whom we trust -------------------------------------------------------------------------------


def test_only_strangers_are_asked_apart(site: Path) -> None:
    """And only if there is a budget: the lab and a replay ask all where they are."""
    install(site, "lifo", phase_of("Phase.DECODE"))
    choice = chosen("lifo", "aegaeon")

    guarded = load_stack(choice, budget_seconds=60.0)
    inline = load_stack(choice)

    assert phase(guarded) is phase(inline) is Phase.DECODE
    assert {state.name: state.apart for state in guarded.states()} == {
        "lifo": True, "aegaeon": False, BUILT_IN: False,
    }  # fmt: skip
    assert not any(state.apart for state in inline.states())
    (thread,) = [t for t in threading.enumerate() if t.name == "policy-lifo"]
    guarded.close()
    thread.join(PATIENCE_SECONDS)


def test_policies_are_looked_for_by_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators may ask at once, and Python forgets what it knew of its path in one thread only."""
    both = threading.Barrier(2)
    met: list[bool] = []

    def forget() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.2)
            met.append(True)

    monkeypatch.setattr("appliance.policies.loader.importlib.invalidate_caches", forget)
    with ThreadPoolExecutor(2) as pool:
        found = [asked.result() for asked in [pool.submit(installed) for _ in range(2)]]

    assert found[0] == found[1]
    assert met == []


def test_the_words_of_policies_hide_no_module() -> None:
    """A policy may import all of them, and still have the time."""
    names: dict[str, object] = {}

    exec("import datetime, time\nfrom appliance.scheduling.policy_api import *", names)

    assert (names["time"], names["datetime"]) == (time, datetime)
