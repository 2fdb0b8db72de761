"""The questions a policy may answer, as pluggy hooks. A policy implements those it cares about.

An implementation is a method marked with `hookimpl` on the object that the policy's entry point
(group ``appliance.policies``) makes from its table of parameters. It gets frozen views, changes
nothing, and returns an answer, or None to leave the question to the next policy of the stack. It
may leave out arguments that it does not need. Every hook gets the time `now` of the machine's
clock, the estimates `costs`, and `clock`, the clock on the wall. A hook has the name of the
decision it makes, which is also its key in ``[policy]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from appliance.scheduling.policy_api import (
    Admitted,
    BatchLimits,
    ClusterView,
    Costs,
    DecodingView,
    Fleet,
    Hold,
    InstanceView,
    LocalClock,
    Migration,
    Phase,
    Placement,
    PlannedTurn,
    PrefillChoice,
    Refusal,
    RequestView,
)
from appliance.vocabulary import InstanceId, ModelName

PROJECT = "appliance"
ENTRY_POINTS = "appliance.policies"
API_VERSION = 1
"""Of the hooks below and the views they get. A policy may name the one it was written for in an
attribute ``api_version``; another one is refused when it is loaded."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class PolicySpec:
    """Every hook, and when it is asked. Views and answers: `appliance.scheduling.policy_api`."""

    @hookspec(firstresult=True)
    def place(
        self, now: float, cluster: ClusterView, costs: Costs, clock: LocalClock
    ) -> Sequence[Placement] | None:
        """At start, when an instance comes or goes, and every second while there is work: what each
        instance is for, in order. Every model has to be placed somewhere. It is
        taken off instances that cannot serve it (`ModelView.instances`), without a fault; if it is
        on none then, its requests go to any that can."""

    @hookspec(firstresult=True)
    def scale(
        self, now: float, cluster: ClusterView, costs: Costs, clock: LocalClock
    ) -> Fleet | None:
        """After `place`: how many instances take interactive requests only, any, batch ones only;
        the rest finish what they have and take nothing."""

    @hookspec(firstresult=True)
    def prefill(
        self,
        now: float,
        request: RequestView,
        instances: Sequence[InstanceView],
        costs: Costs,
        clock: LocalClock,
    ) -> PrefillChoice | Refusal | Hold | None:
        """When a request arrives, and when it has to be prefilled again after a loss or a change of
        places: which queue it joins, that it is refused, or that it is held until a time, when the
        question is put again. Once it was accepted, a refusal or a hold only means the first of
        `instances`. Those where its KV would wait for room are not among
        them while others have some; a request that waits so is asked about again each second."""

    @hookspec(firstresult=True)
    def decode(
        self,
        now: float,
        request: RequestView,
        prefilled_on: InstanceId,
        instances: Sequence[InstanceView],
        costs: Costs,
        clock: LocalClock,
    ) -> InstanceId | None:
        """When a prompt is computed: which instance decodes the request. Also when its KV had to
        leave the device for that of others: then `instances` are others that have room."""

    @hookspec(firstresult=True)
    def admit(
        self, now: float, instance: InstanceView, costs: Costs, clock: LocalClock
    ) -> Admitted | None:
        """When an instance is free and several groups of prompts wait: the numbers of the groups in
        the order they are to be served; those left out come after."""

    @hookspec(firstresult=True)
    def phase(
        self, now: float, instance: InstanceView, costs: Costs, clock: LocalClock
    ) -> Phase | None:
        """When an instance is free and has both prompts and batches waiting; the next prompt is of
        the first group."""

    @hookspec(firstresult=True)
    def round(
        self, now: float, instance: InstanceView, costs: Costs, clock: LocalClock
    ) -> Sequence[PlannedTurn] | None:
        """When a round is over: the turns of the next, each model with runnable requests once at
        most, at least one of them."""

    @hookspec(firstresult=True)
    def preempt(
        self, now: float, instance: InstanceView, costs: Costs, clock: LocalClock
    ) -> float | None:
        """When a request joins an instance during a turn: how many seconds more the turn may go on
        (0: end it now; infinity: leave it alone). A model for which KV was moved goes on all the
        same until it has computed four times as long as the moves took."""

    @hookspec(firstresult=True)
    def batch(
        self,
        now: float,
        model: ModelName,
        instance: InstanceView,
        costs: Costs,
        clock: LocalClock,
    ) -> BatchLimits | None:
        """Before a turn or a prompt of `model`: how many requests decode together, in chunks of how
        many tokens prompts are computed in the same steps, and how many tokens of prompts are
        computed together."""

    @hookspec(firstresult=True)
    def flow(
        self,
        now: float,
        instance: InstanceView,
        requests: Sequence[DecodingView],
        others: Sequence[InstanceView],
        costs: Costs,
        clock: LocalClock,
    ) -> Sequence[Migration] | None:
        """When a turn ends and there are other instances that decode: which of the requests on this
        one go on elsewhere."""

    @hookspec(firstresult=True)
    def evict(
        self,
        now: float,
        instance: InstanceView,
        victims: Sequence[ModelName],
        costs: Costs,
        clock: LocalClock,
    ) -> Sequence[ModelName] | None:
        """When memory is short: in which order models lose their place; those left out come after.
        `victims` are in the order they would lose it otherwise."""

    @hookspec(firstresult=True)
    def prefetch(
        self,
        now: float,
        instance: InstanceView,
        upcoming: Sequence[ModelName],
        costs: Costs,
        clock: LocalClock,
    ) -> Sequence[ModelName] | None:
        """When a job starts: which of the models that run next here and are not in place is brought
        in meanwhile: a sequence of at most one."""


HOOKS = tuple(name for name in vars(PolicySpec) if not name.startswith("_"))
"""The decisions there are, by name."""
