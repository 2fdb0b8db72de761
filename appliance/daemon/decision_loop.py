"""Runs the machine: events in, one after the other; its commands out, observed and performed.

Every event is handled, and its commands are performed, before the next one is taken. Nothing here
waits, so the order is total; it is what the journal has.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Final

import msgspec

from appliance.daemon.autopilot.control import Seen
from appliance.daemon.observers import Observer
from appliance.daemon.policy_history import PolicyWatch
from appliance.journal import Journal, Setup
from appliance.observability.metrics import Metrics
from appliance.observability.timeline import HOOKS, MOST_PLANNED
from appliance.policies.stack import PolicyStack
from appliance.scheduling.machine import Machine
from appliance.service.autopilot import Promises
from appliance.service.event_log import EventLog, NoticeKind
from appliance.service.interface import Decision, shutting_down
from appliance.service.policy_report import PolicyChoice, PolicyChosen, PolicyEnabled
from appliance.vocabulary import ClockSet, Command, Event, InstanceId, Ticked

log = logging.getLogger("appliance.daemon")

CLOCK_TOLERANCE_SECONDS: Final = 1.0
"""The machine is given the clock on the wall anew if what it has of it is off by more."""
ZONE_SECONDS: Final = 900.0
"""The offset of local time is looked up so often: zones change it at quarters of an hour."""


class Hands(msgspec.Struct, frozen=True):
    """What the loop calls. `perform` carries a command out; `decided` is called between an event
    and its commands, `performed` after them; `failed` when the machine contradicts itself."""

    perform: Callable[[Command], None]
    decided: Callable[[], None]
    performed: Callable[[], None]
    failed: Callable[[Exception], None]


class DecisionLoop:
    """Owns the machine, its policies, its journal and its alarm. Used on one event loop; an event
    costs what the machine and the observers cost."""

    def __init__(
        self,
        setup: Setup,
        policy_seconds: Callable[[], float],
        metrics: Metrics,
        feed: EventLog,
        journal: Journal | None,
        clock: Callable[[], float],
        hands: Hands,
    ) -> None:
        """A policy that is not ours has `policy_seconds` for an answer, as they are when it is
        loaded. Raises `PolicyError` if the policies cannot be loaded."""
        self._setup = setup
        self._policy_seconds = policy_seconds
        self._metrics = metrics
        self._feed = feed
        self._journal = journal
        self._clock = clock
        self._unix_offset = math.nan
        """What the machine adds to its clock for Unix time."""
        self._utc_offset: int | None = None
        """What it adds to that for local time, as it was looked up, at last"""
        self._zone_until = -math.inf
        """before this Unix time."""
        self._hands = hands
        self.policies = PolicyWatch(setup.policy, self._stack(setup), metrics)
        self.machine: Machine = setup.machine(self.policies.stack)
        self.observers: Sequence[Observer] = ()
        self.broken = False
        """The machine contradicted itself; nothing more is decided."""
        self._inbox: deque[Callable[[], None]] = deque()
        """What is to be done next: each an event, or a change of policies."""
        self._changing = asyncio.Lock()
        """Held while policies are changed."""
        self._busy = False
        self._after = ""
        """The event whose commands are being performed."""
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at: float | None = None

    def handle(self, event: Event) -> None:
        """Have the machine handle an event, after those that wait, and do what follows."""
        self._do(partial(self._handle, event))

    def silence(self) -> None:
        """Be not woken any more."""
        if self._alarm is not None:
            self._alarm.cancel()

    def close(self) -> None:
        """End the policies and the journal. Operators may still ask for something."""
        self.policies.stack.close()
        if self._journal is not None:
            with suppress(OSError):  # a full disk must not keep the daemon from stopping
                self._journal.close()
            self._journal = None

    def _do(self, step: Callable[[], None]) -> None:
        self._inbox.append(step)
        if self._busy or self.broken:
            return
        self._busy = True
        try:
            while self._inbox:
                self._inbox.popleft()()
        except Exception as error:
            self.broken = True
            self._hands.failed(error)
            raise
        finally:
            self._busy = False

    def _handle(self, event: Event) -> None:
        now = self._clock()
        self._watch_wall_clock(now)
        self._decide(event, now)

    def _watch_wall_clock(self, now: float) -> None:
        """Have the machine hear if the clock on the wall is another one than it believes."""
        unix = time.time()
        moved = not abs(unix - now - self._unix_offset) <= CLOCK_TOLERANCE_SECONDS  # NaN, too
        if moved or unix >= self._zone_until:
            self._zone_until = (unix // ZONE_SECONDS + 1) * ZONE_SECONDS
            utc_offset = time.localtime(unix).tm_gmtoff
            if moved or utc_offset != self._utc_offset:
                self._unix_offset, self._utc_offset = unix - now, utc_offset
                self._decide(ClockSet(unix_seconds=unix, utc_offset_seconds=utc_offset), now)

    def _decide(self, event: Event, now: float) -> None:
        commands: list[Command] = []
        began = time.perf_counter()
        try:
            commands = self.machine.handle(event, now)
        finally:
            self._metrics.decision(type(event).__name__, time.perf_counter() - began)
            self._write_down(now, event, commands)
        self._follow(now, commands, type(event).__name__)

    def _follow(self, now: float, commands: list[Command], after: str) -> None:
        self._after = after
        self._hands.decided()
        for command in commands:
            for observer in self.observers:
                observer.ordered(command, now)
            self._hands.perform(command)
        self._set_alarm(now)
        self.policies.note_faults()
        self._hands.performed()

    def _set_alarm(self, now: float) -> None:
        """Be woken when the machine has something to do that no event brings about."""
        deadline = self.machine.next_deadline()
        if deadline == self._alarm_at:
            return
        self._alarm_at = deadline
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(max(0.0, deadline - now), self._ring)

    def _ring(self) -> None:
        self._alarm = self._alarm_at = None
        self.handle(Ticked())

    def _write_down(self, now: float, event: Event, commands: list[Command]) -> None:
        """A journal that cannot be written must not stop the service."""
        missed = self.policies.stack.take_missed()
        if self._journal is None:
            return
        try:
            self._journal.record(now, event, commands, missed)
        except OSError:
            log.exception("the journal ends here")
            self._journal = None

    def explain(self, command: Command) -> Decision:
        """What led to the command that is being performed, one of those in `HOOKS`."""
        hook = HOOKS[type(command)]
        if hook is None:
            return Decision(after=self._after)
        instance: InstanceId = command.instance  # type: ignore[attr-defined]
        work = self.machine.instances[instance].work
        return Decision(
            after=self._after,
            hook=hook,
            policy=self.policies.stack.answered(hook, instance),
            plan=tuple(
                (turn.model, turn.quota_seconds if turn.firm else None)
                for turn in islice(work, MOST_PLANNED)
            ),
        )

    # --- policies --------------------------------------------------------------------------------

    async def set_policy(self, choice: PolicyChoice) -> None:
        """Have other policies decide from now on. Raises `PolicyChoiceError`."""
        async with self._changing:
            await self._use(choice, partial(self.policies.chosen, choice))

    async def set_policy_if(self, still: Callable[[], bool], choice: PolicyChoice) -> bool:
        """The same, if `still()` when no other change is under way; whether it was done."""
        async with self._changing:
            if not still():
                return False
            await self._use(choice, partial(self.policies.chosen, choice))
            return True

    async def rollback_policy(self) -> None:
        """Return to the choice before. Raises `NothingPrevious`, `PolicyChoiceError`."""
        async with self._changing:
            await self._use(self.policies.previous(), self.policies.returned)

    def enable_policy(self, policy: str) -> None:
        """Have a policy asked again that failed too often. Raises `PolicyNotActive`."""
        self.policies.enable(policy)
        self._write_down(self._clock(), PolicyEnabled(policy=policy), [])

    def flush_journal(self) -> None:
        """Have other processes see what was written down until now."""
        if self._journal is not None:
            with suppress(OSError):  # the next line that is written says so
                self._journal.flush()

    def seen(self, promises: Promises) -> Seen:
        """For the autopilot: who decides, and whether that can be replayed."""
        states = self.policies.stack.states()
        return Seen(
            active=self.policies.choice,
            promises=promises,
            ailing=", ".join(state.name for state in states if state.disabled),
            journaled=self._journal is not None,
        )

    async def _use(self, choice: PolicyChoice, note: Callable[[PolicyStack], None]) -> None:
        """Importing policies takes time: a thread does that."""
        setup = msgspec.structs.replace(self._setup, policy=choice)
        stack = await asyncio.to_thread(self._stack, setup)
        if self.broken:
            raise shutting_down()
        self._do(partial(self._swap, choice, stack, note))

    def _stack(self, setup: Setup) -> PolicyStack:
        return setup.stack(budget_seconds=self._policy_seconds(), observe=self._metrics.policy_call)

    def _swap(
        self, choice: PolicyChoice, stack: PolicyStack, note: Callable[[PolicyStack], None]
    ) -> None:
        """Have another stack decide, between two events."""
        now = self._clock()
        note(stack)
        self._feed.tell(NoticeKind.POLICIES_CHOSEN, choice=choice)
        commands: list[Command] = []
        try:
            commands = self.machine.set_policy(stack, now)
        finally:
            self._write_down(now, PolicyChosen(choice=choice), commands)
        self._follow(now, commands, PolicyChosen.__name__)
