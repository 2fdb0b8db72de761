"""The choices of an answer while they are generated: tokens arrive, pieces of text leave."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from msgspec import UNSET

from appliance.api.plan import Plan
from appliance.api.replies import CompletionDetails, Finish, LoggedToken, Piece, Usage
from appliance.api.service import Generation, GenerationFailed, RequestTimes, Service
from appliance.api.timing import longest
from appliance.api.toolreader import ToolReader
from appliance.engines.protocol import Produced
from appliance.tokens import TextStream, Tokenizer
from appliance.vocabulary import FinishReason, RequestId

_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has not (vLLM's convention)."""


UNREAD_TOKENS = 64
"""A client that leaves so many is behind: its request makes room until it has taken them."""


class Choice:
    """One choice: collects its tokens, gives out its text, knows when it is over."""

    def __init__(self, index: int, plan: Plan) -> None:
        request = plan.choices[index]
        self._index = index
        self._tokenizer = plan.tokenizer
        self._top = request.sampling.logprobs
        self._text = TextStream(
            plan.tokenizer,
            plan.stops,
            prompt=request.prompt,
            min_tokens=request.sampling.min_tokens,
            special_tokens=plan.interpretation is not None and plan.interpretation.special_tokens,
        )
        self._ids = plan.return_token_ids or plan.interpretation is not None
        self._offset = 0
        self.tokens = 0
        """Tokens generated, the one that ended it included."""
        self.finish: Finish | None = None
        self._stop: str | None = None

    def take(self, batch: Sequence[Produced]) -> Piece:
        """The piece that `batch` makes. Tokens behind a stop string are dropped."""
        texts: list[str] = []
        logged: list[LoggedToken] | None = None if self._top is None else []
        first = self.tokens
        for produced in batch:
            self.tokens += 1
            if logged is not None:
                logged.append(self._log(produced, self._top or 0))
            if produced.finished is not FinishReason.STOP:  # the token that says stop is no text
                texts.append(self._text.push(produced.token))
            if produced.finished is not None and not self._text.stopped:
                texts.append(self._text.finish())
                self.finish = _finish(produced.finished)
            if self._text.stopped:
                self.finish, self._stop = "stop", self._text.stop
            if self.finish is not None:
                break
        ids = [produced.token for produced in batch[: self.tokens - first]] if self._ids else None
        return Piece(self._index, "".join(texts), logged, self.finish, ids, self._stop)

    def _log(self, produced: Produced, top: int) -> LoggedToken:
        if not produced.logprobs:
            raise GenerationFailed("logprobs_missing", "the engine gave no log probabilities")
        sampled, *ranked = (
            _logged(self._tokenizer, entry.token, entry.logprob, self._offset)
            for entry in produced.logprobs[: top + 1]
        )
        self._offset += len(sampled.text)
        return LoggedToken(sampled.text, sampled.raw, sampled.logprob, ranked, sampled.offset)


def _logged(tokenizer: Tokenizer, token: int, logprob: float, offset: int) -> LoggedToken:
    text, raw = tokenizer.piece(token)
    return LoggedToken(text, raw, max(logprob, _LOWEST_LOGPROB), (), offset)


def _finish(reason: FinishReason) -> Finish:
    match reason:
        case FinishReason.STOP:
            return "stop"
        case FinishReason.LENGTH:
            return "length"
        case FinishReason.CANCELLED:
            raise GenerationFailed("cancelled", "the request was cancelled", 503)
        case FinishReason.ERROR:
            raise GenerationFailed("generation_failed", "the request failed")


class Choices:
    """All choices of one answer, generated side by side. A context: leaving it cancels what still
    runs, so nothing is computed for a client that left.

    Tokens that came while nobody looked become one piece per choice. When they are many, what
    makes them is told to make room, until somebody looks.
    """

    def __init__(self, plan: Plan, generations: Sequence[Generation]) -> None:
        self._plan = plan
        self._generations = generations
        self._choices = [Choice(index, plan) for index in range(len(generations))]
        self._unfinished = len(generations)
        self._ready: dict[int, list[Produced]] = {}
        self._failure: Exception | None = None
        self._looking = False
        """Whether somebody wants pieces, or waits for what they mean: then nobody is behind."""
        self._news = asyncio.Event()
        self._readers: list[asyncio.Task[None]] = []
        self._reader = None if plan.interpretation is None else ToolReader(plan)

    @classmethod
    def submit(cls, plan: Plan, service: Service) -> Choices:
        """Hand all choices in, or none. Raises `QueueFull`."""
        generations: list[Generation] = []
        try:
            for request in plan.choices:
                generations.append(service.submit(request))
        except BaseException:
            for generation in generations:
                generation.cancel(FinishReason.CANCELLED)
            if plan.interpretation is not None:
                plan.interpretation.end()
            raise
        return cls(plan, generations)

    @property
    def request(self) -> RequestId:
        """What operators know the answer by; of several choices, the first."""
        return self._generations[0].id

    @property
    def finished(self) -> bool:
        return self._unfinished == 0

    def usage(self) -> Usage:
        prompt, completion = self._plan.prompt_tokens, sum(c.tokens for c in self._choices)
        details = None
        if self._reader is not None and self._plan.reasons:
            details = CompletionDetails(self._reader.reasoning_tokens)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            completion_tokens_details=details or UNSET,
        )

    def times(self) -> RequestTimes | None:
        """What the time of the answer went to; None before it is over."""
        return longest(generation.times for generation in self._generations)

    async def __aenter__(self) -> Self:
        self._readers = [
            asyncio.create_task(self._read(index, generation))
            for index, generation in enumerate(self._generations)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    def cancel(self) -> None:
        """Nobody wants the rest."""
        for choice, generation in zip(self._choices, self._generations, strict=True):
            if choice.finish is None:
                generation.cancel(FinishReason.CANCELLED)
        if self._plan.interpretation is not None:
            self._plan.interpretation.end()

    async def pieces(self, wait_seconds: float | None = None) -> list[Piece]:
        """What is new, at most one piece per choice; empty if nothing came in `wait_seconds`.

        Raises `GenerationFailed` when the appliance gave one of the choices up.
        """
        self._looking = True
        try:
            return await self._pieces(wait_seconds)
        finally:
            self._looking = False

    async def _pieces(self, wait_seconds: float | None) -> list[Piece]:
        await self._wait(wait_seconds)
        if self._failure is not None:
            if not self._ready:
                raise self._failure
            self._news.set()  # what came before the failure goes out first
        ready, self._ready = self._ready, {}
        for index in ready:
            self._generations[index].reader(reads=True)
        pieces = [self._take(index, batch) for index, batch in ready.items()]
        if self._reader is None:
            return pieces
        return [await self._reader.read(piece) for piece in pieces]

    def _take(self, index: int, batch: list[Produced]) -> Piece:
        choice = self._choices[index]
        if choice.finish is not None:
            return Piece(index, "")
        piece = choice.take(batch)
        if piece.finish is not None:
            self._unfinished -= 1
            if batch[-1].finished is None:  # a stop string, which the appliance cannot know
                self._generations[index].cancel(FinishReason.STOP)
        return piece

    async def _wait(self, seconds: float | None) -> None:
        if not self._news.is_set():
            if seconds is None:
                await self._news.wait()
            else:
                alarm = asyncio.get_running_loop().call_later(seconds, self._news.set)
                try:
                    await self._news.wait()
                finally:
                    alarm.cancel()
        self._news.clear()

    async def _read(self, index: int, generation: Generation) -> None:
        finished = False
        try:
            async for batch in generation:
                ready = self._ready.setdefault(index, [])
                ready.extend(batch)
                self._news.set()
                if len(ready) >= UNREAD_TOKENS and not self._looking:
                    generation.reader(reads=False)
                finished = finished or batch[-1].finished is not None
            if not finished and self._choices[index].finish is None:
                raise GenerationFailed("cancelled", "the request was cancelled", 503)
        except Exception as error:  # raised again where the pieces are taken
            self._failure = error
            self._news.set()
