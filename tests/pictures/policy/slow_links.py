"""The figure of costly switches: what a GPU does behind a slow link, with the rule and without."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from appliance.plugins.appliance import Appliance
from appliance.vocabulary import Slo
from tests.pictures.policy.canvas import (
    RIGHT,
    Bar,
    Scale,
    figure,
    lane,
    legend,
    say,
    seconds_axis,
)
from tests.pictures.policy.lab_runs import Played, box, play
from tests.pictures.policy.turns import LEFT, ask, computed, joined, late_tokens, loaded

SECONDS: Final = 80.0
MODELS: Final = "ABCDEFGHIJ"


class Hasty(Appliance):
    """The policy without the rule: to it, all loads hide behind turns."""

    def _costly_turn(self, *_: object) -> None:
        return None


def run(policy: Appliance) -> Played:
    """Ten models on a GPU with room for four, over a link that brings one in a second and a half: a
    request each 1.8 s, drawn once."""
    dice, at, asked = random.Random(1), 0.0, []
    while at < 60:
        at += dice.expovariate(0.55)
        asked.append(ask(at, dice.choice(MODELS), 250))
    hardware = box("H800")
    slow = replace(hardware, gpu=replace(hardware.gpu, pcie_bytes_per_second=12.5e9))
    kinds = dict.fromkeys(MODELS, "Qwen2.5-7B")
    return play(slow, kinds, Slo(10.0, 0.1), asked, 2 * SECONDS, policy)


def costly() -> str:
    """The same requests with the rule and without it."""
    across = Scale(0, SECONDS, LEFT, RIGHT)
    parts = [*legend(LEFT, 50, [("a", "the GPU computes"), ("load", "weights come")])]
    for y, label, policy in ((64, "with the rule", Appliance()), (142, "without", Hasty())):
        played = run(policy)
        tokens = sum(life.produced for life in played.run.recorder.lives)
        said = f"{len(played.loads)} loads, {late_tokens(played)} of {tokens} tokens late"
        parts += [
            *lane("", y, 20, _plain(loaded(played), "load"), across),
            *lane(label, y + 24, 20, joined(_plain(computed(played), "a")), across),
            say(LEFT, y + 59, said, "small"),
        ]
    parts += seconds_axis(across, 214, 10)
    return figure("Behind a slow link: let the model that runs go on", 242, parts)


def _plain(bars: list[Bar], kind: str) -> Iterator[Bar]:
    """All alike, whatever their model is."""
    for bar in bars:
        yield bar._replace(kind=kind, text="")
