"""ServerlessLLM+ (Aegaeon §7.1): ServerlessLLM, with the shortest job first instead of the oldest.

Needs to know how long every answer will be, which nobody does but the lab: it cannot be loaded
anywhere else, and what it is told reaches no view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from appliance.hookspecs import hookimpl
from appliance.plugins.serverlessllm import ServerlessLlm, least_loaded
from appliance.scheduling.questions import (
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
        """Where least is to do, as a job of its own."""
        return PrefillChoice(instance=least_loaded(request, instances).id)

    @hookimpl
    def admit(self, instance: InstanceView, costs: Costs) -> Admitted:
        """The job that takes the least time first; of equals who came first."""
        groups = instance.groups
        return sorted(
            range(len(groups)),
            key=lambda number: (self._job_seconds(groups[number], costs), groups[number].arrived),
        )

    def _job_seconds(self, job: GroupView, costs: Costs) -> float:
        """Prompt and answer, alone on the instance."""
        decoding = self._lengths[job.first] * costs.step_seconds(job.model, 1, job.tokens)
        return costs.prefill_seconds(job.model, job.tokens) + decoding
