"""One request on its way: what came of it so far, and the stream its client reads."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable

from appliance.api.service import GenerationFailed, RequestTimes, SubmitRequest
from appliance.engines.protocol import Produced, SequenceSpec
from appliance.vocabulary import FinishReason, RequestId, Slo

NO_SLO = Slo(ttft_seconds=math.inf, tbt_seconds=math.inf)


class RequestStream:
    """The daemon pushes, one client iterates. Implements `appliance.api.service.Generation`.

    It also keeps every token produced, so that the request can be continued on another worker.
    """

    def __init__(
        self,
        request: SubmitRequest,
        arrived: float,
        on_cancel: Callable[[RequestId], None],
        on_reader: Callable[[RequestId, bool], None],
        slo: Slo = NO_SLO,
    ) -> None:
        """`slo` is what the request was promised. `on_reader` hears whether the client reads."""
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
        self.excused = 0.0
        """Seconds that it was held for its client: its tokens are due so much later."""
        self._reads = True
        self._on_cancel = on_cancel
        self._on_reader = on_reader
        self._pending: list[Produced] = []
        self.failure: GenerationFailed | None = None
        """Why the appliance gave the request up, if it did."""
        self._ended = False
        self._news = asyncio.Event()

    @property
    def id(self) -> RequestId:
        return self.request.id

    async def __aiter__(self) -> AsyncIterator[list[Produced]]:
        while True:
            await self._news.wait()
            self._news.clear()
            # More may come, or the end, while the client is busy with a batch.
            while self._pending:
                batch, self._pending = self._pending, []
                yield batch
            if self.failure is not None:
                raise self.failure
            if self._ended:
                return

    def cancel(self, reason: FinishReason) -> None:
        if not self._ended:
            self.cancel_reason = reason
            self._on_cancel(self.id)

    def reader(self, *, reads: bool) -> None:
        if not self._ended and reads is not self._reads:
            self._reads = reads
            self._on_reader(self.id, reads)

    def excuse(self, seconds: float) -> None:
        """It was held for so long since its newest token, which is as if it had come later."""
        self.excused += seconds
        self.newest += seconds

    def due(self) -> float:
        """When its next token is due: token k at arrival + TTFT + k * TBT, and what is excused."""
        began = self.arrived + self.excused
        return began + self.slo.ttft_seconds + len(self.output) * self.slo.tbt_seconds

    def decode_seconds(self) -> float:
        """From the first token to the newest, without what is excused; 0 before the first."""
        return 0.0 if self.first is None else self.newest - self.first - self.excused

    def push(self, produced: Produced) -> None:
        """A token came."""
        if self._ended:
            return
        if produced.vector is None:
            self.output.append(produced.token)
        self._pending.append(produced)
        self._news.set()

    def end(self, failure: GenerationFailed | None = None) -> None:
        """Nothing more will come."""
        if self._ended:
            return
        self.failure = failure
        self._ended = True
        self._news.set()

    def sequence(self) -> SequenceSpec:
        """All that a worker needs to start the request, or to go on with it."""
        return SequenceSpec(
            request=self.id,
            model=self.request.model,
            prompt=self.request.prompt,
            output=tuple(self.output),
            sampling=self.request.sampling,
            pooling=self.request.pooling,
        )
