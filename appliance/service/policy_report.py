"""What is said about policies: which ones decide, which are installed, what became of them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from appliance.vocabulary import Event, Word


class PolicyChoice(Word, frozen=True, forbid_unknown_fields=True):
    """Which policies decide. For each decision the one that `decisions` names for it is asked
    first, then those of `use` in order, at last the built-in. Each is made from its `parameters`.
    """

    use: tuple[str, ...]
    decisions: Mapping[str, str] = {}
    """Policies by the name of a hook."""
    parameters: Mapping[str, Mapping[str, object]] = {}

    def pruned(self) -> PolicyChoice:
        """The same choice without parameters of policies that it does not have: they change
        nothing."""
        names = {*self.use, *self.decisions.values()}
        tables = {n: table for n, table in self.parameters.items() if n in names and table}
        return PolicyChoice(use=self.use, decisions=self.decisions, parameters=tables)

    def is_simpler_than(self, other: PolicyChoice) -> bool:
        """Whether it is the other one without some of its parameters."""
        mine, theirs = self.pruned(), other.pruned()
        fewer = mine != theirs and all(
            (key, value) in theirs.parameters.get(name, {}).items()
            for name, table in mine.parameters.items()
            for key, value in table.items()
        )
        return fewer and (mine.use, mine.decisions) == (theirs.use, theirs.decisions)


class PolicyFault(Word, frozen=True):
    """A policy failed to answer a question: it raised, answered nonsense, or took too long."""

    policy: str
    hook: str
    reason: str
    disables: bool = False
    """It is not asked any more: this was one fault in a row too many."""


class Missed(Word, frozen=True):
    """Question number `question` (from 0) of an event had no answer of the policy in time: it
    overran its budget, or was not asked because it still had not answered an earlier one."""

    question: int
    policy: str
    overran: bool


class PolicyChosen(Event, frozen=True):
    """Another stack decides from now on."""

    choice: PolicyChoice


class PolicyEnabled(Event, frozen=True):
    """A policy that was disabled is asked again."""

    policy: str


# --- what an admin is shown ----------------------------------------------------------------------


class InstalledPolicy(Word, frozen=True):
    """A policy that could be used; `error` says why it could not. `shipped` ones are ours."""

    name: str
    about: str = ""
    distribution: str = ""
    version: str = ""
    shipped: bool = False
    lab_only: bool = False
    """It needs to know how long outputs will be, which only the lab does."""
    api_version: int = 0
    """Of the hooks it was written for."""
    hooks: tuple[str, ...] = ()
    """The decisions that it makes."""
    parameters: Mapping[str, object] = {}
    """JSON Schema of its table of parameters."""
    error: str = ""


class DecisionStats(Word, frozen=True):
    """How a policy of the stack fares at one decision. Times are until there was an answer that was
    looked at, or none was waited for any more; None before the first one."""

    calls: int
    faults: int
    seconds: float
    """Of all calls together."""
    p50_seconds: float | None
    """Of the last 256 calls, as the next two."""
    p99_seconds: float | None
    max_seconds: float | None


class PolicyState(Word, frozen=True):
    """How a policy of the stack fares."""

    name: str
    calls: int
    faults: int
    faults_in_a_row: int
    disabled: bool
    apart: bool
    """Whether it is asked in a thread of its own."""
    busy: bool
    """Whether it still works at a question whose answer is not waited for any more."""
    decisions: Mapping[str, DecisionStats] = {}
    """Those of its decisions that it was asked for."""


class Happening(StrEnum):
    """What can happen to policies."""

    CHOSEN = "chosen"
    FAULT = "fault"
    DISABLED = "disabled"
    ENABLED = "enabled"


class PolicyHappening(Word, frozen=True):
    """Something that happened to policies: `count` times, last at `unix_seconds`."""

    what: Happening
    unix_seconds: float
    policy: str = ""
    hook: str = ""
    reason: str = ""
    count: int = 1
