"""Who writes the records of a batch: what comes too late is refused, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from appliance.batches.disk import Disk
from appliance.batches.log import BatchLog
from appliance.batches.records import Batch, CancelAsked, Created
from appliance.batches.scribe import Scribe
from appliance.errors import IllegalTransition
from tests.patience import PATIENCE_SECONDS

CREATED = Created(
    at=1.0,
    id="batch_a",
    owner="",
    endpoint="/v1/completions",
    input_file_id="file-a",
    completion_window="24h",
    expires_at=100.0,
    metadata={},
)


async def test_what_comes_after_the_end(tmp_path: Path) -> None:
    """Is refused: nobody writes it any more, though its runner may not have put it away yet."""
    disk = Disk()
    log = BatchLog(tmp_path / "batch_a.jsonl")
    log.append([CREATED])
    scribe = Scribe(Batch(CREATED), log, disk)
    await scribe.write(CancelAsked(at=2.0))
    await scribe.stop()

    with pytest.raises(IllegalTransition):
        await asyncio.wait_for(scribe.write(CancelAsked(at=3.0)), PATIENCE_SECONDS)
    log.close()
    await disk.close()
