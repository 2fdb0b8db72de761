"""Asking workers to compile a guide before the request that it belongs to is taken in.

So a guide that cannot be compiled is refused at once, and no turn of others waits for a compiler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from appliance.engines.protocol import GuideRefused
from appliance.vocabulary import InstanceId, ModelName
from appliance.worker import frames

COMPILE_SECONDS: Final = 60.0
"""How long a guide may take, the model's tokenizer and the guides before it included; and how long
a worker may take to come up after none survived it."""
MOST_LOSSES: Final = 2
"""A guide that no worker survived so often in a row is not asked again: it may be what kills."""

_LOST: Final = object()
"""Instead of an answer: the worker died."""

_Answer: TypeAlias = asyncio.Future[object]


class GuideUnanswered(Exception):
    """The workers did not say in time whether a guide can be compiled; a retry makes sense."""


class GuideChecks:
    """The questions that are open. Used on one event loop."""

    def __init__(self, send: Callable[[InstanceId, frames.PrepareGuide], None]) -> None:
        self._send = send
        self._asked = 0
        self._open: dict[tuple[InstanceId, int], _Answer] = {}
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
        """Whether they compiled it, or none was asked; False if all of their workers died."""
        self._asked += 1
        number = self._asked
        answers: dict[InstanceId, _Answer] = {}
        for instance in instances:
            answer: _Answer = asyncio.get_running_loop().create_future()
            answers[instance] = self._open[instance, number] = answer
            self._send(instance, frames.PrepareGuide(number, model, body))
        try:
            if answers:
                await asyncio.wait(answers.values(), timeout=COMPILE_SECONDS)
        finally:
            for instance in answers:
                self._open.pop((instance, number), None)
        said = [answer.result() for answer in answers.values() if answer.done()]
        for reason in said:
            if isinstance(reason, str):
                raise GuideRefused(reason)
        if len(said) < len(answers):
            raise GuideUnanswered(f"no compiler had time for the guide in {COMPILE_SECONDS:g} s")
        return not said or any(reason is not _LOST for reason in said)

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
        """A worker answers; too late is as good as never."""
        answer = self._open.pop((message.instance, message.number), None)
        if answer is not None:
            answer.set_result(message.refused)

    def lost(self, instance: InstanceId) -> None:
        """The worker died, perhaps of the guide."""
        for key in [key for key in self._open if key[0] == instance]:
            self._open.pop(key).set_result(_LOST)
