"""Asks the requests of batches: so many at once, in the names of their owners, until each has an
outcome that is written down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import msgspec

from appliance.access.auth import Access, Caller
from appliance.batches.disk import Disk
from appliance.batches.log import BatchLog
from appliance.batches.records import Batch, LineDone
from appliance.batches.requestlines import InputLost, RequestLine, RequestLines
from appliance.batches.results import answered, refused
from appliance.batches.turns import BatchTurn, Turns
from appliance.batches.writer import BatchWriter
from appliance.errors import IllegalTransition
from appliance.gateway.sessions import Answered, FrontEndLost, NoFrontEnd
from appliance.observability.batch_metrics import BatchMetrics

ENDPOINTS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
)
"""What batches may be made for, by path."""

KEY_GONE: Final = ("invalid_api_key", "the API key of the batch was revoked, or has expired")

_TRIES: Final = 5
"""How often a request is asked that the appliance could not serve for reasons of its own, such as
a front end that died of it."""
_HELD_UP: Final = frozenset({"overloaded", "model_draining", "no_instance", "usage_not_counted"})
"""What passes, however long it takes: as with a full queue, it is not the request's fault. The
window of the batch bounds it."""
_AFTER_RESTART: Final = frozenset({"shutting_down", "internal_error"})
"""Failures of a whole appliance, which serves nothing before its next start."""
_LONG_BYTES: Final = 256 * 1024
"""An answer that is longer is read in a thread: streams must not wait for it."""

log = logging.getLogger("appliance.batches")


class BatchRun:
    """A batch that is not over."""

    def __init__(self, batch: Batch, written: BatchLog, writer: BatchWriter) -> None:
        self.batch = batch
        self.log = written
        self.writer = writer
        self.lines: RequestLines | None = None
        self.requests: set[asyncio.Task[None]] = set()
        self.tries: dict[int, int] = {}
        self.news = asyncio.Event()
        """Set when there may be something to do for the batch."""
        self.task: asyncio.Task[None] | None = None


class Fronts(Protocol):
    """The front ends, which answer requests."""

    async def ask(self, caller: Caller, path: str, body: bytes, line: str = "") -> Answered:
        """`line` is its id in the ledger. Raises `NoFrontEnd` and `FrontEndLost`."""


class _Details(msgspec.Struct, frozen=True):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    output_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    """``/v1/responses`` and ``/v1/messages`` say the last five; in the latter, `input_tokens` are
    those of the input that no cache had a part in."""

    @property
    def all_input_tokens(self) -> int:
        cached = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        return self.prompt_tokens or (self.input_tokens or 0) + cached


class _Used(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


class BatchRequests:
    """The requests of all batches that are carried out. While `halted`, or while there is no room
    for what comes of them, none begins."""

    def __init__(
        self,
        fronts: Fronts,
        access: Access,
        metrics: BatchMetrics,
        disk: Disk,
        at_once: int,
        *,
        is_full: Callable[[str | None], bool],
        wall_clock: Callable[[], float],
        retry_seconds: float,
    ) -> None:
        """What could not be done is tried again after `retry_seconds` at the latest. `is_full`
        says whether there is no room for files of an owner, or (None) for any."""
        self._is_full = is_full
        self._waits_for_room = False
        self.halted = True
        self._fronts = fronts
        self._access = access
        self._metrics = metrics
        self._disk = disk
        self._wall_clock = wall_clock
        self._retry_seconds = retry_seconds
        self._turns = Turns(at_once)
        self._runs: dict[str, BatchRun] = {}
        self._alarm: asyncio.TimerHandle | None = None

    def begin(self, run: BatchRun) -> None:
        """Have the requests of a batch asked that have no outcome yet; its `lines` are there."""
        batch = run.batch
        self._runs[batch.id] = run
        self._turns.add(batch.id, batch.created.owner, batch.pending)
        self._pump()

    async def end(self, run: BatchRun) -> None:
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
        if self._has_no_room():
            self._alarm = loop.call_later(self._retry_seconds, self._pump)
            return
        while (turn := self._turns.next(loop.time())) is not None:
            if self._is_full(self._runs[turn.batch].batch.created.owner):
                self._turns.put_back(turn, loop.time() + self._retry_seconds)
                continue
            run = self._runs[turn.batch]
            task = loop.create_task(self._carry_out(run, turn))
            run.requests.add(task)
            task.add_done_callback(run.requests.discard)
        if (time := self._turns.next_time(loop.time())) is not None:
            self._alarm = loop.call_at(time, self._pump)

    def _has_no_room(self) -> bool:
        """Whether there is none for any, which is said once."""
        full = self._is_full(None)
        if full and self._runs and not self._waits_for_room:
            log.warning("batches are paused: files and logs take more than batches.max_stored")
        self._waits_for_room = full
        return full

    async def _carry_out(self, run: BatchRun, turn: BatchTurn) -> None:
        wait_seconds: float | None = None
        caller = self._access.on_behalf_of(run.batch.created.owner)
        try:
            outcome = await self._ask(run, turn.request, caller)
            if isinstance(outcome, LineDone):
                await run.writer.write(outcome, partial(self._count, caller, outcome))
                run.tries.pop(turn.request, None)
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

    def _count(self, caller: Caller | None, outcome: LineDone) -> None:
        if caller is not None:
            self._access.count(caller)
        self._metrics.request_done(outcome.ok)

    async def _ask(self, run: BatchRun, request: int, caller: Caller | None) -> LineDone | float:
        """What became of a request; or after how many seconds it is to be asked again."""
        assert run.lines is not None
        endpoint = run.batch.created.endpoint
        try:
            line = await self._disk(run.lines.read, request)
        except InputLost as error:
            return self._bad(request, refused(endpoint, "", "input_file_unreadable", str(error)))
        if caller is None:
            return self._bad(request, refused(endpoint, line.custom_id, *KEY_GONE))
        try:
            id = f"{run.batch.id}:{request}"
            answer = await self._fronts.ask(caller, endpoint, bytes(line.body), id)
        except NoFrontEnd:
            return self._retry_seconds
        except FrontEndLost as error:
            if self._tried(run, request):
                return 0.0
            lost = refused(endpoint, line.custom_id, "front_end_lost", str(error))
            return self._bad(request, lost)
        if answer.status >= 400:
            return self._failed(run, request, line, answer)
        if len(answer.body) <= _LONG_BYTES:
            return self._good(request, endpoint, line.custom_id, answer)
        return await asyncio.to_thread(self._good, request, endpoint, line.custom_id, answer)

    def _good(self, request: int, endpoint: str, custom_id: str, answer: Answered) -> LineDone:
        used = msgspec.json.decode(answer.body, type=_Used).usage or _Usage()
        details = used.completion_tokens_details or used.output_tokens_details or _Details()
        return LineDone(
            at=self._wall_clock(),
            request=request,
            ok=True,
            input_tokens=used.all_input_tokens,
            output_tokens=used.completion_tokens or used.output_tokens or 0,
            reasoning_tokens=details.reasoning_tokens or 0,
            entry=answered(endpoint, custom_id, answer.status, answer.body),
        )

    def _failed(
        self, run: BatchRun, request: int, line: RequestLine, answer: Answered
    ) -> LineDone | float:
        """Whether it is the request's own fault is known by what the core refused of it."""
        refusal = answer.refused
        code = None if refusal is None else refusal.code
        if code in _AFTER_RESTART:
            self.halted = True  # it is asked again after the next start
            return 0.0
        headers = answer.headers if refusal is None else refusal.headers
        asked = {name.lower(): value for name, value in headers}.get("retry-after")
        status = answer.status if refusal is None else refusal.status
        waits = status == 429 or code in _HELD_UP
        if waits or (status == 503 and asked is not None and self._tried(run, request)):
            return min(_seconds(asked), self._retry_seconds)
        endpoint = run.batch.created.endpoint
        return self._bad(request, answered(endpoint, line.custom_id, answer.status, answer.body))

    def _tried(self, run: BatchRun, request: int) -> bool:
        """Whether it makes sense to ask again. Counts the tries that are not to be too many."""
        tries = run.tries[request] = run.tries.get(request, 0) + 1
        return tries < _TRIES

    def _bad(self, request: int, entry: msgspec.Raw) -> LineDone:
        return LineDone(at=self._wall_clock(), request=request, ok=False, entry=entry)


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header or 1))
    except ValueError:  # a date, say
        return 1.0
