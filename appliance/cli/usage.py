"""`appliance usage`: what keys used of which models, from the daemon's ledger."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import click
import httpx

from appliance.cli.output import json_option, print_json, print_table
from appliance.client import ANSWER_SECONDS, checked, connect, get, unreachable, url_option

PATH = "/api/usage"


@click.command()
@click.option(
    "--by", default="key,model", show_default=True, metavar="NAMES",
    help="What to add up by, with commas in between: key, organization, model, day, month, "
    "outcome.",
)  # fmt: skip
@click.option(
    "--since", metavar="DATE", help="The first day (UTC): 2026-11-01, or 30d for 30 days ago."
)
@click.option("--until", metavar="DATE", help="The last day, likewise; without it, today.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, not a table.")
@url_option
@json_option
def usage(
    by: str, since: str | None, until: str | None, as_csv: bool, url: str, as_json: bool
) -> None:
    """Show what keys used: requests, tokens, GPU seconds, waiting."""
    if as_csv and as_json:
        raise click.UsageError("give --csv or --json, not both")
    asked = {"by": by, "since": since, "until": until}
    query = {name: value for name, value in asked.items() if value is not None}
    if as_csv:
        click.echo(_text(url, f"{PATH}?{urlencode(query | {'format': 'csv'})}"), nl=False)
        return
    found = get(url, f"{PATH}?{urlencode(query)}")
    if as_json:
        print_json(found)
        return
    names = found["by"]
    rows = [[_named(row, name) for name in names] + _amounts(row) for row in found["rows"]]
    if found["total"] is not None and len(rows) > 1:
        rows.append(["total", *[""] * (len(names) - 1), *_amounts(found["total"])])
    columns = ["REQUESTS", "INPUT", "CACHED", "OUTPUT", "GPU SECONDS", "WAITED"]
    print_table([*map(str.upper, names), *columns], rows)
    budgets = [*found["budgets"], *found.get("organization_budgets", ())]
    for budget in budgets:
        named = budget.get("key") or f"organization {budget['organization']}"
        click.echo(
            f"{named}: {budget['spent_tokens']} of {budget['tokens_per_month']} tokens of "
            f"this month are spent; it renews on {budget['renews']}"
        )


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
