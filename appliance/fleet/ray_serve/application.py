"""The application that Ray Serve runs: a proxy on each box, and fronts that clients talk to."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from appliance.errors import FleetError
from appliance.fleet.box_proxy import BoxProxy
from appliance.fleet.calls import Answer, Call, Failed, Hint, Item
from appliance.fleet.front import Front
from appliance.fleet.ray_serve.settings import (
    BOX_KEY,
    BOX_NAME,
    BOX_RESOURCE,
    BOX_URL,
    FRONT_RESOURCE,
    FleetSettings,
)

APPLICATION: Final = "appliance"
_ROUTER: Final = "appliance.fleet.ray_serve.router.BoxRouter"
_STATS_SECONDS: Final = 1.0
_HEALTH_SECONDS: Final = 2.0
_READY_SECONDS: Final = 1.0
_ENDLESSLY: Final = 1_000_000_000
"""A box may be away for long."""
_GRACE_SECONDS: Final = 600.0
"""For what a proxy has begun, when it is to end."""
_MOST_AT_A_FRONT: Final = 1 << 16
_ASK_SECONDS: Final = 5.0
_UNANSWERED_SECONDS: Final = 5.0
"""After so long without a head a front looks whether there are boxes at all."""
_OF_SERVE: Final = frozenset({b"x-request-id"})
"""Serve gives the client's id on, or makes one, and adds it to the answer."""
_GONE: Final = (RayError, RayServeException)


class Box:
    """The proxy of the box that it runs on. It begins when the daemon is ready."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Ray awaits it
        environment = os.environ
        url = environment[BOX_URL]
        self._proxy = BoxProxy(environment.get(BOX_NAME) or url, url, environment.get(BOX_KEY))
        while True:
            try:
                await self._proxy.check()
                return
            except FleetError:
                await asyncio.sleep(_READY_SECONDS)

    async def forward(self, hint: Hint, call: Call) -> AsyncGenerator[Item, None]:
        """The daemon's answer, as it comes."""
        async with aclosing(self._proxy.forward(hint, call)) as items:
            async for item in items:
                yield item

    async def answer(self, call: Call) -> Answer:
        """A small answer of the daemon, whole."""
        return await self._proxy.answer(call)

    async def check_health(self) -> None:
        """Called by Ray: raises if the box is not ready."""
        await self._proxy.check()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Ray: what routers are to know of the box."""
        return (await self._proxy.report()).as_stats()


@serve.ingress()
class Fronts:
    """What clients talk to."""

    def __init__(self, boxes: DeploymentHandle, most_body: int) -> None:
        self._boxes = boxes
        self._streams = boxes.options(stream=True)
        self._most_body = most_body
        self._looked_at = -_UNANSWERED_SECONDS
        self._boxes_run = True

    def __serve_build_asgi_app__(self) -> Front:
        return Front(self._send, self._ask_all, self._most_body, _OF_SERVE)

    async def _send(self, hint: Hint, call: Call) -> AsyncGenerator[Item, None]:
        response = self._streams.forward.remote(hint, call)
        first = asyncio.ensure_future(anext(response))
        try:
            while not (await asyncio.wait({first}, timeout=_UNANSWERED_SECONDS))[0]:
                if not await self._any_box():
                    yield Failed(box="", reason="no box is in the fleet", taken=False)
                    return
            yield first.result()
            async for item in response:
                yield item
        except StopAsyncIteration:
            yield Failed(box="", reason="it said nothing", taken=True)
        except _GONE as error:
            yield Failed(box="", reason=f"its node has gone ({type(error).__name__})", taken=True)
        finally:
            first.cancel()
            response.cancel()

    async def _ask_all(self, call: Call) -> list[Answer]:
        if not await self._any_box():
            return []
        asked = self._boxes.broadcast("answer", call)
        try:
            answers = await asked.results_async(timeout_s=_ASK_SECONDS, return_exceptions=True)
        except TimeoutError:
            return []
        return [answer for answer in answers if isinstance(answer, Answer)]

    async def _any_box(self) -> bool:
        """Whether a proxy runs, as of some seconds ago."""
        if time.monotonic() - self._looked_at >= _UNANSWERED_SECONDS:
            self._looked_at = time.monotonic()
            self._boxes_run = await asyncio.to_thread(boxes_running) > 0
        return self._boxes_run


def boxes_running() -> int:
    """How many proxies run. Blocks."""
    application = serve.status().applications.get(APPLICATION)
    box = application.deployments.get(Box.__name__) if application else None
    return int(box.replica_states.get("RUNNING", 0)) if box else 0


def nodes_with(resource: str) -> int:
    """How many nodes of the cluster live that have a resource. Blocks."""
    return sum(bool(node["Alive"]) and resource in node["Resources"] for node in ray.nodes())


def deploy(settings: FleetSettings) -> tuple[int, int]:
    """Run the application anew for the nodes that there are; returns the numbers of boxes and of
    fronts. Needs a connection to the cluster. Blocks until it is accepted."""
    boxes, fronts = nodes_with(BOX_RESOURCE), nodes_with(FRONT_RESOURCE)
    quiet = {"enable_access_log": False}
    box = serve.deployment(
        Box,
        name=Box.__name__,
        num_replicas=max(1, boxes),
        max_ongoing_requests=settings.max_queue,
        ray_actor_options={"num_cpus": 0, "resources": {BOX_RESOURCE: 1}},
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTER,
            request_router_kwargs={"policy": settings.policy},
            request_routing_stats_period_s=_STATS_SECONDS,
            request_routing_stats_timeout_s=_ASK_SECONDS,
        ),
        health_check_period_s=_HEALTH_SECONDS,
        health_check_timeout_s=_ASK_SECONDS * 2,
        graceful_shutdown_timeout_s=_GRACE_SECONDS,
        max_constructor_retry_count=_ENDLESSLY,
        logging_config=quiet,
    )
    front = serve.deployment(
        Fronts,
        name=Fronts.__name__,
        num_replicas=max(1, fronts),
        max_ongoing_requests=_MOST_AT_A_FRONT,
        ray_actor_options={"num_cpus": 0, "resources": {FRONT_RESOURCE: 1}},
        graceful_shutdown_timeout_s=_GRACE_SECONDS,
        logging_config=quiet,
    )
    target = serve.RunTarget(
        target=front.bind(box.bind(), settings.most_body),
        name=APPLICATION,
        route_prefix="/",
        external_scaler_enabled=True,
    )
    serve.run_many([target], wait_for_applications_running=False)
    return boxes, fronts


def scale() -> tuple[int, int]:
    """Give every node its processes, as nodes come and go; returns the numbers as `deploy` does. To
    deploy again would replace all proxies, and end their streams. Blocks until it is accepted."""
    boxes, fronts = nodes_with(BOX_RESOURCE), nodes_with(FRONT_RESOURCE)
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    for name, count in ((Box.__name__, boxes), (Fronts.__name__, fronts)):
        wanted = DeploymentID(name=name, app_name=APPLICATION)
        ray.get(controller.update_deployment_replicas.remote(wanted, max(1, count)))
    return boxes, fronts
