"""Which threads keep a process from being forked."""

from __future__ import annotations

import itertools
import math

import pytest

from appliance.forking import zygote


def test_a_thread_that_ends_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be Python's no more, and still be the system's."""
    seen = iter([["python"], ["python"], []])
    monkeypatch.setattr(zygote, "other_threads", lambda: next(seen))
    monkeypatch.setattr(zygote, "ENDING_SECONDS", math.inf)

    assert zygote.lasting_threads() == []


def test_a_thread_that_stays_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for without end."""
    monkeypatch.setattr(zygote, "other_threads", lambda: ["jemalloc_bg_thd"])
    now = itertools.count(0.0, 1.0)
    monkeypatch.setattr("appliance.forking.zygote.time.monotonic", lambda: next(now))

    assert zygote.lasting_threads() == ["jemalloc_bg_thd"]
