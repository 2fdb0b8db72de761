"""`appliance requests`, `why` and `cancel`: what live requests do, and why they wait."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from appliance.cli.output import json_option, print_json, print_table
from appliance.client import call, get, url_option
from appliance.vocabulary import WaitCode

PATH = "/api/requests"


@click.command()
@url_option
@json_option
def requests(url: str, as_json: bool) -> None:
    """List the live requests, the oldest first."""
    answer = get(url, PATH)
    found, bodies = answer["requests"], answer["bodies"]
    if as_json:
        print_json(found)
        return
    print_requests(found)
    if bodies:
        size = sum(body["received_bytes"] for body in bodies)
        keys = ", ".join(sorted({body["key"] or "no key" for body in bodies}))
        click.echo(f"{len(bodies)} bodies are still coming in ({keys}): {size} bytes so far")


@click.command()
@click.argument("id")
@url_option
@json_option
def why(id: str, url: str, as_json: bool) -> None:
    """Say what the request ID waits for, if it does."""
    found = get(url, _path(id))
    if as_json:
        print_json(found)
        return
    reason = found["reason"]
    where = "" if found["instance"] is None else f" on instance {found['instance']}"
    click.echo(
        f"{found['id']}: {found['model']}, {found['phase']}{where}, "
        f"{found['age_seconds']:.1f} s old, {found['output_tokens']} tokens so far"
    )
    if reason is None:
        click.echo("it is computed now")
    else:
        click.echo(f"it waits ({reason['code']}): {reason['message']}")


@click.command()
@click.argument("id")
@url_option
@json_option
def cancel(id: str, url: str, as_json: bool) -> None:
    """Cancel the request ID; its client gets an error."""
    found = call("DELETE", url, _path(id))["cancelled"]
    if as_json:
        print_json(found)
    else:
        click.echo(f"cancelled {found['id']} after {found['output_tokens']} tokens")


def print_requests(found: list[dict[str, Any]]) -> None:
    rows = [
        [
            row["id"],
            row["model"],
            row["request_class"],
            row["phase"],
            f"{row['age_seconds']:.1f}s",
            row["output_tokens"],
            "" if row["instance"] is None else row["instance"],
            _waits_for(row["reason"]),
        ]
        for row in found
    ]
    print_table(["ID", "MODEL", "CLASS", "PHASE", "AGE", "TOKENS", "INSTANCE", "WAITS FOR"], rows)


def _waits_for(reason: dict[str, Any] | None) -> str:
    """The code of a reason; of a hold, until when."""
    if reason is None:
        return ""
    if reason["code"] == WaitCode.HELD:
        return str(reason["message"]).partition(" by the policy")[0]
    return str(reason["code"])


def _path(request: str) -> str:
    return f"{PATH}/{quote(request, safe='')}"
