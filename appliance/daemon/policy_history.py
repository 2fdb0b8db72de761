"""The policies that decide here: the stack, the choices before it, and what became of them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from appliance.errors import PolicyError
from appliance.observability.metrics import Metrics
from appliance.policies.stack import PolicyStack
from appliance.service.autopilot import AutopilotReport
from appliance.service.interface import NothingPrevious, PolicyNotActive
from appliance.service.policy_overview import PolicyReport
from appliance.service.policy_report import (
    Happening,
    InstalledPolicy,
    PolicyChoice,
    PolicyFault,
    PolicyHappening,
)

MAX_PREVIOUS = 8
MAX_HAPPENINGS = 100

log = logging.getLogger("appliance.daemon")


class PolicyWatch:
    """Keeps what an admin wants to know of policies. The daemon says what happens."""

    def __init__(
        self,
        choice: PolicyChoice,
        stack: PolicyStack,
        metrics: Metrics,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self.choice = choice
        self.stack = stack
        self.changes = 0
        """How often others came to decide."""
        self._metrics = metrics
        self._unix_clock = unix_clock
        self._previous: deque[PolicyChoice] = deque(maxlen=MAX_PREVIOUS)
        self._happenings: deque[PolicyHappening] = deque(maxlen=MAX_HAPPENINGS)

    def chosen(self, choice: PolicyChoice, stack: PolicyStack) -> None:
        """Another stack decides from now on."""
        self._previous.append(self.choice)
        self._follow(choice, stack)

    def returned(self, stack: PolicyStack) -> None:
        """The choice before this one decides again, as this stack; this one is forgotten."""
        self._follow(self._previous.pop(), stack)

    def previous(self) -> PolicyChoice:
        """What `returned` goes back to. Raises `NothingPrevious`."""
        if not self._previous:
            raise NothingPrevious
        return self._previous[-1]

    def enable(self, policy: str) -> None:
        """Have it asked again. Raises `PolicyNotActive`."""
        try:
            self.stack.enable(policy)
        except PolicyError as error:
            raise PolicyNotActive(policy, str(error)) from error
        log.info("policy %s is enabled", policy)
        self._note(PolicyHappening(what=Happening.ENABLED, unix_seconds=0.0, policy=policy))

    def note_faults(self) -> None:
        """Count, log and keep what went wrong since the last time. Of faults alike, until the next
        change of policies, the first is logged."""
        for fault in self.stack.take_faults():
            self._metrics.policy_error(fault.policy)
            if self._note(_happening(Happening.FAULT, fault)):
                log.error("policy %s failed at %s: %s", fault.policy, fault.hook, fault.reason)
            if fault.disables:
                self._note(_happening(Happening.DISABLED, fault))
                log.error(
                    "policy %s is disabled: it failed too often in a row; "
                    "`appliance policy enable %s` has it asked again",
                    fault.policy,
                    fault.policy,
                )

    def report(
        self, installed: Sequence[InstalledPolicy], autopilot: AutopilotReport
    ) -> PolicyReport:
        """All that is known, besides what is installed."""
        return PolicyReport(
            installed=tuple(installed),
            active=self.choice,
            decisions=self.stack.asked(),
            policies=self.stack.states(),
            previous=tuple(self._previous),
            events=tuple(self._happenings),
            autopilot=autopilot,
        )

    def _follow(self, choice: PolicyChoice, stack: PolicyStack) -> None:
        self.note_faults()
        self.stack.close()
        self.choice, self.stack = choice, stack
        self.changes += 1
        names = ", ".join(choice.use)
        for hook, name in sorted(choice.decisions.items()):
            names += f"; {hook}: {name}"
        log.info("policies that decide: %s", names)
        self._note(PolicyHappening(what=Happening.CHOSEN, unix_seconds=0.0, policy=names))

    def _note(self, happening: PolicyHappening) -> bool:
        """Whether it is new: what happens again is counted."""
        happening = msgspec.structs.replace(happening, unix_seconds=self._unix_clock())
        place = self._place_of(happening)
        if place is None:
            self._happenings.append(happening)
            return True
        count = self._happenings[place].count + 1
        del self._happenings[place]
        self._happenings.append(msgspec.structs.replace(happening, count=count))
        return False

    def _place_of(self, happening: PolicyHappening) -> int | None:
        """Where the same fault is noted, if only faults were noted since."""
        for place in reversed(range(len(self._happenings))):
            known = self._happenings[place]
            if known.what is not Happening.FAULT or happening.what is not Happening.FAULT:
                return None
            if (known.policy, known.hook) == (happening.policy, happening.hook):
                return place
        return None


def _happening(what: Happening, fault: PolicyFault) -> PolicyHappening:
    return PolicyHappening(
        what=what, unix_seconds=0.0, policy=fault.policy, hook=fault.hook, reason=fault.reason
    )
