"""QLM (SoCC'24) as Prism describes it (§3.2, §7.2, §7.5): request groups that take turns by swaps.

Requests of a model form groups; every instance has a virtual queue of groups, in the order of
their deadlines, and runs one model until its requests are done. All sharing is in time.
"""

from __future__ import annotations

from collections.abc import Sequence

from appliance.hookspecs import hookimpl
from appliance.plugins.aegaeon import queued_seconds
from appliance.plugins.serverlessllm import ServerlessLlm, open_group
from appliance.scheduling.policy_api import (
    Admitted,
    Costs,
    InstanceView,
    PrefillChoice,
    RequestView,
)


class Qlm(ServerlessLlm):
    """Parameters of ServerlessLLM: `max_group` is the size of a request group."""

    @hookimpl
    def prefill(  # type: ignore[override]  # a hook takes the arguments it needs
        self, request: RequestView, instances: Sequence[InstanceView], costs: Costs
    ) -> PrefillChoice:
        """In an open group of its model; a new group goes to the first instance that has nothing to
        do, whatever model it has (the waste that Prism blames it for), else where least time
        waits."""
        waiting = open_group(request, instances, self.max_group)
        if waiting is not None:
            return waiting
        best = min(
            instances,
            key=lambda view: (view.load > 0, queued_seconds(view, costs), view.load, view.id),
        )
        return PrefillChoice(instance=best.id)

    @hookimpl
    def admit(self, instance: InstanceView) -> Admitted:
        """The group that runs is finished first; then the earliest deadline."""
        groups = instance.groups

        def rank(number: int) -> tuple[bool, float, float]:
            group = groups[number]
            begun = group.model == instance.current_model and group.waiting < group.admitted
            return not begun, group.deadline, group.arrived

        return sorted(range(len(groups)), key=rank)
