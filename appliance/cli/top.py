"""`appliance top` and `logs`: what a daemon does now, and what happens in it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import httpx
from click.core import ParameterSource

from appliance.cli.output import json_option, print_json, print_table
from appliance.cli.requests import print_requests
from appliance.cli.web import Web, web_options
from appliance.client import (
    KEY_VARIABLE,
    check_address,
    checked,
    connect,
    event_lines,
    fail,
    get,
    own_key,
    unreachable,
    url_option,
    url_option_named,
)
from appliance.errors import FleetError
from appliance.fleet.box_addresses import Reach, boxes_option
from appliance.fleet.cli import known_boxes
from appliance.fleet.watch import BoxWatch, FrontWatch, Row
from appliance.platform.admin_socket import UNIX
from appliance.units import human

SHOWN_REQUESTS = 20
THEMES = ("dark", "light", "colour-blind")

new_file = click.Path(dir_okay=False, path_type=Path)
file = click.Path(dir_okay=False, exists=True, path_type=Path)


@click.command()
@click.option("--once", is_flag=True, help="Print what there is now, and end.")
@click.option("--readonly", is_flag=True, help="Change nothing, whatever keys are pressed.")
@click.option("--record", type=new_file, help="Write the session to this new file.")
@click.option("--replay", type=file, help="Show a recorded session instead of a daemon.")
@click.option("--theme", type=click.Choice(THEMES), default=THEMES[0], show_default=True)
@click.option(
    "--fleet", is_flag=True,
    help="Show several boxes: each --box, or those behind the front at --connect.",
)  # fmt: skip
@boxes_option(Reach.NETWORK, required=False, before="For --fleet. ")
@web_options
@url_option_named("--connect")
@json_option
def top(
    once: bool,
    readonly: bool,
    record: Path | None,
    replay: Path | None,
    theme: str,
    fleet: bool,
    boxes: tuple[str, ...],
    web: Web | None,
    url: str,
    as_json: bool,
) -> None:
    """Show the whole appliance, live, and steer it: the dashboard, in this terminal or in browsers.

    `--once` prints instances, models and requests without it, for people or with `--json`.

    `--fleet` shows several boxes, each asked once a second; Enter opens the dashboard of one.
    """
    if as_json and not once:
        raise click.UsageError("--json is for --once; `appliance logs --json` goes on")
    if fleet or boxes:
        if not fleet:
            raise click.UsageError("--box is for --fleet")
        if web is not None or record or replay:
            raise click.UsageError("--fleet goes with none of --web, --record, --replay")
        watch = _watch(boxes, url)
        if once:
            _print_fleet(watch, as_json)
        else:
            _fleet_dashboard(watch, readonly, theme)
        return
    if web is not None:
        if once or record or replay:
            raise click.UsageError("--web goes with none of --once, --record, --replay")
        web.serve(url, readonly=readonly, theme=theme)
        return
    if once:
        found = get(url, "/api/snapshot")
        if as_json:
            print_json(found)
        else:
            _show(found)
        return
    _dashboard(url, readonly, record, replay, theme)


def on_a_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _watch(boxes: tuple[str, ...], url: str) -> BoxWatch | FrontWatch:
    """What follows the fleet: the boxes that are given, else the front."""
    source = click.get_current_context().get_parameter_source("url")
    if boxes:
        if source is ParameterSource.COMMANDLINE:
            raise click.UsageError("--fleet takes --box for each box, or --connect, not both")
        return BoxWatch(known_boxes(boxes, Reach.NETWORK), own_key())
    if source is ParameterSource.DEFAULT or url.startswith(UNIX):
        raise click.UsageError(
            "--fleet needs --box NAME=URL for each box, or --connect http://HOST:PORT of a front"
        )
    check_address(url)
    return FrontWatch(url, own_key())


def _print_fleet(watch: BoxWatch | FrontWatch, as_json: bool) -> None:
    try:
        rows = asyncio.run(watch.once())
    except FleetError as error:
        fail(f"{watch.name}: {error}")
    if as_json:
        print_json({"boxes": rows})
        return
    columns = ["BOX", "STATE", "WAITING", "RUNNING", "OLDEST", "FREE", "IN TIME", "ON DEVICES"]
    print_table(columns, [_fleet_line(row) for row in rows])


def _fleet_line(row: Row) -> list[Any]:
    """Of a box that does not say its load, the reason takes the place of the models."""
    if "waiting" not in row:
        return [row["box"], row["state"], "", "", "", "", "", row["reason"]]
    met = row["attainment"]
    models = [*(f"↓{model}" for model in sorted(row["coming"])), *sorted(row["resident"])]
    return [
        row["box"], row["state"], row["waiting"], row["running"],
        f"{row['queue_age_seconds']:.1f} s", human(row["pool_free_bytes"]),
        "" if met is None else f"{met:.0%}", row["reason"] or " ".join(models),
    ]  # fmt: skip


def _fleet_dashboard(watch: BoxWatch | FrontWatch, readonly: bool, theme: str) -> None:
    with _textual():
        from tui.fleet.start import run  # Textual is an extra
    _needs_terminal()
    run(watch, key=own_key(), readonly=readonly, theme=theme)


@contextmanager
def _textual() -> Iterator[None]:
    """The dashboard is imported; its library may not be installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        fail(
            f"the dashboard needs {error.name}: install appliance[tui]; "
            "`appliance top --once` works without"
        )


def _needs_terminal() -> None:
    if not on_a_terminal():
        fail("the dashboard needs a terminal; `appliance top --once` does not", 2)


def _dashboard(
    url: str, readonly: bool, record: Path | None, replay: Path | None, theme: str
) -> None:
    with _textual():
        from tui.recording import NoRecording, NotRecorded
        from tui.start import run  # Textual is an extra
    _needs_terminal()
    key = os.environ.get(KEY_VARIABLE)
    try:
        run(url, key=key, readonly=readonly, record=record, replay=replay, theme=theme)
    except (NoRecording, NotRecorded) as error:
        fail(str(error), 2)


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
    for line in event_lines(response.iter_bytes()):
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
    text = "ready" if ready["ok"] else f"not ready: {'; '.join(ready['reasons'])}"
    click.echo(f"appliance {status['version']}, up {status['uptime_seconds']:.0f} s, {text}")
    for row in status["instances"]:
        if reason := row.get("quarantine"):
            click.echo(f"instance {row['instance']} is quarantined: {reason}")
    for row in status["models"]:
        if reason := row.get("failure"):
            click.echo(f"{row['model']} failed: {reason.splitlines()[0]}")
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
        "load_requested": model["load_requested"],
    }
    return ", ".join(mark for mark, holds in marks.items() if holds)
