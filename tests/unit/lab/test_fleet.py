"""Fleets in the lab: boxes that schedule themselves behind a router."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from appliance.cli.main import cli
from appliance.errors import LabError
from appliance.fleet.ranking import ROUTERS, BoxState, FleetRequest
from appliance.lab.experiments import scenario
from appliance.lab.experiments.comparison import Match, MatchResult, played
from appliance.lab.experiments.metrics import measure
from appliance.lab.experiments.run import play
from appliance.lab.experiments.scenario import Scenario
from appliance.lab.fleet.play import FleetTrial, play_fleet

ROOT = Path(__file__).parents[3]
CHANGES = {"duration": "30s", "warmup": "5s", "models.1.count": "12", "fleet.boxes": "3"}


@pytest.fixture
def path() -> Path:
    return ROOT / "benchmarks/scenarios/fleet.toml"


def match(path: Path, router: str, **changes: str) -> MatchResult:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    changed = {**CHANGES, **named}
    return played(Match(path=str(path), policy="appliance", seed=1, router=router, changes=changed))


def chosen_with(path: Path, **changes: str) -> Scenario:
    return scenario.read(path, {**CHANGES, **{k.replace("__", "."): v for k, v in changes.items()}})


def trial(path: Path, chosen: Scenario, router: str) -> FleetTrial:
    assert chosen.fleet is not None
    setting = chosen.setting(1, path.parent)
    fleet = chosen.fleet.setting(1)
    return play_fleet(setting, chosen.contender("appliance"), fleet, ROUTERS[router])


@pytest.mark.parametrize("router", ROUTERS)
def test_the_same_scenario_makes_the_same_fleet(path: Path, router: str) -> None:
    """To the last digit; and every request arrives at some box."""
    first, second = match(path, router), match(path, router)

    assert repr(first) == repr(second)
    setting = chosen_with(path).setting(1, path.parent)
    counted = [a for a in setting.arrivals if a.seconds >= 5.0]
    assert first.metrics["requests"] == len(counted)
    assert first.metrics["finished"] > 0


def test_one_box_is_the_box_without_a_router(path: Path) -> None:
    """A fleet of one box does what that box does alone, at any age of the router's knowledge."""
    chosen = chosen_with(path, fleet__boxes="1", fleet__poll="700ms")
    alone = play(chosen.setting(1, path.parent), chosen.contender("appliance"))

    fleet = trial(path, chosen, "residency").together

    lives = [[(o.id, o.produced, o.ended) for o in t.run.recorder.lives] for t in (alone, fleet)]
    assert lives[0] == lives[1]
    assert fleet.run.events == alone.run.events
    assert measure(fleet.run, 5.0).token_attainment == measure(alone.run, 5.0).token_attainment


def test_boxes_together_are_the_sum_of_the_boxes(path: Path) -> None:
    """Requests, tokens, loads and switches of the whole are those of its parts."""
    found = trial(path, chosen_with(path), "least_busy")
    together = measure(found.together.run)
    parts = [measure(run) for run in found.boxes]

    for name in ("requests", "tokens", "loads", "switches", "finished", "prefetches"):
        assert getattr(together, name) == sum(getattr(part, name) for part in parts)
    assert together.busy_share == pytest.approx(sum(part.busy_share for part in parts) / 3)


def test_residency_loads_less_than_random(path: Path) -> None:
    """Models that are somewhere are used there."""
    by_router = {name: match(path, name, duration="60s") for name in ("random", "residency")}
    loads = {name: one.fleet.loads_per_request for name, one in by_router.items() if one.fleet}

    assert loads["residency"] < 0.8 * loads["random"]


def test_models_are_asked_for_where_they_are(path: Path) -> None:
    """With one copy of each model, every request goes to the box that has it, by any router."""
    chosen = chosen_with(path, fleet__copies="1")
    for router in ROUTERS:
        found = trial(path, chosen, router)
        models = [{life.model for life in run.recorder.lives} for run in found.boxes]
        assert sum(map(len, models)) == len(set.union(*models))
        assert found.same_box_share == 1.0


def test_a_planned_fleet_spreads_what_is_asked_for(path: Path) -> None:
    """One model has most of the requests, and its box gives others away; each stays on one box."""
    skewed = {"models__0__count": "1", "models__0__rate": "4.0", "hardware__count": "1"}
    skewed["fleet__copies"] = "1"
    placed = match(path, "residency", **skewed, fleet__placement="demand")
    in_turn = match(path, "residency", **skewed)
    assert placed.fleet is not None
    assert in_turn.fleet is not None

    assert repr(placed) == repr(match(path, "residency", **skewed, fleet__placement="demand"))
    assert (in_turn.fleet.placement_steps, in_turn.fleet.placement_bytes) == (0, 0)
    assert 0 < placed.fleet.placement_steps <= 6
    assert placed.fleet.placement_bytes > 0
    assert placed.metrics["requests"] == in_turn.metrics["requests"]


def test_a_trace_has_no_day_before_it(path: Path, tmp_path: Path) -> None:
    """So there is nothing to plan by; the error names the key."""
    lines = path.read_text(encoding="utf-8").splitlines()
    traced = [
        'trace = "trace.csv"' if line.startswith("lengths") else line
        for line in lines
        if not line.startswith("rate")
    ]
    path = tmp_path / "traced.toml"
    path.write_text("\n".join(traced), encoding="utf-8")
    trace = "arrival_s,model,prompt_tokens,output_tokens\n9,m000,9,9\n"
    (tmp_path / "trace.csv").write_text(trace, encoding="utf-8")
    with pytest.raises(LabError, match=r"fleet\.placement: a trace has no day before"):
        match(path, "residency", fleet__placement="demand")


def test_a_request_that_no_box_takes_is_an_error(path: Path) -> None:
    """A router that finds no box is said, with the model."""
    chosen = chosen_with(path)
    assert chosen.fleet is not None

    def none(request: FleetRequest, boxes: object, chance: float) -> BoxState | None:
        return None

    with pytest.raises(LabError, match="no box may take a request of m0"):
        play_fleet(
            chosen.setting(1, path.parent),
            chosen.contender("appliance"),
            chosen.fleet.setting(1),
            none,
        )


def test_a_router_needs_a_fleet() -> None:
    """A scenario of one box has none."""
    path = ROOT / "benchmarks/scenarios/first_look.toml"
    with pytest.raises(LabError, match="no fleet for a router"):
        played(Match(path=str(path), policy="aegaeon", seed=1, router="random"))


def run(*arguments: str) -> tuple[int, str]:
    changes = [f"--set={key}={value}" for key, value in CHANGES.items()]
    words = ["lab", *arguments, *changes]
    result = CliRunner().invoke(cli, words, catch_exceptions=False)
    return result.exit_code, result.output


def test_the_command_prints_a_row_for_each_router(path: Path) -> None:
    """Those that the scenario names, each with the figures of the whole fleet."""
    routers = 'fleet.routers=["residency","random"]'
    status, printed = run("run", str(path), "--jobs", "1", "--set", routers)

    assert status == 0
    rows = [line for line in printed.splitlines() if line.startswith("appliance, ")]
    assert [row.split()[1] for row in rows] == ["residency", "random"]
    assert "LOADS/REQUEST" in printed
    assert "UNUSED KV" not in printed


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["run", "--set", 'fleet.routers=["best"]'], "fleet.routers: no best"),
        (["run", "--set", "fleet.copies=4"], "4 copies on 3 boxes"),
        (["sweep"], "sweep: it is for one box"),
        (["plan"], "plan: it is for one box"),
    ],
)
def test_mistakes_are_named(path: Path, arguments: list[str], what: str) -> None:
    """Before anything runs."""
    command, *more = arguments
    status, printed = run(command, str(path), *more, "--jobs", "1")

    assert status == 2
    assert what in printed
