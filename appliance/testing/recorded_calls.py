"""The questions that a policy is tested with: what the real machine asked under thrown dice.

So every view is one that the machine shows, and there are all kinds of them: from one idle instance
with one model to sixteen busy ones with a hundred, in every role and class.
"""

from __future__ import annotations

from functools import cache

from appliance.hookspecs import HOOKS
from appliance.plugins.aegaeon import Aegaeon
from appliance.policies.stack import PolicyStack
from appliance.testing.random_policy import RandomPolicy
from appliance.testing.scenes import SCENES, HookCall, Scene, play

MOST = 100
"""Questions of a kind that are kept of a scene."""


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
        return getattr(stack, question.hook)(**question.views)

    play(scene, answer, drain_seconds=0.0)
    kept: set[int] = set()
    for hook in HOOKS:
        places = [place for place, question in enumerate(calls) if question.hook == hook]
        kept.update(places[:: max(1, -(-len(places) // MOST))])
    return tuple([calls[place] for place in sorted(kept)])
