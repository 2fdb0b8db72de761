"""Figures of deadlines: when work is due, who runs next, and for how long, as the policy says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from msgspec.structs import replace

from appliance.plugins.appliance import Appliance
from appliance.plugins.instance_work.expected import Expectations
from appliance.plugins.instance_work.outlook import ModelWork, Outlooks, Terms
from appliance.scheduling.policy_api import BatchView, InstanceView, Phase
from appliance.vocabulary import ModelName, Slo
from tests.pictures.policy.canvas import (
    MARGIN,
    RIGHT,
    Bar,
    Scale,
    arrow,
    dot,
    figure,
    lane,
    legend,
    line,
    path,
    say,
    seconds_axis,
    span,
)
from tests.unit.plugins.policy_views import FixedCosts, batch_view, group_view, instance_view

LEFT: Final = 130
POLICY: Final = Appliance()


def outlooks() -> Outlooks:
    """What the policy, with its defaults, knows of instances."""
    terms = Terms(
        POLICY.margin,
        POLICY.slack_target,
        POLICY.renewal_seconds,
        POLICY.pace,
        POLICY.output_tokens,
    )
    return Outlooks(terms, Expectations())


def decoding(model: ModelName, slo: Slo, due: float) -> BatchView:
    """A request whose next token is due then."""
    return replace(batch_view(model, deadline=due), slo=slo)


# --- which model runs ----------------------------------------------------------------------------

LOOSE: Final = Slo(10.0, 0.1)
COSTS: Final = FixedCosts(step=0.02, per_token=0.001, switch=0.9)
"""Loads of 0.9 s, prompts of 1 ms a token, steps of 20 ms."""


def three_models() -> InstanceView:
    """A runs and is on the device. B and C wait; their weights are away."""
    return instance_view(
        current="A",
        resident=["A"],
        batches=(decoding("A", LOOSE, 16.5), decoding("C", LOOSE, 13.4)),
        groups=(group_view("B", 2, tokens=1200, ttft=10.0, arrived=0.0, deadline=10.0),),
    )


def chosen(now: float, view: InstanceView) -> ModelName:
    """Which model the policy has run: its prompts first, else its turn. Asked anew, as a machine
    would ask a policy that has just started."""
    policy = Appliance()
    groups = tuple(view.groups[index] for index in policy.admit(now, view, COSTS))
    view = replace(view, groups=groups)
    if policy.phase(now, view, COSTS) is Phase.PREFILL:
        return groups[0].model
    return policy.round(now, view, COSTS)[0].model


def next_model() -> str:
    """What each model needs before it is due, and below the model that the policy chooses."""
    view = three_models()
    works = outlooks().of(0.0, view, COSTS)
    across = Scale(4, 17, LEFT, RIGHT)
    parts = [*legend(LEFT, 50, LEAD)]
    for row, model in enumerate("ABC"):
        parts += _lead(model, works[model], 64 + 34 * row, across)
    choices = _stretches([(at / 20, chosen(at / 20, view)) for at in range(80, 200)])
    parts += [
        *lane("policy's choice", 178, 24, choices, across),
        *seconds_axis(across, 212, 1),
    ]
    return figure("The model that runs goes on until another one has to start", 240, parts)


LEAD: Final = [
    ("load", "switch"), ("b pale", "prompts"), ("a pale", "margin"), ("late", "token is due"),
]  # fmt: skip


def _lead(model: ModelName, work: ModelWork, y: float, scale: Scale) -> Iterator[str]:
    """The blocks between the latest start of a model and its deadline."""
    at, bars = work.latest, []
    for seconds, kind in (
        (work.switch_seconds, "load"),
        (work.prompt_seconds, "b pale"),
        (work.margin_seconds, "a pale"),
    ):
        bars.append(Bar(at, at + seconds, kind))
        at += seconds
    yield from lane(model, y, 22, bars, scale)
    yield arrow(scale(work.due), y + 3, y + 20, "late")
    yield line(scale(work.latest), y - 4, scale(work.latest), y + 26, "line-ink")
    yield say(scale(work.latest) - 7, y + 15, "latest start", "small end")


def _stretches(choices: list[tuple[float, ModelName]]) -> list[Bar]:
    """Bars of what was chosen at evenly spaced moments."""
    step, bars = choices[1][0] - choices[0][0], list[Bar]()
    for at, model in choices:
        began = bars.pop().began if bars and bars[-1].text == model else at
        bars.append(Bar(began, at + step, model.lower(), model))
    return bars


# --- for how long --------------------------------------------------------------------------------


class Turn(NamedTuple):
    """A turn of A as the policy plans it, and the others in the order of their deadlines."""

    quota_seconds: float
    others: list[ModelWork]


def planned_turn() -> Turn:
    """Two models have to load and compute their prompts after the turn of A."""
    view = instance_view(
        current="A",
        resident=["A"],
        batches=(decoding("A", LOOSE, 9.0),),
        groups=(
            group_view("B", 1, tokens=700, ttft=10.0, deadline=7.4),
            group_view("C", 3, tokens=1500, ttft=10.0, deadline=8.5),
        ),
    )
    turn = Appliance().round(0.0, view, COSTS)[0]
    works = outlooks().of(0.0, view, COSTS)
    others = sorted([works[model] for model in "BC"], key=lambda work: work.due)
    return Turn(turn.quota_seconds, others)


def quota() -> str:
    """The turn, and after it what the others do, one after the other, until they are due."""
    turn = planned_turn()
    across = Scale(0, 9, LEFT, RIGHT)
    at, parts = turn.quota_seconds, [*legend(LEFT, 50, LEAD)]
    parts += lane("A", 64, 24, [Bar(0, at, "a", f"turn of {at:.1f} s")], across)
    for row, work in enumerate(turn.others, 1):
        y = 64 + 34 * row
        bars = [Bar(at, at + work.switch_seconds, "load")]
        done = bars[-1].ended + work.prompt_seconds
        bars.append(Bar(bars[-1].ended, done, "b pale"))
        bars.append(Bar(work.due - work.margin_seconds, work.due, "a pale"))
        parts += lane(work.model, y, 24, bars, across)
        parts.append(line(across(at), y - 34, across(at), y + 24, "line-ink dash"))
        parts.append(arrow(across(work.due), y + 4, y + 21, "late"))
        at = done
    parts += seconds_axis(across, 168, 1)
    title = "A turn ends so that the others, one after the other, are all in time"
    return figure(title, 196, parts)


# --- pace ----------------------------------------------------------------------------------------

TIGHT: Final = Slo(2.0, 0.1)
FIRST_TOKEN: Final = 0.6


def paced(token: int) -> tuple[float, float]:
    """When a token of a request that came at 0 is due by its schedule, and for the policy."""
    view = instance_view(batches=(decoding("A", TIGHT, TIGHT.scheduled(0.0, token)),))
    work = outlooks().of(0.0, view, COSTS)["A"]
    return work.promised, work.due


def pace() -> str:
    """Both lines, and the one that a client's mean counts from."""
    across, up = Scale(0, 6, LEFT, RIGHT), Scale(0, 40, 216, 62)
    tokens = (0, 40)
    dues = [paced(token) for token in tokens]
    mean = [(across(FIRST_TOKEN + token * TIGHT.tbt_seconds), up(token)) for token in tokens]
    early, y = dues[0][0] - dues[0][1], up(20)
    scheduled, due = paced(20)
    parts = [
        say(MARGIN, up(20) - 4, "token"),
        say(MARGIN, up(20) + 12, "number"),
        *(say(LEFT - 8, up(count) + 4, f"{count}", "small end") for count in (0, 20, 40)),
        *(line(LEFT, up(count), RIGHT, up(count), "grid") for count in (20, 40)),
        path(
            [(across(by), up(k)) for k, (by, _) in zip(tokens, dues, strict=True)], "line-ink dash"
        ),
        path(
            [(across(by), up(k)) for k, (_, by) in zip(tokens, dues, strict=True)], "line-a thick"
        ),
        path(mean, "line-c"),
        dot(across(FIRST_TOKEN), up(0), "c"),
        *span(across(due), across(scheduled), y, "line-late"),
        say(across(due) + 14, y + 18, f"{early:.1f} s earlier"),
        *seconds_axis(across, 222, 1),
        *legend(
            LEFT,
            50,
            [
                ("line-c", f"mean of 100 ms after a first token at {FIRST_TOKEN} s"),
                ("line-a thick", "due with pace"),
                ("line-ink dash", "due by the schedule"),
            ],
        ),
    ]
    title = "Where the TTFT is tight, tokens are due earlier: in time for a client's mean"
    return figure(title, 250, parts)


# --- what is late --------------------------------------------------------------------------------


def renewed_due(now: float) -> float:
    """When a token that was promised for 10 s counts as due, on an instance that is behind."""
    view = instance_view(batches=(decoding("A", LOOSE, 10.0), decoding("B", LOOSE, -20.0)))
    return outlooks().of(now, view, COSTS)["A"].due


def renewal() -> str:
    """How that deadline moves on while time passes."""
    across, up = Scale(0, 70, LEFT, RIGHT), Scale(0, 75, 226, 52)
    moments = [(at / 8, renewed_due(at / 8)) for at in range(0, 70 * 8 + 1)]
    corners = [
        here
        for before, here, after in zip(moments, moments[1:], moments[2:], strict=False)
        if not before[1] == here[1] == after[1]
    ]
    points = [moments[0], *corners, moments[-1]]
    parts = [
        say(MARGIN, up(40) - 4, "its token"),
        say(MARGIN, up(40) + 12, "is due at"),
        *(say(LEFT - 8, up(at) + 4, f"{at} s", "small end") for at in (10, 40, 70)),
        *(line(LEFT, up(at), RIGHT, up(at), "grid") for at in (10, 40, 70)),
        path([(across(at), up(at)) for at in (0, 70)], "line-ink dash"),
        path([(across(at), up(due)) for at, due in points], "line-a thick"),
        say(across(50), up(34), "below this line it is late", "small"),
        *seconds_axis(across, 232, 10),
        say(RIGHT, 264, "now", "small end"),
    ]
    title = "On an instance that is behind, what is late is due again later"
    return figure(title, 274, parts)
