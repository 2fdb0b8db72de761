"""What is written down of a batch, one record a line, and the batch that its records make.

Sans-IO. A batch is what its records say and nothing else: the same log gives the same
batch, wherever it ends. Times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

from appliance.errors import IllegalTransition


class Status(StrEnum):
    """Where a batch is: OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


MESSAGES: Final = "/v1/messages"
"""The endpoint of Anthropic's batches; OpenAI's have other ones."""
OVER: Final = frozenset({Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED})
_OPEN: Final = (Status.VALIDATING, Status.IN_PROGRESS)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch failed, as OpenAI lists it. `line` counts from 1 in the input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class _Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="record"):
    at: float


class Created(_Record, frozen=True, kw_only=True, tag="created"):
    """A client asked for it; always the first record. `owner` is the hash of the client's key, ""
    for a caller that needs none."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    expires_at: float
    metadata: dict[str, str] | None = None


class Begun(_Record, frozen=True, kw_only=True, tag="begun"):
    """Its input can be used: so many requests, numbered from 0."""

    total: int


class LineDone(_Record, frozen=True, kw_only=True, tag="line"):
    """A request of it has an outcome. `entry` is what the output file says of it, or the error
    file if it was not `ok`; tokens are those that count as used."""

    request: int
    ok: bool
    input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    """Of those of the output."""
    entry: msgspec.Raw = msgspec.Raw(b"null")


class CancelAsked(_Record, frozen=True, kw_only=True, tag="cancel"):
    """Its client does not want the rest."""


class Closing(_Record, frozen=True, kw_only=True, tag="closing"):
    """No request of it runs any more, or will: it ends as completed, or as expired."""

    status: Status


class Ended(_Record, frozen=True, kw_only=True, tag="ended"):
    """It is over, and its files are written. Repeats all that it came to, so that a log which is
    kept needs no other record behind the first."""

    status: Status
    since: dict[Status, float]
    total: int
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    reasoning_tokens: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    problems: tuple[Problem, ...] = ()


Record: TypeAlias = Created | Begun | LineDone | CancelAsked | Closing | Ended


class Batch:
    """A batch as its records have made it."""

    def __init__(self, created: Created) -> None:
        self.created = created
        self.status = Status.VALIDATING
        self.total = 0
        self.completed = 0
        self.failed = 0
        self.input_tokens = 0
        self.output_tokens = 0
        self.reasoning_tokens = 0
        self.output_file_id: str | None = None
        self.error_file_id: str | None = None
        self.problems: tuple[Problem, ...] = ()
        self.since: dict[Status, float] = {}
        """When it came to each status that it had, but for the first."""
        self._ending: Status | None = None
        self._done: set[int] = set()

    @classmethod
    def of(cls, records: Iterable[Record]) -> Batch | None:
        """The batch of a log; None if the log was cut off before its first record ended. Raises
        `IllegalTransition` for what no batch does."""
        batch: Batch | None = None
        for record in records:
            if batch is not None:
                batch.apply(record)
            elif isinstance(record, Created):
                batch = cls(record)
            else:
                raise IllegalTransition("a batch begins with its creation")
        return batch

    @property
    def id(self) -> str:
        return self.created.id

    @property
    def of_messages(self) -> bool:
        """Whether it is one of Anthropic's, and not one of OpenAI's."""
        return self.created.endpoint == MESSAGES

    @property
    def over(self) -> bool:
        return self.status in OVER

    @property
    def pending(self) -> list[int]:
        """Its requests that have no outcome yet, in order."""
        return [request for request in range(self.total) if request not in self._done]

    def closing(self, now: float) -> Status | None:
        """As what it has to close now, if it has to. Finished work counts, also when it is late."""
        if self.status is Status.IN_PROGRESS and len(self._done) == self.total:
            return Status.COMPLETED
        if self.status in _OPEN and now >= self.expires_at:
            return Status.EXPIRED
        return None

    @property
    def expires_at(self) -> float:
        return self.created.expires_at

    @property
    def ending(self) -> Status | None:
        """As what it ends once its files are written; None while more requests of it may begin."""
        if self.status is Status.CANCELLING:
            return Status.CANCELLED
        return self._ending

    def ended(
        self,
        at: float,
        status: Status,
        output_file_id: str | None = None,
        error_file_id: str | None = None,
        problems: tuple[Problem, ...] = (),
    ) -> Ended:
        """The record of its end, with what it came to."""
        return Ended(
            at=at,
            status=status,
            since=dict(self.since),
            total=self.total,
            completed=self.completed,
            failed=self.failed,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            reasoning_tokens=self.reasoning_tokens,
            output_file_id=output_file_id,
            error_file_id=error_file_id,
            problems=problems,
        )

    def allows(self, record: Record) -> bool:
        """Whether this may come next."""
        match record:
            case Begun():
                return self.status is Status.VALIDATING
            case LineDone(request=request):
                # Also while it is cancelled: what ended just then has an outcome.
                running = self.status in (Status.IN_PROGRESS, Status.CANCELLING)
                return running and 0 <= request < self.total and request not in self._done
            case CancelAsked():
                return self.status in _OPEN
            case Closing(status=Status.EXPIRED):
                return self.status in _OPEN
            case Closing(status=status):
                whole = self.status is Status.IN_PROGRESS and len(self._done) == self.total
                return status is Status.COMPLETED and whole
            case Ended(status=status):
                # Straight after the creation as anything: what was between may be left out.
                if self.status is Status.VALIDATING:
                    return status in OVER
                return not self.over and status in (Status.FAILED, self.ending)
            case _:
                return False

    def apply(self, record: Record) -> None:
        """Let it go on. Raises `IllegalTransition`, and changes nothing then."""
        if not self.allows(record):
            raise IllegalTransition(f"{self.id}: {self.status} and then {record!r:.200}")
        match record:
            case Begun():
                self.total = record.total
                self._enter(Status.IN_PROGRESS, record.at)
            case LineDone():
                self._done.add(record.request)
                self.completed += record.ok
                self.failed += not record.ok
                self.input_tokens += record.input_tokens
                self.output_tokens += record.output_tokens
                self.reasoning_tokens += record.reasoning_tokens
            case CancelAsked():
                self._enter(Status.CANCELLING, record.at)
            case Closing():
                self._ending = record.status
                self._enter(Status.FINALIZING, record.at)
            case Ended():
                self._end(record)

    def _enter(self, status: Status, at: float) -> None:
        self.status = status
        self.since[status] = at

    def _end(self, record: Ended) -> None:
        self.since = dict(record.since)
        self.total = record.total
        self.completed, self.failed = record.completed, record.failed
        self.input_tokens, self.output_tokens = record.input_tokens, record.output_tokens
        self.reasoning_tokens = record.reasoning_tokens
        self.output_file_id = record.output_file_id
        self.error_file_id = record.error_file_id
        self.problems = record.problems
        self._done.clear()
        self._enter(record.status, record.at)
