"""`appliance usage`: what keys used of which models, from the daemon's ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from urllib.parse import urlencode

import click
import httpx

from appliance.cli.output import json_option, print_json, print_table
from appliance.client import (
    ANSWER_SECONDS,
    checked,
    connect,
    fail,
    get,
    unreachable,
    url_option,
)
from appliance.errors import FleetError
from appliance.fleet.box_addresses import Reach, boxes_option, read_boxes
from appliance.fleet.cli import fleet
from appliance.fleet.usage import BoxRow, added_up, asked_by, fleet_dimensions, read_answer
from appliance.usage.report import rows_as_csv

PATH = "/api/usage"
_MOST_AT_ONCE: Final = 64


def _days_and_format(command: Callable[..., None]) -> Callable[..., None]:
    """The options of which days, and how the sums are printed."""
    options = (
        click.option(
            "--since",
            metavar="DATE",
            help="The first day (UTC): 2026-11-01, or 30d for 30 days ago.",
        ),
        click.option("--until", metavar="DATE", help="The last day, likewise; without it, today."),
        click.option("--csv", "as_csv", is_flag=True, help="Print CSV, not a table."),
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


def _check_format(as_csv: bool, as_json: bool) -> None:
    if as_csv and as_json:
        raise click.UsageError("give --csv or --json, not both")


@click.command()
@click.option(
    "--by", default="key,model", show_default=True, metavar="NAMES",
    help="What to add up by, with commas in between: key, organization, model, day, month, "
    "outcome.",
)  # fmt: skip
@_days_and_format
@url_option
def usage(
    by: str, since: str | None, until: str | None, as_csv: bool, url: str, as_json: bool
) -> None:
    """Show what keys used: requests, tokens, GPU seconds, waiting."""
    _check_format(as_csv, as_json)
    asked = {"by": by, "since": since, "until": until}
    query = {name: value for name, value in asked.items() if value is not None}
    if as_csv:
        click.echo(_text(url, f"{PATH}?{urlencode(query | {'format': 'csv'})}"), nl=False)
        return
    found = get(url, f"{PATH}?{urlencode(query)}")
    if as_json:
        print_json(found)
        return
    _print(found["by"], found["rows"], found["total"])
    budgets = [*found["budgets"], *found.get("organization_budgets", ())]
    for budget in budgets:
        named = budget.get("key") or f"organization {budget['organization']}"
        click.echo(
            f"{named}: {budget['spent_tokens']} of {budget['tokens_per_month']} tokens of "
            f"this month are spent; it renews on {budget['renews']}"
        )


@fleet.command(name="usage")
@boxes_option(Reach.HERE_TOO)
@click.option(
    "--by", default="key,model", show_default=True, metavar="NAMES",
    help="What to add up by, with commas in between: box, key, organization, model, day, month, "
    "outcome.",
)  # fmt: skip
@_days_and_format
def fleet_usage(
    boxes: tuple[str, ...],
    by: str,
    since: str | None,
    until: str | None,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Add up what keys used on several boxes, from the ledger of each.

    Boxes with keys want one with the scope admin, in $APPLIANCE_API_KEY: the same for all. Boxes
    that do not answer are named, and the status is 1: the sums are without them.
    """
    _check_format(as_csv, as_json)
    try:
        names = fleet_dimensions(by)
        urls = {box.name: box.url for box in read_boxes(boxes, Reach.HERE_TOO)}
    except FleetError as error:
        fail(str(error), 2)
    asked = {"by": ",".join(asked_by(names)), "since": since, "until": until}
    query = urlencode({name: value for name, value in asked.items() if value is not None})
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(urls))) as threads:
        found = dict(zip(urls, threads.map(_asked(f"{PATH}?{query}"), urls.values()), strict=True))
    answers = {box: rows for box, rows in found.items() if not isinstance(rows, str)}
    missing = {box: why for box, why in found.items() if isinstance(why, str)}
    sums = added_up(names, answers)
    if as_csv:
        click.echo(rows_as_csv(names, sums.rows), nl=False)
    elif as_json:
        boxes_of = {"boxes": sorted(answers), "missing": missing}
        print_json({"by": names, "rows": sums.rows, "total": sums.total, **boxes_of})
    else:
        _print(names, sums.rows, sums.total)
    for box, why in missing.items():
        click.echo(f"error: {box} is not in these sums: {why}", err=True)
    if missing:
        raise SystemExit(1)


def _asked(path: str) -> Callable[[str], list[BoxRow] | str]:
    """What asks one box: its rows, or why there are none."""

    def ask(url: str) -> list[BoxRow] | str:
        try:
            with connect(url) as client:
                response = client.get(path, timeout=ANSWER_SECONDS)
            if response.is_success:
                return read_answer(response.content)
            return str(response.json()["error"]["message"])
        except (httpx.HTTPError, FleetError) as error:
            return str(error) or type(error).__name__
        except (ValueError, KeyError, TypeError):
            return f"it answered {response.status_code}"

    return ask


def _print(
    names: Sequence[str], found: Sequence[dict[str, Any]], total: dict[str, Any] | None
) -> None:
    rows = [[_named(row, name) for name in names] + _amounts(row) for row in found]
    if total is not None and len(rows) > 1:
        rows.append(["total", *[""] * (len(names) - 1), *_amounts(total)])
    columns = ["REQUESTS", "INPUT", "CACHED", "OUTPUT", "GPU SECONDS", "WAITED"]
    print_table([*map(str.upper, names), *columns], rows)


def _named(row: dict[str, Any], name: str) -> str:
    return str(row[name]) or ("(none)" if name == "organization" else "(no key)")


def _amounts(row: dict[str, Any]) -> list[Any]:
    counts = ("requests", "input_tokens", "cached_tokens", "output_tokens")
    return [
        *[row[name] for name in counts],
        f"{row['gpu_seconds']:.1f}",
        f"{row['waiting_seconds']:.1f}s",
    ]


def _text(url: str, path: str) -> str:
    try:
        with connect(url) as client:
            return checked(client.get(path, timeout=ANSWER_SECONDS)).text
    except httpx.TransportError as error:
        unreachable(url, error)
