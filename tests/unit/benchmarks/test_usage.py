"""The benchmark of the ledger, with little of everything: its sums are the clients' own."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.usage import compare


@pytest.mark.thorough
async def test_sums_agree_through_kills(tmp_path: Path) -> None:
    """The process that serves is killed, and ended, while four keys ask."""
    found = await compare(tmp_path, keys=4, requests=200, kills=2, say=lambda line: None)

    assert found["differences"] == 0
    assert found["whole_answers"] == 200
    assert found["ledger_requests"] == 200 + found["of_these_in_the_ledger"]
