"""The instances of a configuration, by their groups, and which of them may serve each model.

A group is instances alike: each of as many ranks as the others. A model's weights and its KV lie on
the host as so many ranks need them, so all groups that serve it have the same number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from appliance.config.problems import ProblemReport
from appliance.config.schema import Config, DeviceGroup, Devices, Model
from appliance.config.toml_lines import KeyPath
from appliance.errors import nearest


class InstancePlan(NamedTuple):
    """One instance: its group ("" if there are none), its ranks, and on GPUs the number of each
    rank's."""

    group: str
    ranks: int
    gpus: tuple[int, ...] = ()


def plan_instances(devices: Devices) -> tuple[InstancePlan, ...]:
    """All instances, in the order of their numbers. Groups that name no GPUs get those that no
    group names, the lowest first."""
    named = {gpu for group in devices.groups for gpu in group.gpus}
    most = len(named) + sum(group.count * group.tensor_parallel for group in _groups(devices))
    free = iter([gpu for gpu in range(most) if gpu not in named])
    plans = []
    for group in _groups(devices):
        ranks = group.tensor_parallel
        gpus: Iterator[int] = iter(group.gpus) if group.gpus else free
        for _ in range(group.count):
            mine = tuple([next(gpus) for _ in range(ranks)]) if devices.cuda else ()
            plans.append(InstancePlan(group.name, ranks, mine))
    return tuple(plans)


def _groups(devices: Devices) -> tuple[DeviceGroup, ...]:
    """Without any, all instances are one."""
    alike = DeviceGroup(
        name="", instances=devices.instances, tensor_parallel=devices.tensor_parallel
    )
    return devices.groups or (alike,)


def instances_of(model: Model, devices: Devices) -> frozenset[int] | None:
    """Numbers of the instances that may serve the model; None for all."""
    if not model.groups and not model.instances:
        return None
    return frozenset(_plans_of(model, devices))


def devices_of(model: Model, devices: Devices) -> Devices:
    """The devices as the model finds them: instances alike, of as many ranks as its own have."""
    plans = _plans_of(model, devices)
    if not plans or not (devices.groups or model.instances):
        return devices
    return msgspec.structs.replace(
        devices,
        groups=(),
        instances=len(plans),
        tensor_parallel=next(iter(plans.values())).ranks,
    )


def _plans_of(model: Model, devices: Devices) -> dict[int, InstancePlan]:
    """The instances that may serve the model, by their numbers."""
    return {
        number: plan
        for number, plan in enumerate(plan_instances(devices))
        if (not model.groups or plan.group in model.groups)
        and (not model.instances or number in model.instances)
    }


def differing_ranks(devices: Devices) -> str:
    """What the numbers of ranks are if groups have different ones, as "1 and 2"; "" if not. A model
    has to name its groups then."""
    return _numbers(plan_instances(devices))


def _numbers(plans: Iterable[InstancePlan]) -> str:
    ranks = sorted({plan.ranks for plan in plans})
    return " and ".join(map(str, ranks)) if len(ranks) > 1 else ""


def check_groups(config: Config, report: ProblemReport) -> None:
    """Report groups that cannot be made, and models that they cannot serve."""
    devices = config.devices
    if devices.groups:
        for key, value in (
            ("instances", devices.instances), ("tensor_parallel", devices.tensor_parallel)
        ):  # fmt: skip
            if value != 1:  # what is left out is 1, and looks the same
                report.add(("devices", key), "each group says so for itself", "leave it out")
    seen: set[str] = set()
    taken: set[int] = set()
    for index, group in enumerate(devices.groups):
        at = ("devices", "group", index)
        if group.name in seen:
            report.add((*at, "name"), f"{group.name} is the name of another group", "use its own")
        seen.add(group.name)
        _check_gpus(index, devices, taken, report)
        taken |= set(group.gpus)
    for index, model in enumerate(config.models):
        _check_model(index, model, devices, report)


def _check_gpus(index: int, devices: Devices, taken: set[int], report: ProblemReport) -> None:
    group, at = devices.groups[index], ("devices", "group", index)
    if not group.gpus:
        return
    ranks, count = group.tensor_parallel, len(group.gpus)
    if not devices.cuda:
        report.add(
            (*at, "gpus"),
            "models run on the CPU here",
            "leave it out, and say how many instances the group has",
        )
    elif count % ranks:
        report.add(
            (*at, "gpus"),
            f"{count} GPUs are not divisible into instances of {ranks} ranks",
            "name a GPU for each rank",
        )
    elif group.instances not in (1, count // ranks):
        report.add(
            (*at, "instances"),
            f"{group.instances} instances of {ranks} ranks do not have {count} GPUs",
            f"use {count // ranks}, or leave it out",
        )
    elif twice := sorted(taken & set(group.gpus)) or len(set(group.gpus)) < count:
        shown = f"GPU {twice[0]} is another group's" if isinstance(twice, list) else "a GPU twice"
        report.add((*at, "gpus"), shown, "name each GPU once")


def _check_model(index: int, model: Model, devices: Devices, report: ProblemReport) -> None:
    at: KeyPath = ("model", index, "groups")
    known = [group.name for group in devices.groups]
    for name in model.groups:
        if name not in known:
            report.add(at, f"there is no group {name!r}", nearest(name, known))
            return
    if model.instances:
        at = ("model", index, "instances")
        count = len(plan_instances(devices))
        if model.groups:
            report.add(at, "groups says where it may run already", "leave one of the two out")
            return
        if beyond := [number for number in model.instances if number >= count]:
            report.add(
                at, f"there is no instance {beyond[0]}", f"use numbers from 0 to {count - 1}"
            )
            return
    if numbers := _numbers(_plans_of(model, devices).values()):
        of = "instances" if model.instances else "groups"
        report.add(
            at,
            f"{model.name} is on {of} of {numbers} ranks, which divide its weights and its KV "
            "differently",
            f"name {of} of one number of ranks; to have it in others too, add a second [[model]] "
            "with another name and the same path",
        )


def unused(config: Config) -> list[str]:
    """What no model may be served by, each with its key: groups, or instances if there are none."""
    plans = plan_instances(config.devices)
    used = {number for model in config.models for number in _plans_of(model, config.devices)}
    if not config.devices.groups:
        idle = [f"instance {number}" for number in range(len(plans)) if number not in used]
        return [f"devices.instances: no model may be served by {one}" for one in idle]
    busy = {plans[number].group for number in used}
    names = [group.name for group in config.devices.groups if group.name not in busy]
    return [f"devices.group: no model may be served by {name}" for name in names]
