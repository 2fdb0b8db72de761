"""Asking workers to compile a guide before the request that it belongs to is taken in.

So a guide that cannot be compiled is refused at once, and no turn of others waits for a compiler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from appliance import wire
from appliance.engines.protocol import Guide, GuideRefused
from appliance.vocabulary import InstanceId, ModelName

COMPILE_SECONDS: Final = 60.0
"""How long a guide may take, the model's tokenizer and the guides before it included."""

_LOST: Final = object()
"""Instead of an answer: the worker died."""

_Answer: TypeAlias = asyncio.Future[object]


class GuideUnanswered(Exception):
    """Nobody said in time whether a guide can be compiled; trying again makes sense."""


class GuideChecks:
    """The questions that are open. Used on one event loop."""

    def __init__(self, send: Callable[[InstanceId, wire.PrepareGuide], None]) -> None:
        self._send = send
        self._asked = 0
        self._open: dict[tuple[InstanceId, int], _Answer] = {}

    async def ask(self, instances: Iterable[InstanceId], model: ModelName, guide: Guide) -> None:
        """Return when all of them have compiled it. Who dies meanwhile compiles it when the request
        comes, if another one could.

        Raises `GuideRefused` and `GuideUnanswered`.
        """
        self._asked += 1
        number = self._asked
        answers: dict[InstanceId, _Answer] = {}
        for instance in instances:
            answer: _Answer = asyncio.get_running_loop().create_future()
            answers[instance] = self._open[instance, number] = answer
            self._send(instance, wire.PrepareGuide(number, model, guide))
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
        if said and all(reason is _LOST for reason in said):
            raise GuideUnanswered("the worker that compiled the guide died")

    def answered(self, message: wire.GuidePrepared) -> None:
        """A worker answers; too late is as good as never."""
        answer = self._open.pop((message.instance, message.number), None)
        if answer is not None:
            answer.set_result(message.refused)

    def lost(self, instance: InstanceId) -> None:
        """The worker died, perhaps of the guide."""
        for key in [key for key in self._open if key[0] == instance]:
            self._open.pop(key).set_result(_LOST)
