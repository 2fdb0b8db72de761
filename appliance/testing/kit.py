"""Tests any policy: `check(MyPolicy)` says what the daemon could hold against it.

It is loaded as the daemon would, asked what the machine asks in boxes of all sizes, and then left
alone with the real machine on simulated instances, where every request has to come to its end.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import msgspec

from appliance.errors import ApplianceError, PolicyError
from appliance.hookspecs import API_VERSION, HOOKS
from appliance.policies.guard import BUDGET_SECONDS
from appliance.policies.validation import shown
from appliance.scheduling.policy_api import Costs, Hold, Refusal
from appliance.testing.asking import SLOW_SECONDS, Asker, PolicyReply
from appliance.testing.recorded_calls import asked
from appliance.testing.rerun import digest_elsewhere, importable, make
from appliance.testing.scenes import SCENES, HookCall, Played, Scene, model_names
from appliance.testing.trial import trial
from appliance.vocabulary import FinishReason, Word

MACHINE_SECONDS = BUDGET_SECONDS / 10
"""What the slowest hundredth of the answers to a hook may take here. The daemon waits ten times as
long before it goes on without: it may run on a slower machine."""

RUN_SCENES = ("crowd", "pair")
"""Where requests have to end."""
RERUN_SCENE = "pair"

ENDED_WELL = {FinishReason.STOP, FinishReason.LENGTH, "overloaded"}
"""The last is where a `Refusal` leads."""

UNKNOWN_PARAMETER = "no_such_parameter"


class ConformanceFinding(Word, frozen=True):
    """Something wrong: which check found it, at which hook, how often; `detail` is a traceback."""

    check: str
    message: str
    hook: str = ""
    count: int = 1
    detail: str = ""

    def __str__(self) -> str:
        where = f"{self.check}: {self.hook}: " if self.hook else f"{self.check}: "
        often = f" ({self.count} times)" if self.count > 1 else ""
        return f"{where}{self.message}{often}" + (f"\n{self.detail}" if self.detail else "")


class HookReport(Word, frozen=True):
    """What became of the questions of a hook. `answered` of them it had an opinion on, `valid` of
    these the machine could use."""

    hook: str
    asked: int
    answered: int
    valid: int
    p99_seconds: float


class ConformanceReport(Word, frozen=True):
    """Everything that was found. `ended` requests came to their end in the runs."""

    policy: str
    hooks: tuple[HookReport, ...]
    findings: tuple[ConformanceFinding, ...]
    ended: int = 0
    unseen: tuple[str, ...] = ()
    """What was not tested: questions that were not put to it, and answers that it did not give."""

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        """For an assertion's message."""
        found = [str(finding) for finding in self.findings]
        lines = found or [f"{self.policy}: nothing to object to"]
        return "\n".join([*lines, *(f"not tested: {what}" for what in self.unseen)])


def check(policy: object, *, p99_seconds: float = MACHINE_SECONDS) -> ConformanceReport:
    """Test a policy: its class, or an object for parameters other than as it ships.

    The class has to be a `msgspec.Struct`. Each hook's slowest hundredth of answers may take
    `p99_seconds`. Takes a few seconds; the first one in a process longer.
    """
    return _Examination(policy, p99_seconds).report()


class _Examination:
    def __init__(self, policy: object, p99_seconds: float) -> None:
        self._kind = policy if isinstance(policy, type) else type(policy)
        self._is_struct = issubclass(self._kind, msgspec.Struct)
        self._parameters: dict[str, Any] = (
            {} if isinstance(policy, type) or not self._is_struct else msgspec.to_builtins(policy)
        )
        self._p99_seconds = p99_seconds
        self._found: dict[tuple[str, str, str], ConformanceFinding] = {}
        self._asked: Counter[str] = Counter()
        self._answered: Counter[str] = Counter()
        self._valid: Counter[str] = Counter()
        self._seconds: dict[str, list[float]] = {}
        self._ended = 0
        self._hooks: tuple[str, ...] = ()
        self._given: set[str] = set()
        """Kinds of answers that it gave to `prefill`."""

    def report(self) -> ConformanceReport:
        if self._loads() and all(self._ask(scene) for scene in SCENES.values()):
            for name in RUN_SCENES:
                self._run(SCENES[name])
        self._time()
        hooks = tuple(
            HookReport(
                hook=hook,
                asked=self._asked[hook],
                answered=self._answered[hook],
                valid=self._valid[hook],
                p99_seconds=_p99(self._seconds[hook]),
            )
            for hook in HOOKS
            if self._asked[hook]
        )
        return ConformanceReport(
            policy=self._kind.__name__,
            hooks=hooks,
            findings=tuple(self._found.values()),
            ended=self._ended,
            unseen=tuple(self._unseen()),
        )

    def _unseen(self) -> Iterator[str]:
        """Of the questions that it answers, and of the answers to `prefill` that its module
        names."""
        for hook in self._hooks:
            if not self._asked[hook]:
                yield f"{hook}: it was never asked"
            elif not self._answered[hook]:
                yield f"{hook}: it had no opinion on any of {self._asked[hook]} questions"
        named = vars(sys.modules.get(self._kind.__module__, object)).values()
        for kind in (Refusal, Hold):
            known = any(one is kind for one in named)
            if "prefill" in self._hooks and known and kind.__name__ not in self._given:
                asked = self._asked["prefill"]
                yield f"prefill: it never answered with a {kind.__name__} to {asked} questions"

    def _find(self, check: str, message: str, hook: str = "", detail: str = "") -> None:
        """Of the same kind at the same hook the first is kept, and how many there were."""
        key = (check, hook, message if not hook else "")
        known = self._found.get(key)
        if known is None:
            self._found[key] = ConformanceFinding(
                check=check, message=message, hook=hook, detail=detail
            )
        else:
            self._found[key] = msgspec.structs.replace(known, count=known.count + 1)

    # --- as it is loaded -------------------------------------------------------------------------

    def _loads(self) -> bool:
        """Whether it can be made and asked."""
        for name in HOOKS:
            method = getattr(self._kind, name, None)
            if callable(method) and not hasattr(method, "appliance_impl"):
                self._find("hooks", "not marked with @hookimpl: it is never called", name)
        if not self._is_struct:
            self._find("parameters", f"{self._kind.__name__} is not a msgspec.Struct class")
            return False
        version = getattr(self._kind, "api_version", API_VERSION)
        if type(version) is not int or version != API_VERSION:
            self._find("version", f"written for version {version!r}, this is {API_VERSION}")
        for field in msgspec.structs.fields(self._kind):
            if field.required:
                self._find("parameters", f"{field.name} has no default")
        if not self._found:
            self._refuses_unknown_parameters()
        if any(finding.check == "parameters" for finding in self._found.values()):
            return False
        try:
            hooks = Asker(msgspec.convert(self._parameters, self._kind)).hooks
        except ApplianceError as error:
            self._find("hooks", str(error))
            return False
        except Exception as error:
            self._find("parameters", f"it cannot be made: {error!r}")
            return False
        self._hooks = hooks
        if not hooks:
            self._find("hooks", "it answers no question")
        return bool(hooks)

    def _refuses_unknown_parameters(self) -> None:
        try:
            msgspec.convert(self._parameters | {UNKNOWN_PARAMETER: 1}, self._kind)
        except msgspec.ValidationError:
            return
        self._find("parameters", "unknown ones are taken: set forbid_unknown_fields=True")

    # --- as it answers ---------------------------------------------------------------------------

    def _ask(self, scene: Scene) -> bool:
        """Two are asked the same, and have to say the same; False if that takes for ever."""
        first, second = (Asker(make(self._kind, self._parameters, scene)) for _ in range(2))
        parameters = _parameters_of(first.policy)
        questions = [question for question in asked(scene) if question.hook in first.hooks]
        estimates = _estimates(questions[0], scene) if questions else []
        for question in questions:
            if first.given_up:
                self._find("budget", f"more than {SLOW_SECONDS:g} s for an answer, again and again")
                return False
            reply, again = first.ask(question), second.ask(question)
            self._count(question.hook, reply, again)
            self._object(question, reply)
            if not reply.wrong and reply.answer != again.answer:
                said = f"{shown(reply.answer)} and {shown(again.answer)}"
                self._find("determinism", f"two of it, asked the same, said {said}", question.hook)
        if _parameters_of(first.policy) != parameters:
            message = "it changed its parameters: make what it remembers in __post_init__"
            self._find("state", message)
        if questions and _estimates(questions[0], scene) != estimates:
            self._find("mutation", "it changed the estimates")
            asked.cache_clear()
        return True

    def _count(self, hook: str, reply: PolicyReply, again: PolicyReply) -> None:
        self._asked[hook] += 1
        self._answered[hook] += reply.answer is not None or bool(reply.wrong)
        self._valid[hook] += reply.answer is not None
        # The better of the two: what the machine did meanwhile is not the policy's doing.
        self._seconds.setdefault(hook, []).append(min(reply.seconds, again.seconds))

    def _object(self, question: HookCall, reply: PolicyReply) -> None:
        self._given.add(type(reply.answer).__name__)
        if reply.wrong:
            kind = "exceptions" if reply.trace else "answers"
            self._find(kind, reply.wrong, question.hook, reply.trace)
        if reply.spoiled:
            self._find("mutation", "it changed what it was shown", question.hook)
            asked.cache_clear()  # the next policy must not see that

    def _time(self) -> None:
        for hook, seconds in self._seconds.items():
            if _p99(seconds) > self._p99_seconds:
                took, limit = _p99(seconds) * 1e3, self._p99_seconds * 1e3
                self._find("budget", f"{took:.1f} ms at p99, of {limit:g} ms", hook)

    # --- as it runs ------------------------------------------------------------------------------

    def _run(self, scene: Scene) -> None:
        policy = make(self._kind, self._parameters, scene)
        try:
            played = trial(policy, scene, self._object)
        except ApplianceError as error:
            self._find("run", str(error), detail=traceback.format_exc())
            return
        for life in played.lives:
            if life.outcome is None:
                self._find("run", "requests never ended", detail=f"{life.id} of {life.model}")
            elif life.outcome in ENDED_WELL:
                self._ended += 1
            else:
                self._find("run", f"requests ended as {life.outcome}", detail=life.id)
        if scene.name == RERUN_SCENE and not self._found and importable(self._kind):
            self._run_again(scene, played)

    def _run_again(self, scene: Scene, played: Played) -> None:
        try:
            digest = digest_elsewhere(self._kind, self._parameters, scene)
        except PolicyError as error:
            self._find("run", "it fails in a process of its own", detail=str(error))
            return
        if digest != played.digest:
            message = "another process decided otherwise: is a set gone through in its order?"
            self._find("determinism", message)


def _parameters_of(policy: object) -> bytes:
    """What its fields are now; anything else that it has is its state."""
    return msgspec.msgpack.encode(policy, enc_hook=repr)


def _estimates(question: HookCall, scene: Scene) -> list[float]:
    """What the costs say of every model."""
    costs = cast(Costs, question.views["costs"])
    return [
        seconds
        for model in model_names(scene)
        for seconds in (
            costs.step_seconds(model, 2, 1000),
            costs.prefill_seconds(model, 1000),
            costs.switch_seconds(model),
        )
    ]


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[math.ceil(len(seconds) * 0.99) - 1]
