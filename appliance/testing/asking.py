"""Asks one policy, and keeps what there is to say about it: answers, time, what it broke."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from inspect import signature
from time import perf_counter
from typing import NamedTuple

import msgspec

from appliance.policies import validation
from appliance.policies.guard import hook_callers
from appliance.testing.scenes import HookCall

SLOW_SECONDS = 1.0
MAX_SLOW = 3
"""A policy that took a second so often is not asked any more: a test has to end."""


class PolicyReply(NamedTuple):
    """What a policy made of a question."""

    answer: object
    """With any collection made a tuple; None for no opinion."""
    wrong: str
    """Why the machine could not use it; empty if it could."""
    trace: str
    """Where it was raised, if it was."""
    seconds: float
    spoiled: bool
    """Whether a view was another one afterwards."""


class Asker:
    """One instance of a policy. `hooks` are those it implements."""

    def __init__(self, policy: object) -> None:
        """Raises `PolicyError` for a hook, or an argument of one, that does not exist."""
        self.policy = policy
        self._callers = hook_callers("policy", policy)
        self._slow = 0

    @property
    def hooks(self) -> tuple[str, ...]:
        return tuple(self._callers)

    @property
    def given_up(self) -> bool:
        """It was too slow too often."""
        return self._slow >= MAX_SLOW

    def ask(self, question: HookCall) -> PolicyReply:
        """Put a question of a hook that it implements."""
        before = _fingerprint(question.views)
        answer, wrong, trace = None, "", ""
        began = perf_counter()
        try:
            answer = validation.settled(self._callers[question.hook](question.views))
            seconds = perf_counter() - began
            if answer is not None:
                wrong = _check(question, answer) or ""
        except (Exception, SystemExit) as error:
            seconds = perf_counter() - began
            wrong = "".join(traceback.format_exception_only(error)).strip()
            trace = "".join(traceback.format_exception(error))
        self._slow += seconds > SLOW_SECONDS
        spoiled = _fingerprint(question.views) != before
        return PolicyReply(None if wrong else answer, wrong, trace, seconds, spoiled)


def _fingerprint(views: Mapping[str, object]) -> bytes:
    shown = [view for name, view in views.items() if name != "costs"]
    return msgspec.msgpack.encode(shown)


def _check(question: HookCall, answer: object) -> str | None:
    check: Callable[..., str | None] = getattr(validation, question.hook)
    names = list(signature(check).parameters)[1:]
    return check(answer, **{name: question.views[name] for name in names})
