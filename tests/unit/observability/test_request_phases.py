"""What the time of requests goes to: every second is in one phase."""

from __future__ import annotations

from appliance.observability.request_phases import RequestPhases
from appliance.service.interface import RequestTimes
from appliance.vocabulary import (
    LoadModel,
    ModelLoaded,
    PrefillDeferred,
    PrefillDone,
    RunPrefill,
    RunTurn,
    TurnEnd,
    TurnEnded,
)


class Clock(RequestPhases):
    """Orders and reports of instance 0 unless told otherwise, at whole seconds."""

    def load(self, now: float, model: str = "a", instance: int = 0) -> None:
        self.ordered(LoadModel(instance=instance, model=model), now)

    def loaded(self, now: float, model: str = "a", instance: int = 0) -> None:
        self.reported(ModelLoaded(instance=instance, model=model, moved_bytes=1, seconds=1.0), now)

    def prefill(self, now: float, request: str = "r", model: str = "a", instance: int = 0) -> None:
        self.ordered(RunPrefill(instance=instance, model=model, request=request, kv_slabs=1), now)

    def prefilled(self, now: float, request: str = "r", model: str = "a") -> None:
        done = PrefillDone(instance=0, model=model, request=request, kv_slabs=1, seconds=1.0)
        self.reported(done, now)

    def turn(
        self,
        now: float,
        *requests: str,
        model: str = "a",
        prompts: tuple[str, ...] = (),
        instance: int = 0,
    ) -> None:
        turn = RunTurn(
            instance=instance,
            model=model,
            turn=1,
            requests=requests,
            quota_seconds=1.0,
            kv_slabs=1,
            prompts=prompts,
        )
        self.ordered(turn, now)

    def turned(self, now: float, model: str = "a") -> None:
        self.reported(
            TurnEnded(
                instance=0,
                model=model,
                turn=1,
                reason=TurnEnd.QUOTA,
                steps=1,
                seconds=1.0,
                kv_slabs=1,
            ),
            now,
        )


def phases(times: RequestTimes) -> list[float]:
    """Queue, load, prefill, decode, preempted."""
    return list(times.phases.values())


def test_a_request_of_a_model_that_is_there() -> None:
    """It waits, is computed, waits for a turn, and decodes to its end."""
    clock = Clock()
    clock.arrived("r", "a", 1.0)
    clock.prefill(3.0)
    clock.prefilled(6.0)
    clock.turn(7.0, "r")

    times = clock.ended("r", 12.0)

    assert phases(times) == [2.0, 0.0, 3.0, 5.0, 1.0]
    assert (times.preemptions, times.instances) == (0, (0,))


def test_the_load_it_waits_for() -> None:
    """The weights come in before its prompt runs, or beside it: both is load. What was loaded
    before it arrived is not its time."""
    clock = Clock()
    clock.load(0.0)
    clock.arrived("r", "a", 1.0)
    clock.prefill(2.0)  # layer by layer, as the weights come in
    clock.loaded(5.0)
    clock.prefilled(6.0)

    assert phases(clock.ended("r", 6.0)) == [0.0, 4.0, 1.0, 0.0, 0.0]

    clock.arrived("s", "a", 10.0)
    clock.prefill(11.0, "s")
    clock.prefilled(12.0, "s")

    assert phases(clock.ended("s", 12.0)) == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_the_load_of_another_model_or_instance_is_queue() -> None:
    """As is a load that ended before it was its turn."""
    clock = Clock()
    clock.arrived("r", "a", 0.0)
    clock.load(0.0, "b")
    clock.loaded(2.0, "b")
    clock.load(2.0, instance=1)
    clock.prefill(5.0)

    assert phases(clock.ended("r", 6.0)) == [5.0, 0.0, 1.0, 0.0, 0.0]


def test_turns_of_others_are_time_preempted() -> None:
    """Between its turns it is preempted; that counts once for each time that others came."""
    clock = Clock()
    clock.arrived("r", "a", 0.0)
    clock.arrived("s", "b", 0.0)
    clock.prefill(0.0)
    clock.prefilled(1.0)
    clock.turn(1.0, "r")
    clock.turned(3.0)
    clock.prefill(3.0, "s", "b")
    clock.prefilled(4.0, "s", "b")
    clock.turn(4.0, "s", model="b")
    clock.turned(7.0, "b")
    clock.turn(8.0, "r")

    times = clock.ended("r", 10.0)

    assert phases(times) == [0.0, 0.0, 1.0, 4.0, 5.0]
    assert times.preemptions == 1
    assert clock.ended("s", 10.0).preemptions == 1


def test_the_next_turn_of_the_same_model_preempts_no_request() -> None:
    """Who decodes on after a turn was not stopped for anyone."""
    clock = Clock()
    clock.arrived("r", "a", 0.0)
    clock.prefill(0.0)
    clock.prefilled(1.0)
    for start in (1.0, 3.0, 5.0):
        clock.turn(start, "r")
        clock.turned(start + 2.0)

    times = clock.ended("r", 8.0)

    assert times.preemptions == 0
    assert phases(times) == [0.0, 0.0, 1.0, 6.0, 1.0]


def test_a_prompt_that_did_not_fit_waits_again() -> None:
    """Deferred, or left over by its mixed turn, it is in the queue."""
    clock = Clock()
    clock.arrived("r", "a", 0.0)
    clock.prefill(1.0)
    clock.reported(PrefillDeferred(instance=0, model="a", request="r", kv_slabs=1), 3.0)
    clock.turn(5.0, prompts=("r",))
    clock.turned(6.0)
    clock.turn(8.0, prompts=("r",))
    clock.prefilled(9.0)

    assert phases(clock.ended("r", 10.0)) == [5.0, 0.0, 4.0, 0.0, 1.0]


def test_a_lost_worker_costs_time() -> None:
    """Prompts wait in the queue again, others are preempted, until another instance has them."""
    clock = Clock()
    for name in ("r", "s", "t"):
        clock.arrived(name, "a", 0.0)
    clock.prefill(0.0)
    clock.prefilled(1.0)
    clock.turn(1.0, "r", prompts=("s",))
    clock.lost(0, 3.0)
    clock.prefill(5.0, "r", instance=1)
    clock.prefill(6.0, "s", instance=1)

    r, s, t = (clock.ended(name, 8.0) for name in ("r", "s", "t"))

    assert phases(r) == [0.0, 0.0, 4.0, 2.0, 2.0]
    assert r.instances == (0, 1)
    assert phases(s) == [4.0, 0.0, 4.0, 0.0, 0.0]
    assert phases(t) == [8.0, 0.0, 0.0, 0.0, 0.0]


def test_what_has_ended_is_forgotten() -> None:
    """Orders and reports that name it come late, and change nothing."""
    clock = Clock()
    clock.arrived("r", "a", 0.0)
    clock.prefill(0.0)
    clock.turn(1.0, "r")
    clock.ended("r", 2.0)

    clock.turned(3.0)
    clock.turn(3.0, "r")
    clock.prefilled(4.0)
    clock.arrived("r", "a", 5.0)

    assert phases(clock.ended("r", 6.0)) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_client_that_does_not_read_was_not_stopped() -> None:
    """It waits for its client, whatever runs meanwhile; afterwards it is stopped as others are."""
    clock = Clock()
    for request in ("r", "s"):
        clock.arrived(request, "a", 0.0)
        clock.prefill(1.0, request)
        clock.prefilled(2.0, request)
    clock.turn(3.0, "r", "s")
    clock.reader("r", reads=False)
    clock.turned(4.0)
    clock.turn(5.0, model="b")
    clock.turned(6.0, "b")
    clock.reader("r", reads=True)
    clock.turn(7.0, "r", "s")
    clock.turned(8.0)
    clock.turn(8.0, model="b")
    clock.turned(9.0, "b")

    assert clock.ended("r", 9.0).preemptions == 1
    assert clock.ended("s", 9.0).preemptions == 2


def test_the_time_of_a_device_is_divided_among_what_it_computes_at_once() -> None:
    """What all have had adds up to the time in which it computed, for each of its devices; a wait
    between turns is no one's."""
    clock = Clock(devices=lambda instance: 2)
    for request in "rs":
        clock.arrived(request, "a", 0.0)
    clock.prefill(1.0, "r")
    clock.prefilled(2.0, "r")  # r: 1 s
    clock.prefill(2.0, "s")
    clock.prefilled(5.0, "s")  # s: 3 s
    clock.turn(10.0, "r", "s")
    s = clock.ended("s", 12.0)  # both: 1 s
    clock.turned(14.0)  # r: 2 s
    r = clock.ended("r", 20.0)

    assert (r.device_seconds, s.device_seconds) == (8.0, 8.0)
    assert r.device_seconds + s.device_seconds == 2 * (1.0 + 3.0 + 4.0)


def test_a_device_that_is_lost_is_nobodys_any_more() -> None:
    """Until the request is computed elsewhere."""
    clock = Clock()
    clock.arrived("r", "a", 0.0)
    clock.prefill(1.0)
    clock.lost(0, 3.0)
    clock.prefill(7.0, instance=1)

    assert clock.ended("r", 8.0).device_seconds == 3.0
