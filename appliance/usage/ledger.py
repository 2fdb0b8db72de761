"""The ledger on disk: one writer, many entries in a transaction, a bounded wait for each answer.

An entry that comes while a transaction is written goes with the next one, so that a busy appliance
writes few. If the disk takes too long, or refuses, answers go on without it: their entries stay in
memory, up to a bound, and are written when the disk takes them again.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from appliance.errors import ApplianceError
from appliance.platform.database import Change, Database
from appliance.platform.durable import make_folder
from appliance.usage.books import MIGRATIONS, Books
from appliance.usage.entries import Entry, month_of

MAX_PENDING: Final = 65_536
"""Entries that wait for the disk; when there are so many, requests are refused."""
MOST_TOGETHER: Final = 4096
"""Entries of a transaction: the event loop plans it at once."""
WAIT_SECONDS: Final = 2.0
"""The longest that an answer waits for its entry."""
RETRY_SECONDS: Final = 1.0
"""After how long a disk that refused is asked again."""
CLOSE_SECONDS: Final = 5.0
"""What the disk has for the last entries when the appliance ends."""

log = logging.getLogger("appliance.usage")


class _Waiting(NamedTuple):
    """An answer that goes on when its entry is on the disk, or at its deadline."""

    number: int
    """How many entries had come with this one."""
    deadline: float
    go_on: Callable[[], None]


class Ledger:
    """What keys used, while it is open. Used on one event loop; only the disk is in a thread."""

    def __init__(
        self,
        folder: Path,
        *,
        keep_months: int,
        max_rows: int,
        now: Callable[[], float],
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """`folder` is its own. Rows leave as `Books` says, by the Unix time that `now` tells. An
        answer waits for the disk for at most `wait_seconds`."""
        self._folder = folder
        self._keep_months = keep_months
        self._max_rows = max_rows
        self._wait_seconds = wait_seconds
        self._now = now
        self._database = database_in(folder)
        self._pending: deque[Entry] = deque()
        self._pending_tokens: Counter[tuple[str, str]] = Counter()
        """By key and month."""
        self._pending_of: Counter[tuple[str, str]] = Counter()
        """By organization and month."""
        self._waiting: deque[_Waiting] = deque()
        self._came = 0
        """Entries until now."""
        self._written = 0
        """Those of them that are on the disk."""
        self._late = False
        """Whether the disk is late or refuses: no answer waits for it then."""
        self._alarm: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._at_disk = False
        """Whether a transaction is being written."""
        self._lock: int | None = None
        self.books: Books
        """There while it is open."""
        self.trouble = ""
        """Why entries are not on the disk; "" if they are."""

    def open(self) -> None:
        """Read what is there; O(rows). One daemon has it open at a time. Raises
        `ApplianceError`."""
        try:
            make_folder(self._folder, 0o700)
            self._lock = _locked(self._folder)
            self._database.open()
            self.books = Books(
                months=self._keep_months,
                max_rows=self._max_rows,
                rows=self._database.rows("usage"),
                of_organizations=self._database.rows("organization_usage"),
                recent=self._database.rows("recent"),
            )
        except OSError as error:
            self._unlock()
            reason = error.strerror or str(error)
            raise ApplianceError(f"usage.directory: {self._folder}: {reason}") from error
        except ApplianceError as error:
            self._unlock()
            raise ApplianceError(f"usage.directory: {error}") from error

    @property
    def full(self) -> bool:
        """Whether so many entries wait for the disk that no more may come."""
        return len(self._pending) >= MAX_PENDING

    def spent_tokens(self, key: str, month: str) -> int:
        """Input and output of a key in a month, such as ``2026-11`` (UTC), also what is not on the
        disk yet. O(1)."""
        return self.books.spent_tokens(key, month) + self._pending_tokens[key, month]

    def spent_tokens_of(self, organization: str, month: str) -> int:
        """The same of all keys of an organization while they belonged to it. O(1)."""
        pending = self._pending_of[organization, month]
        return self.books.spent_tokens_of(organization, month) + pending

    def record(self, entry: Entry, go_on: Callable[[], None]) -> None:
        """Write an entry. `go_on` is called once: when it is on the disk, or when it has waited
        long enough; it raises nothing. O(1)."""
        self._pending.append(entry)
        self._count_pending(entry, 1)
        self._came += 1
        if self._late:
            go_on()
        else:
            deadline = asyncio.get_running_loop().time() + self._wait_seconds
            self._waiting.append(_Waiting(self._came, deadline, go_on))
            self._set_alarm()
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def aclose(self) -> None:
        """Write what waits, if the disk takes it in time; a disk that hangs is left behind.
        Idempotent."""
        writing = self._writing
        if writing is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(writing, CLOSE_SECONDS)
        if self._pending:
            log.error("%d entries of the ledger are lost: %s", len(self._pending), self.trouble)
        self._let_go(self._came)
        if self._at_disk:
            # Both would wait for the disk; the system closes them with the process.
            log.error("the disk of the ledger still writes; the appliance ends without it")
        elif self._lock is not None:
            self._database.close()
            self._unlock()

    # --- writing ---------------------------------------------------------------------------------

    async def _write(self) -> None:
        """Until nothing waits, whatever goes wrong meanwhile."""
        try:
            while self._pending:
                try:
                    await self._write_some()
                except Exception as error:  # of the disk; any other is a mistake of ours
                    self._cannot_write(error)
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._writing = None

    async def _write_some(self) -> None:
        """A transaction of the oldest entries. Raises what goes wrong; they wait then."""
        entries = [self._pending[at] for at in range(min(len(self._pending), MOST_TOGETHER))]
        plan = self.books.plan(entries, self._now())
        await self._on_disk(self.books.changes(plan))
        self.books.apply(plan)
        for entry in entries:
            self._pending.popleft()
            self._count_pending(entry, -1)
        self._written += len(entries)
        self._let_go(self._written)
        if len(self._pending) <= MOST_TOGETHER:
            self._in_time()

    async def _on_disk(self, changes: Sequence[Change]) -> None:
        """Write, in a thread that no end of the process waits for. Raises as the database does."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def tell(error: Exception | None) -> None:
            if done.done():  # the appliance ends without it
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def work() -> None:
            found: Exception | None = None
            try:
                self._database.write(changes)
            except Exception as error:  # for the loop
                found = error
            self._at_disk = False
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(tell, found)

        self._at_disk = True
        threading.Thread(target=work, name="usage", daemon=True).start()
        await done

    def _cannot_write(self, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else None
        shown = reason or f"{type(error).__name__}: {error}"
        self._is_late(f"the ledger of usage cannot be written: {shown}", None if reason else error)

    def _count_pending(self, entry: Entry, sign: int) -> None:
        month, tokens = month_of(entry.ended), sign * entry.amounts.tokens
        for counter, name in (
            (self._pending_tokens, entry.key),
            (self._pending_of, entry.organization),
        ):
            counter[name, month] += tokens
            if not counter[name, month]:
                del counter[name, month]

    # --- answers that wait -----------------------------------------------------------------------

    def _let_go(self, number: int) -> None:
        """Let the answers of the first entries, so many, go on."""
        while self._waiting and self._waiting[0].number <= number:
            go_on = self._waiting.popleft().go_on
            try:
                go_on()
            except Exception:  # of one answer: the others wait for theirs
                log.exception("an answer whose usage is counted cannot go on")
        self._set_alarm()

    def _set_alarm(self) -> None:
        if self._waiting and self._alarm is None:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_at(self._waiting[0].deadline, self._ring)
        elif not self._waiting and self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _ring(self) -> None:
        self._alarm = None
        if self._waiting and self._waiting[0].deadline <= asyncio.get_running_loop().time():
            self._is_late(f"the ledger of usage takes more than {self._wait_seconds:g} s to write")
        else:
            self._set_alarm()

    def _is_late(self, trouble: str, error: Exception | None = None) -> None:
        """`error` is one that no disk makes: its trace is logged."""
        if trouble != self.trouble:
            log.error("%s; answers do not wait for it", trouble, exc_info=error)
        self._late, self.trouble = True, trouble
        self._let_go(self._came)

    def _in_time(self) -> None:
        """The disk keeps up: what comes now is in its next transaction."""
        if self._late:
            log.warning("the ledger of usage is written again")
        self._late, self.trouble = False, ""

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def database_in(folder: Path) -> Database:
    """The ledger's database in a folder, still to be opened."""
    return Database(folder / "usage.sqlite", MIGRATIONS)


def _locked(folder: Path) -> int:
    """The descriptor that keeps others out of the folder."""
    flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(folder / "lock", flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ApplianceError(f"{folder}: another daemon has its ledger there") from error
    return lock
