"""Why a request waits: read off what the machine remembers, changing nothing."""

from __future__ import annotations

from typing import Final

from appliance.scheduling.lifecycle import EngineStage, KvPlace, Stage
from appliance.scheduling.machine import Machine
from appliance.scheduling.policy_api import Hold
from appliance.scheduling.state import BuildJob, InstanceState, RequestState, TurnJob
from appliance.vocabulary import WaitCode, WaitReason

ON_DISK: Final = {
    KvPlace.SPILLING: "is on its way to disk",
    KvPlace.DISK: "is on disk",
    KvPlace.RESTORING: "is on its way back from disk",
}


def wait_reason(machine: Machine, request: RequestState, now: float) -> WaitReason | None:
    """Why a live request of the machine is not computed at time `now`; None if it is.

    Of several reasons the one that has to end first. O(requests that wait for the host tier, or of
    its model that decode on its instance).
    """
    if request.id in machine.request_book.displaced:
        return WaitReason(
            code=WaitCode.HOST_ROOM,
            message="its KV cache was given up, as the host cache had no room for it, and is "
            "computed again when others leave room",
        )
    if request.id in machine.request_book.holds.of:
        return _held(machine, machine.request_book.holds.of[request.id], now)
    if request.instance is None:
        return WaitReason(code=WaitCode.NO_INSTANCE, message="no worker is up that could serve it")
    instance = machine.instances[request.instance]
    if request.stage in (Stage.RUNNING, Stage.PREFILLING):
        return _under_way(machine, request, instance)
    if request.stage is Stage.PAUSED:
        return WaitReason(
            code=WaitCode.SLOW_CLIENT,
            message="its client takes nothing of what was made for it",
            instance=instance.id,
        )
    if request.kv is KvPlace.LEAVING:
        return WaitReason(
            code=WaitCode.SWAPPING_OUT,
            message=f"its KV cache is on its way from instance {request.kv_instance} to the host",
            instance=request.kv_instance,
        )
    if request.id in machine.request_book.on_disk:
        return WaitReason(
            code=WaitCode.ON_DISK,
            message=f"its KV cache {ON_DISK[request.kv]}, as the host cache was short of room",
            instance=instance.id,
        )
    if request.id in machine.request_book.host_queue:
        return _short_of_host_room(machine, request, instance)
    if request.stage is Stage.QUEUED and not machine.device_room.has_place(instance, request):
        most = machine.models[request.model].max_sequences
        return WaitReason(
            code=WaitCode.SEQUENCES,
            message=f"{most} requests of {request.model} have begun on instance {instance.id}, as "
            "many as its max_sequences allows",
            instance=instance.id,
            behind=request.model,
        )
    if request.stage is Stage.QUEUED and not machine.device_room.fits(instance, request):
        return WaitReason(
            code=WaitCode.KV_ROOM,
            message=f"other requests of {request.model} leave its KV cache no room on instance "
            f"{instance.id}",
            instance=instance.id,
            behind=request.model,
        )
    return _in_line(request, instance, now)


def _held(machine: Machine, hold: Hold, now: float) -> WaitReason:
    then, today = machine.clock.local(hold.until), machine.clock.local(now)
    until = f"{then:%H:%M:%S}" if then.date() == today.date() else f"{then:%Y-%m-%d %H:%M:%S}"
    why = f": {hold.reason}" if hold.reason else ""
    return WaitReason(
        code=WaitCode.HELD,
        message=f"held until {until} by the policy{why}",
        seconds=max(0.0, hold.until - now),
    )


def _under_way(
    machine: Machine, request: RequestState, instance: InstanceState
) -> WaitReason | None:
    """It is in the job that is out, but something may have to be moved before."""
    model = request.model
    master = machine.weight_cache.get(model)
    if instance.engines[model].stage is EngineStage.LOADING:
        if master is not None and master.filler == instance.id:
            return WaitReason(
                code=WaitCode.FILLING_HOST_CACHE,
                message=f"the weights of {model} are read from disk into the host cache",
                instance=instance.id,
                behind=model,
            )
        return WaitReason(
            code=WaitCode.LOADING_WEIGHTS,
            message=f"the weights of {model} are on their way to instance {instance.id}",
            instance=instance.id,
            behind=model,
        )
    if request.kv is KvPlace.ARRIVING:
        return WaitReason(
            code=WaitCode.SWAPPING_IN,
            message=f"its KV cache is on its way from the host to instance {instance.id}",
            instance=instance.id,
        )
    return None


def _short_of_host_room(
    machine: Machine, request: RequestState, instance: InstanceState
) -> WaitReason:
    others = len(machine.request_book.host_queue) - 1
    about = f"; {others} more wait for it" if others else ""
    return WaitReason(
        code=WaitCode.HOST_ROOM,
        message="its KV cache needs room in the host cache, which comes free as "
        f"other requests end{about}",
        instance=instance.id,
    )


def _in_line(request: RequestState, instance: InstanceState, now: float) -> WaitReason:
    """It waits for what its instance does now."""
    job, model, where = instance.job, request.model, f"instance {instance.id}"
    unbuilt = "" if instance.engines[model].built else f"; the engine of {model} is built then"
    match job:
        case None:
            return WaitReason(
                code=WaitCode.QUEUE,
                message=f"the request before it on {where} waits for room in the host cache",
                instance=instance.id,
            )
        case BuildJob():
            own = "its model's engine" if job.model == model else f"the engine of {job.model}"
            return WaitReason(
                code=WaitCode.BUILDING_ENGINE,
                message=f"{where} builds {own}" + ("" if job.model == model else unbuilt),
                instance=instance.id,
                behind=job.model,
            )
    turn = job if isinstance(job, TurnJob) and job.requests else None
    seconds = None if turn is None else _left(turn, now)
    about = "" if seconds is None else f", planned for {seconds:.1f} s more"
    what = "computes a prompt" if turn is None else "decodes"
    if job.model == model:
        return WaitReason(
            code=WaitCode.SAME_MODEL,
            message=f"{model} {what} for other requests on {where}{about}",
            instance=instance.id,
            behind=model,
            seconds=seconds,
        )
    return WaitReason(
        code=WaitCode.OTHER_MODEL,
        message=f"{job.model} {what} on {where}{about}{unbuilt}",
        instance=instance.id,
        behind=job.model,
        seconds=seconds,
    )


def _left(turn: TurnJob, now: float) -> float:
    """Seconds of the turn that are left, until its quota is used up or it is to be cut."""
    return max(0.0, min(turn.ordered + turn.quota_seconds, turn.cut_at) - now)
