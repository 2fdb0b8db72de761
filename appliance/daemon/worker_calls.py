"""Calls of workers: a message to some instances, and what each of them answers in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from appliance.vocabulary import InstanceId
from appliance.worker import frames

Answer = TypeVar("Answer")


class WorkerCalls(Generic[Answer]):
    """The open calls of one kind. Used on one event loop. A call costs O(instances called)."""

    def __init__(self, send: Callable[[InstanceId, frames.Down], None]) -> None:
        self._send = send
        self._calls = 0
        self._open: dict[tuple[InstanceId, int], asyncio.Future[Answer | None]] = {}

    async def call(
        self,
        instances: Iterable[InstanceId],
        message: Callable[[int], frames.Down],
        timeout_seconds: float,
    ) -> dict[InstanceId, Answer | None]:
        """Send each instance the message with this call's number, and wait for the answers: None
        for an instance whose worker ended meanwhile. An instance that did not answer in time is
        left out."""
        self._calls += 1
        number = self._calls
        answers: dict[InstanceId, asyncio.Future[Answer | None]] = {}
        for instance in instances:
            answer: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
            answers[instance] = self._open[instance, number] = answer
            self._send(instance, message(number))
        try:
            if answers:
                await asyncio.wait(answers.values(), timeout=timeout_seconds)
        finally:
            for instance in answers:
                self._open.pop((instance, number), None)
        return {i: answer.result() for i, answer in answers.items() if answer.done()}

    def answered(self, instance: InstanceId, number: int, answer: Answer) -> None:
        """A worker answered; without effect if the call is over."""
        call = self._open.pop((instance, number), None)
        if call is not None:
            call.set_result(answer)

    def lost(self, instance: InstanceId) -> None:
        """The instance's worker ended; it will not answer."""
        for key in [key for key in self._open if key[0] == instance]:
            self._open.pop(key).set_result(None)
