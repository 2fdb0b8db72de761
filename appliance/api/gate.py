"""The appliance as one key sees it: its models, its limits, its turn when there is no room."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from appliance.api import tracing
from appliance.api.auth import Access, Caller, Forbidden, LimitMet, Used, current
from appliance.api.errors import BadRequest
from appliance.api.keymetrics import WAITING
from appliance.api.service import (
    Activity,
    Generation,
    InstanceActivity,
    ModelCard,
    ModelNotFound,
    QueueFull,
    RequestActivity,
    RequestTimes,
    Service,
    Snapshot,
    SubmitRequest,
    cancelled,
    removed,
)
from appliance.engines.protocol import Produced
from appliance.fairqueue import FairQueue
from appliance.keys import Key
from appliance.ratelimits import Meter, Refusal
from appliance.tokens import Tokenizer
from appliance.vocabulary import (
    FinishReason,
    ModelName,
    RequestClass,
    RequestId,
    WaitCode,
    WaitReason,
)

MAX_WAITING: Final = 64
MAX_WAIT_SECONDS: Final = 300.0

_MOST_WAITING: Final = 4096
"""Sequences that wait at most, of all keys together: each holds its prompt and a connection."""

_RETRY_SECONDS: Final = 0.05
"""The next one is also tried without being told that there is room: others use the appliance."""

_FULL_SECONDS: Final = 1.0
"""After how long a key makes sense to try again that has too many waiting."""


def gated(
    service: Service,
    access: Access,
    *,
    max_waiting: int = MAX_WAITING,
    max_wait_seconds: float = MAX_WAIT_SECONDS,
) -> Service:
    """`service` as whoever asks may use it (`appliance.api.auth.current`).

    Of each key `max_waiting` sequences wait while the appliance has no room for them, each for
    `max_wait_seconds` at most; then it raises `QueueFull`.
    """
    return cast(Service, _Gate(service, access, max_waiting, max_wait_seconds))


class _Gate:
    """Answers itself what depends on who asks; everything else is the service's own."""

    def __init__(
        self, service: Service, access: Access, max_waiting: int, max_wait_seconds: float
    ) -> None:
        self._service = service
        self._access = access
        self._clock = access.clock
        self._metrics = access.metrics
        self._queue: FairQueue[_Metered] = FairQueue(max_waiting)
        self._max_wait_seconds = max_wait_seconds
        self._retry: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def now(self) -> float:
        return self._clock()

    def models(self) -> list[ModelCard]:
        key = current.get().key
        cards = self._service.models()
        return cards if key is None else [card for card in cards if key.allows(card.id)]

    def model(self, name: ModelName) -> ModelCard:
        self._check(current.get().key, name)
        return self._service.model(name)

    def tokenizer(self, name: ModelName) -> Tokenizer:
        self._check(current.get().key, name)
        return self._service.tokenizer(name)

    def activity(self) -> Activity:
        """Without what tells of models that the key does not know."""
        key, activity = current.get().key, self._service.activity()
        if key is None or not key.models:
            return activity
        return msgspec.structs.replace(
            activity,
            models=tuple(model for model in activity.models if key.allows(model.model)),
            instances=tuple(_shown(instance, key) for instance in activity.instances),
            host_bytes=_known(activity.host_bytes, key),
        )

    def submit(self, request: SubmitRequest) -> Generation:
        """Raises what the service raises, `Forbidden`, and `LimitMet`."""
        caller = current.get()
        if (trace := tracing.current.get()) is not None:
            request = msgspec.structs.replace(request, trace=trace)
        meter = caller.meter
        if meter is None:
            return self._service.submit(msgspec.structs.replace(request, slo=caller.slo))
        self._check(meter.key, request.model)
        request = _as_allowed(request, caller, meter.key)
        reserved = self._reserve(meter, request)
        metered = _Metered(self, request, reserved, meter, caller.bill)
        try:
            self._admit(metered, waits=caller.waits)
        except BaseException:
            meter.settle(reserved, 0, self._clock())
            raise
        if caller.bill is None:
            self._metrics.taken(meter.key.name)
        return metered

    # --- what an operator is shown ---------------------------------------------------------------

    def requests(self) -> list[RequestActivity]:
        """Also those that wait for their turn."""
        return self._with_waiting(self._service.requests())

    def _with_waiting(self, live: Sequence[RequestActivity]) -> list[RequestActivity]:
        waiting = [self._shown(metered) for metered in self._queue]
        return sorted([*live, *waiting], key=lambda one: one.age_seconds, reverse=True)

    def request(self, request: RequestId) -> RequestActivity:
        metered = self._find(request)
        return self._service.request(request) if metered is None else self._shown(metered)

    def cancel_request(self, request: RequestId) -> None:
        metered = self._find(request)
        if metered is None:
            self._service.cancel_request(request)
        else:
            self._turn_away(metered, cancelled())

    def snapshot(self) -> Snapshot:
        snapshot = self._service.snapshot()
        requests = tuple(self._with_waiting(snapshot.requests))
        return msgspec.structs.replace(snapshot, requests=requests)

    def metrics(self) -> bytes:
        self._metrics.waiting(Counter(metered.name for metered in self._queue))
        keys = self._metrics.registry.exposition() if self._access.has_keys else b""
        return self._service.metrics() + keys

    def _find(self, request: RequestId) -> _Metered | None:
        return next((metered for metered in self._queue if metered.id == request), None)

    def _shown(self, metered: _Metered) -> RequestActivity:
        request = metered.request
        before = len(self._queue) - 1
        others = f", and {before} others wait with it" if before else ""
        return RequestActivity(
            id=request.id,
            model=request.model,
            request_class=request.request_class,
            phase="waiting",
            age_seconds=self._clock() - metered.arrived,
            prompt_tokens=len(request.prompt),
            output_tokens=0,
            max_tokens=request.sampling.max_tokens,
            reason=WaitReason(
                code=WaitCode.TURN,
                message=f"the appliance is full{others}; the keys take turns",
            ),
        )

    def _check(self, key: Key | None, name: ModelName) -> None:
        if key is not None and not key.allows(name):
            raise ModelNotFound(name)

    def _reserve(self, meter: Meter, request: SubmitRequest) -> float:
        bucket = meter.tokens
        if bucket is not None and request.together_tokens > bucket.per_minute:
            if request.pooling is not None:
                raise BadRequest(
                    f"all texts together come to {request.together_tokens} tokens, but the API key "
                    f"has {bucket.per_minute} per minute; send fewer or shorter ones",
                    code="token_limit_exceeded",
                )
            raise BadRequest(
                f"n: all answers together may come to {request.together_tokens} tokens, but the "
                f"API key has {bucket.per_minute} per minute; ask for fewer or shorter ones",
                "n",
                "token_limit_exceeded",
            )
        tokens = len(request.prompt) + request.sampling.max_tokens
        together = request.together_tokens if request.pooling is not None else 0
        reserved = meter.reserve(tokens, self._clock(), of_tokens=together)
        if isinstance(reserved, Refusal):
            self._metrics.refused(meter.key.name, reserved.limit)
            raise LimitMet(reserved)
        return reserved

    # --- whose turn it is ------------------------------------------------------------------------

    def _admit(self, metered: _Metered, *, waits: bool) -> None:
        """Let a sequence begin, after those that wait. Raises `QueueFull` for one that would have
        to wait and does not."""
        if not waits:
            if self._queue:
                raise QueueFull(_FULL_SECONDS)
            metered.begin(self._service.submit(metered.request))
            return
        if self._queue:
            self._wait(metered)
            self.next()
            return
        try:
            metered.begin(self._service.submit(metered.request))
        except QueueFull:
            self._wait(metered)
            self._try_again_later()

    def _wait(self, metered: _Metered) -> None:
        """Let a sequence wait for its turn. Raises `QueueFull` if too many do."""
        if len(self._queue) >= _MOST_WAITING or not self._queue.push(metered.key, metered):
            self._metrics.refused(metered.name, WAITING)
            raise QueueFull(_FULL_SECONDS)
        metered.alarm = asyncio.get_running_loop().call_later(
            self._max_wait_seconds, self._too_late, metered
        )

    def _too_late(self, metered: _Metered) -> None:
        """It has waited as long as anybody may."""
        self._metrics.refused(metered.name, WAITING)
        self._turn_away(metered, QueueFull(_FULL_SECONDS))

    def _turn_away(self, metered: _Metered, error: Exception) -> None:
        """A sequence that waits is told that it will not begin."""
        self._queue.remove(metered.key, metered)
        self._waited(metered)
        metered.begin(error)

    def _waited(self, metered: _Metered) -> None:
        """A sequence does not wait any more."""
        if metered.alarm is not None:
            metered.alarm.cancel()

    def next(self) -> None:
        """There may be room: let those begin whose turn it is."""
        while (first := self._queue.peek()) is not None:
            key, metered = first
            try:
                begun: Generation | Exception = self._service.submit(metered.request)
            except QueueFull:
                self._try_again_later()
                return
            except ModelNotFound as error:  # there was one when it came
                begun = removed(error.model)
            except Exception as error:
                begun = error
            self._queue.pop(key, len(metered.request.prompt))
            self._waited(metered)
            metered.begin(begun)

    def _try_again_later(self) -> None:
        if self._retry is None:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(_RETRY_SECONDS, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self.next()

    def charge(self, key: str, tokens: int) -> None:
        self._queue.charge(key, tokens)

    def ended(
        self, metered: _Metered, prompt: int, output: int, meter: Meter, reserved: float
    ) -> None:
        """A sequence is over that came to so many tokens of prompt and of output."""
        meter.settle(reserved, prompt + output, self._clock())
        if metered.bill is None:
            self._metrics.ended(metered.name, prompt, output)
        elif metered.begun:
            metered.bill.append(Used(prompt, output))
        if metered.waits:
            self._queue.remove(metered.key, metered)
            self._waited(metered)
        self.next()


class _Metered:
    """A sequence of a key, which may have to wait before it begins. Implements `Generation`."""

    def __init__(
        self,
        gate: _Gate,
        request: SubmitRequest,
        reserved: float,
        meter: Meter,
        bill: list[Used] | None,
    ) -> None:
        self.request = request
        self.bill = bill
        self.key = meter.key.sha256
        self.name = meter.key.name
        self.alarm: asyncio.TimerHandle | None = None
        """Ends its wait, if it waits."""
        self._gate = gate
        self._reserved = reserved
        self._meter = meter
        self._inner: Generation | Exception | None = None
        self._begun = asyncio.Event()
        self._produced = 0
        self._settled = False
        self.arrived = gate.now()
        self._waited_seconds = 0.0

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def times(self) -> RequestTimes | None:
        """The wait for its turn is time in the queue."""
        if self._inner is None or isinstance(self._inner, Exception):
            return None
        times = self._inner.times
        if times is None:
            return None
        queued = times.queue_seconds + self._waited_seconds
        return msgspec.structs.replace(times, queue_seconds=queued)

    @property
    def waits(self) -> bool:
        return self._inner is None

    @property
    def begun(self) -> bool:
        """Whether the appliance took it in."""
        return self._inner is not None and not isinstance(self._inner, Exception)

    def begin(self, inner: Generation | Exception) -> None:
        """It has its turn; with an error if the appliance would not have it."""
        self._inner = inner
        self._waited_seconds = self._gate.now() - self.arrived
        self._begun.set()

    async def __aiter__(self) -> AsyncIterator[list[Produced]]:
        try:
            await self._begun.wait()
            if isinstance(self._inner, Exception):
                raise self._inner
            if self._inner is None:
                return  # nobody wanted it before it was its turn
            async for batch in self._inner:
                tokens = sum(produced.tokens for produced in batch)
                self._produced += tokens
                self._gate.charge(self.key, tokens)
                yield batch
        finally:
            self._end()

    def cancel(self, reason: FinishReason) -> None:
        if self._inner is not None and not isinstance(self._inner, Exception):
            self._inner.cancel(reason)
        self._end()
        self._begun.set()

    def reader(self, *, reads: bool) -> None:
        if self._inner is not None and not isinstance(self._inner, Exception):
            self._inner.reader(reads=reads)

    def _end(self) -> None:
        """It is over: what it reserved is settled for what it came to."""
        if self._settled:
            return
        self._settled = True
        prompt = len(self.request.prompt) if self.begun else 0
        self._gate.ended(self, prompt, self._produced, self._meter, self._reserved)


def _shown(instance: InstanceActivity, key: Key) -> InstanceActivity:
    """An instance, without the models that the key does not know."""
    runs = instance.model is not None and key.allows(instance.model)
    return msgspec.structs.replace(
        instance,
        model=instance.model if runs else None,
        pool_bytes=_known(instance.pool_bytes, key),
        prefetched=tuple(model for model in instance.prefetched if key.allows(model)),
    )


def _known(sizes: Mapping[str, int], key: Key) -> dict[str, int]:
    """Sizes by owner, of nobody and of the models that the key knows."""
    return {
        owner: size
        for owner, size in sizes.items()
        if not (model := owner.partition(":")[2]) or key.allows(model)
    }


def _as_allowed(request: SubmitRequest, caller: Caller, key: Key) -> SubmitRequest:
    """The request with what its key decides. Raises `Forbidden`."""
    request_class = request.request_class
    if request_class not in key.classes:
        if request_class is RequestClass.BATCH:
            raise Forbidden("service_tier: the API key has no batch work", "service_tier")
        request_class = RequestClass.BATCH  # a key for nothing but batch work
    return msgspec.structs.replace(
        request, request_class=request_class, slo=caller.slo, key=key.name
    )
