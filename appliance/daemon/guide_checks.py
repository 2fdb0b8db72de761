"""Asking workers to compile a guide before the request that it belongs to is taken in.

So a guide that cannot be compiled is refused at once, and no turn of others waits for a compiler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from appliance.daemon.worker_calls import WorkerCalls
from appliance.engines.protocol import GuideRefused
from appliance.vocabulary import InstanceId, ModelName
from appliance.worker import frames

COMPILE_SECONDS: Final = 60.0
"""How long a guide may take, the model's tokenizer and the guides before it included; and how long
a worker may take to come up after none survived it."""
MOST_LOSSES: Final = 2
"""A guide that no worker survived so often in a row is not asked again: it may be what kills."""


class GuideUnanswered(Exception):
    """The workers did not say in time whether a guide can be compiled; a retry makes sense."""


class GuideChecks:
    """The checks that are open. Used on one event loop."""

    def __init__(self, send: Callable[[InstanceId, frames.Down], None]) -> None:
        self._calls = WorkerCalls[frames.GuidePrepared](send)
        self._greeted = asyncio.Event()

    async def ask(
        self, up: Callable[[], Sequence[InstanceId]], model: ModelName, body: bytes
    ) -> None:
        """Return when all that are `up` have compiled the guide of a request's body. A worker that
        dies meanwhile compiles it when the request comes, if another one could; if none could, the
        next one that comes up is asked.

        Raises `GuideRefused` and `GuideUnanswered`.
        """
        for losses in range(MOST_LOSSES):
            if losses and not up():
                await self._until_one_is_up()
            if await self._all_could(up(), model, body):
                return
        raise GuideUnanswered(f"{MOST_LOSSES} times no worker survived while it compiled the guide")

    async def _all_could(
        self, instances: Sequence[InstanceId], model: ModelName, body: bytes
    ) -> bool:
        """Whether they compiled it, or there was none; False if all of their workers died."""
        answers = await self._calls.call(
            instances, lambda number: frames.PrepareGuide(number, model, body), COMPILE_SECONDS
        )
        prepared = [answer for answer in answers.values() if answer is not None]
        for answer in prepared:
            if answer.refused is not None:
                raise GuideRefused(answer.refused)
        if len(answers) < len(instances):
            raise GuideUnanswered(f"no compiler had time for the guide in {COMPILE_SECONDS:g} s")
        return bool(prepared) or not answers

    async def _until_one_is_up(self) -> None:
        try:
            await asyncio.wait_for(self._greeted.wait(), COMPILE_SECONDS)
        except TimeoutError:
            raise GuideUnanswered(
                f"the worker that compiled the guide died, and for {COMPILE_SECONDS:g} s no other "
                "was up"
            ) from None

    def greeted(self) -> None:
        """A worker is up."""
        self._greeted.set()
        self._greeted = asyncio.Event()

    def answered(self, message: frames.GuidePrepared) -> None:
        """A worker compiled a guide, or refused it."""
        self._calls.answered(message.instance, message.number, message)

    def lost(self, instance: InstanceId) -> None:
        """The worker died, perhaps of the guide."""
        self._calls.lost(instance)
