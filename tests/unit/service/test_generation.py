"""A request between the daemon that pushes and the sink that takes."""

from __future__ import annotations

from appliance.engines.protocol import NO_TOKEN, Produced
from appliance.service.generation import NO_SLO, RequestStream
from appliance.service.interface import GenerationFailed, RequestTimes, SubmitRequest
from appliance.vocabulary import FinishReason, RequestId, Slo

REQUEST = SubmitRequest(
    id="r", model="a", prompt=(1, 2, 3), max_tokens=9, body=b"opaque", prefix_salt="salt"
)


class Heard:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.tokens: list[Produced] = []
        self.ends: list[tuple[RequestTimes | None, Exception | None]] = []

    def produced(self, produced: Produced) -> None:
        assert not self.ends
        self.tokens.append(produced)

    def ended(self, times: RequestTimes | None, failure: Exception | None) -> None:
        self.ends.append((times, failure))


class Owner:
    """Hears what a request asks of the daemon."""

    def __init__(self, slo: Slo = NO_SLO) -> None:
        self.cancelled: list[RequestId] = []
        self.readers: list[tuple[RequestId, bool]] = []
        self.sink = Heard()
        self.stream = RequestStream(
            REQUEST, 10.0, self.sink, self.cancelled.append, self._reader, slo
        )
        self.stream.taken = True

    def _reader(self, request: RequestId, reads: bool) -> None:
        self.readers.append((request, reads))


def token(number: int, finished: FinishReason | None = None) -> Produced:
    return Produced("r", number, finished)


def test_tokens_go_to_the_sink_at_once() -> None:
    """In order, and nothing follows the end."""
    owner = Owner()
    owner.stream.push(token(1))
    owner.stream.push(token(2, FinishReason.STOP))
    times = owner.stream.times = RequestTimes(queue_seconds=1.0)
    owner.stream.end()
    owner.stream.push(token(3))
    owner.stream.end(GenerationFailed("late", "too late"))

    assert owner.sink.tokens == [token(1), token(2, FinishReason.STOP)]
    assert owner.sink.ends == [(times, None)]


def test_a_failure_is_reported() -> None:
    """Why there is no more."""
    owner = Owner()
    failure = GenerationFailed("model_failed", "it broke", 500)
    owner.stream.end(failure)
    assert owner.sink.ends == [(None, failure)]
    assert owner.stream.failure is failure


def test_what_is_refused_at_once_has_no_sink() -> None:
    """Who submitted it is told instead."""
    owner = Owner()
    owner.stream.taken = False
    owner.stream.end(GenerationFailed("model_failed", "it broke", 500))
    assert owner.sink.ends == []
    assert owner.stream.failure is not None


def test_cancelling_is_reported_once_it_matters() -> None:
    """The daemon hears of a client that left, and why, but not after the end."""
    owner = Owner()
    owner.stream.cancel(FinishReason.STOP)
    assert (owner.cancelled, owner.stream.cancel_reason) == (["r"], FinishReason.STOP)
    owner.stream.end()
    owner.stream.cancel(FinishReason.CANCELLED)
    assert (owner.cancelled, owner.stream.cancel_reason) == (["r"], FinishReason.STOP)


def test_a_request_can_be_continued_elsewhere() -> None:
    """The sequence for a worker has every token so far, with details or without."""
    owner = Owner()
    assert owner.stream.sequence().output == ()
    owner.stream.push(token(5))
    owner.stream.push(Produced("r", 6, None, b"detail"))

    sequence = owner.stream.sequence()

    assert (sequence.request, sequence.model, sequence.prompt) == ("r", "a", (1, 2, 3))
    assert (sequence.output, sequence.body) == ((5, 6), b"opaque")
    assert sequence.prefix_salt == "salt"


def test_a_pooled_prompt_has_no_tokens() -> None:
    """Its outcome is all in the detail."""
    owner = Owner()
    pooled = Produced("r", NO_TOKEN, FinishReason.STOP, b"vector")
    owner.stream.push(pooled)
    assert (owner.stream.output, owner.sink.tokens) == ([], [pooled])


def test_a_reader_is_called_when_it_changes() -> None:
    """And of a stream that has ended nothing is."""
    owner = Owner()
    for reads in (True, False, False, True, True):
        owner.stream.reader(reads=reads)
    owner.stream.end()
    owner.stream.reader(reads=False)

    assert owner.readers == [("r", False), ("r", True)]


def test_a_gap_is_over_before_the_schedule() -> None:
    """The next token is due at the earlier of the two. If only the gap is over, the first of
    several tokens is late; if the schedule is missed, all are; the first has no gap before it."""
    stream = Owner(Slo(ttft_seconds=2.0, tbt_seconds=0.5, gap_seconds=1.0)).stream
    assert stream.due() == 12.0
    stream.push(token(1))
    stream.newest = 10.5
    assert stream.due() == 11.5
    assert [stream.late_among(3, now) for now in (11.5, 11.6, 12.5, 12.6)] == [0, 1, 1, 3]
    stream.newest = 12.0
    assert stream.due() == 12.5


def test_what_is_excused_is_not_late() -> None:
    """Tokens are due so much later, and take as long as without the pause."""
    stream = Owner(Slo(ttft_seconds=2.0, tbt_seconds=0.5)).stream
    stream.push(token(1))
    assert (stream.due(), stream.decode_seconds()) == (12.5, 0.0)
    stream.first, stream.newest = 11.0, 14.0

    stream.excuse(100.0)

    assert (stream.due(), stream.newest) == (112.5, 114.0)
    assert stream.decode_seconds() == 3.0
