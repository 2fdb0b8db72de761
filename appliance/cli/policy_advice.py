"""`appliance policy advise`: which policy the box's own last minutes speak for."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from appliance.cli.options import config_option
from appliance.cli.output import json_option, print_json, print_table
from appliance.client import fail
from appliance.config.loader import load_config
from appliance.errors import ApplianceError, ConfigError
from appliance.service.policy_report import PolicyChoice

if TYPE_CHECKING:
    from appliance.lab.advice.advise import Advice, Row

WRONG = 2
"""Exit status: the command line, the configuration or the journal is wrong."""
SHOWN = 12
"""Rows of other candidates; JSON has all."""


@click.command()
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True,
    help="How much of the journal's end is replayed.",
)  # fmt: skip
@click.option(
    "--cpu-seconds", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True,
    help="CPU time that all of it may take.",
)  # fmt: skip
@click.option(
    "--from", "source", metavar="JOURNAL", type=click.Path(dir_okay=False, path_type=Path),
    help="The journal; `journal.path` of the configuration if it is not given.",
)  # fmt: skip
@config_option("config", "Where `journal.path` is looked up.")
@json_option
def advise(
    minutes: float, cpu_seconds: float, source: Path | None, config: Path, as_json: bool
) -> None:
    """Say whether another policy would have kept more of the promises of the last minutes.

    Replays the end of the box's journal in the lab, under its policies and under all others that
    are installed, each also with one parameter doubled or halved. It changes nothing, and runs at
    the lowest priority. Exit status: 0 there is an advice, also to keep what there is.
    """
    from appliance.lab.advice.advise import advise as search  # loads the lab
    from appliance.lab.advice.cpu_time import CpuMeter, lower_priority

    configured = None
    if source is None:
        source, configured = _configured(config)
    wrong = "--from" if configured is None else "journal.path"
    try:
        if not source.is_file():
            fail(f"{wrong}: there is no file {source}. Name one that a daemon writes", WRONG)
    except OSError as error:
        fail(f"{wrong}: {error}. Run this as a user that may read the journal", WRONG)
    lower_priority()
    try:
        with _progress() as done:
            found = search(source, minutes, cpu_seconds, CpuMeter(), done, configured=configured)
    except ApplianceError as error:
        fail(str(error), WRONG)
    if as_json:
        print_json(_plain(found))
    else:
        _print(found)


def _configured(path: Path) -> tuple[Path, PolicyChoice]:
    """The journal and the policies of a configuration. Ends the command if there is no journal."""
    try:
        config = load_config(path, check_files=False)
    except ConfigError as error:
        fail("\n".join(str(problem) for problem in error.problems), WRONG)
    if not config.journal.path:
        fail(
            f"journal.path: {path} has the daemon write no journal, and an advice is made of one."
            ' Set [journal] path = "journal.jsonl", restart the daemon, and ask again when it has'
            " served some minutes; or give --from JOURNAL",
            WRONG,
        )
    return Path(config.journal.path), config.policy.choice


@contextmanager
def _progress() -> Iterator[Callable[[], None]]:
    """A line on the terminal that counts replays; nothing in a pipe."""
    console = Console(stderr=True)
    columns = (TextColumn("replays {task.completed:.0f}"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("replays", total=None)
        yield lambda: progress.advance(task)


# --- what is printed -----------------------------------------------------------------------------


def _print(found: Advice) -> None:
    click.echo(
        f"{found.journal}: {found.requests} requests in the last {found.seconds / 60:.1f} minutes"
    )
    name = found.rows[0].candidate.name
    rows = [_cells(f"{name}, recorded", found.observed, "100%", "")]
    rows += [_row(f"{name}, in the lab", found.rows[0])]
    chosen = found.verdict.candidate
    scored = [row for row in found.rows[1:] if row.score is not None]
    shown = [row for n, row in enumerate(scored) if n < SHOWN or row.candidate == chosen]
    rows += [_row(row.candidate.name, row) for row in shown]
    columns = ["CANDIDATE", "REPLAYED", "TOKENS", "REQUESTS", "TTFT P50", "P99", "SWITCHES"]
    print_table([*columns, "REFUSED", "DIFFERENCE"], rows)
    click.echo()
    for left_out in found.unsuited:
        click.echo(f"not tried: {left_out.policy}: {left_out.reason}")
    click.echo(_counted(found, len(shown)))
    click.echo(
        f"the lab's level error here: {_points(found.level_error)}, the largest difference between"
        f" its replays under {name} and what was recorded"
    )
    click.echo(
        f"CPU time: {found.cpu_seconds:.1f} s of {found.cpu_budget_seconds:g} s, at the lowest"
        " priority"
    )
    click.echo()
    click.echo(found.verdict.reason)
    if chosen is not None:
        click.echo(_how_to_set(chosen.choice))


def _counted(found: Advice, shown: int) -> str:
    """What became of the candidates that have no row."""
    others = found.rows[1:]
    untried = [row for row in others if row.score is None]
    said = f"candidates: {len(others)}, of which {shown} are shown"
    if untried:
        said += f"; {len(untried)} were not replayed to an end, the first: "
        said += f"{untried[0].candidate.name}: {untried[0].dropped}"
    return said


def _row(name: str, row: Row) -> list[str]:
    assert row.score is not None, "only rows with a score are shown"
    return _cells(name, row.score, f"{row.share:.0%}", f"{100 * row.difference:+.1f}")


def _cells(name: str, score: Any, replayed: str, difference: str) -> list[str]:
    from appliance.lab.experiments.report import seconds, share

    times = [seconds(score.ttft_p50_seconds), seconds(score.ttft_p99_seconds)]
    counts = [str(score.switches), str(score.refused)]
    return [name, replayed, share(score.tokens), share(score.requests), *times, *counts, difference]


def _points(share: float) -> str:
    from appliance.lab.advice.verdict import points

    return points(share)


def _how_to_set(choice: PolicyChoice) -> str:
    """The configuration, and the command for a daemon that runs."""
    lines = ["[policy]", f"use = {_toml(list(choice.use))}"]
    lines += [f"{hook} = {_toml(name)}" for hook, name in choice.decisions.items()]
    words = ["appliance", "policy", "set", *choice.use]
    for hook, name in choice.decisions.items():
        words += ["--decision", f"{hook}={name}"]
    for policy, table in choice.parameters.items():
        lines += ["", f"[policy.{policy}]"] if table else []
        for key, value in table.items():
            lines.append(f"{key} = {_toml(value)}")
            words += ["--param", f"{policy}.{key}={_toml(value)}"]
    text = "\n".join(f"    {line}".rstrip() for line in lines)
    return (
        f"In the configuration, instead of [policy] as it is (keep `budget`):\n\n{text}\n\n"
        f"or, until the daemon restarts:\n\n    {shlex.join(words)}"
    )


def _toml(value: object) -> str:
    """Strings, numbers, booleans and lists are written in TOML as in JSON."""
    return msgspec.json.encode(value).decode()


def _plain(found: Advice) -> Any:
    """NaN is null, as in all JSON of the lab."""
    return msgspec.json.decode(msgspec.json.encode(found))
