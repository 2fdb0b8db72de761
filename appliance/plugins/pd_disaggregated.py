"""Prefill and decoding disaggregated: TaiChi's second baseline (DistServe, Splitwise; §2.1, §4.1).

Some instances only prefill, the others only decode; KV goes from one to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from appliance.hookspecs import hookimpl
from appliance.plugins.aegaeon import Positive, partitions
from appliance.plugins.pd_aggregated import waiting_tokens
from appliance.plugins.serverlessllm import at_the_end, lone_turn
from appliance.scheduling.policy_api import (
    ClusterView,
    InstanceView,
    Placement,
    PlannedTurn,
    PrefillChoice,
    RequestView,
)
from appliance.vocabulary import InstanceId


class PdDisaggregated(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What can be set."""

    prefill_share: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Share of the instances that prefill (two of four)."""
    turn_seconds: Positive = 0.1
    """Length of the turns of a lone model: whose KV has come decodes with the next. (Engines look
    at every step.)"""

    @hookimpl
    def place(self, cluster: ClusterView) -> Sequence[Placement]:
        return partitions(len(cluster.instances), self.prefill_share)

    @hookimpl
    def prefill(self, request: RequestView, instances: Sequence[InstanceView]) -> PrefillChoice:
        """Where the fewest tokens wait."""
        best = min(instances, key=lambda view: (waiting_tokens(view), view.load, view.id))
        return at_the_end(request, best)

    @hookimpl
    def decode(self, instances: Sequence[InstanceView]) -> InstanceId:
        """Where the least KV is, counted in tokens, as that on its way there is no memory yet."""
        return min(instances, key=lambda view: (kv_tokens(view), view.kv_bytes, view.id)).id

    @hookimpl
    def round(self, instance: InstanceView) -> Sequence[PlannedTurn] | None:
        """Short turns for a lone model; how several share an instance is not in the papers."""
        return lone_turn(instance, self.turn_seconds)


def kv_tokens(view: InstanceView) -> int:
    """Tokens of the requests that decode on an instance."""
    return sum([batch.kv_tokens for batch in view.batches])
