"""The prompts that are being computed, as policies see them."""

from __future__ import annotations

import pytest

from appliance.hookspecs import hookimpl
from appliance.scheduling.policy_api import BatchLimits
from appliance.vocabulary import RunPrefill, RunTurn
from tests.unit.doubles.floor import FloorDouble, shape
from tests.unit.doubles.instance import ModelDouble


class Chunked:
    @hookimpl
    def batch(self) -> BatchLimits:
        return BatchLimits(requests=8, chunk_tokens=16)


@pytest.mark.parametrize("beside", [False, True])
def test_a_prompt_shows_until_it_is_computed(beside: bool) -> None:
    """Alone or beside decoding, a prompt's tokens are shown from its start until its job ends."""
    floor = FloorDouble({"a": ModelDouble(4, shape())}, stranger=Chunked())
    floor.start()
    floor.settle()
    instance = floor.machine.instances[0]
    if beside:
        floor.ask("before", "a", output=40)
        floor.work_until(0, lambda: bool(floor.commands(RunTurn)))
    shown = {floor.machine.floor.view(instance).computing_tokens}

    floor.ask("r", "a", prompt=70)
    while floor.work(0):
        shown.add(floor.machine.floor.view(instance).computing_tokens)

    assert shown == {0, 70}
    assert len(floor.commands(RunPrefill)) == 1
    assert any(command.prompts for command in floor.commands(RunTurn)) is beside
