"""Which threads keep a process from being forked."""

from __future__ import annotations

import pytest

from appliance.forking import zygote


def test_a_thread_that_ends_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be Python's no more, and still be the system's."""
    seen = iter([["python"], ["python"], []])
    monkeypatch.setattr(zygote, "other_threads", lambda: next(seen))

    assert zygote.lasting_threads() == []


def test_a_thread_that_stays_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for without end."""
    monkeypatch.setattr(zygote, "other_threads", lambda: ["jemalloc_bg_thd"])
    monkeypatch.setattr(zygote, "ENDING_SECONDS", 0.0)

    assert zygote.lasting_threads() == ["jemalloc_bg_thd"]
