"""The alpha API of Ray Serve's routers is still what `BoxRouter` was written for."""

from __future__ import annotations

import inspect

import ray
from ray.serve._private.controller import ServeController
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from appliance.fleet.ray_serve.router import BoxRouter


def parameters(method: object) -> list[str]:
    assert callable(method)
    return list(inspect.signature(method).parameters)


def test_the_pinned_version_is_here() -> None:
    assert ray.__version__ == "2.60.0"


def test_methods_that_ray_calls_have_their_names_and_parameters() -> None:
    assert parameters(RequestRouter.choose_replicas) == parameters(BoxRouter.choose_replicas)
    assert parameters(RequestRouter.update_replicas) == parameters(BoxRouter.update_replicas)
    assert parameters(RequestRouter.on_request_completed) == parameters(
        BoxRouter.on_request_completed
    )
    assert "initialize_state" in vars(RequestRouter)
    assert inspect.iscoroutinefunction(RequestRouter.choose_replicas)


def test_what_is_read_of_replicas_and_requests_is_there() -> None:
    assert isinstance(RunningReplica.routing_stats, property)
    assert isinstance(RunningReplica.replica_id, property)
    assert {"args", "metadata"} <= set(PendingRequest.__dataclass_fields__)


def test_the_configuration_has_its_fields() -> None:
    assert {
        "request_router_class",
        "request_router_kwargs",
        "request_routing_stats_period_s",
        "request_routing_stats_timeout_s",
    } <= set(RequestRouterConfig.model_fields)
    assert {"deployment_id", "target_num_replicas"} <= set(
        parameters(ServeController.update_deployment_replicas)
    )
    assert {"broadcast", "options"} <= set(dir(DeploymentHandle))
