"""Figures of instances: how many of them prefill, and how many rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from appliance.lab.workload import Arrival
from appliance.plugins.appliance import Appliance
from appliance.plugins.separation import GAIN, ModelLoad
from appliance.vocabulary import Slo
from tests.pictures.policy.canvas import (
    MARGIN,
    RIGHT,
    Bar,
    Scale,
    block,
    figure,
    lane,
    legend,
    line,
    path,
    say,
    seconds_axis,
)
from tests.pictures.policy.lab_runs import Played, box, play

LEFT: Final = 130

# --- separation ----------------------------------------------------------------------------------

INSTANCES: Final = 8
LOAD: Final = ModelLoad(
    prompt_seconds=0.4,
    answer_tokens=200,
    step_seconds=0.03,
    request_seconds=0.0005,
    limit_seconds=0.045,
    room=60,
    kv_seconds=0.01,
    target_seconds=0.05,
)
"""Prompts of 0.4 s, answers of 200 tokens, 50 ms each: the fixed part of a step takes 30 of the 45
ms that it may take, and where prompts are computed, too, it is paid next to them."""


def carried() -> dict[int, float]:
    """Requests a second by the number of instances that only prefill; 0 if all do both."""
    apart = {count: LOAD.carried_apart(count, INSTANCES) for count in range(1, INSTANCES)}
    return {0: LOAD.carried_mixed(INSTANCES), **apart}


def separation() -> str:
    """What eight instances carry, and the number that the policy takes."""
    rates, best = carried(), LOAD.best(INSTANCES, 0)
    across, up = Scale(0, INSTANCES, LEFT, RIGHT), Scale(0, 16, 216, 62)
    parts = [
        *legend(
            LEFT, 50, [("a", "what it carries"), ("c", "taken"), ("line-ink dash", "all mixed")]
        ),
        say(MARGIN, up(8) - 12, "requests"),
        say(MARGIN, up(8) + 4, "a second"),
        *(say(LEFT - 8, up(rate) + 4, f"{rate}", "small end") for rate in (0, 4, 8, 12, 16)),
    ]
    for count, rate in rates.items():
        x, y = across(count) + 8, up(rate)
        parts.append(block(x, y, 56, up(0) - y, "c" if count == best else "a"))
        parts.append(say(x + 28, y - 5, f"{rate:.1f}", "small mid"))
        parts.append(say(x + 28, up(0) + 17, f"{count}" if count else "all both", "small mid"))
    parts += [
        line(LEFT, up(rates[0]), RIGHT, up(rates[0]), "line-ink dash"),
        line(LEFT, up(0), RIGHT, up(0), "axis"),
        say(RIGHT, up(0) + 36, "instances that prefill; the others decode", "small end"),
    ]
    title = f"Instances are separated where that carries {GAIN * 100:g} % more than mixed ones"
    return figure(title, 264, parts)


# --- parking -------------------------------------------------------------------------------------

PARKED_INSTANCES: Final = 6
PARKED_SECONDS: Final = 300.0
BUSY: Final = (90.0, 180.0)
"""Between these, much more is asked."""


def parking_run() -> Played:
    """One model on six GPUs: a request each four seconds, and for a while two a second."""
    moments, at = list[float](), 0.0
    while at < PARKED_SECONDS:
        moments.append(at)
        at += 0.5 if BUSY[0] <= at < BUSY[1] else 4.0
    asked = [
        Arrival(seconds=at, model="A", prompt_tokens=2000, output_tokens=100) for at in moments
    ]
    kinds, policy = {"A": "Qwen2.5-7B"}, Appliance(park=True)
    hardware = box("A10", PARKED_INSTANCES)
    return play(hardware, kinds, Slo(5.0, 0.1), asked, PARKED_SECONDS, policy)


def parking() -> str:
    """Instances that are open, those with work among them, and what is asked below."""
    samples = parking_run().run.samples
    across, up = Scale(0, PARKED_SECONDS, LEFT, RIGHT), Scale(0, 6, 196, 66)
    opened = [(one.at, one.opened) for one in samples]
    asked = [Bar(*BUSY, "b", "2 requests a second")]
    asked += [
        Bar(0, BUSY[0], "b pale", "1 each 4 s"),
        Bar(BUSY[1], across.high, "b pale", "1 each 4 s"),
    ]
    parts = [
        say(MARGIN, up(3) - 4, "instances"),
        say(MARGIN, up(3) + 12, "open"),
        *(say(LEFT - 8, up(count) + 4, f"{count}", "small end") for count in (0, 2, 4, 6)),
        *(line(LEFT, up(count), RIGHT, up(count), "grid") for count in (0, 2, 4, 6)),
        path([(across(at), up(count)) for at, count in stairs(opened)], "line-a thick"),
        *lane("asked", 208, 22, asked, across),
        *seconds_axis(across, 238, 30),
    ]
    return figure("With park = true, instances that are not needed rest", 266, parts)


def stairs(looks: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Corners of a line through looks, level from each to the next."""
    yield looks[0]
    for (_, before), (at, value) in pairwise(looks):
        if value != before:
            yield at, before
            yield at, value
    yield looks[-1]
