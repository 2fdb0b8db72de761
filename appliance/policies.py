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
    Admitted,
    BatchLimits,
    Costs,
    DecodingView,
    Fleet,
    FloorView,
    InstanceView,
    Migration,
    Phase,
    Placement,
    PlannedTurn,
    PrefillChoice,
    Refusal,
    RequestView,
)
from appliance.vocabulary import InstanceId, ModelName, RequestId, Word

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


def load_stack(
    use: Sequence[str],
    parameters: Mapping[str, Parameters],
    lengths: Mapping[RequestId, int] | None = None,
) -> PolicyStack:
    """The stack of these policies, each made from its own table of parameters.

    `lengths` are the true lengths of the outputs, which only the lab has. Raises `PolicyError` for
    a policy that is not installed, a parameter it does not have, or a hook that does not exist.
    """
    made = {name: _load(name, parameters.get(name, {})) for name in (*use, *parameters)}
    for name, policy in made.items():
        _hand_oracle(name, policy, lengths)
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


def _hand_oracle(name: str, policy: object, lengths: Mapping[RequestId, int] | None) -> None:
    """The true lengths, to a policy that declares ``oracle = True`` and to nobody else.

    Raises `PolicyError` where there are none: such a policy must not decide for anybody."""
    if not getattr(policy, "oracle", False):
        return
    if lengths is None:
        raise PolicyError(f"policy {name!r} needs an oracle: lab only")
    policy.learn_oracle(lengths)  # type: ignore[attr-defined]


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

    def place(self, now: float, floor: FloorView, costs: Costs) -> Sequence[Placement]:
        models = {model.name for model in floor.models}

        def check(placements: Sequence[Placement]) -> str | None:
            if len(placements) != len(floor.instances) or not all(
                isinstance(placement, Placement) for placement in placements
            ):
                return f"{len(floor.instances)} placements were asked for, not {placements!r}"
            if any(placement.models is None for placement in placements):
                return None
            placed = {model for placement in placements for model in placement.models or ()}
            if placed != models:
                return f"every model has to be placed, and no other: {sorted(placed ^ models)}"
            return None

        return self._ask("place", check, now=now, floor=floor, costs=costs)

    def scale(self, now: float, floor: FloorView, costs: Costs) -> Fleet:
        def check(fleet: Fleet) -> str | None:
            counts = (fleet.interactive, fleet.mixed, fleet.batch)
            if min(counts) < 0 or sum(counts) > len(floor.instances):
                return f"{counts} instances of {len(floor.instances)}"
            return None if fleet.mixed + fleet.interactive else "nobody serves interactive requests"

        return self._ask("scale", check, now=now, floor=floor, costs=costs)

    def prefill(
        self, now: float, request: RequestView, instances: Sequence[InstanceView], costs: Costs
    ) -> PrefillChoice | Refusal:
        offered = {view.id: view for view in instances}

        def check(choice: PrefillChoice | Refusal) -> str | None:
            if isinstance(choice, Refusal):
                return None
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
        offered = {view.id: view for view in instances}

        def check(chosen: InstanceId) -> str | None:
            return None if chosen in offered else f"instance {chosen} was not offered"

        return self._ask(
            "decode",
            check,
            now=now,
            request=request,
            prefilled_on=prefilled_on,
            instances=instances,
            costs=costs,
        )

    def admit(self, now: float, instance: InstanceView, costs: Costs) -> Admitted:
        def check(order: Admitted) -> str | None:
            if len(set(order)) < len(order) or not set(range(len(instance.groups))).issuperset(
                order
            ):
                return f"an order of {len(instance.groups)} groups, not {order!r}"
            return None

        return self._ask("admit", check, now=now, instance=instance, costs=costs)

    def phase(self, now: float, instance: InstanceView, costs: Costs) -> Phase:
        def check(phase: Phase) -> str | None:
            return None if isinstance(phase, Phase) else f"{phase!r} is not a phase"

        return self._ask("phase", check, now=now, instance=instance, costs=costs)

    def round(self, now: float, instance: InstanceView, costs: Costs) -> Sequence[PlannedTurn]:
        runnable = {batch.model for batch in instance.batches if batch.runnable}

        def check(turns: Sequence[PlannedTurn]) -> str | None:
            models = [turn.model for turn in turns]
            firm = [turn.model for turn in turns if turn.firm]
            if len(set(models)) < len(models) or not runnable.issuperset(firm):
                return f"a round takes some of {sorted(runnable)} once each, not {models}"
            if not turns or not turns[0].firm:
                return "the first turn of a round is firm"
            if not all(0 < turn.quota_seconds < math.inf for turn in turns):
                return "a quota is a finite number of seconds above 0"
            return None

        return self._ask("round", check, now=now, instance=instance, costs=costs)

    def preempt(self, now: float, instance: InstanceView, costs: Costs) -> float:
        def check(seconds: float) -> str | None:
            return None if seconds >= 0 else f"{seconds!r} is no number of seconds from 0 up"

        return self._ask("preempt", check, now=now, instance=instance, costs=costs)

    def batch(
        self, now: float, model: ModelName, instance: InstanceView, costs: Costs
    ) -> BatchLimits:
        def check(limits: BatchLimits) -> str | None:
            if limits.requests < 1 or limits.chunk_tokens < 0:
                return f"at least one request, and chunks from 0 tokens up, not {limits!r}"
            return None

        return self._ask("batch", check, now=now, model=model, instance=instance, costs=costs)

    def flow(
        self,
        now: float,
        instance: InstanceView,
        requests: Sequence[DecodingView],
        others: Sequence[InstanceView],
        costs: Costs,
    ) -> Sequence[Migration]:
        movable = {request.id for request in requests}
        targets = {view.id for view in others}

        def check(flows: Sequence[Migration]) -> str | None:
            names = [flow.request for flow in flows]
            if len(set(names)) < len(names) or not movable.issuperset(names):
                return f"some of the requests shown, once each, not {names}"
            wrong = {flow.target for flow in flows} - targets
            return f"instances {sorted(wrong)} were not offered" if wrong else None

        return self._ask(
            "flow",
            check,
            now=now,
            instance=instance,
            requests=requests,
            others=others,
            costs=costs,
        )

    def evict(
        self, now: float, instance: InstanceView, victims: Sequence[ModelName], costs: Costs
    ) -> Sequence[ModelName]:
        def check(order: Sequence[ModelName]) -> str | None:
            if len(set(order)) < len(order) or not set(victims).issuperset(order):
                return f"an order of {list(victims)}, not {order!r}"
            return None

        return self._ask("evict", check, now=now, instance=instance, victims=victims, costs=costs)

    def prefetch(
        self, now: float, instance: InstanceView, upcoming: Sequence[ModelName], costs: Costs
    ) -> ModelName | None:
        def check(chosen: Sequence[ModelName]) -> str | None:
            if len(chosen) > 1 or not set(upcoming).issuperset(chosen):
                return f"at most one of {list(upcoming)} was asked for, not {chosen!r}"
            return None

        chosen: Sequence[ModelName] = self._ask(
            "prefetch", check, now=now, instance=instance, upcoming=upcoming, costs=costs
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
