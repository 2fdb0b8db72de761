"""The live requests and their one outcome; their places in the host tier.

KV that leaves a device without room in the host tier is given up: its request is *displaced*, and
computed again from its tokens once there is room (decision 46).
"""

from __future__ import annotations

from collections.abc import Iterable

from appliance.memory.ledger import HostLedger
from appliance.scheduling.cluster import Cluster
from appliance.scheduling.demand import Demands
from appliance.scheduling.lifecycle import KvPlace, Stage
from appliance.scheduling.state import RequestState, SchedulingContext
from appliance.vocabulary import Finish, InstanceId, KvShape, ModelName, Reject, Release, RequestId


class RequestBook:
    """All requests that have not ended, by id. To end one costs O(1)."""

    def __init__(
        self,
        context: SchedulingContext,
        models: Iterable[ModelName],
        cluster: Cluster,
        demands: Demands,
        host: HostLedger,
    ) -> None:
        self.live: dict[RequestId, RequestState] = {}
        self.host_queue: dict[RequestId, None] = {}
        """Requests that wait for room in the host tier, the longest waiting first."""
        self.paused: dict[RequestId, RequestState] = {}
        """Requests whose clients take nothing, and that wait for that."""
        self.displaced: dict[RequestId, KvShape] = {}
        """Unplaced requests whose KV was given up, and the shape that it had."""
        self.recomputed_tokens: dict[ModelName, int] = dict.fromkeys(models, 0)
        """Tokens whose KV was given up and is computed again."""
        self.pending_frees: dict[RequestId, tuple[InstanceId, tuple[int, ...]]] = {}
        """Ended requests whose places in the host tier an instance is still writing or reading."""
        self._context = context
        self._cluster = cluster
        self._demands = demands
        self._host = host

    @property
    def short_of_host_room(self) -> bool:
        """Whether requests wait for room in the host tier."""
        return bool(self.host_queue or self.displaced)

    def of(self, model: ModelName) -> list[RequestState]:
        """The live requests of a model. O(live requests)."""
        return [request for request in self.live.values() if request.model == model]

    def cover(self, request: RequestState, shape: KvShape, tokens: int) -> bool:
        """Have the request's places in the host tier hold the KV of so many tokens. False if there
        is no room for that: then they stay as they are. O(blocks that it has)."""
        lacking = shape.blocks(tokens) - len(request.host_offsets)
        if lacking <= 0:
            return True
        offsets = self._host.take_blocks(shape.block_bytes, lacking)
        if offsets is None:
            return False
        request.host_offsets += offsets
        return True

    def uncover(self, request: RequestState) -> None:
        """Give the request's places back. A request that has to be computed (again) gets some in
        its turn, like any other."""
        self._host.give_blocks(request.host_offsets)
        request.host_offsets = ()

    def displace(self, request: RequestState, shape: KvShape) -> None:
        """Give up the KV of a request that decodes, and is in no turn. It gets a place when the
        host tier has room; see `Router.place_displaced`."""
        assert request.kv_instance is not None, "its KV is on a device"
        engine = self._cluster.instances[request.kv_instance].engines[request.model]
        del engine.residents[request.id]
        self.recomputed_tokens[request.model] += request.kv_tokens
        self._release(request)
        request.to_kv(KvPlace.NONE, None)
        self.uncover(request)
        self.unplace(request)
        self.displaced[request.id] = shape

    def unplace(self, request: RequestState) -> None:
        """Take the request off its instance."""
        assert request.instance is not None, "it is placed"
        self._cluster.instances[request.instance].leave(request)
        if self.paused.pop(request.id, None) is not None:
            request.excuse(self._context.now)
        request.instance = None
        request.to_stage(Stage.UNPLACED)

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
        self.displaced.pop(request.id, None)
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
        self._release(request)

    def _release(self, request: RequestState) -> None:
        """Have the workers that know the request forget it."""
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
