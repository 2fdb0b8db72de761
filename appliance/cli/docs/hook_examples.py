"""One short implementation of each hook, as docs/hooks.md shows them. Each is a policy's method."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.hookspecs import hookimpl
from appliance.scheduling.policy_api import (
    Admitted,
    BatchLimits,
    ClusterView,
    Costs,
    DecodingView,
    Fleet,
    InstanceView,
    Migration,
    Phase,
    Placement,
    PlannedTurn,
    PrefillChoice,
    Refusal,
    RequestView,
)
from appliance.vocabulary import InstanceId, ModelName, Role, Word


class Examples(Word, frozen=True, forbid_unknown_fields=True):
    """All of them together are a policy that serves."""

    @hookimpl
    def place(self, cluster: ClusterView) -> Sequence[Placement]:
        """Every instance does everything, for every model."""
        return [Placement(role=Role.MIXED, models=None) for _ in cluster.instances]

    @hookimpl
    def scale(self, cluster: ClusterView) -> Fleet:
        """One instance more than have something to do; the others rest."""
        busy = sum(view.load > 0 for view in cluster.instances)
        return Fleet(interactive=0, mixed=min(busy + 1, len(cluster.instances)), batch=0)

    @hookimpl
    def prefill(
        self, request: RequestView, instances: Sequence[InstanceView]
    ) -> PrefillChoice | Refusal:
        """In a group of its own where least is to do; not at all if that is too much."""
        best = min(instances, key=lambda view: (view.load, view.id))
        if best.load >= 500:
            return Refusal(reason=f"{best.load} requests are before it")
        return PrefillChoice(instance=best.id)

    @hookimpl
    def decode(self, instances: Sequence[InstanceView]) -> InstanceId:
        """Where the least KV is in use."""
        return min(instances, key=lambda view: (view.kv_bytes, view.id)).id

    @hookimpl
    def admit(self, instance: InstanceView) -> Admitted:
        """Earliest deadline first."""
        groups = instance.groups
        return sorted(range(len(groups)), key=lambda number: groups[number].deadline)

    @hookimpl
    def phase(self, instance: InstanceView) -> Phase:
        """Whatever is due first."""
        token_due = min(batch.deadline for batch in instance.batches)
        return Phase.PREFILL if instance.groups[0].deadline < token_due else Phase.DECODE

    @hookimpl
    def round(self, instance: InstanceView) -> Sequence[PlannedTurn]:
        """A second for every model that can run, the most urgent first."""
        runnable = [batch for batch in instance.batches if batch.runnable]
        runnable.sort(key=lambda batch: batch.deadline)
        return [PlannedTurn(model=batch.model, quota_seconds=1.0) for batch in runnable]

    @hookimpl
    def preempt(self, now: float, instance: InstanceView) -> float:
        """A turn that others wait for ends a second after it began."""
        return max(0.0, instance.turn_began + 1.0 - now)

    @hookimpl
    def batch(self, model: ModelName, costs: Costs) -> BatchLimits:
        """Prompts together with decoding steps, as many tokens at a time as take 50 ms alone."""
        fitting = [512, 256, 128]
        chunks = (n for n in fitting if costs.prefill_seconds(model, n) <= 0.05)
        return BatchLimits(requests=32, chunk_tokens=next(chunks, 64))

    @hookimpl
    def flow(
        self, requests: Sequence[DecodingView], others: Sequence[InstanceView]
    ) -> Sequence[Migration]:
        """A request that gets its tokens too slowly goes where least is to do."""
        late = [one for one in requests if one.tpot_seconds() > one.slo.tbt_seconds]
        idle = min(others, key=lambda view: (view.load, view.id)).id
        able = [one for one in late if one.instances is None or idle in one.instances]
        return [Migration(request=one.id, target=idle) for one in able[:1]]

    @hookimpl
    def evict(self, victims: Sequence[ModelName], costs: Costs) -> Sequence[ModelName]:
        """First those that come back fastest."""
        return sorted(victims, key=costs.switch_seconds)

    @hookimpl
    def prefetch(
        self, instance: InstanceView, upcoming: Sequence[ModelName]
    ) -> Sequence[ModelName]:
        """The next model, unless the memory is full."""
        return upcoming[:1] if instance.free_bytes else []
