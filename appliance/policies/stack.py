"""Asks the policies, in the order of the stack, until one has an answer that the machine can use.

An exception, nonsense or silence costs a policy that question: the next one is asked, at last the
built-in, and a `PolicyFault` names the culprit.
"""

# What an answer is of is looked at when it is given.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Protocol, Self, runtime_checkable

from appliance.errors import PolicyError
from appliance.hookspecs import HOOKS
from appliance.policies import validation
from appliance.policies.guard import (
    BUDGET_SECONDS,
    Busy,
    Check,
    CheckedAnswer,
    GuardedPolicy,
    Overran,
    Views,
)
from appliance.scheduling.policy_api import (
    Admitted,
    BatchLimits,
    ClusterView,
    Costs,
    DecodingView,
    Fleet,
    Hold,
    InstanceView,
    LocalClock,
    Migration,
    Phase,
    Placement,
    PlannedTurn,
    Policy,
    PrefillChoice,
    Refusal,
    RequestView,
)
from appliance.service.policy_report import Missed, PolicyFault, PolicyState
from appliance.vocabulary import InstanceId, ModelName


@runtime_checkable
class Successor(Protocol):
    """A policy that can go on from what another one of its kind knows."""

    def take_over(self, before: Self) -> None:
        """The other one, with other parameters perhaps, decides no more."""


class PolicyStack:
    """Policies in the order they are asked. Implements `appliance.scheduling.policy_api.Policy`.

    Deterministic, as long as its policies are and none is asked apart.
    """

    def __init__(
        self,
        policies: Mapping[str, object],
        order: Mapping[str, Sequence[str]] | None = None,
        *,
        apart: Collection[str] = (),
        ours: Collection[str] = (),
        budget_seconds: float = BUDGET_SECONDS,
        observe: Callable[[str, float], None] | None = None,
    ) -> None:
        """`order` names who is asked for each decision; all, as they come, for one that it does not
        name. The last policy is never disabled: one has to answer.

        Policies of the names `apart` are asked in threads of their own, with a budget; those of the
        names `ours` may take over what policies before them know (`Successor`). `observe` is
        called with each question: its hook, and the seconds until the answer came. Without it no
        clock is read.

        Raises `PolicyError` for a hook that does not exist.
        """
        self._policies = {
            name: GuardedPolicy(name, policy, budget_seconds if name in apart else None)
            for name, policy in policies.items()
        }
        self._order = {
            hook: [
                self._policies[name]
                for name in (order or {}).get(hook, self._policies)
                if hook in self._policies[name].hooks
            ]
            for hook in HOOKS
        }
        self._ours = ours
        self._last = next(reversed(self._policies), None)
        self._observe = observe
        self._seconds = 0.0
        """What the question that is being answered took so far."""
        self._faults: list[PolicyFault] = []
        self._missed: list[Missed] = []
        self._questions = 0
        self._expected: dict[tuple[int, str], Missed] = {}
        self._answered: dict[tuple[str, InstanceId | None], str] = {}
        self._clock = LocalClock()

    # --- what became of the questions ------------------------------------------------------------

    @property
    def faults(self) -> Sequence[PolicyFault]:
        """What went wrong since this was last taken."""
        return self._faults

    def take_faults(self) -> list[PolicyFault]:
        """The faults so far; they are forgotten here."""
        faults, self._faults = self._faults, []
        return faults

    def take_missed(self) -> list[Missed]:
        """The questions since the last call that policies missed. They are counted from there, so
        this marks where an event ends."""
        self._questions = 0
        missed, self._missed = self._missed, []
        return missed

    def expect(self, missed: Sequence[Missed]) -> None:
        """An event begins that was recorded: these questions are missed again."""
        self._questions = 0
        self._expected = {(one.question, one.policy): one for one in missed}

    def enable(self, policy: str) -> None:
        """Ask a policy again that was disabled. Raises `PolicyError` if it is not of the stack."""
        if policy not in self._policies:
            raise PolicyError(f"policy {policy!r} does not decide; {self._names()} do")
        self._policies[policy].enable()

    def states(self) -> tuple[PolicyState, ...]:
        """How each policy fares."""
        return tuple(policy.state() for policy in self._policies.values())

    def answered(self, hook: str, instance: InstanceId) -> str | None:
        """Whose answer was the last one to a question about an instance, or about several."""
        return self._answered.get((hook, instance)) or self._answered.get((hook, None))

    def asked(self) -> dict[str, tuple[str, ...]]:
        """Who is asked, by decision."""
        return {
            hook: tuple(policy.name for policy in policies)
            for hook, policies in self._order.items()
        }

    def close(self) -> None:
        """Nothing is asked any more."""
        for policy in self._policies.values():
            policy.close()

    # --- the questions ---------------------------------------------------------------------------
    # Policies must not change what they are shown: lists of the machine's become tuples.

    def set_clock(self, clock: LocalClock) -> None:
        self._clock = clock

    def take_over(self, before: Policy) -> None:
        """Each of ours goes on from what the one of its kind in the stack before knows: a change of
        a parameter moves nothing."""
        if not isinstance(before, PolicyStack):
            return
        for name in self._ours:
            mine, theirs = self._policies[name].policy, before._policies.get(name)
            if (
                isinstance(mine, Successor)
                and theirs is not None
                and type(mine) is type(theirs.policy)
            ):
                mine.take_over(theirs.policy)

    def place(self, now: float, cluster: ClusterView, costs: Costs) -> Sequence[Placement]:
        check = partial(validation.place, cluster=cluster)
        return self._ask("place", check, now=now, cluster=cluster, costs=costs)

    def scale(self, now: float, cluster: ClusterView, costs: Costs) -> Fleet:
        check = partial(validation.scale, cluster=cluster)
        return self._ask("scale", check, now=now, cluster=cluster, costs=costs)

    def prefill(
        self, now: float, request: RequestView, instances: Sequence[InstanceView], costs: Costs
    ) -> PrefillChoice | Refusal | Hold:
        instances = tuple(instances)
        check = partial(validation.prefill, now=now, request=request, instances=instances)
        return self._ask(
            "prefill", check, now=now, request=request, instances=instances, costs=costs
        )

    def decode(
        self,
        now: float,
        request: RequestView,
        prefilled_on: InstanceId,
        instances: Sequence[InstanceView],
        costs: Costs,
    ) -> InstanceId:
        instances = tuple(instances)
        return self._ask(
            "decode",
            partial(validation.decode, instances=instances),
            now=now,
            request=request,
            prefilled_on=prefilled_on,
            instances=instances,
            costs=costs,
        )

    def admit(self, now: float, instance: InstanceView, costs: Costs) -> Admitted:
        check = partial(validation.admit, instance=instance)
        return self._ask("admit", check, now=now, instance=instance, costs=costs)

    def phase(self, now: float, instance: InstanceView, costs: Costs) -> Phase:
        return self._ask("phase", validation.phase, now=now, instance=instance, costs=costs)

    def round(self, now: float, instance: InstanceView, costs: Costs) -> Sequence[PlannedTurn]:
        check = partial(validation.round, instance=instance)
        return self._ask("round", check, now=now, instance=instance, costs=costs)

    def preempt(self, now: float, instance: InstanceView, costs: Costs) -> float:
        return self._ask("preempt", validation.preempt, now=now, instance=instance, costs=costs)

    def batch(
        self, now: float, model: ModelName, instance: InstanceView, costs: Costs
    ) -> BatchLimits:
        return self._ask(
            "batch", validation.batch, now=now, model=model, instance=instance, costs=costs
        )

    def flow(
        self,
        now: float,
        instance: InstanceView,
        requests: Sequence[DecodingView],
        others: Sequence[InstanceView],
        costs: Costs,
    ) -> Sequence[Migration]:
        requests, others = tuple(requests), tuple(others)
        return self._ask(
            "flow",
            partial(validation.flow, requests=requests, others=others),
            now=now,
            instance=instance,
            requests=requests,
            others=others,
            costs=costs,
        )

    def evict(
        self, now: float, instance: InstanceView, victims: Sequence[ModelName], costs: Costs
    ) -> Sequence[ModelName]:
        victims = tuple(victims)
        check = partial(validation.evict, victims=victims)
        return self._ask("evict", check, now=now, instance=instance, victims=victims, costs=costs)

    def prefetch(
        self, now: float, instance: InstanceView, upcoming: Sequence[ModelName], costs: Costs
    ) -> ModelName | None:
        upcoming = tuple(upcoming)
        check = partial(validation.prefetch, upcoming=upcoming)
        chosen = self._ask(
            "prefetch", check, now=now, instance=instance, upcoming=upcoming, costs=costs
        )
        return chosen[0] if chosen else None

    def _ask(self, hook: str, check: Check, **views: object) -> Any:
        """The first answer of the stack that can be used."""
        views["clock"] = self._clock
        if self._observe is None:
            return self._answer(hook, check, views)
        self._seconds = 0.0
        try:
            return self._answer(hook, check, views)
        finally:
            self._observe(hook, self._seconds)

    def _answer(self, hook: str, check: Check, views: Views) -> Any:
        question, self._questions = self._questions, self._questions + 1
        for policy in self._order[hook]:
            if policy.disabled:
                continue
            try:
                answer, reason = self._put(question, policy, hook, check, views)
            except Busy:
                self._missed.append(Missed(question=question, policy=policy.name, overran=False))
                continue
            except Overran as overrun:
                self._missed.append(Missed(question=question, policy=policy.name, overran=True))
                answer, reason = None, str(overrun)
            if reason is not None:
                self._blame(policy, hook, reason)
            elif answer is not None:
                policy.answered()
                self._answered[hook, getattr(views.get("instance"), "id", None)] = policy.name
                return answer
        raise PolicyError(f"no policy answered {hook}")

    def _put(
        self,
        question: int,
        policy: GuardedPolicy,
        hook: str,
        check: Check,
        views: Views,
    ) -> CheckedAnswer:
        expected = self._expected.get((question, policy.name)) if self._expected else None
        if expected is not None:
            raise Overran("no answer in time") if expected.overran else Busy
        if self._observe is None:
            return policy.ask(hook, check, views)
        began = perf_counter()
        try:
            outcome = policy.ask(hook, check, views)
        except Overran:
            self._took(policy, hook, perf_counter() - began)
            raise
        self._took(policy, hook, perf_counter() - began)
        return outcome

    def _took(self, policy: GuardedPolicy, hook: str, seconds: float) -> None:
        """The policy's own time, and of all who are asked for this answer."""
        policy.took(hook, seconds)
        self._seconds += seconds

    def _blame(self, policy: GuardedPolicy, hook: str, reason: str) -> None:
        policy.disabled = policy.failed(hook) and policy.name != self._last
        self._faults.append(
            PolicyFault(policy=policy.name, hook=hook, reason=reason, disables=policy.disabled)
        )

    def _names(self) -> str:
        return ", ".join(self._policies)
