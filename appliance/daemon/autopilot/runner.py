"""The autopilot in the daemon: what `Control` decides is done, logged, and shown as events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from appliance.daemon.autopilot.barred_file import barred_path, read_barred, write_barred
from appliance.daemon.autopilot.control import (
    Action,
    Bar,
    Control,
    EndReplay,
    Moment,
    Seen,
    StartReplay,
    Use,
)
from appliance.daemon.autopilot.replay_process import ReplayFailed, replay
from appliance.daemon.autopilot.seasons import Cell
from appliance.daemon.autopilot.seasons_file import read_seasons, seasons_path, write_seasons
from appliance.errors import ApplianceError
from appliance.service.autopilot import (
    AutopilotMode,
    AutopilotNote,
    AutopilotReport,
    AutopilotStep,
    AutopilotTerms,
    Recommendation,
)
from appliance.service.event_log import EventLog, NoticeKind
from appliance.service.policy_report import PolicyChoice

Replay: TypeAlias = Callable[
    [AutopilotTerms, float, float, tuple[PolicyChoice, ...]], Awaitable[Recommendation]
]

LONGEST_WRITE_SECONDS: Final = 5.0

log = logging.getLogger("appliance.daemon")


class Decisions(Protocol):
    """The policies of the daemon. `appliance.daemon.decision_loop.DecisionLoop` has them."""

    async def set_policy_if(self, still: Callable[[], bool], choice: PolicyChoice) -> bool:
        """Have others decide, if `still()` when no other change is under way; whether it did."""

    def flush_journal(self) -> None:
        """Have other processes see what was written down until now."""


class AutopilotRunner:
    """Used on the daemon's event loop. `see` says how things are."""

    def __init__(
        self,
        configured: PolicyChoice,
        decisions: Decisions,
        see: Callable[[], Seen],
        feed: EventLog,
        clock: Callable[[], float],
        unix_clock: Callable[[], float] = time.time,
        utc_offset: Callable[[float], float] = lambda unix: time.localtime(unix).tm_gmtoff,
        replay: Replay = replay,
    ) -> None:
        self.replay = replay
        """What replays; tests have another."""
        self._control = Control(AutopilotTerms(), configured)
        self._decisions = decisions
        self._see = see
        self._feed = feed
        self._clock = clock
        self._unix_clock = unix_clock
        self._utc_offset = utc_offset
        self._configured = configured
        self._remembers = ""
        """The journal that it read next to what is remembered."""
        self._started = False
        self._ticking: asyncio.Task[None] | None = None
        self._replaying: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        """Changes and files that are written; held here, as the loop does not."""
        self._writing_hours = asyncio.Lock()

    def configure(self, terms: AutopilotTerms, configured: PolicyChoice) -> None:
        """The configuration says so from now on. What is remembered is read from next to the
        journal the first time that it is not off."""
        self._configured = configured
        on = terms.mode is not AutopilotMode.OFF
        if on and terms.journal and terms.journal != self._remembers:
            self._remembers = terms.journal
            barred = read_barred(barred_path(terms.journal))
            hours, problem = read_seasons(seasons_path(terms.journal), configured)
            self._control = Control(terms, configured, barred, hours)
            if problem:
                self._do(self._control.forgot(self._now(), problem))
        self._do(self._control.configure(self._now(), terms, configured))
        self._tick_if_on()

    @property
    def terms(self) -> AutopilotTerms:
        """Those it works on."""
        return self._control.terms

    @property
    def ticks(self) -> bool:
        """Whether it does anything: it is not off, and made no mistake."""
        return self._ticking is not None

    def start(self) -> None:
        """Begin, if it is not off."""
        self._started = True
        self._tick_if_on()

    async def stop(self) -> None:
        """End all that it does."""
        self._started = False
        tasks = [*filter(None, (self._ticking, self._replaying)), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._ticking = None

    def operator_chose(self) -> None:
        """An operator had policies decide, or went back to earlier ones."""
        self._do(self._control.operator_chose(self._now()))

    def tick(self) -> None:
        """Time went on."""
        self._do(self._control.tick(self._now(), self._see()))
        if (cells := self._control.learned()) is not None:
            self._keep(self._write_hours(cells, self._configured))

    def report(self) -> AutopilotReport:
        """For operators."""
        return self._control.report(self._now())

    def _now(self) -> Moment:
        unix = self._unix_clock()
        return Moment(
            seconds=self._clock(),
            unix_seconds=unix,
            utc_offset_seconds=self._utc_offset(unix),
        )

    def _tick_if_on(self) -> None:
        on = self._started and self._control.terms.mode is not AutopilotMode.OFF
        if on and self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick_on())
        elif not on and self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    async def _tick_on(self) -> None:
        while True:
            try:
                self.tick()
            except Exception:
                # It serves no request: the daemon goes on without it.
                log.exception(
                    "the autopilot ends here; a reload of the configuration begins it again"
                )
                self._ticking = None
                return
            await asyncio.sleep(self._control.tick_seconds)

    # --- actions ---------------------------------------------------------------------------------

    def _do(self, actions: list[Action]) -> None:
        barring: asyncio.Task[None] | None = None
        for action in actions:
            match action:
                case StartReplay():
                    self._decisions.flush_journal()
                    loop = asyncio.get_running_loop()
                    self._replaying = loop.create_task(self._replay(action))
                case EndReplay():
                    if self._replaying is not None:
                        self._replaying.cancel()
                case Use():
                    self._keep(self._use(action.choice, self._control.configured_times, barring))
                case Bar():
                    path = barred_path(self._control.terms.journal)
                    barring = self._keep(asyncio.to_thread(write_barred, path, action.barred))
                case AutopilotNote():
                    self._tell(action)

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _write_hours(self, cells: tuple[Cell, ...], configured: PolicyChoice) -> None:
        """One after the other: the newest is to stay."""
        path = seasons_path(self._control.terms.journal)
        async with self._writing_hours:
            await asyncio.to_thread(write_seasons, path, cells, configured)

    async def _replay(self, asked: StartReplay) -> None:
        terms = self._control.terms
        seconds, hard = asked.cpu_seconds, asked.hard_cpu_seconds
        try:
            found = await self.replay(terms, seconds, hard, asked.also)
        except ReplayFailed as error:
            self._do(self._control.failed(self._now(), str(error)))
        except Exception as error:  # whatever it is, the daemon goes on
            log.exception("the autopilot's replay failed")
            self._do(self._control.failed(self._now(), f"the replay failed: {error}"))
        else:
            self._do(self._control.advised(self._now(), self._see(), found))

    async def _use(
        self, choice: PolicyChoice, configured: int, after: asyncio.Task[None] | None
    ) -> None:
        """Once that is done, unless it takes too long: a disk must not keep a bad policy. What
        becomes of it is dropped after a reload, which ended that change."""
        control = self._control

        def still() -> bool:
            return control is self._control and control.configured_times == configured

        if after is not None:
            await asyncio.wait([after], timeout=LONGEST_WRITE_SECONDS)
        failure = ""
        try:
            if not await self._decisions.set_policy_if(
                lambda: still() and control.may_change, choice
            ):
                failure = "an operator chose policies meanwhile"
        except ApplianceError as error:
            failure = f"the policies cannot be changed: {error}"
        except Exception as error:  # whatever it is, the daemon and the autopilot go on
            log.exception("the autopilot's change of policies failed")
            failure = f"the policies cannot be changed: {error!r}"
        if not still():
            return
        if failure:
            self._do(control.failed(self._now(), failure))
        else:
            self._do(control.used(self._now(), self._see()))

    def _tell(self, note: AutopilotNote) -> None:
        facts = {k: v for k, v in msgspec.structs.asdict(note).items() if v is not None}
        facts.pop("unix_seconds")
        self._feed.tell(NoticeKind.AUTOPILOT, **facts)
        names = "" if note.choice is None else f" {'+'.join(note.choice.use)}"
        level = logging.INFO
        if note.what is AutopilotStep.FAILED and note.choice is not None:
            level = logging.WARNING  # a change; it may have been one back
        elif note.what in (AutopilotStep.KEPT, AutopilotStep.FAILED):
            level = logging.DEBUG
        log.log(level, "autopilot: %s%s: %s", note.what, names, note.reason)
