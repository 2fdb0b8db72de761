"""Which requests of a key begin: its models, its tokens and its organization's, its places, and
its turn when there is no room."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Hashable, Iterator
from typing import Final

import msgspec

from appliance.access.auth import Access, Caller, Forbidden, LimitMet, Used
from appliance.access.fair_queue import FairQueue
from appliance.access.keys import Key
from appliance.access.places import Bounds, Line, Places
from appliance.access.rate_limits import LimitRefusal, Meter, Reserved
from appliance.checkpoints.adapters import SEPARATOR
from appliance.engines.protocol import Produced
from appliance.http.errors import BadRequest
from appliance.observability.key_metrics import WAITING
from appliance.service.interface import (
    Generation,
    Inference,
    ModelNotFound,
    QueueFull,
    RequestActivity,
    RequestTimes,
    Sink,
    SubmitRequest,
    cancelled,
    removed,
)
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

_MOST_WITHOUT_PLACE: Final = 4096
"""Sequences that wait for others of their key, of all keys together."""

_STARTING: Final = 2
"""Prompts of a key that an instance is given of a model: it computes one after the other, so the
next one is there when the first is done, and one of another key has two before it at most."""

_LEAST_POOLED: Final = 128
"""Prompts of a key that may be pooled at once, at least: short ones are computed together."""

_RETRY_SECONDS: Final = 0.05
"""The next waiting request is also tried without a notice of free room: others use it too."""

_FULL_SECONDS: Final = 1.0
"""After how long a key makes sense to try again that has too many waiting."""


class Admission:
    """Takes requests of callers into the service.

    A sequence of a key first needs a place: the key may have a number of them at once, and of each
    model no more than leaves some for other keys. Of those with a place `max_waiting` wait while
    there is no room for them, each for `max_wait_seconds` at most; the keys take turns. Without
    keys a request that has no room is refused at once.
    """

    def __init__(
        self,
        service: Inference,
        access: Access,
        *,
        max_waiting: int = MAX_WAITING,
        max_wait_seconds: float = MAX_WAIT_SECONDS,
        share_prefix_cache: bool = False,
        key_share: float = 1.0,
    ) -> None:
        """Unless they `share_prefix_cache`, each key has cached prefixes of its own: response times
        tell what is cached, so one key could find out what others sent. `key_share` is the share of
        the sequences that a model runs at once which one key may have, where others may ask."""
        self._service = service
        self._clock = access.clock
        self._metrics = access.metrics
        self._queue: FairQueue[_Metered] = FairQueue(max_waiting)
        self._max_wait_seconds = max_wait_seconds
        self._share_prefix_cache = share_prefix_cache
        self._access = access
        self._key_share = key_share
        self._places: Places[_Metered] = Places(_MOST_WITHOUT_PLACE)
        self._retry: asyncio.TimerHandle | None = None
        self._soon = False
        """Whether it will be looked at once more whose turn it is."""

    def submit(self, request: SubmitRequest, caller: Caller, sink: Sink) -> Generation:
        """Take a request in, or let it wait for its turn.

        Raises what the service raises, `Forbidden`, `LimitMet` and `BadRequest`; the sink hears
        nothing then. An error after a wait goes to the sink.
        """
        meter = caller.meter
        if meter is None:
            return self._service.submit(msgspec.structs.replace(request, slo=caller.slo), sink)
        name = request.asked or request.model
        if not caller.allows(name) or not _is_of(name, request.model):
            raise ModelNotFound(name)
        salt = "" if self._share_prefix_cache else _prefix_salt(meter.key)
        request = _as_allowed(request, caller, meter.key, salt)
        reserved = self._reserve(meter, request)
        metered = _Metered(self, request, sink, reserved, meter, caller.bill)
        try:
            if caller.waits:
                self._place(metered)
            else:  # lines of batches: so many are asked at once
                self._begin_unless_full(metered)
        except BaseException:
            self._release(metered)
            meter.settle(reserved, 0, self._clock())
            raise
        if caller.bill is None:
            self._metrics.taken(meter.key.name)
        return metered

    # --- what an operator is shown ---------------------------------------------------------------

    def waiting(self) -> list[RequestActivity]:
        """Those that wait for their turn."""
        return [self._shown(metered) for metered in self._all_waiting()]

    def waiting_one(self, request: RequestId) -> RequestActivity | None:
        """One of them, if it is."""
        metered = self._find(request)
        return None if metered is None else self._shown(metered)

    def turn_away(self, request: RequestId) -> bool:
        """Cancel a waiting request, with an error to its client; False if it does not wait."""
        metered = self._find(request)
        if metered is not None:
            self.leave(metered)
            metered.never_begins(cancelled())
        return metered is not None

    def keys_waiting(self) -> Iterator[str]:
        """The names of their keys, one for each that waits."""
        return (metered.name for metered in self._all_waiting())

    def _all_waiting(self) -> Iterator[_Metered]:
        return itertools.chain(self._queue, self._places)

    def _find(self, request: RequestId) -> _Metered | None:
        return next((metered for metered in self._all_waiting() if metered.id == request), None)

    def _shown(self, metered: _Metered) -> RequestActivity:
        request = metered.request
        return RequestActivity(
            id=request.id,
            model=request.model,
            request_class=request.request_class,
            phase="waiting",
            age_seconds=self._clock() - metered.arrived,
            prompt_tokens=len(request.prompt),
            output_tokens=0,
            max_tokens=request.max_tokens,
            reason=self._reason(metered),
        )

    def _reason(self, metered: _Metered) -> WaitReason:
        if not metered.placed:
            return WaitReason(code=WaitCode.KEY, message=self._full(metered))
        before = len(self._queue) - 1
        others = f", and {before} others wait with it" if before else ""
        message = f"the appliance is full{others}; the keys take turns"
        return WaitReason(code=WaitCode.TURN, message=message)

    def _full(self, metered: _Metered) -> str:
        """Who has no place for it."""
        of = self._bounds(metered.meter, metered.request)
        running = self._places.running_of(of.organization)
        if of.of_organization is not None and running >= of.of_organization:
            return (
                f"the organization {of.organization!r} of its API key has as many sequences at "
                f"once as it may ({running}): it begins after others of the organization"
            )
        running = self._places.running(metered.key)
        return (
            f"its API key has as many sequences at once as it may ({running} of all models): it "
            "begins after others of the key"
        )

    # --- what a key may ------------------------------------------------------------------------

    def _reserve(self, meter: Meter, request: SubmitRequest) -> Reserved:
        for counts in meter.counts():
            bucket = counts.tokens
            if bucket is not None and request.together_tokens > bucket.per_minute:
                whose = "the API key" if counts is meter.own else "the organization of the API key"
                raise _more_than_a_minute(request, whose, bucket.per_minute)
        tokens = len(request.prompt) + request.max_tokens
        together = request.together_tokens if request.pooled else 0
        reserved = meter.reserve(tokens, self._clock(), of_tokens=together)
        if isinstance(reserved, LimitRefusal):
            self._metrics.refused(meter.key.name, reserved.named)
            raise LimitMet(reserved)
        return reserved

    # --- places --------------------------------------------------------------------------------

    def _place(self, metered: _Metered) -> None:
        """Give a sequence a place, or let it wait for one. Raises `QueueFull` if too many do."""
        bounds = self._bounds(metered.meter, metered.request)
        if self._places.take(metered.key, metered.line, bounds):
            metered.has_place(bounds)
            self._admit(metered)
        elif not self._places.wait(metered.key, metered.line, metered):
            self._metrics.refused(metered.name, WAITING)
            raise QueueFull(_FULL_SECONDS)

    def _bounds(self, meter: Meter, request: SubmitRequest) -> Bounds:
        bounds = Bounds(meter.key.concurrency)
        if meter.organization is not None:
            of = meter.organization.of
            bounds = bounds._replace(organization=of.name, of_organization=of.concurrency)
        if self._key_share >= 1 or not self._access.several_keys:
            return bounds
        try:
            places = self._service.places(request.model)
        except ModelNotFound:  # it is removed: whether it may begin is then said by name
            return bounds._replace(of_key=None, of_organization=None)
        most = int(self._key_share * places.sequences)
        if request.pooled:
            return bounds._replace(of_model=max(most, _LEAST_POOLED))
        return bounds._replace(of_model=max(most, 1), starting=_STARTING * places.instances)

    def _begin_placed(self) -> None:
        """Let those go on that have a place now, and may wait for their turn then. The keys of an
        organization share its places, so each gets one at a time."""
        keys = self._places.waiting_keys()
        while keys:
            keys = [key for key in keys if self._begin_next(key)]

    def _begin_next(self, key: Hashable) -> bool:
        """Let one of a key go on; False if none may."""
        if not self._has_room(key) or (metered := self._next_placed(key)) is None:
            return False
        try:
            self._admit(metered)
        except Exception as error:
            metered.never_begins(_after_a_wait(error))
        return True

    def _has_room(self, key: Hashable) -> bool:
        """Whether another sequence of the key may wait for its turn."""
        return len(self._queue) < _MOST_WAITING and self._queue.has_room(key)

    def _next_placed(self, key: Hashable) -> _Metered | None:
        def bounds(first: _Metered) -> Bounds:
            return self._bounds(first.meter, first.request)

        metered = self._places.next(key, bounds)
        if metered is not None:
            metered.has_place(bounds(metered))
        return metered

    # --- whose turn it is ------------------------------------------------------------------------

    def _begin_unless_full(self, metered: _Metered) -> None:
        """Let a sequence begin that does not wait. Raises `QueueFull`."""
        if self._queue:
            raise QueueFull(_FULL_SECONDS)
        metered.begin(self._service.submit(metered.request, metered))

    def _admit(self, metered: _Metered) -> None:
        """Let a sequence begin, after those that wait. Raises `QueueFull` if too many do."""
        if self._queue:
            self._wait(metered)
            self._look_soon()
            return
        try:
            metered.begin(self._service.submit(metered.request, metered))
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
        """It has waited as long as a request may."""
        self._metrics.refused(metered.name, WAITING)
        self.leave(metered)
        metered.never_begins(QueueFull(_FULL_SECONDS))

    def _next(self) -> None:
        """There may be room: let those begin whose turn it is, then others that have a place."""
        self._soon = False
        self._begin_in_turn()
        self._begin_placed()

    def _begin_in_turn(self) -> None:
        while (first := self._queue.peek()) is not None:
            key, metered = first
            try:
                begun: Generation | Exception = self._service.submit(metered.request, metered)
            except QueueFull:
                self._try_again_later()
                return
            except Exception as error:
                begun = _after_a_wait(error)
            self._queue.pop(key, len(metered.request.prompt))
            if isinstance(begun, Exception):
                metered.never_begins(begun)
            else:
                metered.begin(begun)

    def _look_soon(self) -> None:
        """Not at once: the end of a request comes in the midst of what the service does."""
        if (self._queue or self._places) and not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._next)

    def _try_again_later(self) -> None:
        if self._retry is None:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(_RETRY_SECONDS, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self._next()

    def started(self, metered: _Metered) -> None:
        """A sequence has its first token."""
        if metered.placed:
            self._places.started(metered.key, metered.line)
            self._look_soon()

    def charge(self, key: str, tokens: int) -> None:
        """A key was served so many tokens."""
        self._queue.charge(key, tokens)

    def leave(self, metered: _Metered) -> None:
        """A sequence does not want to wait any more."""
        if metered.placed:
            self._queue.remove(metered.key, metered)
        else:
            self._places.leave(metered.key, metered.line, metered)

    def ended(self, metered: _Metered, prompt: int, output: int) -> None:
        """A sequence is over that came to so many tokens of prompt and of output."""
        metered.meter.settle(metered.reserved, prompt + output, self._clock())
        self._release(metered)
        if metered.bill is None:
            self._metrics.ended(metered.name, prompt, output)
        elif metered.begun:
            metered.bill.append(Used(prompt, output))
        self._look_soon()

    def _release(self, metered: _Metered) -> None:
        """Give its place back, if it has one."""
        if metered.placed:
            metered.placed = False
            self._places.give_back(
                metered.key,
                metered.line,
                started=metered.started,
                organization=metered.organization,
            )

    def now(self) -> float:
        return self._clock()


class _Metered:
    """A sequence of a key, which may have to wait before it begins. Implements `Generation` for
    its client, and `Sink` for the service."""

    __slots__ = (
        "_admission",
        "_inner",
        "_over",
        "_produced",
        "_sink",
        "_waited_seconds",
        "alarm",
        "arrived",
        "bill",
        "key",
        "meter",
        "name",
        "organization",
        "placed",
        "request",
        "reserved",
    )

    def __init__(
        self,
        admission: Admission,
        request: SubmitRequest,
        sink: Sink,
        reserved: Reserved,
        meter: Meter,
        bill: list[Used] | None,
    ) -> None:
        self.request = request
        self.bill = bill
        self.reserved = reserved
        self.meter = meter
        self.key = meter.key.sha256
        self.name = meter.key.name
        self.arrived = admission.now()
        self.alarm: asyncio.TimerHandle | None = None
        """Ends its wait for its turn, if it waits."""
        self.placed = False
        """Whether it has one of the places of its key."""
        self.organization = ""
        """The one that its place is of."""
        self._admission = admission
        self._sink = sink
        self._inner: Generation | None = None
        self._produced = 0
        self._over = False
        self._waited_seconds = 0.0

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def line(self) -> Line:
        """With which sequences of its key it waits for a place."""
        return self.request.model, self.request.request_class

    @property
    def started(self) -> bool:
        """Whether it has its first token."""
        return self._produced > 0

    @property
    def begun(self) -> bool:
        """Whether the appliance took it in."""
        return self._inner is not None

    def has_place(self, bounds: Bounds) -> None:
        """It has one, within these bounds."""
        self.placed = True
        self.organization = bounds.organization

    def begin(self, inner: Generation) -> None:
        """It has its turn."""
        self._inner = inner
        self._waited_seconds = self._admission.now() - self.arrived
        self._stop_alarm()

    def never_begins(self, error: Exception | None) -> None:
        """It was to wait, and does not any more."""
        self._stop_alarm()
        self.ended(None, error)

    # --- for its client --------------------------------------------------------------------------

    def cancel(self, reason: FinishReason) -> None:
        if self._over:
            return
        if self._inner is not None:
            self._inner.cancel(reason)
        else:
            self._admission.leave(self)
            self.never_begins(None)

    def reader(self, *, reads: bool) -> None:
        if self._inner is not None:
            self._inner.reader(reads=reads)

    # --- for the service -------------------------------------------------------------------------

    def produced(self, produced: Produced) -> None:
        tokens = produced.tokens
        started = self.started
        self._produced += tokens
        if self.started and not started:
            self._admission.started(self)
        self._admission.charge(self.key, tokens)
        self._sink.produced(produced)

    def ended(self, times: RequestTimes | None, failure: Exception | None) -> None:
        if self._over:
            return
        self._over = True
        if times is not None:  # the wait for its turn is time in the queue
            queued = times.queue_seconds + self._waited_seconds
            times = msgspec.structs.replace(times, queue_seconds=queued)
        prompt = len(self.request.prompt) if self.begun else 0
        self._admission.ended(self, prompt, self._produced)
        self._sink.ended(times, failure)

    def _stop_alarm(self) -> None:
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None


def _is_of(name: ModelName, model: ModelName) -> bool:
    """Whether what a client asked for is the model, or one of its adapters."""
    return name == model or name.startswith(f"{model}{SEPARATOR}")


def _more_than_a_minute(request: SubmitRequest, whose: str, per_minute: int) -> BadRequest:
    """The refusal of a request of which no minute has all tokens."""
    tokens, code = request.together_tokens, "token_limit_exceeded"
    if request.pooled:
        return BadRequest(
            f"all texts together come to {tokens} tokens, but {whose} has {per_minute} per "
            "minute; send fewer or shorter ones",
            code=code,
        )
    return BadRequest(
        f"n: all answers together may come to {tokens} tokens, but {whose} has {per_minute} per "
        "minute; ask for fewer or shorter ones",
        "n",
        code,
    )


def _as_allowed(
    request: SubmitRequest, caller: Caller, key: Key, prefix_salt: str
) -> SubmitRequest:
    """The request with what its key decides. Raises `Forbidden`."""
    request_class = request.request_class
    if request_class not in key.classes:
        if request_class is RequestClass.BATCH:
            raise Forbidden("service_tier: the API key has no batch work", "service_tier")
        request_class = RequestClass.BATCH  # a key for nothing but batch work
    return msgspec.structs.replace(
        request,
        request_class=request_class,
        slo=caller.slo,
        key=key.name,
        prefix_salt=prefix_salt,
    )


def _after_a_wait(error: Exception) -> Exception:
    """What a client is answered whose sequence cannot begin when it is to."""
    return removed(error.model) if isinstance(error, ModelNotFound) else error


def _prefix_salt(key: Key) -> str:
    """Of the requests of a key. Workers see it, so it is not the hash by which keys are found."""
    return hashlib.sha256(f"prefix cache {key.sha256}".encode()).hexdigest()
