"""`appliance top` and `logs`: what a daemon does now, and what happens in it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import click
import httpx

from appliance.client import checked, connect, fail, get, unreachable, url_option
from appliance.printing import json_option, print_json, print_table
from appliance.requestcommands import print_requests
from appliance.units import human

REFRESH_SECONDS = 2.0
SHOWN_REQUESTS = 20


@click.command()
@click.option("--once", is_flag=True, help="Show it once, and end.")
@url_option
@json_option
def top(once: bool, url: str, as_json: bool) -> None:
    """Show what instances, models and requests do, again every two seconds."""
    if as_json:
        if not once:
            raise click.UsageError("--json is for --once; `appliance logs --json` goes on")
        print_json(get(url, "/api/snapshot"))
        return
    while True:
        found = get(url, "/api/snapshot")
        if not once:
            click.clear()
        _show(found)
        if once:
            return
        time.sleep(REFRESH_SECONDS)


@click.command()
@url_option
@json_option
def logs(url: str, as_json: bool) -> None:
    """Follow what happens in the daemon, a line each, until it ends."""
    try:
        with connect(url) as client, client.stream("GET", "/api/events") as response:
            for kind, data in _events(checked(response)):
                if as_json:
                    click.echo(json.dumps({"event": kind, **data}))
                else:
                    click.echo(_line(kind, data))
    except httpx.TransportError as error:
        if isinstance(error, httpx.ConnectError):
            unreachable(url, error)
        fail(f"the daemon is gone ({error})")


def _events(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = ""
    for line in response.iter_lines():
        if line.startswith("event:"):
            kind = line.removeprefix("event:").strip()
        elif line.startswith("data:"):
            yield kind, json.loads(line.removeprefix("data:"))


def _line(kind: str, data: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(data["unix_seconds"]).strftime("%H:%M:%S")
    if kind == "snapshot":
        requests = len(data["requests"])
        return f"{at} snapshot requests={requests} newest_event={data['newest_event']}"
    facts = " ".join(f"{key}={_shown(value)}" for key, value in data["facts"].items())
    return f"{at} {kind} {facts}"


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _show(found: dict[str, Any]) -> None:
    status, ready = found["status"], found["readiness"]
    told = "ready" if ready["ok"] else f"not ready: {'; '.join(ready['reasons'])}"
    click.echo(f"appliance {status['version']}, up {status['uptime_seconds']:.0f} s, {told}")
    for reason in ready["degraded"]:
        click.echo(reason)
    click.echo()
    instances = [
        [
            row["instance"], row["role"], row["state"], row["model"] or "",
            human(sum(row["pool_bytes"].values()) - row["pool_bytes"].get("free", 0)),
            human(sum(row["pool_bytes"].values())),
        ]
        for row in status["instances"]
    ]  # fmt: skip
    print_table(["INSTANCE", "ROLE", "STATE", "RUNS", "USED", "POOL"], instances)
    click.echo()
    models = [
        [row["model"], row["state"], row["running"], row["waiting"], _marks(row)]
        for row in status["models"]
    ]
    print_table(["MODEL", "STATE", "RUNNING", "WAITING", ""], models)
    click.echo()
    print_requests(found["requests"][:SHOWN_REQUESTS])
    if (more := len(found["requests"]) - SHOWN_REQUESTS) > 0:
        click.echo(f"and {more} more")


def _marks(model: dict[str, Any]) -> str:
    marks = {
        "pinned": model["terms"]["pinned"],
        "draining": model["draining"],
        "wanted": model["wanted"],
    }
    return ", ".join(mark for mark, holds in marks.items() if holds)
