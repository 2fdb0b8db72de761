"""The prompts that are being computed, as policies see them."""

from __future__ import annotations

import pytest

from appliance.hookspecs import hookimpl
from appliance.scheduling.policy_api import BatchLimits
from appliance.vocabulary import RunPrefill, RunTurn
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble


class Chunked:
    @hookimpl
    def batch(self) -> BatchLimits:
        return BatchLimits(requests=8, chunk_tokens=16)


def computing(cluster: ClusterDouble) -> tuple[int, int]:
    view = cluster.machine.cluster.view(cluster.machine.instances[0])
    return view.computing_requests, view.computing_tokens


@pytest.mark.parametrize("beside", [False, True])
def test_a_prompt_shows_until_it_is_computed(beside: bool) -> None:
    """Alone or beside decoding, a prompt's tokens are shown from its start until its job ends."""
    cluster = ClusterDouble({"a": ModelDouble(4, shape())}, stranger=Chunked())
    cluster.start()
    cluster.settle()
    if beside:
        cluster.ask("before", "a", output=40)
        cluster.work_until(0, lambda: bool(cluster.commands(RunTurn)))
    shown = {computing(cluster)}

    cluster.ask("r", "a", prompt=70)
    while cluster.work(0):
        shown.add(computing(cluster))

    assert shown == {(0, 0), (1, 70)}
    assert len(cluster.commands(RunPrefill)) == 1
    assert any(command.prompts for command in cluster.commands(RunTurn)) is beside
