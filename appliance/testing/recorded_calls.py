"""The questions that a policy is tested with: what the real machine asked under thrown dice.

So every view is one that the machine shows, and there are all kinds of them: from one idle instance
with one model to sixteen busy ones with a hundred, in every role and class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import cast

import msgspec

from appliance.hookspecs import HOOKS
from appliance.plugins.aegaeon import Aegaeon
from appliance.policies.stack import PolicyStack
from appliance.scheduling.policy_api import LocalClock, RequestView
from appliance.testing.random_policy import RandomPolicy
from appliance.testing.scenes import CONTEXT_TOKENS, SCENES, HookCall, Scene, play, put
from appliance.vocabulary import RequestClass, Slo

MOST = 100
"""Questions of a kind that are kept of a scene."""
VARIED = 3
"""Of the questions of `prefill` in a scene, so many are put again about other requests, and at
other times."""
HOURS_BETWEEN = 5
"""Between these times. It divides no day, so that in a week they are at every hour."""


def questions(hook: str) -> list[HookCall]:
    """Those of one hook, in the order in which they were asked."""
    return [
        question for scene in SCENES.values() for question in asked(scene) if question.hook == hook
    ]


@cache
def asked(scene: Scene) -> tuple[HookCall, ...]:
    """Questions of a scene, in the order of time; of each kind as many, evenly taken."""
    stack = PolicyStack({"dice": RandomPolicy(seed=len(scene.name)), "built-in": Aegaeon()})
    calls: list[HookCall] = []

    def answer(question: HookCall) -> object:
        calls.append(question)
        return put(stack, question)

    play(scene, answer, drain_seconds=0.0)
    kept: set[int] = set()
    for hook in HOOKS:
        places = [place for place, question in enumerate(calls) if question.hook == hook]
        kept.update(places[:: max(1, -(-len(places) // MOST))])
    chosen = [calls[place] for place in sorted(kept)]
    varied = _to_vary(chosen)
    return tuple([one for call in chosen for one in (call, *varied.get(id(call), ()))])


def _to_vary(calls: Sequence[HookCall]) -> dict[int, list[HookCall]]:
    """Variants of some questions of `prefill` about requests that may be refused or held, by the
    question. Little of what a policy may refuse or hold a request for happens by itself in a
    scene."""
    fresh = [
        call
        for call in calls
        if call.hook == "prefill" and not cast(RequestView, call.views["request"]).accepted
    ]
    varied = fresh[:: max(1, -(-len(fresh) // VARIED))]
    return {id(call): [*_other_requests(call), *_other_times(call)] for call in varied}


def _other_requests(call: HookCall) -> Iterator[HookCall]:
    """The same for a request that is late, urgent, long, of the other class, or of a client with
    many others."""
    request, now = cast(RequestView, call.views["request"]), cast(float, call.views["now"])
    interactive = request.request_class is RequestClass.INTERACTIVE
    changes: list[dict[str, object]] = [
        {"arrived": now - request.slo.ttft_seconds - 60.0},
        {"slo": Slo(ttft_seconds=0.01, tbt_seconds=0.001)},
        {"tokens": CONTEXT_TOKENS},
        {"request_class": RequestClass.BATCH if interactive else RequestClass.INTERACTIVE},
        {"key": "acme", "key_requests": 1000},
    ]
    for change in changes:
        other = msgspec.structs.replace(request, **change)
        yield HookCall(call.hook, {**call.views, "request": other})


def _other_times(call: HookCall) -> Iterator[HookCall]:
    """The same at other times of a day and a week."""
    clock = cast(LocalClock, call.views["clock"])
    for hours in range(0, 7 * 24, HOURS_BETWEEN):
        later = msgspec.structs.replace(
            clock, unix_offset_seconds=clock.unix_offset_seconds + 3600.0 * hours
        )
        yield HookCall(call.hook, {**call.views, "clock": later})
