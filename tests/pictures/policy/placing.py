"""Figures of requests and weights: where they go, which are refused, and how prompts are cut."""

from __future__ import annotations

from itertools import accumulate
from typing import Final, NamedTuple

from msgspec.structs import replace

from appliance.plugins.appliance import Appliance
from appliance.plugins.homes import Homes, HomeSeeker, find_seekers
from appliance.plugins.instance_work.expected import Expectations
from appliance.plugins.instance_work.loads import Loads
from appliance.plugins.shedding import OwnCosts, Shed, Shedding
from appliance.scheduling.policy_api import Costs, InstanceView, PrefillChoice, Refusal
from appliance.vocabulary import ModelName, Slo
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
    say,
    seconds_axis,
)
from tests.pictures.policy.deadlines import outlooks
from tests.pictures.policy.lab_runs import box, setting_of
from tests.unit.plugins.policy_views import (
    GIB,
    FixedCosts,
    batch_view,
    cluster_view,
    group_view,
    instance_view,
    model_view,
    request_view,
)

LEFT: Final = 130

# --- homes ---------------------------------------------------------------------------------------

ASKED: Final = {
    "A": ("Llama-2-13B", 6.0),
    "B": ("Llama-2-13B", 1.5),
    "C": ("Llama-2-13B", 1.0),
    "D": ("Qwen2.5-7B", 2.0),
    "E": ("Qwen2.5-7B", 1.0),
    "F": ("Yi-9B", 0.5),
}
"""Six models, each with its requests a second: prompts of 300 tokens, answers of 200."""
HOME_KINDS: Final = dict(zip(ASKED, ("a", "b", "c", "d", "a pale", "b pale"), strict=True))
HOME_SLO: Final = Slo(1.5, 0.1)
MEMORY_BYTES: Final = 72 * GIB


class Plan(NamedTuple):
    """Homes of models, and what they were planned from."""

    seekers: dict[ModelName, HomeSeeker]
    homes: dict[ModelName, frozenset[int]]


def planned_homes() -> Plan:
    """On four A100, for a TTFT that a load takes a large part of."""
    kinds = {name: kind for name, (kind, _) in ASKED.items()}
    setting = setting_of(box("A100", 4), kinds, HOME_SLO)
    weights = {model.name: model.weight_bytes for model in setting.models}
    models = [
        model_view(
            name,
            weight_bytes=weights[name],
            arrivals=rate,
            tokens=rate * 500,
            output=200,
            ttft=HOME_SLO.ttft_seconds,
            tbt=HOME_SLO.tbt_seconds,
        )
        for name, (_, rate) in ASKED.items()
    ]
    policy = Appliance()
    seekers = find_seekers(models, setting.costs(), policy.home_share, policy.output_tokens)
    instances = [instance_view(number, total_bytes=MEMORY_BYTES) for number in range(4)]
    planner = Homes()
    planner.placements(cluster_view(instances, *models), seekers)
    return Plan({one.model: one for one in seekers}, planner.of)


def homes() -> str:
    """The memory of each instance with the weights that have a home there."""
    plan = planned_homes()
    across = Scale(0, MEMORY_BYTES / GIB, LEFT, RIGHT - 100)
    parts = [say(RIGHT, 52, "demand", "small end")]
    for number in range(4):
        here = [one for one in plan.seekers.values() if number in plan.homes[one.model]]
        here.sort(key=lambda one: (-one.demand / len(plan.homes[one.model]), one.model))
        ends = list(accumulate(one.weight_bytes / GIB for one in here))
        bars = [
            Bar(end - one.weight_bytes / GIB, end, HOME_KINDS[one.model], one.model)
            for one, end in zip(here, ends, strict=True)
        ]
        bars.append(Bar(ends[-1] if ends else 0.0, MEMORY_BYTES / GIB, "load", "room for KV"))
        demand = sum(one.demand / len(plan.homes[one.model]) for one in here)
        y = 62 + 34 * number
        parts += lane(f"instance {number}", y, 26, bars, across)
        parts.append(say(RIGHT, y + 18, f"{demand:.2f}", "end"))
    parts += seconds_axis(across, 206, 12, "GiB")
    several = [
        f"{model} {one.demand:.2f}"
        + (f" in {len(plan.homes[model])}" * (len(plan.homes[model]) > 1))
        for model, one in plan.seekers.items()
    ]
    parts.append(say(LEFT, 244, "Demands, in instances: " + ", ".join(several), "small"))
    return figure(
        "Each model has homes by its demand, where demand over free memory is least", 260, parts
    )


# --- where a request goes ------------------------------------------------------------------------

DISPATCH_COSTS: Final = FixedCosts(step=0.02, per_token=0.001, switch=1.5)


def four_instances(tokens: int = 900) -> list[InstanceView]:
    """For a request for A. The first decodes A, and a prompt of B with so many tokens waits there;
    the second has A's weights, and a long queue of D; the third decodes C, the fourth B and C."""
    return [
        instance_view(
            0,
            resident=["A", "B"],
            batches=(batch_view("A", 4),),
            groups=(group_view("B", 1, tokens=tokens),),
        ),
        instance_view(1, resident=["A", "D"], groups=(group_view("D", 8, tokens=9000),)),
        instance_view(2, resident=["C"], batches=(batch_view("C", 2),)),
        instance_view(3, resident=["B", "C"], batches=(batch_view("B"), batch_view("C"))),
    ]


class Sum(NamedTuple):
    """What all work on an instance takes with a request, and what that adds."""

    there: float
    switch: float
    answer: float
    prompt: float

    @property
    def done(self) -> float:
        return sum(self)


def dispatch_sums(tokens: int = 900) -> tuple[list[Sum], int]:
    """Of each of the instances, and which one the policy chooses."""
    policy, views = Appliance(), four_instances(tokens)
    asked, costs = request_view("A", tokens=400, ttft=10.0), DISPATCH_COSTS
    choice = policy.prefill(0.0, asked, views, costs)
    assert isinstance(choice, PrefillChoice)
    loads = Loads(Expectations(), policy.output_tokens).of(0.0, views, costs)
    models = len(frozenset().union(*[load.models for load in loads]))
    share = min(1.0, max(0.0, 2 * models / len(views) - 1))
    answer = share * policy.output_tokens * costs.step_seconds("A")
    sums = [
        Sum(
            load.seconds + (1 - share) * load.kv_seconds,
            0.0 if "A" in load.models or "A" in view.resident else costs.switch_seconds("A"),
            0.0 if "A" in load.models else answer,
            costs.prefill_seconds("A", asked.tokens),
        )
        for view, load in zip(views, loads, strict=True)
    ]
    return sums, choice.instance


def dispatch() -> str:
    """The sums as bars; the shortest is chosen."""
    sums, choice = dispatch_sums()
    across = Scale(0, 24, LEFT + 40, RIGHT)
    parts = [
        *legend(
            LEFT + 40,
            50,
            [
                ("a", "work there"),
                ("load", "switch to A"),
                ("c", "an answer that shares no steps"),
                ("b", "its prompt"),
            ],
        )
    ]
    has = ("A and B to do", "D's long queue", "C to do", "B and C to do")
    for number, (one, what) in enumerate(zip(sums, has, strict=True)):
        y, ends = 62 + 34 * number, list(accumulate(one))
        kinds = ("a", "load", "c", "b")
        bars = [Bar(e - s, e, kind) for s, e, kind in zip(one, ends, kinds, strict=True) if s]
        parts += lane(f"{number}: {what}", y, 24, bars, across)
        said = f"{one.done:.1f} s" + (": the request goes here" if number == choice else "")
        parts.append(say(across(one.done) + 8, y + 16, said))
    parts += seconds_axis(across, 204, 4)
    return figure(
        "A request for A goes where all work, with its own, would be done first", 232, parts
    )


# --- which requests are refused ------------------------------------------------------------------

SHED_COSTS: Final = FixedCosts(step=0.02, per_token=0.001, switch=0.5)
SHED_TTFT: Final = 5.0


class Judged(NamedTuple):
    """How long others keep a request waiting, and whether it is refused."""

    wait_seconds: float
    refused: bool


def judge(prompts: int) -> Judged:
    """With so many prompts of another model, each of 0.8 s, that are due before it."""
    groups = (group_view("B", prompts, tokens=800 * prompts, ttft=4.0, deadline=4.0),)
    view = instance_view(
        current="B", resident=["A", "B"], batches=(batch_view("B", deadline=4.0),),
        groups=groups if prompts else (),
    )  # fmt: skip
    asked = request_view("A", tokens=200, ttft=SHED_TTFT)
    answer = Appliance(shed=Shed.HOPELESS).prefill(0.0, asked, [view], SHED_COSTS)
    estimate = Shedding().soonest(
        0.0,
        asked,
        OwnCosts(SHED_COSTS.prefill_seconds("A", asked.tokens), 0.0),
        [view],
        lambda one: outlooks().of(0.0, one, SHED_COSTS),
        SHED_COSTS,
    )
    return Judged(estimate.wait_seconds, isinstance(answer, Refusal))


def shedding() -> str:
    """The wait by the number of prompts, the target, and the target with its tenth."""
    across, most = Scale(0, 10, LEFT, RIGHT), 9
    up = Scale(0, 8, 216, 62)
    parts = [
        *legend(LEFT, 50, [("a", "taken"), ("late", "refused: overloaded")]),
        say(MARGIN, up(4) - 4, "others keep"),
        say(MARGIN, up(4) + 12, "it waiting"),
        *(say(LEFT - 8, up(at) + 4, f"{at} s", "small end") for at in (0, 2, 4, 6, 8)),
    ]
    for count in range(most + 1):
        one = judge(count)
        x, y = across(count) + 8, up(one.wait_seconds)
        parts.append(block(x, y, 42, up(0) - y, "late" if one.refused else "a"))
        parts.append(say(x + 21, up(0) + 17, f"{count}", "small mid"))
    limit = SHED_TTFT * 1.1
    parts += [
        line(LEFT, up(SHED_TTFT), RIGHT, up(SHED_TTFT), "line-ink"),
        line(LEFT, up(limit), RIGHT, up(limit), "line-ink dash"),
        say(LEFT + 4, up(SHED_TTFT) + 15, f"TTFT {SHED_TTFT:g} s", "small"),
        say(LEFT + 4, up(limit) - 6, "and a tenth", "small"),
        line(LEFT, up(0), RIGHT, up(0), "axis"),
        say(RIGHT, up(0) + 36, "prompts of another model that are due before", "small end"),
    ]
    title = "With shed = hopeless, a request is refused if others make it late"
    return figure(title, 264, parts)


# --- prompts -------------------------------------------------------------------------------------

PROMPT_SLO: Final = Slo(5.0, 0.1)
KV_TOKENS: Final = 300
"""Of each request."""


class Step(NamedTuple):
    """A step with a part of a prompt; all of the prompt is computed apart if the part is 0."""

    decode_seconds: float
    part_tokens: int
    part_seconds: float


def prompt_costs() -> Costs:
    """Of a model on an A10."""
    return setting_of(box("A10"), {"A": "Qwen2.5-7B"}, PROMPT_SLO).costs()


def step_with(requests: int) -> Step:
    """Of a batch of so many requests, next to which a prompt waits that is not urgent."""
    costs = prompt_costs()
    batch = replace(
        batch_view("A", requests, kv_tokens=requests * KV_TOKENS, deadline=9.0), slo=PROMPT_SLO
    )
    view = instance_view(
        current="A",
        resident=["A"],
        batches=(batch,),
        groups=(group_view("A", tokens=2000, ttft=5.0, deadline=5.0),),
    )
    limits = Appliance().batch(0.0, "A", view, costs)
    per_token = (costs.prefill_seconds("A", 1001) - costs.prefill_seconds("A", 1)) / 1000
    decode = costs.step_seconds("A", requests, requests * KV_TOKENS)
    return Step(decode, limits.chunk_tokens, limits.chunk_tokens * per_token)


def prompts() -> str:
    """Steps of batches of different sizes, up to what they may take."""
    across = Scale(0, 120, LEFT, RIGHT)
    limit = Appliance().longest_step * PROMPT_SLO.tbt_seconds * 1000
    parts = [*legend(LEFT, 50, [("a", "decoding"), ("b", "a part of the prompt")])]
    for row, requests in enumerate((1, 16, 32, 64)):
        y, one = 62 + 32 * row, step_with(requests)
        first, second = one.decode_seconds * 1000, one.part_seconds * 1000
        part = f"{one.part_tokens} tokens"
        bars = [Bar(0, first, "a"), Bar(first, first + second, "b", part)]
        parts += lane(f"batch of {requests}", y, 24, bars, across)
    parts += [
        line(across(limit), 56, across(limit), 190, "line-ink dash"),
        say(across(limit) + 6, 70, f"{Appliance().longest_step:g} of the TBT", "small"),
        *seconds_axis(across, 194, 20, "ms"),
    ]
    return figure("A prompt is computed in parts that keep the step in time", 222, parts)
