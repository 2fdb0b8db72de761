"""What is an answer to each question of the machine: its exact type, and the candidates offered.

A check gets what a policy answered, with any collection made a tuple, and the views of the
question; it says why the machine could not act on the answer, or None if it can. Types are compared
exactly: `True` is no number here, and a subclass may lie about its fields when it is read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TypeGuard, TypeVar

from appliance.scheduling.policy_api import (
    BatchLimits,
    ClusterView,
    DecodingView,
    Fleet,
    Hold,
    InstanceView,
    Migration,
    Phase,
    Placement,
    PlannedTurn,
    PrefillChoice,
    Refusal,
    RequestView,
)
from appliance.vocabulary import ModelName, Role

LONGEST_SHOWN = 120
LONGEST_TURN_SECONDS = 1e9
"""A quota beyond that, in steps, overflows."""
MOST = 1 << 31
"""Larger integers are no counts, and overflow when they are reckoned with or sent."""

T = TypeVar("T")


def settled(answer: object) -> object:
    """The answer, a tuple if it is a collection: a generator could be looked at only once."""
    if isinstance(answer, Iterable) and not isinstance(answer, str | bytes | Mapping):
        return tuple(answer)
    return answer


def shown(answer: object) -> str:
    """The answer as a reason may quote it."""
    text = repr(answer)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def place(answer: object, cluster: ClusterView) -> str | None:
    """A placement for each instance, and no model without one that may serve it by its placement;
    what its groups exclude is cut from the placements later, and is no fault."""
    wanted = len(cluster.instances)
    if not _all_are(answer, Placement) or len(answer) != wanted:
        return f"{wanted} placements were asked for, not {shown(answer)}"
    models = {model.name for model in cluster.models}
    placed: list[Set[ModelName]] = []
    for placement in answer:
        if type(placement.role) is not Role:
            return f"{shown(placement.role)} is not a role"
        ahead = placement.ahead
        if type(ahead) is not tuple or not all([type(n) is str and n in models for n in ahead]):
            return f"ahead is a tuple of models, not {shown(ahead)}"
        if placement.models is not None:
            if type(placement.models) is not frozenset:
                return f"models are None or a frozenset, not {shown(placement.models)}"
            placed.append(placement.models)
    if len(placed) < wanted:  # one may serve all
        placed.append(models)
    together = set().union(*placed)
    if together != models:
        wrong = shown(sorted(map(str, together ^ models)))
        return f"every model has to be placed, and no other: {wrong}"
    return None


def scale(answer: object, cluster: ClusterView) -> str | None:
    """No more instances than there are, and some for interactive requests."""
    if type(answer) is not Fleet:
        return f"a fleet, not {shown(answer)}"
    counts = (answer.interactive, answer.mixed, answer.batch)
    if not all(_is_count(count) for count in counts) or sum(counts) > len(cluster.instances):
        return f"{shown(counts)} instances of {len(cluster.instances)}"
    if not answer.mixed + answer.interactive:
        return "no instance serves interactive requests"
    return None


def prefill(
    answer: object, now: float, request: RequestView, instances: Sequence[InstanceView]
) -> str | None:
    """A place in the queue of an instance that was offered, a refusal, or a hold until a time after
    now and not after `RequestView.hold_limit`."""
    if type(answer) is Refusal:
        return _reason(answer.reason)
    if type(answer) is Hold:
        return _reason(answer.reason) or _hold(answer, now, request)
    if type(answer) is not PrefillChoice:
        return f"a choice, a refusal or a hold, not {shown(answer)}"
    found = _offered(answer.instance, instances)
    if found is None:
        return _not_offered(answer.instance)
    if answer.group is None:
        return None
    groups = found.groups
    if not _is_count(answer.group) or answer.group >= len(groups):
        return f"instance {answer.instance} has no group {shown(answer.group)}"
    if groups[answer.group].model != request.model:
        return f"group {answer.group} is of another model"
    return None


def _reason(reason: object) -> str | None:
    return None if _is_text(reason) else f"{shown(reason)} is no reason"


def _hold(answer: Hold, now: float, request: RequestView) -> str | None:
    if not _is_number(answer.until) or not now < answer.until <= request.hold_limit:  # nor NaN
        limit = request.hold_limit
        return f"a hold is until after now ({now:g}) and until {limit:g}, not {shown(answer.until)}"
    return None


def decode(answer: object, instances: Sequence[InstanceView]) -> str | None:
    """An instance that was offered."""
    return _not_offered(answer) if _offered(answer, instances) is None else None


def admit(answer: object, instance: InstanceView) -> str | None:
    """Numbers of groups, each once."""
    return _some_of(range(len(instance.groups)), int, answer)


def phase(answer: object) -> str | None:
    """One of the two."""
    return None if type(answer) is Phase else f"{shown(answer)} is not a phase"


def round(answer: object, instance: InstanceView) -> str | None:
    """Turns of models with runnable requests, each model once, the first one firm; turns that are
    not firm may be of any model with work."""
    if not _all_are(answer, PlannedTurn):
        return f"planned turns, not {shown(answer)}"
    if not answer or not all([type(turn.firm) is bool for turn in answer]) or not answer[0].firm:
        return "the first turn of a round is firm"
    runnable = [batch.model for batch in instance.batches if batch.runnable]
    names = [turn.model for turn in answer]
    if not all([type(name) is str for name in names]) or len(set(names)) < len(names):
        return f"each model once, not {shown(names)}"
    reason = _some_of(runnable, str, tuple([turn.model for turn in answer if turn.firm]))
    if reason is not None:
        return reason
    for turn in answer:
        quota = turn.quota_seconds
        if not _is_number(quota) or not 0 < quota <= LONGEST_TURN_SECONDS:
            return f"a quota is above 0 and at most {LONGEST_TURN_SECONDS:g}, not {shown(quota)}"
    return None


def preempt(answer: object) -> str | None:
    """A number from 0 up; infinity, too."""
    if not _is_number(answer) or not answer >= 0:  # NaN is not
        return f"{shown(answer)} is no number of seconds from 0 up"
    return None


def batch(answer: object) -> str | None:
    """At least one request, and chunks and prompts from 0 tokens up."""
    if type(answer) is not BatchLimits:
        return f"limits, not {shown(answer)}"
    counts = (answer.requests, answer.chunk_tokens, answer.prompt_tokens)
    if not all(_is_count(count) for count in counts) or not answer.requests:
        return f"at least one request, and chunks and prompts from 0 tokens up, not {shown(answer)}"
    return None


def flow(
    answer: object, requests: Sequence[DecodingView], others: Sequence[InstanceView]
) -> str | None:
    """Requests that were shown, each once, and instances that were offered and can serve them."""
    if not _all_are(answer, Migration):
        return f"migrations, not {shown(answer)}"
    if not answer:
        return None
    names = tuple([migration.request for migration in answer])
    reason = _some_of([request.id for request in requests], str, names)
    if reason is not None:
        return reason
    able = {request.id: request.instances for request in requests}
    targets = {view.id for view in others}
    for migration in answer:
        if type(migration.target) is not int or migration.target not in targets:
            return _not_offered(migration.target)
        instances = able[migration.request]
        if instances is not None and migration.target not in instances:
            return f"instance {migration.target} cannot serve the model of {migration.request}"
    return None


def evict(answer: object, victims: Sequence[ModelName]) -> str | None:
    """Models that were offered, each once."""
    return _some_of(victims, str, answer)


def prefetch(answer: object, upcoming: Sequence[ModelName]) -> str | None:
    """At most one model, of those that were offered."""
    reason = _some_of(upcoming, str, answer)
    if reason is None and type(answer) is tuple and len(answer) > 1:
        return f"one model at most, not {shown(answer)}"
    return reason


def _offered(answer: object, instances: Sequence[InstanceView]) -> InstanceView | None:
    """The instance that is meant, if it is one of these."""
    if type(answer) is int:
        for view in instances:
            if view.id == answer:
                return view
    return None


def _not_offered(answer: object) -> str:
    return f"instance {shown(answer)} was not offered"


def _some_of(offered: Sequence[object], kind: type, answer: object) -> str | None:
    """Each of the answer was offered, and is in it once."""
    if (
        type(answer) is tuple
        and all([type(item) is kind for item in answer])
        and len(set(answer)) == len(answer)
        and set(offered).issuperset(answer)
    ):
        return None
    return f"some of {shown(list(offered))}, each once, not {shown(answer)}"


def _all_are(answer: object, kind: type[T]) -> TypeGuard[tuple[T, ...]]:
    return type(answer) is tuple and all([type(item) is kind for item in answer])


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= MOST


def _is_text(value: object) -> bool:
    """Whether it can be written down, which half of a surrogate pair cannot."""
    return type(value) is str and value == value.encode(errors="replace").decode()


def _is_number(value: object) -> TypeGuard[float]:
    """A float, or an integer that one can hold."""
    return type(value) is float or (type(value) is int and -MOST <= value <= MOST)
