"""MuxServe (ICML'24) as Aegaeon and Prism run it: static spatial sharing of what fits.

Models that fit an instance together stay there and run in short turns, which replace
running at once under MPS. Models that fit nowhere are not served: the limit of multiplexing
(Aegaeon §7.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from appliance.hookspecs import hookimpl
from appliance.plugins.static import Fixed, Share
from appliance.scheduling.policy_api import (
    ClusterView,
    InstanceView,
    Placement,
    PlannedTurn,
    Refusal,
    RequestView,
)
from appliance.vocabulary import ModelName


class MuxServe(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, dict=True):
    """What can be set."""

    kv_share: Share = 0.15
    """The part of an instance's memory that each of its models has for KV at least."""
    turn_seconds: Annotated[float, Meta(gt=0, le=10)] = 0.05
    """How long a model runs before the next one of the instance does."""
    rates: Mapping[ModelName, Annotated[float, Meta(ge=0)]] = {}
    """Requests per second that each model is expected to get; 1 if it is not named."""

    def __post_init__(self) -> None:
        self._fixed = Fixed(self.kv_share, self.rates)

    @hookimpl
    def place(self, cluster: ClusterView) -> Sequence[Placement]:
        """The partition, fixed once every instance was there."""
        return self._fixed.of(cluster).placements()

    @hookimpl
    def prefill(self, request: RequestView) -> Refusal | None:
        """Refused if its model fits nowhere."""
        if request.model in self._fixed.unfit:
            return Refusal(reason=f"{request.model} has no room: other models were placed first")
        return None

    @hookimpl
    def round(self, instance: InstanceView) -> Sequence[PlannedTurn]:
        """Everybody in turn, for a moment: no switch is paid, as all are resident."""
        return [
            PlannedTurn(model=batch.model, quota_seconds=self.turn_seconds)
            for batch in instance.batches
            if batch.runnable
        ]
