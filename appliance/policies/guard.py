"""A policy behind its guard: whatever it does costs it a question, and the daemon a bounded time.

Ours are asked where the daemon runs. A stranger's is asked in a thread of its own: one that does
not answer within its budget is left alone with the question, is not asked again before it is done
with it, and what it says then is dropped. Three faults in a row, and it is asked no more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from math import ceil
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, TypeAlias

import pluggy

from appliance.errors import PolicyError
from appliance.hookspecs import HOOKS, PROJECT, PolicySpec
from appliance.policies import validation
from appliance.service.policy_report import DecisionStats, PolicyState

BUDGET_SECONDS = 0.05
MAX_FAULTS_IN_A_ROW = 3

Views: TypeAlias = Mapping[str, object]
Check: TypeAlias = Callable[[Any], str | None]
Ask: TypeAlias = Callable[[Views], object]


class CheckedAnswer(NamedTuple):
    """An answer that was checked, or the reason why there is none. Both None: no opinion."""

    answer: object = None
    reason: str | None = None


class Overran(Exception):
    """No answer within the budget."""


class Busy(Exception):
    """Not asked: still at an earlier question."""


class GuardedPolicy:
    """A policy, and what its answers were worth. `hooks` are the decisions that it makes."""

    def __init__(self, name: str, policy: object, budget_seconds: float | None = None) -> None:
        """With a budget it is asked in a thread of its own.

        Raises `PolicyError` if it has a hook, or a hook an argument, that does not exist.
        """
        self.name = name
        self.policy = policy
        self.disabled = False
        self._faults_in_a_row = 0
        self._hooks = hook_callers(name, policy)
        self._stats = {hook: PolicyStats() for hook in self._hooks}
        self._thread = None if budget_seconds is None else _Thread(name, budget_seconds)

    @property
    def hooks(self) -> tuple[str, ...]:
        return tuple(self._hooks)

    def ask(self, hook: str, check: Check, views: Views) -> CheckedAnswer:
        """Put a question. Raises `Overran` or `Busy`, in a thread of its own only."""
        if self._thread is None:
            self._stats[hook].calls += 1
            return _attempt(self._hooks[hook], check, views)
        self._thread.make_ready()
        self._stats[hook].calls += 1
        return self._thread.ask(self._hooks[hook], check, views)

    def took(self, hook: str, seconds: float) -> None:
        """How long `ask` took, if calls are timed."""
        self._stats[hook].took(seconds)

    def answered(self) -> None:
        """It gave an answer that could be used."""
        self._faults_in_a_row = 0

    def failed(self, hook: str) -> bool:
        """It failed; whether that was once too often."""
        self._stats[hook].faults += 1
        self._faults_in_a_row += 1
        return self._faults_in_a_row >= MAX_FAULTS_IN_A_ROW

    def enable(self) -> None:
        """Ask it again, as if it had never failed."""
        self.disabled = False
        self._faults_in_a_row = 0

    def close(self) -> None:
        """It is not asked any more; its thread ends when it is done."""
        if self._thread is not None:
            self._thread.close()

    def state(self) -> PolicyState:
        all_stats = self._stats.values()
        return PolicyState(
            name=self.name,
            calls=sum(stats.calls for stats in all_stats),
            faults=sum(stats.faults for stats in all_stats),
            faults_in_a_row=self._faults_in_a_row,
            disabled=self.disabled,
            apart=self._thread is not None,
            busy=self._thread is not None and self._thread.busy,
            decisions={
                hook: stats.report()
                for hook, stats in self._stats.items()
                if stats.calls or stats.faults
            },
        )


class _Thread:
    """Where a stranger's policy is asked: one question at a time, begun with the first."""

    def __init__(self, name: str, budget_seconds: float) -> None:
        self._name = name
        self._budget_seconds = budget_seconds
        self._questions: SimpleQueue[tuple[Ask, Check, Views] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[CheckedAnswer] = SimpleQueue()
        self._late = False
        """A call is still running whose answer is not awaited any more."""
        self._began = False

    @property
    def busy(self) -> bool:
        return self._late and self._outcomes.empty()

    def make_ready(self) -> None:
        """Drop a late answer. Raises `Busy` if it is still to come."""
        if self._late:
            try:
                self._outcomes.get_nowait()
            except Empty:
                raise Busy from None
            self._late = False

    def ask(self, hook: Ask, check: Check, views: Views) -> CheckedAnswer:
        """Put a question to a thread that is ready. Raises `Overran`."""
        if not self._began:
            self._began = True
            threading.Thread(target=self._run, name=f"policy-{self._name}", daemon=True).start()
        self._questions.put((hook, check, views))
        try:
            return self._outcomes.get(timeout=self._budget_seconds)
        except Empty:
            self._late = True
            raise Overran(f"no answer within {self._budget_seconds:g} s") from None

    def close(self) -> None:
        self._questions.put(None)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            try:
                outcome = _attempt(*question)
            except BaseException as error:  # such as an exit: not from here
                outcome = CheckedAnswer(reason=_told(error))
            # The views of the last question are not to be held until the next.
            del question
            self._outcomes.put(outcome)


def _attempt(hook: Ask, check: Check, views: Views) -> CheckedAnswer:
    """Ask, and check: what an answer does when it is looked at is its policy's fault, too."""
    try:
        answer = hook(views)
        if answer is None:
            return NO_OPINION
        answer = validation.settled(answer)
        return CheckedAnswer(answer, check(answer))
    except Exception as error:
        return CheckedAnswer(reason=_told(error))


NO_OPINION = CheckedAnswer()


def _told(error: BaseException) -> str:
    try:
        return validation.shown(error)
    except Exception:
        return type(error).__name__


def hook_callers(name: str, policy: object) -> dict[str, Ask]:
    """The hooks that a policy implements. One manager each, so that an answer has an author."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(PolicySpec)
    try:
        manager.register(policy, name=name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PolicyError(f"policy {name}: {error}") from error
    callers = {hook: getattr(manager.hook, hook) for hook in HOOKS}
    return {hook: _asking(caller) for hook, caller in callers.items() if caller.get_hookimpls()}


def _asking(caller: pluggy.HookCaller) -> Ask:
    """A call of the hook's only implementation: the call loop of pluggy takes longer than many an
    answer. Wrappers, and arguments with defaults, need that loop."""
    (found,) = caller.get_hookimpls()
    if found.wrapper or found.hookwrapper or found.kwargnames:
        return lambda views: caller(**views)
    function, names = found.function, found.argnames
    return lambda views: function(*[views[name] for name in names])


RECENT: Final = 256
"""Questions of which quantiles are reported."""


class PolicyStats:
    """Counts. A question costs O(1); the quantiles are sorted out when they are asked for."""

    def __init__(self) -> None:
        self.calls = 0
        self.faults = 0
        self._seconds = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)

    def took(self, seconds: float) -> None:
        """A question was answered, or not in time, after so long."""
        self._seconds += seconds
        self._recent.append(seconds)

    def report(self) -> DecisionStats:
        recent = sorted(self._recent)
        return DecisionStats(
            calls=self.calls,
            faults=self.faults,
            seconds=self._seconds,
            p50_seconds=_quantile(recent, 0.5),
            p99_seconds=_quantile(recent, 0.99),
            max_seconds=_quantile(recent, 1.0),
        )


def _quantile(ordered: list[float], share: float) -> float | None:
    """The least one that so many are not above."""
    return ordered[ceil(share * len(ordered)) - 1] if ordered else None
