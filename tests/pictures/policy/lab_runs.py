"""Small runs of the lab: the policy on one modelled GPU or a few, and what the links did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from msgspec.structs import replace

from appliance.lab.experiments.metrics import expand
from appliance.lab.experiments.run import Setting, machine_for
from appliance.lab.hardware import Box, gpu, profile
from appliance.lab.sim.recorder import ComputeSpan, Life
from appliance.lab.sim.simulator import SimulationRun, simulate
from appliance.lab.workload import Arrival
from appliance.plugins.aegaeon import Aegaeon
from appliance.plugins.appliance import Appliance
from appliance.policies.stack import PolicyStack
from appliance.scheduling.machine import Machine
from appliance.vocabulary import (
    Command,
    Event,
    LoadModel,
    ModelLoaded,
    ModelName,
    ModelSpec,
    PrefetchModel,
    Slo,
)

CONTEXT: Final = 4096
MOST_REQUESTS: Final = 64


class Load(NamedTuple):
    """Weights that came to an instance."""

    instance: int
    model: ModelName
    began: float
    ended: float


@dataclass(frozen=True)
class Played:
    """What came of a run."""

    run: SimulationRun
    loads: Sequence[Load]

    def spans(self, instance: int = 0) -> list[ComputeSpan]:
        """What an instance computed, in the order of time."""
        its = [span for span in self.run.recorder.spans if span.instance == instance]
        return sorted(its, key=lambda span: span.began)

    def lives(self, model: ModelName) -> list[Life]:
        """The requests of a model, in the order of arrival."""
        return [life for life in self.run.recorder.lives if life.model == model]

    def tokens(self, life: Life) -> list[float]:
        """When each token of a request came."""
        return [float(at) for at in expand(self.run.recorder, [life]).seconds]


def box(gpu_name: str, instances: int = 1, **changed: object) -> Box:
    """Instances of one GPU, with room for all weights on the host."""
    plain = Box(gpu=gpu(gpu_name), instances=instances, host_bytes=1 << 40)
    return replace(plain, **changed)


def setting_of(
    hardware: Box,
    kinds: Mapping[ModelName, str],
    slo: Slo | Mapping[ModelName, Slo],
    arrivals: Sequence[Arrival] = (),
    seconds: float = 0.0,
) -> Setting:
    """Models, each of a kind that was measured on the GPU, and the requests that come for them."""
    slos = slo if isinstance(slo, Mapping) else dict.fromkeys(kinds, slo)
    profiles = {
        name: replace(profile(kind, hardware.gpu.name), name=name) for name, kind in kinds.items()
    }
    models = [
        ModelSpec(
            name=name,
            weight_bytes=one.weight_bytes,
            max_context_tokens=CONTEXT,
            max_batch=MOST_REQUESTS,
            slo=slos[name],
        )
        for name, one in profiles.items()
    ]
    return Setting(
        models=models, box=hardware, profiles=profiles, arrivals=arrivals, seconds=seconds
    )


def play(
    hardware: Box,
    kinds: Mapping[ModelName, str],
    slo: Slo | Mapping[ModelName, Slo],
    arrivals: Sequence[Arrival],
    seconds: float,
    policy: Appliance | None = None,
) -> Played:
    """Play some seconds of it with the policy."""
    setting = setting_of(hardware, kinds, slo, arrivals, seconds)
    stack = PolicyStack({"appliance": policy or Appliance(), "built-in": Aegaeon()})
    machine = machine_for(setting, stack)
    links = _Links(machine)
    machine.handle = links.handle  # type: ignore[method-assign]
    run = simulate(machine, hardware, setting.profiles, arrivals, seconds)
    machine.check_integrity()
    assert not list(stack.take_faults()), "the policy answered each question itself"
    return Played(run, links.loads)


class _Links:
    """Notes the loads that a machine orders, on their way past."""

    def __init__(self, machine: Machine) -> None:
        self._handle = machine.handle
        self._ordered: dict[tuple[int, ModelName], float] = {}
        self.loads: list[Load] = []

    def handle(self, event: Event, now: float) -> list[Command]:
        """As the machine does."""
        if isinstance(event, ModelLoaded):
            began = self._ordered.pop((event.instance, event.model))
            self.loads.append(Load(event.instance, event.model, began, now))
        commands = self._handle(event, now)
        for command in commands:
            if isinstance(command, LoadModel | PrefetchModel):
                self._ordered.setdefault((command.instance, command.model), now)
        return commands
