"""Ray Serve's router for boxes: it ranks them by the fleet's rule.

Custom routers are an alpha API of Ray Serve. All that is used of it is here, and `make test-fleet`
has a test of it against the version that is pinned.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from appliance.fleet.calls import Hint
from appliance.fleet.known_boxes import KnownBoxes
from appliance.fleet.ranking import ROUTERS


class BoxRouter(RequestRouter):  # type: ignore[misc]
    """Chooses among the proxies of boxes, whose calls have a hint as their first argument."""

    def initialize_state(self, policy: str) -> None:
        """Called by Ray with the `request_router_kwargs`: the name of a rule."""
        self._known = KnownBoxes(ROUTERS[policy], time.monotonic, random.random)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of one box each: Ray takes the first that has room."""
        hint = _hint(pending_request)
        if hint is None or pending_request is None:
            return [candidate_replicas]
        replicas = {str(replica.replica_id): replica for replica in candidate_replicas}
        reports = {key: replica.routing_stats for key, replica in replicas.items()}
        ranked = self._known.ranked(hint, reports)
        if ranked:
            request = pending_request.metadata.internal_request_id
            self._known.sent(ranked[0], request, hint.model)
        return [[replicas[key]] for key in ranked]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray when a request has ended, well or not."""
        self._known.ended(str(replica_id), internal_request_id)

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        """Called by Ray when boxes came, went, or said something new."""
        super().update_replicas(replicas)
        self._known.keep([str(replica.replica_id) for replica in replicas])


def _hint(pending: PendingRequest | None) -> Hint | None:
    arguments: Sequence[Any] = pending.args if pending is not None else ()
    return arguments[0] if arguments and isinstance(arguments[0], Hint) else None
