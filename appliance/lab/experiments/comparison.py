"""A contest: every policy on every seed of a scenario, over as many processes as there are cores.

The result of a match depends on its scenario, policy and seed alone, whichever process plays it and
in whatever order.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from appliance.errors import ApplianceError, LabError
from appliance.fleet.placement import Step
from appliance.fleet.ranking import ROUTERS
from appliance.lab.experiments import scenario
from appliance.lab.experiments.metrics import Curves, curves, fragmentation_by_shape, measure
from appliance.lab.experiments.run import SAME_MECHANISM, Contender, System, Trial, play
from appliance.lab.experiments.scenario import Scenario
from appliance.lab.fleet.placed import history, planned
from appliance.lab.fleet.play import play_fleet
from appliance.lab.fleet.table import FleetPlacement
from appliance.lab.sim.extrapolation import Beyond
from appliance.vocabulary import Word


class Match(Word, frozen=True, kw_only=True):
    """A policy on a seed of a scenario file that is read with these changes."""

    path: str
    policy: str
    seed: int
    changes: Mapping[str, str] = {}
    curves: bool = False
    """Whether there will be plots."""
    router: str = ""
    """Of a fleet; empty for the scenario's one box."""


class MatchResult(Word, frozen=True, kw_only=True):
    """What came of a match."""

    policy: str
    seed: int
    metrics: Mapping[str, float]
    """Of `metrics.RunMetrics`, rounded; NaN where there was nothing to measure."""
    faults: int = 0
    """Questions that the policy could not answer."""
    fault: str = ""
    """The first of them."""
    system: System = SAME_MECHANISM
    fragmentation: Mapping[str, Mapping[str, float]] = {}
    """Of KV by tier and shape (bytes of a block)."""
    host_kv_peak_bytes: int = 0
    """Of the host tier, under swapped KV at its peak."""
    beyond: Mapping[str, Beyond] = {}
    """By profile: what was asked of it that it was not fitted to."""
    curves: Curves | None = None
    fleet: FleetFigures | None = None
    """None for one box."""


class FleetFigures(Word, frozen=True, kw_only=True):
    """How requests were spread over boxes. NaN where there was nothing to measure."""

    boxes: int
    switches_per_request: float
    loads_per_request: float
    same_box_share: float
    """See `FleetTrial`."""
    busiest_box_ratio: float
    worst_box_attainment: float
    """Of both targets, on the box where it is the least."""
    placement_steps: int = 0
    """Of the plan that the boxes' catalogues are from, if they are from one,"""
    placement_bytes: int = 0
    """and what boxes had to read for it."""


def played(match: Match) -> MatchResult:
    """Play it. Raises `LabError` for a scenario or a policy that cannot be used."""
    path = Path(match.path)
    chosen = scenario.read(path, match.changes)
    contender = chosen.contender(match.policy)
    if match.router:
        return _played_fleet(match, chosen, contender)
    trial = play(chosen.setting(match.seed, path.parent), contender)
    found = outcome(
        match.policy, match.seed, trial, chosen.warmup_seconds, with_curves=match.curves
    )
    return msgspec.structs.replace(found, system=contender.system)


def _played_fleet(match: Match, chosen: Scenario, contender: Contender) -> MatchResult:
    if chosen.fleet is None:
        raise LabError("the scenario has no fleet for a router")
    setting = chosen.setting(match.seed, Path(match.path).parent)
    fleet = chosen.fleet.setting(match.seed)
    steps: Sequence[Step] = ()
    if chosen.fleet.placement is FleetPlacement.DEMAND:
        before = history(chosen, match.seed, Path(match.path).parent)
        fleet, steps = planned(fleet, setting, before)
    trial = play_fleet(setting, contender, fleet, ROUTERS[match.router])
    name, warmup_seconds = f"{match.policy}, {match.router}", chosen.warmup_seconds
    found = outcome(name, match.seed, trial.together, warmup_seconds, with_curves=False)
    attained = [measure(run, warmup_seconds).request_attainment for run in trial.boxes]
    known = [share for share in attained if not math.isnan(share)]
    requests = max(1, len(setting.arrivals))
    figures = FleetFigures(
        boxes=fleet.boxes,
        switches_per_request=round(found.metrics["switches"] / requests, 6),
        loads_per_request=round(found.metrics["loads"] / requests, 6),
        same_box_share=round(trial.same_box_share, 6),
        busiest_box_ratio=round(trial.busiest_box_ratio, 6),
        worst_box_attainment=round(min(known, default=math.nan), 6),
        placement_steps=len(steps),
        placement_bytes=sum([step.moved_bytes for step in steps]),
    )
    return msgspec.structs.replace(found, system=contender.system, fleet=figures)


def outcome(
    policy: str, seed: int, trial: Trial, warmup_seconds: float, *, with_curves: bool
) -> MatchResult:
    """The figures of a trial."""
    first = trial.faults[0] if trial.faults else None
    return MatchResult(
        policy=policy,
        seed=seed,
        metrics=measure(trial.run, warmup_seconds).rounded(),
        faults=len(trial.faults),
        fault="" if first is None else f"{first.hook}: {first.reason}",
        fragmentation=fragmentation_by_shape(trial.run, warmup_seconds),
        host_kv_peak_bytes=trial.host_kv_peak_bytes,
        beyond=trial.run.recorder.reach.beyond(),
        curves=curves(trial.run, warmup_seconds) if with_curves else None,
    )


class MatchPool:
    """Processes that play matches; a context manager that ends them. One job plays them here."""

    def __init__(self, jobs: int) -> None:
        self._pool: ProcessPoolExecutor | None = None
        if jobs > 1:
            # A new interpreter each: nothing of this one can leak into a result.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(jobs, mp_context=context)

    def __enter__(self) -> MatchPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def play(self, matches: Sequence[Match], done: Callable[[], None]) -> list[MatchResult]:
        """The outcomes in the order of the matches; `done` is called after each. Raises `LabError`
        for the first that cannot be played."""
        outcomes: list[MatchResult] = []
        answers = map(_tried, matches) if self._pool is None else self._pool.map(_tried, matches)
        for match, answer in zip(matches, answers, strict=True):
            if isinstance(answer, str):
                raise LabError(f"{match.policy}, seed {match.seed}: {answer}")
            outcomes.append(answer)
            done()
        return outcomes


def _tried(match: Match) -> MatchResult | str:
    """Errors go between processes as what they say."""
    try:
        return played(match)
    except ApplianceError as error:
        return str(error)
