"""ServerlessLLM+ (Aegaeon §7.1): ServerlessLLM, with the shortest job first instead of the oldest.

Needs to know how long every answer will be, which only the lab does: it cannot be loaded
anywhere else, and the lengths that it gets reach no view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from appliance.hookspecs import hookimpl
from appliance.plugins.serverlessllm import ServerlessLlm, least_loaded
from appliance.scheduling.policy_api import (
    Admitted,
    Costs,
    GroupView,
    InstanceView,
    PrefillChoice,
    RequestView,
)
from appliance.vocabulary import RequestId


class ServerlessLlmSjf(ServerlessLlm, dict=True):
    """ServerlessLLM+. Every request waits by itself, so `max_group` changes nothing."""

    oracle: ClassVar[bool] = True
    """Loaded only by who hands it the true lengths (`learn_oracle`)."""

    def __post_init__(self) -> None:
        self._lengths: Mapping[RequestId, int] = {}

    def learn_oracle(self, lengths: Mapping[RequestId, int]) -> None:
        """The tokens every request is going to produce. Looked at when they are needed, so the
        lab may fill it as requests arrive."""
        self._lengths = lengths

    @hookimpl
    def prefill(self, request: RequestView, instances: Sequence[InstanceView]) -> PrefillChoice:
        """Where its model waits already, else where least is to do; as a job of its own."""
        for view in instances:
            if any([group.model == request.model for group in view.groups]):
                return PrefillChoice(instance=view.id)
        return PrefillChoice(instance=least_loaded(request, instances).id)

    @hookimpl
    def admit(self, instance: InstanceView, costs: Costs) -> Admitted:
        """Jobs of what runs join it; then the one that takes the least time, of equals who came
        first."""
        groups = instance.groups
        running = {batch.model for batch in instance.batches}

        def rank(number: int) -> tuple[bool, float, float]:
            job = groups[number]
            return job.model not in running, self._job_seconds(job, costs), job.arrived

        return sorted(range(len(groups)), key=rank)

    def _job_seconds(self, job: GroupView, costs: Costs) -> float:
        """Prompt and answer, alone on the instance."""
        decoding = self._lengths[job.first] * costs.step_seconds(job.model, 1, job.tokens)
        return costs.prefill_seconds(job.model, job.tokens) + decoding
