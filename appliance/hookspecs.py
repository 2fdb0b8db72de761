"""The questions a policy may answer, as pluggy hooks. A policy implements those it cares about.

An implementation is a method marked with `hookimpl` on the object that the policy's entry point
(group ``appliance.policies``) makes from its table of parameters. It gets frozen views, changes
nothing, and returns an answer, or None to leave the question to the next policy of the stack.
"""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from appliance.scheduling.questions import (
    InstanceView,
    Phase,
    PlannedTurn,
    PrefillChoice,
    RequestView,
)
from appliance.vocabulary import InstanceId, ModelName, Role

PROJECT = "appliance"
ENTRY_POINTS = "appliance.policies"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class PolicySpec:
    """Every hook, and when it is asked. Views and answers: `appliance.scheduling.questions`."""

    @hookspec(firstresult=True)
    def assign_roles(self, instances: int) -> Sequence[Role] | None:
        """Once, at start: the role of each of `instances` instances, in order."""

    @hookspec(firstresult=True)
    def choose_prefill(
        self, request: RequestView, instances: Sequence[InstanceView]
    ) -> PrefillChoice | None:
        """When a request arrives (or is prefilled again after a loss): which queue it joins."""

    @hookspec(firstresult=True)
    def choose_decode(
        self, request: RequestView, prefilled_on: InstanceId, instances: Sequence[InstanceView]
    ) -> InstanceId | None:
        """When a prompt is computed: which instance decodes the request."""

    @hookspec(firstresult=True)
    def choose_phase(self, instance: InstanceView) -> Phase | None:
        """When an instance has both prompts and batches waiting, and when a request joins its queue
        during a turn (answering ``PREFILL`` then preempts the turn)."""

    @hookspec(firstresult=True)
    def plan_round(self, instance: InstanceView) -> Sequence[PlannedTurn] | None:
        """When a round is over: the turns of the next, each model with runnable requests once at
        most, at least one of them."""

    @hookspec(firstresult=True)
    def choose_prefetch(
        self, instance: InstanceView, upcoming: Sequence[ModelName]
    ) -> Sequence[ModelName] | None:
        """When a job starts: which of the models that run next here and are not in place is brought
        in beside it: a sequence of at most one."""
