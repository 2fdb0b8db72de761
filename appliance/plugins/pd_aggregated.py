"""Prefill and decoding aggregated, with chunked prefill: TaiChi's first baseline (§2.1, §4.1).

Every instance does both; a prompt of the model that decodes is computed in chunks with its steps
(Sarathi-Serve), so that no request waits for a whole prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from appliance.hookspecs import hookimpl
from appliance.plugins.aegaeon import UNLIMITED
from appliance.plugins.serverlessllm import at_the_end, everywhere, in_place
from appliance.scheduling.policy_api import (
    BatchLimits,
    ClusterView,
    InstanceView,
    Phase,
    Placement,
    PrefillChoice,
    RequestView,
)
from appliance.vocabulary import InstanceId


class PdAggregated(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, dict=True):
    """What can be set."""

    chunk_tokens: Annotated[int, Meta(ge=1)] = 1024
    """Tokens of a prompt that are computed in one decoding step (CP1024)."""
    max_prefills: Annotated[int, Meta(ge=1)] = 8
    """Prompts in a row before other models that decode have a turn. (The paper has one model, which
    decodes together with its prompts.)"""

    def __post_init__(self) -> None:
        self._prefills: dict[InstanceId, int] = {}
        """In a row, while other models decoded."""

    @hookimpl
    def place(self, cluster: ClusterView) -> Sequence[Placement]:
        return everywhere(cluster)

    @hookimpl
    def prefill(self, request: RequestView, instances: Sequence[InstanceView]) -> PrefillChoice:
        """Where the fewest requests are; of equals where the fewest tokens wait."""
        best = min(instances, key=lambda view: (view.load, waiting_tokens(view), view.id))
        return at_the_end(request, best)

    @hookimpl
    def decode(self, prefilled_on: InstanceId, instances: Sequence[InstanceView]) -> InstanceId:
        """Where it was prefilled."""
        return in_place(prefilled_on, instances)

    @hookimpl
    def phase(self, instance: InstanceView) -> Phase:
        """Prompts first, so many of them while other models decode."""
        model = instance.groups[0].model
        row = self._prefills.get(instance.id, 0)
        others = any([batch.runnable and batch.model != model for batch in instance.batches])
        owed = others and row >= self.max_prefills
        self._prefills[instance.id] = row + 1 if others and not owed else 0
        return Phase.DECODE if owed else Phase.PREFILL

    @hookimpl
    def batch(self) -> BatchLimits:
        return BatchLimits(requests=UNLIMITED, chunk_tokens=self.chunk_tokens)


def waiting_tokens(view: InstanceView) -> int:
    """Tokens of prompts that wait on an instance."""
    return sum([group.tokens for group in view.groups])
