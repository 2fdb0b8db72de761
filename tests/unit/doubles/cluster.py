"""A whole box of doubles around a real machine: feeds events in, carries commands out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import TypeVar, cast

from appliance.hookspecs import ENTRY_POINTS
from appliance.memory.ledger import DiskLedger, HostLedger
from appliance.plugins.aegaeon import Aegaeon
from appliance.policies.stack import PolicyStack
from appliance.scheduling.machine import Machine
from appliance.scheduling.policy_api import ClusterView, InstanceView, Policy
from appliance.service.policy_report import PolicyChoice, PolicyChosen
from appliance.vocabulary import (
    ClientBackpressured,
    ClientResumed,
    Command,
    DropSpilledKv,
    Event,
    Finish,
    InstanceLost,
    InstanceQuarantined,
    InstanceReleased,
    InstanceUp,
    KvShape,
    ModelAdded,
    ModelSpec,
    Reject,
    RequestArrived,
    RequestCancelled,
    RequestClass,
    RequestSpec,
    RestoreKv,
    RunPrefill,
    RunTurn,
    Slo,
    SpillKv,
    Ticked,
)
from tests.unit.doubles.disk import DiskDouble
from tests.unit.doubles.instance import InstanceDouble, Life, ModelDouble, World

SLO = Slo(ttft_seconds=10.0, tbt_seconds=0.1)
SLAB = 1000

C = TypeVar("C", bound=Command)


def shape(
    group_blocks: int = 4,
    group_slabs: int = 2,
    block_bytes: int = 300,
    windows: tuple[int, ...] = (),
    state_blocks: int = 0,
    images: int = 0,
) -> KvShape:
    """With windows, all layers have some, and a step fills two blocks. With states, the prefix
    cache keeps copies of them. A token of an image takes as much as one of KV, and more."""
    return KvShape(
        block_tokens=16,
        block_bytes=block_bytes,
        group_blocks=group_blocks,
        group_slabs=group_slabs,
        tables=0 if windows else 1,
        windows=windows,
        step_blocks=2 if windows else 0,
        state_blocks=state_blocks,
        snapshot_blocks=state_blocks and state_blocks + 1,
        image_token_bytes=20 if images else 0,
        most_images=images,
    )


class Watchful:
    """Passes questions on, after a look at every view: it has to be what a fresh one would be."""

    def __init__(self, double: ClusterDouble, stack: PolicyStack) -> None:
        self._double = double
        self.stack = stack

    def __getattr__(self, hook: str) -> Callable[..., object]:
        def ask(*arguments: object) -> object:
            for argument in arguments:
                views = argument if isinstance(argument, list) else [argument]
                if isinstance(argument, ClusterView):
                    views = list(argument.instances)
                for view in views:
                    if isinstance(view, InstanceView):
                        assert view == fresh_view(self._double.machine, view.id), hook
            return getattr(self.stack, hook)(*arguments)

        return ask


def fresh_view(machine: Machine, number: int) -> InstanceView:
    """The view of an instance, made of nothing that was shown before."""
    instance = machine.instances[number]
    parts = [*instance.groups, *instance.batches.values(), instance]
    shown = [part.view for part in parts]
    last = [batch.last_view for batch in instance.batches.values()]
    for part in parts:
        part.view = None
    for batch in instance.batches.values():
        batch.last_view = None
    view = machine.cluster.view(instance)
    for part, old in zip(parts, shown, strict=True):
        part.view = old  # type: ignore[assignment]
    for batch, old_view in zip(instance.batches.values(), last, strict=True):
        batch.last_view = old_view
    return view


def policy_stack(use: Sequence[str], stranger: object | None) -> PolicyStack:
    """The installed policies of these names, behind a stranger if there is one."""
    if stranger is None:
        policies = {name: installed()[name]() for name in use}
        return PolicyStack(policies | {"built-in": Aegaeon()})
    return PolicyStack({"stranger": stranger, "built-in": Aegaeon()})


@cache
def installed() -> dict[str, Callable[[], object]]:
    """What makes each policy. Looked up once: to read what every package of an environment offers
    takes long."""
    return {entry.name: entry.load() for entry in entry_points(group=ENTRY_POINTS)}


class ClusterDouble:
    """`models` on `instances` instances of `slabs` slabs each, a host tier of `host_slabs`, and a
    disk with room for the KV of `disk_slabs`.

    Time advances by a millisecond per event. Every command and event is kept, in order.
    """

    def __init__(
        self,
        models: dict[str, ModelDouble],
        *,
        policy: str = "aegaeon",
        instances: int = 1,
        slabs: int = 20,
        host_slabs: int = 200,
        kv_floor_slabs: int = 0,
        disk_slabs: int = 0,
        pinned: Sequence[str] = (),
        max_context: int = 256,
        max_batch: int = 64,
        max_sequences: int | None = None,
        use: Sequence[str] | None = None,
        stranger: object | None = None,
        only: Mapping[str, frozenset[int]] | None = None,
    ) -> None:
        """`stranger` is a policy that is asked before the installed ones. Models in `only` have
        engines on those instances alone."""
        self.world = World(models, slab_bytes=SLAB)
        self.disk = DiskDouble(self.world)
        self.slabs = slabs
        self.machine = Machine(
            [
                ModelSpec(
                    name=name,
                    weight_bytes=model.weight_slabs * SLAB,
                    max_context_tokens=max_context,
                    max_batch=max_batch,
                    max_sequences=max_sequences,
                    slo=SLO,
                    pinned=name in pinned,
                    instances=(only or {}).get(name),
                )
                for name, model in models.items()
            ],
            instances,
            HostLedger(host_slabs * SLAB, SLAB, kv_floor_slabs),
            cast(Policy, self._watchful(use or [policy], stranger)),
            disk=DiskLedger(disk_slabs * SLAB),
        )
        self.now = 0.0
        self.journal: list[tuple[float, Event, list[Command]]] = []
        self.recomputed: set[str] = set()
        """Models of which KV was given up and counted; the machine forgets models that leave."""
        self.up: dict[int, InstanceDouble] = {}

    def _watchful(self, use: Sequence[str], stranger: object | None) -> Watchful:
        self.stack = policy_stack(use, stranger)
        return Watchful(self, self.stack)

    def tell(self, event: Event) -> list[Command]:
        """One event into the machine; its commands reach the instances and the requests."""
        deadline = self.machine.next_deadline()
        self.now += 0.001
        if deadline is not None and deadline <= self.now and not isinstance(event, Ticked):
            self.tell(Ticked())
            self.now += 0.001
        commands = self.machine.handle(event, self.now)
        self._record(event, commands)
        return commands

    def set_policy(self, use: Sequence[str], stranger: object | None = None) -> None:
        """Another stack answers from now on."""
        policy = self._watchful(use, stranger)
        self.now += 0.001
        commands = self.machine.set_policy(cast(Policy, policy), self.now)
        self._record(PolicyChosen(choice=PolicyChoice(use=tuple(use))), commands)

    def _record(self, event: Event, commands: list[Command]) -> None:
        """Check what the machine made of the event, and carry it out."""
        self.journal.append((self.now, event, commands))
        self.machine.check_integrity()
        self.recomputed |= {m for m, tokens in self.machine.recomputed_tokens.items() if tokens}
        self.carry_out(commands)

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Finish | Reject):
                life = self.world.lives[command.request]
                assert life.outcome is None, "a request has one outcome"
                life.outcome = command.reason if isinstance(command, Finish) else command.code
            elif isinstance(command, SpillKv | RestoreKv | DropSpilledKv):
                self.disk.order(command)
            elif command.instance in self.up:
                self.up[command.instance].order(command)

    def start(self, *instances: int) -> None:
        for number in instances or self.machine.instances:
            self.up[number] = InstanceDouble(number, self.slabs, self.world)
            self.tell(InstanceUp(instance=number, slabs=self.slabs))

    def lose(self, number: int) -> None:
        del self.up[number]
        self.tell(InstanceLost(instance=number))

    def quarantine(self, number: int, reason: str = "it fails") -> None:
        """Out of service; its worker, if it has one, is to be lost next."""
        self.tell(InstanceQuarantined(instance=number, reason=reason))

    def release(self, number: int) -> None:
        self.tell(InstanceReleased(instance=number))

    def ask(
        self,
        name: str,
        model: str,
        *,
        prompt: int = 20,
        output: int = 5,
        limit: int | None = None,
        kind: RequestClass = RequestClass.INTERACTIVE,
        images: tuple[int, ...] = (),
        slo: Slo = SLO,
        key: str = "",
    ) -> Life:
        """A request arrives that will produce `output` tokens."""
        limit = output if limit is None else limit
        life = self.world.lives[name] = Life(model, prompt, output, limit, images)
        spec = RequestSpec(
            id=name,
            model=model,
            prompt_tokens=prompt,
            max_tokens=limit,
            slo=slo,
            request_class=kind,
            images=images,
            key=key,
        )
        self.tell(RequestArrived(request=spec))
        return life

    def add(
        self,
        name: str,
        model: ModelDouble,
        kv_floor_slabs: int = 0,
        *,
        pinned: bool = False,
        only: frozenset[int] | None = None,
    ) -> None:
        """A model joins the catalogue, with engines on these instances only, if any are given."""
        self.world.models[name] = model
        spec = ModelSpec(
            name=name,
            weight_bytes=model.weight_slabs * SLAB,
            max_context_tokens=256,
            max_batch=64,
            slo=SLO,
            pinned=pinned,
            instances=only,
        )
        self.tell(ModelAdded(model=spec, kv_floor_slabs=kv_floor_slabs))

    def cancel(self, name: str) -> None:
        self.tell(RequestCancelled(request=name))

    def stall(self, name: str) -> None:
        """Its client takes nothing."""
        self.tell(ClientBackpressured(request=name))

    def read_on(self, name: str) -> None:
        """Its client takes what was made."""
        self.tell(ClientResumed(request=name))

    def work(self, number: int) -> bool:
        """One instance does its next piece of work; False if it had none."""
        instance = self.up.get(number)
        if instance is None or not instance.busy:
            return False
        for event in instance.work():
            if number in self.up:
                self.tell(event)
        return True

    def work_disk(self) -> bool:
        """The disk carries out its next command; False if it had none."""
        if not self.disk.busy:
            return False
        for event in self.disk.work():
            self.tell(event)
        return True

    def work_until(self, number: int, done: Callable[[], bool], limit: int = 1000) -> None:
        """One instance works until `done()`, which has to come true."""
        for _ in range(limit):
            if done():
                return
            assert self.work(number), "nothing left to do before what was waited for"
        raise AssertionError("it never happened")

    def settle(self, limit: int = 100_000) -> int:
        """All instances and the disk work in turn until none has anything to do; returns pieces of
        work done."""
        done = 0
        while any([self.work_disk(), *[self.work(number) for number in list(self.up)]]):
            done += 1
            assert done < limit, "the cluster never comes to rest"
        return done

    def prompts(self) -> list[str]:
        """Every request whose prompt was ordered so far, in order, alone or with others."""
        started: list[str] = []
        for command in [command for _, _, commands in self.journal for command in commands]:
            if isinstance(command, RunPrefill):
                started.append(command.request)
            elif isinstance(command, RunTurn):
                started += command.prompts
        return started

    def turns(self) -> list[RunTurn]:
        """Every turn so far in which requests decode."""
        return [turn for turn in self.commands(RunTurn) if turn.requests]

    def commands(self, kind: type[C]) -> list[C]:
        """Every command of this kind so far, in order."""
        return [c for _, _, commands in self.journal for c in commands if isinstance(c, kind)]
