"""What was said to a model and what it answered, with what each answer took. No clock, no I/O."""

from __future__ import annotations

import re
from collections import deque
from enum import StrEnum
from typing import Literal

import msgspec

from tui.drawing.wrapping import LINE_ENDS
from tui.messages import AnswerPiece, DaemonRefused, Document, PieceKind
from tui.request_trace import RequestTrace

MOST_ANSWERS = 100
MOST_CHARACTERS = 200_000
"""Of a conversation: of its questions and of what was answered, also of the last alone."""
LONGEST_QUESTION = 100_000
"""Characters."""
MOST_LINES = 10_000
"""Of an answer, as it ends them: there are models that say nothing but line feeds."""

PHASES = ("queue", "load", "prefill", "decode", "preempted")
"""What the time of an answer goes to."""

_LINE_END = re.compile(f"[{LINE_ENDS}]")
_PHASE = re.compile(r'(\w+);dur=(\d+(?:\.\d+)?)(?:;desc="(\d+)")?')


class AnswerState(StrEnum):
    """The state of an answer."""

    COMING = "coming"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class _Text(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Text
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Error(msgspec.Struct):
    message: str


class _Chunk(msgspec.Struct):
    """An event of `/v1/chat/completions`, as far as it is read."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class ChatAnswer:
    """To one question. Times are the listener's clock, Unix seconds."""

    def __init__(self, question: str, trace: RequestTrace) -> None:
        self.question = question
        self.trace = trace
        self.outcome = AnswerState.COMING
        self.why = ""
        """What ended it: a finish reason, or what went wrong."""
        self.text = ""
        self.reasoning = ""
        self.cut = False
        """There was more than is kept."""
        self.prompt_tokens: int | None = None
        self.tokens: int | None = None
        self.phases: dict[str, float] = {}
        """Seconds of its time by what it went to, as the daemon counts; empty where it tells
        none."""
        self.preemptions = 0
        self._lines_ended = 0
        self._asked_at = 0.0
        self._first_at: float | None = None
        self._newest_at = 0.0

    @property
    def ttft_seconds(self) -> float | None:
        """From the question to the first of the text, here."""
        return None if self._first_at is None else max(0.0, self._first_at - self._asked_at)

    @property
    def tbt_seconds(self) -> float | None:
        """Between tokens, on average, here."""
        if self._first_at is None or self.tokens is None or self.tokens < 2:
            return None
        return max(0.0, self._newest_at - self._first_at) / (self.tokens - 1)

    def measured(self) -> Document:
        """All that was measured of it, without a word of what was said."""
        return {
            "request": self.trace.request,
            "outcome": self.outcome.value,
            "ttft_seconds": self.ttft_seconds,
            "tbt_seconds": self.tbt_seconds,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.trace.output_tokens if self.tokens is None else self.tokens,
            **{f"{phase}_seconds": self.phases.get(phase) for phase in PHASES},
            "preemptions": self.preemptions,
            "instances": list(self.trace.instances),
            "switches": [f"{instance}:{model}" for instance, model in self.trace.switches],
        }

    def hear(self, piece: AnswerPiece) -> None:
        """More of it. Raises `DaemonRefused` for what no appliance says."""
        if piece.part is PieceKind.ASKED:
            self._asked_at = piece.at
        elif piece.part is PieceKind.BEGUN:
            self.trace.request = piece.data["request"]
        elif piece.part is PieceKind.REMARK:
            self._read_remark(piece.data["text"])
        else:
            self._read(piece)

    def end(
        self,
        outcome: Literal[AnswerState.DONE, AnswerState.CANCELLED, AnswerState.FAILED],
        why: str = "",
    ) -> None:
        """It is over, unless it was."""
        if self.outcome is AnswerState.COMING:
            self.outcome, self.why = outcome, why or self.why

    def _read(self, piece: AnswerPiece) -> None:
        try:
            chunk = msgspec.convert(piece.data, _Chunk)
        except msgspec.ValidationError as error:
            raise DaemonRefused(f"this is no answer of an appliance: {error}") from error
        if chunk.error is not None:
            self.end(AnswerState.FAILED, chunk.error.message)
        for choice in chunk.choices:
            content, reasoning = choice.delta.content or "", choice.delta.reasoning or ""
            if content or reasoning or choice.finish_reason:
                self._newest_at = piece.at
                self._first_at = piece.at if self._first_at is None else self._first_at
            self.text += self._fitting(content)
            self.reasoning += self._fitting(reasoning)
            self.why = choice.finish_reason or self.why
        if chunk.usage is not None:
            self.prompt_tokens = chunk.usage.prompt_tokens
            self.tokens = chunk.usage.completion_tokens

    def size(self) -> int:
        """Characters, with those of the question."""
        return len(self.question) + len(self.text) + len(self.reasoning)

    def _fitting(self, text: str) -> str:
        if self.cut:
            return ""
        kept = text[: MOST_CHARACTERS - self.size()]
        ends = [end.start() for end in _LINE_END.finditer(kept)]
        if len(ends) > (left := MOST_LINES - 1 - self._lines_ended):
            kept = kept[: ends[left]]
        self._lines_ended += len(ends)
        self.cut = len(kept) < len(text)
        return kept

    def _read_remark(self, text: str) -> None:
        name, _, value = text.partition(":")
        if name != "server-timing":
            return
        for phase, milliseconds, often in _PHASE.findall(value):
            self.phases[phase] = float(milliseconds) / 1000
            self.preemptions += int(often or 0)


class Conversation:
    """With one model. The oldest answers are forgotten where there are many, or long ones."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.answers: deque[ChatAnswer] = deque(maxlen=MOST_ANSWERS)

    @property
    def coming(self) -> ChatAnswer | None:
        """The answer that is not over."""
        last = self.answers[-1] if self.answers else None
        return last if last is not None and last.outcome is AnswerState.COMING else None

    def ask(self, question: str, trace: RequestTrace) -> tuple[ChatAnswer, Document]:
        """The answer that is to come, and what to ask for it: all that was said before, except what
        was not answered at all. Raises `ValueError` for a question that is too long."""
        if len(question) > LONGEST_QUESTION:
            raise ValueError(
                f"the question has {len(question):,} characters; {LONGEST_QUESTION:,} are the most"
            )
        while self._size() + len(question) > MOST_CHARACTERS:
            self.answers.popleft()
        messages: list[Document] = []
        for before in self.answers:
            if before.text:
                messages.append({"role": "user", "content": before.question})
                messages.append({"role": "assistant", "content": before.text})
        messages.append({"role": "user", "content": question})
        answer = ChatAnswer(question, trace)
        self.answers.append(answer)
        return answer, {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def hear(self, answer: ChatAnswer, piece: AnswerPiece) -> None:
        """More of one answer; the oldest answer may be dropped. Raises `DaemonRefused` for
        what no appliance sends."""
        answer.hear(piece)
        while len(self.answers) > 1 and self._size() > MOST_CHARACTERS:
            self.answers.popleft()

    def _size(self) -> int:
        return sum(answer.size() for answer in self.answers)
