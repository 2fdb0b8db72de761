"""Finds the installed policies, and makes stacks of them.

A policy is what an entry point of the group `appliance.policies` names: a `msgspec` struct whose
fields are its parameters, made from its table. An unknown policy, decision or parameter, a misspelt
hook, and one written for another version of the hooks are errors when the stack is made.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import msgspec
import msgspec.inspect

from appliance.errors import ChoiceProblem, PolicyChoiceError, PolicyError, nearest
from appliance.hookspecs import API_VERSION, ENTRY_POINTS, HOOKS, PROJECT
from appliance.policies.guard import BUDGET_SECONDS, GuardedPolicy
from appliance.policies.stack import PolicyStack
from appliance.service.policy_report import InstalledPolicy, PolicyChoice
from appliance.vocabulary import RequestId

FALLBACK = "aegaeon"
"""The built-in that answers when no policy of the stack does; it answers every question."""

_FIELD = re.compile(r"`(?:\$\.)?([A-Za-z0-9_]+)[^`]*`$")
"""Where msgspec names the field at fault."""
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)` - at `\$\.(?P<path>[A-Za-z0-9_.]+)`$")
"""How it names one that a table in the parameters does not have."""

_looking: Final = threading.Lock()


def available() -> list[str]:
    """Names of the installed policies."""
    return sorted(_entries())


def installed() -> list[InstalledPolicy]:
    """The installed policies, those that cannot be used, too. Imports them."""
    _look_again()
    return [_describe(name, entry) for name, entry in sorted(_entries().items())]


def load_stack(
    choice: PolicyChoice,
    *,
    lengths: Mapping[RequestId, int] | None = None,
    budget_seconds: float | None = None,
    observe: Callable[[str, float], None] | None = None,
) -> PolicyStack:
    """The stack that was chosen, with the built-in behind it.

    With a budget, policies that are not ours are asked in threads of their own and have so long to
    answer; without, everything is deterministic. `observe` gets every question, its hook and
    how long it took. `lengths` are the true lengths of the outputs, which only the lab has: they go
    to policies that declare ``oracle = True`` and to no others.

    Raises `PolicyChoiceError` with everything that is wrong with the choice.
    """
    _look_again()
    entries = _entries()
    problems: list[ChoiceProblem] = []
    made: dict[str, object] = {}
    tried: set[str] = set()
    wanted = dict.fromkeys([*choice.use, *choice.decisions.values()])
    for key, name in _mentions(choice):
        if name in tried:
            continue
        tried.add(name)
        try:
            made[name] = _make(name, entries, choice.parameters.get(name, {}))
            _hand_oracle(name, made[name], lengths)
        except _UnusableParameter as error:
            where = ("parameters", name, *error.field)
            problems.append(ChoiceProblem(where, str(error), error.remedy))
        except _NotInstalled as error:
            problems.append(ChoiceProblem(key, str(error), nearest(name, sorted(entries))))
        except PolicyError as error:
            problems.append(ChoiceProblem(key, str(error), "mend it or use another"))
    for name in dict.fromkeys(name for name in choice.use if choice.use.count(name) > 1):
        problems.append(ChoiceProblem(("use",), f"{name} is listed twice", "list it once"))
    for hook in choice.decisions:
        if hook not in HOOKS:
            problems.append(
                ChoiceProblem(
                    ("decisions", hook), "there is no such decision", nearest(hook, HOOKS)
                )
            )
    if problems:
        raise PolicyChoiceError(problems)
    fallback = f"built-in {FALLBACK}"
    order = {hook: dict.fromkeys([*_named(choice, hook), *choice.use, fallback]) for hook in HOOKS}
    return PolicyStack(
        # As it ships: an answer that cannot be used must not come back because of its parameters.
        {name: made[name] for name in wanted} | {fallback: _make(FALLBACK, entries, {})},
        {hook: tuple(names) for hook, names in order.items()},
        apart=[n for n in wanted if not _shipped(entries[n])] if budget_seconds is not None else (),
        ours=[name for name in wanted if _shipped(entries[name])],
        budget_seconds=budget_seconds or BUDGET_SECONDS,
        observe=observe,
    )


def _mentions(choice: PolicyChoice) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every policy that the choice names, and where."""
    for name in choice.use:
        yield ("use",), name
    for hook, name in choice.decisions.items():
        yield ("decisions", hook), name
    for name in choice.parameters:
        yield ("parameters", name), name


def _named(choice: PolicyChoice, hook: str) -> list[str]:
    return [choice.decisions[hook]] if hook in choice.decisions else []


class _NotInstalled(PolicyError):
    """There is no policy of that name."""


class _UnusableParameter(PolicyError):
    """A policy refuses its table of parameters: `field` is the key at fault, if it is one, and
    `remedy` what to do."""

    def __init__(self, message: str, field: tuple[str, ...], remedy: str) -> None:
        super().__init__(message)
        self.field = field
        self.remedy = remedy


def _look_again() -> None:
    """See what was installed meanwhile. Python's own is not made for several threads at once."""
    with _looking:
        importlib.invalidate_caches()


def _entries() -> dict[str, EntryPoint]:
    """The entry points by name. Ours cannot be replaced by another of the same name."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name not in found or _shipped(entry):
            found[entry.name] = entry
    return found


def _shipped(entry: EntryPoint) -> bool:
    return entry.dist is not None and entry.dist.name == PROJECT


def _make(name: str, entries: Mapping[str, EntryPoint], parameters: Mapping[str, object]) -> object:
    if name not in entries:
        raise _NotInstalled(f"no policy {name!r} is installed")
    kind = _load(name, entries[name])
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    unknown = next((key for key in parameters if key not in known), None)
    if unknown is not None and kind.__struct_config__.forbid_unknown_fields:
        wrong = f"policy {name} has no parameter {unknown}"
        raise _UnusableParameter(wrong, (unknown,), nearest(unknown, known))
    try:
        made = msgspec.convert(parameters, kind)
    except msgspec.ValidationError as error:
        unknown_key = _UNKNOWN.search(str(error))
        if unknown_key is not None:
            path = tuple(unknown_key["path"].split("."))
            wrong = f"policy {name} has no parameter {unknown_key['path']}.{unknown_key['name']}"
            known = _keys_at(kind, path)
            raise _UnusableParameter(
                wrong, (*path, unknown_key["name"]), nearest(unknown_key["name"], known)
            ) from error
        field = _FIELD.search(str(error))
        remedy = f"correct it or remove it from [policy.{name}]"
        raise _UnusableParameter(str(error), (field[1],) if field else (), remedy) from error
    except Exception as error:
        raise PolicyError(f"policy {name} cannot be made: {error!r}") from error
    GuardedPolicy(name, made)  # its hooks exist
    return made


def _keys_at(kind: type[msgspec.Struct], path: Sequence[str]) -> list[str]:
    """The keys of the table at this path in the parameters, as far as they are said."""
    found = msgspec.inspect.type_info(kind)
    for key in path:
        fields = found.fields if isinstance(found, msgspec.inspect.StructType) else ()
        found = next((f.type for f in fields if f.encode_name == key), msgspec.inspect.AnyType())
    return [f.encode_name for f in getattr(found, "fields", ())]


def _hand_oracle(name: str, policy: object, lengths: Mapping[RequestId, int] | None) -> None:
    """Raises `PolicyError` where there are none: who knows the true lengths must not decide for
    any user but the lab."""
    if not _is_oracle(policy):
        return
    if lengths is None:
        raise PolicyError(f"policy {name} needs an oracle: lab only")
    policy.learn_oracle(lengths)  # type: ignore[attr-defined]


def _is_oracle(policy: object) -> bool:
    return getattr(policy, "oracle", False) is True


def _load(name: str, entry: EntryPoint) -> type[msgspec.Struct]:
    """What makes the policy. Importing it runs a stranger's code: it may raise anything."""
    try:
        kind = entry.load()
    except Exception as error:
        raise PolicyError(f"policy {name} cannot be imported: {error!r}") from error
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        raise PolicyError(f"policy {name}: {entry.value} is not a msgspec.Struct class")
    version = _api_version(kind)
    if version != API_VERSION:
        raise PolicyError(
            f"policy {name} was written for version {version} of the hooks, this is {API_VERSION}"
        )
    return kind


def _api_version(kind: type) -> int:
    version = getattr(kind, "api_version", API_VERSION)
    return version if type(version) is int else 0


def _describe(name: str, entry: EntryPoint) -> InstalledPolicy:
    known: dict[str, Any] = {"name": name, "shipped": _shipped(entry)}
    if entry.dist is not None:
        known |= {"distribution": entry.dist.name, "version": entry.dist.version}
    try:
        kind = _load(name, entry)
        hooks = GuardedPolicy(name, kind).hooks
        schema = msgspec.json.schema(kind)
    except Exception as error:
        return InstalledPolicy(**known, error=str(error))
    return InstalledPolicy(
        **known,
        about=_about(kind),
        lab_only=_is_oracle(kind),
        api_version=_api_version(kind),
        hooks=hooks,
        parameters=schema,
    )


def _about(kind: type) -> str:
    """The first line of what its module says of itself, or of its own words."""
    module = importlib.import_module(kind.__module__)
    words = (module.__doc__ or kind.__doc__ or "").strip().splitlines()
    return words[0] if words else ""
