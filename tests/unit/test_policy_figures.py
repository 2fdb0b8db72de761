"""The figures of docs/policies/appliance.md: each is there, is readable, and shows what it says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from appliance.plugins.appliance import Appliance
from appliance.plugins.instance_work import outlook
from appliance.plugins.separation import GAIN
from tests.pictures.files import FOLDER
from tests.pictures.policy import deadlines, instances, placing, slow_links, turns
from tests.pictures.policy.canvas import DARK, LIGHT, SERIES, WIDTH
from tests.pictures.policy.files import FIGURES

PAGE = (Path(__file__).parents[2] / "docs/policies/appliance.md").read_text(encoding="utf-8")
IMAGE = re.compile(r"^!\[(.+)\]\(\.\./images/appliance-(.+)\.svg\)\n\n([A-Z].+[.])$", re.MULTILINE)
TEXT = re.compile(r'<text class="([^"]*)" x="([\d.]+)" y="[\d.]+">([^<]*)</text>')
PALETTES = {"light": LIGHT, "dark": DARK}
LARGEST_BYTES = 15_000
LEAST_CONTRAST = 4.5
"""Of text (WCAG 2, level AA)."""
PALE = 0.28
"""The opacity of pale bars."""


def test_the_page_shows_each_once() -> None:
    """In their order, with alt text and a sentence of explanation below."""
    shown = IMAGE.findall(PAGE)

    assert [name for _, name, _ in shown] == list(FIGURES)
    assert PAGE.count("![") == len(shown)
    assert all(len(alt) > 40 for alt, _, _ in shown)


# --- readable ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIGURES)
def test_it_is_small_and_its_text_has_room(name: str) -> None:
    """A letter is taken to be as wide as those of wide fonts are on average."""
    drawn = (FOLDER / f"appliance-{name}.svg").read_text(encoding="utf-8")
    texts = TEXT.findall(drawn)

    assert len(drawn.encode()) <= LARGEST_BYTES
    assert len(texts) == drawn.count("<text")
    for kind, x, text in texts:
        width = len(text) * (8.6 if "head" in kind else 6.6)
        left = float(x) - width * (1 if "end" in kind else 0.5 if "mid" in kind else 0)
        assert left >= 0, text
        assert left + width <= WIDTH, text


def luminance(colour: str) -> float:
    """As WCAG defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """From 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def blended(colour: str, behind: str) -> str:
    """A pale colour on what is behind it."""
    pairs = [(int(colour[at : at + 2], 16), int(behind[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(PALE * c + (1 - PALE) * b):02x}" for c, b in pairs)


def test_contrast_is_computed_right() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("palette", PALETTES.values(), ids=PALETTES.keys())
def test_text_can_be_read(palette: Mapping[str, str]) -> None:
    """On the card, on bars, on pale bars and on loads."""
    card, ink = palette["card"], palette["ink"]
    pairs = [(ink, card), (palette["faint"], card), (ink, palette["load"])]
    for name in (*SERIES, "late"):
        pairs += [(card, palette[name]), (ink, blended(palette[name], card))]

    assert [pair for pair in pairs if contrast(*pair) < LEAST_CONTRAST] == []


# --- what the page says of each ------------------------------------------------------------------


def test_slack() -> None:
    """A stops at about twice its TTFT of slack, and is back before the next token is due."""
    played = turns.slack_run()
    (life,) = played.lives("A")
    made = played.tokens(life)
    stop = next(n for n, (before, after) in enumerate(pairwise(made), 1) if after - before > 1)

    assert turns.due(life, stop) - made[stop - 1] == pytest.approx(10, abs=0.3)
    assert made[stop] < turns.due(life, stop)
    assert turns.late_tokens(played) == 0


def test_homes() -> None:
    plan = placing.planned_homes()
    largest = max(plan.seekers.values(), key=lambda one: one.demand).model
    weights = dict.fromkeys(range(4), 0)
    for model, its in plan.homes.items():
        for number in its:
            weights[number] += plan.seekers[model].weight_bytes

    assert set(plan.homes) == set(placing.ASKED)
    assert {model: len(its) for model, its in plan.homes.items() if len(its) > 1} == {largest: 2}
    assert max(weights.values()) <= 0.8 * placing.MEMORY_BYTES


def test_the_next_model() -> None:
    """A until the latest start of B, and then B, before C."""
    view = deadlines.three_models()
    works = deadlines.outlooks().of(0.0, view, deadlines.COSTS)
    start = works["B"].latest

    assert works["B"].due < works["C"].due < works["A"].due
    assert deadlines.chosen(4.0, view) == deadlines.chosen(start - 0.01, view) == "A"
    assert deadlines.chosen(start + 0.01, view) == deadlines.chosen(10.0, view) == "B"


def test_short_prompts() -> None:
    waits = []
    for ttft in (1.0, 10.0):
        life = turns.short_run(ttft).lives("B")[-1]
        waits.append(turns.short_run(ttft).tokens(life)[0] - life.arrived)

    assert waits[0] < 0.1
    assert 1.0 < waits[1] < 10.0


def test_short_prompts_are_drawn_as_the_policy_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy without the rule has another figure: nothing of it is drawn by hand."""
    drawn = turns.short_prompts()
    monkeypatch.setattr(outlook, "SHORT_SECONDS", 0.0)

    assert turns.short_prompts() != drawn


def test_pace() -> None:
    """A mean from the first token on is kept with it, and would not be by the schedule."""
    scheduled, due = deadlines.paced(40)
    tbt = deadlines.TIGHT.tbt_seconds

    assert (due - deadlines.FIRST_TOKEN) / 40 < tbt < (scheduled - deadlines.FIRST_TOKEN) / 40


def test_the_way_back() -> None:
    with_rule, without = (turns.way_back_run(policy) for policy in (Appliance(), turns.Hurried()))

    assert len(with_rule.loads) < len(without.loads)
    assert turns.late_tokens(with_rule) == 0 < turns.late_tokens(without)


def test_shedding() -> None:
    """Refused where others keep it waiting past the target and a tenth of it; both are drawn."""
    judged = [placing.judge(count) for count in range(10)]

    assert [one.refused for one in judged] == [one.wait_seconds > 5.5 for one in judged]
    assert {one.refused for one in judged} == {False, True}


def test_renewal() -> None:
    moments = {0.0: 10.0, 11.9: 10.0, 12.1: 40.0, 41.9: 40.0, 42.1: 70.0}

    assert {now: deadlines.renewed_due(now) for now in moments} == moments


def test_gaps() -> None:
    without, with_gap = (turns.gap_run(gap) for gap in (0.0, turns.GAP_SECONDS))

    assert turns.longest_wait(with_gap) <= turns.GAP_SECONDS < turns.longest_wait(without)
    assert len(with_gap.loads) == len(without.loads) + 1
    assert turns.late_tokens(with_gap) == 0


def test_quota() -> None:
    """The last of the others has its prompts just when its margin begins."""
    turn = deadlines.planned_turn()
    done = turn.quota_seconds
    for work in turn.others:
        done += work.switch_seconds + work.prompt_seconds
        assert done <= work.due - work.margin_seconds + 1e-9

    assert done == pytest.approx(turn.others[-1].due - turn.others[-1].margin_seconds)


def test_prompts() -> None:
    """Parts fill the step up to the longest, but for less than a token."""
    longest = Appliance().longest_step * placing.PROMPT_SLO.tbt_seconds
    steps = [placing.step_with(requests) for requests in (1, 16, 32, 64)]
    parts = [one.part_tokens for one in steps]

    assert all(longest - 1e-3 < one.decode_seconds + one.part_seconds <= longest for one in steps)
    assert parts == sorted(parts, reverse=True)


def test_loads() -> None:
    """A turn that others wait for is no shorter than a load, unless it ends an answer; and loads
    come during turns."""
    played = turns.loads_run()
    load = played.loads[0].ended - played.loads[0].began
    first = [one for one in played.spans() if one.steps][:4]
    hidden = [
        one
        for one in played.loads
        for turn in played.spans()
        if turn.steps and turn.began <= one.began and one.ended <= turn.ended
    ]

    assert all(one.ended - one.began >= load for one in first)
    assert len(hidden) >= 4


def test_costly_switches() -> None:
    with_rule, without = (slow_links.run(one) for one in (Appliance(), slow_links.Hasty()))

    assert 3 * len(with_rule.loads) <= 2 * len(without.loads)
    assert turns.late_tokens(with_rule) == 0 < turns.late_tokens(without)


def test_dispatch() -> None:
    """Not by the work that is there already alone."""
    sums, choice = placing.dispatch_sums()
    views = placing.four_instances()
    models = {one.model for view in views for one in view.batches}
    models |= {one.model for view in views for one in view.groups}

    assert len(models) == len(views) == 4
    assert choice == 0
    assert sums[0].there > sums[2].there


@pytest.mark.parametrize("tokens", [100, 1400, 1600, 9000])
def test_dispatch_goes_by_the_sums(tokens: int) -> None:
    """The policy chooses where the sum that is drawn is least, however long a prompt waits on the
    first instance."""
    sums, choice = placing.dispatch_sums(tokens)

    assert sums[choice].done == min(one.done for one in sums)
    assert choice == (0 if tokens < 1500 else 2)


def test_separation() -> None:
    rates = instances.carried()

    assert instances.LOAD.best(instances.INSTANCES, 0) == 4
    assert rates[4] == pytest.approx(2 * rates[0], rel=0.1)
    assert rates[4] < rates[5] == max(rates.values()) < rates[4] * (1 + GAIN)


def test_parking() -> None:
    """Few before more is asked, all ten seconds later, and fewer again after that."""
    played = instances.parking_run()
    opened = {round(one.at, 1): one.opened for one in played.run.samples}
    begin, end = instances.BUSY

    assert opened[begin - 1] == 2
    assert opened[begin + 11] == opened[end] == instances.PARKED_INSTANCES
    assert opened[instances.PARKED_SECONDS] < instances.PARKED_INSTANCES
