"""48 concurrent requests over six models on two small pools, under policies of either kind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from appliance import journal
from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.demo.traffic import ChatRequest, TimedAnswer, send
from appliance.vocabulary import PrefillDone
from tests.system.conftest import MEMORY_BYTES, mapped_bytes, memfds, private_bytes, start

SHORT_TURNS = "[policy.aegaeon]\nq_max_seconds = 0.1\n"
"""A turn of that policy ends before its requests do, on any machine."""


@pytest.mark.parametrize("policy", ["appliance", "aegaeon"])
def test_48_requests(
    policy: str, checkpoints: Path, chats: list[ChatRequest], expected: dict[ChatRequest, list[int]]
) -> None:
    """All finish, token for token as on plain vLLM; no pool ever exceeds its memory, by /proc, by
    the workers' count and by the ledger; and the journal replays to the same commands."""
    with start(checkpoints, policy, more=SHORT_TURNS) as appliance:
        resident: list[int] = []
        seen = 0

        def look(_: TimedAnswer) -> None:
            nonlocal seen
            seen += 1
            if seen % 200 == 0:
                resident.extend(mapped_bytes(pid, "appliance-pool") for pid in pids)

        pids = appliance.worker_pids()
        private_before = sum(private_bytes(pid) for pid in pids)
        answers = asyncio.run(send(appliance.url, chats, look))

        assert [answer.error for answer in answers] == [None] * len(chats)
        assert {answer.chat: answer.tokens for answer in answers} == expected
        pools = [pool for pid in pids for pool in memfds(pid, "appliance-pool")]
        assert len(pools) == len(pids) == 2
        assert all(pool.st_size == MEMORY_BYTES for pool in pools)
        assert all(pool.st_blocks * 512 <= MEMORY_BYTES for pool in pools)
        assert resident
        assert max(resident) <= MEMORY_BYTES
        private = sum(private_bytes(pid) for pid in pids) - private_before
        # Six engines take 100 to 160 MB of their own in each worker; private copies of all
        # weights would be another 129 MB.
        weights = sum(
            read_checkpoint(model.name, Path(model.path), model.dtype).weight_bytes
            for model in appliance.config.models
        )
        assert private < 1.6 * weights * len(pids), "no weights stay outside of pool and host tier"
        instances = appliance.status()["instances"]
        assert all(0 < i["pool_high_water_bytes"] <= MEMORY_BYTES for i in instances)
        preemptions = sum(
            value
            for (name, _), value in appliance.metrics().items()
            if name == "appliance_preemptions_total"
        )
        if policy == "aegaeon":  # the other preempts when it has to, and may not have to
            assert preemptions > 0
        status = appliance.status()
        assert all(model["running"] == model["waiting"] == 0 for model in status["models"])
    _check_journal(appliance.journal, len(chats))


def _check_journal(path: Path, requests: int) -> None:
    events, differences = journal.replay(path)
    assert differences == []
    assert events > requests
    setup, entries = journal.read(path)
    machine = setup.machine()
    prefills = 0
    peaks = dict.fromkeys(machine.instances, 0)
    for entry in entries:
        machine.handle(entry.event, entry.now)
        machine.check_integrity()
        for number, instance in machine.instances.items():
            peaks[number] = max(peaks[number], instance.ledger.high_water_slabs)
        prefills += isinstance(entry.event, PrefillDone)
    assert prefills == requests, "a preempted request is never computed again"
    assert not machine.requests
    assert all(0 < peak * setup.slab_bytes <= MEMORY_BYTES for peak in peaks.values())
