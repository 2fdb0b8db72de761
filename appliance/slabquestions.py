"""Asking a worker which slab of its pool is whose; it answers beside whatever it computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from appliance import wire
from appliance.api.service import SlabsUnanswered
from appliance.slabwords import SlabMap
from appliance.vocabulary import InstanceId

ANSWER_SECONDS: Final = 2.0
"""A worker takes milliseconds, unless its interpreter is held up."""


class SlabQuestions:
    """The questions that are open, one for each instance at most: whoever asks meanwhile gets the
    same answer. Used on one event loop."""

    def __init__(self, send: Callable[[InstanceId, wire.TellSlabs], None]) -> None:
        self._send = send
        self._open: dict[InstanceId, asyncio.Future[SlabMap]] = {}

    async def ask(self, instance: InstanceId) -> SlabMap:
        """Of an instance that is up. Raises `SlabsUnanswered`."""
        answer = self._open.get(instance)
        if answer is None:
            answer = self._open[instance] = asyncio.get_running_loop().create_future()
            self._send(instance, wire.TellSlabs())
        # Who leaves, or waited for long enough, takes the answer from nobody else.
        await asyncio.wait([answer], timeout=ANSWER_SECONDS)
        if not answer.done():
            if self._open.get(instance) is answer:
                del self._open[instance]
            raise SlabsUnanswered(f"instance {instance} did not answer in {ANSWER_SECONDS:g} s")
        if answer.cancelled():
            raise SlabsUnanswered(f"the worker of instance {instance} ended")
        return answer.result()

    def answered(self, message: wire.SlabsTold) -> None:
        """A worker answers; too late is as good as never."""
        answer = self._open.pop(message.instance, None)
        if answer is not None:
            answer.set_result(message.slabs)

    def lost(self, instance: InstanceId) -> None:
        """The worker died; it will not answer."""
        answer = self._open.pop(instance, None)
        if answer is not None:
            answer.cancel()
