"""Which policies are tried: every installed one, and each with one parameter changed.

A parameter that is a number is doubled and halved, within the bounds that it declares; a choice has
its other values. What an admin has set by hand for a policy stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from typing import Any

import msgspec

from appliance.errors import PolicyError
from appliance.policies.loader import load_stack
from appliance.service.policy_report import InstalledPolicy, PolicyChoice
from appliance.vocabulary import Word

MOST_VARIATIONS = 16
"""Of a policy; those of the parameters that it declares first."""


class Candidate(Word, frozen=True, kw_only=True):
    """Policies to try; `changed` says which parameters are not as they are, or as they ship."""

    name: str
    choice: PolicyChoice
    changed: Mapping[str, object] = {}
    simpler: bool = False
    """It has the policies of the current choice, and fewer parameters are set."""


class Unsuited(Word, frozen=True, kw_only=True):
    """A policy that is not tried, or was given up, and why."""

    policy: str
    reason: str


def candidates(
    current: PolicyChoice,
    installed: Sequence[InstalledPolicy],
    conflict: Callable[[PolicyChoice], str] = lambda choice: "",
    also: Sequence[PolicyChoice] = (),
) -> tuple[list[Candidate], list[Unsuited]]:
    """All that are tried, and the policies that cannot be. The first one is what the box has; then
    come those of `also`, the other policies as they ship, then variations, one of each policy in
    turn: what the CPU time does not suffice for is the end of the list. `conflict` says why
    policies do not suit this box; an empty text if they do."""
    first = Candidate(name=_named(current), choice=current)
    plain: list[Candidate] = []
    unsuited: list[Unsuited] = []
    varied: list[list[Candidate]] = []
    for policy in installed:
        reason = _cannot_run(policy)
        if reason:
            unsuited.append(Unsuited(policy=policy.name, reason=reason))
            continue
        if policy.name in current.use:
            varied.append(list(_variations(policy, first)))
            if current.use == (policy.name,) and not current.decisions:
                continue
        parameters = {name: t for name, t in current.parameters.items() if name == policy.name}
        alone = PolicyChoice(use=(policy.name,), parameters=parameters)
        base = Candidate(name=policy.name, choice=alone)
        if reason := _refusal(alone, conflict):
            unsuited.append(Unsuited(policy=policy.name, reason=reason))
            continue
        plain.append(base)
        if policy.name not in current.use:
            varied.append(list(_variations(policy, base)))
    turns = chain.from_iterable(zip_longest(*varied))
    found = [*plain, *(one for one in turns if one is not None)]
    early, refused = _early(first, found, also, conflict)
    return [first, *early, *(one for one in found if one not in early)], [*unsuited, *refused]


def _early(
    first: Candidate,
    found: Sequence[Candidate],
    also: Sequence[PolicyChoice],
    conflict: Callable[[PolicyChoice], str],
) -> tuple[list[Candidate], list[Unsuited]]:
    """Candidates that are tried before others, each once, and those that cannot be."""
    early: list[Candidate] = []
    unsuited: list[Unsuited] = []
    for choice in also:
        choice = choice.pruned()
        if any(one.choice.pruned() == choice for one in (first, *early)):
            continue
        there = next((one for one in found if one.choice.pruned() == choice), None)
        if there is not None:
            early.append(there)
        elif reason := _refusal(choice, conflict):
            unsuited.append(Unsuited(policy=_named(choice), reason=reason))
        else:
            early.append(_as_given(choice, first.choice))
    return early, unsuited


def _as_given(choice: PolicyChoice, current: PolicyChoice) -> Candidate:
    """One that is none of the usual ones; its parameters that the current choice does not have
    count as changed."""
    changed = {
        f"{name}.{key}": value
        for name, table in choice.parameters.items()
        for key, value in table.items()
        if (key, value) not in current.parameters.get(name, {}).items()
    }
    words = ", ".join(f"{key} = {_shown(value)}" for key, value in changed.items())
    name = _named(choice) + (f" ({words})" if words else "")
    simpler = choice.is_simpler_than(current)
    return Candidate(name=name, choice=choice, changed=changed, simpler=simpler)


def _named(choice: PolicyChoice) -> str:
    """For people: who decides, and who decides what instead."""
    others = ", ".join(f"{hook} = {name}" for hook, name in choice.decisions.items())
    return "+".join(choice.use) + (f" with {others}" if others else "")


def _cannot_run(policy: InstalledPolicy) -> str:
    """Why a daemon cannot have it; empty if it can."""
    if policy.error:
        return policy.error
    if policy.lab_only:
        return "it needs to know how long answers will be; only the lab does"
    return ""


def _refusal(choice: PolicyChoice, conflict: Callable[[PolicyChoice], str]) -> str:
    """Why no stack can be made of it, or it does not suit; empty if it can be replayed."""
    try:
        load_stack(choice).close()
        return conflict(choice)
    except PolicyError as error:
        return str(error)


def _variations(policy: InstalledPolicy, base: Candidate) -> Iterator[Candidate]:
    """The candidate with one parameter of the policy changed. What the policy refuses is found when
    it is replayed: to make every stack here would take as long as some replays."""
    tables = base.choice.parameters
    by_hand = tables.get(policy.name, {})
    values = ((key, value) for key, value in _values(policy.parameters) if key not in by_hand)
    for key, value in islice(values, MOST_VARIATIONS):
        parameters = {**tables, policy.name: {**by_hand, key: value}}
        yield Candidate(
            name=f"{base.name} ({policy.name}.{key} = {_shown(value)})",
            choice=msgspec.structs.replace(base.choice, parameters=parameters),
            changed={f"{policy.name}.{key}": value},
        )


def _values(schema: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Other values of the parameters of a JSON Schema: one of each parameter, then the second."""
    fields = _resolved(schema, schema).get("properties", {})
    lists = [
        [(key, value) for value in _other_values(_resolved(field, schema))]
        for key, field in fields.items()
    ]
    for turn in zip_longest(*lists):
        yield from (one for one in turn if one is not None)


def _resolved(field: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """What a reference within the schema names, with what is said next to the reference."""
    name = str(field.get("$ref", "")).rpartition("/")[2]
    named = schema.get("$defs", {}).get(name, {}) if name else {}
    return {**named, **{key: value for key, value in field.items() if key != "$ref"}}


def _other_values(field: Mapping[str, Any]) -> list[object]:
    default = field.get("default")
    if isinstance(default, bool):
        return [not default]
    if "enum" in field:
        return [value for value in field["enum"] if value != default]
    if field.get("type") not in ("integer", "number") or not isinstance(default, int | float):
        return []
    whole = field["type"] == "integer"
    wanted = [_up(default, field), default / 2]
    values = [int(value) if whole else round(value, 9) for value in wanted]
    return [value for value in values if value != default and _allowed(value, field)]


def _up(default: float, field: Mapping[str, Any]) -> float:
    """Twice as much, or half of the way to the largest value if that is less."""
    most = min(field.get("maximum", 2 * default), field.get("exclusiveMaximum", 2 * default))
    return 2 * default if _allowed(2 * default, field) else float(default + most) / 2


def _allowed(value: float, field: Mapping[str, Any]) -> bool:
    least, most = field.get("minimum", value), field.get("maximum", value)
    above, below = field.get("exclusiveMinimum", -math.inf), field.get("exclusiveMaximum", math.inf)
    return bool(least <= value <= most and above < value < below)


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
