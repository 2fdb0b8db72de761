"""A policy in charge of the real machine, on simulated instances; a built-in answers what it does
not."""

from __future__ import annotations

from collections.abc import Callable

from appliance.plugins.aegaeon import Aegaeon
from appliance.policies.stack import PolicyStack
from appliance.testing.asking import Asker, PolicyReply
from appliance.testing.scenes import HookCall, Played, Scene, play, put


def ignore(question: HookCall, reply: PolicyReply) -> None:
    """For trials that are not watched."""


def trial(
    policy: object, scene: Scene, look: Callable[[HookCall, PolicyReply], None] = ignore
) -> Played:
    """Run a scene under the policy; `look` is shown all that it says.

    Raises `PolicyError` for a hook that does not exist, and when events have no end.
    """
    asker = Asker(policy)
    rest = PolicyStack({"built-in": Aegaeon()})

    def answer(question: HookCall) -> object:
        if question.hook in asker.hooks and not asker.given_up:
            reply = asker.ask(question)
            look(question, reply)
            if isinstance(reply.answer, tuple) and question.hook == "prefetch":
                return reply.answer[0] if reply.answer else None
            if reply.answer is not None:
                return reply.answer
        return put(rest, question)

    return play(scene, answer)
