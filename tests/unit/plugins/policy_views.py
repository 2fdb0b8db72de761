"""Views as the machine shows them to policies, with everything that does not matter filled in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from appliance.scheduling.policy_api import (
    BatchView,
    ClusterView,
    DecodingView,
    GroupView,
    InstanceView,
    ModelView,
    RequestView,
    TurnView,
)
from appliance.vocabulary import InstanceClass, RequestClass, Role, Slo

GIB = 1 << 30


class FixedCosts:
    """Estimates that are given: the same for every model, unless named. Implements `Costs`."""

    def __init__(
        self,
        *,
        step: float = 0.025,
        per_token: float = 0.001,
        switch: float = 1.0,
        per_kv_token: float = 0.0,
        steps: Mapping[str, float] | None = None,
        switches: Mapping[str, float] | None = None,
        link_bytes_per_second: float = math.inf,
    ) -> None:
        self.step, self.per_token, self.switch = step, per_token, switch
        self.per_kv_token = per_kv_token
        self.link_bytes_per_second = link_bytes_per_second
        self.steps, self.switches = dict(steps or {}), dict(switches or {})

    def step_seconds(self, model: str, requests: int = 1, kv_tokens: int = 0) -> float:
        return self.steps.get(model, self.step) + self.per_kv_token * kv_tokens

    def prefill_seconds(self, model: str, tokens: int) -> float:
        return tokens * self.per_token

    def switch_seconds(self, model: str) -> float:
        return self.switches.get(model, self.switch)

    def move_seconds(self, kv_bytes: int) -> float:
        return kv_bytes / self.link_bytes_per_second


def request_view(
    model: str = "a",
    *,
    name: str = "r",
    tokens: int = 20,
    arrived: float = 0.0,
    ttft: float = 1.0,
    tbt: float = 0.1,
    weight_bytes: int = 15 * GIB,
    kv_bytes_per_token: int = 128 << 10,
    kind: RequestClass = RequestClass.INTERACTIVE,
) -> RequestView:
    return RequestView(
        id=name,
        model=model,
        tokens=tokens,
        max_tokens=10,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        slo=Slo(ttft_seconds=ttft, tbt_seconds=tbt),
        request_class=kind,
        arrived=arrived,
    )


def decoding_view(
    name: str,
    model: str = "a",
    *,
    tokens: int = 20,
    output: int = 10,
    here: int | None = None,
    tbt: float = 0.1,
    first: float = 0.0,
    newest: float = 0.0,
    kind: RequestClass = RequestClass.INTERACTIVE,
    instances: frozenset[int] | None = None,
) -> DecodingView:
    return DecodingView(
        id=name,
        model=model,
        tokens=tokens,
        output_tokens=output,
        here_tokens=output if here is None else here,
        slo=Slo(ttft_seconds=1.0, tbt_seconds=tbt),
        request_class=kind,
        arrived=0.0,
        first_token=first,
        newest_token=newest,
        instances=instances,
    )


def group_view(
    model: str,
    waiting: int = 1,
    *,
    first: str = "r",
    admitted: int = 0,
    tokens: int = 1000,
    ttft: float = 1.0,
    arrived: float = 0.0,
    deadline: float = 1.0,
    interactive: int | None = None,
) -> GroupView:
    """`tokens` are those of all its requests."""
    return GroupView(
        model=model,
        first=first,
        admitted=admitted or waiting,
        waiting=waiting,
        tokens=tokens,
        slo=Slo(ttft_seconds=ttft, tbt_seconds=0.1),
        arrived=arrived,
        deadline=deadline,
        interactive=waiting if interactive is None else interactive,
    )


def batch_view(
    model: str,
    requests: int = 1,
    *,
    runnable: int | None = None,
    interactive: int | None = None,
    kv_tokens: int = 100,
    tbt: float = 0.1,
    deadline: float = 1.0,
    arrived: float = 0.0,
    away_tokens: int = 0,
) -> BatchView:
    return BatchView(
        model=model,
        requests=requests,
        runnable=requests if runnable is None else runnable,
        interactive=requests if interactive is None else interactive,
        kv_tokens=kv_tokens,
        slo=Slo(ttft_seconds=1.0, tbt_seconds=tbt),
        deadline=deadline,
        arrived=arrived,
        away_tokens=away_tokens,
        deadlines=(deadline,),
    )


def instance_view(
    number: int = 0,
    *,
    groups: tuple[GroupView, ...] = (),
    batches: tuple[BatchView, ...] = (),
    membership_version: int | None = None,
    current: str | None = None,
    turn: str | None = None,
    turn_began: float = 0.0,
    last_turn: TurnView | None = None,
    computing: int = 0,
    prefills: int = 0,
    role: Role = Role.MIXED,
    kind: InstanceClass = InstanceClass.MIXED,
    models: frozenset[str] | None = None,
    resident: Sequence[str] = (),
    up: bool = True,
    total_bytes: int = 80 * GIB,
    free_bytes: int = 40 * GIB,
    kv_bytes: int = 10 * GIB,
    kv_short: bool = False,
) -> InstanceView:
    return InstanceView(
        id=number,
        role=role,
        instance_class=kind,
        models=models,
        up=up,
        current_model=current,
        groups=groups,
        batches=batches,
        # A view made anew is one of other requests, unless told otherwise; equal ones are alike.
        membership_version=hash((groups, batches))
        if membership_version is None
        else membership_version,
        turn=turn,
        turn_began=turn_began,
        last_turn=last_turn,
        computing_tokens=computing,
        prefills_since_turn=prefills,
        resident=frozenset(resident),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        kv_bytes=kv_bytes,
        kv_short=kv_short,
    )


def model_view(
    name: str,
    *,
    weight_bytes: int = 15 * GIB,
    kv_bytes_per_token: int = 128 << 10,
    arrivals: float = 0.1,
    tokens: float = 100.0,
    output: float = 0.0,
    ttft: float = 1.0,
    tbt: float = 0.1,
    pinned: bool = False,
    parts: int = 1,
    requests: int = 0,
    last_arrival: float = 0.0,
    instances: frozenset[int] | None = None,
    max_batch: float = math.inf,
) -> ModelView:
    return ModelView(
        name=name,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        slo=Slo(ttft_seconds=ttft, tbt_seconds=tbt),
        pinned=pinned,
        parts=parts,
        arrivals_per_second=arrivals,
        tokens_per_second=tokens,
        output_tokens=output,
        requests=requests,
        last_arrival=last_arrival,
        instances=instances,
        max_batch=max_batch,
        device_bytes_per_token=kv_bytes_per_token,
    )


def cluster_view(instances: int | Sequence[InstanceView], *models: ModelView) -> ClusterView:
    """`instances` idle ones, or these."""
    if isinstance(instances, int):
        instances = [instance_view(number) for number in range(instances)]
    return ClusterView(instances=tuple(instances), models=models)
