"""Asking workers whether the weights on their devices are what the master images say.

Each call is a question to every instance, all at the same time; a worker answers between two jobs.
Images come and go meanwhile, and an engine keeps comparing with the slabs that it was given, even
if another image has them now. So a verdict counts only if the same version of the image was there
when the question was put and when its answer came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from appliance.daemon.worker_calls import WorkerCalls
from appliance.engines.protocol import Verdict
from appliance.vocabulary import InstanceId, ModelName
from appliance.worker import frames

ANSWER_SECONDS: Final = 30.0
"""How long a worker may take, its job under way included."""

Images: TypeAlias = Mapping[ModelName, int]
"""Whole images that an instance's engines load from, with their versions."""
Verdicts: TypeAlias = Mapping[ModelName, Verdict]


class WeightVerification:
    """The questions that are open. Used on one event loop."""

    def __init__(
        self,
        send: Callable[[InstanceId, frames.Down], None],
        images: Callable[[InstanceId], Images],
    ) -> None:
        self._calls = WorkerCalls[tuple[frames.Verified, Images]](send)
        self._images = images

    async def ask(self, instances: Sequence[InstanceId]) -> Mapping[InstanceId, Verdicts]:
        """The verdicts of each instance that answered, by model."""
        before = {instance: self._images(instance) for instance in instances}
        answers = await self._calls.call(instances, frames.Verify, ANSWER_SECONDS)
        return {
            instance: _verdicts(answer[0].models, before[instance], answer[1])
            for instance, answer in answers.items()
            if answer is not None
        }

    def answered(self, message: frames.Verified) -> None:
        """A worker answers, with the images that its engines load from now."""
        images = self._images(message.instance)
        self._calls.answered(message.instance, message.number, (message, images))

    def lost(self, instance: InstanceId) -> None:
        """The worker died; it will not answer."""
        self._calls.lost(instance)


def _verdicts(found: Verdicts, before: Images, now: Images) -> Verdicts:
    """The verdicts that count: of a model that is not loaded, or whose image is the same."""
    return {
        model: verdict
        if verdict is Verdict.NOT_LOADED or _same(before, now, model)
        else Verdict.NO_IMAGE
        for model, verdict in found.items()
    }


def _same(before: Images, now: Images, model: ModelName) -> bool:
    """Whether the image of the model is still the one it was."""
    return model in before and before[model] == now.get(model)
