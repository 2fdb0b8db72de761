"""Backpressure: requests whose clients do not read give up their place, and get it back."""

from __future__ import annotations

from appliance.scheduling.cluster import Cluster
from appliance.scheduling.dispatcher import Dispatcher
from appliance.scheduling.lifecycle import KvPlace, Stage
from appliance.scheduling.request_book import RequestBook
from appliance.scheduling.residency import Residency
from appliance.scheduling.state import RequestState, SchedulingContext
from appliance.vocabulary import ClientBackpressured, ClientResumed


class Backpressure:
    """Holds requests and lets them go on. Each costs O(1)."""

    def __init__(
        self,
        context: SchedulingContext,
        requests: RequestBook,
        cluster: Cluster,
        residency: Residency,
        dispatcher: Dispatcher,
    ) -> None:
        self._context = context
        self._requests = requests
        self._cluster = cluster
        self._residency = residency
        self._dispatcher = dispatcher

    def stalled(self, event: ClientBackpressured) -> bool:
        """A client stopped reading. Whether a free instance may have something to do then."""
        request = self._requests.live.get(event.request)
        if request is None or request.backpressured:
            return False
        request.backpressured = True
        if self.may_hold(request) and request.instance is not None:
            if request.stage is Stage.RUNNING:
                self._dispatcher.pause(self._cluster.instances[request.instance])
            if request.stage is Stage.READY:
                self.hold(request)
                return True
        return False

    def went_on(self, event: ClientResumed) -> bool:
        """A client reads again. Whether a free instance may have something to do then."""
        request = self._requests.live.get(event.request)
        if request is None or not request.backpressured:
            return False
        request.backpressured = False
        request.progressed = self._context.now
        if request.id not in self._requests.paused:
            return False
        self.let_go_on(request)
        return True

    def may_hold(self, request: RequestState) -> bool:
        """Whether it only keeps others waiting. It keeps its room in the host tier until it ends:
        while others wait for some, it had better end."""
        return request.backpressured and not self._requests.short_of_host_room

    def hold(self, request: RequestState) -> None:
        """The request gives up its place, and its room on the device."""
        assert request.instance is not None, "it is ready somewhere"
        if request.batch is not None:
            self._cluster.instances[request.instance].leave(request)
        request.to_stage(Stage.PAUSED)
        request.paused_at = self._context.now
        self._requests.paused[request.id] = request
        if request.kv is KvPlace.DEVICE:
            assert request.kv_instance is not None, "its KV is on a device"
            holder = self._cluster.instances[request.kv_instance]
            self._context.out.append(self._residency.swap_out(holder, request.model, [request]))

    def let_go_on(self, request: RequestState) -> None:
        """A paused request decodes where it did before."""
        assert request.instance is not None, "it is paused on an instance"
        del self._requests.paused[request.id]
        request.excuse(self._context.now)
        request.to_stage(Stage.READY)
        self._dispatcher.join(self._cluster.instances[request.instance], request)

    def let_all_go_on(self) -> bool:
        """Have all paused requests decode but those with KV on disk, which has no room in the host
        tier, or on its way there; whether there was one."""
        paused = self._requests.paused.values()
        going = [r for r in paused if r.kv not in (KvPlace.SPILLING, KvPlace.DISK)]
        for request in going:
            self.let_go_on(request)
        return bool(going)
