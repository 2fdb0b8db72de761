"""Views as the machine shows them to policies, with everything that does not matter filled in."""

from __future__ import annotations

from appliance.scheduling.questions import BatchView, GroupView, InstanceView, RequestView
from appliance.vocabulary import RequestClass, Role, Slo


def request_view(model: str = "a") -> RequestView:
    return RequestView(
        id="r",
        model=model,
        tokens=20,
        max_tokens=10,
        slo=Slo(ttft_seconds=1.0, tbt_seconds=0.1),
        request_class=RequestClass.INTERACTIVE,
        waited_seconds=0.0,
    )


def group_view(
    model: str, waiting: int = 1, *, admitted: int = 0, seconds: float = 1.0
) -> GroupView:
    admitted = admitted or waiting
    return GroupView(model=model, admitted=admitted, waiting=waiting, seconds=seconds)


def batch_view(
    model: str,
    requests: int = 1,
    *,
    runnable: int | None = None,
    tbt: float = 0.1,
    step: float = 0.025,
    switch: float = 1.0,
) -> BatchView:
    return BatchView(
        model=model,
        requests=requests,
        runnable=requests if runnable is None else runnable,
        slo=Slo(ttft_seconds=1.0, tbt_seconds=tbt),
        step_seconds=step,
        switch_seconds=switch,
    )


def instance_view(
    number: int = 0,
    *,
    groups: tuple[GroupView, ...] = (),
    batches: tuple[BatchView, ...] = (),
    current: str | None = None,
    turn: str | None = None,
    prefills: int = 0,
    role: Role = Role.MIXED,
) -> InstanceView:
    return InstanceView(
        id=number,
        role=role,
        current_model=current,
        groups=groups,
        batches=batches,
        turn=turn,
        prefills_since_turn=prefills,
    )
