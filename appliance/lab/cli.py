"""The command line of the lab: ``appliance lab run``, ``sweep``, ``plan`` and ``replay``.

Exit status as everywhere: 0 done, 1 it went wrong, 2 the command line or the scenario is wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from appliance import journal
from appliance.errors import ApplianceError, IllegalTransition, LabError, LedgerError, PolicyError
from appliance.lab.calibrate_cli import calibrate_command
from appliance.lab.experiments import plots, scenario
from appliance.lab.experiments.capacity import Carries, Need, Planner, kinds_known, plan_table
from appliance.lab.experiments.comparison import Match, MatchPool, MatchResult, outcome
from appliance.lab.experiments.report import ComparisonReport, mean, share, table
from appliance.lab.experiments.run import Contender, Trial, play
from appliance.lab.experiments.scenario import Scenario
from appliance.lab.experiments.sweep import LoadAxis, ModelsLoad, RateLoad, largest
from appliance.lab.replay.journal_workload import JournalRecording, recording
from appliance.lab.sim.extrapolation import worst

MOST_TIMES_THE_RATE = 64.0
"""That `plan --box` tries."""

existing = click.Path(exists=True, dir_okay=False, path_type=Path)
policies_option = click.option(
    "--policy", "policies", multiple=True, help="Only these (may be repeated)."
)
set_option = click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the scenario, such as hardware.count=8 (may be repeated).",
)
seeds_option = click.option(
    "--seeds", type=click.IntRange(min=1), help="Seeds 1 to N instead of the scenario's."
)
json_option = click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write a file."
)
plot_option = click.option(
    "--plot", "plot_path", type=click.Path(file_okay=False, path_type=Path), help="Draw PNG files."
)
jobs_option = click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=lambda: os.cpu_count() or 1,
    help="Processes; as many as there are cores if it is not given.",
)


@click.group()
def lab() -> None:
    """Compare policies on a virtual clock: the daemon's own decisions, modelled hardware."""


lab.add_command(calibrate_command)


@lab.command()
@click.argument("path", metavar="SCENARIO", type=existing)
@policies_option
@set_option
@seeds_option
@json_option
@plot_option
@jobs_option
def run(
    path: Path,
    policies: tuple[str, ...],
    changes: tuple[str, ...],
    seeds: int | None,
    json_path: Path | None,
    plot_path: Path | None,
    jobs: int,
) -> None:
    """Run the policies of SCENARIO side by side."""
    with _errors(plot_path):
        changed = _changes(changes)
        chosen = scenario.read(path, changed)
        if chosen.fleet is not None and plot_path is not None:
            raise LabError("--plot: there are plots of one box only, and this is a fleet")
        matches = [
            Match(
                path=str(path),
                policy=policy,
                seed=seed,
                changes=changed,
                curves=plot_path is not None,
                router=router,
            )
            for policy in _policies(chosen, policies)
            for router in _routers(chosen)
            for seed in _seeds(chosen, seeds)
        ]
        with MatchPool(min(jobs, len(matches))) as arena, _progress(len(matches)) as done:
            outcomes = arena.play(matches, done)
        _publish(
            ComparisonReport(
                title=chosen.title,
                duration_seconds=float(chosen.duration),
                warmup_seconds=chosen.warmup_seconds,
                changes=changed,
                outcomes=outcomes,
            ),
            json_path,
            plot_path,
        )


@lab.command()
@click.argument("path", metavar="JOURNAL", type=existing)
@click.option("--policy", "policies", multiple=True, help="May be repeated.")
@json_option
@plot_option
def replay(
    path: Path, policies: tuple[str, ...], json_path: Path | None, plot_path: Path | None
) -> None:
    """What other policies would have done with the requests in JOURNAL.

    It also prints what really happened, and what the lab makes of the policy that decided then:
    how far those two differ is how far the lab is to be trusted here.

    With the policy that decided then, or without --policy, the machine gets the same events
    again, and has to give the same commands again; exit status 1 if it does not.
    """
    with _errors(plot_path):
        found = recording(path)
        own = found.contender
        others = [name for name in policies if name != own.name]
        asked = not policies or own.name in policies
        identical = not asked or _replayed(path)
        if others:
            _what_if(path, found, others, json_path, plot_path)
    if not identical:
        sys.exit(1)


def _what_if(
    path: Path,
    found: JournalRecording,
    others: Sequence[str],
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """What happened, what the lab makes of it, and what it makes of the others."""
    own = found.contender
    contenders = [
        replace(own, name=f"{own.name} in the lab"),
        *(Contender(name, (name,)) for name in others),
    ]
    curves = plot_path is not None
    happened = Trial(found.happened, ())
    outcomes = [outcome(f"{own.name}, recorded", 0, happened, 0.0, with_curves=curves)]
    with _progress(len(contenders)) as done:
        for contender in contenders:
            trial = play(found.setting, contender)
            outcomes.append(outcome(contender.name, 0, trial, 0.0, with_curves=curves))
            done()
    _publish(
        ComparisonReport(
            title=path.name,
            duration_seconds=found.setting.seconds,
            warmup_seconds=0.0,
            outcomes=outcomes,
        ),
        json_path,
        plot_path,
    )


def _replayed(path: Path) -> bool:
    """Say whether the journal's commands follow from its events, or where they first do not."""
    try:
        count, differences = journal.replay(path)
    except (IllegalTransition, LedgerError) as error:
        raise LabError(f"{path}: it contradicts itself: {error}") from None
    if not differences:
        click.echo(f"replayed {count} events: commands identical")
        return True
    first = differences[0]
    click.echo(f"line {first.line} is the first that is answered otherwise: {first.event!r}")
    for name, commands in (("recorded", first.recorded), ("replayed", first.replayed)):
        click.echo(f"{name}: {'; '.join(map(repr, commands)) or 'nothing'}")
    return False


@lab.command()
@click.argument("path", metavar="SCENARIO", type=existing)
@click.option(
    "--over",
    type=click.Choice(["models", "rate"]),
    default="models",
    show_default=True,
    help="The load: models of the first table, or the rate of all.",
)
@click.option(
    "--at",
    "targets",
    type=click.FloatRange(0, 1, min_open=True),
    multiple=True,
    default=(0.9, 0.99),
    show_default=True,
    help="Attainment to keep (may be repeated).",
)
@click.option("--metric", default="token_attainment", show_default=True)
@click.option("--step", type=float, help="Resolution: 1 model, or 0.05 of the scenario's rate.")
@click.option("--most", type=float, help="Try no more; 8 times the scenario's load if not given.")
@policies_option
@set_option
@seeds_option
@json_option
@plot_option
@jobs_option
def sweep(
    path: Path,
    over: str,
    targets: tuple[float, ...],
    metric: str,
    step: float | None,
    most: float | None,
    policies: tuple[str, ...],
    changes: tuple[str, ...],
    seeds: int | None,
    json_path: Path | None,
    plot_path: Path | None,
    jobs: int,
) -> None:
    """Find the largest load of SCENARIO at which each policy meets its SLO targets."""
    with _errors(plot_path):
        changed = _changes(changes)
        chosen = scenario.read(path, changed)
        _one_box(chosen, "sweep")
        load: LoadAxis = (
            ModelsLoad(chosen, step, most) if over == "models" else RateLoad(chosen, step, most)
        )
        names, all_seeds = _policies(chosen, policies), _seeds(chosen, seeds)
        points: dict[str, dict[float, float]] = {name: {} for name in names}
        found: dict[str, dict[str, float]] = {name: {} for name in names}
        with MatchPool(jobs) as arena, _progress(None) as done:

            def attained(policy: str, steps: int) -> float:
                matches = [
                    Match(
                        path=str(path),
                        policy=policy,
                        seed=seed,
                        changes=changed | load.changes(steps),
                    )
                    for seed in all_seeds
                ]
                return mean(_metric(one, metric) for one in arena.play(matches, done))

            for policy in names:
                for target in targets:
                    steps = largest(load, target, points[policy], partial(attained, policy))
                    found[policy][f"{target:g}"] = load.at(steps)
        _publish_sweep(chosen, load, found, points, metric, json_path)
        if plot_path is not None:
            plot_path.mkdir(parents=True, exist_ok=True)
            plots.draw_sweep(points, load.name, targets, plot_path / "sweep.png")


@lab.command()
@click.argument("path", metavar="SCENARIO", type=existing)
@click.option("--policy", default="appliance", show_default=True, help="Which is to decide.")
@click.option(
    "--at",
    "target",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.99,
    show_default=True,
    help="Attainment to keep.",
)
@click.option("--metric", default="token_attainment", show_default=True)
@click.option(
    "--gpus",
    metavar="NAME,...",
    default="",
    help="Kinds of GPU to plan for; all that are known if it is not given.",
)
@click.option("--box", is_flag=True, help="Ask what the scenario's own box can carry instead.")
@click.option(
    "--most",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Plan for no more GPUs.",
)
@click.option(
    "--extrapolate",
    is_flag=True,
    help="Answer even where a model was measured for smaller prompts or batches only.",
)
@set_option
@seeds_option
@json_option
@jobs_option
def plan(
    path: Path,
    policy: str,
    target: float,
    metric: str,
    gpus: str,
    box: bool,
    most: int,
    extrapolate: bool,
    changes: tuple[str, ...],
    seeds: int | None,
    json_path: Path | None,
    jobs: int,
) -> None:
    """Find how many GPUs of which kind SCENARIO needs, and how much host memory."""
    with _errors(None):
        changed = _changes(changes)
        chosen = scenario.read(path, changed)
        _one_box(chosen, "plan")
        all_seeds = _seeds(chosen, seeds)
        with MatchPool(min(jobs, len(all_seeds))) as arena, _progress(None) as done:

            def play_changed(more: Mapping[str, str]) -> Sequence[MatchResult]:
                matches = [
                    Match(path=str(path), policy=policy, seed=seed, changes={**changed, **more})
                    for seed in all_seeds
                ]
                return arena.play(matches, done)

            planner = Planner(path, changed, play_changed, metric)
            planned: Sequence[Need | Carries]
            if box:
                planned = [planner.carries(load, target) for load in _loads(chosen)]
            else:
                kinds = [name.strip() for name in gpus.split(",") if name.strip()] or kinds_known(
                    data_sheets=chosen.hardware.data_sheet
                )
                planned = [planner.need(kind, target, most) for kind in kinds]
        beyond = worst(one.beyond for one in planned)
        if beyond and not extrapolate:
            said = "; ".join(f"{name}: {what}" for name, what in beyond.items())
            raise LabError(f"{said}. Give --extrapolate to plan all the same")
        for name, what in beyond.items():
            click.echo(f"{name}: {what}", err=True)
        _print(plan_table(chosen.title, policy, planned))
        if json_path is not None:
            document = {"title": chosen.title, "policy": policy, "at": target, "metric": metric}
            document |= {"changes": changed, "plan": planned}
            encoded = msgspec.json.format(msgspec.json.encode(document), indent=2)
            json_path.write_bytes(encoded + b"\n")


def _loads(chosen: Scenario) -> list[LoadAxis]:
    """Kinds of load that this scenario can have more of."""
    loads: list[LoadAxis] = [RateLoad(chosen, None, MOST_TIMES_THE_RATE)]
    with suppress(LabError):
        loads.append(ModelsLoad(chosen, None, None))
    return loads


def _metric(found: MatchResult, metric: str) -> float:
    if metric not in found.metrics:
        raise LabError(f"--metric: there is no {metric}; there are: {', '.join(found.metrics)}")
    return found.metrics[metric]


# --- what is given and printed -------------------------------------------------------------------


@contextmanager
def _errors(plot_path: Path | None) -> Iterator[None]:
    """A scenario or a policy that cannot be used is the caller's mistake, and so are plots without
    what draws them."""
    try:
        if plot_path is not None:
            plots.check()
        yield
    except (LabError, PolicyError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except ApplianceError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)


def _changes(given: Sequence[str]) -> dict[str, str]:
    changes = {}
    for change in given:
        key, equals, value = change.partition("=")
        if not equals:
            raise LabError(f"--set {change}: give KEY=VALUE")
        changes[key] = value
    return changes


def _policies(chosen: Scenario, given: Sequence[str]) -> Sequence[str]:
    names = list(dict.fromkeys(given)) or list(chosen.policies)
    if not names:
        raise LabError("the scenario names no policies: give --policy")
    return names


def _routers(chosen: Scenario) -> Sequence[str]:
    """Those of a fleet; of one box none, which goes by the empty name."""
    if chosen.fleet is None:
        return [""]
    chosen.fleet.setting(chosen.seeds[0])  # what is wrong with it is said before anything runs
    return chosen.fleet.routers


def _one_box(chosen: Scenario, command: str) -> None:
    if chosen.fleet is not None:
        raise LabError(f"{command}: it is for one box, and the scenario is of a fleet; use run")


def _seeds(chosen: Scenario, count: int | None) -> Sequence[int]:
    return chosen.seeds if count is None else range(1, count + 1)


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[], None]]:
    """A line on the terminal that counts runs; nothing in a pipe."""
    console = Console(stderr=True)
    columns = (TextColumn("runs"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("runs", total=total)
        yield lambda: progress.advance(task)


def _publish(report: ComparisonReport, json_path: Path | None, plot_path: Path | None) -> None:
    _print(table(report))
    for found in report.outcomes:
        if found.faults:
            click.echo(
                f"{found.policy}, seed {found.seed}: {found.faults} questions were answered by the"
                f" built-in; the first: {found.fault}",
                err=True,
            )
    for name, beyond in worst(found.beyond for found in report.outcomes).items():
        click.echo(f"{name}: {beyond}", err=True)
    if json_path is not None:
        json_path.write_bytes(report.json())
    if plot_path is not None:
        for made in plots.draw(report, plot_path):
            click.echo(made)


def _publish_sweep(
    chosen: Scenario,
    load: LoadAxis,
    found: Mapping[str, Mapping[str, float]],
    points: Mapping[str, Mapping[float, float]],
    metric: str,
    json_path: Path | None,
) -> None:
    shown = Table(box=None, pad_edge=False, title=chosen.title, title_justify="left")
    shown.add_column("POLICY", no_wrap=True)
    targets = list(next(iter(found.values())))
    for target in targets:
        shown.add_column(f"{load.name.upper()} AT {share(float(target))}", justify="right")
        shown.add_column("PER GPU", justify="right")
    for policy, loads in found.items():
        cells = []
        for target in targets:
            cells += [f"{loads[target]:g}", f"{loads[target] / chosen.hardware.count:.2f}"]
        shown.add_row(policy, *cells)
    _print(shown)
    if json_path is not None:
        document: dict[str, Any] = {
            "title": chosen.title,
            "load": load.name,
            "metric": metric,
            "largest": found,
            "points": {
                policy: [[at, attained[at]] for at in sorted(attained)]
                for policy, attained in points.items()
            },
        }
        encoded = msgspec.json.format(msgspec.json.encode(document), indent=2)
        json_path.write_bytes(encoded + b"\n")


def _print(shown: Table) -> None:
    # Cut to the width of a terminal, but never in a pipe.
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    console.print(shown)
