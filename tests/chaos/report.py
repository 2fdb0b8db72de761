"""What is to be said of a run: figures, and a complaint for everything that may not be."""

from __future__ import annotations

import errno
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.endurance.audit import read_books
from benchmarks.endurance.watch import SLACK, Sample, most_of

if TYPE_CHECKING:
    from tests.chaos.run import Life, Plan

TIMES_QUIET = 3.0
"""What the p99 of the innocent key's TTFT may be of that of a quiet time, besides a restart, which
takes until each model has answered again."""
PERCENTILE = 0.99
EXPECTED = (
    "unhandled exception during asyncio.run() shutdown",
    os.strerror(errno.ENOSPC),
    os.strerror(errno.EFBIG),
)
LONGEST = 20
"""Waits of the innocent key that are shown: when each began, and the seconds that it took."""
LINE = 2000
"""Characters that are shown of a line of the log."""


def report(plan: Plan, life: Life) -> dict[str, Any]:
    """Figures by name; under `complaints`, what is wrong."""
    world, record = life.world, life.world.record
    began, ended = life.disturbed
    quiet = [seconds for at, seconds in life.innocent.ttfts if at < began]
    disturbed = [seconds for at, seconds in life.innocent.ttfts if began <= at < ended]
    restarts = [one.served_seconds for one in world.daemon.restarts]
    restart = max([*restarts, *world.worker_restarts], default=0.0)
    ttft = {
        "quiet": times(quiet),
        "disturbed": times(disturbed),
        "longest_restart_seconds": restart,
        "longest_waits": sorted(life.innocent.ttfts, key=lambda one: -one[1])[:LONGEST],
    }
    memory = returned(life.quiet, life.calm)
    harmed, flipped = life.batches.harmed, world.flipped
    complaints = [
        *life.complaints,
        *world.complaints,
        *world.daemon.complaints,
        *life.stats.complaints,
        *life.innocent.complaints,
        *record.unexplained(),
        *defects(world.daemon.setting.log),
    ]
    if len(harmed) > flipped:
        complaints.append(f"{flipped} bits were flipped, {len(harmed)} batches harmed: {harmed}")
    if plan.timed:
        complaints += _slow(quiet, disturbed, restart)
        complaints += [
            f"{name} did not return: {of}" for name, of in memory.items() if not of["ok"]
        ]
    return {
        "complaints": complaints,
        "hits": record.counts(),
        "missed": record.missed(),
        "left_out": record.left_out,
        "requests": life.stats.ends,
        "ended_otherwise": record.named(),
        "tokens_compared": life.stats.tokens_compared,
        "innocent_ttft": ttft,
        "restarts": [asdict(one) for one in world.daemon.restarts],
        "worker_restarts_seconds": world.worker_restarts,
        "batches": {
            "acknowledged": len(life.batches.acknowledged),
            "harmed_by_name": harmed,
            "files_kept": len(life.batches.kept),
        },
        "flips": dict(sorted(world.files.found.items())),
        "memory": memory,
        "disturbances": [asdict(hit) for hit in record.hits],
    }


def defects(log: Path) -> list[str]:
    """What the daemon and its processes wrote of exceptions that they did not expect; not of those
    of tasks that are cancelled as their process ends, which harm nothing any more, nor of a full
    disk, which ends the journal."""
    trouble = [
        line
        for line in read_books(log, set()).trouble
        if not any(words in line for words in EXPECTED)
    ]
    return [line[:LINE] for line in trouble if '"exception"' in line or "Traceback" in line]


def times(seconds: Sequence[float]) -> dict[str, float]:
    """Median, p99 and the longest of some times."""
    if not seconds:
        return {"count": 0}
    return {
        "count": len(seconds),
        "p50_seconds": statistics.median(seconds),
        "p99_seconds": percentile(seconds, PERCENTILE),
        "longest_seconds": max(seconds),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that so many are not above. Raises `ValueError` if there is none."""
    if not values:
        raise ValueError("there are no values")
    return sorted(values)[math.ceil(share * len(values)) - 1]


def returned(early: Sequence[Sample], late: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Of each quantity the medians of both, and whether it came back."""
    found = {}
    for name in SLACK:
        before, after = (
            statistics.median([asdict(one)[name] for one in samples] or [0])
            for samples in (early, late)
        )
        bound = most_of(name, before)
        found[name] = {"quiet": before, "after": after, "bound": bound, "ok": after <= bound}
    return found


def _slow(quiet: Sequence[float], disturbed: Sequence[float], restart: float) -> list[str]:
    """What is wrong with the times of the innocent key."""
    if not quiet or not disturbed:
        return ["the innocent key had no answer"]
    before, after = (percentile(times, PERCENTILE) for times in (quiet, disturbed))
    if after > TIMES_QUIET * before + restart:
        return [
            f"p99 of the innocent key's TTFT is {after:.2f} s: more than {TIMES_QUIET:g} times "
            f"{before:.2f} s and a restart of {restart:.2f} s"
        ]
    return []
