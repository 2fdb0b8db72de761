"""Figures of turns: what one modelled GPU computed and loaded, as the lab played it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from appliance.lab.sim.recorder import Life
from appliance.lab.workload import Arrival
from appliance.plugins.appliance import Appliance
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
from tests.pictures.policy.lab_runs import Played, box, play

LEFT: Final = 130
SMALL: Final = {"A": "Qwen2.5-7B", "B": "Yi-6B"}
"""Two models of which an A10 holds one at a time."""
LARGE: Final = dict.fromkeys("ABC", "Llama-2-13B")
"""Three models of which an A100 holds two, with room for KV."""
ALIKE: Final = dict.fromkeys("AB", "Qwen2.5-7B")
"""Two models that an H800 holds together."""


def ask(seconds: float, model: ModelName, output_tokens: int, prompt_tokens: int = 200) -> Arrival:
    """A request that will come."""
    return Arrival(
        seconds=seconds, model=model, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )


def computed(played: Played) -> list[Bar]:
    """What the first instance computed. A prompt is computed while its weights come, layer by
    layer: that is counted as a load."""
    bars: list[Bar] = []
    for one in played.spans():
        loads = [
            load.ended
            for load in played.loads
            if load.model == one.model and load.began < one.ended and load.ended > one.began
        ]
        began = max([one.began, *loads])
        bars.append(Bar(min(began, one.ended), one.ended, one.model.lower(), one.model))
    return bars


def joined(bars: Iterable[Bar]) -> list[Bar]:
    """The same, with what follows at once as one: turns of the same model, say."""
    found: list[Bar] = []
    for bar in bars:
        if found and found[-1].kind == bar.kind and bar.began - found[-1].ended < 1e-6:
            bar = bar._replace(began=found.pop().began)
        found.append(bar)
    return found


def loaded(played: Played, text: str = "load") -> list[Bar]:
    """What came over the link of the first instance."""
    return [Bar(load.began, load.ended, "load", f"{text} {load.model}") for load in played.loads]


def due(life: Life, token: int) -> float:
    """When a token of a request is due, from 0."""
    return life.slo.scheduled(life.arrived, token)


def late_tokens(played: Played) -> int:
    """Of all requests."""
    return sum(
        at > due(life, number) + 1e-9
        for life in played.run.recorder.lives
        for number, at in enumerate(played.tokens(life))
    )


def longest_wait(played: Played) -> float:
    """The longest time from one token of a stream to the next."""
    times = [played.tokens(life) for life in played.run.recorder.lives]
    return max(after - before for its in times for before, after in pairwise(its))


# --- slack ---------------------------------------------------------------------------------------


def slack_run() -> Played:
    """Two requests for two models, of which the GPU holds one at a time."""
    asked = [ask(0.0, "A", 300), ask(0.5, "B", 300)]
    return play(box("A10"), SMALL, Slo(5.0, 0.1), asked, 60.0)


def slack() -> str:
    """Tokens of one request, made and due."""
    played = slack_run()
    (life,) = played.lives("A")
    made = played.tokens(life)
    across, up = Scale(0, 30, LEFT, RIGHT), Scale(0, 300, 262, 66)
    stop = next(n for n, (before, after) in enumerate(pairwise(made), 1) if after - before > 1)
    left_at, slack_seconds = made[stop - 1], due(life, stop) - made[stop - 1]
    staircase = [
        (across(at), up(number))
        for number, at in enumerate(made, 1)
        if number % 20 == 1 or number == len(made) or _is_corner(made, number - 1)
    ]
    ideal = [(across(due(life, token)), up(token + 1)) for token in (0, 249)]
    y = up(stop)
    parts = [
        *(say(LEFT - 8, up(count) + 4, f"{count}", "small end") for count in (0, 100, 200, 300)),
        say(MARGIN, up(150) - 4, "tokens"),
        say(MARGIN, up(150) + 12, "of A"),
        *(line(LEFT, up(count), RIGHT, up(count), "grid") for count in (100, 200, 300)),
        path(ideal, "line-ink dash"),
        path(staircase, "line-a thick"),
        *span(across(left_at), across(due(life, stop)), y, "line-c"),
        say(across(left_at) + 10, y + 18, f"slack {slack_seconds:.1f} s"),
        *lane("GPU runs", 276, 24, [*joined(computed(played)), *loaded(played)], across),
        *seconds_axis(across, 308, 5),
        *legend(
            LEFT + 14,
            52,
            [("line-a thick", "made"), ("line-ink dash", "due: 5 s, then each 100 ms")],
        ),
    ]
    return figure("A running model earns slack, which pays for the other one's turn", 336, parts)


def _is_corner(made: Sequence[float], index: int) -> bool:
    """Whether a token comes long after the one before, or the next one after it."""
    near = made[max(0, index - 1) : index + 2]
    return any(after - before > 0.5 for before, after in pairwise(near))


# --- turns and loads -----------------------------------------------------------------------------


def loads_run() -> Played:
    """Three models of which the GPU holds two: one has to come while another one runs."""
    asked = [ask(0.2 * number, model, 300) for number, model in enumerate("ABC")]
    return play(box("A100"), LARGE, Slo(6.0, 0.1), asked, 60.0)


def loads() -> str:
    """What the GPU computes, and above it what its link brings meanwhile."""
    played = loads_run()
    across = Scale(0, 16, LEFT, RIGHT)
    first = played.loads[0]
    turns = [one for one in played.spans() if one.steps]
    shortest = min(one.ended - one.began for one in turns[:4])
    load = first.ended - first.began
    parts = [
        *lane("link brings", 44, 26, loaded(played, ""), across),
        *lane("GPU runs", 78, 26, computed(played), across),
        *seconds_axis(across, 114, 2),
        say(
            LEFT,
            152,
            f"A load takes {load:.2f} s; the shortest of the first four turns {shortest:.2f} s.",
            "small",
        ),
    ]
    return figure(
        "Weights of the next model come during a turn no shorter than the load", 168, parts
    )


# --- short prompts -------------------------------------------------------------------------------


def short_run(ttft_seconds: float) -> Played:
    """A request of B comes during a turn of A; both models are on the device."""
    slos = {"A": Slo(10.0, 0.1), "B": Slo(ttft_seconds, 0.1)}
    asked = [ask(0.0, "B", 3), ask(1.0, "A", 1000), ask(2.0, "B", 50)]
    return play(box("H800"), ALIKE, slos, asked, 12.0)


def short_prompts() -> str:
    """The same request with a tight target, and with another one."""
    across = Scale(1.8, 3.6, LEFT, RIGHT)
    parts = [*seconds_axis(across, 176, 0.2)]
    for y, ttft in ((76.0, 1.0), (142.0, 10.0)):
        played = short_run(ttft)
        life = played.lives("B")[-1]
        first = played.tokens(life)[0]
        waited = f"first token after {first - life.arrived:.2f} s"
        parts += [
            *lane(f"TTFT {ttft:g} s", y, 24, joined(computed(played)), across),
            arrow(across(life.arrived), y - 10, y - 1, "b"),
            say(across(life.arrived) - 8, y - 5, "B comes", "small end"),
            dot(across(first), y + 12, "late"),
            say(across(first) + 8, y - 5, waited, "small"),
        ]
    parts += legend(LEFT, 50, [("a", "A decodes"), ("b", "B"), ("late", "first token of B")])
    return figure("A prompt with a tight TTFT does not wait for the turn's end", 204, parts)


# --- the way back --------------------------------------------------------------------------------


class Hurried(Appliance):
    """The policy without the way back: it leaves a model as soon as another one is urgent."""

    def _may_leave(self, *_: object) -> bool:
        return True


def way_back_run(policy: Appliance) -> Played:
    """Two requests for two models, of which the GPU holds one at a time."""
    asked = [ask(0.0, "A", 200), ask(1.0, "B", 200)]
    return play(box("A10"), SMALL, Slo(2.0, 0.1), asked, 60.0, policy)


def way_back() -> str:
    """The same requests with the rule and without it."""
    across = Scale(0, 22, LEFT, RIGHT)
    parts = [*legend(LEFT, 50, [("a", "A decodes"), ("b", "B decodes"), ("load", "weights come")])]
    for y, label, policy in ((64, "with the rule", Appliance()), (120, "without", Hurried())):
        played = way_back_run(policy)
        tokens = sum(life.produced for life in played.run.recorder.lives)
        said = f"{len(played.loads)} loads, {late_tokens(played)} of {tokens} tokens late"
        parts += [
            *lane(label, y, 24, [*joined(computed(played)), *_only_waits(played)], across),
            say(LEFT, y + 39, said, "small"),
        ]
    parts += seconds_axis(across, 172, 2)
    return figure(
        "One model at a time on the device: leave it only if the way back is in time", 200, parts
    )


def _only_waits(played: Played) -> Iterator[Bar]:
    """Loads, as nothing is computed meanwhile where one model has room."""
    for bar in loaded(played, ""):
        yield bar._replace(text="")


# --- longest gaps --------------------------------------------------------------------------------

GAP_SECONDS: Final = 6.0


def gap_run(gap_seconds: float) -> Played:
    """Two requests for two models, of which the GPU holds one at a time."""
    asked = [ask(0.0, "A", 250), ask(0.3, "B", 250)]
    return play(box("A10"), SMALL, Slo(10.0, 0.1, gap_seconds), asked, 60.0)


def gaps() -> str:
    """The same requests with a longest gap and without one."""
    across = Scale(0, 24, LEFT, RIGHT)
    parts = [*legend(LEFT, 50, [("a", "A decodes"), ("b", "B decodes"), ("load", "weights come")])]
    for y, label, gap in ((64, "without a gap", 0.0), (120, f"gap {GAP_SECONDS:g} s", GAP_SECONDS)):
        played = gap_run(gap)
        parts += [
            *lane(label, y, 24, [*joined(computed(played)), *_only_waits(played)], across),
            say(LEFT, y + 39, f"longest wait for a token: {longest_wait(played):.1f} s", "small"),
        ]
    parts += seconds_axis(across, 172, 2)
    return figure(
        "With a longest gap, a model is back before its streams have waited for it", 200, parts
    )
