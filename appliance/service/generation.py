"""One request on its way: what came of it so far, and where its output goes."""

from __future__ import annotations

import math
from collections.abc import Callable

from appliance.engines.protocol import Produced, SequenceSpec
from appliance.service.interface import GenerationFailed, RequestTimes, Sink, SubmitRequest
from appliance.vocabulary import FinishReason, RequestId, Slo

NO_SLO = Slo(ttft_seconds=math.inf, tbt_seconds=math.inf)


class RequestStream:
    """The daemon pushes, a sink takes. Implements `appliance.service.interface.Generation`.

    It also keeps every token produced, so that the request can be continued on another worker.
    """

    __slots__ = (
        "_ended",
        "_on_cancel",
        "_on_reader",
        "_reads",
        "_sink",
        "arrived",
        "cancel_reason",
        "counted",
        "excused",
        "failure",
        "first",
        "id",
        "late",
        "newest",
        "output",
        "paused",
        "policies",
        "request",
        "slo",
        "taken",
        "times",
        "unanswered",
    )

    def __init__(
        self,
        request: SubmitRequest,
        arrived: float,
        sink: Sink,
        on_cancel: Callable[[RequestId], None],
        on_reader: Callable[[RequestId, bool], None],
        slo: Slo = NO_SLO,
    ) -> None:
        """`slo` is the request's service level. `on_reader` hears whether the client reads."""
        self.id = request.id
        self.request = request
        self.slo = slo
        self.arrived = arrived
        self.first: float | None = None
        """When the first token came."""
        self.newest = arrived
        """When the last token came, or the request; later by what was excused since."""
        self.late = 0
        """Tokens that came after they were due."""
        self.times: RequestTimes | None = None
        """What its time went to; known when it is over."""
        self.output: list[int] = []
        self.cancel_reason = FinishReason.CANCELLED
        self.paused = False
        """Whether its client ever stopped reading: only then something can be excused."""
        self.excused = 0.0
        """Seconds that it was paused for its client: backpressure, which shifts its deadlines."""
        self.failure: GenerationFailed | None = None
        """Why the appliance gave the request up, if it did."""
        self.taken = False
        """Whether `submit` has answered: a request that is refused at once has no sink."""
        self.policies = 0
        """Those that it came under: how often they had been changed before."""
        self.counted = False
        """Whether it is counted as kept or missed, which it is once."""
        self.unanswered = False
        """Whether it is counted as one that was due, or refused, before it had any token."""
        self._reads = True
        self._ended = False
        self._sink = sink
        self._on_cancel = on_cancel
        self._on_reader = on_reader

    def cancel(self, reason: FinishReason) -> None:
        if not self._ended:
            self.cancel_reason = reason
            self._on_cancel(self.id)

    def reader(self, *, reads: bool) -> None:
        if not self._ended and reads is not self._reads:
            self._reads = reads
            self.paused = True
            self._on_reader(self.id, reads)

    def excuse(self, seconds: float) -> None:
        """It was paused for so long since its newest token, which is as if it had come later."""
        self.excused += seconds
        self.newest += seconds

    def due(self) -> float:
        """When its next token is due: token k at arrival + TTFT + k * TBT, and what is excused; or
        the longest gap after its newest token, if that is earlier."""
        return min(self._scheduled(), self.slo.gap_over(len(self.output), self.newest))

    def _scheduled(self) -> float:
        return self.slo.scheduled(self.arrived + self.excused, len(self.output))

    def late_among(self, tokens: int, now: float) -> int:
        """How many of so many tokens that come now are late: if the schedule is missed, all are; if
        only the longest gap is over, the first, as none is waited for after it."""
        if now <= self.due():
            return 0
        return tokens if now > self._scheduled() else 1

    def decode_seconds(self) -> float:
        """From the first token to the newest, without what is excused; 0 before the first."""
        return 0.0 if self.first is None else self.newest - self.first - self.excused

    def push(self, produced: Produced) -> None:
        """A token came."""
        if self._ended:
            return
        if produced.tokens:
            self.output.append(produced.token)
        self._sink.produced(produced)

    def end(self, failure: GenerationFailed | None = None) -> None:
        """Nothing more will come."""
        if self._ended:
            return
        self.failure = failure
        self._ended = True
        if self.taken:
            self._sink.ended(self.times, failure)

    def sequence(self) -> SequenceSpec:
        """All that a worker needs to start the request, or to go on with it."""
        return SequenceSpec(
            request=self.id,
            model=self.request.model,
            prompt=self.request.prompt,
            output=tuple(self.output),
            body=self.request.body,
            prefix_salt=self.request.prefix_salt,
            images=self.request.images,
        )
