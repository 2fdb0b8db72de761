"""Asking a worker which slab of its pool is whose; it answers while it computes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from appliance.service.interface import SlabsUnanswered
from appliance.vocabulary import InstanceId, SlabMap
from appliance.worker import frames

ANSWER_SECONDS: Final = 2.0
"""A worker takes milliseconds, unless its interpreter is held up."""


@dataclass(slots=True)
class _Question:
    asked_seconds: float
    answer: asyncio.Future[SlabMap] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class SlabQuestions:
    """The open questions, at most one for each instance: a caller that asks meanwhile gets the
    same answer. Used on one event loop."""

    def __init__(
        self,
        send: Callable[[InstanceId, frames.ReportSlabs], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._clock = clock
        self._open: dict[InstanceId, _Question] = {}

    async def ask(self, instance: InstanceId) -> SlabMap:
        """Of an instance that is up. Raises `SlabsUnanswered`."""
        now = self._clock()
        question = self._open.get(instance)
        if question is None:
            question = self._open[instance] = _Question(now)
            self._send(instance, frames.ReportSlabs())
        elif now - question.asked_seconds >= ANSWER_SECONDS:  # the worker may have missed it
            question.asked_seconds = now
            self._send(instance, frames.ReportSlabs())
        # A caller that is cancelled or times out does not cancel the answer for other callers.
        await asyncio.wait([question.answer], timeout=ANSWER_SECONDS)
        if not question.answer.done():
            raise SlabsUnanswered(f"instance {instance} did not answer in {ANSWER_SECONDS:g} s")
        if question.answer.cancelled():
            raise SlabsUnanswered(f"the worker of instance {instance} ended")
        return question.answer.result()

    def answered(self, message: frames.SlabsReported) -> None:
        """A worker answers: the waiting callers get the answer, and the next caller asks again."""
        question = self._open.pop(message.instance, None)
        if question is not None:
            question.answer.set_result(message.slabs)

    def lost(self, instance: InstanceId) -> None:
        """The worker died; it will not answer."""
        question = self._open.pop(instance, None)
        if question is not None:
            question.answer.cancel()
