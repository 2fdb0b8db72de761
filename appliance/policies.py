"""Asks the policies: in the order of the stack, with every answer checked and a built-in behind.

A hook that raises or answers nonsense costs its policy that question: the next one is asked, at
last the built-in, and a `PolicyFault` names the culprit. A misspelt hook, an unknown policy or a
bad parameter is an error when the stack is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TypeVar

import msgspec
import pluggy

from appliance.errors import PolicyError
from appliance.hookspecs import ENTRY_POINTS, PROJECT, PolicySpec
from appliance.scheduling.questions import (
    InstanceView,
    Phase,
    PlannedTurn,
    PrefillChoice,
    RequestView,
)
from appliance.vocabulary import InstanceId, ModelName, Role, Word

FALLBACK = "aegaeon"
"""The built-in that answers when no policy of the stack does; it answers every question."""

Parameters = Mapping[str, object]
A = TypeVar("A")


class PolicyFault(Word, frozen=True):
    """A policy failed to answer a question."""

    policy: str
    hook: str
    reason: str


def available() -> list[str]:
    """Names of the installed policies."""
    return sorted(entry.name for entry in entry_points(group=ENTRY_POINTS))


def load_stack(use: Sequence[str], parameters: Mapping[str, Parameters]) -> PolicyStack:
    """The stack of these policies, each made from its own table of parameters.

    Raises `PolicyError` for a policy that is not installed, a parameter it does not have, or a
    hook that does not exist.
    """
    made = {name: _load(name, parameters.get(name, {})) for name in (*use, *parameters)}
    stack = {name: made[name] for name in use}
    # As it ships: an answer that cannot be used must not come back because of its parameters.
    return PolicyStack(stack | {f"built-in {FALLBACK}": _load(FALLBACK, {})})


def _load(name: str, parameters: Parameters) -> object:
    found = [entry for entry in entry_points(group=ENTRY_POINTS) if entry.name == name]
    if not found:
        raise PolicyError(f"no policy {name!r} is installed; there are: {', '.join(available())}")
    try:
        made = found[0].load()
    except (ImportError, AttributeError) as error:
        raise PolicyError(f"policy {name!r} cannot be imported: {error}") from error
    try:
        return msgspec.convert(parameters, made)
    except msgspec.ValidationError as error:
        raise PolicyError(f"policy.{name}: {error}") from error


class PolicyStack:
    """Policies in the order they are asked. Implements `appliance.scheduling.questions.Policy`."""

    def __init__(self, policies: Mapping[str, object]) -> None:
        self.faults: list[PolicyFault] = []
        """What went wrong since whoever watches last took it."""
        self._managers = {name: _manager(name, policy) for name, policy in policies.items()}

    def take_faults(self) -> list[PolicyFault]:
        """The faults so far; they are forgotten here."""
        faults, self.faults = self.faults, []
        return faults

    def assign_roles(self, instances: int) -> Sequence[Role]:
        def check(roles: Sequence[Role]) -> str | None:
            if len(roles) != instances or not all(isinstance(role, Role) for role in roles):
                return f"{instances} roles were asked for, not {roles!r}"
            return None

        return self._ask("assign_roles", check, instances=instances)

    def choose_prefill(
        self, request: RequestView, instances: Sequence[InstanceView]
    ) -> PrefillChoice:
        offered = {view.id: view for view in instances}

        def check(choice: PrefillChoice) -> str | None:
            if choice.instance not in offered:
                return f"instance {choice.instance} was not offered"
            groups = offered[choice.instance].groups
            if choice.group is None:
                return None
            if not 0 <= choice.group < len(groups):
                return f"instance {choice.instance} has no group {choice.group}"
            if groups[choice.group].model != request.model:
                return f"group {choice.group} is of another model"
            return None

        return self._ask("choose_prefill", check, request=request, instances=instances)

    def choose_decode(
        self, request: RequestView, prefilled_on: InstanceId, instances: Sequence[InstanceView]
    ) -> InstanceId:
        offered = {view.id for view in instances}

        def check(chosen: InstanceId) -> str | None:
            return None if chosen in offered else f"instance {chosen} was not offered"

        return self._ask(
            "choose_decode",
            check,
            request=request,
            prefilled_on=prefilled_on,
            instances=instances,
        )

    def choose_phase(self, instance: InstanceView) -> Phase:
        def check(phase: Phase) -> str | None:
            return None if isinstance(phase, Phase) else f"{phase!r} is not a phase"

        return self._ask("choose_phase", check, instance=instance)

    def plan_round(self, instance: InstanceView) -> Sequence[PlannedTurn]:
        runnable = {batch.model for batch in instance.batches if batch.runnable}

        def check(turns: Sequence[PlannedTurn]) -> str | None:
            models = [turn.model for turn in turns]
            if not models or len(set(models)) < len(models) or not runnable.issuperset(models):
                return f"a round takes some of {sorted(runnable)} once each, not {models}"
            if not all(0 < turn.quota_seconds < math.inf for turn in turns):
                return "a quota is a finite number of seconds above 0"
            return None

        return self._ask("plan_round", check, instance=instance)

    def choose_prefetch(
        self, instance: InstanceView, upcoming: Sequence[ModelName]
    ) -> ModelName | None:
        def check(chosen: Sequence[ModelName]) -> str | None:
            if len(chosen) > 1 or not set(upcoming).issuperset(chosen):
                return f"at most one of {list(upcoming)} was asked for, not {chosen!r}"
            return None

        chosen: Sequence[ModelName] = self._ask(
            "choose_prefetch", check, instance=instance, upcoming=upcoming
        )
        return chosen[0] if chosen else None

    def _ask(self, hook: str, check: Callable[[A], str | None], **views: object) -> A:
        """The first valid answer of the stack."""
        for name, manager in self._managers.items():
            # A policy is a stranger's code: whatever it raises must not reach the machine.
            try:
                answer = getattr(manager.hook, hook)(**views)
                if isinstance(answer, Iterable) and not isinstance(answer, str):
                    answer = tuple(answer)  # a generator could be looked at only once
                reason = None if answer is None else check(answer)
            except Exception as error:
                self.faults.append(PolicyFault(policy=name, hook=hook, reason=repr(error)))
                continue
            if reason is not None:
                self.faults.append(PolicyFault(policy=name, hook=hook, reason=reason))
            elif answer is not None:
                return answer  # type: ignore[no-any-return]
        raise PolicyError(f"no policy answered {hook}")


def _manager(name: str, policy: object) -> pluggy.PluginManager:
    """One manager per policy, so that an answer has an author."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(PolicySpec)
    try:
        manager.register(policy, name=name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PolicyError(f"policy {name}: {error}") from error
    return manager
