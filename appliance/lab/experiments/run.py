"""A trial: one policy on one workload, with everything that the daemon would have around it.

Policies are the daemon's stack of one, with the built-in behind it. Their estimates begin with the
profiles that the instances run by; what is different about the truth is the setting's deviation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from appliance.lab.hardware import Box, ModelProfile
from appliance.lab.noise import EXACT, Deviation
from appliance.lab.sim.simulator import SimulationRun, Start, simulate
from appliance.lab.workload import Arrival
from appliance.memory.ledger import DiskLedger, HostLedger
from appliance.plugins.aegaeon import Aegaeon
from appliance.policies.loader import load_stack
from appliance.policies.stack import PolicyStack
from appliance.scheduling.cost_model import CostModel
from appliance.scheduling.machine import Machine
from appliance.scheduling.policy_api import Policy
from appliance.service.policy_report import PolicyChoice, PolicyFault
from appliance.vocabulary import ModelName, ModelSpec, RequestId, Word


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All of a trial but the policy. `profiles` has every model; `arrivals` are in order."""

    models: Sequence[ModelSpec]
    box: Box
    profiles: Mapping[ModelName, ModelProfile]
    arrivals: Sequence[Arrival]
    seconds: float
    kv_floor_slabs: int = 0
    """Slabs of the host tier that weights never take."""
    deviation: Deviation = EXACT
    informed: bool = True
    """Whether policies know the profiles from the beginning; else they have to learn, as in a
    daemon."""
    start: Start | None = None
    """What the clock on the wall shows at the beginning."""

    def costs(self) -> CostModel:
        """What policies expect before they have seen anything: the profiles."""
        if not self.informed:
            return CostModel(self.models)
        costs = CostModel(
            self.models,
            times={name: profile.step_times() for name, profile in self.profiles.items()},
            load_bytes_per_second=self.box.tp * self.box.gpu.link_bytes_per_second,
        )
        activation = self.box.activation_seconds
        for model in self.models if activation else ():
            costs.observe_switch(model.name, activation + costs.switch_seconds(model.name))
        return costs


class System(Word, frozen=True, kw_only=True):
    """What switching costs in the system that a policy comes from, where it is not the cost of
    ours: a baseline *as published*, not one by the *same mechanism*."""

    activation_seconds: float = 0.0
    """For which an instance computes nothing at every switch, after the copy."""
    efficiency: float | None = None
    """Of copies; None for that of the hardware."""
    prefetch: bool = True

    def box(self, box: Box) -> Box:
        """The hardware as this system uses it: a system of its own has no relay of ours."""
        efficiency = box.gpu.efficiency if self.efficiency is None else self.efficiency
        return replace(
            box,
            gpu=replace(box.gpu, efficiency=efficiency),
            relay=box.relay and self == SAME_MECHANISM,
            activation_seconds=self.activation_seconds,
        )

    def __str__(self) -> str:
        """For people."""
        said = [f"{self.activation_seconds:g}s"] if self.activation_seconds else []
        said += [] if self.efficiency is None else [f"{self.efficiency:.0%} of the link"]
        said += [] if self.prefetch else ["no prefetch"]
        return ", ".join(said)


SAME_MECHANISM = System()
NO_PREFETCH = {"prefetch": "serverlessllm"}
"""It answers that nothing is brought in ahead."""


@dataclass(frozen=True)
class Contender:
    """Who plays under this name: a stack of installed policies, or a policy that is not."""

    name: str
    use: Sequence[str] = ()
    parameters: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """By policy."""
    decisions: Mapping[str, str] = field(default_factory=dict)
    """Policies by the name of a hook, for those given to another one."""
    policy: object | None = None
    system: System = SAME_MECHANISM
    successors: Sequence[tuple[float, Contender]] = ()
    """Who takes over, and after how many seconds."""

    def stack(self, lengths: Mapping[RequestId, int]) -> PolicyStack:
        """It, and the built-in behind it; `lengths` are the true ones, for an oracle only.

        Raises `PolicyError` if it cannot be loaded.
        """
        if self.policy is None:
            decisions = dict(self.decisions) | ({} if self.system.prefetch else NO_PREFETCH)
            return load_stack(
                PolicyChoice(use=tuple(self.use), decisions=decisions, parameters=self.parameters),
                lengths=lengths,
            )
        if getattr(self.policy, "oracle", False):
            self.policy.learn_oracle(lengths)  # type: ignore[attr-defined]
        return PolicyStack({self.name: self.policy, "built-in": Aegaeon()})


@dataclass(frozen=True)
class Trial:
    """What came of it."""

    run: SimulationRun
    faults: Sequence[PolicyFault]
    """Questions that the policy could not answer; the built-in one did."""
    host_kv_peak_bytes: int = 0
    """Of the host tier, under swapped KV at its peak."""


def play(setting: Setting, contender: Contender) -> Trial:
    """Run the policy. Raises `PolicyError`, and what `simulate` raises; a machine whose books do
    not balance at the end is a `LedgerError`."""
    lengths: dict[RequestId, int] = {}
    stack = contender.stack(lengths)
    swaps = [(seconds, successor.stack(lengths)) for seconds, successor in contender.successors]
    setting = dataclasses.replace(setting, box=contender.system.box(setting.box))
    machine = machine_for(setting, stack)
    run = simulate(
        machine,
        setting.box,
        setting.profiles,
        setting.arrivals,
        setting.seconds,
        deviation=setting.deviation,
        swaps=swaps,
        lengths=lengths,
        start=setting.start,
    )
    machine.check_integrity()
    stacks = [stack, *(successor for _, successor in swaps)]
    faults = [fault for one in stacks for fault in one.take_faults()]
    return Trial(run, faults, machine.host.peak_kv_slabs * setting.box.slab_bytes)


def machine_for(setting: Setting, policy: Policy) -> Machine:
    """The daemon's machine on the box of a setting."""
    box = setting.box
    host = HostLedger(box.host_bytes, box.slab_bytes, setting.kv_floor_slabs)
    disk = DiskLedger(box.disk_bytes)
    return Machine(setting.models, box.instances, host, policy, setting.costs(), disk)
