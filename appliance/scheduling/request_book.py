"""The live requests and their one outcome; what of an ended request is still to be freed."""

from __future__ import annotations

from appliance.memory.ledger import HostLedger
from appliance.scheduling.cluster import Cluster
from appliance.scheduling.demand import Demands
from appliance.scheduling.lifecycle import KvPlace, Stage
from appliance.scheduling.state import RequestState, SchedulingContext
from appliance.vocabulary import Finish, InstanceId, ModelName, Reject, Release, RequestId


class RequestBook:
    """All requests that have not ended, by id. To end one costs O(1)."""

    def __init__(
        self, context: SchedulingContext, cluster: Cluster, demands: Demands, host: HostLedger
    ) -> None:
        self.live: dict[RequestId, RequestState] = {}
        self.host_queue: dict[RequestId, None] = {}
        """Requests that wait for room in the host tier, the longest waiting first."""
        self.paused: dict[RequestId, RequestState] = {}
        """Requests whose clients take nothing, and that wait for that."""
        self.pending_frees: dict[RequestId, tuple[InstanceId, tuple[int, ...]]] = {}
        """Ended requests whose places in the host tier an instance is still writing or reading."""
        self._context = context
        self._cluster = cluster
        self._demands = demands
        self._host = host

    def of(self, model: ModelName) -> list[RequestState]:
        """The live requests of a model. O(live requests)."""
        return [request for request in self.live.values() if request.model == model]

    def reject(self, request: RequestState, code: str, message: str) -> None:
        """End a request that cannot be served: its client gets the reason."""
        self.abandon(request, rejection(request.id, code, message))

    def end(self, request: RequestState, outcome: Finish | Reject) -> None:
        """The request is over: nothing of it stays in the books. It has exactly one outcome."""
        request.to_stage(Stage.DONE)
        del self.live[request.id]
        self._demands.ended(request.model, request.generated)
        self.host_queue.pop(request.id, None)
        self.paused.pop(request.id, None)
        if request.instance is not None:
            self._cluster.instances[request.instance].leave(request)
        if request.kv_instance is not None:
            residents = (
                self._cluster.instances[request.kv_instance].engines[request.model].residents
            )
            residents.pop(request.id, None)
        if request.kv in (KvPlace.LEAVING, KvPlace.ARRIVING) and request.kv_instance is not None:
            self.pending_frees[request.id] = (request.kv_instance, request.host_offsets)
        else:
            self._host.give_blocks(request.host_offsets)
        self._context.out.append(outcome)

    def abandon(self, request: RequestState, outcome: Finish | Reject) -> None:
        """End a request that did not end by itself, and have its workers forget it."""
        self.end(request, outcome)
        holders = {n for n in (request.instance, request.kv_instance) if n is not None}
        for instance in sorted(holders):
            self._context.out.append(
                Release(instance=instance, model=request.model, request=request.id)
            )

    def moved(self, request: RequestId) -> None:
        """The KV of an ended request was moved: its places are free."""
        if request in self.pending_frees:
            self._host.give_blocks(self.pending_frees.pop(request)[1])

    def lost(self, instance: InstanceId) -> None:
        """The instance will not report any move of ended requests' KV."""
        for name in [n for n, (holder, _) in self.pending_frees.items() if holder == instance]:
            self.moved(name)


def rejection(request: RequestId, code: str, message: str) -> Reject:
    return Reject(request=request, code=code, message=message)
