"""What an instance has to do for each of its models, and until when.

The figures of a model are kept as long as what they are made of is the same, and the time has not
come at which they change by themselves: of the many models on an instance, one or two change
between two decisions.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from appliance.plugins.instance_work.expected import Expectations, Expected
from appliance.scheduling.policy_api import BatchView, Costs, GroupView, InstanceView
from appliance.vocabulary import InstanceId, ModelName

COSTLY_SHARE = 0.4
"""Switches to a model are costly that take more than this share of a whole answer: turns of others
are too short to hide its loads."""
AWAY = 0.25
"""A model with KV on the host waits until its slack is less than this share of its target, while
another one goes on: each switch between them moves KV."""
PROMPTS_IN_GAPS = 0.7
"""Where streams are promised a longest gap, prompts are due after this share of their TTFT target:
else they would wait for streams, which are always due soon, until they are late."""
SHORT_SHARE, SHORT_SECONDS = 0.5, 1.0
"""Short prompts with a tight TTFT come before tokens of others for this share of an instance's
time, and for as many seconds at once: a flood of them leaves the others the rest."""


@dataclass(slots=True)
class ModelWork:
    """What an instance has to do for one model."""

    model: ModelName
    due: float = math.inf
    """When the next token of the most urgent request is due."""
    promised: float = math.inf
    """When that token is due if nothing is due earlier for the sake of pace."""
    scheduled: float | None = None
    """When that token is due without longest gaps, if it is due earlier for one."""
    overdue: float = math.inf
    """When the most urgent token was due, if it is late; infinite if it is not."""
    prompt_seconds: float = 0.0
    """What the prompts that wait take."""
    runs: bool = False
    """Whether any of its requests could run now."""
    short: bool = False
    """Whether all of its prompts that can be in time have a tight TTFT, take no longer than its
    margin, and find its weights on the device: they come before tokens of others."""
    switch_seconds: float = 0.0
    """What it takes to bring its weights to the device."""
    ttft_seconds: float = math.inf
    """The strictest TTFT target of its requests."""
    costly_seconds: float = 0.0
    """The same wherever they are, if that is long for an answer of the model; else 0."""
    wanted: float = -math.inf
    """When it goes on before a model that has its slack target: at once, unless its KV is away."""
    latest: float = math.inf
    """When it has to run at the latest, to be in time."""
    slack_target_seconds: float = math.inf
    """Slack with which it lets others run."""
    margin_seconds: float = math.inf
    """How long before it is due it should run."""
    until: float = field(default=math.inf, compare=False)
    """How long this holds, if nothing comes or goes."""

    def slack_seconds(self, now: float) -> float:
        """How far it is ahead of its schedule, whatever gap it has to keep: that is earned."""
        return (self.due if self.scheduled is None else self.scheduled) - now


class Condition(NamedTuple):
    """What the figures of all models on an instance depend on."""

    behind: bool
    """Whether it has more to do than it can do in time."""
    gap_seconds: float
    """The longest gap that it keeps; infinite if none."""
    short: bool
    """Whether short prompts may come first."""


class Part(NamedTuple):
    """The work for a model, and what it is made of."""

    batch: BatchView | None
    groups: list[GroupView]
    expected: Expected
    resident: bool
    work: ModelWork


class Outlook(NamedTuple):
    """What is known of an instance as long as its view is the same."""

    view: InstanceView
    works: dict[ModelName, ModelWork]
    """By model."""
    condition: Condition
    parts: dict[ModelName, Part]


class Precedence:
    """How long short prompts had an instance before others lately."""

    def __init__(self) -> None:
        self._used: dict[InstanceId, tuple[float, float]] = {}

    def _seconds(self, now: float, instance: InstanceId) -> float:
        at, seconds = self._used.get(instance, (now, 0.0))
        return max(0.0, seconds - SHORT_SHARE * (now - at))

    def is_left(self, now: float, instance: InstanceId) -> bool:
        """Whether there is time left for some."""
        return self._seconds(now, instance) < SHORT_SECONDS

    def use(self, now: float, instance: InstanceId, seconds: float) -> None:
        """Count a prompt that takes so long."""
        self._used[instance] = now, self._seconds(now, instance) + seconds


class Terms(NamedTuple):
    """Parameters of `Appliance` that the figures depend on."""

    margin: float
    slack_target: float
    renewal_seconds: float
    pace: float
    output_tokens: int


class Outlooks:
    """Of all instances."""

    def __init__(self, terms: Terms, expectations: Expectations) -> None:
        self._terms = terms
        self._expectations = expectations
        self._of: dict[InstanceId, Outlook] = {}
        self.precedence = Precedence()

    def of(self, now: float, view: InstanceView, costs: Costs) -> dict[ModelName, ModelWork]:
        """The work for each model of the instance. O(1) for the view of the last question, else
        O(groups + batches) to look for changes, and O(groups + deadlines) of the models that have
        changed, or whose figures hold no more."""
        known = self._of.get(view.id)
        if known is None or known.view is not view:
            known = self._of[view.id] = self._make(now, view, costs, known)
        return known.works

    def condition(self, instance: InstanceId) -> Condition:
        """Of an instance when it was looked at last."""
        return self._of[instance].condition

    def _make(self, now: float, view: InstanceView, costs: Costs, known: Outlook | None) -> Outlook:
        behind = _is_behind(now, view, known is not None and known.condition.behind)
        condition = Condition(
            behind=behind,
            gap_seconds=math.inf if behind else _longest_gap(view),
            short=self.precedence.is_left(now, view.id),
        )
        before = known.parts if known is not None and known.condition == condition else {}
        batches = {batch.model: batch for batch in view.batches}
        groups: dict[ModelName, list[GroupView]] = {model: [] for model in batches}
        for group in view.groups:
            its = groups.get(group.model)
            if its is None:
                groups[group.model] = [group]
            else:
                its.append(group)
        parts: dict[ModelName, Part] = {}
        known_expected, resident = self._expectations.known, view.resident
        for model, its in groups.items():
            decoding, here = batches.get(model), model in resident
            part = before.get(model)
            if part is not None:
                # The same views are the same objects. No call, as this is asked of each model.
                batch, known_groups, expected, was_here, work = part
                if (
                    batch is decoding
                    and expected is known_expected.get(model)
                    and was_here is here
                    and work.until >= now
                    and known_groups == its
                ):
                    parts[model] = part
                    continue
            expected = self._expectations.of(model, now, costs)
            work = self._work(now, model, decoding, its, expected, here, condition, costs)
            parts[model] = Part(decoding, its, expected, here, work)
        works = {model: part.work for model, part in parts.items()}
        return Outlook(view, works, condition, parts)

    def _work(
        self,
        now: float,
        model: ModelName,
        batch: BatchView | None,
        groups: Sequence[GroupView],
        expected: Expected,
        resident: bool,
        condition: Condition,
        costs: Costs,
    ) -> ModelWork:
        work = ModelWork(model)
        if batch is not None:
            self._add_batch(now, work, batch, expected, condition)
        if groups:
            short = self._add_prompts(now, work, groups, expected, condition)
            if resident and condition.short and short is not None:
                work.short = short <= work.margin_seconds
        if not resident:
            work.switch_seconds = expected.switch_seconds
        answer = expected.of_answers(model, 1, costs, self._terms.output_tokens)
        if expected.switch_seconds > COSTLY_SHARE * answer:
            work.costly_seconds = expected.switch_seconds
        work.latest = work.due - work.margin_seconds - work.prompt_seconds - work.switch_seconds
        if batch is not None and batch.away_tokens and not work.prompt_seconds:
            work.wanted = work.due - AWAY * work.slack_target_seconds
        return work

    def _add_batch(
        self,
        now: float,
        work: ModelWork,
        batch: BatchView,
        expected: Expected,
        condition: Condition,
    ) -> None:
        """Of the requests that decode. An instance that is behind keeps no gaps, and has a model
        earn no more than one TTFT target before others go on: they are late already. Where the
        TTFT is tight, tokens are due earlier: see `Appliance.pace`."""
        terms, ttft_seconds = self._terms, batch.slo.ttft_seconds
        margin = terms.margin * ttft_seconds
        target = min(1.0, terms.slack_target) if condition.behind else terms.slack_target
        early = terms.pace * ttft_seconds if expected.is_tight(ttft_seconds) else 0.0
        deadlines = batch.scheduled or batch.deadlines
        work.due = deadlines[0] - early
        work.runs = batch.runnable > 0
        work.ttft_seconds = ttft_seconds
        work.slack_target_seconds = target * ttft_seconds
        work.margin_seconds = margin
        if condition.behind:
            limit = now - margin + early
            if deadlines[0] < limit:
                work.overdue = work.due
                work.due = _renewed(deadlines, limit, terms.renewal_seconds) - early
            work.until = work.due + margin
        elif batch.scheduled:
            in_gap = _due_in_gap(now, batch)
            work.until = in_gap
            if in_gap < work.due:
                work.due, work.scheduled = in_gap, work.due
                work.margin_seconds = min(margin, terms.margin * batch.slo.gap_seconds)
        work.promised = work.due if work.scheduled is not None else work.due + early

    def _add_prompts(
        self,
        now: float,
        work: ModelWork,
        groups: Sequence[GroupView],
        expected: Expected,
        condition: Condition,
    ) -> float | None:
        """Of the requests that wait; what the interactive prompts take that have a tight TTFT and
        can be in time, None if there are none."""
        behind, gap = condition.behind, condition.gap_seconds
        base, per_token = expected.prompt_seconds, expected.prompt_seconds_per_token
        first, margins, until = math.inf, work.margin_seconds, work.until
        strictest = work.ttft_seconds
        seconds, short, found = 0.0, 0.0, False
        for group in groups:
            deadline, ttft = group.deadline, group.slo.ttft_seconds
            due, margin = _scheduled(group), self._terms.margin * ttft
            if not behind and deadline >= now:
                due = deadline
                until = due if due < until else until
            if gap < math.inf:
                due, margin = self._in_gap(group, due, margin, gap)
            if behind:
                if now > due + margin:
                    work.overdue = min(work.overdue, due)
                    due = self._again(now - margin, due)
                until = min(until, due + margin)
            first = due if due < first else first
            margins = margin if margin < margins else margins
            strictest = ttft if ttft < strictest else strictest
            prompts = group.waiting * base + group.tokens * per_token
            seconds += prompts
            last = deadline - prompts
            if last >= now and group.interactive and expected.is_tight(ttft):
                short, found = short + prompts, True
                until = min(until, last)
        work.due, work.promised = min(work.due, first), min(work.promised, first)
        work.margin_seconds, work.until, work.ttft_seconds = margins, until, strictest
        work.prompt_seconds, work.runs = seconds, True
        return short if found else None

    def _in_gap(
        self, group: GroupView, due: float, margin: float, gap: float
    ) -> tuple[float, float]:
        """When prompts are due, and how long before that they should run, next to streams that
        have a longest gap."""
        if not group.resumed:
            due = min(due, group.arrived + PROMPTS_IN_GAPS * group.slo.ttft_seconds)
        return due, min(margin, self._terms.margin * gap)

    def _again(self, limit: float, due: float) -> float:
        """When prompts count as due that wait for what can still be in time."""
        period = self._terms.renewal_seconds
        return due + math.ceil((limit - due) / period) * period


def _is_behind(now: float, view: InstanceView, was: bool) -> bool:
    """Whether the instance has more to do than it can do in time, as far as is seen: from when a
    token is late by more than a TTFT target, until none is late."""
    for batch in view.batches:
        due = batch.scheduled[0] if batch.scheduled else batch.deadline
        if due < now and (was or due + batch.slo.ttft_seconds < now):
            return True
    for group in view.groups:
        due = group.deadline if group.scheduled is None else group.scheduled
        if due < now and (was or due + group.slo.ttft_seconds < now):
            return True
    return False


def _renewed(deadlines: Sequence[float], limit: float, period: float) -> float:
    """When the first of the tokens counts as due: as promised, or, if that was before `limit`, so
    many periods later. O(those before), or less if they were not long before."""
    late = bisect.bisect_left(deadlines, limit)
    first = deadlines[:late] if deadlines[0] < limit - period else deadlines[:1]
    renewed = [due + math.ceil((limit - due) / period) * period for due in first]
    return min([*renewed, *deadlines[late : late + 1]])


def _longest_gap(view: InstanceView) -> float:
    """The shortest of those that streams here are promised; infinite if none is."""
    return min([gap for batch in view.batches if (gap := batch.slo.gap_seconds)], default=math.inf)


def _scheduled(group: GroupView) -> float:
    """When its most urgent token is due, whatever gap it has to keep."""
    return group.deadline if group.scheduled is None else group.scheduled


def _due_in_gap(now: float, batch: BatchView) -> float:
    """When the first of the tokens is due that are not late yet; infinite if all are. A stream
    whose gap is over has lost a token, however long it waits now: it loses no other one before the
    next is due as scheduled."""
    first = bisect.bisect_left(batch.deadlines, now)
    return min(batch.deadlines[first : first + 1], default=math.inf)
