"""The requests that are under way: taken in, their tokens passed on and measured, ended once."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from appliance.daemon.autopilot.promise_count import PromiseCount
from appliance.daemon.models import ModelAdministration
from appliance.observability.metrics import Metrics
from appliance.observability.request_log import log_request
from appliance.observability.request_phases import RequestPhases
from appliance.observability.slo_window import SloWindow
from appliance.scheduling.machine import Machine
from appliance.service.autopilot import Promises
from appliance.service.event_log import EventLog, NoticeKind
from appliance.service.generation import RequestStream
from appliance.service.interface import (
    GenerationFailed,
    ModelNotFound,
    ModelQueueFull,
    QueueFull,
    RequestNotFound,
    Sink,
    SubmitRequest,
    cancelled,
)
from appliance.vocabulary import (
    ClientBackpressured,
    ClientResumed,
    Event,
    Finish,
    FinishReason,
    InstanceId,
    ModelName,
    Reject,
    RequestArrived,
    RequestCancelled,
    RequestId,
    RequestSpec,
    TokenCount,
    TokensProduced,
)
from appliance.worker import frames

if TYPE_CHECKING:
    from appliance.observability.tracing import Traces

RETRY_AFTER_SECONDS = 1.0
REJECTION_STATUS = {
    "model_not_found": 404,
    "context_length_exceeded": 400,
    "request_failed": 400,
    "overloaded": 503,
    "model_draining": 503,
    "no_instance": 503,
    "model_removed": 404,
}

REFUSED = "overloaded"
"""Code of requests that a policy turned away. What instances or the daemon have no room for is not
the policies' doing; what waits for them is late in the end."""
COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


class RequestStreams:
    """The streams of live requests, by request. Used on the daemon's event loop. A token costs
    O(1) for its request; what can be counted once for a frame of tokens is."""

    def __init__(
        self,
        models: ModelAdministration,
        machine: Machine,
        handle: Callable[[Event], None],
        feed: EventLog,
        metrics: Metrics,
        clock: Callable[[], float],
        policy_changes: Callable[[], int],
        watch_seconds: Callable[[], float],
        devices: Callable[[InstanceId], int] = lambda _: 1,
    ) -> None:
        """`handle` gives the machine an event; `policy_changes` says how often other policies came
        to decide, `watch_seconds` how long the autopilot watches changes, `devices` how many an
        instance computes on."""
        self.streams: dict[RequestId, RequestStream] = {}
        self.windows: defaultdict[ModelName, SloWindow] = defaultdict(SloWindow)
        self.promises = PromiseCount(policy_changes, watch_seconds)
        self.phases = RequestPhases(devices=devices)
        self._models = models
        self._machine = machine
        self._handle = handle
        self._feed = feed
        self._metrics = metrics
        self._clock = clock
        self._traces: Traces | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, request: SubmitRequest, sink: Sink, max_live: int) -> RequestStream:
        """Take a request in, unless `max_live` are live. Raises as `Service.submit` does."""
        served = self._models.find(request.model)
        if request.asked and request.asked not in served.adapters:
            raise ModelNotFound(request.asked)
        if (reason := self._models.refused.get(request.model)) is not None:
            raise GenerationFailed("model_failed", reason, 500)
        if len(self.streams) >= max_live:
            raise QueueFull(RETRY_AFTER_SECONDS)
        if self._models.live(request.model) >= served.max_queue:
            raise ModelQueueFull(RETRY_AFTER_SECONDS, request.model)
        slo = request.slo.over(served.spec.slo_for(request.request_class))
        stream = RequestStream(request, self._clock(), sink, self._cancel, self._on_reader, slo)
        self.streams[request.id] = stream
        self.promises.arrived(stream)
        self.phases.arrived(request.id, request.model, stream.arrived)
        self._models.began(request.model, request.asked)
        self._idle.clear()
        self._feed.tell(
            NoticeKind.REQUEST_ARRIVED,
            id=request.id,
            model=request.model,
            request_class=request.request_class,
        )
        self._handle(RequestArrived(request=_spec(stream)))
        if stream.failure is not None:
            raise stream.failure
        stream.taken = True
        return stream

    def cancel(self, request: RequestId) -> None:
        """End a request for its client. Raises `RequestNotFound`."""
        stream = self.streams.get(request)
        if stream is None:
            raise RequestNotFound(request)
        stream.end(cancelled())
        self._cancel(request)

    def end_adapter(self, full: ModelName) -> None:
        """End all requests for an adapter that was removed."""
        failure = GenerationFailed("model_removed", f"{full} was removed", 404)
        for request in [r for r, stream in self.streams.items() if stream.request.asked == full]:
            self.streams[request].end(failure)
            self._cancel(request)

    def trace(self, traces: Traces) -> None:
        """Report every request that ends from now on, with the times of its phases."""
        self._traces = traces
        self.phases.keeps_stretches = True

    async def close(self) -> None:
        """Send the traces that were not sent yet."""
        if self._traces is not None:
            await self._traces.stop()

    async def idle(self) -> None:
        """Return when no request is live."""
        await self._idle.wait()

    def give_up(self, failure: GenerationFailed) -> None:
        """End all that are live for their clients: the daemon cannot go on with them."""
        for stream in self.streams.values():
            self._end(stream, failure.code, failure)

    def kept(self) -> Promises:
        """What clients got until now: live requests that miss a target already are counted first.
        O(live)."""
        now = self._clock()
        for stream in self.streams.values():
            if not stream.counted and self._overdue(stream, now):
                self.promises.broken(stream)
        return self.promises.total(self.streams.values())

    @staticmethod
    def _overdue(stream: RequestStream, now: float) -> bool:
        """Whether its next token is late already, and not for a client that does not read."""
        return not stream.paused and now > stream.due()

    def forget_model(self, name: ModelName) -> None:
        """The model is gone."""
        self.windows.pop(name, None)

    def produced(self, message: frames.Tokens) -> None:
        """A worker produced tokens of some requests."""
        now = self._clock()
        counts: list[TokenCount] = []
        tokens = late = 0
        gaps: dict[float, int] = {}
        """How many tokens came so long after the ones before; those of one step are alike."""
        for produced in message.produced:
            stream = self.streams.get(produced.request)
            if stream is None:
                continue
            count = produced.tokens
            tokens += count
            if stream.paused:
                self._excuse(stream)
            missed = stream.late_among(count, now)
            late += missed
            stream.late += missed
            self.promises.produced(stream, count, late=missed)
            if stream.output:
                gap = now - stream.newest
                gaps[gap] = gaps.get(gap, 0) + 1
            else:
                self._first_token(stream, now, count)
            stream.newest = now
            stream.push(produced)
            counts.append(TokenCount(request=stream.id, count=count, finished=produced.finished))
        if counts:
            self._measure(message.model, now, tokens, late, gaps)
            self._handle(
                TokensProduced(instance=message.instance, model=message.model, tokens=tuple(counts))
            )

    def finish(self, command: Finish) -> None:
        """The machine says that the request is over."""
        stream = self._forget(command.request)
        was_cancelled = command.reason is FinishReason.CANCELLED
        if command.reason in COMPLETE:
            self.promises.completed(stream)
        elif self._overdue(stream, self._clock()):
            self.promises.broken(stream)
        reason = stream.cancel_reason if was_cancelled else command.reason
        self._feed.tell(
            NoticeKind.REQUEST_ENDED,
            id=stream.id,
            model=stream.request.model,
            outcome=reason,
            output_tokens=len(stream.output),
            seconds=self._clock() - stream.arrived,
        )
        self._end(stream, reason)

    def reject(self, command: Reject) -> None:
        """The machine says that the request cannot be served."""
        stream = self._forget(command.request)
        if command.code == REFUSED or self._overdue(stream, self._clock()):
            self.promises.broken(stream)
        self._feed.tell(
            NoticeKind.REQUEST_REJECTED,
            id=stream.id,
            model=stream.request.model,
            code=command.code,
            reason=command.message,
        )
        status = REJECTION_STATUS.get(command.code, 500)
        retry = RETRY_AFTER_SECONDS if status == 503 else None
        failure = GenerationFailed(command.code, command.message, status, retry)
        self._end(stream, command.code, failure)

    def _forget(self, request: RequestId) -> RequestStream:
        stream = self.streams.pop(request)
        if not self.streams:
            self._idle.set()
        self._models.ended(stream.request.model, stream.request.asked)
        return stream

    def _end(
        self, stream: RequestStream, outcome: str, failure: GenerationFailed | None = None
    ) -> None:
        """End it for the client, the metrics and the log, each once."""
        if stream.times is not None:
            return
        now = self._clock()
        stream.times = self.phases.ended(stream.id, now)
        self._metrics.request_ended(stream.request.model, outcome)
        if failure is None:
            reason = FinishReason(outcome)
            self._metrics.finished(stream.request.model, reason, now - stream.arrived)
            self._metrics.requests.ended(stream, stream.times)
        log_request(stream, stream.times, outcome, failure, now)
        if self._traces is not None:
            self._traces.ended(stream, stream.times, outcome, failure, now)
        stream.end(failure)

    def _measure(
        self, model: ModelName, now: float, tokens: int, late: int, gaps: dict[float, int]
    ) -> None:
        window = self.windows[model]
        window.tokens(now, tokens, late)
        for gap, count in gaps.items():
            window.next_token(now, gap, count)
            self._metrics.tokens(model, count, gap)

    def _first_token(self, stream: RequestStream, now: float, tokens: int) -> None:
        model, seconds = stream.request.model, now - stream.arrived
        stream.first = now
        self.windows[model].first_token(now, seconds)
        self._metrics.first_token(model, len(stream.request.prompt), tokens, seconds)

    def _excuse(self, stream: RequestStream) -> None:
        """Its client stopped reading for a while: its tokens are due so much later."""
        state = self._machine.requests.get(stream.id)
        if state is not None and state.excused > stream.excused:
            stream.excuse(state.excused - stream.excused)

    def _cancel(self, request: RequestId) -> None:
        if request in self.streams:
            self._handle(RequestCancelled(request=request))

    def _on_reader(self, request: RequestId, reads: bool) -> None:
        if request not in self.streams:
            return
        self.phases.reader(request, reads=reads)
        self._handle(
            ClientResumed(request=request) if reads else ClientBackpressured(request=request)
        )


def _spec(stream: RequestStream) -> RequestSpec:
    """The request as the machine needs it."""
    request = stream.request
    return RequestSpec(
        id=request.id,
        model=request.model,
        prompt_tokens=len(request.prompt),
        max_tokens=request.max_tokens,
        slo=stream.slo,
        request_class=request.request_class,
        images=request.images,
        key=request.key or "",
    )
