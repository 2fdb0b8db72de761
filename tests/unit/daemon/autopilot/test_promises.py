"""What clients got, as the autopilot judges policies by it: what counts, and how often."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from appliance.daemon.autopilot.promise_count import UNANSWERED_OF_A_STRANGER
from appliance.daemon.daemon import Limits
from appliance.hookspecs import hookimpl
from appliance.journal import Setup
from appliance.plugins.aegaeon import Aegaeon
from appliance.policies.stack import PolicyStack
from appliance.scheduling.policy_api import Refusal, RequestView
from appliance.service.autopilot import Promises
from appliance.service.interface import AskedSlo, GenerationFailed, ModelQueueFull, QueueFull
from appliance.service.policy_report import PolicyChoice
from appliance.vocabulary import RequestFailed, Slo
from tests.unit.doubles.daemon import Box, box_maker

LONG_PROMPT = 50
TTFT = 1.0
SLOS = {name: Slo(ttft_seconds=TTFT, tbt_seconds=0.5) for name in "ab"}
SAME = PolicyChoice(use=("serverlessllm",))

MakeBox = Callable[..., Box]


class Choosy:
    """A policy that takes no long prompts."""

    @hookimpl
    def prefill(self, request: RequestView) -> Refusal | None:
        long = request.tokens >= LONG_PROMPT
        return Refusal(reason="too long") if long else None


class ChoosySetup(Setup, frozen=True):
    """Has it asked first."""

    def stack(self, **_: Any) -> PolicyStack:
        return PolicyStack({"choosy": Choosy(), "behind it": Aegaeon()})


@pytest.fixture
def make_box(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeBox]:
    with box_maker(monkeypatch, slabs=40) as make:
        yield make


@pytest.fixture
def box(make_box: MakeBox) -> Box:
    made = make_box(kind=ChoosySetup, slos=SLOS, limits=Limits(queue=400, progress_seconds=60.0))
    made.start()
    return made


def kept(box: Box) -> Promises:
    return box.daemon._seen().promises


def refused(box: Box, name: str, key: str | None = None) -> None:
    """A request that the policy turns away."""
    with pytest.raises(GenerationFailed) as caught:
        box.ask(name, "a", prompt=LONG_PROMPT, key=key)
    assert caught.value.code == "overloaded"
    box.world.lives[name].outcome = "overloaded"


def served(box: Box, name: str, key: str | None = None) -> None:
    box.ask(name, "a", output=3, key=key)
    box.settle()


async def test_requests_without_an_answer_count(box: Box) -> None:
    """A policy that answers nothing delivers no late token; its requests miss their targets all the
    same, and those that it refuses do, too. Each counts once, also when its answer comes later."""
    served(box, "in-time")
    served(box, "in-time-too")
    before = kept(box)
    assert before == Promises(tokens=6, requests=2)
    box.ask("starved", "b", output=2)
    box.now += 2 * TTFT
    refused(box, "refused")
    now = kept(box).since(before)
    assert now == Promises(requests=2, missed=2, unanswered=2)
    assert kept(box).since(before) == now
    box.settle()
    now = kept(box).since(before)
    assert (now.requests, now.missed, now.unanswered, now.tokens) == (2, 2, 2, 2)
    assert now.value == pytest.approx((0 + 1 - now.late / 2) / 2)


async def test_what_was_missed_stays_so_however_it_ends(box: Box) -> None:
    """A request that is late already and then fails for another reason is still one that was
    missed: else the count fell, and what came after it seemed to be better than all."""
    served(box, "in-time")
    box.ask("late", "a")
    box.now += 2 * TTFT
    before = kept(box)
    assert (before.requests, before.missed) == (2, 1)
    box.world.lives["late"].outcome = "request_failed"
    box.workers[0].deliver(RequestFailed(instance=0, model="a", request="late", reason="?"))
    box.settle()
    assert kept(box) == before

    for name, wait, unanswered in (("early", 0.0, 0), ("late-between", 2 * TTFT, 1)):
        box.ask(name, "a")
        box.now += wait
        box.world.lives[name].outcome = "request_failed"
        box.workers[0].deliver(RequestFailed(instance=0, model="a", request=name, reason="?"))
        box.settle()
        now = kept(box).since(before)
        assert (now.requests, now.missed, now.unanswered) == (0, 0, unanswered)


async def test_what_came_before_a_change_of_policies_does_not_count_after_it(box: Box) -> None:
    """A backlog of the policies before, which no policy could be in time with."""
    served(box, "answered")
    for number in range(30):
        box.ask(f"backlog{number}", "b", output=2)
    await box.daemon.set_policy(SAME)
    before = kept(box)
    assert (before.requests, before.missed) == (1, 0)
    box.now += 2 * TTFT
    assert kept(box) == before
    box.settle()
    assert kept(box) == before

    served(box, "new")
    assert kept(box).since(before) == Promises(tokens=3, requests=1)


async def test_a_client_s_own_service_level_does_not_count(box: Box) -> None:
    """Else a client said what is late, and so who decides."""
    before = kept(box)
    box.ask("hasty", "a", output=2, slo=AskedSlo(ttft_seconds=1e-6))
    box.settle()
    box.ask("patient", "a", output=2, slo=AskedSlo(ttft_seconds=1000.0))
    box.settle()
    assert kept(box) == before


async def test_what_is_cancelled_counts_only_if_it_was_late(box: Box) -> None:
    served(box, "answered")
    before = kept(box)
    box.cancel(box.ask("early", "a"))
    box.settle()
    assert kept(box) == before
    late = box.ask("late", "a")
    box.now += 2 * TTFT
    box.cancel(late)
    box.settle()
    assert kept(box).since(before) == Promises(requests=1, missed=1, unanswered=1)


async def test_a_flood_that_is_refused_weighs_nothing(box: Box) -> None:
    """Of a key, by a policy or while it waits, and by the daemon, whose queue is full: others are
    judged by what they get, also where hardly anyone else asks. A key's refusals count as often as
    it has answers."""
    for number in range(5):
        served(box, f"good{number}", key="good")
    before, wide = kept(box), box.daemon.limits
    for number in range(100):
        refused(box, f"flood{number}", key="bad")
        box.ask(f"waits{number}", "b", key="bad")
    box.daemon.limits = msgspec.structs.replace(wide, queue=100)
    for number in range(100):
        name = f"full{number}"
        with pytest.raises((QueueFull, ModelQueueFull)):
            box.ask(name, "a", key="bad")
        del box.world.lives[name], box.clients[name]
    box.daemon.limits = wide
    box.now += 2 * TTFT
    assert kept(box).since(before) == Promises(unanswered=UNANSWERED_OF_A_STRANGER)
    assert kept(box).value == 1.0

    for number in range(10):
        refused(box, f"too-long{number}", key="good")
    now = kept(box).since(before)
    assert (now.requests, now.missed) == (5, 5)


@pytest.mark.parametrize("seed", range(6))
async def test_no_count_ever_falls(box: Box, seed: int) -> None:
    """Whatever happens, in any order; what is bad is a part of what there is, and no value is
    outside of 0 to 1, since any time before."""
    chance = random.Random(seed)
    seen = [kept(box)]
    for step in range(150):
        name = f"r{step}"
        live = [
            client
            for client in box.clients.values()
            if not client.over and box.world.lives[client.id].outcome is None
        ]
        match chance.choice(
            ["ask", "ask", "ask", "refused", "work", "work", "wait", "end", "swap"]
        ):
            case "ask":
                slo = chance.choice([AskedSlo(), AskedSlo(), AskedSlo(tbt_seconds=1e-6)])
                key = chance.choice(["k", "l", None])
                box.ask(name, chance.choice("ab"), output=chance.randint(1, 9), slo=slo, key=key)
            case "refused":
                refused(box, name, chance.choice(["k", "l", None]))
            case "work":
                for _ in range(chance.randint(1, 6)):
                    box.work()
            case "wait":
                box.now += chance.choice([0.1, 0.6, 1.1])
            case "end" if live:
                one = chance.choice(live)
                if chance.random() < 0.5:
                    box.cancel(one)
                else:
                    box.world.lives[one.id].outcome = "request_failed"
                    failed = RequestFailed(instance=0, model="a", request=one.id, reason="?")
                    box.workers[0].deliver(failed)
            case "swap" if chance.random() < 0.3:
                await box.daemon.set_policy(SAME)
        seen.append(kept(box))
    box.settle()
    seen.append(kept(box))
    assert seen[-1].requests > 10
    for earlier, later in pairwise(seen):
        fell = [old > new for old, new in zip(_counters(earlier), _counters(later), strict=True)]
        assert not any(fell)
        assert min(msgspec.structs.astuple(later.since(earlier))) >= 0
    for _ in range(200):
        first, last = sorted(chance.sample(range(len(seen)), 2))
        got = seen[last].since(seen[first])
        assert got.late <= got.tokens
        assert got.missed <= got.requests
        assert got.value is None or 0 <= got.value <= 1


def _counters(promises: Promises) -> tuple[int, ...]:
    """Without what is a gauge."""
    return msgspec.structs.astuple(msgspec.structs.replace(promises, on_time=0))


def test_a_value_is_a_share() -> None:
    """Even of counts that cannot be."""
    assert Promises(tokens=10, late=-5, requests=1, missed=3).value == 0.5
    assert Promises().value is None
