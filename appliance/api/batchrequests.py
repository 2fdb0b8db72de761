"""Asks the requests of batches: so many at once, in the names of their owners, until each has an
outcome that is written down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextvars import Context
from typing import Final

import msgspec

from appliance.api.auth import Access, current
from appliance.api.batchendpoints import Answer
from appliance.api.batchmetrics import BatchMetrics
from appliance.api.errors import ApiError, as_api_error
from appliance.api.plan import off_loop
from appliance.api.service import GenerationFailed
from appliance.batches.disk import Disk
from appliance.batches.log import BatchLog
from appliance.batches.records import Batch, LineDone
from appliance.batches.requestlines import InputLost, RequestLine, RequestLines
from appliance.batches.results import answered, refused
from appliance.batches.scribe import Scribe
from appliance.batches.turns import Turn, Turns
from appliance.errors import IllegalTransition

KEY_GONE: Final = ("invalid_api_key", "the API key of the batch was revoked, or has expired")

_TRIES: Final = 5
"""How often a request is asked that the appliance could not serve for reasons of its own."""
_HELD_UP: Final = frozenset({"overloaded", "model_draining", "no_instance"})
"""What passes, however long it takes: as with a full queue, it is not the request's fault. The
window of the batch bounds it."""
_AFTER_RESTART: Final = frozenset({"shutting_down", "internal_error"})
"""Failures of a whole appliance, which serves nothing before its next start."""

log = logging.getLogger("appliance.batches")


class Run:
    """A batch that is not over."""

    def __init__(self, batch: Batch, written: BatchLog, scribe: Scribe) -> None:
        self.batch = batch
        self.log = written
        self.scribe = scribe
        self.lines: RequestLines | None = None
        self.requests: set[asyncio.Task[None]] = set()
        self.tries: dict[int, int] = {}
        self.news = asyncio.Event()
        """Set when there may be something to do for the batch."""
        self.task: asyncio.Task[None] | None = None


class _Details(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    completion_tokens_details: _Details = _Details()


class _Used(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


class BatchRequests:
    """The requests of all batches that are carried out. While `halted`, or while there is no room
    for what comes of them, none begins."""

    def __init__(
        self,
        endpoints: Mapping[str, Answer],
        access: Access,
        metrics: BatchMetrics,
        disk: Disk,
        at_once: int,
        *,
        full: Callable[[], bool],
        wall_clock: Callable[[], float],
        retry_seconds: float,
    ) -> None:
        """What could not be done is tried again after `retry_seconds` at the latest. `full` says
        whether there is no room."""
        self._full = full
        self._waits_for_room = False
        self.halted = True
        self._endpoints = endpoints
        self._access = access
        self._metrics = metrics
        self._disk = disk
        self._wall_clock = wall_clock
        self._retry_seconds = retry_seconds
        self._turns = Turns(at_once)
        self._runs: dict[str, Run] = {}
        self._alarm: asyncio.TimerHandle | None = None

    def begin(self, run: Run) -> None:
        """Have the requests of a batch asked that have no outcome yet; its `lines` are there."""
        batch = run.batch
        self._runs[batch.id] = run
        self._turns.add(batch.id, batch.created.owner, batch.pending)
        self._pump()

    async def end(self, run: Run) -> None:
        """No request of a batch runs afterwards, or will. Idempotent."""
        self._runs.pop(run.batch.id, None)
        self._turns.remove(run.batch.id)
        for request in run.requests:
            request.cancel()
        await asyncio.gather(*run.requests, return_exceptions=True)

    def _pump(self) -> None:
        """Let those run whose turn it is."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self.halted:
            return
        loop = asyncio.get_running_loop()
        if self._is_full():
            self._alarm = loop.call_later(self._retry_seconds, self._pump)
            return
        while (turn := self._turns.next(loop.time())) is not None:
            run = self._runs[turn.batch]
            # A context of its own, for the caller that is set in it.
            task = loop.create_task(self._carry_out(run, turn), context=Context())
            run.requests.add(task)
            task.add_done_callback(run.requests.discard)
        if (time := self._turns.next_time(loop.time())) is not None:
            self._alarm = loop.call_at(time, self._pump)

    def _is_full(self) -> bool:
        """Whether there is no room, which is said once."""
        full = self._full()
        if full and self._runs and not self._waits_for_room:
            log.warning("batches stand still: files and logs take more than batches.max_stored")
        self._waits_for_room = full
        return full

    async def _carry_out(self, run: Run, turn: Turn) -> None:
        wait_seconds: float | None = None
        try:
            outcome = await self._ask(run, turn.request)
            if isinstance(outcome, LineDone):
                await run.scribe.write(outcome)
                run.tries.pop(turn.request, None)
                self._access.count(current.get())
                self._metrics.request_done(outcome.ok)
            else:
                wait_seconds = outcome
        except IllegalTransition:  # the batch is over, and with it what was asked
            pass
        finally:
            if wait_seconds is None:
                self._turns.ended(turn)
            else:
                not_before = asyncio.get_running_loop().time() + wait_seconds
                self._turns.put_back(turn, not_before)
            run.news.set()
            self._pump()

    async def _ask(self, run: Run, request: int) -> LineDone | float:
        """What became of a request; or after how many seconds it is to be asked again."""
        assert run.lines is not None
        try:
            line = await self._disk(run.lines.read, request)
        except InputLost as error:
            return self._bad(request, refused("", "input_file_unreadable", str(error)))
        caller = self._access.on_behalf_of(run.batch.created.owner)
        if caller is None:
            return self._bad(request, refused(line.custom_id, *KEY_GONE))
        current.set(caller)  # of this task alone
        try:
            body = await self._endpoints[run.batch.created.endpoint](bytes(line.body))
        except Exception as error:
            return self._failed(run, request, line, error)
        return await off_loop(len(body), lambda: self._good(request, line.custom_id, body))

    def _good(self, request: int, custom_id: str, body: bytes) -> LineDone:
        used = msgspec.json.decode(body, type=_Used).usage or _Usage()
        return LineDone(
            at=self._wall_clock(),
            request=request,
            ok=True,
            input_tokens=used.prompt_tokens,
            output_tokens=used.completion_tokens,
            reasoning_tokens=used.completion_tokens_details.reasoning_tokens,
            entry=answered(custom_id, 200, body),
        )

    def _failed(
        self, run: Run, request: int, line: RequestLine, error: Exception
    ) -> LineDone | float:
        if isinstance(error, GenerationFailed) and error.code in _AFTER_RESTART:
            self.halted = True  # it is asked again after the next start
            return 0.0
        answer = as_api_error(error)
        if self._again(run, request, answer):
            asked = float(answer.headers.get("Retry-After", 1))
            return min(asked, self._retry_seconds)
        body = msgspec.json.encode(answer.body)
        return self._bad(request, answered(line.custom_id, answer.status, body))

    def _again(self, run: Run, request: int, error: ApiError) -> bool:
        """Whether it makes sense to ask again. Counts the tries that are not to be too many."""
        code = error.body.error.code
        if error.status == 429 or code in _HELD_UP:
            return True
        if code != "interpreter_lost" and not (
            error.status == 503 and "Retry-After" in error.headers
        ):
            return False
        tries = run.tries[request] = run.tries.get(request, 0) + 1
        return tries < _TRIES

    def _bad(self, request: int, entry: msgspec.Raw) -> LineDone:
        return LineDone(at=self._wall_clock(), request=request, ok=False, entry=entry)
