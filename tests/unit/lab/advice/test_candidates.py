"""What is tried: the current policies first, all others, and parameters within their bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.lab.advice.candidates import MOST_VARIATIONS, Candidate, candidates
from appliance.policies.loader import installed, load_stack
from appliance.service.policy_report import InstalledPolicy, PolicyChoice
from tests.unit.policies.strangers import HEAD, install


def named(found: list[Candidate], policy: str) -> list[Candidate]:
    """Those in which the policy decides, alone."""
    return [one for one in found if one.choice.use == (policy,)]


def test_all_policies_and_their_parameters() -> None:
    """The current policy is first; every other one comes as it ships before any variation; what
    only the lab can have is named with the reason; all of it can be loaded."""
    found, unsuited = candidates(PolicyChoice(use=("aegaeon",)), installed())
    usable = {one.name for one in installed() if not one.lab_only}
    assert found[0] == Candidate(name="aegaeon", choice=PolicyChoice(use=("aegaeon",)))
    assert [one.choice.use[0] for one in found[: len(usable)]] == [
        "aegaeon",
        *sorted(usable - {"aegaeon"}),
    ]
    assert all(not one.changed for one in found[: len(usable)])
    assert all(len(one.changed) == 1 for one in found[len(usable) :])
    assert [one.policy for one in unsuited] == ["serverlessllm_sjf"]
    assert "only the lab does" in unsuited[0].reason
    for policy in usable:
        assert len(named(found, policy)) <= 1 + MOST_VARIATIONS
    assert len({str(one.choice) for one in found}) == len(found)
    for one in found[: len(usable)]:
        load_stack(one.choice).close()


def test_what_is_to_be_tried_first() -> None:
    """Each once, after the current policy: one of the usual candidates comes earlier, another one
    is added; what decides now is no candidate, and what cannot be loaded is named."""
    current = PolicyChoice(use=("aegaeon",))
    usual, _ = candidates(current, installed())
    late = usual[-1].choice
    other = PolicyChoice(use=("serverlessllm", "aegaeon"), parameters={"gone": {"x": 1}})
    gone = PolicyChoice(use=("gone",))
    also = (current, late, other, gone, late)
    found, unsuited = candidates(current, installed(), also=also)
    assert found[:2] == [usual[0], usual[-1]]
    assert found[2].choice == PolicyChoice(use=("serverlessllm", "aegaeon"))
    assert found[2].name == "serverlessllm+aegaeon"
    assert [one for one in found if one != found[2]] == [usual[0], usual[-1], *usual[1:-1]]
    assert "gone" in [one.policy for one in unsuited]
    tuned = PolicyChoice(use=("aegaeon",), parameters={"aegaeon": {"q_max_seconds": 2.75}})
    found, _ = candidates(current, installed(), also=(tuned,))
    assert found[1].changed == {"aegaeon.q_max_seconds": 2.75}
    assert found[1].name == "aegaeon (aegaeon.q_max_seconds = 2.75)"
    assert not found[1].simpler
    found, _ = candidates(tuned, installed(), also=(current,))
    assert (found[1].choice, found[1].simpler) == (current, True)


def test_what_is_set_by_hand_stays() -> None:
    """Every candidate has the parameters of its policy that an admin has set, and varies others;
    a parameter of the current policy is changed within its own stack."""
    by_hand = {"aegaeon": {"q_max_seconds": 3.0}, "serverlessllm": {"max_group": 5}}
    current = PolicyChoice(
        use=("aegaeon",), decisions={"phase": "serverlessllm"}, parameters=by_hand
    )
    found, _ = candidates(current, installed())
    assert (found[0].choice, found[0].name) == (current, "aegaeon with phase = serverlessllm")
    assert len({one.name for one in found}) == len(found)
    for one in named(found, "aegaeon"):
        assert one.choice.parameters["aegaeon"]["q_max_seconds"] == 3.0
        if one.changed:
            assert one.choice.decisions == {"phase": "serverlessllm"}
    alone = named(found, "serverlessllm")[0]
    assert alone.choice == PolicyChoice(
        use=("serverlessllm",), parameters={"serverlessllm": {"max_group": 5}}
    )
    assert PolicyChoice(use=("aegaeon",), parameters={"aegaeon": by_hand["aegaeon"]}) in [
        one.choice for one in found
    ]


PARAMETERS = """
from enum import StrEnum
from typing import Annotated
from msgspec import Meta

class Kind(StrEnum):
    A = "a"
    B = "b"

class Stranger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.75
    count: Annotated[int, Meta(ge=1)] = 1
    off: float = 0.0
    kind: Kind = Kind.A
    flag: bool = False
    words: str = "as they are"
    pair: Annotated[int, Meta(le=3)] = 3
"""


def test_values_are_within_the_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as much, or half of the way to the bound; half as much; the other values of a choice.
    What has no other value is left out."""
    monkeypatch.syspath_prepend(str(tmp_path))
    head = HEAD.partition("class Stranger")[0] + PARAMETERS
    install(tmp_path, "stranger", "    pass\n", head=head)
    found, _ = candidates(PolicyChoice(use=("aegaeon",)), installed())
    assert [one.changed for one in named(found, "stranger")] == [
        {},
        {"stranger.share": 0.875},
        {"stranger.count": 2},
        {"stranger.kind": "b"},
        {"stranger.flag": True},
        {"stranger.pair": 1},
        {"stranger.share": 0.375},
    ]
    assert named(found, "stranger")[1].name == "stranger (stranger.share = 0.875)"


def test_policies_that_cannot_be_used_are_listed() -> None:
    """With what their import says, or why they do not suit this box."""
    broken = InstalledPolicy(name="broken", error="policy broken cannot be imported: boo")
    fine = [one for one in installed() if one.name in ("aegaeon", "muxserve")]
    found, unsuited = candidates(
        PolicyChoice(use=("aegaeon",)),
        [broken, *fine],
        lambda choice: "no room" if "muxserve" in choice.use else "",
    )
    assert {one.choice.use for one in found} == {("aegaeon",)}
    assert [(one.policy, one.reason) for one in unsuited] == [
        ("broken", "policy broken cannot be imported: boo"),
        ("muxserve", "no room"),
    ]
