"""Asking workers whether the weights on their devices are what the master images say.

Each call is a question to every instance, all at the same time; a worker answers between two jobs.
Images come and go meanwhile, and an engine keeps comparing with the slabs that it was given, even
if another image has them now. So a verdict counts only if the same version of the image was there
when the question was put and when its answer came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

from appliance.engines.protocol import Verdict
from appliance.vocabulary import InstanceId, ModelName
from appliance.worker import frames

ANSWER_SECONDS: Final = 30.0
"""How long a worker may take, its job under way included."""

Images: TypeAlias = Mapping[ModelName, int]
"""Whole images that an instance's engines load from, with their versions."""
Verdicts: TypeAlias = Mapping[ModelName, Verdict]


class _Question(NamedTuple):
    images: Images
    answer: asyncio.Future[Verdicts | None]


class Verifications:
    """The questions that are open. Used on one event loop."""

    def __init__(
        self,
        send: Callable[[InstanceId, frames.Verify], None],
        images: Callable[[InstanceId], Images],
    ) -> None:
        self._send = send
        self._images = images
        self._asked = 0
        self._open: dict[tuple[InstanceId, int], _Question] = {}

    async def ask(self, instances: Iterable[InstanceId]) -> Mapping[InstanceId, Verdicts | None]:
        """The verdicts of each instance by model; None for one that did not answer."""
        self._asked += 1
        number = self._asked
        questions: dict[InstanceId, _Question] = {}
        for instance in instances:
            answer: asyncio.Future[Verdicts | None] = asyncio.get_running_loop().create_future()
            questions[instance] = _Question(self._images(instance), answer)
            self._open[instance, number] = questions[instance]
            self._send(instance, frames.Verify(number))
        answers = {instance: question.answer for instance, question in questions.items()}
        try:
            if answers:
                await asyncio.wait(answers.values(), timeout=ANSWER_SECONDS)
        finally:
            for instance in answers:
                self._open.pop((instance, number), None)
        return {i: answer.result() if answer.done() else None for i, answer in answers.items()}

    def answered(self, message: frames.Verified) -> None:
        """A worker answers; too late is as good as never."""
        question = self._open.pop((message.instance, message.number), None)
        if question is None:
            return
        now = self._images(message.instance)
        question.answer.set_result(
            {
                model: verdict
                if verdict is Verdict.NOT_LOADED or _same(question.images, now, model)
                else Verdict.NO_IMAGE
                for model, verdict in message.models.items()
            }
        )

    def lost(self, instance: InstanceId) -> None:
        """The worker died; it will not answer."""
        for key in [key for key in self._open if key[0] == instance]:
            self._open.pop(key).answer.set_result(None)


def _same(before: Images, now: Images, model: ModelName) -> bool:
    """Whether the image of the model is still the one it was."""
    return model in before and before[model] == now.get(model)
