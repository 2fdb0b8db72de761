"""The machine under random loads, cancellations and losses, against instances that check it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from appliance.scheduling import host_room
from appliance.scheduling.lifecycle import EngineStage, KvPlace, Stage
from appliance.scheduling.model_lifecycle import MAX_BUILD_LOSSES
from appliance.scheduling.reports.box_load import machine_load
from appliance.scheduling.wait_reasons import wait_reason
from appliance.vocabulary import (
    BuildModel,
    DropModel,
    ModelChanged,
    ModelEvictRequested,
    ModelLoadRequested,
    ModelRemoved,
    PrefetchModel,
    RequestClass,
    RunPrefill,
    RunTurn,
    Ticked,
    TurnEnded,
)
from tests.unit.doubles.cluster import SLO, ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.whimsical import Whimsical

POLICIES = ["serverlessllm", "aegaeon"]
WHIMSICAL = "whimsical"


def models(count: int) -> dict[str, ModelDouble]:
    """Models of different weights and KV shapes; about three of them fit 24 slabs. The layers of
    one attend to windows, and some of another one's keep a state."""
    return {
        f"m{index}": ModelDouble(
            4 + index % 3,
            shape(
                3 + index % 3,
                1 + index % 2,
                300 + 450 * (index % 3),
                windows=(2, 3) if index == 1 else (),
                state_blocks=2 if index == 2 else 0,
            ),
        )
        for index in range(count)
    }


class BusyCluster(RuleBasedStateMachine):
    """Anything may happen at any time; books balance, promises hold, and in the end all end."""

    @initialize(
        policy=st.sampled_from([*POLICIES, WHIMSICAL]),
        seed=st.integers(0, 2**32),
        instances=st.integers(1, 3),
        count=st.integers(1, 5),
        host=st.sampled_from([(10, 6), (20, 12), (36, 30), (44, 30), (60, 30), (160, 30)]),
        pinned=st.booleans(),
        caching=st.booleans(),
        fragmentation=st.integers(0, 2),
        steps=st.integers(1, 6),
        max_batch=st.integers(1, 8),
        max_sequences=st.sampled_from([None, 1, 3]),
        swap_seconds=st.sampled_from([0.001, 0.5, 20.0]),
        disk_slabs=st.sampled_from([0, 4, 200]),
        damages=st.booleans(),
        encoded=st.booleans(),
        partial=st.booleans(),
    )
    def open(
        self,
        policy: str,
        seed: int,
        instances: int,
        count: int,
        host: tuple[int, int],
        pinned: bool,
        caching: bool,
        fragmentation: int,
        steps: int,
        max_batch: int,
        max_sequences: int | None,
        swap_seconds: float,
        disk_slabs: int,
        damages: bool,
        encoded: bool,
        partial: bool,
    ) -> None:
        self.only = {f"m{n}": frozenset({n % instances}) for n in (1, 2, 5)} if partial else {}
        """Where the models are that are not everywhere."""
        self.cluster = ClusterDouble(
            models(count),
            only=self.only,
            policy="aegaeon" if policy == WHIMSICAL else policy,
            stranger=Whimsical(seed) if policy == WHIMSICAL else None,
            instances=instances,
            slabs=24,
            host_slabs=host[0],
            kv_floor_slabs=host[1],
            disk_slabs=disk_slabs,
            pinned=["m0"] if pinned else [],
            max_batch=max_batch,
            max_sequences=max_sequences,
        )
        self.cluster.disk.damages = damages
        if encoded:
            self.cluster.world.encoded = {f"m{index}": 3 + index % 2 for index in range(count)}
        self.swap_seconds = swap_seconds
        self.caching = caching
        self.fragmentation = fragmentation
        self.steps = steps
        self.asked = 0
        self.losses = 0
        self.dying: set[int] = set()
        """Instances whose workers are being ended."""
        self.unreadable: set[str] = set()
        """Models whose files were gone, for a while or for good."""
        self.emptied = False
        """Whether there was a time without any instance."""
        self.whims = policy == WHIMSICAL
        self.memberships: dict[int, tuple[int, tuple[frozenset[str], ...]]] = {}
        """Of each instance the last `membership_version`, with its requests by group and batch."""
        self.cluster.start()
        self.tune()

    def tune(self) -> None:
        for instance in self.cluster.up.values():
            instance.fragmentation = self.fragmentation
            instance.caching = self.caching
            instance.steps_per_turn = self.steps
            instance.swap_seconds = self.swap_seconds

    @rule(
        data=st.data(),
        prompt=st.integers(1, 120),
        output=st.integers(0, 60),
        kind=st.sampled_from(RequestClass),
    )
    def ask(self, data: st.DataObject, prompt: int, output: int, kind: RequestClass) -> None:
        model = data.draw(st.sampled_from(sorted(self.cluster.world.models)))
        limit = data.draw(st.integers(output, 100)) if output else 0  # its prompt is embedded
        name = f"r{self.asked}"
        self.cluster.ask(name, model, prompt=prompt, output=output, limit=limit, kind=kind)
        self.asked += 1

    @rule(prompt=st.integers(1, 120), kind=st.sampled_from(RequestClass), pieces=st.integers(0, 90))
    def ask_each_model(self, prompt: int, kind: RequestClass, pieces: int) -> None:
        """A long request for each model, so that they take turns."""
        for model in sorted(self.cluster.machine.models):
            name = f"r{self.asked}"
            self.cluster.ask(name, model, prompt=prompt, output=60, limit=100, kind=kind)
            self.asked += 1
        for number in [number for _ in range(pieces) for number in list(self.cluster.up)]:
            self.cluster.work(number)

    @rule(seconds=st.sampled_from([0.002, 1.5, 6.0]))
    def wait(self, seconds: float) -> None:
        """Time passes; the machine is woken when it asked for it."""
        self.cluster.now += seconds
        self.cluster.tell(Ticked())

    @rule(policy=st.sampled_from(POLICIES), seed=st.integers(0, 2**32), whim=st.booleans())
    def change_policy(self, policy: str, seed: int, whim: bool) -> None:
        """Another stack answers from now on."""
        self.whims |= whim
        self.cluster.set_policy([policy], Whimsical(seed) if whim else None)

    @precondition(lambda self: self.cluster.machine.models)
    @rule(data=st.data(), wanted=st.booleans())
    def want_or_dismiss(self, data: st.DataObject, wanted: bool) -> None:
        """An operator wants a model on a device, or off all of them."""
        model = data.draw(st.sampled_from(sorted(self.cluster.machine.models)))
        self.cluster.tell(
            ModelLoadRequested(model=model) if wanted else ModelEvictRequested(model=model)
        )

    @precondition(lambda self: self.cluster.machine.models)
    @rule(data=st.data(), pinned=st.booleans(), draining=st.booleans())
    def change_model(self, data: st.DataObject, pinned: bool, draining: bool) -> None:
        """An operator has a model kept, or let go, and take requests, or none."""
        model = data.draw(st.sampled_from(sorted(self.cluster.machine.models)))
        self.cluster.tell(
            ModelChanged(model=model, slo=SLO, batch_slo=SLO, pinned=pinned, draining=draining)
        )

    @rule(pick=st.integers(0, 6), floor_slabs=st.sampled_from([0, 30, 36]), pinned=st.booleans())
    def add_model(self, pick: int, floor_slabs: int, pinned: bool) -> None:
        """A model joins, perhaps one that was there before, if its name is free."""
        name = f"m{pick}"
        if name not in self.cluster.machine.models:
            pins = {n for n, model in self.cluster.machine.models.items() if model.pinned}
            only = self.only.get(name)
            self.cluster.add(
                name, models(7)[name], floor_slabs, pinned=pinned and not pins, only=only
            )
            self.cluster.world.unreadable.discard(name)

    @precondition(lambda self: len(self.cluster.machine.models) > 1)
    @rule(data=st.data())
    def remove_model(self, data: st.DataObject) -> None:
        """A model leaves, whatever it does."""
        model = data.draw(st.sampled_from(sorted(self.cluster.machine.models)))
        if model not in self.cluster.machine.removing:
            self.cluster.tell(ModelRemoved(model=model))

    @rule(number=st.integers(0, 2), pieces=st.integers(1, 30))
    def work(self, number: int, pieces: int) -> None:
        for _ in range(pieces):
            self.cluster.work(number)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.cluster.cancel(f"r{data.draw(st.integers(0, self.asked - 1))}")

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), reads=st.booleans())
    def stall_or_read_on(self, data: st.DataObject, reads: bool) -> None:
        """A client takes nothing, or takes what was made."""
        name = f"r{data.draw(st.integers(0, self.asked - 1))}"
        self.cluster.read_on(name) if reads else self.cluster.stall(name)

    @precondition(lambda self: self.cluster.up)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.end_worker(data.draw(st.sampled_from(sorted(self.cluster.up))))

    def end_worker(self, number: int) -> None:
        self.dying.discard(number)
        self.cluster.lose(number)
        self.losses += 1

    @rule(data=st.data(), at_once=st.booleans())
    def quarantine(self, data: st.DataObject, at_once: bool) -> None:
        """An instance is taken out of service, up or not; its worker ends sooner or later."""
        number = data.draw(st.sampled_from(sorted(self.cluster.machine.instances)))
        self.cluster.quarantine(number)
        cluster = self.cluster.machine.cluster
        self.emptied |= any([cluster.all_quarantined(m) for m in self.cluster.machine.models])
        if number in self.cluster.up:
            self.dying.add(number)
            if at_once:
                self.end_worker(number)

    @rule(number=st.integers(0, 2))
    def release(self, number: int) -> None:
        if number in self.cluster.machine.instances:
            self.cluster.release(number)

    @precondition(lambda self: not self.cluster.world.unreadable)
    @rule(data=st.data())
    def lose_files(self, data: st.DataObject) -> None:
        """From now on the model can be loaded only from an image in the host tier."""
        model = data.draw(st.sampled_from(sorted(self.cluster.world.models)))
        self.cluster.world.unreadable.add(model)
        self.unreadable.add(model)

    @precondition(lambda self: self.asked and self.cluster.up)
    @rule(data=st.data())
    def defer(self, data: st.DataObject) -> None:
        """A prompt will not fit, once, though its room was granted."""
        name = f"r{data.draw(st.integers(0, self.asked - 1))}"
        self.cluster.up[data.draw(st.sampled_from(sorted(self.cluster.up)))].deferring.add(name)

    @rule(number=st.integers(0, 2))
    def swap_ends(self, number: int) -> None:
        """A swap outwards is over before anybody waits for it."""
        instance = self.cluster.up.get(number)
        for event in [] if instance is None else instance.end_leaving():
            self.cluster.tell(event)

    @precondition(lambda self: self.cluster.disk.busy)
    @rule()
    def work_disk(self) -> None:
        self.cluster.work_disk()

    @rule(refuses=st.booleans(), damages=st.booleans())
    def break_or_mend_the_disk(self, refuses: bool, damages: bool) -> None:
        """From now on the disk takes nothing, or gives nothing back, or works again."""
        self.cluster.disk.refuses, self.cluster.disk.damages = refuses, damages

    @rule(number=st.integers(0, 2))
    def come_back(self, number: int) -> None:
        instance = self.cluster.machine.instances.get(number)
        if instance is not None and instance.quarantine is None and not instance.up:
            self.cluster.start(number)
            self.tune()

    @invariant()
    def nobody_is_lost(self) -> None:
        """The machine knows exactly the requests that have no outcome."""
        open_lives = {n for n, life in self.cluster.world.lives.items() if life.outcome is None}
        assert set(self.cluster.machine.requests) == open_lives

    @invariant()
    def no_work_is_given_to_the_quarantined(self) -> None:
        """Of what an event ordered, nothing begins on an instance that is out of service, nor on
        one that was released while its worker was still being ended."""
        for command in self.cluster.journal[-1][2] if self.cluster.journal else []:
            if isinstance(command, BuildModel | RunPrefill | RunTurn | PrefetchModel):
                assert self.cluster.machine.instances[command.instance].quarantine is None
                assert command.instance not in self.dying

    @invariant()
    def who_waits_could_be_served(self) -> None:
        """No request waits for instances that all are out of service and without a worker."""
        machine = self.cluster.machine
        waiting = [r for r in machine.requests.values() if r.stage is Stage.UNPLACED]
        assert not [r for r in waiting if machine.cluster.all_quarantined(r.model)]

    @invariant()
    def models_are_where_they_can_be(self) -> None:
        """No command for a model goes to an instance that cannot have it, but that to drop it."""
        for command in self.cluster.journal[-1][2] if self.cluster.journal else []:
            on = self.only.get(getattr(command, "model", ""))
            if on is not None and not isinstance(command, DropModel):
                assert getattr(command, "instance", None) in {*on, None}

    @invariant()
    def views_of_models_are_true(self) -> None:
        """Those that were kept are what would be made now, in the order of the catalogue."""
        cluster, now = self.cluster.machine.cluster, self.cluster.now
        shown = cluster.cluster_view(now).models
        cluster.engines_gone()  # all are made anew
        assert cluster.cluster_view(now).models == shown
        assert [view.name for view in shown] == [*self.cluster.machine.models]

    @invariant()
    def what_routers_hear_is_true(self) -> None:
        """As the stages of engines and the phases of requests say."""
        machine = self.cluster.machine
        found = machine_load(machine, self.cluster.now)
        stages = [
            (name, engine.stage)
            for instance in machine.instances.values()
            for name, engine in instance.engines.items()
        ]
        loaded = {name for name, stage in stages if stage is EngineStage.LOADED}
        assert found.resident == loaded
        assert found.coming >= {n for n, at in stages if at is EngineStage.LOADING} - loaded
        assert found.waiting + found.running == len(machine.requests)
        assert sum(found.waiting_by_model.values()) == found.waiting

    @invariant()
    def every_wait_has_a_reason(self) -> None:
        """Who is in no job can say why, and that changes nothing."""
        for request in self.cluster.machine.requests.values():
            reason = wait_reason(self.cluster.machine, request, self.cluster.now)
            assert reason is not None or request.stage in (Stage.RUNNING, Stage.PREFILLING)

    @invariant()
    def what_the_policy_holds_has_nothing(self) -> None:
        """No instance and no KV; it is looked at again at a time to come."""
        book = self.cluster.machine.request_book
        for name, hold in book.holds.of.items():
            request = book.live[name]
            assert request.stage is Stage.UNPLACED
            assert request.kv is KvPlace.NONE
            assert not request.accepted
            assert name not in book.displaced
            deadline = self.cluster.machine.next_deadline()
            assert deadline is not None
            assert deadline <= hold.until

    @invariant()
    def who_is_held_is_in_nobody_s_way(self) -> None:
        """It is in no batch, and its KV is on no device, or on its way from there."""
        for request in self.cluster.machine.requests.values():
            if request.stage is Stage.PAUSED:
                assert request.backpressured
                assert request.batch is None
                on_a_device = (KvPlace.NONE, KvPlace.DEVICE, KvPlace.ARRIVING)
                assert request.kv not in on_a_device

    @invariant()
    def the_disk_holds_what_the_books_say(self) -> None:
        """When the disk has nothing to do, its files are those of the live requests on disk."""
        if not self.cluster.disk.busy:
            assert self.cluster.disk.files.keys() == self.cluster.machine.disk.held.keys()
            assert (
                self.cluster.disk.files.keys() == self.cluster.machine.request_book.on_disk.keys()
            )

    @invariant()
    def preempted_is_not_recomputed(self) -> None:
        """Without losses a prompt is computed once, however often its request is preempted, as
        long as the host tier has room for its KV."""
        if not self.losses:
            twice = {life.model for life in self.cluster.world.lives.values() if life.prefills > 1}
            assert twice <= self.cluster.recomputed

    @invariant()
    def the_membership_version_follows_requests(self) -> None:
        """What was derived from a view has to be derived again only if the view is another."""
        for number, instance in self.cluster.machine.instances.items():
            holders = [*instance.groups, *instance.batches.values()]
            members = tuple(frozenset(holder.members) for holder in holders)
            membership_version, before = self.memberships.get(number, (-1, ()))
            assert instance.membership_version != membership_version or set(members) == set(before)
            self.memberships[number] = instance.membership_version, members

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        for number in sorted(self.dying):
            self.end_worker(number)
        for number in self.cluster.machine.instances:
            self.cluster.release(number)
            self.come_back(number)
        self.cluster.settle()
        while self.cluster.machine.request_book.holds.of:
            self.wait(1.5)
            self.cluster.settle()
        while self.cluster.machine.request_book.short_of_host_room:  # a held request blocks none
            self.wait(1.5)
            assert self.cluster.settle()
        held = dict(self.cluster.machine.requests)
        assert all(request.stage is Stage.PAUSED for request in held.values())
        for name in held:
            self.cluster.read_on(name)
        self.cluster.settle()
        assert not self.cluster.machine.requests
        ended = {"stop", "length"}
        allowed = (
            ended
            | {"cancelled", "model_draining", "model_removed", "model_not_found"}
            | ({"overloaded"} if self.whims else set())
            | ({"no_instance"} if self.emptied else set())
        )
        if self.losses >= MAX_BUILD_LOSSES:
            allowed.add("model_failed")
        for life in self.cluster.world.lives.values():
            failed = {"model_failed"} if life.model in self.unreadable else set()
            assert life.outcome in allowed | failed
            assert life.prefills <= 1 + life.produced + self.losses, "each prompt makes a token"
            done = life.prefills > 0 if life.pooled else life.produced == life.output_tokens
            assert (life.outcome in ended) == done
        assert self.cluster.machine.host.kv_slabs == 0
        assert not self.cluster.machine.request_book.pending_frees
        assert not self.cluster.machine.disk.held
        assert not self.cluster.disk.files
        assert not self.cluster.machine.removing
        for number, instance in self.cluster.machine.instances.items():
            there = {n for n in self.cluster.machine.models if number in self.only.get(n, {number})}
            assert instance.engines.keys() == there


def run_busy_clusters() -> None:
    run_state_machine_as_test(
        BusyCluster,
        settings=settings(
            max_examples=100,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_anything_may_happen() -> None:
    """Random arrivals, work, cancellations, losses and returns break no promise."""
    run_busy_clusters()


def test_anything_may_happen_with_kv_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with KV that goes to disk and comes back whenever it may."""
    monkeypatch.setattr(host_room, "SHORT", 0.9)
    monkeypatch.setattr(host_room, "ENOUGH", 0.95)
    monkeypatch.setattr(host_room, "LONG_SECONDS", 0.0)
    run_busy_clusters()


@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 2**32), instances=st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_no_request_starves(policy: str, seed: int, instances: int) -> None:
    """Between two steps of a request that could run, no more happens than one round: at most one
    turn and one group of prompts of every model on its instance (serverlessllm: until the others
    are done)."""
    cluster = ClusterDouble(models(5), policy=policy, instances=instances, slabs=24, host_slabs=300)
    cluster.start()
    for index in range(30):
        pick = (seed >> (index % 24)) + index
        cluster.ask(f"r{index}", f"m{pick % 5}", prompt=1 + pick % 60, output=5 + pick % 30)
    cluster.settle()
    assert not cluster.machine.requests
    if policy == "serverlessllm":
        return
    waits: dict[str, int] = {}
    for _, event, commands in cluster.journal:
        if isinstance(event, TurnEnded):
            for name in waits:
                waits[name] += 1
        for command in commands:
            if isinstance(command, RunTurn):
                for name in command.requests:
                    assert waits.pop(name, 0) <= 3 * 5 * instances
                    waits[name] = 0
        waits = {n: w for n, w in waits.items() if n in cluster.world.lives}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_gives_the_same_commands(policy: str) -> None:
    """The machine depends on nothing but events and their times."""
    cluster = ClusterDouble(models(5), policy=policy, instances=2, slabs=24)
    cluster.start()
    for index in range(40):
        cluster.ask(f"r{index}", f"m{index % 5}", prompt=index + 1, output=1 + index * 7 % 50)
        cluster.work(index % 2)
        if index == 20:
            cluster.lose(1)
            cluster.start(1)
    cluster.settle()
    again = ClusterDouble(models(5), policy=policy, instances=2, slabs=24).machine

    replayed = [again.handle(event, now) for now, event, _ in cluster.journal]

    assert replayed == [commands for _, _, commands in cluster.journal]
