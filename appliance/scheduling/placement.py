"""Where requests go: which instances a policy may choose from, and what it is shown of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from appliance.scheduling.costmodel import CostModel
from appliance.scheduling.questions import (
    BatchView,
    GroupView,
    InstanceView,
    RequestView,
)
from appliance.scheduling.state import InstanceState, RequestState, TurnJob
from appliance.vocabulary import (
    InstanceId,
    ModelName,
    ModelSpec,
    RequestId,
    Role,
    Slo,
)


class Floor:
    """The instances and their roles. Makes the views; O(groups + batches) for each."""

    def __init__(
        self,
        models: Mapping[ModelName, ModelSpec],
        roles: Iterable[Role],
        requests: Mapping[RequestId, RequestState],
        costs: CostModel,
    ) -> None:
        self.roles = tuple(roles)
        self.instances: dict[InstanceId, InstanceState] = {
            number: InstanceState(id=number, engines={}) for number in range(len(self.roles))
        }
        self._models = models
        self._requests = requests
        self._costs = costs

    def candidates(self, wanted: Role) -> list[InstanceState]:
        """Live instances whose role is `wanted` or mixed; all live ones if there is none."""
        live = [instance for instance in self.instances.values() if instance.up]
        fitting = [i for i in live if self.roles[i.id] in (wanted, Role.MIXED)]
        return fitting or live

    def request_view(self, request: RequestState, now: float) -> RequestView:
        return RequestView(
            id=request.id,
            model=request.model,
            tokens=request.tokens,
            max_tokens=request.spec.max_tokens,
            slo=request.spec.slo,
            request_class=request.spec.request_class,
            waited_seconds=now - request.arrived,
        )

    def instance_view(self, instance: InstanceState) -> InstanceView:
        job = instance.job
        return InstanceView(
            id=instance.id,
            role=self.roles[instance.id],
            current_model=instance.current_model,
            groups=tuple(
                GroupView(
                    model=group.model,
                    admitted=group.admitted,
                    waiting=len(group.members),
                    seconds=sum(
                        self._costs.prefill_seconds(group.model, self._requests[member].tokens)
                        for member in group.members
                    ),
                )
                for group in instance.groups
            ),
            batches=tuple(self._batch_view(instance, model) for model in instance.batches),
            turn=job.model if isinstance(job, TurnJob) else None,
            prefills_since_turn=instance.prefills_since_turn,
        )

    def _batch_view(self, instance: InstanceState, model: ModelName) -> BatchView:
        members = [self._requests[request] for request in instance.batches[model]]
        return BatchView(
            model=model,
            requests=len(members),
            runnable=sum(request.runnable for request in members),
            slo=Slo(
                ttft_seconds=min(request.spec.slo.ttft_seconds for request in members),
                tbt_seconds=min(request.spec.slo.tbt_seconds for request in members),
            ),
            step_seconds=self._costs.step_seconds(model),
            switch_seconds=self._costs.switch_seconds(model, self._models[model].weight_bytes),
        )
