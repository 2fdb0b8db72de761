"""Carries batches out: finds them again after a restart, runs their requests, writes what comes.

The records of a batch decide what it is (`appliance.batches.records`); this does what follows.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from pathlib import Path
from typing import Final

import msgspec
from litestar import Litestar

from appliance.access.auth import Access, Caller
from appliance.api.batch.executor import KEY_GONE, BatchRequests, BatchRun, Fronts
from appliance.batches.disk import Disk
from appliance.batches.earlier import take_in
from appliance.batches.files import (
    MESSAGES_INPUT,
    FileStore,
    StoredFile,
    counted,
    set_aside,
)
from appliance.batches.log import ENTRIES, BatchLog, delete_log, load_all
from appliance.batches.records import (
    MESSAGES,
    Batch,
    Begun,
    CancelAsked,
    Closing,
    Created,
    Problem,
    Record,
    Status,
)
from appliance.batches.requestlines import InputLost, InputRefused, RequestLines, check_input
from appliance.batches.results import write_results
from appliance.batches.store import store_in
from appliance.batches.writer import RETRY_SECONDS, BatchWriter
from appliance.errors import ApplianceError, IllegalTransition
from appliance.observability.batch_metrics import BatchMetrics
from appliance.platform.durable import make_folder
from appliance.service.interface import Inference

WINDOW_SECONDS: Final = 24 * 3600.0
MAX_UNFINISHED: Final = 100
"""Batches of one owner that are not over."""

_LOOK_SECONDS: Final = 60.0
"""How often the wall clock, which may be set, is compared with the end of a window."""
_SWEEP_SECONDS: Final = 3600.0
log = logging.getLogger("appliance.batches")


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where files and batches are, and what bounds them."""

    folder: Path
    at_once: int
    """Requests of batches in the appliance at once."""
    max_file_bytes: int
    max_requests: int
    """Of one batch."""
    max_line_bytes: int
    """What HTTP would take of the body of a request."""
    max_stored_bytes: int
    """All files and logs together; an upload is refused that would take more, and a batch once they
    take more, while those that run stand still. What is done is written to files nevertheless."""
    max_owner_bytes: int
    """The same of one key: its uploads and batches are refused, its batches stand still."""
    keep_seconds: float
    """For how long files, and batches that are over, are kept."""


class Unavailable(Exception):
    """What was asked cannot be written down now; nothing was changed."""


class TooManyBatches(Exception):
    """The owner has as many unfinished batches as may be."""


class BatchRunner:
    """The files and batches of one appliance, while it is `running`."""

    def __init__(
        self,
        service: Inference,
        access: Access,
        fronts: Fronts,
        *,
        settings: BatchSettings,
        metrics: BatchMetrics,
        wall_clock: Callable[[], float] = time.time,
        expiry_clock: Callable[[], float] | None = None,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """`fronts` answer the requests. What could not be done is tried again after
        `retry_seconds` at the latest. What is written has the time of `wall_clock`; what expires,
        and is deleted for it, does so by `expiry_clock`, if that is another one."""
        self.settings = settings
        self.wall_clock = wall_clock
        self._expiry_clock = wall_clock if expiry_clock is None else expiry_clock
        self._store = store_in(settings.folder)
        self.files = FileStore(
            self._store,
            settings.folder / "files",
            max_bytes=settings.max_stored_bytes,
            max_owner_bytes=settings.max_owner_bytes,
            keep_seconds=settings.keep_seconds,
            beside_bytes=self._logs_bytes,
        )
        self.disk = Disk()
        self._service = service
        self._access = access
        self._metrics = metrics
        self._retry_seconds = retry_seconds
        self._logs = settings.folder / "batches"
        self._batches: dict[str, Batch] = {}
        self._creating: list[Created] = []
        """Those on their way to the disk, which count already."""
        self._runs: dict[str, BatchRun] = {}
        self._requests = BatchRequests(
            fronts,
            access,
            metrics,
            self.disk,
            settings.at_once,
            is_full=self.files.is_full,
            wall_clock=wall_clock,
            retry_seconds=retry_seconds,
        )

    # --- a life ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self, app: Litestar) -> AsyncIterator[None]:
        """Go on with what is in the folder, and take more. Raises `ApplianceError` and `OSError` if
        the folder cannot be used."""
        lock = await self.disk(self._open)
        sweeping: asyncio.Task[None] | None = None
        try:
            self._requests.halted = False
            for batch in sorted(self._batches.values(), key=lambda batch: batch.created.at):
                if not batch.over:
                    self._begin(batch, await self.disk(self._log, batch.id))
            sweeping = asyncio.create_task(self._sweep_now_and_then())
            yield
        finally:
            self._requests.halted = True
            if sweeping is not None:
                sweeping.cancel()
            await self._stop()
            await self.disk.close()
            self._store.close()
            os.close(lock)

    def _open(self) -> int:
        """Find files and batches; the descriptor that keeps others out of the folder."""
        make_folder(self.settings.folder, 0o700)
        make_folder(self._logs, 0o700)
        flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(self.settings.folder / "lock", flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            folder = self.settings.folder
            raise ApplianceError(
                f"batches.directory: another daemon has its batches in {folder}; end it, or set "
                "another folder"
            ) from error
        try:
            self._store.open()
            take_in(self._store, self.settings.folder / "files", self._logs)
            self.files.open()
            self._find_batches()
        except BaseException:
            self._store.close()
            os.close(lock)
            raise
        return lock

    def _find_batches(self) -> None:
        for batch in load_all(self._store, self._logs):
            self._batches[batch.id] = batch
        for path in sorted(self._logs.glob(f"*{ENTRIES}")):
            id = path.name.removesuffix(ENTRIES)
            found = self._batches.get(id)
            if found is None:
                if not self._store.rows("records", id):  # else the batch is left alone for now
                    set_aside(path, "it belongs to no batch that is known")
            elif found.over:  # the daemon stopped just then
                self._shorten(found, self._log(found.id))

    def _shorten(self, batch: Batch, written: BatchLog) -> None:
        """The log of a batch that is over need not be long any more."""
        ended = batch.ended(
            batch.since[batch.status],
            batch.status,
            batch.output_file_id,
            batch.error_file_id,
            batch.problems,
        )
        try:
            written.finish(ended)
        except OSError as error:  # it says the same at length
            log.warning("the log of %s could not be compacted: %s", batch.id, error)

    async def _stop(self) -> None:
        """What is done is written; what is not is done again after the next start."""
        runs = list(self._runs.values())
        for run in runs:
            if run.task is not None:
                run.task.cancel()
        await asyncio.gather(*(run.task for run in runs if run.task), return_exceptions=True)

    async def _sweep_now_and_then(self) -> None:
        while True:
            await self._sweep()
            await asyncio.sleep(_SWEEP_SECONDS)

    async def _sweep(self) -> None:
        """Delete what was kept long enough. What cannot be deleted is tried again next time."""
        now = self._expiry_clock()
        for file in self.files.all():
            old = file.expires_at <= now and not self.needed(file.id)
            if old or self._is_left_over(file, now):
                try:
                    await self.disk(self.files.delete, file.id)
                except OSError as error:
                    log.error("%s has expired and cannot be deleted: %s", file.id, error)
        for batch in list(self._batches.values()):
            if batch.over and batch.created.at + self.settings.keep_seconds <= now:
                try:
                    await self.disk(delete_log, self._store, self._logs, batch.id)
                except OSError as error:
                    log.error("%s has expired and cannot be deleted: %s", batch.id, error)
                else:
                    self._batches.pop(batch.id, None)

    def _is_left_over(self, file: StoredFile, now: float) -> bool:
        """Whether it is the input of an Anthropic batch that is over, or never came to be."""
        settled = file.created_at + _SWEEP_SECONDS <= now
        return file.purpose == MESSAGES_INPUT and settled and not self.needed(file.id)

    # --- what clients ask ------------------------------------------------------------------------

    def batches(self, owner: str) -> list[Batch]:
        """An owner's, the newest first."""
        mine = [batch for batch in self._batches.values() if batch.created.owner == owner]
        return sorted(mine, key=lambda batch: (batch.created.at, batch.id), reverse=True)

    def find(self, id: str) -> Batch | None:
        return self._batches.get(id)

    def needed(self, file: str) -> bool:
        """Whether a batch that is not over reads this file."""
        return any(created.input_file_id == file for created in self._unfinished())

    def _unfinished(self) -> list[Created]:
        """Of those that are not over; one that is may still be tidied up."""
        running = [run.batch for run in self._runs.values()]
        return [batch.created for batch in running if not batch.over] + self._creating

    async def create(
        self,
        owner: str,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        metadata: dict[str, str] | None,
        checked: int | None = None,
    ) -> Batch:
        """A new batch, which is on the disk. Its input has so many requests if it was `checked`
        already. Raises `Unavailable`, `TooManyBatches`, and `StoreFull`."""
        if sum(one.owner == owner for one in self._unfinished()) >= MAX_UNFINISHED:
            raise TooManyBatches(f"{MAX_UNFINISHED} batches are not over yet")
        if self._requests.halted:
            raise Unavailable("the appliance is shutting down")
        self.files.check_room(owner)
        now = self.wall_clock()
        created = Created(
            at=now,
            id=f"{'msg' if endpoint == MESSAGES else ''}batch_{uuid.uuid4().hex}",
            owner=owner,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=completion_window,
            expires_at=now + WINDOW_SECONDS,
            metadata=metadata,
        )
        begun = [] if checked is None else [Begun(at=now, total=checked)]
        self._creating.append(created)
        creating = asyncio.ensure_future(self.disk(self._create_log, created.id, [created, *begun]))
        try:
            written = await asyncio.shield(creating)
        except OSError as error:
            raise Unavailable(f"the batch cannot be written down: {error.strerror}") from error
        except asyncio.CancelledError:  # no client gets its id, so it is removed
            with suppress(OSError):
                (await creating).close()
                await self.disk(delete_log, self._store, self._logs, created.id)
            raise
        finally:
            self._creating.remove(created)
        batch = self._batches[created.id] = Batch(created)
        for record in begun:
            batch.apply(record)
        self._begin(batch, written)
        return batch

    async def cancel(self, batch: Batch) -> None:
        """Its owner does not want the rest. Raises `IllegalTransition` for a batch that is over or
        about to be, and `Unavailable`."""
        run = self._runs.get(batch.id)
        if batch.status is Status.CANCELLING:
            return
        if run is None:
            raise IllegalTransition(f"{batch.id} is {batch.status}")
        if run.writer.stuck:
            raise Unavailable("the disk takes no more data; the batch is paused")
        await run.writer.write(CancelAsked(at=self.wall_clock()))
        run.news.set()

    async def delete(self, batch: Batch) -> None:
        """It is gone, with all of its files and its input. Raises `IllegalTransition` for one that
        is not over, and `Unavailable`."""
        if not batch.over:
            raise IllegalTransition(f"{batch.id} is {batch.status}")
        if (run := self._runs.get(batch.id)) is not None and run.task is not None:
            await asyncio.wait([run.task])  # it shortens the log, which would be there again
        files = (batch.output_file_id, batch.error_file_id, batch.created.input_file_id)
        try:
            await self.disk(delete_log, self._store, self._logs, batch.id)
            for file in filter(None, files):
                await self.disk(self.files.delete, file)
        except OSError as error:
            raise Unavailable(f"the batch cannot be deleted: {error.strerror}") from error
        self._batches.pop(batch.id, None)

    # --- one batch -------------------------------------------------------------------------------

    def _log(self, id: str) -> BatchLog:
        return BatchLog(self._store, self._logs, id)

    def _create_log(self, id: str, records: list[Record]) -> BatchLog:
        """The log of a new batch, on the disk; none if that fails with an `OSError`."""
        written = self._log(id)
        written.append(records)
        return written

    def _logs_bytes(self, owner: str | None = None) -> int:
        """The logs of all batches of an owner, or of all; that of one which is over is short."""
        runs, batches = list(self._runs.values()), list(self._batches.values())
        if owner is not None:
            runs = [run for run in runs if run.batch.created.owner == owner]
            batches = [batch for batch in batches if batch.created.owner == owner]
        sizes = sum(counted(run.log.size_bytes) for run in runs)
        return sizes + counted(0) * (len(batches) - len(runs))

    def _begin(self, batch: Batch, written: BatchLog) -> None:
        writer = BatchWriter(batch, written, self.disk, retry_seconds=self._retry_seconds)
        run = self._runs[batch.id] = BatchRun(batch, written, writer)
        # A context of its own: it must not inherit that of the request that created the batch.
        run.task = asyncio.get_running_loop().create_task(self._conduct(run), context=Context())
        self._metrics.unfinished(len(self._runs))

    async def _conduct(self, run: BatchRun) -> None:
        """From where it is to its end."""
        try:
            while not run.batch.over:
                await self._go_on(run)
            await self._tidy_up(run)
        except Exception:
            log.exception("%s is paused until the next start", run.batch.id)
        finally:
            await self._requests.end(run)
            await run.writer.stop()
            run.log.close()
            if run.lines is not None:
                run.lines.close()
            del self._runs[run.batch.id]
            self._metrics.unfinished(len(self._runs))

    async def _go_on(self, run: BatchRun) -> None:
        batch = run.batch
        if (closing := batch.closing(self._expiry_clock())) is not None:
            await self._requests.end(run)
            await self._write(run, Closing(at=self.wall_clock(), status=closing))
        elif (status := batch.ending) is not None:
            await self._requests.end(run)
            await self._finalize(run, status)
        elif batch.status is Status.VALIDATING:
            await self._validate(run)
        else:
            await self._carry_out(run)

    async def _write(self, run: BatchRun, record: Record) -> None:
        """Unless something else came before, such as that it is cancelled."""
        with suppress(IllegalTransition):
            await run.writer.write(record)

    async def _fail(self, run: BatchRun, *problems: Problem) -> None:
        """It cannot go on; what is done has its files."""
        await self._requests.end(run)
        await self._finalize(run, Status.FAILED, problems)

    async def _validate(self, run: BatchRun) -> None:
        created = run.batch.created
        caller = self._access.on_behalf_of(created.owner)
        if caller is None:
            code, message = KEY_GONE
            await self._fail(run, Problem(code=code, message=message))
            return
        try:
            total = await self.disk(
                check_input,
                self.files.path(created.input_file_id),
                created.endpoint,
                self._models(caller),
                max_requests=self.settings.max_requests,
                max_line_bytes=self.settings.max_line_bytes,
            )
        except InputRefused as refusal:
            await self._fail(run, *refusal.problems)
        except InputLost as error:
            await self._fail(run, _lost(error))
        else:
            await self._write(run, Begun(at=self.wall_clock(), total=total))

    def _models(self, caller: Caller) -> frozenset[str]:
        """Those that a caller may use."""
        return frozenset(card.id for card in self._service.models() if caller.allows(card.id))

    async def _carry_out(self, run: BatchRun) -> None:
        """Run its requests until all are done, or no more are to."""
        batch = run.batch
        try:
            source = self.files.path(batch.created.input_file_id)
            run.lines = await self.disk(RequestLines, source)
            if len(run.lines) != batch.total:
                raise InputLost("the input file is not the one that the batch began with")
        except InputLost as error:
            await self._fail(run, _lost(error))
            return
        self._requests.begin(run)
        while batch.status is Status.IN_PROGRESS and batch.closing(self._expiry_clock()) is None:
            run.news.clear()
            left = batch.expires_at - self._expiry_clock()
            with suppress(TimeoutError):
                await asyncio.wait_for(run.news.wait(), max(0.0, min(left, _LOOK_SECONDS)))

    async def _finalize(
        self, run: BatchRun, status: Status, problems: tuple[Problem, ...] = ()
    ) -> None:
        batch = run.batch
        await run.writer.flush()  # outcomes of requests that were ended just then
        source = self.files.path(batch.created.input_file_id)
        while True:
            now = self.wall_clock()
            try:
                results = await self.disk(
                    write_results, batch, status, run.log, source, self.files, now
                )
                break
            except InputLost as error:
                await self._fail(run, _lost(error))
                return
            except OSError as error:
                log.error("the files of %s cannot be written: %s", batch.id, error)
                await asyncio.sleep(self._retry_seconds)
        await self._write(run, batch.ended(self.wall_clock(), status, *results, problems))

    async def _tidy_up(self, run: BatchRun) -> None:
        """It is over: its log need not be long any more, and of messages it needs no input."""
        batch = run.batch
        log.info("%s is %s: %d of %d", batch.id, batch.status, batch.completed, batch.total)
        await self.disk(self._shorten, batch, run.log)
        if batch.of_messages:
            try:
                await self.disk(self.files.delete, batch.created.input_file_id)
            except OSError as error:  # the sweep tries it again
                log.warning("the input of %s could not be deleted yet: %s", batch.id, error)


def _lost(error: InputLost) -> Problem:
    return Problem(code="input_file_unreadable", message=str(error), param="input_file_id")
